"""Loading a damaged state_dict raises; the error names the parameter and the field, and the optimizer is unchanged."""

import copy

import jax
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax itself is not clean under strict promotion
        yield


def of_optax(tx, **hyperparams):
    return lambda params, **options: torch_api.OptaxOptimizer(params, tx, **hyperparams, **options)


def of_class(name, **hyperparams):
    return lambda params, **options: getattr(torch_api, f"Masked{name}")(params, lr=0.01, **hyperparams, **options)


def partitioned(params, **options):
    transforms = {"a": (optax.adam, {"learning_rate": 0.01}), "b": optax.sgd(0.1, momentum=0.9)}
    return torch_api.PartitionedOptimizer(params, transforms, labels={"w": "a", "b": "b"}, **options)


MAKE = {
    **{name: of_class(name) for name in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor")},
    "SGD": of_class("SGD", momentum=0.9),
    "RMSprop": of_class("RMSprop", momentum=0.9, centered=True),
    "Muon": lambda params, **options: torch_api.MaskedMuon(params[:1], lr=0.01, **options),
    "Lion": of_class("Lion"),
    "ScheduleFree": of_class("ScheduleFreeAdamW"),
    "optax.adamw": of_optax(optax.adamw, lr=0.01),
    "clip, adam": of_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))),
    "MultiSteps": of_optax(optax.MultiSteps(optax.adam(0.01), 2)),
    "dadapt": of_optax(optax.contrib.dadapt_adamw, lr=1.0),
    "partitioned": partitioned,
    "beside": of_class("Adam", ema_decay=0.9, stochastic_rounding=True),
    "master": of_class("Adam", master_weights=True),
}


def parameters(dtype=torch.float32):
    return [("w", torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))), ("b", torch.nn.Parameter(torch.ones(4, dtype=dtype)))]


def trained(name, **options):
    params = parameters(torch.bfloat16 if name in ("beside", "master") else torch.float32)
    optimizer = MAKE[name](params, **options)
    for _, p in params:
        p.grad = torch.arange(1.0, p.numel() + 1).view_as(p).to(p.dtype)
    optimizer.step()
    return params, optimizer


def entries(state_dict):
    """Return (index, parameter name, field, value) for each field of the state."""
    names = {i: name for group in state_dict["param_groups"] for i, name in zip(group["params"], group["param_names"], strict=True)}
    return [(i, names[i], key, value) for i, fields in state_dict["state"].items() for key, value in fields.items()]


def damages(value, name="Adam"):
    """Yield values that are invalid in place of `value`."""
    yield torch.zeros((*value.shape, 2), dtype=value.dtype)
    yield value.to_sparse() if value.ndim and value.is_floating_point() else torch.zeros(1).to_sparse()
    if name != "Adam":
        return
    yield torch.zeros(5, dtype=value.dtype)
    yield value.to("meta")
    yield "text"
    yield {"value": value}
    yield value.to(torch.complex64)
    if value.ndim:
        yield torch.zeros((), dtype=value.dtype)
        yield torch.ones(tuple(reversed(value.shape))) if value.ndim > 1 else torch.ones(1, value.numel())
        yield 1.0


