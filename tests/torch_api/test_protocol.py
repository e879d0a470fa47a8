"""The protocol of torch.optim.Optimizer: each scenario runs with our class and with torch's, and both transcripts must be equal."""

import copy
import functools
import pickle
from collections import defaultdict

import pytest
import torch
from oracles import set_grads
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam),
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD),
}
SAME = {"rtol": 1e-5, "atol": 1e-7}
# Group keys that only later versions of torch have.
NEWER = {"decoupled_weight_decay"} - torch.optim.Adam([torch.zeros(1)]).defaults.keys()


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def give(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    set_grads(parameters(optimizer), [torch.randn(p.shape, generator=generator) for p in parameters(optimizer)])


def advance(optimizer, steps, first=0):
    for seed in range(first, first + steps):
        give(optimizer, seed)
        optimizer.step()


def same(ours, theirs):
    """Return whether two transcripts are equal, except for the last bits of tensors."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, **SAME)
    elif isinstance(theirs, dict):
        assert ours.keys() - NEWER == theirs.keys() - NEWER
        for key in theirs.keys() - NEWER:
            same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    else:
        assert ours == theirs


def snapshot(optimizer):
    return copy.deepcopy([p.detach() for p in parameters(optimizer)]), copy.deepcopy(optimizer.state_dict())


# ---------------------------------------------------------------------- scenarios: a function of the class to its transcript


def step_hooks(cls):
    """Order, arguments and removal of hooks of one optimizer and of all; the result of a pre-hook replaces the step's arguments."""
    said = []
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)

    def closure(name):
        return lambda: said.append((name, torch.is_grad_enabled())) or torch.tensor(3.0)

    def hook(name):
        return lambda *given: said.append((name, given[0] is optimizer, len(given[1]), sorted(given[2])))

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
        optimizer.register_step_pre_hook(hook("second pre")),
        optimizer.register_step_post_hook(hook("second post")),
    ]
    try:
        give(optimizer, 0)
        for args, kwargs in (((), {}), ((closure("a"),), {}), ((), {"closure": closure("b")})):
            said.append(optimizer.step(*args, **kwargs))
        replacing = optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, closure("replaced")), {}))
        said.append(optimizer.step(closure=closure("never")))
        replacing.remove()
        said.append(optimizer.step(closure("back")))
    finally:
        for handle in handles:
            handle.remove()
    said.append(optimizer.step())
    return said, snapshot(optimizer)


def pre_hook_of_a_wrong_kind(cls):
    optimizer = cls(model().parameters(), lr=0.1)
    give(optimizer, 0)
    optimizer.register_step_pre_hook(lambda *_: "nonsense")
    with pytest.raises(RuntimeError, match=r"must return None or a tuple of \(new_args, new_kwargs\), but got nonsense"):
        optimizer.step()
    return snapshot(optimizer)


def state_dict_hooks(cls):
    said = []
    optimizer = cls(model().parameters(), lr=0.1)
    advance(optimizer, 1)

    def post(name, replace=None):
        def hook(opt, state_dict):
            said.append((name, opt is optimizer, sorted(state_dict)))
            return replace and replace(state_dict)

        return hook

    optimizer.register_state_dict_pre_hook(lambda opt: said.append(("pre", opt is optimizer)))
    optimizer.register_state_dict_pre_hook(lambda opt: said.append(("first pre", opt is optimizer)), prepend=True)
    optimizer.register_state_dict_post_hook(post("post"))
    optimizer.register_state_dict_post_hook(post("adds", lambda d: d | {"extra": 1}))
    optimizer.register_state_dict_post_hook(post("first post"), prepend=True)
    said.append(optimizer.state_dict())
    handle = optimizer.register_state_dict_post_hook(post("wraps", lambda d: {"optimizer": d}))
    said.append(optimizer.state_dict())
    handle.remove()
    said.append(optimizer.state_dict())
    return said


