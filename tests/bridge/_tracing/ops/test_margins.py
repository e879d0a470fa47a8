"""Margin losses and CTC loss in traced torch code, as modules under jit, at points where derivatives jump."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bad_inputs_modules import Applies
from sampling import sampled_tuples
from torch import nn
from traced_oracle import compare

import bridge
from bridge._tracing.ops import margins

pytestmark = pytest.mark.quick

V = torch.linspace(-2, 2, 12).reshape(3, 4)
SIGNS = torch.tensor([1, -1, 1])


@pytest.mark.parametrize(
    ("loss", "inputs", "target"),
    [
        (nn.MarginRankingLoss(), (V[:, 0], V[:, 1].flip(0)), SIGNS),
        (nn.HingeEmbeddingLoss(margin=2.0), (V[0] + 1,), torch.tensor([1, -1, 1, -1])),  # one distance equals the margin
        (nn.CosineEmbeddingLoss(reduction="none"), (V, V.flip(0)), SIGNS),
        (nn.TripletMarginLoss(swap=True, reduction="sum"), (V, V.flip(0)), V.roll(1, 0)),
        (nn.MultiMarginLoss(), (torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]]),), torch.tensor([1, 0])),  # 1 - 1 + 0 is a kink
        (nn.MultiMarginLoss(p=2, weight=torch.tensor([1.0, 2.0, 0.5, 1.0])), (V,), torch.tensor([1, 0, 3])),
        (nn.MultiLabelMarginLoss(), (V,), torch.tensor([[1, 3, -1, 0], [-1, 0, 1, 2], [0, 1, 2, 3]])),
        (nn.MultiLabelSoftMarginLoss(), (V,), (V > 0.5).float()),
        (nn.SoftMarginLoss(), (V[:, 0],), SIGNS),
        (nn.PoissonNLLLoss(full=True), (V,), torch.arange(12).reshape(3, 4)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_losses_as_modules_under_jit_match_torch(loss, inputs, target):
    compare(lambda *xs: loss(*xs, target), *inputs)


def test_gaussian_nll_does_not_read_variances_under_jit():
    var = V[:, :1].abs() * torch.tensor([[0.0], [1.0], [1.0]])  # one variance lies below eps; its derivative passes the clamp
    compare(lambda x, v: F.gaussian_nll_loss(x, V.flip(0), v, full=True, eps=1e-1), V, var)
    pure = bridge.module_function(nn.GaussianNLLLoss())
    found = jax.jit(lambda *xs: pure({}, *xs))(*bridge.to_jax((V, V.flip(0), V[:, 0].abs())))
    np.testing.assert_allclose(found, nn.GaussianNLLLoss()(V, V.flip(0), V[:, 0].abs()), rtol=1e-5)


LENGTHS = torch.tensor([7, 5, 2]), torch.tensor([3, 2, 3])  # the last has more labels than frames


@pytest.mark.slow
@pytest.mark.parametrize(("joined", "reduction"), sampled_tuples([(False, "mean"), (True, "none")]))
def test_ctc_loss_matches_torch(joined, reduction):
    torch.manual_seed(0)
    log_p, targets = torch.randn(7, 3, 5).log_softmax(2), torch.randint(1, 5, (3, 4))
    targets[0, 1] = targets[0, 0]  # a repetition
    given = torch.cat([row[:n] for row, n in zip(targets, LENGTHS[1], strict=True)]) if joined else targets
    loss = nn.CTCLoss(reduction=reduction, zero_infinity=True)
    compare(lambda x: loss(x, given, *LENGTHS), log_p)
    compare(lambda x: F.ctc_loss(x, given[:3] if joined else given[0, :3], (7,), (3,), reduction=reduction), log_p[:, 0] * 1.1)
    arrays = bridge.to_jax((log_p, given, *LENGTHS))
    found = jax.jit(lambda *xs: bridge.module_function(loss)({}, *xs))(*arrays)  # the lengths are traced
    np.testing.assert_allclose(found, loss(log_p, given, *LENGTHS), rtol=1e-4)
    impossible = bridge.module_function(nn.CTCLoss(reduction="none"))({}, *arrays)
    assert jnp.isposinf(impossible).tolist() == [False, False, True]


def test_comparison_detects_an_alignment_without_repeats(monkeypatch):
    monkeypatch.setattr(margins.optax, "ctc_loss", lambda lp, *_, **__: -jnp.sum(lp[..., 0], -1))
    with pytest.raises(AssertionError):
        test_ctc_loss_matches_torch(False, "none")


def test_vmap_over_losses():
    pure = bridge.module_function(Applies(lambda x: F.multi_margin_loss(x, torch.tensor([1, 0, 3]))))
    many = torch.stack([V, V.flip(0)])
    expected = [F.multi_margin_loss(x, torch.tensor([1, 0, 3])) for x in many]
    np.testing.assert_allclose(jax.vmap(lambda x: pure({}, x))(bridge.to_jax(many)), torch.stack(expected), rtol=1e-5)
