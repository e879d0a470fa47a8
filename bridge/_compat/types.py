"""Public classes of jaxlib, for annotations. jaxlib has no type declarations, so type checkers take these names for variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    class Device:
        """`jax.Device`."""

        id: int
        platform: str
        device_kind: str
        process_index: int
        local_hardware_id: int
        client: Any

        def memory_stats(self) -> dict[str, int] | None: ...
        def get_stream_for_external_ready_events(self) -> int: ...

    class PyTreeDef:
        """`jax.tree_util.PyTreeDef`."""

        num_leaves: int
        num_nodes: int

        def children(self) -> list[PyTreeDef]: ...
        def node_data(self) -> tuple[type, Any] | None: ...
        def flatten_up_to(self, tree: Any, /) -> list[Any]: ...
        def unflatten(self, leaves: Iterable[Any], /) -> Any: ...

else:
    from jax import Device
    from jax.tree_util import PyTreeDef

__all__ = ["Device", "PyTreeDef"]
