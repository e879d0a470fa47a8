"""What the examples share: the options of the command line, and how a figure becomes a picture of docs/gallery.md."""

import argparse
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure


def option_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).parent / "plots"
    parser.add_argument("--plots", type=Path, default=folder, metavar="DIR", help="the folder for the plot (default: examples/plots)")
    return parser


def panels(count: int = 2) -> tuple[Figure, Any]:
    """Return a figure and its panels, side by side; one panel alone is no array."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    return figure, figure.subplots(1, count)


def save(figure: Figure, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    fonts = ["DejaVu Sans", "Verdana", "Arial"]  # the viewer draws the text, by the first that it has
    with rc_context({"svg.fonttype": "none", "font.sans-serif": fonts, "svg.hashsalt": name}):  # the same plot is the same file
        figure.savefig(path, dpi=120, metadata={"Date": None, "Creator": None})
    print(f"Wrote {path}.")
