"""Bad inputs of the train step, as data. tests/repository/test_errors.py runs them."""

import copy
from collections import UserDict
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import torch
from bad_inputs import Bad, without_memory
from torch.nn import functional as F

from torch_api import JaxTrainStep, MaskedAdamW
from torch_api._step.optimizer_access import OptimizerAccess
from torch_api._train import arguments, module_guard

X, Y = torch.randn(5, 4), torch.randn(5, 2)


def loss(model, x, y):
    return F.mse_loss(model["head"](model["body"](x)), y)


def made(loss_fn=loss, *, first=True, optimizer=None, **options):
    """Return a function that makes a train step of a model and calls it once."""

    def make(net):
        train_step = JaxTrainStep(net, loss_fn, MaskedAdamW(net.named_parameters(), lr=0.1, **optimizer or {}), **options)
        if first:
            train_step(X, Y)
        return train_step

    return make


class Noted(UserDict):
    """A mapping with an attribute that is not an item."""

    def __init__(self, note):
        super().__init__(x=X)
        self.note = note


def of_note(model, x, y):
    return loss(model, x["x"], y) * len(x.note)


def itself(net):
    """Return the model, for calls that construct an optimizer, which moves parameters, before they raise."""
    return net


def fresh(loss_fn, **options):
    return made(loss_fn, first=False, **options)


def with_optimizer(make, change=lambda net: None):
    def construct(net):
        change(net)
        JaxTrainStep(net, loss, make(net))

    return construct


def adamw(net):
    return MaskedAdamW(net.named_parameters(), lr=0.1)


def over_two_devices(net):
    net.register_buffer("far", torch.zeros(2, device="meta"))


def distributed(net):
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", torch.nn.ModuleDict):
        JaxTrainStep(net, loss, adamw(net))


def calling_the_original(net):
    body = net["body"]
    return fresh(lambda model, x, y: F.mse_loss(model["head"](body(x)), y))(net)


def with_an_object(model, x, y):
    value = loss(model, x, y)
    return value, SimpleNamespace(value=value)


def with_a_buffer(net):
    net.register_buffer("scale", torch.ones(2))
    return made()(net)


def that_writes_a_buffer_in_a_loop(net):
    net.register_buffer("scale", torch.ones(2))

    def looped(model, x, y):
        jax.lax.scan(lambda carry, _: (model.scale.add_(1), (carry, None))[1], jnp.float32(0), None, length=2)
        return loss(model, x, y)

    return fresh(looped)(net)


def with_nan(train_step):
    with jax.debug_nans(True):
        train_step(X * float("nan"), Y)


def sharded(net):
    optimizer = adamw(net)
    optimizer._trainable[0].dtensor_layout = SimpleNamespace()
    watch = module_guard.ModuleGuard(net)
    arguments.check_same_params(watch, OptimizerAccess(optimizer))


def donated():
    x = jnp.ones((5, 4))
    x.delete()
    return x


def autocast(train_step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train_step(X, Y)


def averaged(train_step):
    with train_step.optimizer.ema_params():
        train_step(X, Y)


def forked(train_step):
    with mock.patch("bridge._process._forked", True):
        train_step(X, Y)


TABLE = {
    "JaxTrainStep": [
        Bad("a function for a module", lambda net: JaxTrainStep(torch.relu, loss, adamw(net)), itself),
        Bad("a loss that is no function", lambda net: JaxTrainStep(net, "mse", adamw(net)), itself),
        Bad("torch's own optimizer", lambda net: JaxTrainStep(net, loss, torch.optim.AdamW(net.parameters()))),
        Bad("accumulate of 0", lambda net: JaxTrainStep(net, loss, adamw(net), accumulate=0), itself),
        Bad("a module in DistributedDataParallel", distributed, itself),
        Bad("a sharded parameter", sharded, itself),
        Bad("a sparse buffer", with_optimizer(adamw, lambda net: net.register_buffer("graph", torch.eye(2).to_sparse())), itself),
        Bad("a module on two devices", with_optimizer(adamw, over_two_devices), itself),
        Bad(
            "a parameter that the optimizer has not",
            with_optimizer(lambda net: MaskedAdamW(net["head"].named_parameters(), lr=0.1)),
            itself,
        ),
        Bad(
            "a parameter that the module has not",
            lambda net: JaxTrainStep(net["head"], loss, adamw(net)),
            itself,
        ),
        Bad("a loss that is no scalar", lambda s: s(X, Y), fresh(lambda m, x, y: m["head"](m["body"](x)))),
        Bad("a loss that calls the original model", lambda s: s(X, Y), calling_the_original),
        Bad("an object with arrays in aux", lambda s: s(X, Y), fresh(with_an_object, has_aux=True)),
        Bad("a loss that is no number", lambda s: s(X, Y), fresh(lambda m, x, y: None)),
        Bad("has_aux without aux", lambda s: s(X, Y), fresh(loss, has_aux=True)),
        Bad(
            "a loss that no parameter takes part in",
            lambda s: s(X, Y),
            fresh(lambda m, x, y: F.mse_loss(m["head"](m["body"](x)).detach(), y)),
        ),
        Bad("a loss that writes a buffer inside lax.scan", lambda s: s(X, Y), that_writes_a_buffer_in_a_loop),
        Bad("NaN under jax_debug_nans", with_nan, made()),
        Bad("a loss of frozen parameters", lambda s: (s.optimizer.set_trainable("*", False), s(X, Y)), made()),
        Bad("an input that requires grad", lambda s: s(X.clone().requires_grad_(), Y), made()),
        Bad("an input on another device", lambda s: s(X.to("meta"), Y), made()),
        Bad("an input whose memory was freed", lambda s: s(without_memory(X.clone()), Y), made()),
        Bad("a buffer whose memory was freed", lambda s: (without_memory(s.module.scale), s(X, Y)), with_a_buffer),
        Bad("a sparse input", lambda s: s(X.to_sparse(), Y), made()),
        Bad("an input of a type that nobody knows", lambda s: s(X, object()), made()),
        Bad("a call inside jit", lambda s: jax.jit(lambda x: s(x, Y))(jnp.ones((5, 4))), made()),
        Bad("a donated array", lambda s: s(donated(), Y), made()),
        Bad("a call inside torch.autocast", autocast, made()),
        Bad("a train step inside ema_params", averaged, made(optimizer={"ema_decay": 0.9})),
        Bad("a micro-batch inside ema_params", averaged, made(optimizer={"ema_decay": 0.9}, accumulate=2)),
        Bad("a copy of a train step", copy.deepcopy, made()),
        Bad("an extra argument that no transformation takes", lambda s: s(X, Y, value=1.0), made()),
        Bad("a batch as keywords", lambda s: s(x=X, y=Y), made()),
        Bad("a tensor in an attribute of a mapping", lambda s: s(Noted(X), Y), made()),
        Bad("an attribute of a mapping that has no value to compare", lambda s: s(Noted([object()]), Y), fresh(of_note)),
        Bad("a call in a forked process", forked, made()),
    ]
}
