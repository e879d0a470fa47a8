"""Functions in attributes of a module may refer to the module: the trace computes torch's values and leaves the original unchanged."""

import collections
import functools
import sys
import threading
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 2.0, -1.0]])


class Base(nn.Module):
    """A module with a layer, a parameter, a buffer, and an activation from `bind` that closes over them."""

    def __init__(self, bind):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor([2.0, 0.5, -1.0]))
        self.register_buffer("scale", torch.tensor([3.0, 1.0, 0.25]))
        bind(self)

    def forward(self, x):
        return self.activation(self.linear(x))


class Helper:
    """An object that refers to the module and to its tensors."""

    def __init__(self, module):
        self.module = module
        self.gain, self.scale = module.gain, module.scale

    def __call__(self, x):
        return torch.relu(x) * self.module.gain * self.module.scale

    def run(self, x):
        return torch.relu(x) * self.gain * self.scale


def of(m):
    return lambda x: torch.relu(x) * m.gain * m.scale


def by_weakref(m):
    parent = weakref.ref(m)
    return lambda x, parent=parent: torch.relu(x) * parent().gain * parent().scale


def by_proxy(m):
    proxy = weakref.proxy(m)
    return lambda x: torch.relu(x) * proxy.gain * proxy.scale


def by_tensors(m):
    gain, scale = m.gain, m.scale
    return lambda x: torch.relu(x) * gain * scale


def decorated(m):
    inner = of(m)

    @functools.wraps(inner)
    def outer(x):
        return inner(x)

    return outer


def recursive(m):
    def activation(x, deep=1):
        return activation(x, deep - 1) if deep else torch.relu(x) * m.gain * m.scale

    return activation


def through_a_global(m):
    globals()["NET"] = m
    return lambda x: torch.relu(x) * NET.gain * NET.scale  # noqa: F821


def scaled(x, m):
    return torch.relu(x) * m.gain * m.scale


