"""A module as a pure JAX function: it matches the module, works under jax's transformations, and leaves the module unchanged."""

import copy
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
import torch2jax
from oracles import jitted
from sampling import sampled
from torch import nn
from torch.nn.utils import parametrizations

import bridge
from bridge._names import nest, unnest
from bridge._tracing.module_function import traced_call


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(4))])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.blocks[0]
        self.steps = [self.blocks[0], functools.partial(F.leaky_relu, negative_slope=0.1)]
        self.twice = self.double

    def double(self, x):
        return x * 2 * self.scales[0]

    def encode(self, tokens):
        x = self.embed(tokens)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + torch.tanh(block(x)) * scale
        return x

    def forward(self, tokens):
        x = self.encode(tokens)
        for step in self.steps:
            x = step(x)
        return self.head(self.twice(self.again(x)))


def parametrized():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[2])
    return net


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 3))


def images(layer):
    return lambda: (layer(), [torch.randn(3, 4, 6, 5)])


def vectors(layer, *shape):
    return lambda: (layer(), [torch.randn(*(shape or (5, 4)))])


def tokens(layer):
    return lambda: (layer(), [torch.randint(0, 7, (2, 5))])


LAYERS = {
    "tied": tokens(Tied),
    "mlp": vectors(model),
    "parametrized": vectors(parametrized),
    "weight_norm": vectors(old_weight_norm),
    "conv": images(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)),
    "conv reflect": images(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", dilation=(1, 2))),
    "conv same": images(lambda: nn.Conv2d(4, 2, (3, 5), padding="same")),
    "conv transpose": images(lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, padding=1)),
    "batch norm": images(lambda: nn.BatchNorm2d(4)),
    "batch norm, cumulative": images(lambda: nn.BatchNorm2d(4, momentum=None)),
    "batch norm, no statistics": images(lambda: nn.BatchNorm2d(4, track_running_stats=False, affine=False)),
    "instance norm": images(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "group norm": images(lambda: nn.GroupNorm(2, 4)),
    "layer norm": vectors(lambda: nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4))),
    "pools": images(lambda: nn.Sequential(nn.MaxPool2d(2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
    "activations": vectors(
        lambda: nn.Sequential(nn.GELU("tanh"), nn.SiLU(), nn.PReLU(), nn.ReLU(inplace=True), nn.Softmax(-1), nn.LogSoftmax(1))
    ),
    "lstm": vectors(lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), 3, 6, 4),
    "lstm, projected": vectors(lambda: nn.LSTM(4, 5, proj_size=2), 6, 3, 4),
    "gru": vectors(lambda: nn.GRU(4, 5, 2, bias=False), 6, 3, 4),
    "rnn": vectors(lambda: nn.RNN(4, 5, nonlinearity="relu", bidirectional=True), 6, 3, 4),
    "gru cell": vectors(lambda: nn.GRUCell(4, 5)),
    "lstm cell": vectors(lambda: nn.LSTMCell(4, 5)),
    "encoder": vectors(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2), 3, 6, 4),
    "encoder, norm first": vectors(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation="gelu", norm_first=True), 6, 3, 4),
    "upsample": images(lambda: nn.Sequential(nn.PixelShuffle(2), nn.ZeroPad2d(1))),
}
EVAL_ONLY = {"mlp"}  # its dropout draws other numbers than torch


def of(module):
    return bridge.module_tree(module), bridge.module_buffers(module)


def close(ours, theirs, tolerance=5e-6):
    """Compare two trees with a tolerance relative to their largest number."""
    theirs = [np.asarray(b.detach() if isinstance(b, torch.Tensor) else b) for b in jax.tree.leaves(theirs)]
    size = max([1.0, *(float(np.abs(b).max(initial=0)) for b in theirs)])
    for a, b in zip(jax.tree.leaves(ours), theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=tolerance * size)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", sampled(LAYERS, every=2))
