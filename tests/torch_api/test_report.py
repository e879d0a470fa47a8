"""`report()`, `repr()` and the notebook table of an optimizer."""

import re

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


def test_only_trained_elements_count_in_the_totals():
    table, rows = torch.nn.Embedding(10, 4), torch.zeros(10, 4, dtype=torch.bool)
    rows[[1, 5]] = True
    optimizer = torch_api.MaskedAdamW(table.named_parameters(), mask={"weight": rows})
    assert str(optimizer).startswith("MaskedAdamW: 1 of 1 parameters trained, 8 of 40 elements")


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


def zeros(*names):
    return [(name, torch.nn.Parameter(torch.zeros(2))) for name in names]


def blocks(count, *inner, prefix="layers.{}."):
    return [prefix.format(i) + name for i in range(count) for name in inner]


ATTENTION = ("attn.q.weight", "attn.q.bias", "attn.out.weight", "attn.out.bias")
BLOCK = (*ATTENTION, "mlp.0.weight", "mlp.2.weight", "norm.weight", "norm.bias")


def lines(optimizer):
    """Return pattern and count of each line of a grouped report, and its other words."""
    _, head, *rest = str(optimizer).split("\n")
    assert head.split()[:3] == ["parameters", "count", "elements"], head
    assert rest.pop().startswith("One line for each module and setting; report(full=True)")
    return {words[0]: (int(words[1]), words[2:]) for words in (re.split(r"  +", line) for line in rest)}


def test_more_than_40_parameters_are_one_line_for_each_module():
    optimizer = torch_api.MaskedAdamW(zeros("tok.weight", *blocks(12, *BLOCK), "head.weight", "head.bias"), lr=0.1)
    found = lines(optimizer)
    assert {name: count for name, (count, _) in found.items()} == {
        "tok.weight": 1,
        "layers.0-11.attn.*": 48,
        "layers.0-11.mlp.0,2.weight": 24,
        "layers.0-11.norm.*": 24,
        "head.*": 2,
    }
    assert found["layers.0-11.attn.*"][1] == ["96", "float32", "-", "trained", "mask=None", "0.1", "0.01", "0", "inplace"]


def test_40_parameters_are_one_line_each_and_full_shows_more():
    few = torch_api.MaskedSGD(zeros(*blocks(5, *BLOCK)), lr=0.1)
    assert len(str(few).split("\n")) == 2 + 40
    many = torch_api.MaskedSGD(zeros(*blocks(6, *BLOCK)), lr=0.1)
    assert len(many.report().rows) == len(many.report(full=True).rows) == 48
    assert len(str(many.report(full=True)).split("\n")) == 2 + 48
    assert str(many.report(full=True)).split("\n")[1].split() == str(few).split("\n")[1].split()
    assert many.report(full=True)._repr_html_().count("<tr>") == 1 + 48
    html = many.report()._repr_html_()
    assert html.count("<tr>") == 1 + 3
    assert "<td>layers.0-5.attn.*</td><td>24</td><td>48</td>" in html
    assert "report(full=True)" in html


def test_settings_that_differ_divide_a_module():
    names = [*blocks(12, *BLOCK), "head.weight"]
    frozen = [f"layers.{i}.*" for i in (*range(5), 7)]
    optimizer = torch_api.MaskedAdamW(
        zeros(*names), mask=[(frozen, False), ("*", True)], decay_mask=[("*.bias", False), ("*", True)], weight_decay=0.5
    )
    found = lines(optimizer)
    assert {name: (count, words[3], words[6]) for name, (count, words) in found.items() if "attn" in name} == {
        "layers.0-4,7.attn.*": (24, "frozen", "-"),
        "layers.5-6,8-11.attn.q.weight": (6, "trained", "0.5"),
        "layers.5-6,8-11.attn.q.bias": (6, "trained", "0"),
        "layers.5-6,8-11.attn.out.weight": (6, "trained", "0.5"),
        "layers.5-6,8-11.attn.out.bias": (6, "trained", "0"),
    }
    assert sum(count for count, _ in found.values()) == len(names)


def test_lines_stay_few_when_every_block_differs():
    """Each block has a learning rate of its own, so that blocks share no lines: each is one line for each setting."""
    named = zeros(*blocks(30, *BLOCK))
    scale = [(f"layers.{i}.*", 0.9**i) for i in range(30)]
    found = lines(torch_api.MaskedAdamW(named, lr=1.0, lr_scale=scale))
    assert {name: count for name, (count, _) in found.items()} == {f"layers.{i}.*": 8 for i in range(30)}


def test_settings_of_many_modules_without_a_common_name_are_few_lines():
    named = zeros(*(f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"))
    _, _, *rest = str(torch_api.MaskedAdamW(named, mask=["a?", "b?"])).split("\n")
    assert [[re.split(r"  +", line)[i] for i in (0, 1, 5)] for line in rest[:-1]] == [["*", "16", "trained"], ["*", "48", "frozen"]]


def test_rules_that_decide_alike_share_a_line():
    optimizer = torch_api.MaskedAdamW(zeros(*blocks(6, *BLOCK)), mask=["*.weight", "*.bias"])
    assert lines(optimizer)["layers.0-5.attn.*"][1][4] == "mask[0] '*.weight' and 1 more"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([str(i) for i in range(50)], {"0-49": 50}),
        (blocks(25, "weight", "bias", prefix="encoder_layer_{}."), {"encoder_layer_0-24.*": 50}),
        (blocks(50, "weight", prefix="net.layer{}."), {"net.layer0-49.weight": 50}),
        ([*blocks(60, "w", prefix="a.{}.")[::5], *blocks(30, "w", prefix="b.{}.")], {"a.0,5,...,55.w": 12, "b.0-29.w": 30}),
        (["w", *blocks(50, "w", prefix="w.{}.")], {"w": 1, "w.0-49.w": 50}),
        (
            [*blocks(6, *blocks(4, "up.weight", prefix="experts.{}."), "router.weight"), *blocks(12, *ATTENTION)],
            {"layers.0-5.experts.0-3.up.weight": 24, "layers.0-5.router.weight": 6, "layers.0-5.attn.*": 24, "layers.6-11.attn.*": 24},
        ),
    ],
)
def test_patterns_of_names(names, expected):
    assert {name: count for name, (count, _) in lines(torch_api.MaskedSGD(zeros(*names))).items()} == expected