ACTIVATIONS = {
    "lambda": of,
    "default": lambda m: lambda x, m=m: torch.relu(x) * m.gain * m.scale,
    "keyword": lambda m: functools.partial(lambda x, *, m=m: scaled(x, m)),
    "partial": lambda m: functools.partial(scaled, m=m),
    "partial of a lambda": lambda m: functools.partial(lambda x, scale: torch.relu(x) * m.gain * scale, scale=m.scale),
    "weak reference": by_weakref,
    "weak proxy": by_proxy,
    "tensors": by_tensors,
    "decorated": decorated,
    "recursive": recursive,
    "object": Helper,
    "method of an object": lambda m: Helper(m).run,
    "global": through_a_global,
    "list": lambda m: [of(m)].__getitem__(0),
    "named tuple": lambda m: collections.namedtuple("Pair", "m f")(m, of(m)).f,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_may_close_over_the_module(kind):
    net = Base(lambda m: setattr(m, "activation", ACTIVATIONS[kind](m)))
    function, params = bridge.module_function(net), bridge.module_tree(net)
    attributes = dict(vars(net))
    net(X).sum().backward()
    x = jnp.asarray(X.numpy())
    np.testing.assert_allclose(function(params, x), net(X).detach(), rtol=1e-6)
    found = jax.jit(jax.grad(lambda p: function(p, x).sum()))(params)
    for name, p in net.named_parameters():
        np.testing.assert_allclose(functools.reduce(dict.__getitem__, name.split("."), found), p.grad, rtol=1e-5, err_msg=name)
    given, _ = jax.jit(lambda p, b: function(p, x, buffers=b))(params, {"scale": jnp.full(3, 30.0)})
    np.testing.assert_allclose(given, torch.relu(net.linear(X)).mul(net.gain).mul(30).detach(), rtol=1e-5)
    assert vars(net) == attributes


def closes_over_features(m):
    m.linear.register_forward_hook(lambda module, inputs, output: m._features.__setitem__("1", output))


def closes_over_the_container(m):
    features = m._features
    m.linear.register_forward_hook(lambda module, inputs, output: features.__setitem__("1", output))


def bound_method_of_the_container(m):
    keep = functools.partial(m._features.__setitem__, "1")
    m.linear.register_forward_hook(lambda module, inputs, output: keep(output))


def by_setattr(m):
    m.linear.register_forward_hook(lambda module, inputs, output: setattr(m, "_features", {"1": output}))


def in_another_attribute_of_the_parent(m):
    m.linear.parent = weakref.ref(m)
    m.linear.register_forward_hook(lambda module, inputs, output: module.parent()._features.__setitem__("1", output))


class Extractor(nn.Module):
    """A feature extractor: a hook stores a layer's output in the module, and forward returns the stored output."""

    def __init__(self, register):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self._features = {}
        register(self)

    def forward(self, x):
        self.linear(x)
        return self._features["1"] * 2


HOOKS = [closes_over_features, closes_over_the_container, bound_method_of_the_container, by_setattr, in_another_attribute_of_the_parent]


@pytest.mark.parametrize("register", HOOKS)
def test_hook_may_store_an_output_in_the_module(register):
    net = Extractor(register)
    got = jax.jit(bridge.module_function(net))(bridge.module_tree(net), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, 2 * net.linear(X).detach(), rtol=1e-6)
    net._features.clear()
    bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert net._features == {}


def test_traced_values_do_not_stay_in_the_module_or_its_objects():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(3, 3), None
            self.state = types.SimpleNamespace(hidden=None, seen=[])
            self.queue, self.lists = collections.deque([1, 2], maxlen=2), collections.defaultdict(list)
            self.linear.register_forward_hook(lambda module, inputs, output: setattr(self, "last", output))

        def forward(self, x):
            y = self.linear(x)
            self.state.hidden = self.state.copy = y
            self.state.seen.append(y)
            self.queue.append(y)
            self.lists["y"].append({"y": y})
            return self.state.hidden + self.last + self.queue[-1] + self.lists["y"][-1]["y"] + self.state.seen[-1]

    net = Keeps()
    for run in (bridge.module_function(net), jax.jit(bridge.module_function(net))):
        got = run(bridge.module_tree(net), jnp.asarray(X.numpy()))
        np.testing.assert_allclose(got, 5 * net.linear(X).detach(), rtol=1e-5)
        net.last = None
        run(bridge.module_tree(net), jnp.asarray(X.numpy()) + 1)
        assert net.last is None
        assert vars(net.state) == {"hidden": None, "seen": []}
        assert list(net.queue) == [1, 2]
        assert dict(net.lists) in ({}, {"y": []})


def test_error_in_forward_leaves_no_traced_values():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.state = nn.Linear(3, 3), types.SimpleNamespace()

        def forward(self, x):
            self.state.y = self.linear(x)
            raise RuntimeError("in the middle")

    net = Fails()
    with pytest.raises(RuntimeError, match="in the middle"):
        bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert vars(net.state) == {}


FEATURES = {}


def test_hook_that_writes_to_a_global_container_raises():
    net = Extractor(lambda m: m.linear.register_forward_hook(lambda module, inputs, output: FEATURES.__setitem__("1", output)))
    globals()["FEATURES"] = net._features
    net._features["1"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"'_features'.*self"):
        bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert torch.equal(net._features["1"], torch.ones(2, 3))


def test_buffers_written_by_a_hook_are_returned():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(()))
            count = self.count

            def add(module, inputs, output):
                self.count.add_(output.detach().sum())
                count.add_(1)

            self.linear.register_forward_hook(add)

        def forward(self, x):
            return self.linear(x)

    net = Counts()
    function = jax.jit(lambda p, b: bridge.module_function(net)(p, jnp.asarray(X.numpy()), buffers=b))
    out, new = function(bridge.module_tree(net), {"count": jnp.asarray(5.0)})
    np.testing.assert_allclose(new["count"], 5 + 1 + out.sum(), rtol=1e-5)
    assert net.count == 0


