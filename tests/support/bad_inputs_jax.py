"""Bad inputs of the JAX side and of the conversions between JAX and torch, as data. tests/repository/test_errors.py runs them."""

from collections import UserDict
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from bad_inputs import Bad, without_memory
from torch.testing._internal.two_tensor import TwoTensor

import bridge
from bridge import rules
from bridge._interop.dlpack import device_of

TREE = {"body": {"weight": jnp.ones((3, 2)), "bias": jnp.ones(3)}, "head": {"weight": jnp.ones((2, 3))}}


HEAD = {"weight": jnp.ones((2, 4)), "bias": jnp.ones(2)}


def grads():
    return jax.tree.map(jnp.ones_like, TREE)


def created(definition):
    return lambda _: definition.create(TREE)


def deleted():
    x = jnp.ones(3)
    x.delete()
    return x


BRIDGE = [
    Bad("a tensor that requires grad", lambda _: bridge.to_jax(torch.zeros(3, requires_grad=True))),
    Bad("a tensor on the meta device", lambda _: bridge.to_jax(torch.zeros(3, device="meta"))),
    Bad("a sparse tensor", lambda _: bridge.to_jax({"w": torch.zeros(3).to_sparse()})),
    Bad("a lazy conjugate", lambda _: bridge.to_jax(torch.zeros(3, dtype=torch.complex64).conj())),
    Bad("a tensor whose memory was freed", lambda _: bridge.to_jax(without_memory(torch.zeros(3)))),
    Bad("a tensor that wraps others", lambda _: bridge.to_jax({"w": TwoTensor(torch.zeros(3), torch.zeros(3))})),
    Bad("a tensor with gaps", lambda _: bridge.to_jax(torch.zeros(4, 4)[:, ::2])),
    Bad("a tensor on a device that jax has not", lambda _: device_of(SimpleNamespace(device=torch.device("xpu:0")))),
    Bad("a traced array", lambda _: jax.jit(bridge.to_torch)(jnp.ones(3))),
    Bad("a donated array", lambda _: bridge.to_torch(deleted())),
    Bad("a random key", lambda _: bridge.to_torch({"rng": jax.random.key(0)})),
    Bad("an array of a type that torch has not", lambda _: bridge.to_torch({"w": jnp.ones(3, jnp.int4)})),
    Bad("a container that is no pytree", lambda _: bridge.to_jax({"config": UserDict(weight=torch.zeros(3))})),
    Bad("a tree for another module", lambda net: bridge.load_module_tree(net, {"neck": {"weight": jnp.ones(3)}})),
    Bad("a tree that lacks a parameter", lambda net: bridge.load_module_tree(net, {"body": {"weight": jnp.ones((3, 4))}})),
    Bad("an array of another shape for a parameter", lambda net: bridge.load_module_tree(net, bridge.to_jax(net) | {"head": HEAD})),
    Bad("a name given twice", lambda _: bridge._names.nest([("w", 1), ("w", 2)])),
    Bad("a name below another", lambda _: bridge._names.nest([("w", 1), ("w.x", 2)])),
]

JAX = [
    Bad("a traced mask", lambda _: jax.jit(lambda m: bridge.resolve_mask({"w": m}, {"w": jnp.ones(3)}))(jnp.ones(3, bool))),
    Bad("a mask whose memory was freed", lambda _: bridge.resolve_mask({"w": without_memory(torch.ones(3) > 0)}, {"w": jnp.ones(3)})),
    Bad("freeze without saying what", lambda _: bridge.freeze(frozen=None)),
    Bad("a rule without the parameters", lambda _: rules.sgd(0.1).update(grads(), rules.sgd(0.1).init(TREE))),
    Bad("lookahead without the parameters", lambda _: unpaired().update(grads(), unpaired().init(TREE))),
    Bad("labels that leave a leaf out", lambda _: bridge.resolve_labels({"a": "x"}, {"a": jnp.ones(2), "b": jnp.ones(2)})),
    Bad("labels that do not sort", lambda _: bridge.partition({"a": optax.sgd(0.1), 1: optax.sgd(0.1)}, "a")),
    Bad("a label without a transformation", lambda _: bridge.partition({"a": optax.sgd(0.1)}, {"body": "a", "head": "b"}).init(TREE)),
    Bad(
        "a transformation without a leaf",
        lambda _: bridge.partition({"a": optax.sgd(0.1), "b": optax.sgd(0.1)}, {"body": "a", "head": "a"}).init(TREE),
    ),
    Bad("a state that flax saved with another mask", lambda _: with_another_mask()),
    Bad("other parameters than at init", lambda _: other_parameters(bridge.select(optax.sgd(0.1), "head.*"))),
]


def unpaired():
    return bridge._transforms.lookahead.over_plain_params(optax.lookahead(optax.sgd(0.1), 5, 0.5))


def with_another_mask():
    state = bridge.select(optax.sgd(0.1), "head.*").init(TREE)
    return bridge._transforms.masking._labels_from_state_dict(state.labels, {"elements": {"['head']['weight']": np.ones((2, 3), bool)}})


def other_parameters(tx):
    more = TREE | {"neck": jnp.ones(2)}
    return tx.update(jax.tree.map(jnp.ones_like, more), tx.init(TREE), more)


class Empty(bridge.OptimizerDef):
    """A definition without any method."""


class HalfDefined(Empty):
    def init_param_state(self, param):
        return ()


class NoTransformation(bridge._flax_optim.definitions.OptaxDef):
    """A definition without a transformation."""


