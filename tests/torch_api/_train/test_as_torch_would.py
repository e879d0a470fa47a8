"""Unusual torch code in a train step gives the results of eager torch, or raises an error that names the cause."""

import copy
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from torch import nn
from torch.nn import functional as F
from traced_oracle import compare

import bridge
import torch_api


def same_training(model, loss_fn, *batches, between=lambda model: None, lr=0.1):
    """Compare losses, parameters and buffers with eager torch; `between` changes both models after each step."""
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=lr)
    step = torch_api.JaxTrainStep(model, loss_fn, torch_api.MaskedSGD(model.named_parameters(), lr=lr))
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(theirs, *batch)
        loss.backward()
        optimizer.step()
        found = step(*batch)
        assert found.dtype == loss.dtype
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        for a, b in zip(model.state_dict().values(), theirs.state_dict().values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        between(model)
        between(theirs)


def batches(*shape, count=3):
    torch.manual_seed(1)
    return [(torch.randn(shape),) for _ in range(count)]


def mean_square(model, x):
    return model(x).square().mean()


def test_forward_hooks_may_be_added_and_removed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    handle, seen = [], []

    def between(model):
        seen.append(model)
        if len(seen) <= 2:  # after the first step of both models
            handle.append(model[0].register_forward_hook(lambda module, args, out: out * 2))
        elif len(seen) <= 4:
            handle.pop(0).remove()

    same_training(model, mean_square, *batches(5, 4, count=4), between=between)


def test_activations_require_grad_as_in_torch():
    """Code that reads `requires_grad` gets torch's answers."""
    seen = []

    def loss_fn(model, x):
        h = model[0](x)
        seen.append((x.requires_grad, h.requires_grad, h.is_leaf, h.grad_fn is None, h.detach().requires_grad, (h > 0).requires_grad))
        with torch.no_grad():
            seen.append((model[0](x).requires_grad,))
        out = torch.zeros(5, 3)
        out[:, 1] = h[:, 1]
        seen.append((out.requires_grad, model[0].weight.is_leaf, model[0].weight.grad_fn is None))
        return h.square().mean()

    same_training(nn.Sequential(nn.Linear(4, 3)), loss_fn, *batches(5, 4, count=1))
    assert seen[:3] == seen[3:]
    assert seen[0] == (False, True, False, False, False, False)


@pytest.mark.parametrize("create_graph", [False, True])
def test_torch_autograd_in_a_loss_raises(create_graph):
    def by_functional(model, x):
        jacobian = torch.autograd.functional.jacobian(lambda v: model(v).sum(0), x, create_graph=create_graph)
        return model(x).mean() + jacobian.square().sum()

    def by_grad(model, x):
        x = x.requires_grad_()
        return model(x).mean() + torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)[0].square().sum()

    for loss_fn in (by_functional, by_grad):
        model = nn.Linear(4, 3)
        step = torch_api.JaxTrainStep(model, loss_fn, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
        with pytest.raises(NotImplementedError, match=r"torch.autograd.grad belongs to torch's graph"):
            step(*batches(5, 4)[0])


class Flagged(nn.Linear):
    """A layer with a flag buffer that its first forward sets, like ActNorm."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x):
        self.seen.fill_(True)
        return super().forward(x)


def test_forward_may_set_a_flag_buffer():
    same_training(Flagged(), mean_square, *batches(5, 4))


def test_encoder_in_eval_mode_takes_a_padding_mask():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    loss_fn = lambda model, x, padding: model(x, src_key_padding_mask=padding).square().mean()  # noqa: E731
    same_training(encoder, loss_fn, *((x, padding) for (x,) in batches(2, 5, 8)))


def test_masked_elements_may_be_assigned_a_vector():
    def loss_fn(model, x):
        h = x * 1.0
        h[x[..., 0] > 0] = model.weight[0]
        h[:, x[0, :, 0] > 0.5] = model.weight[1:2]
        return model(h).square().mean()

    same_training(nn.Linear(4, 3), loss_fn, *batches(2, 5, 4))


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_assigning_a_value_of_unknown_size_by_mask_raises(shape):
    def loss_fn(model, x):
        x[x[:, 0] > 0] = torch.ones(shape)
        return model(x).sum()

    model = nn.Linear(4, 3)
    step = torch_api.JaxTrainStep(model, loss_fn, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="how many elements it chooses depends on values"):
        step(*batches(5, 4)[0])


def test_tensors_compare_with_none_and_strings():
    def loss_fn(model, x):
        assert [x == None, x != None, x == "causal", x != "causal"] == [False, True, False, True]  # noqa: E711
        assert [x.type(), x.double().type()] == ["torch.FloatTensor", "torch.DoubleTensor"]
        assert [x.type(torch.float64).dtype, x.type("torch.IntTensor").dtype] == [torch.float64, torch.int32]
        assert [int(torch.tensor([2])), float(torch.tensor([[0.5]])), bool(torch.ones(1, 1))] == [2, 0.5, True]
        return model(x).square().mean() * torch.tensor([3]).item()

    same_training(nn.Linear(4, 3), loss_fn, *batches(5, 4))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_of_equal_maxima_gets_the_gradient(size):
    ties = torch.tensor([[[1.0, 3, 3, 0, 3, 3, 2]]])
    compare(lambda x: F.adaptive_max_pool1d(x, size), ties)
    compare(lambda x: F.adaptive_max_pool2d(x[..., None], (size, 1), return_indices=True)[0], ties)
    compare(lambda x: nn.AdaptiveMaxPool3d(size)(x[..., None, None].expand(1, 1, 7, 3, 3)), ties)


def test_bessel_functions_at_zero_match_torch():
    compare(torch.i0, torch.tensor([0.0, 1.0, -2.0]))
    compare(torch.special.i0, torch.tensor([0.0, 1.0, -2.0]))


def test_giving_a_first_value_to_a_buffer_raises():
    class Lazy(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("centre", None)

        def forward(self, x):
            y = super().forward(x)
            self.centre = y.detach().mean(0) if self.centre is None else self.centre * 0.9
            return y - self.centre

    model = nn.Sequential(Lazy())
    step = torch_api.JaxTrainStep(model, mean_square, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"gives the buffer '0.centre' its first value"):
        step(*batches(5, 4)[0])


@pytest.mark.parametrize("fresh", [False, True])
def test_closed_over_tensors_are_read_again_after_a_write(fresh):
    """A teacher follows the student, as in DQN, BYOL and mean teachers; with `fresh` each step has another batch size."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    pairs = [(m, copy.deepcopy(model).requires_grad_(False)) for m in (model, copy.deepcopy(model))]
    (_, teacher), (theirs, its_teacher) = pairs

    def loss_of(teacher):
        return lambda student, x: F.mse_loss(student(x), teacher(x) + 1)

    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = torch_api.JaxTrainStep(model, loss_of(teacher), torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    for n in range(4):
        x = torch.randn(5 + fresh * (n % 2), 4)
        optimizer.zero_grad()
        loss = loss_of(its_teacher)(theirs, x)
        loss.backward()
        optimizer.step()
        assert step(x).item() == pytest.approx(loss.item(), rel=1e-5)
        with torch.no_grad():
            for student, follower in pairs:
                torch._foreach_lerp_(list(follower.parameters()), list(student.parameters()), 0.3)
    assert step.cache_info().compilations == 4
    assert step.cache_info().programs <= 1 + fresh  # unused programs are dropped


def test_unchanged_closed_over_tensors_cost_no_trace():
    weight = torch.ones(3)
    model = nn.Linear(4, 3)
    step = torch_api.JaxTrainStep(model, lambda m, x: (m(x) * weight).mean(), torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    for (x,) in batches(5, 4):
        step(x)
    assert step.cache_info().compilations == 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_result_of_an_autograd_function_requires_grad():
    def loss_fn(model, x):
        assert Doubled.apply(model(x)).requires_grad
        assert not Doubled.apply(x).requires_grad
        return Doubled.apply(model(x)).square().mean()

    same_training(nn.Linear(4, 3), loss_fn, *batches(5, 4, count=1))


@pytest.mark.parametrize("full", [True, False])
def test_backward_hook_raises(full):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    register = model[1].register_full_backward_hook if full else model[1].register_backward_hook
    register(lambda module, given, out: None)
    step = torch_api.JaxTrainStep(model, mean_square, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match=r"'1' \(Tanh\) has a backward hook, which belongs to torch's graph"):
        step(*batches(5, 4)[0])


def test_values_assigned_to_data_have_no_gradient():
    def loss_fn(model, x):
        y = model(x)
        y.data = y.data.clamp(-0.1, 0.1)
        return (y * x[:, :3]).sum()

    same_training(nn.Linear(4, 3), loss_fn, *batches(5, 4))


def test_numpy_scalars_combine_with_traced_tensors():
    compare(lambda x: np.float64(2.0) * x.sum() + np.float32(0.5) * x.mean() + x * np.float64(3.0), torch.randn(3))


def test_shallow_copy_shares_memory_without_gradient():
    def function(x):
        y = x * 2
        other = copy.copy(y)
        with torch.no_grad():
            other[0] = 1.0
        return y + other * 3

    compare(function, torch.randn(3))


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm", "batch_norm"])
def test_epsilon_of_a_norm_may_come_from_the_batch(norm):
    by = {
        "layer_norm": lambda x, eps: F.layer_norm(x, (3,), eps=eps),
        "group_norm": lambda x, eps: F.group_norm(x, 1, eps=eps),
        "batch_norm": lambda x, eps: F.batch_norm(x, None, None, torch.ones(3), torch.zeros(3), True, eps=eps),
    }[norm]
    given = [(x, eps) for (x,), eps in zip(batches(5, 4), (1e-3, 1e-1, 1.0), strict=True)]
    same_training(nn.Linear(4, 3), lambda model, x, eps: by(model(x), eps)[:2].square().mean(), *given)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiled module warns about an input that is not a leaf
def test_compiled_functions_run_uncompiled_in_a_trace():
    seen = []

    @torch.compile(backend="eager")
    def doubled(x):
        seen.append(type(x).__name__)
        return x * 2

    model = nn.Sequential(nn.Linear(4, 3), torch.compile(nn.Tanh(), backend="eager"))
    same_training(model, lambda model, x: doubled(model(x)).square().mean(), *batches(5, 4))
    assert "TracedTensor" in seen
    calls = []

    def counting(graph, example):
        calls.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=counting)(torch.ones(3))
    assert calls, "torch.compile does not work after the trace"


def test_pad_sequence_matches_torch():
    for first in (True, False):
        compare(lambda x, y, first=first: nn.utils.rnn.pad_sequence([x, y], first, 2.0), torch.randn(3, 2), torch.randn(5, 2))
    compare(lambda x, y: nn.utils.rnn.pad_sequence([x, y], True, padding_side="left"), torch.randn(3), torch.randn(5))


def test_fake_quantization_matches_torch():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(3, 4) * 2, torch.tensor([[float("inf"), -float("inf"), 100.0, -100.0]])])
    finite = x.clamp(-100, 100)  # torch 2.6 turns infinity into the smallest number
    right = torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7)[3, 0] > 0
    compare(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), x if right else finite)
    x = finite  # torch's result for infinities depends on the processor here
    scale, zero = torch.tensor([0.1, 0.2, 0.05, 0.3]), torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    for axis in (0, 1):
        compare(lambda x, axis=axis: torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -8, 7), x)
    compare(lambda x: torch.fake_quantize_per_tensor_affine(x, scale[:1], zero[:1], 0, 255), x)


