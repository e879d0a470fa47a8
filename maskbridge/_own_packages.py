"""The check that `bridge` and `torch_api` are the packages of this distribution, and not others of the same name.

Each package of the distribution has this file, because none of them may import it from a package that may be foreign.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def refuse_foreign(*names: str) -> None:
    """Raise an ImportError that names the file of a package, if it is not the package of that name beside this one.

    Nothing is imported, and a package that is not installed passes.
    """
    for name in names:
        own, found = Path(__file__).resolve().parents[1] / name, _find(name)
        if found is not None and not _is_own(Path(found), own):
            raise ImportError(
                f"`import {name}` finds {found}, which is not the {name} of maskbridge ({own}): rename that file or folder, or uninstall "
                "the distribution that it belongs to and install maskbridge again",
                name=name,
                path=found,
            )


def _find(name: str) -> str | None:
    """Return the file or folder that an import finds, None if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), repr(module))
    spec = importlib.util.find_spec(name)
    return spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), name))


def _is_own(file: Path, folder: Path) -> bool:
    """Return whether a file is the `__init__` of a package of ours in a folder.

    A distribution that was installed later into the same folder has replaced the file, so its text counts too, where it can be read.
    """
    is_readable = file.suffix == ".py" and file.is_file()
    return file.resolve().parent == folder and (not is_readable or refuse_foreign.__name__.encode() in file.read_bytes())