SOME = {"body": {"bias": np.array([True, False, True]), "weight": False}, "head": {"weight": True}}
PAIR = bridge.MultiOptimizer(("body.*", bridge.Momentum(0.1)), ("head.*", bridge.GradientDescent(0.1)))


def state_of(definition, change):
    """Restore an optimizer from its own state after `change`."""
    optimizer = definition.create(TREE)
    saved = optimizer.state_dict()
    change(saved)
    return optimizer.restore_state(saved)


FLAX = [
    Bad("a definition without a state", created(Empty(None))),
    Bad("a definition without an update", lambda _: HalfDefined(None).create(TREE).apply_gradient(grads())),
    Bad("a definition without a transformation", created(NoTransformation(bridge.Momentum(0.1).hyper_params))),
    Bad("a definition's update without parameters", lambda _: bridge.Adam(0.1).update(grads(), bridge.Adam(0.1).init(TREE))),
    Bad("lr and learning_rate", lambda _: bridge.Adam(learning_rate=0.1, lr=0.1)),
    Bad("no learning rate", lambda _: bridge.Adam().create(TREE).apply_gradient(grads())),
    Bad("an unknown hyper param", lambda _: bridge.Adam(0.1).create(TREE).apply_gradient(grads(), momentum=0.9)),
    Bad("an option that changes the state", lambda _: bridge.RMSProp(0.1).create(TREE).apply_gradient(grads(), centered=True)),
    Bad("gradients of another structure", lambda _: bridge.Adam(0.1).create(TREE).apply_gradient({"body": TREE["body"]})),
    Bad("a gradient that is None", lambda _: bridge.Adam(0.1).create({"w": jnp.ones(3)}).apply_gradient({"w": None})),
    Bad("a gradient of another shape", lambda _: bridge.Adam(0.1).create({"w": jnp.ones(3)}).apply_gradient({"w": jnp.ones(4)})),
    Bad("a saved state with a gap", lambda _: state_of(bridge.Adam(0.1), lambda d: d["state"].pop("step"))),
    Bad("a saved state of another shape", lambda _: state_of(bridge.Adam(0.1), lambda d: d["target"]["body"].update(bias=np.ones(5)))),
    Bad("unreplicate of what is not replicated", lambda _: bridge.Adam(0.1).create(TREE).unreplicate()),
    Bad("a traversal by a pattern", lambda _: bridge.ModelParamTraversal("head.*")),
    Bad("MultiOptimizer of nothing", lambda _: bridge.MultiOptimizer()),
    Bad("MultiOptimizer of what is no pair", lambda _: bridge.MultiOptimizer("head.*")),
    Bad(
        "two pairs for one leaf",
        created(bridge.MultiOptimizer(("body.*", bridge.Adam(0.1)), ("*.weight", bridge.Adam(0.1)))),
    ),
    Bad("a pair for some elements", created(bridge.MultiOptimizer((SOME, bridge.Adam(0.1))))),
    Bad("a state of other parameters", lambda _: of_other_parameters()),
    Bad("a hyper param of a pair that is not there", lambda _: PAIR.create(TREE).apply_gradient(grads(), **{"2.lr": 0.1})),
    Bad("hyper_params for one of two pairs", lambda _: PAIR.create(TREE).apply_gradient(grads(), hyper_params=[None])),
]


def of_other_parameters():
    """Restore state of a selector that picked other leaves."""
    wide = bridge.MultiOptimizer(("*", bridge.Momentum(0.1)))
    narrow = bridge.MultiOptimizer(("head.*", bridge.Momentum(0.1)))
    return narrow.apply_gradient(narrow.hyper_params, TREE, wide.create(TREE).state, grads())


def batched_gradient():
    x = torch.ones(3, requires_grad=True)
    y = bridge.jax_function(jnp.sin)(x)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


def freed_before_the_backward():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    out = bridge.jax_function(jnp.multiply)(x, y)
    without_memory(y)
    out.sum().backward()


def in_a_forked_process():
    with mock.patch.object(bridge._process, "_forked", True):
        return bridge.jax_function(jnp.sin)(torch.ones(3))


class Holder:
    """An object that holds a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


FUNCTIONS = [
    Bad("a tracer", lambda _: jax.jit(bridge.jax_function(jnp.sin))(jnp.ones(3))),
    Bad("tensors on two devices", lambda _: bridge.jax_function(jnp.add)(torch.ones(3), torch.ones(3, device="meta"))),
    Bad("a sparse argument", lambda _: bridge.jax_function(jnp.sin)(torch.eye(3).to_sparse())),
    Bad("an argument whose memory was freed", lambda _: bridge.jax_function(jnp.sin)(without_memory(torch.ones(3)))),
    Bad("an argument that was freed before the backward", lambda _: freed_before_the_backward()),
    Bad("an argument without a hash", lambda _: bridge.jax_function(lambda x, options: x)(torch.ones(3), options={1, 2})),
    Bad("an object that holds a tensor", lambda _: bridge.jax_function(lambda x: 1.0)(Holder(torch.ones(3)))),
    Bad("an output that is no array", lambda _: bridge.jax_function(lambda x: {"y": x, "why": "because"})(torch.ones(3))),
    Bad("gradients batched by torch's old vmap", lambda _: batched_gradient()),
    Bad("a function in a forked process", lambda _: in_a_forked_process()),
]


TABLE = {"Between torch and JAX": BRIDGE, "JAX functions in torch": FUNCTIONS, "JAX transformations": JAX, "flax.optim's definitions": FLAX}