class Adapted(nn.Module):
    """A module whose forward copies its layer, a parameter or itself."""

    k = 1.0

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(3, 3)

    def forward(self, x):
        return getattr(self, self.how)(x)

    def noisy(self, x):
        other = copy.deepcopy(self.layer)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1.0)
        return other(x) * self.layer(x)

    def replaced(self, x):
        halves = {name: p / 2 for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(copy.deepcopy(self.layer), halves, (x,))

    def itself(self, x):
        if self.k == 2.0:
            return self.layer(x) * self.k
        other = copy.copy(self)
        other.k = 2.0
        return other(x)

    def parameter(self, x):
        mine = copy.deepcopy(self.layer.weight)
        assert isinstance(mine, nn.Parameter)
        assert mine.requires_grad
        return F.linear(x, mine) * self.layer(x)


@pytest.mark.parametrize("how", ["noisy", "replaced", "itself", "parameter"])
def test_forward_may_copy_modules_and_parameters(how):
    torch.manual_seed(0)
    same_training(Adapted(how), mean_square, *batches(2, 3))


def test_copy_outside_of_a_trace_is_unchanged():
    layer = Adapted("itself")
    other = copy.copy(layer)
    assert other.layer is layer.layer
    assert "__copy__" not in vars(nn.Module)


def data_of_a_view(x):
    y = x * 1.0
    row = y[0]
    row.data = torch.zeros(3)
    return y + row


def data_swapped(x):
    a, b = x * 1.0, x * 2.0
    a.data, b.data = b.data, a.data
    return torch.cat([a, b * x])


def data_under_a_view(x):
    y = x * 1.0
    row = y[0]
    row.mul_(3)
    y.data = torch.zeros(2, 3)
    row.add_(1)
    return y + row


def data_shared(x):
    y, z = x * 1.0, x.detach() + 1
    y.data = z
    z.add_(5.0)
    y.mul_(2.0)
    return y * z.sum()


def data_of_a_flat_view(x):
    h = x * 2
    flat = h.view(-1)
    flat.data = flat.data.clamp(max=0.1)
    return h * flat.sum()


def data_of_itself(x):
    y = x * 2
    row = y[0]
    y.data = y
    y.add_(1)
    return y + row


def data_from_each_other(x):
    y, z = x * 2, x * 3
    y.data = z
    z.data = y
    z.mul_(x)
    return y + z


PLACES = [data_of_a_view, data_swapped, data_under_a_view, data_shared, data_of_a_flat_view, data_of_itself, data_from_each_other]


@pytest.mark.parametrize("function", PLACES)
def test_assigned_data_leaves_views_on_the_old_memory(function):
    torch.manual_seed(0)
    compare(function, torch.randn(2, 3))


PLANES, SPACES = torch.arange(400.0).reshape(1, 4, 10, 10), torch.arange(1372.0).reshape(4, 7, 7, 7)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.AlphaDropout(0.5),
        nn.RReLU(),
        F.gumbel_softmax,
        lambda x: F.scaled_dot_product_attention(x - 1, x, x, dropout_p=0.5),
        lambda x: F.fractional_max_pool2d(PLANES, 2, output_size=4).sum((0, 2, 3)),
        lambda x: F.fractional_max_pool3d(SPACES, 2, output_size=3).sum((1, 2, 3)),
    ],
    ids=["dropout", "dropout1d", "alpha_dropout", "rrelu", "gumbel_softmax", "attention", "fractional pool", "of three dims"],
)
def test_draws_for_a_plain_tensor_use_the_jax_key(layer):
    plain = -torch.ones(4, 4)
    model = nn.Module()
    model.forward = lambda x: x + layer(plain)
    pure = jax.jit(lambda key: bridge.module_function(model)({}, jax.numpy.zeros((4, 4)), rng=key))
    state = torch.get_rng_state()
    first, second, again = (np.asarray(pure(jax.random.key(n))) for n in (0, 1, 0))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, again)
    assert torch.equal(state, torch.get_rng_state())


