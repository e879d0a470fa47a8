"""Run the code cells of a notebook in one namespace, and print the outputs of each as JSON, in the notebook's own form.

A cell of `examples/interop.ipynb` prints and draws; it shows no value of a last expression, which Jupyter alone would show.
"""

import ast
import base64
import contextlib
import io
import json
import sys

import matplotlib.pyplot as plt


def execute(source, namespace):
    """Execute a cell. Raise an error if Jupyter would show the value of its last expression: a semicolon after it prevents that."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body.append(last)
    exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
        assert value is None or source.endswith(";"), f"end this line with a semicolon: {ast.unparse(last)}"


def picture(figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=80, bbox_inches="tight")
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def run(source, namespace):
    """Run a cell and return its outputs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        execute(source, namespace)
    lines = printed.getvalue().splitlines(keepends=True)
    outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    outputs += [picture(plt.figure(number)) for number in plt.get_fignums()]
    plt.close("all")
    return outputs


def main():
    with open(sys.argv[1]) as file:
        cells = json.load(file)["cells"]
    namespace = {"__name__": "__main__"}
    print(json.dumps([run("".join(cell["source"]), namespace) for cell in cells if cell["cell_type"] == "code"]))


if __name__ == "__main__":
    main()
