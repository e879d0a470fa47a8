"""The reason that a `JaxTrainStep` gives for a compilation, and what each call copies."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import torch_api
from bridge._compiler.spec import NO_EXTRA_ARGS
from torch_api._step.recompile_reasons import RecompileInputs
from torch_api._train.batch import Batch
from torch_api._train.compile_reasons import CompiledPrograms, CompileInputs
from torch_api._train.module_guard import ModuleGuard

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion", "unoptimized_training")]


class Signatures(NamedTuple):
    """What decides which program a call needs, with defaults."""

    batch: tuple = (torch.zeros(2, 3), 1)
    module: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    updates: bool = True

    def inputs(self):
        signature = Batch(self.batch, torch.device("cpu")).signature
        update = RecompileInputs([], False, False, False, NO_EXTRA_ARGS)
        return CompileInputs(signature, ModuleGuard(self.module).signature, update, self.updates)


def reason(before, now):
    programs = CompiledPrograms()
    programs.record("subject", 1, before)
    programs.record("subject", 2, now)
    assert programs.last[:2] == (2, 1)
    return programs.last.reason


BATCHES = {
    "shape": ((torch.zeros(2, 4), 1), "item 0 of the batch is float32[2, 4], was float32[2, 3]"),
    "dtype": ((torch.zeros(2, 3, dtype=torch.int64), 1), "item 0 of the batch is int64[2, 3], was float32[2, 3]"),
    "array": ((np.zeros(3, np.float32), 1), "item 0 of the batch is float32[3], was float32[2, 3]"),
    "number": ((torch.zeros(2, 3), 2), "item 1 of the batch is 2, was 1"),
    "float": ((torch.zeros(2, 3), 2.0), "item 1 of the batch is a float, was 1"),
    "structure": (({"x": torch.zeros(2, 3)}, 1), "the batch has another structure"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_changes_of_the_batch(case):
    batch, text = BATCHES[case]
    assert reason(Signatures().inputs(), Signatures(batch).inputs()) == text


def test_changes_of_the_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    module.pair = (1, "a")
    before = Signatures(module=module).inputs()
    module[1].p, module.pair = 0.25, (2, "a")
    assert (
        reason(before, Signatures(module=module).inputs()) == "pair is (2, 'a'), was (1, 'a'), in 1 module; p is 0.25, was 0.5, in 1 module"
    )
    before = Signatures(module=module).inputs()
    module.eval()
    assert reason(before, Signatures(module=module).inputs()) == "training is False, was True, in 3 modules"
    before = Signatures(module=module).inputs()
    module[0].register_forward_hook(lambda *_: None)
    assert reason(before, Signatures(module=module).inputs()) == "the modules have other forward hooks"
    before = Signatures(module=module).inputs()
    module[0].bias.data = torch.zeros(4, dtype=torch.float64)
    assert reason(before, Signatures(module=module).inputs()) == "the shape or dtype of '0.bias' has changed"
    before = Signatures(module=module).inputs()
    module.other = None
    assert reason(before, Signatures(module=module).inputs()) == "the modules have other attributes"
    before = Signatures(module=module).inputs()
    module.append(nn.ReLU())
    assert reason(before, Signatures(module=module).inputs()) == "the module has other submodules"


def test_other_reasons():
    assert reason(Signatures().inputs(), Signatures(updates=False).inputs()) == "the call only adds up gradients"
    assert reason(Signatures(updates=False).inputs(), Signatures().inputs()) == "the call updates, after one that only added up gradients"
    assert reason(Signatures().inputs(), Signatures().inputs()).startswith("a tensor that loss_fn reads from outside was written to, or")


@pytest.mark.fast_path
def test_buffers_and_frozen_tensors_that_each_call_copies_are_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    statistics = torch.zeros(8)
    model[1].running_mean = statistics[:4]
    memory = np.zeros(64 + 16, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    model[2].weight = nn.Parameter(torch.from_numpy(memory[start : start + 16].view(np.float32)).view(1, 4), requires_grad=False)
    optimizer = torch_api.MaskedSGD(model.named_parameters(), mask=["0.*"])
    train_step = torch_api.JaxTrainStep(model, lambda model, x: model(x).square().mean(), optimizer)
    train_step(torch.randn(2, 3))
    assert [(each.what, each.parameters, each.bytes) for each in train_step.explain().copies] == [
        ("buffer", ("1.running_mean",), 16),
        ("frozen tensor", ("2.weight",), 16),
    ]
    assert [each.reason for each in train_step.explain().copies] == [
        "a view into a larger storage",
        "its memory does not begin at a multiple of 64 bytes",
    ]
