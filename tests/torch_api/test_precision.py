"""Half precision: dtype of the state, master weights, stochastic rounding."""

import copy
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from oracles import CLOSE, FUSES, clones, movement_error, random_grads, random_params, run_pair, same, set_grads
from sampling import sampled

import torch_api
from bridge._ir.rounding import _stochastic_by_gap, random_bits, round_to_nearest, stochastic_round
from torch_api import optax_optimizers

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

HALF = [torch.bfloat16, torch.float16]
DRAWS = 4096


def named(params):
    return [(f"p{i}", p) for i, p in enumerate(params)]


# ------------------------------------------------------------------ stochastic_round


def numbers(dtype):
    """Return float32 numbers in the gaps of a half type: ordinary, subnormal, near powers of two, zeros, exact, the largest."""
    rng = np.random.default_rng(0)
    largest, tiny = (float(getattr(torch.finfo(dtype), name)) for name in ("max", "smallest_normal"))
    special = [0.0, -0.0, 1.0, -2.0, 1.9999, 2.0001, -0.99999, 1e-3, largest, -largest]
    if dtype is torch.float16:  # XLA's CPU code flushes float32's own subnormals, which bfloat16's are
        special += [tiny / 3, -tiny / 5, 2.0**-24 / 3, -(2.0**-24) / 7]
    return np.concatenate([special, rng.normal(size=64), 10.0 ** rng.uniform(-4, 4, 32)]).astype(np.float32)


def key(parameter, count=0):
    return jnp.asarray([parameter, count], jnp.int32)


def drawn(dtype, round_):
    x = numbers(dtype)
    name = str(dtype).removeprefix("torch.")
    keys = np.stack([np.full(DRAWS, 7), np.arange(DRAWS)], 1).astype(np.int32)  # the keys of one parameter at successive steps
    return x, np.asarray(jax.vmap(lambda key: round_(jnp.asarray(x), jnp.dtype(name), key))(keys).astype(jnp.float32))


def bias(x, results, dtype):
    """Return the distance of the mean from x, in standard errors of a rounding to one of its two neighbors."""
    near = torch.from_numpy(x).to(dtype)
    towards = torch.where(near.float() > torch.from_numpy(x), -torch.inf, torch.inf).to(dtype)
    gap = (torch.nextafter(near, towards).double() - near.double()).abs().nan_to_num(posinf=0.0).numpy()
    share = np.abs(x - near.double().numpy()) / np.where(gap > 0, gap, 1)
    error = gap * (np.sqrt(share * (1 - share) / DRAWS) + 1e-4)
    return np.abs(results.astype(np.float64).mean(0) - x) / np.where(error > 0, error, 1)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_stochastic_rounding_is_unbiased_between_the_two_neighbors(dtype):
    x, results = drawn(dtype, stochastic_round)
    assert bias(x, results, dtype).max() < 5
    near = torch.from_numpy(x).to(dtype)
    for column, number, closest in zip(results.T, x, near, strict=True):
        found = np.unique(column)
        assert len(found) <= 2
        assert float(closest) in found.tolist() or DRAWS * abs(number - float(closest)) < 50 * abs(float(closest))
        if len(found) == 2:
            middle = torch.nextafter(torch.tensor(found[0]).to(dtype), torch.tensor(torch.inf, dtype=dtype))
            assert found[0] < number < found[1] == float(middle)
        else:
            assert number == float(closest)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_statistic_detects_rounding_to_nearest_and_rounding_up(dtype):
    for broken in (
        lambda x, kind, key: x.astype(kind),
        lambda x, kind, key: stochastic_round(x + jnp.abs(x) * 1e-3, kind, key),
    ):
        x, results = drawn(dtype, broken)
        assert np.median(bias(x, results, dtype)) > 5


def pairs(draw):
    """Return pairs of draws that must be independent: adjacent ones, of successive steps, of parameters with similar keys."""
    first, later, other = draw(key(3, 5)), draw(key(3, 6)), draw(key(2, 5))
    return {
        "neighbours": (first[:-1], first[1:]),
        "steps": (first, later),
        "parameters": (first, other),
        "far": (first[: 1 << 15], first[1 << 15 :]),
    }


