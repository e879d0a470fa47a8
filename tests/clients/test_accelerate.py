"""Accelerate: prepare, gradient accumulation, clip_grad_norm_, save_state and load_state."""

import pytest
import torch
from contract import OURS, SAVED, STEPS, check, samples

accelerate = pytest.importorskip("accelerate")


def train(model, make, folder, resume):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = make(model.named_parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), 4)
    model, prepared, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, 2 * SAVED)
    losses, loss_of_step = [], 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            loss_of_step += loss.item() / 2
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(loss_of_step)
                loss_of_step = 0.0
            prepared.step()
            schedule.step()
            prepared.zero_grad()
        if len(losses) == SAVED and accelerator.sync_gradients and not resume:
            accelerator.save_state(str(folder))
    assert not prepared.step_was_skipped
    return optimizer, losses


@pytest.mark.parametrize("optimizer", OURS)
def test_accumulation_and_clipping_meet_the_contract(optimizer, tmp_path):
    check(train, optimizer, tmp_path)