def test_plain_tensor_may_decide_a_branch_in_eval_mode():
    model = nn.Module()
    model.drop, plain = nn.Dropout(0.5), torch.ones(3)
    model.forward = lambda x: x + 1 if model.drop(plain).sum() > 2 else x
    model.eval()
    np.testing.assert_array_equal(jax.jit(lambda x: bridge.module_function(model)({}, x))(jax.numpy.zeros(2)), np.ones(2))


def test_fake_quantization_rounds_ties_before_adding_the_zero_point():
    x = torch.arange(-3, 4) * 0.25
    compare(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 3, -8, 7), x)
    scale = torch.full((7,), 0.5)
    compare(lambda x: torch.fake_quantize_per_channel_affine(x, scale, torch.full((7,), 3, dtype=torch.int32), 0, -8, 7), x)
    compare(lambda x: torch.fake_quantize_per_channel_affine(x, scale, torch.full((7,), 2.5), 0, -8, 7), x)


def test_numpy_scalars_keep_their_dtype_in_a_tensor():
    def kinds(x):
        made = torch.tensor([np.float64(0.1)]), torch.tensor(np.int32(2)), torch.as_tensor(np.float64(2.0)), torch.tensor(np.float16(2.0))
        assert [y.dtype for y in made] == [torch.float64, torch.int32, torch.float64, torch.float16]
        assert (x * np.float64(2)).dtype == torch.float32
        return (x * made[0]).sum() + made[2]

    same_training(nn.Linear(3, 3), lambda model, x: kinds(model(x)), *batches(2, 3))


