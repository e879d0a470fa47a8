"""Adam for the weights and SGD for the biases: the example from the documentation of optax.partition, on a torch module.

One `PartitionedOptimizer` with labels by pattern trains a network of two layers. For comparison, pure optax makes the same steps from the
same gradients, using `optax.partition` and the label function of its documentation; both must end at the same weights.

    python examples/adam_weights_sgd_biases.py

https://optax.readthedocs.io/en/latest/api/combining_optimizers.html#optax.partition
"""

from typing import Any

import jax
import numpy as np
import optax
import torch
from _gallery import option_parser, panels, save
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_api
from bridge import module_tree, to_jax

STEPS = 200


def by_own_name(nested: dict[str, Any]) -> dict[str, Any]:
    """The labels of optax's documentation: each leaf of a nested dict is labelled with the last part of its name."""
    return {key: by_own_name(value) if isinstance(value, dict) else key for key, value in nested.items()}


def own_copy(tree: Any) -> Any:
    """Copy a tree, because `module_tree` and `to_jax` share torch's memory, which the next step changes."""
    return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), tree)


def gradients(model: nn.Module) -> Any:
    return own_copy({layer: {name: to_jax(p.grad) for name, p in part.named_parameters()} for layer, part in model.named_children()})


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.ModuleDict({"linear_1": nn.Linear(5, 64), "linear_2": nn.Linear(64, 1)})
    x = torch.randn(512, 5)
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].sin() + 3

    optimizer = torch_api.PartitionedOptimizer(
        model.named_parameters(),
        {"adam": (optax.adam, {"lr": 1e-2}), "sgd": (optax.sgd, {"lr": 5e-2})},
        labels=[("*.weight", "adam"), ("*.bias", "sgd")],
    )
    print(optimizer)

    pure = optax.partition({"weight": optax.adam(1e-2), "bias": optax.sgd(5e-2)}, by_own_name)
    params = start = own_copy(module_tree(model))
    state, update = pure.init(params), jax.jit(pure.update)

    losses = []
    for _ in tqdm(range(STEPS), unit="step", disable=None):
        optimizer.zero_grad()
        loss = F.mse_loss(model["linear_2"](model["linear_1"](x).tanh()), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        updates, state = update(gradients(model), state, params)
        params = optax.apply_updates(params, updates)

    print(f"Loss: {losses[0]:.3f} before the first step, {losses[-1]:.4f} before the last.")
    assert losses[-1] < 0.15  # for comparison, the variance of y is 0.7
    figure, (left, right) = panels()
    left.semilogy(losses)
    left.set(title="Loss", xlabel="step")
    right.set(title="Each element at the end", xlabel="optax alone", ylabel="PartitionedOptimizer")
    results = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(module_tree(model)), jax.tree.leaves(start), strict=True)
    for (path, theirs), ours, begun in results:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        moved = np.linalg.norm(theirs - begun)
        apart = np.linalg.norm(theirs - ours) / moved
        print(f"{name:<16} moved by {moved:.4f}; optax alone ends {apart:.1e} of that away")
        right.plot(np.ravel(theirs), np.ravel(ours), ".", markersize=4, label=name, rasterized=True)
        assert moved > 0.1
        assert apart < 1e-5
    right.legend(frameon=False)
    save(figure, plots, "adam_weights_sgd_biases")


if __name__ == "__main__":
    main()
