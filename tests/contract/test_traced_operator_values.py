"""torch functions in a traced module give torch's values, dtypes and gradients, also where jax's own functions differ.

Each test compares one compiled program with all its cases to eager torch, with 64-bit types enabled, as in a train step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bridge

pytestmark = pytest.mark.unoptimized

NAN, INF = float("nan"), float("inf")


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def floats(*numbers):
    return np.array(numbers, np.float32)


def integers(*numbers):
    return np.array(numbers, np.int64)


def numbers(*given):
    return np.array(given, np.complex64)


def arrays_of(cases):
    return {name: tuple(map(jnp.asarray, inputs)) for name, (_, *inputs) in cases.items()}


def traced(cases, inputs):
    return {name: bridge.module_function(Call(case[0]))({}, *inputs[name], rng=jax.random.key(0)) for name, case in cases.items()}


def is_torchs(ours, theirs):
    ours, theirs = np.asarray(ours), theirs.detach().resolve_conj().numpy()
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def compare(cases):
    """Compare the values and dtypes of each case."""
    with jax.enable_x64(True):
        found = jax.jit(lambda inputs: traced(cases, inputs))(arrays_of(cases))
    expected = {name: function(*map(torch.from_numpy, inputs)) for name, (function, *inputs) in cases.items()}
    wrong = {name: (found[name], expected[name]) for name in cases if not is_torchs(found[name], expected[name])}
    assert not wrong, wrong


def compare_gradients(cases):
    """Compare the gradients of the real part of a weighted sum of each case; jax's gradients are the conjugates of torch's."""
    expected, weights = {}, {}
    for name, (function, *inputs) in cases.items():
        tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
        out = function(*tensors)
        weights[name] = np.linspace(1, 2, out.numel(), dtype=np.float32).reshape(tuple(out.shape))
        (out.real * torch.from_numpy(weights[name])).sum().backward()
        expected[name] = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]

    def total(inputs):
        return sum(jnp.sum(out.real * weights[name]) for name, out in traced(cases, inputs).items())

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(total))(arrays_of(cases))
    wrong = {
        name: (found[name], expected[name])
        for name in cases
        if not all(is_torchs(np.conj(ours), theirs) for ours, theirs in zip(found[name], expected[name], strict=True))
    }
    assert not wrong, wrong


FIVE, WHOLE, MATRIX = floats(0, 1, 2, 3, 4), integers(-1, -2, 0, 3), numbers([1, 2j], [3, 4], [5j, 6])
LOGS = numbers(4j, 1 + 5j, 1 + 2j, 3 + 3j, -INF, -INF), numbers(-1 + 3.5j, 2 - 5j, -2 - 2j, 3 - 3j, -INF, 1j)
NONE = np.zeros((0, 2), np.float32)

PLACES = {
    "narrow to the end": (lambda x: x.narrow(0, -2, 2), FIVE),
    "narrow from the start": (lambda x: x.narrow(0, -5, 5), FIVE),
    "narrow of nothing": (lambda x: x.narrow(0, 5, 0), FIVE),
    "narrow of the last dim": (lambda x: torch.narrow(x.reshape(2, 2), -1, -2, 1), WHOLE),
    "narrow_copy": (lambda x: torch.narrow_copy(x, 0, -5, 4), FIVE),
    "narrow from a tensor": (lambda x: torch.narrow(x, 0, torch.tensor(-3), 2), FIVE),
    "narrow written": (lambda x: torch.cat([y := x.clone(), y.narrow(0, -2, 2).mul_(3), y]), FIVE),
    "meshgrid": (lambda x: torch.meshgrid(x, x[:2])[1], FIVE),
    "select": (lambda x: torch.stack([x.select(0, -5), x.select(-1, -1), x.select(0, 2)]), FIVE),
    "select_scatter": (lambda x: x.reshape(2, 2).select_scatter(x[:2], 1, -2), WHOLE),
    "slice_scatter": (lambda x: x.slice_scatter(x[:2], 0, -3, -1), WHOLE),
    "tensor_split": (lambda x: torch.cat(torch.tensor_split(x, (-3, -1, 9))[1:]), FIVE),
    "nonzero_static of nothing": (lambda x: torch.nonzero_static(x, size=3), NONE),
    "nonzero_static with a filling": (lambda x: torch.nonzero_static(x, size=3, fill_value=7), NONE),
    "nonzero_static of some": (lambda x: torch.nonzero_static(x, size=3, fill_value=7), floats(0, 1, 2)),
}
POWERS = {
    "a number to integers": (lambda x: 2**x, WHOLE),
    "1, -1 and 0": (lambda x: torch.stack([1**x, (-1) ** x, 0**x]), WHOLE),
    "integers to integers": (torch.pow, integers(2, 1, -1, 0, -1, 3, 5), integers(-1, -2, -3, -1, -2, 4, -1)),
    "in place": (lambda x: x.clone().pow_(x), WHOLE.astype(np.int32)),
    "of bytes": (torch.pow, np.array([2, 3], np.uint8), np.array([3, 2], np.uint8)),
    "to a fraction": (lambda x: x**-1.5, integers(1, 2)),
    "of real numbers": (lambda x: torch.stack([x**-1, x**INF, x**NAN, x ** torch.tensor(-2)]), FIVE),
}
BOUNDS = {
    "clamp(min=nan)": (lambda x: torch.clamp(x, min=NAN), FIVE),
    "clamp_max(nan)": (lambda x: torch.clamp_max(x, NAN), FIVE),
    "clamp_(nan, nan)": (lambda x: x.clone().clamp_(NAN, NAN), FIVE),
    "clamp(0, nan)": (lambda x: torch.clamp(x, 0, NAN), FIVE),
    "clamp of integers": (lambda x: torch.clamp(x, -1, 2), WHOLE),
    "clamp of integers by fractions": (lambda x: torch.clamp(x, -0.5, 2), WHOLE),
}
POINTS = {
    "angle": (torch.angle, floats(-0.0, -1, 0, 2, NAN, -INF)),
    "angle of complex numbers": (torch.angle, numbers(0, -1, 3j, 1 - 1j)),
    "digamma": (torch.digamma, floats(0.0, -0.0, 1, -0.5)),
    "psi": (torch.special.psi, floats(0.0, -0.0, 1)),
    "polygamma(0)": (lambda x: torch.polygamma(0, x), floats(0.0, -0.0, 1)),
    "sgn of complex numbers": (torch.sgn, numbers(3 + 4j, 0, -2j)),
    "logaddexp of complex numbers": (torch.logaddexp, *LOGS),
    "logcumsumexp of complex numbers": (lambda x, y: torch.logcumsumexp(torch.stack([x, y]).flatten(), 0), *(x[:4] for x in LOGS)),
    "residuals of complex lstsq": (lambda a, b: torch.linalg.lstsq(a, b).residuals, MATRIX, numbers([1], [2j], [3])),
    "residuals of complex gelsd": (lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").residuals, MATRIX, numbers([1], [2j], [3])),
    "celu_": (lambda x: torch.celu_(x.clone(), 2.0), floats(-1, 2)),
}
DRAWN = {
    "randint of floats": (lambda x: torch.randint(2, 3, (3,), dtype=torch.float32) + x, floats(0, 0, 0)),
    "randint of halves": (lambda x: torch.randint(2, 3, (3,), dtype=torch.float16), FIVE),
    "randint of bools": (lambda x: torch.randint(1, 2, (3,), dtype=torch.bool), FIVE),
    "randint of bytes": (lambda x: torch.randint(1, 2, (3,), dtype=torch.uint8), FIVE),
    "randint_like": (lambda x: torch.randint_like(x, 2, 3), FIVE),
}
GROUPS = {"places": PLACES, "powers": POWERS, "bounds": BOUNDS, "points": POINTS, "drawn": DRAWN}


# Cases for which torch 2.8 computes other values than later versions; traced code has the later values.
NEWER = {"bounds: clamp(min=nan)"} if torch.__version__.startswith("2.8.") else set()


@pytest.mark.filterwarnings("ignore:torch.meshgrid")  # it warns about the optional argument that is left out
def test_values_are_those_of_torch_where_jax_differs():
    cases = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}
    compare({name: case for name, case in cases.items() if name not in NEWER})


def test_gradients_are_those_of_torch_where_jax_differs():
    low, high = floats(0, NAN, 3, 5, 1), floats(2, 9, 2, 9, NAN)
    compare_gradients(
        {
            "narrow": (lambda x: x.narrow(0, -3, 2) * x.select(0, -1), FIVE),
            "power": (torch.pow, floats(1, 2, 3), floats(-1, 0.5, 2)),
            "power at zero": (torch.pow, floats(0, 0, 0, -1, NAN, 2), floats(0, 1, -1, 2, 0, NAN)),
            "power of a negative number": (lambda x: x**2.5 + x ** torch.tensor(3.0), floats(-1, 0, 2)),
            "xlogy": (torch.xlogy, floats(0, 0, 0, 2), floats(0, -1, 2, 0.5)),
            "celu": (lambda x: F.celu(x, 2.0), floats(-1, 0, 2, NAN)),
            "elu": (lambda x: F.elu(x, 2.0), floats(-1, 0, 2, NAN)),
            "selu": (F.selu, floats(-1, 0, 2, NAN)),
            "clamp by tensors": (torch.clamp, FIVE, low, high),
            "clamp by equal bounds": (torch.clamp, floats(0, 1, 2, NAN), floats(1, 1, 1, 2), floats(1, 1, 1, 1)),
            "clamp from below": (torch.clamp_min, FIVE, low),
            "clamp from above": (torch.clamp_max, FIVE, high),
            "clamp at the bounds": (lambda x: torch.clamp(x, 1, 3), FIVE),
            "sgn": (torch.sgn, numbers(3 + 4j, 1 - 1j, 0, -2)),
            "abs": (lambda x: torch.abs(x), numbers(3 + 4j, 1 - 1j, 0, -2)),
            "angle": (torch.angle, floats(0, -0.0, 2, NAN)),
            "angle of complex numbers": (torch.angle, numbers(0, -1, 3j, 1 - 1j)),
            "digamma": (torch.digamma, floats(0.5, 2, -0.5, 0.0, -0.0, INF)),
            "logaddexp": (torch.logaddexp, *(x[:4] for x in LOGS)),
            "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), LOGS[0][:4]),
            "atan2": (torch.atan2, floats(0.5 if NEWER else 0, 1, -1), floats(0, 2, 0)),
            "copysign": (torch.copysign, floats(0, 1, -2, -3), floats(-1, -0.0, -1, 2)),
            "celu_": (lambda x: torch.celu_(x * 1, 2.0), floats(-1, 2)),
        }
    )


ONE, TWO = integers([1, 2, -3, 4]), integers([3, -4, 6, 7])
IMAGE = np.arange(16).reshape(1, 4, 4)
SIGNS = integers([1, -1, 1, 1])


def test_functions_of_integers_have_the_dtypes_and_values_of_torch():
    each = {
        "angle": torch.angle,
        "gradient": lambda x: torch.gradient(x[0])[0],
        "gradient at distances": lambda x: torch.gradient(x[0], spacing=2.0)[0],
        "trapezoid": torch.trapezoid,
        "trapezoid at distances": lambda x: torch.trapezoid(x, dx=0.5),
        "trapezoid at places": lambda x: torch.trapezoid(x, x + 1),
        "cumulative_trapezoid": torch.cumulative_trapezoid,
        "softsign": F.softsign,
        "tanhshrink": F.tanhshrink,
        "cov": lambda x: torch.cov(torch.stack([x[0], x[0] ** 2])),
        "cov of weights": lambda x: torch.cov(x[0], fweights=torch.tensor([1, 2, 1, 1]), aweights=torch.tensor([1.0, 2, 3, 4])),
        "corrcoef": lambda x: torch.corrcoef(torch.stack([x[0], x[0] ** 2])),
        "local_response_norm": lambda x: F.local_response_norm(x[None].expand(1, 3, 4), 2),
        "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
        "relu": F.relu,
        "vander": lambda x: torch.vander(x[0].to(torch.int32)),
        "sums in a dtype": lambda x: x.sum(0, dtype=torch.int32) + x.cumsum(0, dtype=torch.int32) + x.prod(0, dtype=torch.int32),
        "sum_to_size": lambda x: x.to(torch.uint8).sum_to_size(1, 1),
        "sums of bytes and bools": lambda x: torch.sub(x.to(torch.uint8), 1, alpha=-3) + torch.add(x > 1, x > 2, alpha=False),
        "zeta": lambda x: torch.special.zeta(torch.tensor([1, 2, -1, 3, 3]), torch.tensor([2, -1, 2, 2, 0])) + x[0, 0],
        "any and all": lambda x: torch.stack([x.to(torch.uint8).any(), x.to(torch.uint8).all()]),
        "square and kron of bools": lambda x: (x > 1).square() + torch.kron(x[0, :2] > 1, x[0, :2] > 1),
        "sqrt": lambda x: torch.sqrt(x * x),
        "sign": torch.sign,
        "logit": lambda x: torch.logit(x, 0.1),
        "sigmoid": torch.sigmoid,
        "abs": torch.abs,
    }
    two = {
        "atan2": torch.atan2,
        "arctan2": torch.arctan2,
        "copysign": torch.copysign,
        "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
        "maximum": torch.maximum,
        "fmin": torch.fmin,
        "true_divide": torch.true_divide,
        "pairwise_distance": F.pairwise_distance,
        "pairwise_distance of rows": lambda x, y: F.pairwise_distance(x, y[0], p=1.0, keepdim=True),
        "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, torch.from_numpy(SIGNS)),
        "margin_ranking_loss of 0.5": lambda x, y: F.margin_ranking_loss(x, y, torch.from_numpy(SIGNS), margin=0.5),
        "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, torch.from_numpy(SIGNS), reduction="sum"),
        "poisson_nll_loss": F.poisson_nll_loss,
        "poisson_nll_loss in full": lambda x, y: F.poisson_nll_loss(x.abs(), y, log_input=False, full=True),
        "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, y.flip(-1)),
        "triplet_margin_loss with a swap": lambda x, y: F.triplet_margin_loss(x, y, y.flip(-1), swap=True),
    }
    image = {
        "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
        "avg_pool2d of negative numbers": lambda x: F.avg_pool2d(-x, 3, 1, padding=1),
        "avg_pool2d without the padding": lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
        "avg_pool2d by a divisor": lambda x: F.avg_pool2d(-x, 2, divisor_override=3),
        "avg_pool3d": lambda x: F.avg_pool3d(x.reshape(1, 4, 2, 2), 2),
        "interpolate of bytes": lambda x: F.interpolate((x * 16)[None].to(torch.uint8), scale_factor=2, mode="bilinear"),
        "max_pool2d": lambda x: F.max_pool2d(x, 2, padding=1),
        "max_pool2d of places": lambda x: F.max_pool2d(x, 2, padding=1, return_indices=True)[0],
    }
    compare({name: (f, ONE) for name, f in each.items()})
    compare({name: (f, ONE, TWO) for name, f in two.items()} | {name: (f, IMAGE) for name, f in image.items()})


X, Y = floats(NAN, 1, -2, NAN, 0, 0), floats(1, NAN, 0.5, NAN, 0, -0.0)


def test_values_at_nan_are_those_of_torch():
    compare(
        {
            "sign": (torch.sign, X),
            "sgn": (torch.sgn, X),
            "sign_": (lambda x: x.clone().sign_(), X),
            "sgn of complex numbers": (torch.sgn, numbers(complex(NAN, 1), 2)),
            "maximum": (torch.maximum, X, Y),
            "fmax": (torch.fmax, X, Y),
            "fmin": (torch.fmin, X, Y),
            "threshold": (lambda x: F.threshold(x, 0.5, 9.0), X),
            "hardshrink": (F.hardshrink, X),
            "softshrink": (F.softshrink, X),
            "clamp": (lambda x: torch.clamp(x, -1, 0.5), X),
        }
    )


def test_gradients_at_nan_are_those_of_torch():
    one = {
        "abs": torch.abs,
        "norm of 1": lambda x: torch.linalg.vector_norm(x[:3], 1),
        "clamp_min": lambda x: torch.clamp_min(x, 0.0),
        "clamp_max": lambda x: torch.clamp_max(x, 0.0),
        "clamp": lambda x: torch.clamp(x, -3, 0.5),
        "relu": torch.relu,
        "relu of torch.nn.functional": F.relu,
        "relu6": F.relu6,
        "hardtanh": F.hardtanh,
        "leaky_relu": F.leaky_relu,
        "threshold": lambda x: F.threshold(x, 0.5, 9.0),
        "hardshrink": F.hardshrink,
        "max": torch.max,
        "min": torch.min,
        "max along a dim": lambda x: torch.max(x, 0).values,
        "l1_loss": lambda x: F.l1_loss(x, torch.zeros(6)),
    }
    two = {"maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin, "max": torch.max, "min": torch.min}
    if "2.14" <= torch.__version__ < "2.15":  # there torch gives the gradient to a NaN as well as to the number beside it
        del two["fmax"], two["fmin"]
    compare_gradients({name: (f, X) for name, f in one.items()} | {f"{name} of two": (f, X, Y) for name, f in two.items()})


@pytest.mark.parametrize("power", [lambda x: x**-1, lambda x: torch.pow(x, -2)])
def test_negative_power_of_an_integer_tensor_raises(power):
    with pytest.raises(RuntimeError, match=r"is raised to the power -[12] .* Convert the tensor to a floating dtype first\."):
        bridge.module_function(Call(power))({}, jnp.arange(3))


def test_slice_outside_its_dim_raises():
    with pytest.raises(RuntimeError, match="narrow: start -2 and length 3 do not lie within dim 0 of size 5"):
        bridge.module_function(Call(lambda x: x.narrow(0, -2, 3)))({}, jnp.arange(5))
    with pytest.raises(IndexError, match="5 is out of bounds"):
        bridge.module_function(Call(lambda x: x.select(0, 5)))({}, jnp.arange(5))
