"""timm's parameter groups and schedulers."""

import importlib.util
import sys
import types

import pytest
import torch
from contract import EPS, LR, SAVED, STEPS, check, network, samples

import torch_api


def timm_parts():
    """Return timm.optim and timm.scheduler; without torchvision, import them without the models and layers that need it."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("could not import 'timm'", allow_module_level=True)
    if importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm.optim"), importlib.import_module("timm.scheduler")
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    package.__path__, models.group_parameters = found.submodule_search_locations, None
    sys.modules |= {"timm": package, "timm.models": models}
    try:
        return importlib.import_module("timm.optim"), importlib.import_module("timm.scheduler")
    finally:  # other tests must not import the partial module
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]


optim, scheduler = timm_parts()


def weight_decay(model):
    return optim.param_groups_weight_decay(model, 0.1)


def layer_decay(model):
    model.pretrained_cfg = {"classifier": "4"}
    return optim.param_groups_layer_decay(model, 0.1, layer_decay=0.5)


def ours(groups, frozen):
    """timm's groups have no names; the frozen matrix is found by its shape."""
    return torch_api.MaskedAdamW(groups, lr=LR, eps=EPS, mask=lambda name, p: p.shape != (16, 16))


def theirs(groups, frozen):
    """The frozen matrix has its own group with an lr_scale of 0, by which timm's schedulers multiply the lr."""
    apart = [group | {"params": [p for p in group["params"] if p.shape != (16, 16)]} for group in groups]
    still = [{"params": [p], "lr": 0.0, "lr_scale": 0.0} for group in groups for p in group["params"] if p.shape == (16, 16)]
    return torch.optim.AdamW([*apart, *still], lr=LR, eps=EPS)


def trained_with(groups):
    def train(model, make, folder, resume):
        optimizer = make(groups(model))
        schedule = scheduler.CosineLRScheduler(optimizer, 2 * STEPS, warmup_t=4, warmup_lr_init=LR / 5, t_in_epochs=False)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if resume:
            for name, saved in torch.load(folder / "saved.pt", weights_only=True).items():
                parts[name].load_state_dict(saved)
        losses = []
        for step in range(SAVED if resume else 0, STEPS):
            x, y = samples()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step_update(step + 1)
            losses.append(loss.item())
            if step + 1 == SAVED and not resume:
                folder.mkdir()
                torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "saved.pt")
        return optimizer, losses

    return train


@pytest.mark.parametrize("groups", [weight_decay, layer_decay])
def test_groups_under_timms_scheduler_meet_the_contract(groups, tmp_path):
    check(trained_with(groups), ours, tmp_path, reference=theirs)


def test_layer_decay_acts_without_timms_scheduler():
    model = network()
    start, optimizer = [p.detach().clone() for p in model.parameters()], ours(layer_decay(model), None)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = [float((p - q).detach().abs().mean()) for p, q in zip(model.parameters(), start, strict=True)]
    assert moved == pytest.approx([LR / 2, LR / 2, 0.0, LR / 2, LR, LR], rel=0.02)
