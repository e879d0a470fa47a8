"""`PartitionedOptimizer` and `MultiOptimizer`: labels, groups, norms, checkpoints, and overrides of flax.optim."""

import copy
from collections import namedtuple

import jax.numpy as jnp
import optax
import pytest
import torch
from optax_cases import compiled, draw, draw_grads, errors, pure, run, same, saved, snap, states, twin
from oracles import CLOSE, movement_error
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import bridge
import torch_api

LABELS = {"a": "x", "b": "y", "s": "x"}
STEPS = 20


pytestmark = [pytest.mark.unoptimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def partitioned(params, transforms=None, labels=LABELS, **options):
    transforms = transforms or {"x": (optax.adam, {"lr": 0.05}), "y": (optax.sgd, {"lr": 0.1, "momentum": 0.9})}
    return torch_api.PartitionedOptimizer(list(params.items()), transforms, labels, **options)


def multi(params, *pairs, **options):
    pairs = pairs or (("*.weight", bridge.Momentum(lr=0.05)), ("*.bias", bridge.Adam(lr=0.1)))
    return torch_api.MultiOptimizer(list(params.items()), *pairs, **options)


def ones(params):
    return {k: torch.ones_like(p) for k, p in params.items()}


def moved(params, start):
    return {k: float((start[k] - p.detach()).flatten()[0]) for k, p in params.items()}


def group_of(opt, p):
    (found,) = [g for g in opt.param_groups if any(q is p for q in g["params"])]
    return found


MIXES = {
    "factories": (lambda: {"x": (optax.adam, {"lr": 0.05}), "y": (optax.sgd, {"lr": 0.1, "momentum": 0.9})}, {}),
    "norms inside labels": (lambda: {"x": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.5)), "y": optax.lion(0.05)}, {}),
    "value for one label": (lambda: {"x": optax.polyak_sgd(max_learning_rate=0.1), "y": (optax.sgd, {"lr": 0.1})}, {"value": 0.5}),
}


@pytest.mark.parametrize("name", MIXES)
def test_labels_move_as_in_optax_partition_and_resume_exactly(name):
    ours, extra = MIXES[name]
    params, transforms = draw(), ours()
    start, grads = snap(params), draw_grads(params)
    opt = partitioned(params, transforms)
    run(opt, params, grads[:9], **extra)
    again = twin(params)
    other = partitioned(again, transforms)
    other.load_state_dict(saved(opt))
    run(opt, params, grads[9:], **extra)
    run(other, again, grads[9:], **extra)
    ready = {
        k: tx[0](tx[1]["lr"], **{n: v for n, v in tx[1].items() if n != "lr"}) if isinstance(tx[1], dict) else tx
        for k, tx in ours().items()
    }
    expected, _ = pure(optax.partition(ready, LABELS), start, grads, **extra)
    assert max(errors(params, expected, start).values()) < CLOSE
    assert same(params, again)
    assert same(states(opt, params), states(other, again))


def test_each_label_has_its_own_hyperparams_in_its_groups():
    params = draw()
    opt = partitioned(params, {"x": optax.adam(0.05), "y": (optax.sgd, {"lr": 0.1, "momentum": 0.9})})
    assert [g["label"] for g in opt.param_groups] == ["x", "y"]
    x, y = opt.param_groups
    assert [id(p) for p in x["params"]] == [id(params[k]) for k in ("a.weight", "a.bias", "s")]
    assert [id(p) for p in y["params"]] == [id(params["b.weight"])]
    assert x["lr"] == 1.0
    assert "momentum" not in x
    assert (y["lr"], y["momentum"]) == (0.1, 0.9)


def test_given_group_is_split_by_label_and_keeps_its_keys():
    params = draw()
    groups = [
        {"params": [("a.weight", params["a.weight"]), ("b.weight", params["b.weight"])], "lr": 0.3},
        {"params": [("a.bias", params["a.bias"]), ("s", params["s"])], "weight_decay": 0.2},
    ]
    opt = torch_api.PartitionedOptimizer(groups, {"x": (optax.adamw, {"lr": 0.1}), "y": (optax.sgd, {"lr": 0.05})}, LABELS)
    found = {k: (group_of(opt, p)["label"], group_of(opt, p)["lr"], group_of(opt, p).get("weight_decay")) for k, p in params.items()}
    assert found == {"a.weight": ("x", 0.3, 1e-4), "b.weight": ("y", 0.3, None), "a.bias": ("x", 0.1, 0.2), "s": ("x", 0.1, 0.2)}