def load_state_dict_hooks(cls):
    """A pre-hook may replace the dict for later hooks; when post-hooks run, the optimizer has loaded it."""
    said = []
    optimizer = cls(model().parameters(), lr=0.1)
    advance(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, 1)

    def pre(name, replace=None):
        def hook(opt, state_dict):
            said.append((name, opt is optimizer, [group["lr"] for group in state_dict["param_groups"]]))
            return replace and replace(state_dict)

        return hook

    def other_lr(state_dict):
        return state_dict | {"param_groups": [group | {"lr": 0.5} for group in state_dict["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(pre("pre"))
    optimizer.register_load_state_dict_pre_hook(pre("replaces", other_lr), prepend=True)
    optimizer.register_load_state_dict_pre_hook(pre("first pre"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: said.append(("post", opt.param_groups[0]["lr"])))
    optimizer.register_load_state_dict_post_hook(lambda opt: said.append(("first post", opt.param_groups[0]["lr"])), prepend=True)
    optimizer.load_state_dict(saved)
    advance(optimizer, 2)
    return said, [group["lr"] for group in saved["param_groups"]], snapshot(optimizer)


def hook_that_adds_a_group_before_saving(cls):
    optimizer = cls(model()[0].parameters(), lr=0.1)
    advance(optimizer, 1)
    handle = optimizer.register_state_dict_pre_hook(lambda opt: opt.add_param_group({"params": model()[2].parameters(), "lr": 0.5}))
    said = copy.deepcopy(optimizer.state_dict())
    handle.remove()
    advance(optimizer, 1, first=1)
    return said, snapshot(optimizer)


def hook_that_changes_the_optimizer_after_loading(cls):
    optimizer = cls(model().parameters(), lr=0.1)
    saved = optimizer.state_dict()

    def halve(opt):
        for group in opt.param_groups:
            group["lr"] /= 2

    optimizer.register_load_state_dict_post_hook(halve)
    optimizer.load_state_dict(saved)
    advance(optimizer, 2)
    return snapshot(optimizer)


def closures(cls):
    """A step calls the closure once with gradients enabled and restores the caller's grad mode, also after an error."""
    said = []
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)

    def closure():
        said.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    def fails():
        raise KeyError("of the user")

    said.append(optimizer.step(closure).detach())
    with torch.no_grad():
        said.append(optimizer.step(closure).detach())
        with pytest.raises(KeyError, match="of the user"):
            optimizer.step(fails)
        said.append(torch.is_grad_enabled())
        said.append(optimizer.step(lambda: None))
    return said, torch.is_grad_enabled(), snapshot(optimizer)


def zero_grad(cls):
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)
    said = []
    for options in ({"set_to_none": False}, {}, {"set_to_none": True}):
        loss = net(torch.ones(1, 3)).square().sum()
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        for p, g in zip(net.parameters(), grads, strict=True):
            p.grad = g * 1  # not a view, which cannot be detached in place
        optimizer.zero_grad(**options)
        said.append([(p.grad, p.grad is not None and p.grad.requires_grad) for p in net.parameters()])
        optimizer.step()
    return said, snapshot(optimizer)


def representation(cls):
    net = model()
    named = list(net.named_parameters())
    optimizer = cls([{"params": named[:2]}, {"params": named[2:], "lr": 0.5, "weight_decay": 0.25}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    empty = cls(model().parameters())
    lines = [line for o in (optimizer, empty) for line in repr(o).replace("Masked", "").split("\n")]
    return [line for line in lines if line.partition(":")[0].strip() not in NEWER], optimizer.defaults, empty.defaults


def names_in_groups(cls):
    named = list(model().named_parameters())
    optimizer = cls(named[:2], lr=0.1)
    advance(optimizer, 2)
    optimizer.add_param_group({"params": named[2:], "lr": 0.3})
    advance(optimizer, 2, first=2)
    return [group["param_names"] for group in optimizer.param_groups], snapshot(optimizer)


def state_is_keyed_by_parameter(cls):
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)
    held = optimizer.state[net[0].weight]  # the step fills this dict
    said = [type(optimizer.state) is defaultdict, dict(held), len(optimizer.state)]
    advance(optimizer, 2)
    said.append([optimizer.state[p] is held for p in net.parameters()])
    said.append(copy.deepcopy([dict(optimizer.state[p]) for p in net.parameters()]))
    for p in net.parameters():
        optimizer.state[p]["mine"] = 1
    optimizer.load_state_dict(optimizer.state_dict())
    said.append((type(optimizer.state) is defaultdict, optimizer.state.default_factory is dict))
    stranger = torch.zeros(2)
    said.append((optimizer.state[stranger], stranger in optimizer.state))
    del optimizer.state[stranger]
    advance(optimizer, 1, first=2)
    return said, snapshot(optimizer)


def lr_in_a_tensor(cls):
    """The group keeps the given tensor, and writes into it take effect."""
    lr = torch.tensor(0.1)
    optimizer = cls(model().parameters(), lr=lr, foreach=False)
    said = [optimizer.param_groups[0]["lr"] is lr]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        advance(optimizer, 1, first=step)
        schedule.step()
        said.append(lr.clone())
    lr.fill_(0.3)
    advance(optimizer, 1, first=4)
    return said, snapshot(optimizer)


def shallow_copy(cls):
    """copy.copy shares groups, state and parameters, and both optimizers may step."""
    optimizer = cls(model().parameters(), lr=0.1)
    advance(optimizer, 1)
    other = copy.copy(optimizer)
    said = [other.param_groups is optimizer.param_groups, other.state is optimizer.state, type(other) is type(optimizer)]
    for step in range(4):
        advance((other, optimizer)[step % 2], 1, first=1 + step)
    other.param_groups[0]["lr"] = 0.01
    advance(optimizer, 1, first=5)
    return said, snapshot(optimizer), snapshot(other)


def copied_with_its_model(how):
    def scenario(cls):
        net = model()
        optimizer = cls(net.parameters(), lr=0.1)
        advance(optimizer, 2)
        optimizer.register_step_post_hook(lambda *_: pytest.fail("hooks are not copied"))
        twin_net, twin = how((net, optimizer))
        said = [all(p is q for p, q in zip(twin_net.parameters(), parameters(twin), strict=True))]
        before = snapshot(optimizer)
        advance(twin, 2, first=2)
        same(snapshot(optimizer), before)
        return said, snapshot(twin), [p.detach() for p in twin_net.parameters()]

    return scenario


def old_pickle(cls):
    """A state pickled by an older torch: groups lack newer keys, the step count is a number."""
    optimizer = cls(model().parameters(), lr=0.1)
    advance(optimizer, 2)
    state = optimizer.__getstate__() | {"state": defaultdict(dict, {p: dict(s) for p, s in optimizer.state.items()})}
    for group in state["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "nesterov", "decoupled_weight_decay"):
            group.pop(key, None)
    for fields in state["state"].values():
        if "step" in fields:
            fields["step"] = float(fields["step"])
    revived = cls.__new__(cls)
    revived.__setstate__(state)
    revived.param_groups[0]["fused"] = None  # torch's SGD fills in False
    advance(revived, 2, first=2)
    return {k: v for group in revived.param_groups for k, v in group.items() if k != "params"}, snapshot(revived)


def old_checkpoint(cls):
    optimizer = cls(model().parameters(), lr=0.1)
    advance(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            group.pop(key, None)
    for fields in saved["state"].values():
        if "step" in fields:
            fields["step"] = int(fields["step"])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["fused"] = None  # torch's SGD fills in False
    advance(optimizer, 2, first=2)
    return snapshot(optimizer)


def two_optimizers(cls):
    """Two optimizers each have one half of a model."""
    net = model()
    first, second = cls(net[0].parameters(), lr=0.1), cls(net[2].parameters(), lr=0.02)
    for seed in range(3):
        give(first, seed)
        give(second, 10 + seed)
        first.step()
        second.step()
    first.zero_grad()
    return snapshot(first), snapshot(second), [p.grad is None for p in net.parameters()]


SCENARIOS = {
    **{f.__name__: f for f in (step_hooks, pre_hook_of_a_wrong_kind, state_dict_hooks, load_state_dict_hooks)},
    **{
        f.__name__: f
        for f in (
            hook_that_adds_a_group_before_saving,
            hook_that_changes_the_optimizer_after_loading,
            closures,
            zero_grad,
            representation,
            names_in_groups,
        )
    },
    **{f.__name__: f for f in (state_is_keyed_by_parameter, lr_in_a_tensor, shallow_copy, old_pickle, old_checkpoint, two_optimizers)},
    "deepcopy": copied_with_its_model(copy.deepcopy),
    "pickle": copied_with_its_model(lambda pair: pickle.loads(pickle.dumps(pair))),
}


@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient")
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize("name", PAIRS)
def test_scenario_gives_the_transcript_of_torch(name, scenario):
    ours, theirs = PAIRS[name]
    same(scenario(ours), scenario(theirs))


class IgnoresHooks(torch_api.MaskedSGD):
    def register_step_pre_hook(self, hook):
        return super().register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("scenario", "broken"),
    [(step_hooks, IgnoresHooks), (two_optimizers, functools.partial(torch_api.MaskedSGD, dampening=0.001, momentum=0.1))],
    ids=["hooks", "numbers"],
)
def test_comparison_detects_a_class_that_differs(scenario, broken):
    with pytest.raises(AssertionError):
        same(scenario(broken), scenario(torch.optim.SGD))


# ---------------------------------------------------------------------- tests without a transcript


def labels(cls):
    optimizer = cls(model().parameters(), lr=0.1)
    give(optimizer, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("Optimizer.")}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11 warns
@pytest.mark.parametrize("name", PAIRS)
def test_profiler_shows_the_step_by_class_name(name):
    ours, theirs = PAIRS[name]
    expected = {f"Optimizer.step#Masked{name}.step": 1, f"Optimizer.zero_grad#Masked{name}.zero_grad": 1}
    assert labels(ours) == expected == {key.replace("#", "#Masked"): count for key, count in labels(theirs).items()}


def test_state_dict_hook_gets_the_dict_of_the_caller():
    optimizer = torch_api.MaskedAdam(model().named_parameters(), mask="0.*")
    advance(optimizer, 1)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state_dict: seen.append(sorted(state_dict["state"])))
    assert sorted(optimizer.state_dict()["state"]) == seen[0] == [0, 1, 2, 3]