def test_output_gradient_and_buffers_match_the_module(name, train):
    torch.manual_seed(1)
    module, inputs = LAYERS[name]()
    if name in EVAL_ONLY:
        module[1].p = 0.0
    torch.manual_seed(1)
    twin = LAYERS[name]()[0].train(train)
    if name in EVAL_ONLY:
        twin[1].p = 0.0
    module.train(not train)
    params, buffers = of(module)

    def loss(params, buffers, *inputs):
        out, new = bridge.module_function(module)(params, *inputs, buffers=buffers, train=train)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), (out, new)

    (_, (out, new)), grads = jitted(jax.value_and_grad(loss, has_aux=True))(params, buffers, *map(bridge.to_jax, inputs))
    theirs = twin(*(x.clone() for x in inputs))
    if params:
        sum(x.sin().sum() for x in jax.tree.leaves(theirs)).backward()
    close(out, theirs)
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in twin.named_parameters()}
    close(grads, nest(named.items()))
    close(unnest(new), dict(twin.named_buffers()))
    assert unnest(new).keys() == dict(twin.named_buffers()).keys()


def test_comparison_detects_biased_running_statistics():
    module, (x,) = LAYERS["batch norm"]()
    params, buffers = of(module)
    _, new = bridge.module_function(module)(params, bridge.to_jax(x), buffers=buffers, train=True)
    biased = copy.deepcopy(module).train()
    biased(x)
    n = x.numel() // 4
    biased.running_var.sub_(1).mul_((n - 1) / n).add_(1)
    with pytest.raises(AssertionError):
        close(new["running_var"], biased.running_var, 1e-7)


def test_new_buffers_are_written_into_the_module():
    module, twin = model().train(), model().train()
    module[1].p = twin[1].p = 0.0
    fn = jax.jit(bridge.module_function(module))
    addresses = [b.data_ptr() for b in module.buffers()]
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        _, new = fn(bridge.module_tree(module), bridge.to_jax(x), buffers=bridge.module_buffers(module))
        bridge.write_buffers(module, new)
        twin(x)
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert addresses == [b.data_ptr() for b in module.buffers()]
    assert module[2].num_batches_tracked.item() == 3


def test_parameters_are_aliased_and_the_module_is_unchanged():
    module = Tied().train()
    module.register_forward_hook(lambda m, args, out: setattr(m, "seen", out))
    before = {name: (id(m), dict(m.__dict__), dict(m._parameters), m.training) for name, m in module.named_modules()}
    state, flag = torch.get_rng_state(), torch.is_grad_enabled()
    params = bridge.module_tree(module)
    assert params["embed"]["weight"].unsafe_buffer_pointer() == module.embed.weight.data_ptr()
    bridge.module_function(module)(params, jnp.ones((2, 3), jnp.int32), train=False)
    assert before == {name: (id(m), dict(m.__dict__), dict(m._parameters), m.training) for name, m in module.named_modules()}
    assert not hasattr(module, "seen")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled() == flag


def test_module_is_read_at_each_call():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fn, params, x = bridge.module_function(module), bridge.module_tree(module), jnp.ones((2, 4))
    module.eval()
    close(fn(params, x), module(torch.ones(2, 4)))
    module[1] = nn.Tanh()
    close(fn(params, x), module(torch.ones(2, 4)))


def test_dropout_draws_by_key():
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5)).train()
    fn, x = jax.jit(bridge.module_function(module), static_argnames="train"), jnp.ones((64, 64))
    one, same, other = (fn({}, x, rng=jax.random.key(seed)) for seed in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 4.0}
    assert abs(float((one == 4).mean()) - 0.25) < 0.03, "both layers have the same mask"
    assert (fn({}, x, train=False) == x).all()
    assert (fn({}, x, rng=jax.random.PRNGKey(0)) == one).all()


