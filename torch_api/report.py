"""The report of an optimizer: how it treats each parameter, as text, as HTML and as rows.

With many parameters the text has one line for each module, found by `group_rows`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ._params.param_groups import lr_scale
from ._params.record import ParamRecord
from ._rules.inner_rates import InnerRates
from ._rules.types import ParamGroup, ParamState
from ._tables import html_table, text_lines

ReportRow: TypeAlias = dict[str, Any]
_NamedRows: TypeAlias = list[tuple[tuple[str, ...], ReportRow]]

COLUMNS = ("parameter", "shape", "dtype", "label", "status", "decided by", "lr", "decay", "state bytes", "write-back")
GROUPED_COLUMNS = ("parameters", "count", "elements", *COLUMNS[2:])
MAX_ROWS = 40  # a report of more parameters has one line for each module
INSIDE = "inside the transformation"  # in place of a number that only the transformation knows
_DIGITS = "0123456789"
_SETTINGS = ("dtype", "label", "status", "lr", "decay", "write-back")  # parameters of one line have these in common


class Report:
    """A table with one line for each parameter, or, above 40 parameters, one line for each module and setting.

    `rows` has a dict for each parameter in any case, with numbers as numbers. `note` says what to know about the lr, if anything.

    Args:
      title: the name of the optimizer's class.
      leaves: the record of each parameter.
      param_groups: the optimizer's groups.
      state: the optimizer's state.
      inner_rates: the rates inside the transformation, by id of the record, for parameters whose lr multiplies its update.
      full: whether the table has one line for each parameter, however many there are.
    """

    def __init__(
        self,
        title: str,
        leaves: Sequence[ParamRecord],
        param_groups: Sequence[ParamGroup],
        state: Mapping[torch.Tensor, ParamState],
        inner_rates: Mapping[int, InnerRates] | None = None,
        full: bool = False,
    ) -> None:
        self.title, self.full = title, full
        inner = inner_rates or {}
        self.rows = [_row(leaf, param_groups[leaf.group_index], state.get(leaf.param, {}), inner.get(id(leaf))) for leaf in leaves]
        trained = {leaf.group_index for leaf, row in zip(leaves, self.rows, strict=True) if row["status"] != "frozen"}
        self._trained_sizes = [_trained_size(leaf) for leaf, row in zip(leaves, self.rows, strict=True) if row["status"] != "frozen"]
        numbers = sorted({leaf.group_index for leaf in leaves if id(leaf) in inner})
        where = " of the groups" if trained <= set(numbers) else f" of group {', '.join(map(str, numbers))}"
        product = " The table has the product." if any(rates.lr is not None for rates in inner.values()) else ""
        self.note = f"The lr{where} multiplies what the transformation gives.{product}" if numbers else ""

    @property
    def summary(self) -> str:
        total, state = sum(row["size"] for row in self.rows), sum(row["state bytes"] for row in self.rows)
        trained = len(self._trained_sizes), sum(self._trained_sizes)
        counts = f"{trained[0]} of {len(self.rows)} parameters trained, {trained[1]:,} of {total:,} elements"
        return f"{self.title}: {counts}, {state:,} bytes of state"

    def __str__(self) -> str:
        return "\n".join([self.summary, *text_lines(self._cells()), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return f"<p>{html.escape(self.summary)}</p>{html_table(self._cells())}{notes}"

    @property
    def _is_grouped(self) -> bool:
        return len(self.rows) > MAX_ROWS and not self.full

    def _cells(self) -> list[Sequence[str]]:
        """Return the table as text, line by line, the names of the columns first."""
        if not self._is_grouped:
            return [COLUMNS, *([_text(row[column]) for column in COLUMNS] for row in self.rows)]
        return [GROUPED_COLUMNS, *(_grouped_cells(name, rows) for name, rows in group_rows(self.rows))]

    def _notes(self) -> list[str]:
        grouped = "One line for each module and setting; report(full=True) has one for each parameter." if self._is_grouped else ""
        return [note for note in (self.note, grouped) if note]


def _grouped_cells(name: str, rows: Sequence[ReportRow]) -> list[str]:
    rules = list(dict.fromkeys(row["decided by"] for row in rows))
    totals = {column: f"{sum(row[of] for row in rows):,}" for column, of in (("elements", "size"), ("state bytes", "state bytes"))}
    rule = rules[0] if len(rules) == 1 else f"{rules[0]} and {len(rules) - 1} more"
    line = rows[0] | totals | {"parameters": name, "count": len(rows), "decided by": rule}
    return [_text(line[column]) for column in GROUPED_COLUMNS]


def group_rows(rows: Sequence[ReportRow]) -> list[tuple[str, list[ReportRow]]]:
    """Return the rows by module and setting: a pattern of names, such as `layers.0-11.attn.*`, and the rows that the line stands for.

    A module whose parameters have equal settings is one line. The outermost module, numbered modules, and modules that contain numbered
    ones are divided in any case, and numbered modules with equal lines share these lines. While there are too many lines, the deepest
    modules become one line for each of their settings.
    """
    named = [(tuple(str(row["parameter"]).split(".")), row) for row in rows]
    lines: list[_Line] = []
    for depth in range(max(len(parts) for parts, _ in named), -1, -1):
        lines = _divide(named, depth, is_outermost=True)
        if len(lines) <= MAX_ROWS:
            break
    return [(line.name, line.rows) for line in lines]


class _Line(NamedTuple):
    """One line of a grouped table: the rows of one module that have one setting. `name` is relative to the module that contains it."""

    name: str
    settings: tuple[object, ...]
    rows: list[ReportRow]


def _divide(named: _NamedRows, depth: int, name: str = "", is_outermost: bool = False) -> list[_Line]:
    """Return the lines of a module, given its rows with their names below it. Modules at `depth` are not divided."""
    by_settings: dict[tuple[object, ...], _NamedRows] = {}
    children: dict[str, _NamedRows] = {}
    for parts, row in named:
        by_settings.setdefault(tuple(row[column] for column in _SETTINGS), []).append((parts, row))
        children.setdefault(".".join(parts[:1]), []).append((parts[1:], row))
    modules = [name, *(part for parts, _ in named for part in parts[:-1])]  # a parameter's own last name is none
    has_numbers = len(modules) > 1 and any(part[-1:].isdigit() for part in modules)
    if depth == 0 or not any(children) or not (is_outermost or has_numbers or len(by_settings) > 1):
        return [_Line(_below(own), settings, [row for _, row in own]) for settings, own in by_settings.items()]
    alike: dict[tuple[object, ...], list[tuple[str, list[_Line]]]] = {}
    for child, own in children.items():
        lines = _divide(own, depth - 1, child, is_outermost and len(children) == 1)
        stem = child.rstrip(_DIGITS)
        alike.setdefault((child,) if stem == child else (stem, *(line[:2] for line in lines)), []).append((child, lines))
    divided: list[_Line] = []
    for members in alike.values():
        shared = _shared_name([child for child, _ in members])
        for same in zip(*(lines for _, lines in members), strict=True):
            divided.append(same[0]._replace(name=f"{shared}.{same[0].name}".strip("."), rows=[row for line in same for row in line.rows]))
    return divided


def _below(named: _NamedRows) -> str:
    names = {".".join(parts) for parts, _ in named}
    return names.pop() if len(names) == 1 else "*"


def _shared_name(names: Sequence[str]) -> str:
    """Return one name for names that differ in their last number: `layers0`, `layers1`, `layers2`, `layers4` -> `layers0-2,4`."""
    if len(names) == 1:
        return names[0]
    stem = names[0].rstrip(_DIGITS)
    numbers = sorted((name[len(stem) :] for name in names), key=int)
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return stem + ",".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def _trained_size(leaf: ParamRecord) -> int:
    return leaf.param.numel() if leaf.element_mask is None else int(leaf.element_mask.sum())


def _row(leaf: ParamRecord, group: ParamGroup, state: ParamState, inner: InnerRates | None) -> ReportRow:
    status, rule = "trained", leaf.decided_by
    if not leaf.trained:
        status = "frozen"
    elif not group.get("trainable", True):
        status, rule = "frozen", f"group {leaf.group_index} trainable=False"
    elif not leaf.param.requires_grad:
        status, rule = "frozen", "requires_grad=False"
    elif leaf.element_mask is not None:
        status = f"trained in {_trained_size(leaf)} of {leaf.element_mask.size} elements"
    frozen = status == "frozen"
    lr: float | str = float(group["lr"]) * lr_scale(group) * leaf.lr_scale
    decay: float | str = float(group.get("weight_decay", 0.0)) * group.get("wd_scale", 1.0) if leaf.decay.value else 0.0
    if inner is not None:
        lr = _product(lr, inner.lr)
        decay = decay if "weight_decay" in group else INSIDE if inner.decay is None else inner.decay
    return {
        "parameter": leaf.name,
        "shape": tuple(leaf.param.shape),
        "dtype": str(leaf.param.dtype).removeprefix("torch."),
        "label": leaf.label,
        "status": status,
        "decided by": rule,
        "lr": None if frozen else lr,
        "decay": None if frozen else decay,
        "state bytes": sum(t.numel() * t.element_size() for t in leaf.local_values(state).values() if isinstance(t, torch.Tensor)),
        "write-back": "none" if frozen else _write_back(leaf),
        "size": leaf.param.numel(),
    }


def _product(multiplier: float, inner: float | None) -> float | str:
    """Return the product of a group's lr and the learning rate inside the transformation; a text if that is not known."""
    if inner is not None or not multiplier:
        return multiplier * (inner or 0.0)
    return INSIDE if multiplier == 1 else f"{multiplier:g} x {INSIDE}"


def _write_back(leaf: ParamRecord) -> str:
    if leaf.address is None:
        return leaf.copy_reason
    return "inplace" if leaf.jax_buffer is not None else f"copy: {leaf.copy_reason}"


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