def dependence(a, b):
    """Return the chi-squared statistic of the 16x16 table of two columns of draws, in its standard deviations."""
    table = np.histogram2d(a, b, 16, [[0, 1], [0, 1]])[0]
    expected = len(a) / table.size
    return (((table - expected) ** 2 / expected).sum() - (table.size - 1)) / np.sqrt(2 * (table.size - 1))


def test_draws_are_uniform_and_independent():
    draw = jax.jit(lambda key: random_bits((1 << 16,), key).astype(jnp.float32) * jnp.float32(2.0**-32))
    assert max(dependence(*map(np.asarray, pair)) for pair in pairs(draw).values()) < 5
    assert 0 <= float(draw(key(0)).min()) < float(draw(key(0)).max()) < 1
    # The statistic detects a dropped word and unmixed positions.
    assert dependence(*map(np.asarray, pairs(lambda k: draw(k.at[1].set(0)))["steps"])) > 5
    assert dependence(*map(np.asarray, pairs(lambda k: jnp.arange(1 << 16) / (1 << 16))["neighbours"])) > 5


def test_overflow_and_nan_round_as_to_nearest():
    x = jnp.asarray([65519.0, 65520.0, 1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    results = stochastic_round(x, jnp.dtype("float16"), key(1))
    np.testing.assert_array_equal(np.asarray(results), np.asarray(x.astype(jnp.float16)))


def around_every_bfloat16():
    """Return numbers near every bfloat16: every sign and exponent, NaN, infinity and zeros, but no subnormals, which XLA flushes."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xC0DE, 0xFFFF], np.uint32)
    x = (upper[:, None] | low).reshape(-1).view(np.float32)
    quiet = ~np.isnan(x) | (x.view(np.uint32) & 0x400000 != 0)  # arithmetic gives only quiet NaN
    return x[quiet & ((x == 0) | ~(np.abs(x) < 2.0**-90))]  # a part of its gap must not be subnormal either


def test_bfloat16_rounding_by_integers_equals_rounding_by_arithmetic():
    x = around_every_bfloat16()
    for count in range(20):
        ours, theirs = jax.jit(
            lambda x, key: (stochastic_round(x, jnp.bfloat16, key), _stochastic_by_gap(x, jnp.bfloat16, random_bits(x.shape, key)))
        )(x, key(7, count))
        assert np.isnan(np.asarray(ours, np.float32)[np.isnan(x)]).all()
        ours, theirs = (np.asarray(y).view(np.uint16)[~np.isnan(x)] for y in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs)
        assert (ours != np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16)[~np.isnan(x)]).mean() > 0.1  # not plain rounding


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_to_nearest_equals_torchs(dtype):
    all_ = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = all_[all_.isfinite()].double().unique()
    if dtype is torch.bfloat16:  # XLA's CPU code flushes float32's own subnormals
        exact = exact[(exact == 0) | (exact.abs() >= torch.finfo(dtype).smallest_normal)]
    ties = (exact[1:] + exact[:-1]) / 2
    x = torch.cat(
        [exact, ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20), torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38])]
    ).float()
    if dtype is torch.bfloat16:
        x = x[~(x.abs() < torch.finfo(dtype).smallest_normal) | (x == 0)]
    ours = jax.jit(lambda x: round_to_nearest(x, jnp.dtype(str(dtype).removeprefix("torch."))))(x.numpy())
    np.testing.assert_array_equal(np.asarray(ours), x.to(dtype).float().numpy())


def casts_there_and_back(jaxpr):
    """Yield casts of a rounded value back to its wider dtype, which XLA may drop as if there were no rounding."""
    narrowed = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            (x,), (y,) = eqn.invars, eqn.outvars
            if x.aval.dtype.itemsize > y.aval.dtype.itemsize:
                narrowed.add(y)
            elif x in narrowed:
                yield eqn


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiler_cannot_drop_a_rounding(dtype):
    trace = lambda f: list(casts_there_and_back(jax.make_jaxpr(f)(jnp.ones(4)).jaxpr))  # noqa: E731
    assert trace(lambda x: x.astype(dtype).astype(jnp.float32))
    assert not trace(lambda x: round_to_nearest(x, jnp.dtype(dtype)))
    assert not trace(lambda x: stochastic_round(x, jnp.dtype(dtype), key(0)))


# ------------------------------------------------------------------ stochastic_rounding=True


def creep(dtype, steps=400, **options):
    """Take steps that are each a hundredth of the parameter's precision; return the total movement."""
    p = torch.nn.Parameter(torch.ones(2000, dtype=dtype))
    size = float(torch.finfo(dtype).eps) / 100
    optimizer = torch_api.MaskedSGD([("p", p)], lr=size, **options)
    for _ in range(steps):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    return float(p.detach().double().mean() - 1) / (steps * size), p.detach()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tiny_steps_add_up_on_average(dtype):
    way, p = creep(dtype, stochastic_rounding=True)
    assert abs(way - 1) < 0.05  # 2000 elements, each the sum of 400 draws
    assert len(p.unique()) > 5
    stalled, _ = creep(dtype)
    assert stalled == 0
    exact, _ = creep(dtype, master_weights=True)
    assert abs(exact - 1) < 0.3  # rounded to nearest once, at the end


def test_seed_determines_rounding_and_parameters_are_independent():
    def run(seed):
        params = [torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = torch_api.MaskedSGD(named(params), lr=1e-4, stochastic_rounding=True, rounding_seed=seed)
        for _ in range(5):
            set_grads(params, [torch.ones_like(p) for p in params])
            optimizer.step()
        return [p.detach().clone() for p in params]

    first = run(1)
    assert same(first, run(1))
    assert not same(first, run(2))
    assert not torch.equal(*first)
    assert all(2 < int((p != 1).sum()) < 498 for p in first)


def test_float32_parameters_are_not_rounded():
    params = random_params()
    plain = clones(params)
    ours = torch_api.MaskedAdam(params, stochastic_rounding=True, master_weights=False)
    run_pair(ours, params, torch_api.MaskedAdam(plain), plain, 5)
    assert same(params, plain)
    assert "rounding_key" not in ours.state[params[0]]


# ------------------------------------------------------------------ master_weights=True

MAKERS = {
    "adam": lambda params, **kw: torch_api.MaskedAdam(named(params), lr=1e-4, **kw),
    "sgd": lambda params, **kw: torch_api.MaskedSGD(named(params), lr=1e-4, **kw),
    "factory": lambda params, **kw: torch_api.OptaxOptimizer(named(params), optax.lion, lr=1e-5, **kw),
    "shaped": lambda params, **kw: torch_api.OptaxOptimizer(named(params), optax.lamb, lr=1e-4, **kw),
    "together": lambda params, **kw: torch_api.OptaxOptimizer(
        named(params), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4)), **kw
    ),
    "partitioned": lambda params, **kw: torch_api.PartitionedOptimizer(
        named(params), {"a": (optax.adamw, {"lr": 1e-4}), "b": optax.sgd(1e-4)}, [("p0", "a"), ("*", "b")], **kw
    ),
}


TORCHS = (MAKERS["adam"], MAKERS["sgd"])


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", sampled(MAKERS.values(), MAKERS))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_master_is_trained_in_float32_and_the_parameter_is_its_rounding(make, dtype):
    params = random_params(dtype, scale=1.0)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    start = clones(wide)
    ours, theirs = make(params, master_weights=True, state_dtype=torch.float32), make(wide)
    for _ in range(20):
        grads = [g.to(dtype) for g in random_grads(wide)]
        set_grads(params, grads)
        set_grads(wide, [g.float() for g in grads])
        ours.step(), theirs.step()
    for p, w, s in zip(params, wide, start, strict=True):
        master = ours.state[p]["master_param"]
        assert master.dtype == torch.float32
        assert movement_error(master, w, s) < (1e-5 if make in TORCHS else max(1e-5, CLOSE))
        assert torch.equal(p.detach(), master.to(dtype))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("options", [{"master_weights": True}, {"stochastic_rounding": True}], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_resumed_run_with_master_weights_continues_exactly(make, options):
    params = random_params(torch.bfloat16)
    grads = [random_grads(params) for _ in range(8)]
    optimizer = make(params, **options)
    for given in grads[:4]:
        set_grads(params, given)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = clones(params)
    resumed = make(copies, **options)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(optimizer)
    copied_params = [p for group in copied.param_groups for p in group["params"]]
    for given in grads[4:]:
        for opt, own in ((optimizer, params), (resumed, copies)):
            set_grads(own, given)
            opt.step()
        order = {id(p): g for p, g in zip(params, given, strict=True)}
        inner = [p for group in optimizer.param_groups for p in group["params"]]
        set_grads(copied_params, [order[id(p)] for p in inner])
        copied.step()
    assert same(params, copies)
    assert same([p for group in optimizer.param_groups for p in group["params"]], copied_params)
    field = "master_param" if "master_weights" in options else "rounding_key"
    assert same(pickle.loads(pickle.dumps([optimizer.state[p][field] for p in params])), [optimizer.state[p][field] for p in params])
    assert same([optimizer.state[p][field] for p in params], [resumed.state[p][field] for p in copies])


def test_training_continues_from_a_parameter_written_by_hand():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch_api.MaskedSGD([p], lr=1e-3, master_weights=True)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    with torch.no_grad():
        p[:2] = 5.0
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["master_param"].tolist() == pytest.approx([4.999, 4.999, 0.997, 0.997], abs=1e-6)


def test_missing_master_weights_start_at_the_parameter():
    params = random_params(torch.bfloat16)
    plain = torch_api.MaskedAdam(named(params))
    set_grads(params, random_grads(params))
    plain.step()
    copies = clones(params)
    optimizer = torch_api.MaskedAdam(named(copies), lr=0.0, master_weights=True)
    optimizer.load_state_dict(plain.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    set_grads(copies, random_grads(copies))
    optimizer.step()
    assert same([optimizer.state[p]["master_param"] for p in copies], [p.detach().float() for p in params])
    back = torch_api.MaskedAdam(named(clones(params)))
    back.load_state_dict(optimizer.state_dict())  # an optimizer without master weights leaves them out
    assert all("master_param" not in state for state in back.state.values())


def test_frozen_and_element_masked_parameters_have_no_auxiliary_state():
    params = random_params(torch.bfloat16)
    rows = torch.zeros(7, 5, dtype=torch.bool)
    rows[2] = True
    start = clones(params)
    optimizer = torch_api.MaskedAdam(named(params), master_weights=True, ema_decay=0.9, mask={"p0": rows, "p1": True})
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    assert [bool(optimizer.state.get(p)) for p in params] == [True, True, False, False, False, False]
    assert same(params[2:], start[2:])
    for value in (params[0].detach(), optimizer.state[params[0]]["master_param"], optimizer.state[params[0]]["ema_param"]):
        assert torch.equal(value[~rows], start[0].detach()[~rows].to(value.dtype))
        assert not torch.equal(value[rows], start[0].detach()[rows].to(value.dtype))


# ------------------------------------------------------------------ state_dtype


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", [MAKERS["adam"], MAKERS["factory"], MAKERS["together"]], ids=["adam", "factory", "together"])
@pytest.mark.parametrize(("dtype", "state"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_moments_have_the_requested_dtype(make, dtype, state):
    params = random_params(dtype)
    optimizer = make(params, state_dtype=state)
    for _ in range(3):
        set_grads(params, random_grads(params))
        optimizer.step()
    moments = [(p, t) for p in params for t in optimizer.state[p].values() if t.shape == p.shape and t.is_floating_point() and p.ndim]
    assert moments
    assert all(t.dtype == state for _, t in moments)
    again = make(clones(params))
    again.load_state_dict(optimizer.state_dict())
    resumed = make(clones(params), state_dtype=state)
    resumed.load_state_dict(again.state_dict())  # the dtype may differ from the saved one
    assert all(t.dtype == state for s in resumed.state.values() for t in s.values() if t.ndim and t.is_floating_point())


def test_complex_state_keeps_its_dtype():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch_api.MaskedAdam([p], state_dtype=torch.bfloat16)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.complex64


def test_float32_moments_of_half_parameters_follow_float32_more_closely():
    errors = {}
    for state in (None, torch.float32):
        torch.manual_seed(3)
        params = random_params(torch.bfloat16, scale=0.0)
        wide = [torch.nn.Parameter(p.detach().float()) for p in params]
        ours = torch_api.MaskedAdam(params, lr=1e-3, betas=(0.9, 0.999), state_dtype=state, master_weights=True)
        theirs = torch.optim.Adam(wide, lr=1e-3)
        for _ in range(60):
            grads = [g.to(torch.bfloat16) for g in random_grads(wide)]
            set_grads(params, grads), set_grads(wide, [g.float() for g in grads])
            ours.step(), theirs.step()
        masters = [ours.state[p]["master_param"] for p in params]
        errors[state] = max(movement_error(m, w, torch.zeros_like(w)) for m, w in zip(masters, wide, strict=True))
    assert errors[torch.float32] < 1e-5
    assert errors[None] > 1e-3  # bfloat16 loses (1 - beta2) * g * g next to a moment 256 times as large


def drop_in(name, params):
    cls = getattr(torch_api, name)
    return cls(params, lr=1e-3) if name in FROM_OPTAX else cls(params)


DROP_IN = sorted(name for name in torch_api.__all__ if name.startswith("Masked"))
FROM_OPTAX = [name for name in DROP_IN if getattr(torch_api, name).__module__ == optax_optimizers.__name__]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", DROP_IN)
def test_float16_with_zero_gradient_stays_finite(name):
    p = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float16))
    optimizer = drop_in(name, [p])
    for value in (0.0, 0.0, 1e-4, 0.0):
        p.grad = torch.full_like(p, value)
        optimizer.step()
        assert torch.isfinite(p).all()
        assert all(torch.isfinite(t).all() for t in optimizer.state[p].values() if t.is_floating_point())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DROP_IN if name not in FROM_OPTAX and hasattr(torch.optim, name.removeprefix("Masked"))])
def test_every_drop_in_trains_master_weights_as_torch_trains_float32(name):
    theirs_class, options = getattr(torch.optim, name.removeprefix("Masked")), {"eps": (1e-7, 1e-3)} if name == "MaskedAdafactor" else {}
    params = random_params(torch.bfloat16, shapes=[(4, 6), (8, 3)], scale=1.0)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    start = clones(wide)
    ours = getattr(torch_api, name)(params, master_weights=True, state_dtype=torch.float32, **options)
    theirs = theirs_class(wide, **options)
    for _ in range(20):
        grads = [g.to(torch.bfloat16) for g in random_grads(wide)]
        set_grads(params, grads)
        set_grads(wide, [g.float() for g in grads])
        ours.step(), theirs.step()
    for p, w, s in zip(params, wide, start, strict=True):
        assert movement_error(ours.state[p]["master_param"], w, s) < 1e-5
        assert torch.equal(p.detach(), ours.state[p]["master_param"].bfloat16())


@FUSES
@pytest.mark.parametrize("options", [{}, {"master_weights": True}], ids=["moments", "moments and master"])
def test_float32_aux_state_of_a_half_parameter_costs_few_bytes(options):
    p = torch.nn.Parameter(torch.zeros(65536, dtype=torch.bfloat16))
    optimizer = torch_api.MaskedAdamW([p], state_dtype=torch.float32, **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.bytes_accessed() < (60 if options else 40) * p.numel()  # more if the float32 parameter were evaluated separately


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"state_dtype": torch.int32}, r"MaskedAdam: state_dtype is torch.int32; expected a floating torch.dtype, or None"),
        ({"state_dtype": "float32"}, r"state_dtype is 'float32'; expected a floating torch.dtype"),
        ({"master_weights": 1}, r"master_weights is 1; expected True or False"),
        ({"rounding_seed": -1}, r"rounding_seed is -1; expected an integer, 0 or more"),
        ({"ema_decay": 1.0}, r"ema_decay is 1.0; expected a number from 0 to below 1, or None"),
        ({"master_weights": True, "stochastic_rounding": True}, r"both asked for.*expected one of them"),
        ({"max_grad_norm": 0}, r"max_grad_norm is 0; expected a positive number"),
    ],
)
def test_invalid_options_raise(options, text):
    with pytest.raises(ValueError, match=text):
        torch_api.MaskedAdam(random_params(), **options)