def test_random_torch_functions_draw_by_key():
    class Noisy(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                noise = torch.empty_like(x).uniform_(2, 3)
            return (
                x
                + torch.randn_like(x) * 0
                + noise
                + torch.rand(4).bernoulli_(1.0)
                + torch.bernoulli(torch.ones(4))
                + torch.randint(0, 1, (4,))
            )

    fn = bridge.module_function(Noisy())
    out = fn({}, jnp.zeros((100, 4)), rng=jax.random.key(0))
    assert (out >= 4).all()
    assert (out <= 5).all()
    assert len(np.unique(out)) > 300


def test_vmap_over_parameters_and_over_inputs():
    members = [model(seed).eval() for seed in range(3)]
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *map(bridge.module_tree, members))
    x = torch.randn(5, 4)
    fn = functools.partial(bridge.module_function(members[0]), train=False)
    out = jax.jit(jax.vmap(fn, in_axes=(0, None)))(params, bridge.to_jax(x))
    close(list(out), [m(x) for m in members])
    rows = jax.vmap(fn, in_axes=(None, 0))(bridge.module_tree(members[1]), bridge.to_jax(x)[:, None])
    close(rows[:, 0], members[1](x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func warns
def test_checkpoint_scan_and_second_derivatives_work():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fn, params, x = bridge.module_function(module), bridge.module_tree(module), torch.randn(2, 4)

    def repeated(params, x):
        return jax.lax.scan(lambda c, _: (jax.checkpoint(fn)(params, c), None), x, None, length=3)[0].sum()

    grads = jax.grad(repeated)(params, bridge.to_jax(x))
    y = x
    for _ in range(3):
        y = module(y)
    y.sum().backward()
    close(grads, nest((n, p.grad) for n, p in module.named_parameters()))
    hessian = jax.hessian(lambda v: fn(params, v).sum())(bridge.to_jax(x[0]))
    close(hessian, torch.func.hessian(lambda v: module(v).sum())(x[0]), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_kept(dtype):
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
    x = torch.randn(5, 4).to(dtype)
    out = bridge.module_function(module)(bridge.module_tree(module), bridge.to_jax(x))
    assert bridge.to_torch(out).dtype is dtype
    close(out.astype(jnp.float32), module(x).float(), 3e-2)


def test_traces_in_threads_are_independent():
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
    wrong = []

    def work(module):
        params, x = bridge.module_tree(module), torch.randn(2, 4)
        fn = bridge.module_function(module)
        first = fn(params, bridge.to_jax(x), rng=jax.random.key(1), train=True)
        for _ in range(20):
            same = (fn(params, bridge.to_jax(x), rng=jax.random.key(1), train=True) == first).all()
            eager = type(module(x)) is torch.Tensor
            if not (same and eager):
                wrong.append(module)

    threads = [threading.Thread(target=work, args=(m,)) for m in modules]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def losses(model, x, y):
    logits = model(x)
    return {
        "torch": F.cross_entropy(logits, y),
        "jax": -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(y)[:, None], axis=1)),
        "optax": optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(y)).mean(),
        "both": F.nll_loss(jnp.log(jax.nn.softmax(logits.double().float() * 1.0)), y) + 0 * jnp.sum(model[0].weight),
        "between": F.cross_entropy(model[4](jnp.tanh(model[0](x)) * 0 + jnp.asarray(model[3](model[2](model[0](x))))), y),
        "vmap": F.cross_entropy(jax.vmap(lambda row: model(row[None])[0])(x), y),
        "method": logits.logsumexp(1).mean() - logits.gather(1, y[:, None]).mean(),
    }


