"""Common mistakes: `learning_rate` is `lr`, one warning tells of a step without gradients, and each other mistake is one clear error."""

import inspect
import itertools
import warnings

import jax
import optax
import pytest
import torch

import bridge
import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam fails under strict promotion
        yield


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2)})


def lrs(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


# ------------------------------------------------------------------ learning_rate


MASKED = sorted(name for name in torch_api.__all__ if name.startswith("Masked"))


@pytest.mark.parametrize("name", MASKED)
def test_every_class_takes_learning_rate(name):
    cls, net = getattr(torch_api, name), model()
    weights = [net["body"].weight]
    assert lrs(cls(weights, learning_rate=0.25)) == [0.25]
    shown = inspect.signature(cls).parameters
    assert "lr" in shown
    assert "learning_rate" not in shown
    for both in (lambda: cls(weights, lr=0.25, learning_rate=0.25), lambda: cls(weights, 0.25, learning_rate=0.25)):
        with pytest.raises(TypeError, match=f"^{name}: both lr and learning_rate are given; expected one of them"):
            both()


FUNCTIONS = {
    "optax": lambda **lr: torch_api.OptaxOptimizer(model().parameters(), optax.adamw, **lr),
    "with the name of torch": lambda **lr: torch_api.OptaxOptimizer(model().parameters(), bridge.rules.adam, **lr),
    "a definition": lambda **lr: torch_api.OptaxOptimizer(model().parameters(), bridge.Momentum(lr=0.5), **lr),
    "a ready one": lambda **lr: torch_api.OptaxOptimizer(model().parameters(), optax.scale_by_adam(), **lr),
    "a label": lambda **lr: torch_api.PartitionedOptimizer(model().named_parameters(), {"a": (bridge.rules.sgd, lr)}, {"": "a"}),
    "a pair": lambda **lr: torch_api.MultiOptimizer(model().named_parameters(), ("*", (optax.sgd, lr))),
    "a group": lambda **lr: torch_api.MaskedSGD([{"params": model().parameters(), **lr}]),
    "a group of a label": lambda **lr: torch_api.PartitionedOptimizer(
        [{"params": list(model().named_parameters()), **lr}], {"a": (optax.sgd, {"lr": 0.5})}, {"": "a"}
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_learning_rate_is_lr(name):
    optimizer = FUNCTIONS[name](learning_rate=0.25)
    assert lrs(optimizer) == [0.25]
    assert "learning_rate" not in optimizer.param_groups[0]
    with pytest.raises(TypeError, match="both lr and learning_rate are given"):
        FUNCTIONS[name](lr=0.25, learning_rate=0.25)


def test_added_group_takes_learning_rate_and_schedules_find_lr():
    net = model()
    optimizer = torch_api.MaskedAdamW(net["body"].parameters(), learning_rate=0.5)
    optimizer.add_param_group({"params": net["head"].parameters(), "learning_rate": 0.25})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert lrs(optimizer) == [0.25, 0.125]


def test_class_of_a_user_takes_learning_rate_if_its_argument_is_lr():
    class Mine(torch_api.MaskedAdamW):
        def __init__(self, params, lr=0.5, **engine):
            super().__init__(params, lr=lr, weight_decay=0.0, **engine)

    class Renamed(torch_api.MaskedAdamW):
        def __init__(self, params, learning_rate):
            super().__init__(params, learning_rate * 2)

    class Passes(torch_api.MaskedAdamW):
        def __init__(self, params, **engine):
            super().__init__(params, **engine)

    p = [torch.nn.Parameter(torch.zeros(2))]
    assert lrs(Mine(p, learning_rate=0.25)) == lrs(Passes(p, learning_rate=0.25)) == lrs(Renamed(p, learning_rate=0.125)) == [0.25]


@pytest.mark.parametrize("name", [*bridge.rules.__all__, "muon", "adafactor"])
def test_rules_take_learning_rate(name):
    make = getattr(bridge.rules, name, None) or getattr(bridge.matrix_rules, name)
    assert "learning_rate" not in inspect.signature(make).parameters
    params = {"w": jax.ShapeDtypeStruct((2, 2), "float32")}
    programs = {
        str(jax.make_jaxpr(lambda p, tx=tx: tx.update(p, tx.init(p), p))(params))
        for tx in (make(learning_rate=0.25), make(lr=0.25), make(0.25))
    }
    assert len(programs) == 1
    with pytest.raises(TypeError, match=f"^{name}: both lr and learning_rate"):
        make(0.25, learning_rate=0.25)


@pytest.mark.parametrize("make", [torch_api.MaskedSGD, lambda params: torch_api.OptaxOptimizer(params, optax.sgd(0.1))])
def test_a_set_of_parameters_warns(make):
    params = set(model().parameters())
    with pytest.warns(FutureWarning, match="optimizer parameters need to be organized in ordered collections, but params is a set"):
        optimizer = make(params)
    assert set(optimizer.param_groups[0]["params"]) == params


# ------------------------------------------------------------------ errors


def test_schedule_is_an_error_of_torchs_classes_and_works_as_the_error_says():
    schedule = optax.linear_schedule(0.5, 0.25, 2)
    with pytest.raises(TypeError, match=r"lr is a schedule.*LambdaLR.*OptaxOptimizer\(params, optax.adamw, lr=schedule\)"):
        torch_api.MaskedSGD(model().parameters(), lr=schedule)

    def moved(make):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer, scheduler = make([p])
        for _ in range(3):
            p.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()
        return p[0].item()

    def by_torch(params):
        optimizer = torch_api.MaskedSGD(params, lr=1.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def by_optax(params):
        optimizer = torch_api.OptaxOptimizer(params, optax.sgd, lr=schedule)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    assert moved(by_torch) == moved(by_optax) == -(0.5 + 0.375 + 0.25)


def test_iterables_of_parameters_are_taken_as_by_torch():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))

        def __iter__(self):
            return self.parameters()

    class Sequence:
        def __getitem__(self, index):
            return [torch.nn.Parameter(torch.zeros(2))][index]

    net = model()
    for params in (torch.nn.ParameterList(net.parameters()), Holder(), Sequence(), dict(net.named_parameters()).items()):
        assert len(torch_api.MaskedAdamW(params).param_groups[0]["params"]) == len(torch.optim.AdamW(params).param_groups[0]["params"])


@pytest.mark.parametrize("has_state", [True, False], ids=["with state", "without"])
def test_checkpoint_of_another_class_names_it(has_state):
    """A checkpoint without state, as of SGD without momentum, has nothing else to differ in."""

    def saved(cls, **options):
        net = model()
        optimizer = cls(net.parameters(), **options)
        for p in net.parameters() if has_state else ():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer.state_dict()

    classes = {"SGD": {"momentum": 0.9}, "AdamW": {}, "RMSprop": {}, "Rprop": {}, "Adagrad": {}}
    for theirs, ours in itertools.pairwise([*classes, "SGD"]):
        optimizer = getattr(torch_api, f"Masked{ours}")(model().parameters())
        with pytest.raises(ValueError, match=f"saved by an optimizer of the kind {theirs}: its groups have .* this Masked{ours}"):
            optimizer.load_state_dict(saved(getattr(torch.optim, theirs), **classes[theirs]))
    older = saved(torch.optim.AdamW)
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay"):
        older["param_groups"][0].pop(key, None)
    torch_api.MaskedAdamW(model().parameters()).load_state_dict(older)


# ------------------------------------------------------------------ steps without gradients


def warnings_in(function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [(str(warning.message), warning.filename) for warning in seen]


def thrice(optimizer):
    return lambda: [optimizer.step() for _ in range(3)]


MAKE = {
    "AdamW": lambda net: torch_api.MaskedAdamW(net.named_parameters()),
    "labels": lambda net: torch_api.PartitionedOptimizer(
        net.named_parameters(), {"a": optax.sgd(0.1), "b": bridge.Adam(lr=0.1)}, {"body": "a", "head": "b"}
    ),
    "partly frozen": lambda net: torch_api.MaskedAdamW(net.named_parameters(), mask="head.*"),
}


@pytest.mark.parametrize("name", MAKE)
def test_first_step_without_gradients_warns_once_at_the_line_of_the_user(name):
    net = model()
    optimizer = MAKE[name](net)
    ((text, file),) = warnings_in(thrice(optimizer))
    assert text.startswith(f"{type(optimizer).__name__}.step updated nothing: no parameter has a gradient. Call loss.backward()")
    assert file == __file__


def test_gradients_that_end_later_warn_and_other_steps_do_not():
    net = model()
    optimizer = torch_api.MaskedAdamW(net.parameters())
    net["head"].weight.grad = torch.ones(2, 2)  # one of four
    assert warnings_in(thrice(optimizer)) == []
    optimizer.zero_grad()
    assert len(warnings_in(thrice(optimizer))) == 1


def frozen_by_mask(net):
    return torch_api.MaskedAdamW(net.named_parameters(), mask=False)


def frozen_later(net):
    optimizer = torch_api.MaskedAdamW(net.named_parameters())
    optimizer.set_trainable("*", False)
    return optimizer


def without_elements(_):
    return torch_api.MaskedAdamW([torch.nn.Parameter(torch.zeros(0))])


def with_lr_zero(net):
    return torch_api.MaskedAdamW(net.parameters(), lr=0.0)


@pytest.mark.parametrize("make", [frozen_by_mask, frozen_later, without_elements, with_lr_zero])
def test_step_without_gradients_on_purpose_does_not_warn(make):
    assert warnings_in(thrice(make(model()))) == []


def test_step_of_sharded_parameters_without_gradients_does_not_warn():
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        assert warnings_in(thrice(torch_api.MaskedAdamW([sharded]))) == []
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mask", [None, False])
def test_distributed_checkpoint_makes_state_without_warning(mask):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = model()
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), mask=mask)
    seen = warnings_in(lambda: get_optimizer_state_dict(net, optimizer))
    assert [text for text, _ in seen if "torch_api" in text or "updated nothing" in text] == []
    assert lrs(optimizer) == [1e-3]


# ------------------------------------------------------------------ MultiOptimizer


def test_mask_of_a_multi_optimizer_freezes_what_its_pairs_select():
    net = model()
    optimizer = torch_api.MultiOptimizer(net.named_parameters(), ("*.weight", bridge.Momentum(lr=0.5)), mask="head.*")
    assert [row["status"] for row in optimizer.report().rows if row["parameter"] != "head.weight"] == ["frozen"] * 3
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [name for name, p in net.named_parameters() if not torch.equal(p, before[name])] == ["head.weight"]
    torch.testing.assert_close(net["head"].weight.detach(), before["head.weight"] - 0.5)
    assert list(optimizer.state) == [net["head"].weight]
    assert "mask" in inspect.signature(torch_api.MultiOptimizer).parameters
