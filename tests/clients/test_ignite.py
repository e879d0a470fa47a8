"""Ignite: create_supervised_trainer, LRScheduler and Checkpoint handlers."""

import pytest
import torch
from contract import OURS, SAVED, STEPS, check, samples

pytest.importorskip("ignite")
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import LRScheduler, ModelCheckpoint


def train(model, make, folder, resume):
    optimizer = make(model.named_parameters())
    trainer = create_supervised_trainer(model, optimizer, torch.nn.CrossEntropyLoss(), gradient_accumulation_steps=2)
    schedule = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99))
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "schedule": schedule}
    saving = ModelCheckpoint(folder, "saved", n_saved=None, require_empty=False)
    losses = []
    trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda engine: losses.append(engine.state.output))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saving, parts)
    if resume:
        ModelCheckpoint.load_objects(parts, folder / f"saved_checkpoint_{2 * SAVED}.pt")
    batches = list(zip(*(part[: 8 * SAVED].split(4) for part in samples()), strict=True))
    trainer.run(batches, max_epochs=STEPS // SAVED)
    return optimizer, losses


@pytest.mark.parametrize("optimizer", OURS)
def test_supervised_trainer_meets_the_contract(optimizer, tmp_path):
    check(train, optimizer, tmp_path)