def refused(optimizer, params, state_dict, *texts):
    """Check that loading raises an error with these texts and changes nothing."""
    before, state = [p.detach().clone() for _, p in params], copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="load_state_dict") as error:
        optimizer.load_state_dict(state_dict)
    for text in texts:
        assert text in str(error.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert after["state"].keys() == state["state"].keys()
    assert all(torch.equal(after["state"][i][key], value) for i, _, key, value in entries(state))
    assert all(torch.equal(p, value) for (_, p), value in zip(params, before, strict=True))


@pytest.mark.parametrize("name", MAKE)
def test_damage_in_any_field_is_refused(name):
    params, optimizer = trained(name)
    saved = optimizer.state_dict()
    assert entries(saved)
    for index, parameter, field, value in entries(saved):
        for damage in damages(value, name):
            damaged = copy.deepcopy(saved)
            damaged["state"][index][field] = damage
            refused(optimizer, params, damaged, repr(parameter), repr(field))
        if field in ("ema_param", "master_param", "rounding_key"):
            continue  # these may be missing, because the optimizer that was saved may not have had the option
        for change in (dict.pop, lambda fields, key: fields.update({key: None}))[: 1 + (name == "Adam")]:
            damaged = copy.deepcopy(saved)
            change(damaged["state"][index], field)
            if any(key not in ("step", "count") for key, value in damaged["state"][index].items() if value is not None):
                refused(optimizer, params, damaged, repr(parameter), repr(field))
    optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize("name", ["Adam", "Lion", "clip, adam", "optax.adamw", "beside", "partitioned"])
def test_damaged_state_of_a_frozen_parameter_is_refused(name):
    params, optimizer = trained(name)
    optimizer.set_trainable("b", False)
    saved = optimizer.state_dict()
    assert saved["state"][1]
    for index, parameter, field, value in entries(saved):
        for damage in damages(value, name):
            damaged = copy.deepcopy(saved)
            damaged["state"][index][field] = damage
            refused(optimizer, params, damaged, repr(parameter), repr(field))
    optimizer.load_state_dict(saved)
    optimizer.set_trainable("b", True)
    optimizer.step()


def test_step_count_without_moments_is_refused():
    params, optimizer = trained("Adam")
    for fields in ({"step": torch.tensor(1.0)}, {"step": 1.0}, {"step": torch.tensor(1.0), "exp_avg": None, "exp_avg_sq": None}):
        damaged = copy.deepcopy(optimizer.state_dict())
        damaged["state"][1] = fields
        refused(optimizer, params, damaged, "'b'", "'exp_avg'")
    nothing = copy.deepcopy(optimizer.state_dict())
    nothing["state"][1] = {"step": torch.tensor(0.0)}  # the state of a frozen parameter
    optimizer.load_state_dict(nothing)
    assert params[1][1] not in optimizer.state


def test_momentum_buffer_of_none_loads_as_missing_state():
    params, optimizer = trained("SGD")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {"momentum_buffer": None}
    optimizer.load_state_dict(saved)
    assert params[0][1] not in optimizer.state


def test_entries_and_groups_of_a_wrong_type_are_refused():
    params, optimizer = trained("Adam")
    saved = optimizer.state_dict()

    def damaged(change):
        twin = copy.deepcopy(saved)
        change(twin)
        return twin

    for entry in (torch.zeros(3, 2), [1, 2], "text", 0.0):
        refused(optimizer, params, damaged(lambda s, entry=entry: s["state"].update({1: entry})), "'b'")
    for state in (None, [], torch.zeros(2)):
        refused(optimizer, params, saved | {"state": state}, "'state'")
    for groups in (None, {}, [None], torch.zeros(2)):
        refused(optimizer, params, saved | {"param_groups": groups})
    for change, text in (
        (lambda s: s["param_groups"][0].pop("params"), "'params'"),
        (lambda s: s["param_groups"][0].update(params=7), "'params'"),
        (lambda s: s["param_groups"][0].update(params=[0, 0]), "in two places"),
        (lambda s: s["param_groups"][0].update(param_names="wb"), "'param_names'"),
        (lambda s: s["param_groups"][0].update(param_names=["w"]), "param_names"),
        (lambda s: s["param_groups"][0].update(trainable_params=True), "'trainable_params'"),
        (lambda s: s["param_groups"][0].update(betas=(0.9,)), "betas"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(damaged(change))
    optimizer.load_state_dict(saved)


def test_one_element_count_and_float64_moment_are_accepted():
    """Older versions of torch saved such counts and moments."""
    params, optimizer = trained("Adam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor([3.0])
    saved["state"][1]["step"] = 3
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].double()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for _, p in params] == [4.0, 4.0]


def test_optimizer_that_was_never_stepped_refuses_damaged_state():
    for name in ("Adam", "clip, adam"):
        _, optimizer = trained(name)
        saved = optimizer.state_dict()
        params = parameters()
        fresh = MAKE[name](params)
        for index, parameter, field, value in entries(saved):
            damaged = copy.deepcopy(saved)
            damaged["state"][index][field] = torch.zeros((*value.shape, 2))
            refused(fresh, params, damaged, repr(parameter), repr(field))
        fresh.load_state_dict(saved)
