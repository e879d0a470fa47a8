"""The explanation of a step: its executables, kernel classes, buckets and copies, and why the last compilation happened."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from ._params.record import ParamRecord
from ._step.bound_executable import BoundExecutable
from ._step.recompile_reasons import CacheInfo, LastCompilation, few_names
from ._step.summaries import CopySummary, summarize_buckets, summarize_copies, summarize_executables
from ._tables import html_table, text_lines

_MAX_ROWS = 40  # of each table, in text and in HTML


class _Table(NamedTuple):
    """A table of the explanation. field: the attribute that has all rows."""

    field: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        return [self.columns, *self.rows[:_MAX_ROWS]]

    @property
    def omitted(self) -> str:
        """What is left out, as text; "" if nothing is."""
        return f"... and {len(self.rows) - _MAX_ROWS} more rows in the attribute {self.field}" if len(self.rows) > _MAX_ROWS else ""


class Explanation:
    """What the last step ran, and why. It prints as text, and as tables in a notebook.

    Attributes:
      title: the class of the optimizer or train step, and its devices.
      executables: a row for each executable of the last step; empty before the first step.
      kernel_classes: a row for each class of parameters and buckets that one function updates.
      buckets: a row for each bucket, a buffer that several parameters share.
      copies: a row for each reason why a step copies parameters, state or gradients.
      stats_bytes: the bytes that a step reads before its executables, for the norm and the finite check of all gradients.
      bytes_per_step: these, and the bytes that the executables read and write, by the compiler's count; None if they were not counted.
      last_compilation: the step that compiled last, and why; None if no step has compiled, because another optimizer had before.
      cache: the counts of `cache_info()`.

    A row is a named tuple: `explain().buckets[0].parameters`, `explain().executables[0]._asdict()`.

    Args:
      title: the first words of the text.
      launches: the bound executables of the last step.
      records: the trained parameters.
      last_compilation: as above.
      cache: as above.
      counts_bytes: whether to ask the compiler for bytes.
      computes_grads: whether the executables compute the gradients themselves.
      stats_bytes: as above.
      copies: further rows of `copies`.
    """

    def __init__(
        self,
        title: str,
        launches: Sequence[BoundExecutable],
        records: Sequence[ParamRecord],
        last_compilation: LastCompilation | None,
        cache: CacheInfo,
        *,
        counts_bytes: bool = True,
        computes_grads: bool = False,
        stats_bytes: float = 0,
        copies: Sequence[CopySummary] = (),
    ) -> None:
        self.title, self.last_compilation, self.cache = title, last_compilation, cache
        self.executables, self.kernel_classes = summarize_executables(launches, counts_bytes, computes_grads)
        self.buckets = summarize_buckets(records, launches)
        self.copies = [*summarize_copies(records, launches, computes_grads), *copies]
        counts = [each.bytes * each.calls for each in self.executables if each.bytes is not None]
        self.stats_bytes = round(stats_bytes)
        self.bytes_per_step = sum(counts) + self.stats_bytes if counts else None

    @property
    def summary(self) -> str:
        """The first line of the text."""
        if not self.executables:
            return f"{self.title}: no executables. The next step makes them."
        count = sum(len(each.parameters) for each in self.executables)
        kinds = (
            (count, "parameter"),
            (len(self.executables), "executable"),
            (len(self.kernel_classes), "kernel class"),
            (len(self.buckets), "bucket"),
        )
        parts = [f"{n:,} {name}{_plural_ending(name) if n != 1 else ''}" for n, name in kinds]
        parts += [] if self.bytes_per_step is None else [f"{self.bytes_per_step:,} bytes a step"]
        return f"{self.title}: {', '.join(parts)}"

    @property
    def compilation(self) -> str:
        """The second line of the text: why the last compilation happened."""
        if self.last_compilation is None:
            return f"last compilation: {'none, the programs had been compiled for others' if self.executables else 'none yet'}"
        step, programs, reason = self.last_compilation
        return f"last compilation: step {step}, {programs} program{'' if programs == 1 else 's'}, because {reason}"

    def __str__(self) -> str:
        lines = [self.summary, self.compilation]
        for table in self._tables():
            lines += ["", table.title, *text_lines(table.cells), *([table.omitted] if table.omitted else [])]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self.summary)}<br>{html.escape(self.compilation)}</p>"]
        for table in self._tables():
            parts.append(f"<p>{html.escape(table.title)}</p>{html_table(table.cells)}")
            parts += [f"<p>{html.escape(table.omitted)}</p>"] if table.omitted else []
        return "".join(parts)

    def _tables(self) -> list[_Table]:
        """Return the tables that have rows."""
        executables = [
            (
                str(i),
                x.device,
                str(x.calls),
                str(x.programs),
                str(x.leaves),
                str(x.kernel_classes),
                _number(x.bytes),
                _number(x.scratch_bytes),
            )
            + (few_names(x.parameters),)
            for i, x in enumerate(self.executables)
        ]
        kernel_classes = [
            (str(x.executable), x.transformation, "together" if x.shape is None else str(x.shape), x.dtype, x.grad_dtype)
            + (", ".join(x.state_dtypes) or "-", x.gradient, str(x.leaves), few_names(x.parameters))
            for x in self.kernel_classes
        ]
        buckets = [(str(x.rows), str(x.row_elements), x.dtype, x.gradient or "-", few_names(x.parameters)) for x in self.buckets]
        copies = [(x.what, f"{x.bytes:,}", few_names(x.parameters), x.reason) for x in self.copies]
        tables = [
            _Table("executables", "executables", _EXECUTABLE_COLUMNS, executables),
            _Table("kernel_classes", "kernel classes", _KERNEL_CLASS_COLUMNS, kernel_classes),
            _Table(
                "buckets", "buckets: parameters that share a buffer", ("rows", "row elements", "dtype", "gradient", "parameters"), buckets
            ),
            _Table("copies", "copied at each step", ("what", "bytes", "of parameters", "reason"), copies),
        ]
        return [table for table in tables if table.rows]


_EXECUTABLE_COLUMNS = "executable", "device", "calls", "programs", "leaves", "kernel classes", "bytes a call", "scratch bytes", "parameters"
_KERNEL_CLASS_COLUMNS = (
    "executable",
    "transformation",
    "shape",
    "dtype",
    "gradient dtype",
    "state dtypes",
    "gradient",
    "leaves",
    "parameters",
)


def _plural_ending(name: str) -> str:
    return "es" if name.endswith("s") else "s"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
