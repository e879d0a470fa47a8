"""torch.autograd.Function in traced code uses its own backward: in values, in gradients of every order, and in training."""

import threading

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge
import torch_api
from bridge._compat import torch as autograd
from bridge._tracing import patches

pytestmark = pytest.mark.quick

Function = torch.autograd.Function
APPLY = vars(autograd.FUNCTION_BASE).get("apply")


class Reversed(Function):
    """Reverse the gradient."""

    @staticmethod
    def forward(ctx, x, scale=1.0):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Straight(Function):
    """The sign of x with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Product(Function):
    """A function with two tensors, an attribute, a string, an integer result, and a backward that autograd would not derive."""

    @staticmethod
    def forward(ctx, x, weight, scale, name):
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.doubled = scale, x * 2
        places = x.argmax(1)
        ctx.mark_non_differentiable(places)
        return x @ weight.t() * scale, places, name

    @staticmethod
    def backward(ctx, grad, _places, _name):
        _, weight = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, False, False)
        return grad @ weight * ctx.scale, grad.t() @ ctx.doubled, None, None


class Separate(Function):
    """A function with setup_context, whose backward is not differentiable."""

    @staticmethod
    def forward(x, factor):
        return x.exp() * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * 0.5, None


class Cubed(Function):
    """A function whose backward is differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


kept, kept_separate, kept_product = Straight.apply, Separate.apply, Product.apply  # models store `apply` like this
LOSSES = {
    "reversed": lambda m, x: Reversed.apply(m(x), 0.5).square().mean(),
    "kept in a variable": lambda m, x: (kept(m(x)) * x).sum(),
    "kept, setup_context": lambda m, x: kept_separate(m(x), 0.3).mean(),
    "kept, two tensors": lambda m, x: kept_product(m(x), m.weight, 2.0, "a")[0].square().mean(),
    "two tensors": lambda m, x: Product.apply(m(x), m.weight, 2.0, "a")[0].square().mean(),
    "setup_context": lambda m, x: Separate.apply(m(x), 0.3).mean(),
    "differentiable": lambda m, x: Cubed.apply(m(x)).mean(),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda y: m(y).tanh(), m(x), use_reentrant=True).sum(),
    "checkpoint": lambda m, x: checkpoint(lambda y: m(y).tanh(), m(x), use_reentrant=False).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_training_matches_eager_torch(name):
    torch.manual_seed(0)
    loss_fn, eager, ours = LOSSES[name], nn.Linear(3, 3), nn.Linear(3, 3)
    ours.load_state_dict(eager.state_dict())
    start = eager.weight.detach().clone()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(ours, loss_fn, torch_api.MaskedSGD(ours.named_parameters(), lr=0.1))
    for _ in range(20):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        loss = loss_fn(eager, x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(train_step(x), loss.detach(), rtol=1e-4, atol=1e-5)
    assert (eager.weight - start).abs().max() > 1e-3
    torch.testing.assert_close(ours.weight - start, eager.weight - start, rtol=1e-4, atol=1e-5)


def test_comparison_detects_an_ignored_backward(monkeypatch):
    monkeypatch.setattr(patches, "_REGISTERED", [])
    with pytest.raises(AssertionError):
        test_training_matches_eager_torch("reversed")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return Separate.apply(Cubed.apply(self.layer(x)), 0.3).mean()


def test_functions_work_under_jit_grad_and_vmap():
    net, x = Net(), torch.randn(4, 3)
    net(x).backward()
    f, params, jx = bridge.module_function(net), bridge.module_tree(net), bridge.to_jax(x)
    for grad in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f)), jax.grad(jax.checkpoint(f))):
        np.testing.assert_allclose(grad(params, jx)["layer"]["weight"], net.layer.weight.grad.numpy(), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(f, (None, 0))(params, jx[None]), [f(params, jx)], rtol=1e-6)


def test_backward_is_differentiable():
    f = bridge.module_function(nn.Sequential(type("Cubes", (nn.Module,), {"forward": lambda self, x: Cubed.apply(x).sum()})()))
    second = jax.grad(lambda x: jax.grad(lambda x: f({}, x))(x).sum())
    np.testing.assert_allclose(second(jax.numpy.arange(3.0)), 6 * np.arange(3.0))


def test_eager_calls_of_other_threads_are_unaffected_by_a_trace():
    inside, go_on, found = threading.Event(), threading.Event(), []

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(30)
            return Reversed.apply(x).sum()

    def traced():
        found.append(jax.grad(lambda x: bridge.module_function(nn.Sequential(Waits()))({}, x))(jax.numpy.ones(2)))

    thread = threading.Thread(target=traced)
    thread.start()
    assert inside.wait(30)
    x = torch.ones(2, requires_grad=True)
    Reversed.apply(x, 3.0).sum().backward()
    go_on.set()
    thread.join()
    assert x.grad.tolist() == [-3.0, -3.0]
    np.testing.assert_array_equal(found[0], [-1.0, -1.0])
    assert vars(autograd.FUNCTION_BASE).get("apply") is APPLY
    assert "__getattribute__" not in vars(torch.autograd.function.FunctionMeta)
