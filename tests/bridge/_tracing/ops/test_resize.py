"""Resized images, image patches and distances in traced torch code: values and gradients match torch."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sampling import sampled_tuples
from torch import nn
from traced_oracle import compare

import bridge
import torch_api
from bridge._tracing.ops import resize

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

SIZES = (6, 5, 4)
MODES = {1: ["nearest", "nearest-exact", "linear"], 2: ["nearest", "nearest-exact", "bilinear", "bicubic"],
         3: ["nearest", "nearest-exact", "trilinear"]}  # fmt: skip
TO = [{"scale_factor": 2}, {"scale_factor": 0.5}, {"scale_factor": 1.3}, {"scale_factor": 1.3, "recompute_scale_factor": True}, {"size": 1}]
CASES = [
    (dims, mode, to)
    for dims, modes in MODES.items()
    for mode in modes
    for to in [*TO, {"size": (7, 5, 3)[:dims]}, {"size": (12, 2, 9)[:dims]}]
]


@pytest.mark.parametrize(("dims", "mode", "to"), sampled_tuples(CASES), ids=str)
def test_interpolate_matches_torch(dims, mode, to):
    torch.manual_seed(0)
    x = torch.randn(2, 3, *SIZES[:dims])
    for align_corners in (None,) if "nearest" in mode else (False, True):
        compare(lambda x, align_corners=align_corners: F.interpolate(x, mode=mode, align_corners=align_corners, **to), x)


def test_comparison_detects_a_shifted_sample(monkeypatch):
    monkeypatch.setattr(resize, "_scale", lambda given, size, out: size / out + 0.1)
    with pytest.raises(AssertionError):
        test_interpolate_matches_torch(2, "bilinear", {"scale_factor": 2})


def test_upsampling_by_two_needs_no_scatter():
    doubled = bridge.module_function(nn.Upsample(scale_factor=2))
    program = str(jax.make_jaxpr(jax.grad(lambda x: doubled({}, x).sum()))(np.ones((1, 1, 4, 4), np.float32)))
    assert "scatter" not in program
    assert "gather" not in program


@pytest.mark.parametrize(
    "kernel", [{"kernel_size": 2}, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (3, 6, 7)])
def test_unfold_and_fold_match_torch(kernel, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    compare(lambda x: F.unfold(x, **kernel), x)
    compare(lambda x: F.fold(x, (6, 7), **kernel), F.unfold(x, **kernel))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_cdist_matches_torch(p):
    torch.manual_seed(0)
    a, b = torch.randn(4, 3), torch.randn(5, 3)
    compare(lambda a, b: torch.cdist(a, b, p), a, b)
    compare(lambda a, b: torch.cdist(a, b, p), a[None].expand(2, 4, 3).contiguous(), b[None].expand(2, 5, 3).contiguous())
    compare(lambda a, b: F.pairwise_distance(a, b, p), a, b[:4])
    compare(lambda a: torch.cdist(a, a.detach(), p), a)  # zeros on the diagonal


def test_tensor_unfold_matches_torch():
    compare(lambda x: x.unfold(1, 3, 2), torch.randn(2, 7))


class UNet(nn.Module):
    """A small U-Net: downsample, then upsample next to the skipped features."""

    def __init__(self):
        super().__init__()
        self.down, self.low, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(5, 1, 3, 1, 1)
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x):
        return self.up(torch.cat([x, self.larger(F.silu(self.low(F.silu(self.down(x)))))], 1))


def test_small_u_net_trains_as_in_eager_torch():
    torch.manual_seed(0)
    eager, ours = UNet(), UNet()
    ours.load_state_dict(eager.state_dict())
    start = eager.low.weight.detach().clone()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    train_step = torch_api.JaxTrainStep(ours, lambda m, x: F.mse_loss(m(x), x), torch_api.MaskedSGD(ours.named_parameters(), lr=0.1))
    for _ in range(20):
        x = torch.randn(2, 1, 8, 8)
        optimizer.zero_grad()
        loss = F.mse_loss(eager(x), x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(train_step(x), loss.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.low.weight - start, eager.low.weight - start, rtol=1e-3, atol=1e-6)
