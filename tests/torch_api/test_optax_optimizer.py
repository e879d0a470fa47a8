"""`OptaxOptimizer`: numbers of pure JAX, compilations, user tensors, checkpoints."""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optax_cases import (
    SHAPES,
    STEPS,
    as_jax,
    as_torch,
    compiled,
    draw,
    draw_grads,
    errors,
    nest,
    pure,
    run,
    same,
    saved,
    snap,
    states,
    twin,
)
from oracles import CLOSE
from sampling import sampled

import bridge
import torch_api
from bridge._process import x64

PREFIX = {"a": True, "b": False, "s": True}


pytestmark = [pytest.mark.long, pytest.mark.unoptimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def make(params, tx, **options):
    return torch_api.OptaxOptimizer(list(params.items()), tx, **options)


def matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


NAN_AT = (3, 7, 8)
TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
    "lion": lambda: optax.lion(0.05, weight_decay=0.1),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.05), 5),
    "masked by callable": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(0.05, momentum=0.9)),
    "masked by prefix": lambda: optax.chain(optax.masked(optax.adam(0.05), PREFIX)),
    "masked twice": lambda: optax.masked(optax.masked(optax.trace(0.9), matrices), {"a": True, "b": {"weight": True}, "s": False}),
    "flatten": lambda: optax.flatten(optax.adam(0.05)),
    "partition": lambda: optax.partition({"x": optax.adam(0.05), "y": optax.sgd(0.05)}, {"a": "x", "b": "y", "s": "x"}),
    "start point in the state": lambda: optax.contrib.dog(1.0),
}


@pytest.mark.parametrize("name", sampled(TRANSFORMATIONS))
def test_ready_transformation_moves_as_in_pure_jax_and_resumes_exactly(name):
    params = draw()
    start, grads, tx = snap(params), draw_grads(params), TRANSFORMATIONS[name]()
    for i in NAN_AT if name == "apply_if_finite" else ():
        grads[i]["a.weight"][0, 0] = float("nan")
    opt = make(params, tx)
    run(opt, params, grads[:11])
    again = twin(params)
    other = make(again, tx)
    other.load_state_dict(saved(opt))
    run(opt, params, grads[11:])
    run(other, again, grads[11:])
    expected, _ = pure(tx, start, grads)
    assert max(errors(params, expected, start).values()) < CLOSE
    assert same(params, again)
    assert same(states(opt, params), states(other, again))


def test_comparison_detects_a_slightly_wrong_beta():
    start = snap(draw())
    grads = draw_grads(start)
    right, wrong = (pure(optax.adam(0.05, b2=b2), start, grads)[0] for b2 in (0.999, 0.99))
    assert min(errors(wrong, right, start).values()) > 1e-4


def test_lookahead_trains_fast_weights_and_keeps_slow_weights():
    params = draw()
    start, grads, tx = snap(params), draw_grads(params), optax.lookahead(optax.sgd(0.1), 5, 0.5)
    run(make(params, tx), params, grads)
    tree = optax.LookaheadParams.init_synced(as_jax(start))
    state, update = tx.init(tree), jax.jit(tx.update)
    for g in grads:
        updates, state = update(as_jax(g), state, tree)
        tree = optax.apply_updates(tree, updates)
    assert max(errors(params, as_torch(tree.fast), start).values()) < CLOSE


def test_layouts_views_and_small_leaves_move_as_in_pure_jax():
    base = torch.randn(20)
    params = {
        "conv": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "view": base[2:8].view(2, 3),
        "strided": base[8:20:2],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0.3),
        "one": torch.tensor([0.3]),
    }
    params = {k: torch.nn.Parameter(v) for k, v in params.items()}
    start, grads, whole = snap(params), draw_grads(params), base.clone()
    strides = {k: p.stride() for k, p in params.items()}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05, weight_decay=0.1))
    run(make(params, tx), params, grads)
    expected, _ = pure(tx, start, grads)
    assert max(v for k, v in errors(params, expected, start).items() if k != "empty") < CLOSE
    assert strides == {k: p.stride() for k, p in params.items()}
    assert torch.equal(base[2:8].view(2, 3), params["view"])
    assert torch.equal(base[8:20:2], params["strided"])
    assert torch.equal(base[9::2], whole[9::2])
    assert torch.equal(base[:2], whole[:2])