def test_one_scheduler_drives_all_labels_without_compiling():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = partitioned(params, {"x": optax.sgd(0.05), "y": (optax.sgd, {"lr": 0.1})})
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 0.9**i)
    run(opt, params, grads[:1])
    before = compiled()
    for g in grads[1:]:
        schedule.step()
        run(opt, params, [g])
    group_of(opt, params["b.weight"])["lr"] = 0.0
    kept, kept_x = params["b.weight"].detach().clone(), params["s"].detach().clone()
    end = snap(params)
    run(opt, params, grads[:1])
    assert compiled() == before
    assert torch.equal(params["b.weight"], kept)
    assert not torch.equal(params["s"], kept_x)
    lr = {"a": 0.05, "b": 0.1, "s": 0.05}
    expected = {k: v.double() - sum(lr[k[0]] * 0.9**i * g[k].double() for i, g in enumerate(grads)) for k, v in start.items()}
    assert max(errors(end, expected, start).values()) < CLOSE


def test_reduce_lr_on_plateau_reaches_every_group():
    opt = partitioned(draw())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for _ in range(2):
        schedule.step(1.0)
    assert [g["lr"] for g in opt.param_groups] == [0.025, 0.05]


def test_max_grad_norm_is_taken_over_all_labels():
    params = draw()
    start, grads, theirs = snap(params), draw_grads(params), twin(params)
    opt = partitioned(params, {"x": optax.sgd(0.4), "y": (optax.sgd, {"lr": 0.2, "momentum": 0.9})}, max_grad_norm=0.7)
    x = [p for k, p in theirs.items() if LABELS[k[0]] == "x"]
    reference = torch.optim.SGD([{"params": x, "lr": 0.4}, {"params": [theirs["b.weight"]], "lr": 0.2, "momentum": 0.9}])
    for g in grads:
        for k, p in theirs.items():
            p.grad = g[k].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
        reference.step()
    run(opt, params, grads)
    assert max(errors(params, theirs, start).values()) < CLOSE


@pytest.mark.parametrize("norm", [None, 100.0])
def test_models_with_equal_names_are_trained_separately_or_refused(norm):
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    both = [*one.named_parameters(), *two.named_parameters()]
    try:
        opt = torch_api.PartitionedOptimizer(
            both, {"one": optax.sgd(0.1), "two": optax.sgd(0.2)}, [(one, "one"), (two, "two")], max_grad_norm=norm
        )
    except ValueError as error:
        assert "'weight'" in str(error)  # noqa: PT017 - torch.optim takes them, so both answers are honest
        return
    params = {f"{i}.{k}": p for i, m in enumerate((one, two)) for k, p in m.named_parameters()}
    start = snap(params)
    run(opt, params, [{k: torch.ones_like(p) if k[0] == "0" else -torch.ones_like(p) for k, p in params.items()}])
    expected = {"0.weight": 0.1, "0.bias": 0.1, "1.weight": -0.2, "1.bias": -0.2}
    assert moved(params, start) == pytest.approx(expected, abs=1e-6)


