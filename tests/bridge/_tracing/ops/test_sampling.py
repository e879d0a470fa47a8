"""Grid samples, embedding bags and pools with indices in traced torch code."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies
from torch import nn
from traced_oracle import compare

import bridge
from bridge._tracing.ops import sampling


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_matches_torch_outside_and_at_the_edges(mode, padding_mode):
    torch.manual_seed(0)
    x, grid = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 2) * 2
    grid[0, 0] = torch.tensor([[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0], [-5.0, 7.0]])
    compare(lambda x, g: F.grid_sample(x, g, mode, padding_mode, align_corners=padding_mode == "border"), x, grid)
    if (mode, padding_mode) == ("bilinear", "reflection"):
        compare(lambda x, g: F.grid_sample(x, g, mode, padding_mode, True), torch.randn(2, 1, 3, 4, 2), torch.randn(2, 1, 2, 3, 3))


def test_comparison_detects_a_missing_reflection(monkeypatch):
    monkeypatch.setattr(sampling, "_reflect", lambda at, size, align_corners: at)
    with pytest.raises(AssertionError):
        test_grid_sample_matches_torch_outside_and_at_the_edges("bilinear", "reflection")


@pytest.mark.parametrize("size", [(2, 1, 4, 5), (2, 1, 3, 2, 4)])
def test_spatial_transformer_matches_torch(size):
    torch.manual_seed(0)
    x, theta = torch.randn(size), torch.randn(2, len(size) - 2, len(size) - 1)
    for align_corners in (False, True):
        compare(lambda x, t, a=align_corners: F.grid_sample(x, F.affine_grid(t, list(size), a), align_corners=a), x, theta)


def _has_lanczos() -> bool:
    try:
        F.interpolate(torch.zeros(1, 1, 4, 4), size=2, mode="lanczos", antialias=True)
    except (NotImplementedError, ValueError):
        return False
    return True


LANCZOS = pytest.param("lanczos", marks=pytest.mark.skipif(not _has_lanczos(), reason="this torch lacks the mode"))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", LANCZOS])
@pytest.mark.parametrize("to", [{"size": (3, 4)}, {"scale_factor": 0.3}, {"size": (12, 5)}], ids=str)
def test_antialiased_interpolation_matches_torch(mode, to):
    torch.manual_seed(0)
    for align_corners in (False,) if mode == "lanczos" else (False, True):
        compare(lambda x, a=align_corners: F.interpolate(x, mode=mode, antialias=True, align_corners=a, **to), torch.randn(2, 3, 9, 8))


INDEX = torch.tensor([1, 2, 2, 4, 1, 0, 2])
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_matches_torch(mode):
    torch.manual_seed(0)
    weight, shares = torch.randn(5, 3), torch.randn(7)
    ends = torch.tensor([0, 3, 3, 5, 7])
    compare(lambda w: F.embedding_bag(INDEX, w, OFFSETS, mode=mode, padding_idx=-3), weight)
    compare(lambda w: F.embedding_bag(INDEX, w, ends, mode=mode, include_last_offset=True), weight)
    if mode == "sum":
        compare(lambda w, s: F.embedding_bag(INDEX, w, OFFSETS, mode=mode, per_sample_weights=s), weight, shares)
    if mode != "max":
        # On a CPU, torch 2.13 divides by the count of another index; here both indices occur twice.
        compare(lambda w: F.embedding_bag(torch.tensor([1, 0, 0, 1]), w, OFFSETS[:2], mode=mode, scale_grad_by_freq=True), weight)
    layer = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2)
    pure = bridge.module_function(layer)
    found = jax.jit(lambda *xs: pure(bridge.module_tree(layer), *xs))(*bridge.to_jax((INDEX, OFFSETS)))
    np.testing.assert_allclose(found, layer(INDEX, OFFSETS).detach(), rtol=1e-6)


def test_embedding_gradients_scaled_by_frequency_match_torch():
    weight = torch.randn(5, 3)
    compare(lambda w: F.embedding(INDEX, w, scale_grad_by_freq=True), weight)
    compare(lambda w: F.embedding(INDEX, w, padding_idx=-1), weight)  # the last row, because torch counts from the end


def test_pooling_with_indices_and_unpooling_match_torch():
    torch.manual_seed(0)
    for n in (1, 2, 3):
        x = torch.randn(2, 3, *(7, 5, 6)[:n])
        pool, back, adaptive = (getattr(F, f"{name}{n}d") for name in ("max_pool", "max_unpool", "adaptive_max_pool"))
        compare(lambda x, p=pool, b=back: b(*p(x, 2, return_indices=True), 2, output_size=x.shape), x)
        compare(lambda x, a=adaptive: a(x, 4, return_indices=True)[0], x)
        places = bridge.module_function(Applies(lambda x, a=adaptive: a(x, 4, return_indices=True)[1]))({}, bridge.to_jax(x))
        np.testing.assert_array_equal(places, adaptive(x, 4, return_indices=True)[1])


@pytest.mark.parametrize("n", [2, 3])
def test_fractional_pools_with_given_samples_match_torch(n):
    torch.manual_seed(0)
    x, samples = torch.randn(2, 3, *(9, 7, 8)[:n]), torch.rand(2, 3, n)
    pool = getattr(F, f"fractional_max_pool{n}d")
    compare(lambda x: pool(x, 2, output_size=(3, 4, 5)[:n], _random_samples=samples), x)
    drawn = bridge.module_function(Applies(lambda x: pool(x, 2, output_ratio=(0.5,) * n)))({}, bridge.to_jax(x), rng=jax.random.key(0))
    assert drawn.shape == pool(x, 2, output_ratio=(0.5,) * n).shape


def test_random_samples_stay_within_their_bounds():
    x = -torch.ones(4, 100)
    drawn = bridge.module_function(nn.RReLU(0.2, 0.5))({}, bridge.to_jax(x), rng=jax.random.key(0))
    assert ((drawn <= -0.2) & (drawn >= -0.5)).all()
    assert len(np.unique(drawn)) > 100
    compare(nn.RReLU(0.2, 0.5).eval(), torch.randn(3, 4))
    channels = bridge.module_function(nn.FeatureAlphaDropout(0.5))({}, bridge.to_jax(x)[..., None] * np.ones(3), rng=jax.random.key(0))
    assert (channels == channels[..., :1]).all()
    compare(lambda x: F.alpha_dropout(x, 1.0, training=True), x)


def test_scalar_and_missing_arguments_match_torch():
    compare(lambda x: F.softmax(x, 0) + F.log_softmax(x, 0), torch.tensor(2.0))
    compare(lambda x: F.pad(x, (-3, 2, 1, -1), mode="replicate"), torch.randn(1, 3, 4))
    compare(lambda x: F.pixel_unshuffle(x, 2) * 2 + F.channel_shuffle(F.pixel_unshuffle(x, 2), 2), torch.randn(1, 1, 4, 6))
    compare(lambda x: F.pdist(x), torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 5.0]]))
    norm = nn.BatchNorm1d(3)
    out, new = bridge.module_function(norm)(bridge.module_tree(norm), np.zeros((0, 3), np.float32), buffers=bridge.module_buffers(norm))
    assert out.shape == (0, 3)
    np.testing.assert_array_equal(new["running_var"], norm.running_var)