def test_pad_sequence_has_the_dtype_of_the_first_sequence():
    compare(lambda x: nn.utils.rnn.pad_sequence([x.half(), torch.linspace(0, 1, 5)]), torch.randn(3))


def test_torch_compile_in_a_forward_works():
    code = """
import sys, torch, jax, bridge
class Layer(torch.nn.Module):
    def forward(self, x):
        return torch.compile(lambda y: y.cos(), backend="eager")(x) + torch.compile(backend="eager")(torch.sin)(x)
assert "torch._dynamo" not in sys.modules
print(jax.jit(bridge.module_function(Layer()))({}, jax.numpy.zeros(2)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1.0, 1.0]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch 2.6 warns about a graph break
def test_trace_may_start_within_a_compiled_function():
    pure, found, array = bridge.module_function(nn.ReLU()), [], jax.numpy.array([-1.0, 2.0])

    @torch.compile(backend="eager")
    def compiled(x):
        found.append(pure({}, array))
        return x + 1

    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert found[0].tolist() == [0.0, 2.0]


def test_assertions_check_known_values_only():
    def checked(x):
        torch._assert((x > 0).all(), "not positive")
        torch._assert(torch.ones(2).sum() == 2, "wrong")
        return x * 2

    compare(checked, torch.ones(3))
    np.testing.assert_array_equal(jax.jit(bridge.module_function(Applies(checked)))({}, -jax.numpy.ones(3)), -2 * np.ones(3))
    with pytest.raises(AssertionError, match="of known values"):
        bridge.module_function(Applies(lambda x: torch._assert(torch.zeros(2).any(), "of known values")))({}, jax.numpy.zeros(2))


def test_complex_rand_is_uniform_on_the_unit_square():
    model = Applies(lambda x: torch.view_as_real(torch.rand(4000, dtype=torch.complex64)))
    found = np.asarray(bridge.module_function(model)({}, jax.numpy.zeros(()), rng=jax.random.key(0)))
    np.testing.assert_allclose(found.mean(0), 0.5, atol=0.03)
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.1
    assert 0 <= found.min() < found.max() < 1