SGD = optax.sgd(0.1)
MISTAKES = {
    "unknown label": ({"x": SGD, "y": SGD}, {"a": "x", "b": "zebra", "s": "y"}, "b.weight.*'zebra'.*x, y"),
    "near miss": ({"body": SGD, "head": SGD}, {"a": "boddy", "b": "head", "s": "body"}, "'boddy'.*Did you mean 'body'"),
    "unused transformation": ({"x": SGD, "y": SGD, "spare": SGD}, LABELS, "'spare'"),
    "missing label": ({"x": SGD, "y": SGD}, {"a": "x", "b": "y"}, "'s'"),
    "no label from a function": ({"x": SGD}, lambda name, p: None if name == "s" else "x", "'s'"),
    "labels of mixed types": ({"x": SGD, 1: SGD}, {"a": "x", "b": 1, "s": 2}, "'s'.*2.*1, x"),
    "pattern without a match": ({"x": SGD, "y": SGD}, [("zz*", "x"), ("*", "y")], "labels.*'zz\\*'"),
    "no transformation": ({"x": SGD, "y": 3}, LABELS, "'y'.*3"),
    "unknown hyperparam": ({"x": SGD, "y": (optax.sgd, {"lr": 0.1, "moment": 0.9})}, LABELS, "'y'.*'moment'.*'momentum'"),
    "no learning rate": ({"x": SGD, "y": optax.sgd}, LABELS, "'y'.*learning_rate"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_error_names_a_wrong_label(name):
    transforms, labels, text = MISTAKES[name]
    params = draw()
    start = snap(params)
    with pytest.raises((ValueError, TypeError), match=text):
        partitioned(params, transforms, labels)
    assert same(params, start)


def test_labels_need_not_be_strings_and_may_come_from_any_selector():
    params = draw()
    start = snap(params)
    opt = partitioned(params, {0: optax.sgd(0.1), 1: optax.sgd(0.2)}, lambda name, p: int(p.ndim > 1))
    run(opt, params, [ones(params)])
    assert moved(params, start) == pytest.approx({"a.weight": 0.2, "a.bias": 0.1, "b.weight": 0.2, "s": 0.1}, abs=1e-6)


def test_lr_0_of_a_ready_label_keeps_its_bits_even_with_nan():
    params = draw()
    opt, start = partitioned(params, {"x": optax.adamw(0.05), "y": (optax.sgd, {"lr": 0.1})}), snap(params)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, [{k: torch.full_like(p, float("nan")) if LABELS[k[0]] == "x" else torch.ones_like(p) for k, p in params.items()}])
    assert same({k: params[k] for k in ("a.weight", "a.bias", "s")}, {k: start[k] for k in ("a.weight", "a.bias", "s")})
    assert moved(params, start)["b.weight"] == pytest.approx(0.1, abs=1e-6)


def test_missing_gradients_and_masks_apply_inside_labels():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    opt = partitioned(params, {"x": optax.adam(0.05), "y": optax.adam(0.1)}, mask=[("a.bias", False), ("*", True)])
    for i, g in enumerate(grads):
        g["a.bias"].fill_(float("nan"))
        for k in ("b.weight", "s") if i % 2 else ():
            g[k] = None
    run(opt, params, grads[:2])
    before = compiled()
    run(opt, params, grads[2:])
    assert compiled() == before
    assert torch.equal(start["a.bias"], params["a.bias"])
    assert not opt.state.get(params["a.bias"])
    for k, lr in {"a.weight": 0.05, "b.weight": 0.1, "s": 0.05}.items():
        given = [{k: g[k]} for g in grads if g[k] is not None]
        assert movement_error(params[k], pure(optax.adam(lr), {k: start[k]}, given)[0][k], start[k]) < CLOSE
        assert opt.state[params[k]]["count"] == len(given)


def test_label_of_set_to_zero_costs_no_bytes():
    counted = []
    for size in (2, 200):
        params = draw({"a": (4, 3), "big": (size, size)})
        start = snap(params)
        opt = partitioned(params, {"x": optax.adamw(0.05), "zero": optax.set_to_zero()}, {"a": "x", "big": "zero"})
        run(opt, params, draw_grads(params, 1))
        assert torch.equal(start["big"], params["big"])
        assert not torch.equal(start["a"], params["a"])
        counted.append(opt.bytes_accessed())
    assert counted[0] == counted[1]


def test_decay_mask_lr_scale_and_wd_scale_reach_each_label():
    params = {k: torch.nn.Parameter(torch.ones(p.shape)) for k, p in draw().items()}
    transforms = {"x": (optax.adamw, {"lr": 0.1, "weight_decay": 0.5}), "y": (optax.adamw, {"lr": 0.2, "weight_decay": 0.5})}
    opt = partitioned(params, transforms, decay_mask="*.weight", lr_scale={"b": 0.5})
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    run(opt, params, [zeros])
    assert moved(params, ones(params)) == pytest.approx({"a.weight": 0.05, "a.bias": 0, "b.weight": 0.05, "s": 0}, abs=1e-6)
    group_of(opt, params["a.weight"])["wd_scale"] = 0.1
    before = snap(params)
    run(opt, params, [zeros])
    assert moved(params, before) == pytest.approx({"a.weight": 0.00475, "a.bias": 0, "b.weight": 0.0475, "s": 0}, abs=1e-6)


def test_added_group_needs_a_known_label():
    params = draw()
    first = {k: params[k] for k in ("a.weight", "b.weight")}
    opt = partitioned(first, labels=lambda name, p: "x" if name.startswith("a") else "y")
    opt.add_param_group({"params": [("a.bias", params["a.bias"])], "lr": 0.5})
    opt.add_param_group({"params": [("s", params["s"])], "label": "x"})
    assert [(g["label"], g["lr"]) for g in opt.param_groups] == [("x", 0.05), ("y", 0.1), ("x", 0.5), ("x", 0.05)]
    with pytest.raises(ValueError, match=r"'zebra'.*x, y"):
        opt.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(2)))], "label": "zebra"})
    assert len(opt.param_groups) == 4
    start = snap(params)
    run(opt, params, [ones(params)])
    assert moved(params, start) == pytest.approx({"a.weight": 0.05, "a.bias": 0.5, "b.weight": 0.1, "s": 0.05}, abs=1e-4)