@pytest.mark.usefixtures("standard_promotion")
def test_loss_may_be_in_torch_in_jax_or_in_both():
    module = model().eval()
    x, y = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])

    def run(params, x, y):
        return traced_call(module, losses, params, None, (x, y))[0]

    out = jax.jit(run)(bridge.module_tree(module), bridge.to_jax(x), bridge.to_jax(y))
    assert all(isinstance(v, jax.Array) for v in out.values())
    close(out, dict.fromkeys(out, F.cross_entropy(module(x), y)))
    grads = jax.jit(jax.grad(lambda p: sum(run(p, bridge.to_jax(x), bridge.to_jax(y)).values())))(bridge.module_tree(module))
    (len(out) * F.cross_entropy(module(x), y)).backward()
    close(grads, nest((n, p.grad) for n, p in module.named_parameters()), 1e-5)


JNP = {
    "reductions": lambda x: jnp.sum(x) + jnp.mean(x, axis=0) + jnp.max(x) + jnp.linalg.norm(x) + jax.nn.logsumexp(x, axis=1, keepdims=True),
    "elements": lambda x: jnp.abs(x) + jnp.exp(x) + jnp.clip(x, 0, 1) + jnp.where(x > 0, x, 0.0) + jax.nn.relu(x) + jnp.square(x),
    "operators": lambda x: jnp.ones(3) * x + x * jnp.ones(3) - (jnp.ones(3) - x) / 2 + (x - 1.0) ** 2,
    "products": lambda x: x @ jnp.ones((3, 3)) + jnp.ones((5, 5)) @ x + jnp.dot(x, jnp.eye(3)) + jnp.einsum("ij,jk->ik", x, jnp.eye(3)),
    "arrays": lambda x: x.astype(jnp.float32) + x.at[0].set(1.0) + jnp.asarray(x) + jnp.stack([x, x])[0] + len(x) + x.dtype.itemsize,
    "transformations": lambda x: (
        jax.vmap(jnp.sum)(x)[:, None] + jax.jit(lambda a: a * 2)(x) + jax.lax.scan(lambda c, a: (c + a, a), jnp.zeros(3), x)[1]
    ),
}


@pytest.mark.parametrize("name", JNP)
def test_jax_functions_accept_a_traced_tensor(name):
    x = jax.random.normal(jax.random.key(0), (5, 3))
    close(jax.jit(lambda x: traced_call(nn.Identity(), lambda m, x: JNP[name](m(x)), {}, None, (x,))[0])(x), JNP[name](x))


def test_loss_may_use_methods_and_attributes_of_the_model():
    module, t = Tied(), torch.randint(0, 7, (2, 5))

    def loss(model, tokens):
        return model.encode(tokens).square().mean() + model.head.weight.norm() + sum(p.sum() for p in model.parameters())

    out, _ = traced_call(module, loss, bridge.module_tree(module), {}, (bridge.to_jax(t),))
    close(out, loss(module, t))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile warns
def test_keywords_containers_and_compiled_modules_work():
    class Options(nn.Module):
        def forward(self, x, *, scale=1.0, extra=None, mode="plus"):
            out = x * scale + (extra["a"][0] if mode == "plus" else 0)
            return {"out": out, "shape": tuple(x.shape), "pair": (out, None)}

    x = jnp.ones((2, 3))
    out = bridge.module_function(Options())({}, x, scale=3.0, extra={"a": [x]})
    assert out["shape"] == (2, 3)
    assert (out["pair"][0] == 4).all()
    module = nn.Linear(3, 2)
    compiled = torch.compile(module)
    params = bridge.module_tree(compiled)
    close(bridge.module_function(compiled)(params, x), module(torch.ones(2, 3)))


def test_implementation_of_the_user_is_used():
    class Special(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(NotImplementedError, match=r"bessel_j0 .* in the module itself \(Special\)"):
        jax.jit(bridge.module_function(Special()))({}, jnp.ones(3))  # known values would be computed by torch itself
    torch2jax.implements(torch.special.bessel_j0)(lambda x: torch2jax._v(x) * 2)
    try:
        assert (bridge.module_function(Special())({}, jnp.ones(3)) == 2).all()
    finally:
        del torch2jax.HANDLED_FUNCTIONS[torch.special.bessel_j0]