def test_float64_is_kept_and_the_global_flag_is_unchanged():
    params = draw(dtype=torch.float64)
    start, grads, tx = snap(params), draw_grads(params), optax.adamw(0.05, weight_decay=0.1)
    opt = make(params, tx)
    run(opt, params, grads)
    with x64():
        expected, _ = pure(tx, start, grads)
    assert max(errors(params, expected, start).values()) < 1e-12
    assert opt.state[params["s"]]["mu"].dtype == torch.float64
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
def test_half_types_compute_in_float32_and_round_once():
    kinds = {"a": (torch.bfloat16, jnp.bfloat16), "b": (torch.float16, jnp.float16), "s": (torch.float16, jnp.float16)}
    params = {k: torch.nn.Parameter(p.detach().to(kinds[k[0]][0])) for k, p in draw().items()}
    start, grads, tx = snap(params), draw_grads(params), optax.adamw(0.05, weight_decay=0.1, eps=1e-4)
    wide = lambda named: {k: v.float() for k, v in named.items()}  # noqa: E731
    tree = as_jax(wide(start))
    state, update = tx.init(tree), jax.jit(tx.update)

    def rounded(path, x):
        kind = next((kinds[key.key[0]][1] for key in path if isinstance(key, jax.tree_util.DictKey)), x.dtype)
        return x.astype(kind).astype(x.dtype)

    opt = make(params, tx)
    for g in grads:
        run(opt, params, [g])
        updates, state = update(as_jax(wide(g)), state, tree)
        tree, state = jax.tree_util.tree_map_with_path(rounded, (optax.apply_updates(tree, updates), state))
    assert max(errors(params, as_torch(tree), wide(start)).values()) < 1e-2
    before = snap(params)
    opt.state.clear()
    run(opt, params, [{k: torch.zeros_like(p) for k, p in params.items()}])
    expected = {k: (1 - 0.05 * 0.1) * v.float() for k, v in before.items()}  # only decay acts: 0 / eps gives no NaN
    assert all(torch.allclose(params[k].float(), expected[k], rtol=2.0**-8) for k in params)


def test_float32_moments_of_bfloat16_survive_a_checkpoint():
    params, tx = draw(dtype=torch.bfloat16), optax.adamw(0.05, mu_dtype=jnp.float32)
    grads = draw_grads(params, 8)
    opt = make(params, tx)
    run(opt, params, grads[:4])
    assert opt.state[params["s"]]["mu"].dtype == torch.float32
    again = twin(params)
    other = make(again, tx)
    other.load_state_dict(saved(opt))
    assert same(states(opt, params), states(other, again))
    assert other.state[again["s"]]["mu"].dtype == torch.float32
    run(opt, params, grads[4:])
    run(other, again, grads[4:])
    assert same(params, again)


def test_complex_and_real_parameters_move_as_in_torch():
    params = {"z": torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64)), "r": torch.nn.Parameter(torch.randn(3))}
    theirs, start = twin(params), snap(params)
    grads = [{k: torch.randn_like(p) for k, p in params.items()} for _ in range(STEPS)]
    run(make(params, optax.sgd(0.05, momentum=0.9)), params, grads)
    run(torch.optim.SGD(theirs.values(), 0.05, momentum=0.9), theirs, grads)
    assert max(errors(params, theirs, start).values()) < CLOSE


def test_factory_hyperparams_are_in_the_groups_and_compile_nothing():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = make(params, optax.adamw, lr=0.05, b1=0.8, weight_decay=0.1)
    group = opt.param_groups[0]
    assert {"lr": 0.05, "b1": 0.8, "weight_decay": 0.1}.items() <= group.items()
    assert "learning_rate" not in group
    run(opt, params, grads[:1])
    before = compiled()
    for i, g in enumerate(grads[1:]):
        group.update(b1=0.8 + i / 100, weight_decay=i, eps=10.0**-i, b2=torch.tensor(0.99), eps_root=1e-9 * i)
        group["lr"] = [0, 1, 0.1, np.float32(0.1), torch.tensor(0.1)][i % 5]
        run(opt, params, [g])
    assert compiled() == before
    group.update(b1=0.8, weight_decay=0.1, eps=1e-8, b2=0.999, eps_root=0.0, lr=0.05)
    opt.state.clear()
    with torch.no_grad():
        for k, p in params.items():
            p.copy_(start[k])
    run(opt, params, grads)
    expected, _ = pure(optax.adamw(0.05, b1=0.8, weight_decay=0.1), start, grads)
    assert max(errors(params, expected, start).values()) < CLOSE
    assert compiled() == before


def test_lr_multiplies_the_schedule_of_a_factory():
    params = draw()
    start, grads, schedule = snap(params), draw_grads(params), optax.linear_schedule(0.2, 0.0, STEPS)
    opt = make(params, optax.adamw, lr=schedule)
    assert opt.param_groups[0]["lr"] == 1.0
    opt.param_groups[0]["lr"] = 0.5
    run(opt, params, grads)
    expected, _ = pure(optax.adamw(lambda n: 0.5 * schedule(n)), start, grads)
    assert max(errors(params, expected, start).values()) < CLOSE


