"""Scatter operations, writes by strides and through views in traced torch code, in cases that torch's database lacks."""

import jax
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from traced_oracle import compare, same

import bridge
from bridge._tracing.ops import scatter

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:index_reduce")]
REDUCTIONS = ["sum", "prod", "mean", "amax", "amin"]
INDEX = torch.tensor([0, 0, 2, 2, 2])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_scatter_reductions_at_zeros_and_ties_match_torch(reduce, include_self):
    x, src = torch.tensor([2.0, 5.0, 0.0, 7.0]), torch.tensor([2.0, 2.0, 0.0, 3.0, 4.0])
    for y in (src, torch.tensor([0.0, 2.0, 0.0, 0.0, 4.0])):
        compare(lambda x, y: x.scatter_reduce(0, INDEX, y, reduce, include_self=include_self), x, y)
        if reduce != "sum":
            compare(lambda x, y: x.index_reduce(0, INDEX, y, reduce, include_self=include_self), x, y)


def test_scatter_reductions_of_integers_and_nan_match_torch():
    for x, y in ((torch.arange(3), torch.tensor([7, 2, 4, -5, 6])), (torch.ones(3), torch.tensor([1.0, torch.nan, 3.0, 4.0, 5.0]))):
        same(lambda x, y: [x.scatter_reduce(0, INDEX, y, r, include_self=s) for r in REDUCTIONS for s in (True, False)], x, y)


def test_scalars_act_as_one_element_vectors():
    at, one = torch.tensor(0), torch.tensor(5.0)
    functions = [
        lambda x: x.gather(0, at),
        lambda x: x.gather(0, at[None]),
        lambda x: x.index_select(0, at[None]),
        lambda x: x.scatter(0, at, one),
        lambda x: x.scatter(0, at, 5.0),
        lambda x: x.scatter_add(0, at[None], one[None]),
        lambda x: x.index_add(0, at, one),
        lambda x: x.index_copy(0, at, one),
        lambda x: x.index_fill(0, at, one),
        lambda x: x.scatter_reduce(0, at, one, "amax"),
        lambda x: x.put(at, one),
        lambda x: x.take(at),
        lambda x: x.unfold(0, 1, 1),
    ]
    same(lambda x: [f(x) for f in functions], torch.tensor(3.0))
    same(lambda x: [x.gather(0, at), x.index_select(0, at), x.scatter(0, at, 5.0)], torch.ones(2))


def through_views(x):
    y = x.clone()
    y[:, 1:].masked_scatter_(torch.tensor([[True, False], [True, True]]), torch.arange(10.0))
    y.select(0, 1).index_add_(0, torch.tensor([0, 0]), torch.ones(2))
    y.hsplit(3)[2].mul_(2)
    first, second = torch.atleast_2d(y[0], y[1])
    first.add_(second)
    torch.atleast_3d(y)[1, 1].fill_(9)
    y[1].as_strided((2,), (2,)).mul_(100)
    y.as_strided((2,), (3,), 1).sub_(5)
    y.put_(torch.tensor([-1]), torch.tensor([50.0]), accumulate=True)
    return y.fill_diagonal_(0.5)


def test_writes_through_views_reach_the_tensor():
    compare(through_views, torch.tensor([[5.0, 2.0, 9.0], [4.0, 4.0, 1.0]]))


def test_as_strided_windows_match_torch():
    compare(lambda x: x.contiguous().as_strided((4, 3), (1, 2), 1), torch.randn(3, 4))
    compare(lambda x: torch.as_strided_copy(x, (2, 2), (1, 1)).mul_(2) + x[0, 0], torch.randn(3, 4))


def test_out_of_place_scatters_match_torch():
    x, src = torch.randn(4, 4), torch.randn(2, 4)
    compare(lambda x, src: x.slice_scatter(src, 0, 1, 4, 2).select_scatter(src[0], 1, -1).diagonal_scatter(src[1, :3], 1), x, src)


def test_indices_may_be_arguments_of_a_compiled_function():
    f = jax.jit(
        lambda x, i: bridge.module_function(Applies(lambda x, i: x.index_fill(0, i, 0.0).scatter_reduce(0, i, x[:2], "prod")))({}, x, i)
    )
    x, i = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([2, 0])
    expected = x.index_fill(0, i, 0.0).scatter_reduce(0, i, x[:2], "prod")
    np.testing.assert_allclose(f(bridge.to_jax(x), bridge.to_jax(i.int())), expected)


@pytest.mark.parametrize("name", ["geometric_", "cauchy_", "log_normal_", "random_"])
def test_in_place_draws_have_the_right_distribution(name):
    def draws(x):
        return getattr(x.clone(), name)(*{"geometric_": (0.3,), "random_": (2, 9)}.get(name, ()))

    torch.manual_seed(0)
    x = torch.zeros(4000)
    found = bridge.module_function(Applies(draws))({}, bridge.to_jax(x), rng=jax.random.key(0))
    for q in (0.25, 0.5, 0.75):
        np.testing.assert_allclose(np.quantile(found, q), draws(x).quantile(q), rtol=0.1, atol=0.15)


def test_comparison_detects_a_missing_include_self(monkeypatch):
    monkeypatch.setattr(scatter, "_exclude_self", lambda x, where, include_self, value: x)
    with pytest.raises(AssertionError):
        test_scatter_reductions_at_zeros_and_ties_match_torch("prod", False)
