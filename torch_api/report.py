"""The report of an optimizer: how it treats each parameter, as text, as HTML and as rows."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._params.param_groups import lr_scale
from ._params.record import ParamRecord
from ._rules.types import ParamGroup, ParamState

COLUMNS = ("parameter", "shape", "dtype", "label", "status", "decided by", "lr", "decay", "state bytes", "write-back")


class Report:
    """A table with one line for each parameter.

    `rows` holds the same as dicts, with numbers as numbers. `note` says what to know about the lr, if anything.

    Args:
      title: the name of the optimizer's class.
      leaves: the record of each parameter.
      param_groups: the optimizer's groups.
      state: the optimizer's state.
      multiplied: the groups whose lr multiplies the update of a transformation, which may have a learning rate of its own.
    """

    def __init__(
        self,
        title: str,
        leaves: Sequence[ParamRecord],
        param_groups: Sequence[ParamGroup],
        state: Mapping[torch.Tensor, ParamState],
        multiplied: Sequence[int] = (),
    ) -> None:
        self.title = title
        self.rows = [_row(leaf, param_groups[leaf.group_index], state.get(leaf.param, {})) for leaf in leaves]
        trained = {leaf.group_index for leaf, row in zip(leaves, self.rows, strict=True) if row["status"] != "frozen"}
        numbers = [i for i in multiplied if i in trained]
        where = "" if trained <= set(numbers) else f" of group {', '.join(map(str, numbers))}"
        self.note = f"lr{where} multiplies what the transformation gives, which may have a learning rate of its own." if numbers else ""

    @property
    def summary(self) -> str:
        sizes = [leaf["size"] for leaf in self.rows if leaf["status"] != "frozen"]
        total, state = sum(row["size"] for row in self.rows), sum(row["state bytes"] for row in self.rows)
        counts = f"{len(sizes)} of {len(self.rows)} parameters trained, {sum(sizes):,} of {total:,} elements"
        return f"{self.title}: {counts}, {state:,} bytes of state"

    def __str__(self) -> str:
        cells = [COLUMNS, *([_text(row[column]) for column in COLUMNS] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([self.summary, *lines, *([self.note] if self.note else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(_text(row[c]))}</td>" for c in COLUMNS) + "</tr>" for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<p>{html.escape(self.summary)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _row(leaf: ParamRecord, group: ParamGroup, state: ParamState) -> dict[str, Any]:
    status, rule = "trained", leaf.decided_by
    if not leaf.trained:
        status = "frozen"
    elif not group.get("trainable", True):
        status, rule = "frozen", f"group {leaf.group_index} trainable=False"
    elif not leaf.param.requires_grad:
        status, rule = "frozen", "requires_grad=False"
    elif leaf.element_mask is not None:
        status = f"trained in {int(leaf.element_mask.sum())} of {leaf.element_mask.size} elements"
    frozen = status == "frozen"
    decay = float(group.get("weight_decay", 0.0)) * group.get("wd_scale", 1.0) if leaf.decay.value else 0.0
    return {
        "parameter": leaf.name,
        "shape": tuple(leaf.param.shape),
        "dtype": str(leaf.param.dtype).removeprefix("torch."),
        "label": leaf.label,
        "status": status,
        "decided by": rule,
        "lr": None if frozen else float(group["lr"]) * lr_scale(group) * leaf.lr_scale,
        "decay": None if frozen else decay,
        "state bytes": sum(t.numel() * t.element_size() for t in leaf.local_values(state).values() if isinstance(t, torch.Tensor)),
        "write-back": "none" if frozen else _write_back(leaf),
        "size": leaf.param.numel(),
    }


def _write_back(leaf: ParamRecord) -> str:
    if leaf.address is None:
        return leaf.copy_reason
    return "inplace" if leaf.jax_buffer is not None else f"copy: {leaf.copy_reason}"


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