@pytest.mark.parametrize("tx", [optax.adamw(0.05, weight_decay=0.1), optax.MultiSteps(optax.sgd(0.1), 1)])
@pytest.mark.parametrize("zero", [0, 0.0])
def test_lr_0_of_a_ready_transformation_changes_nothing_even_with_nan(tx, zero):
    params = draw()
    with torch.no_grad():
        params["a.bias"].copy_(torch.tensor([float("inf"), -0.0, float("nan")]))
    opt, start = make(params, tx), {k: p.detach().clone().reshape(-1).view(torch.uint8) for k, p in params.items()}
    opt.param_groups[0]["lr"] = zero
    run(opt, params, [{k: torch.full_like(p, float("nan")) for k, p in params.items()}, *draw_grads(params, 2)])
    assert same({k: p.detach().reshape(-1).view(torch.uint8) for k, p in params.items()}, start)


def test_lr_0_keeps_subnormal_numbers():
    params = {"w": torch.nn.Parameter(torch.tensor([1e-40, 1.0, 2.0]))}
    opt, start = make(params, optax.adamw(0.05, weight_decay=0.1)), snap(params)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, draw_grads(params, 1))
    assert same(params, start)


def test_torch_schedulers_drive_a_ready_transformation_and_compile_nothing():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = make(params, optax.sgd(0.05))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.9**i)
    run(opt, params, grads[:1])
    before = compiled()
    for g in grads[1:]:
        schedule.step()
        run(opt, params, [g])
    assert compiled() == before
    expected = {k: v.double() - sum(0.05 * 0.9**i * g[k].double() for i, g in enumerate(grads)) for k, v in start.items()}
    assert max(errors(params, expected, start).values()) < CLOSE
    torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=5, cycle_momentum=False).step()
    assert opt.param_groups[0]["lr"] != 1.0


def test_groups_of_a_ready_transformation_share_the_norm_and_have_own_lrs():
    params = draw()
    start, grads, names = snap(params), draw_grads(params), list(params)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))
    groups = [{"params": [(k, params[k]) for k in names[:2]], "lr": 0.5}, {"params": [(k, params[k]) for k in names[2:]]}]
    run(torch_api.OptaxOptimizer(groups, tx), params, grads)
    full, _ = pure(tx, start, grads)
    expected = {k: start[k].double() + (0.5 if k in names[:2] else 1.0) * (full[k].double() - start[k]) for k in names}
    assert max(errors(params, expected, start).values()) < 2e-6  # the expected midpoint has only float32 precision


@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient")
def test_parameters_without_gradient_do_not_change():
    params = draw()
    start, grads, rng = snap(params), draw_grads(params, 24), np.random.default_rng(1)
    subsets = [{k for k in params if rng.random() < 0.5} for _ in range(3)] + [{"a.weight"}, set(params), set()]
    opt, seen, given = make(params, optax.adam(0.05)), None, {k: [] for k in params}
    for i, g in enumerate(grads):
        live = subsets[i % len(subsets)]
        before, state = snap(params), states(opt, params)
        run(opt, params, [{k: g[k] for k in live}])
        for k in params.keys() - live:
            assert torch.equal(params[k], before[k])
        assert all(torch.equal(v, state[key]) for key, v in states(opt, params).items() if key[0] not in live)
        assert all(key in states(opt, params) for key in state)
        for k in live:
            given[k].append({k: g[k]})
        seen = compiled() if i == len(subsets) - 1 else seen
    assert compiled() == seen
    for k in params:
        assert opt.state[params[k]]["count"] == len(given[k])
        assert errors({k: params[k]}, pure(optax.adam(0.05), {k: start[k]}, given[k])[0], start)[k] < CLOSE


@pytest.mark.parametrize("name", ["masked by prefix", "partition", "MultiSteps"])
def test_missing_gradient_is_allowed_for_every_tree_of_a_transformation(name):
    params = draw()
    opt, grads = make(params, TRANSFORMATIONS[name]()), draw_grads(params, 6)
    run(opt, params, grads[:2])
    before = snap(params)
    run(opt, params, [{k: v for k, v in g.items() if k in ("a.weight", "s")} for g in grads[2:]])
    assert torch.equal(before["b.weight"], params["b.weight"])
    assert torch.equal(before["a.bias"], params["a.bias"])
    assert not torch.equal(before["a.weight"], params["a.weight"])


SELECTED = {
    "freeze": lambda: optax.chain(optax.adam(0.05), bridge.freeze(frozen="b.*")),
    "select": lambda: bridge.select(optax.adam(0.05), "a.*"),
    "partition": lambda: bridge.partition({"x": optax.adam(0.05), "y": optax.set_to_zero()}, [("a.*", "x"), ("*", "y")]),
}


