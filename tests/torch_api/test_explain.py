"""`explain()`: what the last step ran, and why."""

import logging

import numpy as np
import optax
import pytest
import torch
from packing import lower_addressing_thresholds
from policies import change_policy
from train_steps import mse

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized, pytest.mark.usefixtures("standard_promotion")]


def trained(shapes, make=torch_api.MaskedAdamW, **options):
    """Return an optimizer of parameters w0, w1, ... with gradients, and the parameters."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return make([(f"w{i}", p) for i, p in enumerate(params)], **options), params


def test_bytes_and_parameters_are_those_of_the_last_step_when_sets_of_gradients_alternate():
    optimizer, params = trained([(3, 221)] * 3)
    counts = []
    for grad in (torch.ones(3, 221), None) * 2:
        params[1].grad = params[2].grad = grad
        optimizer.step()
        counts.append(optimizer.bytes_accessed())
        (executable,) = optimizer.explain().executables
        assert executable.parameters == (("w0",) if grad is None else ("w0", "w1", "w2"))
        assert executable.bytes == optimizer.explain().bytes_per_step == counts[-1]
    assert counts == counts[:2] * 2
    assert counts[1] < counts[0] / 2


@pytest.mark.fast_path
def test_buckets_kernel_classes_and_copies_before_and_after_the_first_step():
    shared = torch.zeros(60)
    optimizer, params = trained([(7, 30)] * 4 + [(5, 211)])
    optimizer.add_param_group({"params": [("view", torch.nn.Parameter(shared.view(3, 20)))]})
    params.append(optimizer.param_groups[1]["params"][0])
    params[-1].grad = torch.ones(3, 20)
    before = optimizer.explain()
    assert (before.executables, before.kernel_classes, before.bytes_per_step, before.last_compilation) == ([], [], None, None)
    assert "no executables" in before.summary
    assert [(each.parameters, each.rows, each.row_elements, each.gradient) for each in before.buckets] == [
        (("w0", "w1", "w2", "w3"), 4, 224, "")
    ]
    assert [each[:3] for each in before.copies] == [("parameter", "another tensor shares its storage", 240)]
    optimizer.step()
    found = optimizer.explain()
    assert found.last_compilation == (1, 1, "it is the first step")
    (executable,) = found.executables
    assert (executable.device, executable.calls, executable.leaves, executable.kernel_classes) == ("cpu", 1, 3, 3)
    assert {each.parameters: (each.transformation, each.shape, each.gradient, each.leaves) for each in found.kernel_classes} == {
        ("w0", "w1", "w2", "w3"): ("adam", (4, 224), "gathered", 1),
        ("w4",): ("adam", (1055,), "argument", 1),
        ("view",): ("adam", (60,), "argument", 1),
    }
    assert found.buckets[0].gradient == "gathered"
    assert {(each.what, each.parameters, each.bytes) for each in found.copies} == {
        ("parameter", ("view",), 240),
        ("gradient", ("w0", "w1", "w2", "w3"), 4 * 840),
    }
    assert found.cache == optimizer.cache_info()


def test_text_and_html_have_each_table():
    optimizer, _ = trained([(5, 223)] * 2, max_grad_norm=1.0, writeback="copy")
    optimizer.step()
    found = optimizer.explain()
    lines = str(found).split("\n")
    assert lines[0] == f"MaskedAdamW on cpu: 2 parameters, 1 executable, 1 kernel class, 0 buckets, {found.bytes_per_step:,} bytes a step"
    assert lines[1] == "last compilation: step 1, 1 program, because it is the first step"
    assert [line for line in lines if line in ("executables", "kernel classes", "copied at each step")] == [
        "executables",
        "kernel classes",
        "copied at each step",
    ]
    assert lines[-1].split(maxsplit=3) == ["parameter", "8,920", "'w0',", "'w1'     writeback='copy'"]
    assert repr(found) == str(found)
    assert found._repr_html_().count("<table>") == 3
    assert "&#x27;w0&#x27;, &#x27;w1&#x27;" in found._repr_html_()


def test_long_tables_are_cut_and_fields_are_not():
    optimizer, _ = trained([(n, 2) for n in range(100, 145)], make=torch_api.MaskedSGD, writeback="copy")
    optimizer.step()
    found = optimizer.explain()
    assert len(found.kernel_classes) == 45
    assert "... and 5 more rows in the attribute kernel_classes" in str(found)


def test_leaves_of_one_class_and_calls_of_one_executable_are_counted(monkeypatch):
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16, max_equal_leaves=10)
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    optimizer, _ = trained([(5, 224)] * 20 + [(3,)])
    optimizer.step()
    found = optimizer.explain()
    assert sum(each.calls for each in found.executables) > len(found.executables)
    assert sum(len(each.parameters) for each in found.executables) == 21
    assert sorted(each.leaves for each in found.kernel_classes) == [1, 20]
    assert found.bytes_per_step == optimizer.bytes_accessed()


def test_hlo_log_has_the_programs_of_a_norm_too(monkeypatch, caplog):
    change_policy(monkeypatch, "CHUNKING", max_shared_loops=16, max_equal_leaves=10)
    change_policy(monkeypatch, "BUCKETING", max_gathered_row_bytes=0)
    optimizer, _ = trained([(5, 229)] * 20 + [(3,)], max_grad_norm=1.0)
    caplog.set_level(logging.INFO, "maskbridge.hlo")
    optimizer.step()
    assert len(optimizer.explain().executables) == 2
    heads = [record.getMessage().split("\n")[0] for record in caplog.records]
    updates = {f"MaskedAdamW on cpu: optimized HLO for the update of {count} leaves" for count in (1, 10)}
    assert updates < set(heads)
    assert any("statistics of gradients" in head for head in set(heads) - updates)


def test_joint_sets_are_one_class():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    optimizer, _ = trained([(5, 225), (3, 7)], make=torch_api.OptaxOptimizer, tx=tx)
    optimizer.step()
    (kernel_class,) = optimizer.explain().kernel_classes
    assert (kernel_class.transformation, kernel_class.shape, kernel_class.leaves) == ("chain", None, 2)
    assert "together" in str(optimizer.explain())


@pytest.mark.fast_path
def test_addressed_gradients_are_not_copied(monkeypatch):
    lower_addressing_thresholds(monkeypatch, 4)
    optimizer, _ = trained([(80, 512)] * 4)
    optimizer.step()
    found = optimizer.explain()
    assert [each.gradient for each in found.buckets] == ["read by address"]
    assert found.copies == []
    assert found.bytes_per_step == optimizer.bytes_accessed() > 0


def test_state_that_cannot_move_is_a_copy():
    optimizer, params = trained([(5, 226)], make=torch_api.MaskedAdagrad)
    optimizer.share_memory()
    params[0].grad = torch.ones(5, 226)
    optimizer.step()
    assert ("state", ("w0",)) in [(each.what, each.parameters) for each in optimizer.explain().copies]


def test_programs_of_another_optimizer_are_no_compilation():
    for _ in range(2):
        optimizer, _ = trained([(5, 227)])
        optimizer.step()
    assert optimizer.explain().last_compilation is None
    assert optimizer.explain().compilation == "last compilation: none, the programs had been compiled for others"


def test_last_compilation_has_the_reason_of_the_warning():
    optimizer, params = trained([(5, 228)] * 2)
    optimizer.step()
    params[1].grad = None
    for _ in range(2):
        with pytest.warns(torch_api.CompilationWarning) if optimizer.explain().last_compilation.step == 1 else np.errstate():
            optimizer.step()
    step, programs, reason = optimizer.explain().last_compilation
    assert (step, programs) == (2, 1)
    assert reason == "it no longer updates 'w1' (frozen or without gradient)"


@pytest.mark.usefixtures("unoptimized_training")
def test_train_step_explains_its_last_call():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 1))
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=0.1, mask=["0.*"])
    train_step = torch_api.JaxTrainStep(model, mse, optimizer)
    assert "no executables" in str(train_step.explain())
    train_step(torch.randn(3, 4), torch.randn(3, 1))
    found = train_step.explain()
    assert found.title == "JaxTrainStep of MaskedAdamW on cpu"
    assert found.executables[0].parameters == ("0.bias", "0.weight")
    assert {each.gradient for each in found.kernel_classes} == {"computed"}
    assert found.bytes_per_step > 0
    assert found.last_compilation == (1, 1, "it is the first step")
    train_step(torch.randn(2, 4), torch.randn(2, 1))
    reason = "item 0 of the batch is float32[2, 4], was float32[3, 4]; item 1 of the batch is float32[2, 1], was float32[3, 1]"
    assert train_step.explain().last_compilation == (2, 1, reason)
    model.eval()
    train_step(torch.randn(2, 4), torch.randn(2, 1))
    assert train_step.explain().last_compilation == (3, 1, "training is False, was True, in 4 modules")
    optimizer.set_trainable("0.bias", False)
    train_step(torch.randn(2, 4), torch.randn(2, 1))
    assert train_step.explain().last_compilation == (4, 1, "it no longer updates '0.bias' (frozen or without gradient)")
    assert optimizer.explain().executables == []