def test_train_step_updates_parameters_in_a_closure():
    nets = [Base(lambda m: setattr(m, "activation", of(m))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    step = torch_api.JaxTrainStep(
        nets[0], lambda model, x: model(x).square().mean(), torch_api.MaskedSGD(nets[0].named_parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.1)
    for _ in range(3):
        got = step(X)
        optimizer.zero_grad()
        loss = nets[1](X).square().mean()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(got, loss.detach(), rtol=1e-5)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_loss_that_calls_the_original_model_raises_with_advice():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    layer, before = net[0], net[0].weight.detach().clone()
    for loss, which in ((lambda model, x: net(x).sum(), r"\(Sequential\)"), (lambda model, x: layer(x).sum(), r"'0' \(Linear\)")):
        step = torch_api.JaxTrainStep(net, loss, torch_api.MaskedSGD(net.named_parameters(), lr=0.1))
        with pytest.raises(ValueError, match=rf"{which} is called,.*model that loss_fn receives") as caught:
            step(X)
        assert f"{Path(__file__).name}:" in caught.value.__notes__[0]
        assert torch.equal(net[0].weight, before)


def test_loss_may_read_tensors_of_the_original_model():
    net = Base(lambda m: setattr(m, "activation", torch.relu))

    def loss(model, x):
        return (model(x) * net.scale).sum() + net.gain.square().sum()

    step = torch_api.JaxTrainStep(net, loss, torch_api.MaskedSGD(net.named_parameters(), lr=0.1))
    expected = loss(net, X)
    expected.backward()
    gain = net.gain.detach() - 0.1 * net.gain.grad
    np.testing.assert_allclose(step(X), expected.detach(), rtol=1e-6)
    torch.testing.assert_close(net.gain.detach(), gain)


def test_forward_may_be_wrapped_on_the_instance():
    net = nn.Linear(3, 2)
    plain = net.forward
    net.forward = lambda x: plain(x) * 2
    got = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, net(X).detach(), rtol=1e-6)


def test_loss_may_call_untrained_parts_of_the_original_model():
    net = nn.ModuleDict({"body": nn.Linear(3, 2), "act": nn.Softplus(), "head": nn.Linear(2, 2).requires_grad_(False)})
    act, head = net["act"], net["head"]

    class Criterion(nn.Module):
        def forward(self, y):
            return head(y).square().mean()

    criterion = Criterion()

    def loss(model, x):
        return criterion(act(model["body"](x))) + head(model["body"](x)).mean()

    step = torch_api.JaxTrainStep(net, loss, torch_api.MaskedSGD(net["body"].named_parameters(), lr=0.1))
    expected = loss(net, X)
    np.testing.assert_allclose(step(X), expected.detach(), rtol=1e-5)


def test_trace_restores_the_classes():
    net = Base(lambda m: setattr(m, "activation", of(m)))
    kinds = [type(net), nn.Linear, nn.Module]
    before = [dict(vars(kind)) for kind in kinds]
    bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert [dict(vars(kind)) for kind in kinds] == before


def test_class_that_refuses_attributes_is_traced():
    class Refuses(type):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{cls.__name__} is frozen")

    class Frozen(nn.Linear, metaclass=Refuses):
        pass

    net = nn.Sequential(nn.Linear(3, 3), Frozen(3, 2), nn.Tanh())
    kinds = [nn.Sequential, nn.Linear, nn.Tanh, Frozen]
    before = [dict(vars(kind)) for kind in kinds]
    got = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, net(X).detach(), rtol=1e-5)
    assert [dict(vars(kind)) for kind in kinds] == before


class Slots:
    __slots__ = ("kept", "seen")

    def __init__(self):
        self.seen = []


def test_traced_values_do_not_stay_in_slots_or_class_attributes():
    class Keeps(nn.Module):
        cache, log, queue = {"a": 1}, [], collections.deque([2])

        def __init__(self):
            super().__init__()
            self.linear, self.slots = nn.Linear(3, 3), Slots()

        def forward(self, x):
            y = self.slots.kept = type(self).last = self.cache["y"] = self.linear(x)
            self.slots.seen.append(y)
            self.log.append(y)
            self.queue.append(y)
            type(self).calls = 1
            return y + self.slots.kept + self.last

    net = Keeps()
    got = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, 3 * net.linear(X).detach(), rtol=1e-5)
    assert (net.cache, net.log, list(net.queue), net.slots.seen) == ({"a": 1}, [], [2], [])
    assert not hasattr(Keeps, "last")
    assert not hasattr(net.slots, "kept")
    assert Keeps.calls == 1


