"""The loggers of this package, and the environment variable that turns them on.

Each log is a child of the logger `maskbridge`, whose level is WARNING, and writes at level INFO. A log is on if its own level, or that of
`maskbridge`, is INFO or lower. The root logger's level turns none on, because programs often set it to INFO.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping

from ._compat.types import Device
from ._names import did_you_mean_or_list

VARIABLE = "MASKBRIDGE_LOGS"
NAMES = ("plan", "jaxpr", "hlo", "recompiles", "memory")
MASKBRIDGE = logging.getLogger("maskbridge")
PLAN, JAXPR, HLO, RECOMPILES, MEMORY = (MASKBRIDGE.getChild(name) for name in NAMES)


def is_on(log: logging.Logger) -> bool:
    """Return whether a log is on. Code asks before it makes a text that costs time."""
    return log.isEnabledFor(logging.INFO)


def subject(cls_name: str, device: Device) -> str:
    """Return the first words of a message about a program: the optimizer's class, and the device."""
    return f"{cls_name} on {device.platform if device.platform == 'cpu' else f'{device.platform}:{device.id}'}"


def requested_logs(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names in `MASKBRIDGE_LOGS`: those of logs, and unknown ones."""
    text = environment.get(VARIABLE, "")
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return [name for name in names if name in NAMES], [name for name in names if name not in NAMES]


class _StderrHandler(logging.Handler):
    """Writes the records that no other handler gets to standard error, so that a log can be turned on without configuring logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not self._is_handled_elsewhere(record):
            sys.stderr.write(self.format(record) + "\n")

    def _is_handled_elsewhere(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def configure() -> None:
    """Prepare the loggers, and turn on the logs that `MASKBRIDGE_LOGS` names. Levels that user code has set before stay as they are."""
    if not MASKBRIDGE.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        MASKBRIDGE.addHandler(handler)
    if MASKBRIDGE.level == logging.NOTSET:
        MASKBRIDGE.setLevel(logging.WARNING)
    names, unknown = requested_logs(os.environ)
    for name in names:
        MASKBRIDGE.getChild(name).setLevel(logging.INFO)
    for name in unknown:
        warnings.warn(f"{VARIABLE} names {name!r}, which is no log. {did_you_mean_or_list(name, NAMES)}", stacklevel=2)