TWO_SGD = {"x": (optax.sgd, {"lr": 0.1, "momentum": 0.9}), "y": (optax.sgd, {"lr": 0.2, "momentum": 0.5})}
UNLIKE = {"x": (optax.adam, {"lr": 0.05}), "y": (optax.sgd, {"lr": 0.2, "momentum": 0.5})}


@pytest.mark.parametrize("transforms", [TWO_SGD, UNLIKE], ids=["same keys", "other keys"])
@pytest.mark.parametrize("turned", ["parameters", "transforms"])
def test_checkpoint_matches_labels_and_state_by_name(transforms, turned):
    params = draw()
    opt, grads = partitioned(params, transforms), draw_grads(params, 6)
    run(opt, params, grads[:3])
    again = twin(params, reversed if turned == "parameters" else list)
    if turned == "parameters":
        again = {k: again[k] for k in ("b.weight", "s", "a.bias", "a.weight")}  # the label y comes first
    other = partitioned(again, dict(reversed(transforms.items())) if turned == "transforms" else transforms)
    other.load_state_dict(saved(opt))
    for k in params:
        assert group_of(other, again[k])["label"] == LABELS[k[0]], k
        assert group_of(other, again[k])["lr"] == group_of(opt, params[k])["lr"], k
    run(opt, params, grads[3:])
    run(other, again, grads[3:])
    assert all(torch.equal(params[k], again[k]) for k in params)


def test_wrong_checkpoint_changes_neither_groups_nor_state():
    params = draw()
    opt = partitioned(params)
    run(opt, params, draw_grads(params, 2))
    state, groups = states(opt, params), [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    good = copy.deepcopy(opt.state_dict())
    for damage in (
        lambda d: d["param_groups"].pop(),
        lambda d: d["state"][0].pop("mu"),
        lambda d: [g.pop("momentum", None) for g in d["param_groups"]],
    ):
        wrong = copy.deepcopy(good)
        damage(wrong)
        with pytest.raises(ValueError, match="load_state_dict: "):
            opt.load_state_dict(wrong)
        assert same(states(opt, params), state)
        assert groups == [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]


def test_deepcopy_is_independent():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    opt = torch_api.PartitionedOptimizer(module.named_parameters(), UNLIKE, {"0": "x", "1": "y"})
    grads = draw_grads(dict(module.named_parameters()), 3)
    run(opt, dict(module.named_parameters()), grads[:1])
    again, other = copy.deepcopy((module, opt))
    before = snap(dict(module.named_parameters()))
    run(other, dict(again.named_parameters()), grads[1:])
    assert same(dict(module.named_parameters()), before)
    run(opt, dict(module.named_parameters()), grads[1:])
    assert same(dict(module.named_parameters()), dict(again.named_parameters()))


DISTRIBUTED = {
    "unmatched leaves": lambda ps: torch_api.MultiOptimizer(ps, ("*.weight", bridge.Momentum(lr=0.1))),
    "frozen leaves": lambda ps: torch_api.OptaxOptimizer(ps, optax.adam(0.1), mask="0.*"),
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_checkpoints_load_strictly(name):
    modules = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)) for _ in range(2)]
    params = [dict(m.named_parameters()) for m in modules]
    opts = [DISTRIBUTED[name](m.named_parameters()) for m in modules]
    grads = draw_grads(params[0], 3)
    run(opts[0], params[0], grads[:1])
    modules[1].load_state_dict(modules[0].state_dict())
    set_optimizer_state_dict(modules[1], opts[1], copy.deepcopy(get_optimizer_state_dict(modules[0], opts[0])))
    assert same(*map(snap, params)), "making the state changed the weights"
    for opt, own in zip(opts, params, strict=True):
        run(opt, own, grads[1:])
    assert same(*params)


