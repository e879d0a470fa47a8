"""`lr_scale` by selector and by group, and `wd_scale`, against torch with a group for each parameter, under a scheduler."""

import pytest
import torch

import torch_api


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))


def run(module, optimizer, scheduler, steps=20):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        scheduler.step()
    return [p.detach().clone() for p in module.parameters()]


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def movement(ends, begun):
    return max((a - b).abs().max().item() for a, b in zip(ends, begun, strict=True))


@pytest.mark.parametrize("wrong", [False, True], ids=["as torch", "a broken sibling is caught"])
def test_layer_decay_is_that_of_a_group_for_each_layer(wrong):
    ours, theirs = model(), model()
    scales = torch_api.layer_decay(ours, 0.5)
    assert type(scales) is dict
    assert len(set(scales.values())) == 3
    if wrong:
        scales["0.weight"] *= 1.01
    optimizer = torch_api.MaskedAdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.1, lr_scale=scales)
    assert len(optimizer.param_groups) == 1
    own = run(ours, optimizer, cosine(optimizer))
    decay = torch_api.layer_decay(theirs, 0.5)
    groups = [{"params": [p], "lr": 1e-2 * decay[name]} for name, p in theirs.named_parameters()]
    reference = torch.optim.AdamW(groups, weight_decay=0.1)
    expected = run(theirs, reference, cosine(reference))
    moved = movement(expected, [p.detach() for p in model().parameters()])
    assert (movement(own, expected) <= 1e-5 * moved) is not wrong


def test_scales_of_a_group_hold_under_a_scheduler():
    ours, theirs = model(), model()
    scaled = [{"params": ours[0].parameters(), "lr_scale": 0.1, "wd_scale": 3.0}, {"params": ours[1:].parameters()}]
    optimizer = torch_api.MaskedAdamW(scaled, lr=1e-2, weight_decay=0.1)
    own = run(ours, optimizer, cosine(optimizer))
    plain = [{"params": theirs[0].parameters(), "lr": 1e-3, "weight_decay": 0.3}, {"params": theirs[1:].parameters()}]
    reference = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1)
    expected = run(theirs, reference, cosine(reference))
    assert movement(own, expected) <= 1e-5 * movement(expected, [p.detach() for p in model().parameters()])


def test_values_that_are_no_scale_are_refused():
    for value in (-1.0, "x", True, float("nan")):
        with pytest.raises(ValueError, match=r"lr_scale: '0.weight' got .* expected a number that is not negative"):
            torch_api.MaskedAdamW(model().named_parameters(), lr_scale={"0": value})
