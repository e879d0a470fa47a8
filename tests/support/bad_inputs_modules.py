"""Bad inputs of modules as functions, as data. tests/repository/test_errors.py runs them."""

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from bad_inputs import Bad
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import bridge
from bridge._process import x64
from bridge._tracing.op_registry import op

X = jnp.ones((2, 3))
KEPT = []


class Applies(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def applied(function, *inputs, **keywords):
    return lambda _: bridge.module_function(nn.Sequential(Applies(function)))({}, *(inputs or (X,)), **keywords)


def with_params(change, module=None):
    def call(_):
        net = module or nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        return bridge.module_function(net)(change(bridge.module_tree(net)), X)

    return call


def leaked(x):
    KEPT.append(x)
    return x


def used_after_its_trace(_):
    applied(leaked)(None)
    return KEPT.pop() + 1


PLAIN = torch.zeros(2, 3)
WITHOUT_MEMORY = torch.zeros(3, device="meta")
OTHER = nn.Parameter(torch.zeros(3))


def into_a_plain_tensor(x):
    PLAIN[0] = x[0]


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


def wrong_buffers(buffers):
    return lambda _: bridge.write_buffers(nn.BatchNorm1d(3), buffers)


def double_without_x64(_):
    net = nn.Linear(3, 2).double()
    with x64(False):
        bridge.module_function(net)(bridge.module_tree(net), X)


class Doubled(torch.autograd.Function):
    """An autograd function that doubles its input; subclasses replace its backward."""

    @staticmethod
    def forward(ctx, x):
        return (x[0] if isinstance(x, list) else x) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class InPlace(Doubled):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)


class Several(Doubled):
    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class Summed(Doubled):
    @staticmethod
    def backward(ctx, grad):
        return grad.sum()


def differentiated(function):
    loss = bridge.module_function(nn.Sequential(Applies(lambda x: function.apply(x).sum())))
    return lambda _: jax.grad(lambda x: loss({}, x))(X)


def jitted(function, **keywords):
    module = bridge.module_function(nn.Sequential(Applies(function)))
    return lambda _: jax.jit(lambda x: module({}, x, **keywords))(X)


def with_a_backward_hook(_):
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    net[1].register_full_backward_hook(print)
    bridge.module_function(net)(bridge.module_tree(net), X)


def cast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


class Clamped(nn.Linear):
    """A layer that writes into its own weight."""

    def forward(self, x):
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


class Lazy(nn.Linear):
    """A layer whose buffer has no value before the first call."""

    def forward(self, x):
        self.centre = super().forward(x).mean(0)
        return x


def with_an_unset_buffer(_):
    module = Lazy(3, 3)
    module.register_buffer("centre", None)
    return bridge.module_function(module)(bridge.module_tree(module), X)


class Keeps(nn.Module):
    """A module whose hook stores an output in a container that it reads through a global name."""

    def __init__(self):
        super().__init__()
        self.features = FEATURES
        self.register_forward_hook(lambda module, inputs, output: FEATURES.append(output))

    def forward(self, x):
        return x * 2


FEATURES = []


def counted(_):
    with FlopCounterMode(display=False):
        applied(torch.relu)(None)


BUFFERS = {"running_mean": jnp.ones(3), "running_var": jnp.ones(3), "num_batches_tracked": jnp.ones((), jnp.int32)}

