"""torch.distributed.checkpoint in one process: state dicts by name, and files."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract import OURS, SAVED, STEPS, bits, check, masked_adamw, network, same, samples
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torch_api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.8 itself calls it
    pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized"),
]


def train(model, make, folder, resume):
    optimizer = make(list(model.named_parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    before = bits(model.state_dict())
    weights, state = get_state_dict(model, optimizer)  # runs step() with zero gradients and lr to make state
    same(bits(model.state_dict()), before)
    if resume:
        tree = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
        dcp.load(tree, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
        schedule.load_state_dict(tree["schedule"])
    losses = []
    for x, y in zip(*(part.split(8) for part in samples()), strict=True):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == SAVED and not resume:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, checkpoint_id=folder)
        if len(losses) == STEPS - SAVED and resume:
            break
    return optimizer, losses


@pytest.mark.parametrize("optimizer", OURS)
def test_files_are_saved_and_loaded(optimizer, tmp_path):
    check(train, optimizer, tmp_path)


def trained(make, *arguments):
    model = network()
    optimizer = make(list(model.named_parameters()), *arguments)
    torch.nn.functional.cross_entropy(model(samples()[0]), samples()[1]).backward()
    for _ in range(3):
        optimizer.step()
    return model, optimizer


def carry_over(source, target, **options):
    """Load the state of one optimizer into another, both given as (model, optimizer), and check that no weight changes."""
    options = StateDictOptions(**options)
    before = bits(source[0].state_dict()), bits(target[0].state_dict())
    set_optimizer_state_dict(*target, get_optimizer_state_dict(*source, options=options), options=options)
    same((bits(source[0].state_dict()), bits(target[0].state_dict())), before)


@pytest.mark.parametrize(
    "options",
    [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}],
    ids=["plain", "flat", "full"],
)
@pytest.mark.parametrize("optimizer", OURS)
def test_optimizer_state_is_carried_over_alone(optimizer, options):
    first, second = trained(optimizer, "2.weight"), trained(optimizer, "2.weight")
    carry_over(first, second, **options)
    same(second[1].state_dict()["state"], first[1].state_dict()["state"])


@pytest.mark.parametrize("back", [False, True], ids=["torch to ours", "ours to torch"])
def test_state_loads_from_and_into_torch(back):
    first, second = (trained(make) for make in (torch.optim.AdamW, torch_api.MaskedAdamW)[:: -1 if back else 1])
    carry_over(first, second)
    same(second[1].state_dict()["state"], first[1].state_dict()["state"])


def test_state_loads_under_another_mask():
    masked, whole = trained(masked_adamw, "2.weight"), trained(torch_api.MaskedAdamW)
    moments = whole[1].state_dict()["state"]
    carry_over(whole, masked)
    assert {index for index, state in masked[1].state_dict()["state"].items() if "exp_avg" in state} == set(moments)
    carry_over(trained(masked_adamw, "2.weight"), whole)
    assert {index for index, state in whole[1].state_dict()["state"].items() if "exp_avg" in state} == set(moments) - {2}
    whole[1].step()