def test_multi_optimizer_freezes_parameters_that_no_selector_picks():
    params = draw()
    start, grads = snap(params), draw_grads(params)
    for g in grads:
        g["s"].fill_(float("nan"))
    opt = multi(params)
    run(opt, params, grads[:9])
    again = twin(params)
    other = multi(again)
    other.load_state_dict(saved(opt))
    run(opt, params, grads[9:])
    run(other, again, grads[9:])
    assert same(params, again)
    for tx, names in ((optax.sgd(0.05, momentum=0.9), ("a.weight", "b.weight")), (optax.adam(0.1), ("a.bias",))):
        expected, _ = pure(tx, {k: start[k] for k in names}, [{k: g[k] for k in names} for g in grads])
        assert max(errors({k: params[k] for k in names}, expected, start).values()) < CLOSE
    assert torch.equal(params["s"], start["s"])
    assert not opt.state.get(params["s"])


def test_frozen_leaves_of_multi_optimizer_cost_no_bytes_and_join_no_norm():
    counted, ends = [], []
    for size in (2, 200):
        params = draw({"a": (4, 3), "rest": (size, size)})
        opt = multi(params, ("a", bridge.Momentum(lr=0.05)), max_grad_norm=0.5)
        run(opt, params, [{"a": torch.ones(4, 3), "rest": torch.full((size, size), 1e6)}])
        counted.append(opt.bytes_accessed())
        ends.append({"a": params["a"]})
    assert counted[0] == counted[1] > 0
    assert same(*ends)


def test_thawing_a_parameter_that_no_pair_updates_raises():
    opt = multi(draw())
    with pytest.raises(ValueError, match="'s'"):
        opt.set_trainable("s", True)


