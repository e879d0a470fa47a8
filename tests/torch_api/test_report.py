"""`report()`, `repr()` and the notebook table of an optimizer."""

import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


def build():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 2)})
    model["body"].bias.requires_grad_(False)
    flat = torch.zeros(6)
    model["head"].weight = torch.nn.Parameter(flat.view(2, 3))
    optimizer = torch_api.MaskedAdamW(
        [{"params": list(model.named_parameters()), "label": "all", "lr_scale": 0.5}],
        lr=0.01,
        weight_decay=0.1,
        mask=[("body.weight", False), ("*", True)],
        decay_mask=torch_api.no_decay_on_bias_and_norm,
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer, flat


def test_rows_show_status_rule_hyperparameters_bytes_and_write_back():
    _, optimizer, _ = build()
    rows = {row["parameter"]: row for row in optimizer.report().rows}
    assert {name: (row["status"], row["decided by"]) for name, row in rows.items()} == {
        "body.weight": ("frozen", "mask[0] 'body.weight'"),
        "body.bias": ("frozen", "requires_grad=False"),
        "head.weight": ("trained", "mask[1] '*'"),
        "head.bias": ("trained", "mask[1] '*'"),
    }
    assert {name: (row["lr"], row["decay"]) for name, row in rows.items()} == {
        "body.weight": (None, None),
        "body.bias": (None, None),
        "head.weight": (0.005, 0.1),
        "head.bias": (0.005, 0.0),
    }
    assert {name: row["state bytes"] for name, row in rows.items()} == {
        "body.weight": 0,
        "body.bias": 0,
        "head.weight": 2 * 4 * 6 + 4,
        "head.bias": 2 * 4 * 2 + 4,
    }
    assert rows["head.bias"]["write-back"] == "inplace"
    assert rows["head.weight"]["write-back"].startswith("copy: ")
    assert {row["label"] for row in rows.values()} == {"all"}
    assert {row["dtype"] for row in rows.values()} == {"float32"}


def test_str_shows_the_table_and_the_totals():
    _, optimizer, _ = build()
    text = str(optimizer)
    assert text == str(optimizer.report()) == repr(optimizer.report())
    assert text.startswith("MaskedAdamW: 2 of 4 parameters trained, 8 of 23 elements, 72 bytes of state\nparameter ")
    lines = text.split("\n")
    assert len(lines) == 2 + 4
    assert lines[1].index("status") == lines[2].index("frozen") == lines[4].index("trained")


def test_html_table_escapes_its_text():
    model, _, _ = build()
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), mask=lambda name, p: True)
    text = optimizer.report()._repr_html_()
    assert "<th>decided by</th>" in text
    assert "mask &lt;lambda&gt;()" in text
    assert text.count("<tr>") == 5


def test_repr_is_that_of_torch():
    _, optimizer, _ = build()
    assert repr(optimizer).startswith("MaskedAdamW (\nParameter Group 0\n")
