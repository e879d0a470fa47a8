"""Modules that write buffers (batch norm) inside functions that jax transforms, such as `jax.checkpoint`, `jax.jit` and `jax.lax.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))


class Counting(torch.nn.Module):
    """A module that writes buffers in place, writes them through a view, rebinds them, and calls jax.checkpoint in its forward."""

    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("parts", torch.zeros(2, 3))

    def work(self, x):
        y = self.body(x + self.seen)
        self.seen = self.seen + y.detach().mean(0)
        self.parts[1].add_(y.detach().sum(0))
        return y + self.parts.sum(0)

    def forward(self, x):
        return jax.checkpoint(self.work)(x) if isinstance(getattr(x, "jax", lambda: None)(), jax.Array) else self.work(x)


# Each entry maps a function of arrays to its transformed form.
CARRIED = {
    "checkpoint": lambda call: jax.checkpoint(call),
    "jit": lambda call: lambda x: jax.jit(lambda twice, x: call(x) * twice / 2, static_argnums=0)(2, x),
    "both": lambda call: jax.jit(jax.remat(lambda x: jax.jit(call)(x), policy=jax.checkpoint_policies.dots_saveable)),
    "one that was made once": lambda call: (lambda made: lambda x: made(made(x)))(jax.checkpoint(call)),
}


@pytest.mark.usefixtures("unoptimized_training")
def test_checkpointed_and_jitted_calls_write_buffers_like_plain_calls():
    x, model, twin = torch.randn(4, 3), Counting(), Counting()

    def loss(model, x):
        for transform in CARRIED.values():
            x = transform(lambda x: jnp.asarray(model(x)))(jnp.asarray(x))
        return jnp.mean(jnp.square(x - 1))

    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.05)
    step = torch_api.JaxTrainStep(model, loss, optimizer)
    eager = torch.optim.SGD(twin.parameters(), lr=0.05)
    for _ in range(2):
        out = x
        for _ in range(5):
            out = twin(out)
        expected = (out - 1).square().mean()
        eager.zero_grad()
        expected.backward()
        eager.step()
        assert float(step(x)) == pytest.approx(expected.item(), rel=1e-4)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)


TABLE = np.array([3.0, 1.0, 2.0])
JITTED = {
    "an int": (lambda: jax.jit(lambda n: n.astype(jnp.float32))(2), 2.0),
    "by name": (lambda: jax.jit(lambda *, n: n.astype(jnp.float32))(n=2), 2.0),
    "a NumPy array": (lambda: jax.jit(lambda t: t.at[0].set(5.0)[0])(TABLE), 5.0),
    "in a list": (lambda: jax.jit(lambda ts: ts[0].at[0].set(5.0)[0])([TABLE]), 5.0),
    "a method that sorts": (lambda: jax.jit(lambda t: t.sort()[0])(TABLE), 1.0),
    "a number as result": (lambda: jax.jit(lambda: 3)().astype(jnp.float32), 3.0),
    "a static position": (lambda: jax.jit(lambda x, n: jnp.ones(n).sum() if type(n) is int else x, static_argnums=(-1,))(1.0, 3), 3.0),
    "a static position by name": (lambda: jax.jit(lambda n: jnp.ones(n).sum() * float(type(n) is int), static_argnums=0)(n=3), 3.0),
    "a static name": (lambda: jax.jit(lambda n: jnp.ones(n).sum() * float(type(n) is int), static_argnames="n")(n=3), 3.0),
    "a static name by position": (lambda: jax.jit(lambda n: jnp.ones(n).sum() * float(type(n) is int), static_argnames=["n"])(3), 3.0),
    "a static object": (lambda: jax.jit(lambda t: jnp.asarray(t[0] * 1.0), static_argnames="t")((2,)), 2.0),
}


def test_jitted_function_takes_and_returns_arrays():
    model, found = torch.nn.BatchNorm1d(2), {}

    def loss(model, x):
        found.update({name: call() for name, (call, _) in JITTED.items()})
        return model(x).mean(), found

    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.0), has_aux=True)
    _, aux = step(torch.randn(3, 2))
    assert {name: float(value) for name, value in aux.items()} == {name: expected for name, (_, expected) in JITTED.items()}
    assert TABLE.tolist() == [3.0, 1.0, 2.0]


def with_custom_vjp(call, x):
    @jax.custom_vjp
    def twice(x):
        return 2 * call(x)

    twice.defvjp(lambda x: (2 * x, None), lambda _, grad: (2 * grad,))
    return twice(x)


REFUSED = {
    "scan": lambda call, x: jax.lax.scan(lambda carry, _: (call(carry), None), x, None, length=2)[0],
    "map": lambda call, x: jax.lax.map(call, x[None])[0],
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, call, lambda x: x, x),
    "switch": lambda call, x: jax.lax.switch(jnp.int32(x.sum() > 0), [call, lambda x: x], x),
    "fori_loop": lambda call, x: jax.lax.fori_loop(0, 2, lambda _, x: call(x), x),
    "while_loop": lambda call, x: jax.lax.while_loop(lambda x: x.sum() < 0, call, x),
    "vmap": lambda call, x: jax.vmap(call)(x[None]),
    "a custom derivative": with_custom_vjp,
    "checkpoint within scan": lambda call, x: jax.lax.scan(lambda x, _: (jax.checkpoint(call)(x), None), x, None, length=2)[0],
    "scan within checkpoint": lambda call, x: jax.checkpoint(lambda x: jax.lax.scan(lambda x, _: (call(x), None), x, None, 2)[0])(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lost_buffer_write_raises_and_names_the_buffer(name):
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss = lambda model, x: jnp.mean(REFUSED[name](lambda x: jnp.asarray(model(x)), jnp.asarray(x)))  # noqa: E731
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"the buffer '1\.running_mean' \([23] such\) is written inside a function that jax transforms"):
        step(torch.randn(4, 3))
    for key, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[key])


def test_checkpoint_imported_by_name_raises_with_advice():
    from jax import checkpoint

    model = net()
    step = torch_api.JaxTrainStep(
        model,
        lambda model, x: jnp.mean(checkpoint(lambda x: jnp.asarray(model(x)))(jnp.asarray(x))),
        torch_api.MaskedSGD(model.named_parameters(), lr=0.1),
    )
    with pytest.raises(ValueError, match=r"running_mean.*call them as jax\.checkpoint and jax\.jit"):
        step(torch.randn(4, 3))


@pytest.mark.usefixtures("unoptimized_training")
def test_module_in_eval_mode_may_be_called_in_a_scan():
    model, x = net(), torch.randn(4, 3)

    def inner(model, x):
        call = lambda x: jnp.asarray(model(x))  # noqa: E731
        model.eval()
        x = jax.lax.scan(lambda x, _: (call(x), None), jnp.asarray(x), None, length=2)[0]
        model.train()
        return jnp.sum(call(x)) + jnp.sum(x)

    twin = net()
    out = twin.eval()(twin(x))
    expected = twin.train()(out).sum() + out.sum()
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=0.0)
    step = torch_api.JaxTrainStep(model, inner, optimizer)
    assert float(step(x)) == pytest.approx(expected.item(), rel=1e-4)


def test_module_functions_carry_buffers_through_checkpoints_of_the_module():
    model, x = Counting(), torch.randn(4, 3)
    fn, params, buffers = bridge.module_function(model), bridge.module_tree(model), bridge.module_buffers(model)
    loss = lambda params, buffers, x: fn(params, x, buffers=buffers, train=True)  # noqa: E731
    (out, new) = jax.jit(loss)(params, buffers, jnp.asarray(x.numpy()))
    expected = model(x)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new["seen"], model.seen.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new["parts"], model.parts.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new["body"]["1"]["running_var"], model.body[1].running_var.numpy(), rtol=1e-4, atol=1e-5)


def test_buffer_writes_may_be_lost_where_the_caller_asks_for_no_buffers():
    class Looped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return jax.lax.scan(lambda x, _: (jnp.asarray(self.norm(x)), None), jnp.asarray(x), None, length=2)[0]

    model, x = Looped(), torch.randn(4, 3)
    fn, params, buffers = bridge.module_function(model), bridge.module_tree(model), bridge.module_buffers(model)
    expected = model.norm(model.norm(x)).detach().numpy()
    np.testing.assert_allclose(fn(params, jnp.asarray(x.numpy()), train=True), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"the buffer 'norm\.running_mean'"):
        fn(params, jnp.asarray(x.numpy()), buffers=buffers, train=True)


def test_buffers_carried_by_a_scan_keep_their_dtypes():
    model, twin, xs = net(), net(), torch.randn(3, 4, 3)
    fn, params, buffers = bridge.module_function(model), bridge.module_tree(model), bridge.module_buffers(model)
    new, outs = jax.lax.scan(lambda buffers, x: fn(params, x, buffers=buffers, train=True)[::-1], buffers, jnp.asarray(xs.numpy()))
    expected = torch.stack([twin(x) for x in xs])
    np.testing.assert_allclose(outs, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, buffers)
    assert new["1"]["num_batches_tracked"].dtype == jnp.dtype("int64")
    again = fn(params, jnp.asarray(xs[0].numpy()), buffers=buffers, train=True)[1]
    assert again["1"]["num_batches_tracked"].dtype == jnp.dtype("int64")
    bridge.write_buffers(model, new)
    for name, value in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), value, rtol=1e-4, atol=1e-5)