@pytest.mark.parametrize("name", SELECTED)
def test_bridge_transformations_with_selectors_see_all_names(name):
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = make(params, SELECTED[name]())
    for g in grads:
        g["b.weight"].fill_(float("nan"))
    run(opt, params, grads)
    assert torch.equal(start["b.weight"], params["b.weight"])
    ours = {k: params[k] for k in ("a.weight", "a.bias")}
    expected, _ = pure(optax.adam(0.05), {k: start[k] for k in ours}, [{k: g[k] for k in ours} for g in grads])
    assert max(errors(ours, expected, start).values()) < CLOSE
    run(opt, params, [{"a.weight": grads[0]["a.weight"]}])


def test_frozen_parameters_cost_nothing_and_are_not_read():
    moved, tx = [], optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
    for size in (None, 3, 200):
        params = draw({"a.weight": (4, 3), "a.bias": (3,)} | ({"big": (size, size)} if size else {}))
        start, grads = snap(params), draw_grads(params)
        for g in grads if size else ():
            g["big"].fill_(float("nan"))
        opt = make(params, tx, mask="a.*")
        run(opt, params, grads)
        moved.append(opt.bytes_accessed())
        live = {k: start[k] for k in ("a.weight", "a.bias")}
        expected, _ = pure(tx, live, [{k: g[k] for k in live} for g in grads])
        assert max(errors({k: params[k] for k in live}, expected, start).values()) < CLOSE
        if size:
            assert torch.equal(params["big"], start["big"])
            assert not opt.state.get(params["big"])
    assert moved[0] > 0
    assert len(set(moved)) == 1, moved


def test_element_mask_keeps_frozen_bits_and_the_norm():
    params = draw()
    with torch.no_grad():
        params["a.weight"][0] = torch.tensor([1e-40, float("nan"), -0.0])
    start, grads, mask = snap(params), draw_grads(params), torch.zeros(4, 3, dtype=torch.bool)
    mask[1], mask[2, 0] = True, True
    for g in grads:
        g["a.weight"][~mask] = float("nan")
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05, weight_decay=0.1))
    run(make(params, tx, mask={"a.weight": mask, "a.bias": True}), params, grads)
    bits = lambda x: x.detach()[~mask].view(torch.int32)  # noqa: E731
    assert torch.equal(bits(params["a.weight"]), bits(start["a.weight"]))
    assert torch.equal(params["s"], start["s"])
    live = {"w": start["a.weight"][mask], "bias": start["a.bias"]}
    expected, _ = pure(tx, live, [{"w": g["a.weight"][mask], "bias": g["a.bias"]} for g in grads])
    assert max(errors({"w": params["a.weight"][mask], "bias": params["a.bias"]}, expected, live).values()) < CLOSE


def test_state_is_per_parameter_and_named_after_the_fields():
    params = draw()
    start, grads = snap(params), draw_grads(params, 3)
    opt = make(params, optax.adam(0.05))
    assert not opt.state_dict()["state"]
    run(opt, params, grads)
    _, (adam, _) = pure(optax.adam(0.05), start, grads)
    for k, p in params.items():
        state = opt.state[p]
        assert set(state) == {"count", "mu", "nu"}
        assert state["count"] == 3
        assert state["mu"].shape == p.shape
        assert torch.allclose(state["mu"], as_torch(adam.mu)[k], rtol=1e-6)
        assert torch.allclose(state["nu"], as_torch(adam.nu)[k], rtol=1e-6)


def test_checkpoint_matches_parameters_by_name():
    params = draw()
    opt, grads = make(params, optax.adam, lr=0.05), draw_grads(params, 6)
    run(opt, params, [{k: v for k, v in g.items() if k != "s"} for g in grads[:3]])
    again = twin(params, reversed)
    other = make(again, optax.adam, lr=0.9)
    run(other, again, grads[:1])
    with torch.no_grad():
        for k, p in again.items():
            p.copy_(params[k])
    other.load_state_dict(saved(opt))
    assert other.param_groups[0]["lr"] == 0.05
    run(opt, params, grads[3:])
    run(other, again, grads[3:])
    assert same(params, again)
    assert opt.state[params["s"]]["count"] == other.state[again["s"]]["count"] == 3


def test_hyperparams_of_a_group_are_matched_by_its_names():
    def grouped(params, order):
        groups = {"first": (("a.weight", "a.bias"), 0.1), "second": (("b.weight", "s"), 0.2)}
        given = [{"params": [(k, params[k]) for k in groups[name][0]], "lr": groups[name][1]} for name in order]
        return torch_api.OptaxOptimizer(given, optax.adam, lr=1.0)

    params = draw()
    opt, grads = grouped(params, ["first", "second"]), draw_grads(params, 4)
    run(opt, params, grads[:2])
    again = twin(params)
    other = grouped(again, ["second", "first"])
    other.load_state_dict(saved(opt))
    assert [g["lr"] for g in other.param_groups] == [0.2, 0.1]
    run(opt, params, grads[2:])
    run(other, again, grads[2:])
    assert same(params, again)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1), optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(0.1))])
