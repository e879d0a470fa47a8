"""skorch's NeuralNetClassifier: optimizer class and arguments by `optimizer__*`, scheduler, save_params and load_params."""

import pytest
import torch
from contract import LR, SAVED, STEPS, check, network, samples

import torch_api

skorch = pytest.importorskip("skorch")


def train(model, make, folder, resume):
    """skorch makes the groups and drops names, so a group's flag is the mask."""
    net = skorch.NeuralNetClassifier(
        model,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch_api.MaskedAdamW,
        optimizer__lr=LR,
        optimizer__param_groups=[("2.weight", {"trainable": False}), ("*.bias", {"weight_decay": 0.0})],
        batch_size=8,
        train_split=None,
        verbose=0,
        max_epochs=SAVED,
    ).initialize()
    files = {f"f_{part}": folder / f"{part}.pt" for part in ("params", "optimizer", "history")}
    x, y = (part[:8] for part in samples())
    if resume:
        net.load_params(**files)
    else:
        net.partial_fit(x, y)
        folder.mkdir()
        net.save_params(**files)
    net.partial_fit(x, y)
    model.load_state_dict(net.module_.state_dict())
    return net.optimizer_, net.history[:, "train_loss"]


def test_classifier_meets_the_contract(tmp_path):
    assert STEPS == 2 * SAVED
    check(train, None, tmp_path)


def test_arguments_are_set_and_cloned():
    from sklearn.base import clone

    net = clone(
        skorch.NeuralNetClassifier(network, optimizer=torch_api.MaskedSGD, optimizer__mask="4.*", lr=0.1, train_split=None, verbose=0)
    )
    net.set_params(optimizer__momentum=0.9, optimizer__mask=lambda name, p: p.ndim > 1)
    net.initialize()
    assert net.optimizer_.param_groups[0]["momentum"] == 0.9
    net.set_params(lr=0.05)
    net.partial_fit(*samples())
    assert net.optimizer_.state.keys() == {p for p in net.module_.parameters() if p.ndim > 1}
    assert net.optimizer_.param_groups[0]["lr"] == 0.05
