"""Linear algebra and Fourier transforms in traced torch code, in cases that torch's operator database lacks."""

import functools

import jax
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from torch import nn
from traced_oracle import compare, compare_on_integers

import bridge
from bridge._tracing.ops import linalg


def sample(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(*shape):
    return torch.linspace(1, 2, int(np.prod(shape))).reshape(shape)


def whole_eigh(x, triangle="L"):
    """Return a function of the decomposition that does not depend on the signs of the vectors."""
    values, vectors = torch.linalg.eigh(x, UPLO=triangle)
    return torch.cat([vectors**4, values[..., None, :], vectors @ torch.diag_embed(values**2) @ vectors.mT], -2)


def whole_svd(x, full):
    u, s, vh = torch.linalg.svd(x, full_matrices=full)
    k = s.shape[-1]
    return torch.cat([(u[..., :k] ** 4).flatten(), (vh[..., :k, :] ** 4).flatten(), s.flatten()])


@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigh_reads_one_triangle(triangle):
    compare(functools.partial(whole_eigh, triangle=triangle), sample(2, 4, 4))


@pytest.mark.parametrize(("shape", "full"), [((2, 5, 3), True), ((3, 5), True), ((3, 5), False)])
def test_svd_matches_torch(shape, full):
    compare(functools.partial(whole_svd, full=full), sample(*shape), tol=1e-3)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_reads_one_triangle_and_has_a_gradient_in_both(upper):
    x = sample(3, 3)
    x = x @ x.mT + (x.tril(-1) if upper else x.triu(1)) + torch.eye(3)
    compare(lambda x: torch.linalg.cholesky(x, upper=upper), x)
    compare(lambda x: torch.cholesky_solve(torch.ones(3, 1), x, upper=upper), x)


def test_comparison_detects_eigenvectors_of_the_other_triangle(monkeypatch):
    monkeypatch.setattr(linalg, "_hermitian_from_triangle", lambda x, upper: linalg.adjoint(x))
    with pytest.raises(AssertionError):
        compare(whole_eigh, sample(2, 4, 4))


@pytest.mark.parametrize("mapping", ["cayley", "matrix_exp", "householder"])
def test_orthogonal_parametrization_matches_torch(mapping):
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map=mapping)
    x = sample(2, 4)
    out = layer(x)
    pure, tree = bridge.module_function(layer), bridge.module_tree(layer)
    np.testing.assert_allclose(jax.jit(pure)(tree, bridge.to_jax(x)), out.detach(), rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    found = jax.tree.leaves(jax.grad(lambda tree: (pure(tree, bridge.to_jax(x)) ** 2).sum())(tree))
    theirs = [p.grad for p in layer.parameters()]
    for ours in found:
        assert any(ours.shape == g.shape and np.allclose(ours, g, rtol=1e-3, atol=1e-4) for g in theirs)


def infos(x):
    return torch.stack([torch.linalg.inv_ex(x).info, torch.linalg.lu_factor_ex(x).info, torch.linalg.cholesky_ex(x)[1].clamp(max=1)])


def test_info_of_singular_matrices_is_traced():
    x = torch.tensor([[[1.0, 2.0], [2.0, 4.0]], [[2.0, 0.0], [0.0, 3.0]]])
    pure = jax.jit(lambda x: bridge.module_function(Applies(infos))({}, x))
    np.testing.assert_array_equal(pure(bridge.to_jax(x)), infos(x))


def written_in_place(x):
    x = x * 1
    torch.linalg.diagonal(x).mul_(3)
    x.resolve_conj().add_(1)
    x[0].digamma_()
    return x.renorm_(2, 0, 1.5)


def test_in_place_writes_reach_views():
    compare(written_in_place, sample(3, 3) + 4)


POINTS = {
    "polar": (lambda x: torch.view_as_real(torch.polar(x, x)), [0.0, 1.0]),
    "norm of -1": (lambda x: torch.linalg.vector_norm(x, -1), [0.0, 1.0]),
    "norm of matrices": (lambda x: torch.linalg.norm(x[:, None] * torch.zeros(1, 2), 2), [0.0, 1.0]),
    "dist": (lambda x: torch.dist(x, x), [0.0, 1.0]),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x.reshape(2, 2), 3), [0.0, 0.0, 0.0, 0.0]),
    "pinv": (lambda x: torch.linalg.pinv(x.reshape(2, 2), atol=0.5), [3.0, 0.0, 0.0, 0.1]),
}


@pytest.mark.parametrize("name", POINTS)
def test_derivatives_at_special_points_match_torch(name):
    function, at = POINTS[name]
    compare(function, torch.tensor(at))


INTEGERS = {
    "fft": lambda x: torch.fft.fft2(x).real,
    "trace": lambda x: x.to(torch.int8).trace(),
    "rank": lambda x: torch.linalg.matrix_rank(x.float()),
    "kron": lambda x: torch.kron(x, x.float()),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_dtypes_match_torch(name):
    compare_on_integers(INTEGERS[name])


@pytest.mark.parametrize("center", [True, False])
def test_stft_and_istft_match_torch(center):
    def filtered(x):
        window = torch.hamming_window(12)
        spectra = torch.stft(x, 16, 4, 12, window, center=center, return_complex=True)
        tail = spectra[:, :6].abs().square().sum(1).cumsum(-1)
        if not center:
            return tail
        return torch.istft(spectra * 2, 16, 4, 12, window, length=40) + tail.mean(-1, keepdim=True)

    x = sample(2, 40)
    compare(filtered, x)
    pure = bridge.module_function(Applies(filtered))
    each = jax.vmap(lambda x: pure({}, x[None])[0])(bridge.to_jax(x))
    np.testing.assert_allclose(each, pure({}, bridge.to_jax(x)), rtol=1e-5, atol=1e-5)


def test_vmap_over_linear_solves():
    def solved(x, b):
        q, r = torch.linalg.qr(x)
        factors = torch.linalg.lu_factor(x)
        return torch.linalg.solve_triangular(r, q.mT @ b, upper=True) + torch.linalg.lu_solve(*factors, b) - torch.linalg.lstsq(x, b)[0]

    x, b = sample(4, 3, 3) + 3 * torch.eye(3), sample(4, 3, 2)
    pure = bridge.module_function(Applies(solved))
    found = jax.jit(jax.vmap(lambda x, b: pure({}, x, b)))(*bridge.to_jax((x, b)))
    np.testing.assert_allclose(found, torch.linalg.solve(x, b), rtol=1e-3, atol=1e-4)