def test_models_with_equal_names_are_trained_separately_or_refused(tx):
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))  # as in [*g.named_parameters(), *d.named_parameters()]
    one.grad, two.grad = torch.ones(2), -torch.ones(2)
    try:
        opt = torch_api.OptaxOptimizer([("weight", one), ("weight", two)], tx)
    except ValueError as error:
        assert "'weight'" in str(error)  # noqa: PT017 - torch.optim takes them, so both answers are honest
        return
    opt.step()
    assert one.tolist() == pytest.approx([-0.1, -0.1], abs=1e-6)
    assert two.tolist() == pytest.approx([0.1, 0.1], abs=1e-6)


def broken_checkpoints():
    yield "shape", lambda d: d["state"][0].update(mu=torch.zeros(2, 2)), "mu"
    yield "missing field", lambda d: d["state"][0].pop("mu"), "mu"
    yield "foreign field", lambda d: d["state"][0].update(momentum_buffer=torch.zeros(4, 3)), "momentum_buffer"
    yield "groups", lambda d: d["param_groups"].append(copy.deepcopy(d["param_groups"][0])), "groups"
    yield "parameters", lambda d: d["param_groups"][0]["params"].pop(), "param"
    yield "no state", lambda d: d.pop("state"), "state"


@pytest.mark.parametrize(("damage", "word"), [pytest.param(f, word, id=name) for name, f, word in broken_checkpoints()])
def test_wrong_checkpoint_raises_and_changes_nothing(damage, word):
    params = draw()
    opt, grads = make(params, optax.adam(0.05)), draw_grads(params, 4)
    run(opt, params, grads[:2])
    wrong, before, state = copy.deepcopy(opt.state_dict()), snap(params), states(opt, params)
    damage(wrong)
    with pytest.raises(ValueError, match=rf"load_state_dict: .*{word}"):
        opt.load_state_dict(wrong)
    assert same(params, before)
    assert same(states(opt, params), state)


def test_checkpoint_of_another_transformation_raises():
    params = draw()
    adam = make(params, optax.adam(0.05))
    run(adam, params, draw_grads(params, 1))
    for tx in (optax.chain(optax.adam(0.05), optax.trace(0.9)), optax.lion(0.05)):
        with pytest.raises(ValueError, match="nu"):
            make(draw(), tx).load_state_dict(adam.state_dict())


def test_loading_and_copying_add_no_key_to_the_groups():
    opt = make(draw(), optax.lion, lr=0.05)
    saved = opt.state_dict()
    for _ in range(2):
        opt.load_state_dict(saved)
        assert opt.state_dict() == copy.deepcopy(opt).state_dict() == saved


def test_deepcopy_is_independent():
    module = torch.nn.Linear(3, 2)
    opt = torch_api.OptaxOptimizer(module.named_parameters(), optax.adam(0.05))
    run(opt, dict(module.named_parameters()), draw_grads(dict(module.named_parameters()), 1))
    again, other = copy.deepcopy((module, opt))
    grads, before = draw_grads(dict(module.named_parameters()), 3, seed=5), snap(dict(module.named_parameters()))
    run(other, dict(again.named_parameters()), grads)
    assert same(dict(module.named_parameters()), before)
    run(opt, dict(module.named_parameters()), grads)
    assert same(dict(module.named_parameters()), dict(again.named_parameters()))


def test_added_group_has_its_own_step_count():
    params = draw()
    start, grads, first = snap(params), draw_grads(params, seed=2), ("a.weight", "a.bias")
    opt = make({k: params[k] for k in first}, optax.adam, lr=0.05)
    run(opt, {k: params[k] for k in first}, grads[:5])
    opt.add_param_group({"params": [(k, p) for k, p in params.items() if k not in first], "lr": 0.1})
    run(opt, params, grads[5:])
    for k in params:
        lr, given = (0.05, grads) if k in first else (0.1, grads[5:])
        assert errors({k: params[k]}, pure(optax.adam(lr), {k: start[k]}, [{k: g[k]} for g in given])[0], start)[k] < CLOSE