FUNCTION = [
    Bad("a function for the module", lambda _: bridge.module_function(torch.relu)),
    Bad("a scripted module", lambda _: bridge.module_function(object.__new__(torch.jit.ScriptModule))),
    Bad("parameters that are no dict", with_params(lambda tree: [1])),
    Bad("a parameter that the module has not", with_params(lambda tree: tree | {"2": {"weight": X}})),
    Bad("a misspelt parameter", with_params(lambda tree: {"0": {"wieght": X, "bias": X[0]}, "1": tree["1"]})),
    Bad("a parameter that is missing", with_params(lambda tree: {"0": tree["0"]})),
    Bad("a tied parameter twice", with_params(lambda tree: tree | {"1": {"weight": X, "bias": tree["1"]["bias"]}}, tied())),
    Bad("a parameter of another shape", with_params(lambda tree: jax.tree.map(lambda a: a[None], tree))),
    Bad("a torch parameter", with_params(lambda tree: jax.tree.map(bridge.to_torch, tree))),
    Bad("a number for a parameter", with_params(lambda tree: {"0": tree["0"], "1": {"weight": 1.0, "bias": 2.0}})),
    Bad("float64 parameters while x64 is off", double_without_x64),
    Bad("a torch input", applied(torch.relu, torch.ones(2))),
    Bad("a seed for a key", applied(torch.relu, X, rng=0)),
    Bad("dropout without a key", applied(F.dropout)),
    Bad("an input of a type that torch has not", applied(torch.relu, jnp.ones(3, jnp.int4))),
    Bad("two dtypes in a product", applied(lambda x: F.linear(x, torch.ones(2, x.shape[-1], dtype=torch.float16)))),
    Bad("a hook on a tensor", applied(lambda x: x.register_hook(print))),
    Bad("a gradient by torch", applied(lambda x: torch.autograd.grad(x.sum(), x))),
    Bad("the graph of torch", applied(lambda x: (x.requires_grad_() * 2).grad_fn.next_functions)),
    Bad("a buffer without a value that gets one", with_an_unset_buffer),
    Bad("an operation that jax has not", applied(lambda x: x.unsqueeze_(0))),
    Bad("arguments that an implementation has not", applied(lambda x: torch.repeat_interleave(x.long()))),
    Bad("rows that a traced tensor counts", jitted(lambda x: x.nonzero())),
    Bad("a branch on values", jitted(lambda x: x if x.sum() > 0 else -x)),
    Bad("a size by values", jitted(lambda x: F.one_hot(x.long()))),
    Bad("a number that is traced where torch has one", jitted(lambda x: F.dropout(x, x.sum()), rng=jax.random.key(0))),
    Bad("values for numpy", jitted(lambda x: x.numpy())),
    Bad("torch.vmap", jitted(lambda x: torch.vmap(torch.sin)(x))),
    Bad("torch.func", jitted(lambda x: torch.func.grad(lambda y: F.linear(y, torch.ones(1, 3)).sum())(x))),
    Bad("a tensor without memory", applied(lambda x: x + WITHOUT_MEMORY)),
    Bad("a backward hook of a module", with_a_backward_hook),
    Bad("a module within FlopCounterMode", counted),
    Bad("a hook that keeps an output by a global name", lambda _: bridge.module_function(Keeps())({}, X)),
    Bad("a distribution as output", applied(lambda x: {"policy": torch.distributions.Normal(x, 1.0)})),
    Bad("lengths that are not sorted", applied(lambda x: pack_padded_sequence(x.T, [1, 2]).data)),
    Bad("a parameter of another module", applied(lambda x: x @ OTHER)),
    Bad("a traced value written into a plain tensor", applied(into_a_plain_tensor)),
    Bad("a result written into a plain tensor", applied(lambda x: torch.add(x, 1, out=PLAIN))),
    Bad("a result of another shape written in place", applied(lambda x: x[:1].add_(x))),
    Bad("a tensor used after its trace", used_after_its_trace),
    Bad("an attribute that no tensor has", applied(lambda x: x._nothing)),
    Bad("an index out of range", applied(lambda x: x[2])),
    Bad("a mask with values that are not known as an index", jitted(lambda x: x[x > 0])),
    Bad("values for the places of such a mask", jitted(lambda x: x.__setitem__(x > 0, x[0]))),
    Bad("an autograd.Function that writes into its input", applied(InPlace.apply)),
    Bad("an autograd.Function with a list of tensors", applied(lambda x: Doubled.apply([x]))),
    Bad("a backward with too many gradients", differentiated(Several)),
    Bad("a backward with a gradient of another shape", differentiated(Summed)),
    Bad("torch.autocast in a forward", applied(cast)),
    Bad("a generator for random numbers", applied(lambda x: torch.randn(3, generator=torch.Generator()) + x, rng=jax.random.key(0))),
    Bad("a forward that writes into a parameter", with_params(lambda tree: tree, nn.Sequential(Clamped(3, 2)))),
    Bad("a split that does not add up", applied(lambda x: x.split_with_sizes([1, 1], 1))),
    Bad("a part that reaches beyond its dim", applied(lambda x: x.narrow(1, -2, 3))),
    Bad("integers to a negative power", applied(lambda x: x.long() ** -1)),
    Bad("a second implementation of one function", lambda _: op("cos")(jnp.cos)),
    Bad("strides beyond a tensor", applied(lambda x: x[0].as_strided((2, 2), (3, 1)))),
    Bad("max_norm of an embedding", applied(lambda x: F.embedding(torch.arange(2), x, max_norm=1.0))),
    Bad("LU factors without pivots", applied(lambda x: torch.linalg.lu(x[:, :2], pivot=False))),
    Bad("batch norm of one value", applied(lambda x: F.batch_norm(x[:1], None, None, training=True))),
    Bad("None for the tree of parameters to load", lambda _: bridge.load_module_tree(nn.Linear(3, 2), None)),
    Bad("None for the buffers to write", wrong_buffers(None)),
    Bad("a buffer that is missing", wrong_buffers({"running_mean": jnp.ones(3)})),
    Bad("a buffer of another shape", wrong_buffers(BUFFERS | {"running_mean": jnp.ones(4)})),
]

TABLE = {"Modules as functions": FUNCTION}
