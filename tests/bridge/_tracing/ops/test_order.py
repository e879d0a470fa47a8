"""Order statistics, searches, running extremes and differences in traced torch code, where torch's database does not look."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from traced_oracle import compare, same

import bridge
from bridge._tracing.ops import order

pytestmark = pytest.mark.quick

INTEGERS = torch.tensor([[5, 2, 9], [4, 4, 1]])
MISSING = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 2.0])
LINES = ["max", "min", "median", "nanmedian", "mode", "cummax", "cummin", "sort", "argsort", "cumsum", "argmax", "count_nonzero"]


@pytest.mark.parametrize("x", [INTEGERS, INTEGERS.float(), MISSING, torch.tensor(3.0)], ids=["integers", "floats", "NaN", "number"])
def test_along_a_line(x):
    same(lambda x: [y for name in LINES for out in [getattr(x, name)(0)] for y in (out if isinstance(out, tuple) else [out])], x)


def test_of_a_whole_tensor():
    same(lambda x: [x.median(), x.nanmedian(), x.quantile(0.3), x.nanquantile(0.3), x.nanmean(), x.isclose(x, equal_nan=True)], MISSING)
    same(lambda x: [x.sum(0, keepdim=True), x.quantile(torch.tensor([0.5, 0.1])), x.softmax(-1), x.topk(1).indices], torch.tensor(3.0))


def test_the_gradient_of_a_median_is_shared_among_equals_that_of_a_line_is_not():
    x = torch.tensor([2.0, 1.0, 2.0, 3.0, 2.0])
    compare(torch.median, x)
    compare(lambda x: x.cummax(0).values, x)
    out = jax.grad(lambda x: bridge.module_function(Applies(lambda x: x.median(0).values))({}, x))(bridge.to_jax(x))
    assert sorted(out.tolist()) == [0, 0, 0, 0, 1]  # which of equals, torch does not say


def test_searches():
    edges, rows = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 4.0]])
    values = torch.tensor([[0.0, 3.0], [4.0, torch.nan]])
    same(
        lambda e, v: [torch.bucketize(v, e, right=True), torch.searchsorted(e, v, out_int32=True), torch.searchsorted(e, 4)], edges, values
    )
    same(lambda r, v: [torch.searchsorted(r, v), torch.searchsorted(r, v, side="right")], rows, values)
    same(lambda r, v: [torch.searchsorted(r, v, sorter=r.argsort(-1))], rows.flip(1), values)
    same(lambda x: [torch.isin(x, torch.tensor([4, 1])), torch.isin(x, 4, invert=True), torch.isin(4, x)], INTEGERS)


def test_histograms():
    x = torch.tensor([0.0, 1.0, 1.5, 4.0, 9.0])
    same(lambda x: [x.histc(4), x.histc(3, 1, 4), *torch.histogram(x, 4), *torch.histogram(x, torch.tensor([0.0, 2.0, 4.0]))], x)


def test_differences_and_areas():
    x, at = torch.tensor([[1.0, 4.0, 9.0, 16.0], [0.0, 1.0, 0.0, 3.0]]), torch.tensor([0.0, 1.0, 3.0, 4.0])
    compare(lambda x, at: torch.gradient(x, spacing=(at,), dim=1, edge_order=2)[0], x, at)
    compare(lambda x, at: torch.cumulative_trapezoid(x, at), x, at)
    compare(lambda x: torch.diff(x, 2, prepend=x[:, :1], append=x), x)


def test_whole_numbers_bit_by_bit():
    same(lambda x: [torch.gcd(x, x * 0 + 6), torch.lcm(x, x + 1), x << 2, 2 << x, x.bitwise_right_shift(1)], INTEGERS)


def test_a_branch_on_equality_of_known_values():
    same(lambda x: [x + 1 if torch.equal(torch.arange(3), torch.arange(3)) else x, torch.ones(2) * torch.allclose(x, x)], torch.ones(2))


def test_an_ensemble_of_medians():
    x = torch.randn(4, 5)
    found = jax.vmap(lambda x: bridge.module_function(Applies(torch.median))({}, x))(bridge.to_jax(x))
    np.testing.assert_array_equal(found, x.median(1).values)


def test_a_wrong_place_is_caught(monkeypatch):
    right = order._nth
    monkeypatch.setattr(order, "_nth", lambda x, n, dim: right(x, jnp.maximum(n - 1, 0), dim))
    with pytest.raises(AssertionError):
        test_of_a_whole_tensor()


def test_numpy_names_of_arguments_and_results_as_arguments():
    x = INTEGERS.float()
    same(lambda x: [x.sum(axis=1, keepdims=True), x.cumsum(axis=0), torch.stack((x, x), axis=1), torch.unsqueeze(input=x, dim=0)], x)
    same(lambda x: [torch.stack(torch.aminmax(x, dim=1)), torch.cat(x.chunk(2))], x)