def test_set_trainable_reuses_programs_and_is_saved():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = make(params, optax.adam(0.05))
    run(opt, params, grads[:5])
    opt.set_trainable("a.*", False)
    before = snap(params)
    run(opt, params, grads[5:10])
    assert torch.equal(before["a.weight"], params["a.weight"])
    seen = compiled()
    opt.set_trainable("a.*", True)
    run(opt, params, grads[10:15])
    opt.set_trainable("a.*", False)
    run(opt, params, grads[15:])
    assert compiled() == seen
    given = [{"a.bias": g["a.bias"]} for g in grads[:5] + grads[10:15]]
    assert errors({"a.bias": params["a.bias"]}, pure(optax.adam(0.05), {"a.bias": start["a.bias"]}, given)[0], start)["a.bias"] < CLOSE
    again = twin(params)
    other = make(again, optax.adam(0.05))
    other.load_state_dict(saved(opt))
    run(other, again, grads[:1])
    assert torch.equal(again["a.weight"], params["a.weight"])
    opt.set_trainable("a.*", False, keep_state=False)
    assert not opt.state.get(params["a.weight"])


def test_group_flags_and_lr_scale_apply():
    params, names = {k: torch.nn.Parameter(torch.ones(v)) for k, v in SHAPES.items()}, list(SHAPES)
    ones = {k: torch.ones_like(p) for k, p in params.items()}
    groups = [{"params": [(k, params[k]) for k in names[:2]], "trainable": False}, {"params": [(k, params[k]) for k in names[2:]]}]
    opt = torch_api.OptaxOptimizer(groups, optax.adamw, lr=0.1, weight_decay=0.5, b1=0.0, b2=0.0, lr_scale=[("b.*", 0.5)])
    opt.param_groups[1]["wd_scale"] = 0.2
    run(opt, params, [ones])
    moved = {k: float(1 - p.detach().flatten()[0]) for k, p in params.items()}
    assert moved == pytest.approx({"a.weight": 0, "a.bias": 0, "b.weight": 0.5 * (0.1 + 0.01), "s": 0.1 + 0.01}, abs=1e-6)
    seen = compiled()
    opt.param_groups[1].update(lr_scale=0.0, wd_scale=3.0)
    before = snap(params)
    run(opt, params, [ones])
    assert compiled() == seen
    assert same(params, before)


@pytest.mark.parametrize("wrong", [{"a.weigt": 0.5}, {"a.weight": "x"}, {"a.weight": float("nan")}, {"a.weight": -1.0}])
def test_error_names_a_wrong_lr_scale(wrong):
    with pytest.raises(ValueError, match=r"lr_scale.*a.weig"):
        make(draw(), optax.sgd(0.1), lr_scale=wrong)


def test_layer_decay_scales_a_ready_transformation_under_a_scheduler():
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    opt = torch_api.OptaxOptimizer(module.named_parameters(), optax.sgd(0.1), lr_scale=torch_api.layer_decay(module, 0.5))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.1)
    params = dict(module.named_parameters())
    for factor in (1.0, 0.1):
        before = snap(params)
        run(opt, params, [{k: torch.ones_like(p) for k, p in params.items()}])
        moved = [float((before[f"{i}.bias"] - params[f"{i}.bias"]).detach()[0]) for i in range(3)]
        assert moved == pytest.approx([0.025 * factor, 0.05 * factor, 0.1 * factor], abs=1e-6)
        schedule.step()


@pytest.mark.parametrize("kind", ["learnig_rate", "b1", "momentun", "nothing", "twice"])
def test_error_names_unknown_and_missing_arguments(kind):
    params = list(draw().items())
    calls = {
        "learnig_rate": lambda: torch_api.OptaxOptimizer(params, optax.adamw, learnig_rate=0.1),
        "b1": lambda: torch_api.OptaxOptimizer(params, optax.adamw(0.1), b1=0.9),
        "momentun": lambda: torch_api.OptaxOptimizer([{"params": params, "momentun": 1}], optax.sgd, lr=0.1),
        "nothing": lambda: torch_api.OptaxOptimizer(params, optax.adamw),
        "twice": lambda: torch_api.OptaxOptimizer(params, optax.adamw, lr=0.1, learning_rate=0.1),
    }
    with pytest.raises(
        (TypeError, ValueError), match={"nothing": "needs 'learning_rate'", "twice": "learning_rate"}.get(kind, f"'{kind}'")
    ):
        calls[kind]()