def test_failed_restore_does_not_hide_the_users_error():
    class Stubborn(list):
        def clear(self):
            raise RuntimeError("not cleared")

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.first, self.last = nn.Linear(3, 3), Stubborn(), types.SimpleNamespace(x=None)

        def forward(self, x):
            self.last.x = self.linear(x)
            self.first.append(self.last.x)
            raise ValueError("the user's own error")

    net = Fails()
    with pytest.raises(ValueError, match="the user's own error"):
        bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert net.last.x is None


def test_another_thread_may_fill_a_queue_of_the_module_during_a_trace():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.source = nn.Linear(3, 2), types.SimpleNamespace(queue=collections.deque(range(1000)), seen={})

        def forward(self, x):
            return self.linear(x)

    net, ends, interval = Holds(), threading.Event(), sys.getswitchinterval()
    expected = net(X).detach()

    def fill():
        i = 0
        while not ends.is_set():
            i += 1
            net.source.queue.append(i)
            net.source.queue.popleft()
            net.source.seen[i] = i
            if i % 1000 == 0:
                net.source.seen.clear()

    thread = threading.Thread(target=fill, daemon=True)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(20):
            got = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
            np.testing.assert_allclose(got, expected, rtol=1e-5)
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_module_may_have_slots():
    class Scales(nn.Module):
        __slots__ = ("layer", "scale", "unset")

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            object.__setattr__(self, "scale", 3.0)
            object.__setattr__(self, "layer", [self.linear])

        def forward(self, x):
            return self.layer[0](x) * self.scale

    net = Scales()
    expected = net(X).detach()
    params = bridge.module_tree(net)
    got = bridge.module_function(net)(jax.tree.map(lambda p: 2 * p, params), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, 2 * expected, rtol=1e-5)


def by_key(layer):
    scales = {layer: 5.0}
    return lambda module, inputs, output: output * scales.get(module, 1.0)


def by_nested_containers(layer):
    rows = {"rows": [({"scale": 5.0}, frozenset([layer]))]}
    return lambda module, inputs, output: output * next((row["scale"] for row, layers in rows["rows"] if module in layers), 1.0)


def by_default(layer):
    return lambda module, inputs, output, chosen=[layer]: output * 5 if module in chosen else output


def by_partial(layer):
    return functools.partial(lambda chosen, module, inputs, output: output * 5 if module in chosen else output, {layer})


def by_identity(layer):
    return lambda module, inputs, output: output * 5 if module is layer else output


@pytest.mark.parametrize("make", [by_key, by_nested_containers, by_default, by_partial, by_identity])
def test_hook_may_look_up_its_module_in_a_container(make):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for layer in net:
        layer.register_forward_hook(make(net[0]))
    got = bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, net(X).detach(), rtol=1e-5)


def test_loss_may_read_outputs_that_a_hook_stores_by_module():
    net, kept = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), {}
    for layer in net:
        layer.register_forward_hook(lambda module, inputs, output: kept.__setitem__(module, output))

    def loss(model, x):
        kept.clear()
        return model(x).mean() + sum(y.square().mean() for y in kept.values())

    expected = loss(net, X).detach()
    step = torch_api.JaxTrainStep(net, loss, torch_api.MaskedSGD(net.parameters(), lr=0.1))
    np.testing.assert_allclose(step(X), expected, rtol=1e-5)


def test_value_written_only_into_a_copied_container_raises():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    kept = {net[0]: None}
    net[0].register_forward_hook(lambda module, inputs, output: kept.__setitem__(module, output))
    with pytest.raises(ValueError, match=r"'0._forward_hooks'.*would be lost"):
        bridge.module_function(net)(bridge.module_tree(net), jnp.asarray(X.numpy()))
    assert kept == {net[0]: None}
