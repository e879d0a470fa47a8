"""Under torch.compile a step is one graph break: the numbers are the same, and later steps compile nothing."""

import copy
import shutil

import pytest
import torch
from oracles import clones, movement_error
from torch._dynamo.utils import counters

import torch_api

PAIRS = {
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"momentum": 0.9}),
}
INDUCTOR = pytest.param(
    "inductor", marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")]
)
pytestmark = [
    # Dynamo reads the loss, which crosses a graph break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


BATCHES = list(torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(2)))


def trained(cls, options, compiled, schedule=True, first=0):
    """Train eight steps; `compiled` makes the training step of a model and an optimizer, `first` steps precede it."""
    net = network()
    optimizer = cls(net.parameters(), lr=0.05, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if schedule else None
    step = compiled(net, optimizer)
    losses = []
    for i, batch in enumerate(BATCHES):
        with torch._dynamo.config.patch(error_on_recompile=i > 2):
            losses.append(step(batch).detach().clone())
        if scheduler is not None:
            scheduler.step()
    return losses, list(net.parameters())


def plain(net, optimizer):
    def step(batch):
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def model_compiled(backend):
    return lambda net, optimizer: plain(torch.compile(net, backend=backend), optimizer)


def step_compiled(backend):
    return lambda net, optimizer: torch.compile(plain(net, optimizer), backend=backend)


def bound_step_compiled(backend):
    """Compile `optimizer.step` as torch's recipe for compiled optimizers does."""

    def make(net, optimizer):
        run = torch.compile(optimizer.step, backend=backend)

        def step(batch):
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            run()
            return loss

        return step

    return make


def closure_compiled(backend):
    """Compile the whole step; the untraced step calls the closure, whose model is compiled all the same."""

    def make(net, optimizer):
        run = torch.compile(lambda batch: net(batch).square().mean(), backend=backend)

        def step(batch):
            def closure():
                optimizer.zero_grad()
                loss = run(batch)
                loss.backward()
                return loss

            return optimizer.step(closure)

        return step

    return make


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly), INDUCTOR])
@pytest.mark.parametrize("form", [model_compiled, step_compiled])
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_training_moves_like_uncompiled_training_and_torch(name, form, backend):
    ours, theirs, options = PAIRS[name]
    start = list(network().parameters())
    expected_losses, expected = trained(theirs, options, plain)
    counters.clear()
    losses, params = trained(ours, options, form(backend))
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled: this comparison could not fail"
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-6)
    assert max(map(movement_error, params, expected, start)) < 1e-4


def test_step_is_one_graph_break_and_is_not_traced():
    counters.clear()
    trained(torch_api.MaskedAdamW, {}, step_compiled("eager"), schedule=False)
    breaks = [reason for reason in counters["graph_break"] if "OptaxOptimizer.step" in reason]
    assert len(breaks) == 1, list(counters["graph_break"])
    assert "skip" in breaks[0]
    assert not any("bridge" in reason or "torch_api/" in reason for reason in (*counters["graph_break"], *counters["unimplemented"]))


@pytest.mark.parametrize(("form", "graphs"), [(bound_step_compiled, 0), (closure_compiled, 1)])
def test_compiling_the_step_or_its_closure_changes_nothing(form, graphs):
    """Dynamo finds nothing to compile in the step; the closure's model is compiled although the step around it is not."""
    ours, theirs, options = PAIRS["AdamW"]
    _, expected = trained(theirs, options, plain)
    counters.clear()
    _, params = trained(ours, options, form("eager"))
    assert counters["stats"]["unique_graphs"] == graphs
    assert max(map(movement_error, params, expected, network().parameters())) < 1e-5


@pytest.mark.parametrize("when", ["before", "after"])
def test_model_compiled_before_construction_reads_the_moved_parameters(when):
    """Construction moves the parameters; a model compiled earlier reads them at the new address."""
    net, twin = network(), network()
    compiled = torch.compile(net, backend="aot_eager")
    if when == "before":
        compiled(BATCHES[0]).sum().backward()
        net.zero_grad()
    optimizer, reference = torch_api.MaskedSGD(net.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in BATCHES:
        for forward, own in ((compiled, optimizer), (twin, reference)):
            own.zero_grad()
            forward(batch).square().mean().backward()
            own.step()
    start = list(network().parameters())
    assert max(map(movement_error, net.parameters(), twin.parameters(), start)) < 1e-5


def test_freezing_between_compiled_steps_takes_effect():
    net = network()
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1)
    step = torch.compile(plain(net, optimizer), backend="eager")
    step(BATCHES[0])
    optimizer.set_trainable("0.*", False)
    frozen, free = net[0].weight.detach().clone(), net[2].weight.detach().clone()
    step(BATCHES[1])
    assert torch.equal(net[0].weight, frozen)
    assert not torch.equal(net[2].weight, free)


def test_hooks_run_under_compile_with_their_optimizer():
    net = network()
    optimizer = torch_api.MaskedSGD(net.parameters(), lr=0.1)
    said = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: said.append("pre"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: said.append("post"))
    step = torch.compile(plain(net, optimizer), backend="eager")
    for batch in BATCHES[:3]:
        step(batch)
    assert said == ["pre", "post"] * 3


def test_copied_optimizer_of_a_compiled_model_continues_alike():
    net = network()
    optimizer = torch_api.MaskedAdamW(net.parameters(), lr=0.1)
    torch.compile(plain(net, optimizer), backend="eager")(BATCHES[0])
    twin_net, twin = copy.deepcopy((net, optimizer))
    plain(net, optimizer)(BATCHES[1])
    torch.compile(plain(twin_net, twin), backend="eager")(BATCHES[1])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin_net.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch_api.OptaxOptimizer, torch_api.PartitionedOptimizer, torch_api.MultiOptimizer])
@pytest.mark.usefixtures("standard_promotion")
def test_every_class_is_one_graph_break(kind):
    import optax

    import bridge

    make = {
        torch_api.OptaxOptimizer: lambda named: kind(named, optax.sgd, lr=0.1),
        torch_api.PartitionedOptimizer: lambda named: kind(named, {"a": optax.sgd(0.1)}, lambda *_: "a"),
        torch_api.MultiOptimizer: lambda named: kind(named, ("*", bridge.GradientDescent(lr=0.1))),
    }[kind]
    net, twin = network(), network()
    start = clones(net.parameters())
    step = torch.compile(plain(net, make(list(net.named_parameters()))), backend="eager")
    reference = plain(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    for batch in BATCHES[:4]:
        step(batch)
        reference(batch)
    assert max(map(movement_error, net.parameters(), twin.parameters(), start)) < 1e-5