def test_extra_arguments_of_any_number_type_share_a_program():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    tx = optax.chain(optax.polyak_sgd(max_learning_rate=0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))
    opt, values = make(params, tx), [torch.tensor(0.7), 0.7, np.float32(0.7), jnp.float32(0.7), torch.tensor(0.7, dtype=torch.float64)]
    run(opt, params, grads[:1], value=values[0])
    before = compiled()
    for i, g in enumerate(grads[1:]):
        run(opt, params, [g], value=values[i % len(values)])
    assert compiled() == before
    expected, _ = pure(tx, start, grads, value=jnp.float32(0.7))
    assert max(errors(params, expected, start).values()) < CLOSE
    still = snap(params)
    for missing in ({}, {"valu": 0.7}):
        with pytest.raises(TypeError, match="'value'"):
            run(opt, params, grads[:1], **missing)
        assert same(params, still)


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float64])
def test_extra_numbers_reach_float64_parameters_unrounded(kind):
    params = {"w": torch.nn.Parameter(torch.tensor([2.0, 1.0], dtype=torch.float64))}
    value = torch.tensor(1 / 3, dtype=torch.float64) if kind is torch.tensor else kind(1 / 3)
    run(make(params, optax.polyak_sgd(max_learning_rate=1.0)), params, [{"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}], value=value)
    assert params["w"].tolist() == pytest.approx([2 - 1 / 6, 1 - 1 / 6], abs=1e-14)


@pytest.mark.parametrize("nested", [False, True])
def test_extra_argument_trees_follow_masks_and_missing_gradients(nested):
    def update(grads, state, params=None, *, gain, **_):
        return jax.tree.map(lambda g, c: -c * g, grads, gain), state

    params = draw()
    opt = make(params, optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update), mask=[("b.*", False), ("*", True)])
    gain = {k: torch.tensor(float(i + 1)) for i, k in enumerate(params)}
    start, ones = snap(params), {k: torch.ones_like(p) for k, p in params.items()}
    run(opt, params, [ones, {k: v for k, v in ones.items() if k != "a.bias"}], gain=nest(gain) if nested else gain)
    moved = {k: float((start[k] - params[k]).detach().flatten()[0]) for k in params}
    assert moved == pytest.approx({"a.weight": 2.0, "a.bias": 2.0, "b.weight": 0.0, "s": 8.0}, abs=1e-5)


def quadratic():
    a = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    return a @ a.t() + torch.eye(6), torch.ones(6)


@pytest.mark.slow
def test_lbfgs_with_a_closure_matches_pure_jax():
    (a, b), x = quadratic(), torch.nn.Parameter(torch.zeros(6))
    opt = make({"x": x}, optax.lbfgs())

    def closure():
        opt.zero_grad()
        loss = 0.5 * x @ a @ x - b @ x
        loss.backward()
        return loss

    losses = [float(opt.step(closure).detach()) for _ in range(8)]
    ja, jb, tx, tree = jnp.asarray(a.numpy()), jnp.asarray(b.numpy()), optax.lbfgs(), {"x": jnp.zeros(6)}
    f = lambda p: 0.5 * p["x"] @ ja @ p["x"] - jb @ p["x"]  # noqa: E731
    state = tx.init(tree)

    @jax.jit
    def one(tree, state):
        value, grad = optax.value_and_grad_from_state(f)(tree, state=state)
        updates, state = tx.update(grad, state, tree, value=value, grad=grad, value_fn=f)
        return optax.apply_updates(tree, updates), state, value

    theirs = []
    for _ in range(8):
        tree, state, value = one(tree, state)
        theirs.append(float(value))
    assert losses == pytest.approx(theirs, abs=2e-6)
    assert losses[-1] < -0.93
    assert errors({"x": x}, as_torch(tree), {"x": torch.zeros(6)})["x"] < 1e-4  # rounding errors grow with each line search


@pytest.mark.slow
@pytest.mark.parametrize("calls_before", [0, 1])
def test_closure_that_raises_in_the_line_search_changes_nothing(calls_before):
    x = torch.nn.Parameter(torch.full((3,), 2.0))
    opt, left = make({"x": x}, optax.lbfgs()), [10**6]

    def closure():
        opt.zero_grad()
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("from the closure")
        loss = (100 * (x[1:] - x[:-1] ** 2) ** 2).sum() + ((1 - x) ** 2).sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.step(closure)
    before, state, grad = x.detach().clone(), states(opt, {"x": x}), x.grad
    left[0] = calls_before
    with pytest.raises(KeyError, match="from the closure"):
        opt.step(closure)
    assert torch.equal(x, before)
    assert same(states(opt, {"x": x}), state)
    left[0] = 10**6
    first = float(closure().detach())
    for _ in range(3):
        opt.step(closure)
    assert float(closure().detach()) < first
    assert grad is not None


@pytest.mark.parametrize("where", ["init", "update"])
def test_error_in_a_transformation_changes_nothing(where):
    fail = [where == "init"]

    def check(result):
        if fail[0]:
            raise RuntimeError("from the transformation")
        return result

    move = lambda g, s, p=None: check((jax.tree.map(lambda m, x: -0.1 * (m + x), s, g), g))  # noqa: E731
    params = draw()
    start, grads = snap(params), draw_grads(params, 3)
    tx = optax.GradientTransformation(lambda p: check(jax.tree.map(jnp.zeros_like, p)), move)
    opt, state = None, {}
    with pytest.raises(RuntimeError, match="from the transformation"):  # noqa: PT012
        opt = make(params, tx)
        run(opt, params, grads[:1])
        start, state, fail[0] = snap(params), states(opt, params), True
        opt.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(2, 2, 2)))], "lr": 0.5})
        opt.param_groups[-1]["params"][0].grad = torch.ones(2, 2, 2)
        run(opt, params, grads[1:2])
    assert same(params, start)
    fail[0] = False
    if opt is not None:
        assert same(states(opt, params), state)
        run(opt, params, grads[2:])


