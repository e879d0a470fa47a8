"""An Equinox filter, a tree of bools made by `tree_at`, as the mask of a torch optimizer.

A torch network learns scikit-learn's digits in two phases: first only its last layer, then also the layer before. The filter is the one
from Equinox's page on freezing parameters, applied to the nested dict of the torch module's parameters. Afterwards `equinox.partition`
uses the same filter to separate the parameters that were trained from those that must have kept their bits.

    python examples/equinox_filter_mask.py

https://docs.kidger.site/equinox/examples/frozen_layer/
"""

from collections import OrderedDict
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch
from _gallery import option_parser, panels, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_api
from bridge import module_tree


def only(layers: list[str], tree: Any) -> Any:
    """The filter: True for the layers' weights and biases, False elsewhere."""
    nothing = jax.tree.map(lambda _: False, tree)
    return eqx.tree_at(lambda t: [t[layer][name] for layer in layers for name in ("weight", "bias")], nothing, replace_fn=lambda _: True)


def snapshot(model: nn.Module) -> Any:
    return jax.tree.map(lambda x: np.array(x, copy=True), module_tree(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, layers: list[str]) -> list[float]:
    """Train for ten epochs, check by the filter what changed and what did not; returns the accuracy on the last 597 images."""
    digits: Any = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    before, accuracy = snapshot(model), []
    for _ in tqdm(range(10), unit="epoch", disable=None):
        for batch in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), targets[batch]).backward()
            optimizer.step()
        accuracy.append((model(images[1200:]).argmax(1) == targets[1200:]).float().mean().item())
    (old, old_rest), (new, new_rest) = (eqx.partition(tree, only(layers, tree)) for tree in (before, snapshot(model)))
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)]
    kept = [a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(old_rest), jax.tree.leaves(new_rest), strict=True)]
    print(f"Trained {layers}: {sum(moved)} of {len(moved)} leaves moved, {sum(kept)} of the other {len(kept)} kept their bits.")
    print(f"Accuracy: {accuracy[-1]:.1%}")
    assert len(moved) == 2 * len(layers)
    assert all(moved + kept)
    return accuracy


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        OrderedDict(first=nn.Linear(64, 64), r1=nn.ReLU(), hidden=nn.Linear(64, 64), r2=nn.ReLU(), last=nn.Linear(64, 10))
    )
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=3e-3, mask=only(["last"], module_tree(model)))
    start = snapshot(model)
    alone = train(model, optimizer, ["last"])
    optimizer.set_trainable(only(["hidden"], module_tree(model)), True)
    together = train(model, optimizer, ["hidden", "last"])
    print(optimizer)

    moved = jax.tree.map(lambda now, begun: np.linalg.norm(now - begun) / np.linalg.norm(begun), snapshot(model), start)
    figure, (left, right) = panels()
    left.plot(range(1, 21), alone + together, "o-", markersize=3)
    left.axvline(10.5, color="0.7", linestyle=":")
    left.set(title="Accuracy on new images", xlabel="epoch: first the last layer, then two")
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(moved)]
    right.bar_label(right.barh(names, jax.tree.leaves(moved)), fmt="%.2f", padding=4)
    right.set(title="Movement, relative to the parameter's size")
    right.margins(x=0.15)
    right.invert_yaxis()
    save(figure, plots, "equinox_filter_mask")
    assert alone[-1] > 0.55
    assert together[-1] > alone[-1] + 0.1


if __name__ == "__main__":
    main()
