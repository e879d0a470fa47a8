"""For a GPU only: the time of the call alone, the share of the memory's bandwidth, and whether steps keep the order of torch's stream."""

from __future__ import annotations

from typing import Any

import candidates
import torch
from common import NAMES, Settings, compare, copy_bandwidth, elements, gradients, interleaved, parameters, rows

import torch_api


def calls(title: str, settings: Settings) -> dict[str, Any]:
    """How long a step holds up the host: the call is timed, and the device is waited for outside the timed region."""
    makers = candidates.adamw(settings)[0]
    chosen = {name: makers[name] for name in (candidates.FUSED, candidates.FOREACH, candidates.OURS)}
    shapes = settings.shapes(title)
    grads = gradients(shapes, settings.device)
    steps = {name: maker(parameters(shapes, grads, settings.device)) for name, maker in chosen.items()}
    timing = interleaved(steps, settings.rounds, "call alone", settings.device, synchronised=False)
    found = {"leaves": len(shapes), "parameters": elements(shapes), "baseline": candidates.FUSED, "rows": rows(timing, candidates.FUSED)}
    return {"title": f"the call alone, {NAMES[title]}"} | found


def bandwidth(settings: Settings) -> dict[str, Any]:
    """Bytes that a step must move, per second, compared with a copy on the same device."""
    makers = candidates.adamw(settings)[0]
    shapes = settings.shapes("gpt2")
    chosen = {name: makers[name] for name in (candidates.FUSED, candidates.OURS)}
    table = compare("bandwidth", chosen, shapes, settings, candidates.FUSED)["rows"]
    copied = copy_bandwidth(settings.device, settings.quick)
    moved = 28 * elements(shapes)
    return {
        "title": NAMES["gpt2"],
        "copy bytes per second": copied,
        "rows": {
            name: {"bytes per second": moved / row["median ms"] * 1e3, "of a copy": moved / row["median ms"] * 1e3 / copied}
            for name, row in table.items()
        },
    }


def stress(settings: Settings) -> dict[str, Any]:
    """Compute gradients behind a slow kernel in torch's stream, then free and overwrite them at once: the result must be torch's.

    Otherwise a step read a gradient before torch had written it, or after its memory was reused.
    """
    size, side, steps = settings.count(1 << 24, 1 << 16), settings.count(8192, 512), settings.count(50, 5)
    p = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    q = torch.nn.Parameter(p.detach().clone())
    ours, theirs = torch_api.MaskedSGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0)
    slow = torch.randn(side, side, device="cuda")
    for _ in range(steps):
        slow = (slow @ slow).clamp(-1, 1)
        p.grad = torch.randn_like(p) + slow.flatten()[0]
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        p.grad = None
        torch.full_like(p, float("nan"))
    difference = (p - q).abs().max().item()
    return {"steps": steps, "largest difference": difference, "as torch": difference < 1e-4}


def device(settings: Settings) -> dict[str, Any]:
    """All measurements that only a GPU has."""
    return {"tables": [calls("gpt2", settings), calls("tiny", settings)], "bandwidth": bandwidth(settings), "stress": stress(settings)}