def test_error_while_the_program_runs_changes_nothing():
    fail = [False]

    def callback(x):
        if fail[0]:
            raise RuntimeError("at run time")
        return np.asarray(x)

    def update(grads, state, params=None):
        call = lambda m, g: jax.pure_callback(callback, jax.ShapeDtypeStruct(g.shape, g.dtype), -0.1 * (m + g))  # noqa: E731
        return jax.tree.map(call, state, grads), jax.tree.map(jnp.add, state, grads)

    params = draw()
    opt, grads = make(params, optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)), draw_grads(params, 3)
    run(opt, params, grads[:1])
    before, state, fail[0] = snap(params), states(opt, params), True
    with pytest.raises(Exception, match="at run time"):
        run(opt, params, grads[1:2])
    assert same(params, before)
    assert same(states(opt, params), state)


WRONG_UPDATES = {
    "another shape": lambda u: jax.tree.map(lambda g: jnp.stack([g, g]), u),
    "another structure": lambda u: {"other": jnp.ones(3)},
    "nothing": lambda u: None,
}


@pytest.mark.parametrize("name", WRONG_UPDATES)
def test_update_of_a_wrong_structure_raises(name):
    params = draw()
    start = snap(params)
    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), lambda u, s, p=None: (WRONG_UPDATES[name](u), s))
    with pytest.raises(ValueError, match=r"update does not fit the parameters: at a\.weight .*tree like the gradients"):
        make(params, tx)
    assert same(params, start)


@pytest.mark.parametrize("made", [jnp.int32(0), jnp.bool_(False), jnp.zeros(3, jnp.int8)], ids=str)
def test_state_whose_integers_become_floating_raises(made):
    params = draw()
    start = snap(params)
    tx = optax.GradientTransformation(lambda _: {"mean": made}, lambda u, s, p=None: (u, {"mean": s["mean"] * 0.9 + 0.5}))
    with pytest.raises(TypeError, match=rf"state 'mean' is {made.dtype} after `init` and float\d\d after `update`; expected one kind"):
        make(params, tx)
    assert same(params, start)


def test_arrays_of_the_user_are_never_donated():
    mine = jnp.arange(3.0)
    tx = optax.GradientTransformation(
        lambda _: {"mine": mine}, lambda u, s, p=None: (jax.tree.map(lambda g: -0.1 * g * s["mine"][1], u), {"mine": s["mine"] + 1})
    )
    ends = []
    for _ in range(2):
        params = draw()
        run(make(params, tx), params, draw_grads(params, 2))
        ends.append(snap(params))
    assert mine.tolist() == [0.0, 1.0, 2.0]
    assert same(*ends)


@pytest.mark.skipif("key" not in inspect.signature(optax.add_noise).parameters, reason="this optax takes a seed only")
def test_two_optimizers_may_share_a_random_key():
    key, ends = jax.random.key(3), []
    tx = optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.1))
    for _ in range(2):
        params = draw()
        run(make(params, tx), params, draw_grads(params, 2))
        ends.append(snap(params))
    assert jax.random.uniform(key) >= 0
    assert same(*ends)


def test_two_optimizers_of_one_transformation_share_the_program():
    tx = optax.adam(0.0123)
    first, second = draw(), draw(seed=7)
    run(make(first, tx), first, draw_grads(first, 2))
    before = compiled()
    run(make(second, tx), second, draw_grads(second, 2))
    assert compiled() == before


def test_max_grad_norm_clips_trained_parameters_as_clip_grad_norm():
    params = draw()
    start, grads, theirs = snap(params), draw_grads(params), twin(params)
    opt = make(params, optax.sgd(0.2), max_grad_norm=0.7, mask=[("b.*", False), ("*", True)])
    live = {k: p for k, p in theirs.items() if k != "b.weight"}
    reference = torch.optim.SGD(live.values(), 0.2)
    for g in grads:
        for k, p in live.items():
            p.grad = g[k].clone()
        torch.nn.utils.clip_grad_norm_(live.values(), 0.7)
        reference.step()
    for g in grads:
        g["b.weight"].fill_(float("nan"))
    run(opt, params, grads)
    assert max(errors(params, theirs, start).values()) < CLOSE
    assert torch.equal(params["s"].grad, grads[-1]["s"]), "the step wrote into the gradient"
