"""Order statistics, searches, cumulative extremes and differences in traced torch code, in cases that torch's database lacks."""

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
def test_order_statistics_along_a_dim_match_torch(x):
    same(lambda x: [y for name in LINES for out in [getattr(x, name)(0)] for y in (out if isinstance(out, tuple) else [out])], x)


def test_order_statistics_of_a_tensor_match_torch():
    same(lambda x: [x.median(), x.nanmedian(), x.quantile(0.3), x.nanquantile(0.3), x.nanmean(), x.isclose(x, equal_nan=True)], MISSING)
    same(lambda x: [x.sum(0, keepdim=True), x.quantile(torch.tensor([0.5, 0.1])), x.softmax(-1), x.topk(1).indices], torch.tensor(3.0))


def test_only_the_full_median_shares_its_gradient_among_equals():
    x = torch.tensor([2.0, 1.0, 2.0, 3.0, 2.0])
    compare(torch.median, x)
    compare(lambda x: x.cummax(0).values, x)
    out = jax.grad(lambda x: bridge.module_function(Applies(lambda x: x.median(0).values))({}, x))(bridge.to_jax(x))
    assert sorted(out.tolist()) == [0, 0, 0, 0, 1]  # torch leaves open which of equal elements has the gradient


def test_searches_match_torch():
    edges, rows = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 4.0]])
    values = torch.tensor([[0.0, 3.0], [4.0, torch.nan]])
    same(
        lambda e, v: [torch.bucketize(v, e, right=True), torch.searchsorted(e, v, out_int32=True), torch.searchsorted(e, 4)], edges, values
    )
    same(lambda r, v: [torch.searchsorted(r, v), torch.searchsorted(r, v, side="right")], rows, values)
    same(lambda r, v: [torch.searchsorted(r, v, sorter=r.argsort(-1))], rows.flip(1), values)
    same(lambda x: [torch.isin(x, torch.tensor([4, 1])), torch.isin(x, 4, invert=True), torch.isin(4, x)], INTEGERS)


def test_histograms_match_torch():
    x = torch.tensor([0.0, 1.0, 1.5, 4.0, 9.0])
    same(lambda x: [x.histc(4), x.histc(3, 1, 4), *torch.histogram(x, 4), *torch.histogram(x, torch.tensor([0.0, 2.0, 4.0]))], x)


def test_differences_and_integrals_match_torch():
    x, at = torch.tensor([[1.0, 4.0, 9.0, 16.0], [0.0, 1.0, 0.0, 3.0]]), torch.tensor([0.0, 1.0, 3.0, 4.0])
    compare(lambda x, at: torch.gradient(x, spacing=(at,), dim=1, edge_order=2)[0], x, at)
    compare(lambda x, at: torch.cumulative_trapezoid(x, at), x, at)
    compare(lambda x: torch.diff(x, 2, prepend=x[:, :1], append=x), x)


def test_integer_operations_match_torch():
    same(lambda x: [torch.gcd(x, x * 0 + 6), torch.lcm(x, x + 1), x << 2, 2 << x, x.bitwise_right_shift(1)], INTEGERS)


def test_known_values_may_decide_a_branch():
    same(lambda x: [x + 1 if torch.equal(torch.arange(3), torch.arange(3)) else x, torch.ones(2) * torch.allclose(x, x)], torch.ones(2))


def test_vmap_over_medians():
    x = torch.randn(4, 5)
    found = jax.vmap(lambda x: bridge.module_function(Applies(torch.median))({}, x))(bridge.to_jax(x))
    np.testing.assert_array_equal(found, x.median(1).values)


def test_comparison_detects_a_wrong_index(monkeypatch):
    right = order._nth_smallest_index
    monkeypatch.setattr(order, "_nth_smallest_index", lambda x, n, dim: right(x, jnp.maximum(n - 1, 0), dim))
    with pytest.raises(AssertionError):
        test_order_statistics_of_a_tensor_match_torch()


def test_numpy_argument_names_and_out_arguments_work():
    x = INTEGERS.float()
    same(lambda x: [x.sum(axis=1, keepdims=True), x.cumsum(axis=0), torch.stack((x, x), axis=1), torch.unsqueeze(input=x, dim=0)], x)
    same(lambda x: [torch.stack(torch.aminmax(x, dim=1)), torch.cat(x.chunk(2))], x)
