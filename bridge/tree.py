"""Names <-> nested dict pytrees of a module or of named parameters, and selectors resolved over either."""

from __future__ import annotations
