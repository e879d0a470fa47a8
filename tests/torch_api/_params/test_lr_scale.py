"""`lr_scale` by selector and by group, and `wd_scale`, move as torch with one group per parameter, under a scheduler."""

import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


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
def test_layer_decay_moves_like_one_group_per_layer(wrong):
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


def test_scales_of_a_group_apply_under_a_scheduler():
    ours, theirs = model(), model()
    scaled = [{"params": ours[0].parameters(), "lr_scale": 0.1, "wd_scale": 3.0}, {"params": ours[1:].parameters()}]
    optimizer = torch_api.MaskedAdamW(scaled, lr=1e-2, weight_decay=0.1)
    own = run(ours, optimizer, cosine(optimizer))
    plain = [{"params": theirs[0].parameters(), "lr": 1e-3, "weight_decay": 0.3}, {"params": theirs[1:].parameters()}]
    reference = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.1)
    expected = run(theirs, reference, cosine(reference))
    assert movement(own, expected) <= 1e-5 * movement(expected, [p.detach() for p in model().parameters()])


def test_lr_scale_acts_once_if_a_scheduler_multiplies_by_it():
    """timm's schedulers and many scripts based on BEiT and MAE do so."""
    ends, scales = [], [0.25, 0.5, 1.0]
    for make in (torch_api.MaskedAdamW, torch.optim.AdamW):
        module = model()
        optimizer = make([{"params": layer.parameters(), "lr_scale": s} for layer, s in zip(module, scales, strict=True)], lr=1e-2)

        class Scheduler:
            def step(self, groups=optimizer.param_groups):
                for group in groups:
                    group["lr"] = 1e-2 * group["lr_scale"]

        Scheduler().step()
        ends.append(run(module, optimizer, Scheduler()))
    assert movement(*ends) <= 1e-5 * movement(ends[1], [p.detach() for p in model().parameters()])


def scaled(make, lr, scale):
    module = model()
    optimizer = make([{"params": module.parameters(), "lr_scale": scale}], lr=lr)
    run(module, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), 1)
    return optimizer


def test_lr_scale_of_a_group_is_saved_and_loaded():
    ours, theirs = scaled(torch_api.MaskedAdamW, 0.1, 0.3), scaled(torch.optim.AdamW, 0.2, 0.3)
    assert ours.state_dict()["param_groups"][0]["lr_scale"] == 0.3
    ours.param_groups[0]["lr_scale"] = 0.5
    again = scaled(torch_api.MaskedAdamW, 0.4, 0.3)
    again.load_state_dict(ours.state_dict())
    assert again.report().rows[0]["lr"] == ours.report().rows[0]["lr"] == pytest.approx(0.1 * 0.3 * 0.5)
    again.load_state_dict(theirs.state_dict())
    assert again.report().rows[0]["lr"] == pytest.approx(0.2 * 0.3)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.param_groups[0]["lr_scale"] == pytest.approx(0.3 * 0.5)


def test_report_shows_the_lr_of_each_parameter():
    optimizer = torch_api.MaskedAdamW([{"params": list(model().named_parameters()), "lr_scale": 0.5}], lr=1e-2, lr_scale={"0": 0.1})
    assert [row["lr"] for row in optimizer.report().rows] == pytest.approx([5e-4] * 2 + [5e-3] * 4)


def test_invalid_scales_are_refused():
    for value in (-1.0, "x", True, float("nan")):
        with pytest.raises(ValueError, match=r"lr_scale: '0.weight' got .* expected a number that is not negative"):
            torch_api.MaskedAdamW(model().named_parameters(), lr_scale={"0": value})