PAIRS = {
    "overlap": ([("*.weight", bridge.Momentum(lr=0.1)), ("a.*", bridge.Adam(lr=0.1))], r"'a.weight'.*'\*.weight'.*'a.\*'"),
    "no match": ([("zz", bridge.Momentum(lr=0.1))], "^(?!decay_mask).*'zz'"),
    "no pairs": ([], "pairs"),
    "no definition": ([("a.*", 42)], "42"),
    "no learning rate": ([("a.*", optax.sgd)], "learning_rate"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_error_names_a_wrong_pair(name):
    pairs, text = PAIRS[name]
    with pytest.raises((ValueError, TypeError), match=text):
        torch_api.MultiOptimizer(list(draw().items()), *pairs)


def test_hyper_params_of_a_step_apply_to_that_step_only():
    params = draw()
    definition = bridge.GradientDescent(lr=0.1)
    opt, start = multi(params, ("*.weight", definition), ("*.bias", (optax.sgd, {"lr": 0.1}))), snap(params)
    expected = {"a.weight": 0.0, "a.bias": 0.0, "b.weight": 0.0, "s": 0.0}
    groups = [dict(g, params=None) for g in opt.param_groups]
    before = None
    for given, weight, bias in (
        ([None, None], 0.1, 0.1),
        ([{"learning_rate": 0.5}, None], 0.5, 0.1),
        ([None, {"lr": 0.3}], 0.1, 0.3),
        ([definition.hyper_params.replace(learning_rate=0.2), None], 0.2, 0.1),
        ([{"lr": torch.tensor(0.4)}, {"lr": 0}], 0.4, 0.0),
        ([None, None], 0.1, 0.1),
    ):
        run(opt, params, [ones(params)], hyper_params=given)
        expected = {k: v + (weight if "weight" in k else bias if "bias" in k else 0.0) for k, v in expected.items()}
        assert moved(params, start) == pytest.approx(expected, abs=1e-5)
        assert [dict(g, params=None) for g in opt.param_groups] == groups
        before = before or compiled()
    assert compiled() == before


def test_hyper_params_of_none_override_nothing():
    params = draw()
    opt, start = multi(params, ("*.weight", bridge.GradientDescent(lr=0.1))), snap(params)
    run(opt, params, [ones(params)], hyper_params=None)
    assert moved(params, start) == pytest.approx({"a.weight": 0.1, "a.bias": 0.0, "b.weight": 0.1, "s": 0.0}, abs=1e-6)


@pytest.mark.parametrize("wrong", [[None], [{"zzz": 1}, None], [{"lr": "x"}, None], {"lr": 1}, 3, [3, None]], ids=str)
def test_wrong_hyper_params_of_a_step_change_nothing(wrong):
    params = draw()
    opt, start = multi(params), snap(params)
    groups = [dict(g, params=None) for g in opt.param_groups]
    with pytest.raises((ValueError, TypeError), match=r"hyper_param|'lr'"):
        run(opt, params, [ones(params)], hyper_params=wrong)
    assert same(params, start)
    assert [dict(g, params=None) for g in opt.param_groups] == groups


def test_hyper_params_are_restored_if_the_closure_raises():
    opt = multi(draw())
    groups = [dict(g, params=None) for g in opt.param_groups]

    def closure():
        raise KeyError("from the closure")

    with pytest.raises(KeyError, match="from the closure"):
        opt.step(closure, hyper_params=[{"lr": 0.7}, None])
    assert [dict(g, params=None) for g in opt.param_groups] == groups


class Signs(bridge.OptimizerDef):
    def init_param_state(self, param):
        return {"seen": jnp.zeros_like(param)}

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        return param - hyper_params[0] * jnp.sign(grad), {"seen": state["seen"] + jnp.abs(grad)}


@pytest.mark.parametrize("field", ["learning_rate", "lr", "size"])
def test_user_defined_optimizer_def_works_beside_optax(field):
    params, hyper = draw(), namedtuple("Hyper", [field])
    start, grads = snap(params), draw_grads(params)
    opt = multi(params, ("a.*", Signs(hyper(0.1))), ("b.*", optax.adam(0.05)))
    run(opt, params, grads[:-1])
    before = compiled()
    opt.param_groups[0]["lr" if field == "learning_rate" else field] = 0.3
    run(opt, params, grads[-1:])
    assert compiled() == before
    ours, size = ("a.weight", "a.bias"), [0.1] * (STEPS - 1) + [0.3]
    expected = {k: start[k].double() - sum(lr * torch.sign(g[k]).double() for lr, g in zip(size, grads, strict=True)) for k in ours}
    assert max(errors({k: params[k] for k in ours}, expected, start).values()) < CLOSE
    assert torch.allclose(opt.state[params["a.bias"]]["seen"], sum(g["a.bias"].abs() for g in grads))
    b = pure(optax.adam(0.05), {"b.weight": start["b.weight"]}, [{"b.weight": g["b.weight"]} for g in grads])[0]
    assert movement_error(params["b.weight"], b["b.weight"], start["b.weight"]) < CLOSE


def test_muon_labels_give_each_label_its_own_lr():
    module = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    )
    transforms = {"muon": (optax.contrib.muon, {"lr": 0.1}), "adamw": (optax.adamw, {"lr": 0.01})}
    opt = torch_api.PartitionedOptimizer(module.named_parameters(), transforms, labels=torch_api.muon_labels(module))
    assert {g["label"]: (g["lr"], len(g["params"])) for g in opt.param_groups} == {"adamw": (0.01, 7), "muon": (0.1, 2)}
    params = dict(module.named_parameters())
    start, grads = snap(params), draw_grads(params)
    run(opt, params, grads)
    hidden = ("1.weight", "3.weight")
    expected, _ = pure(optax.contrib.muon(0.1), {k: start[k] for k in hidden}, [{k: g[k] for k in hidden} for g in grads])
    assert max(errors({k: params[k] for k in hidden}, expected, start).values()) < 3 * CLOSE
