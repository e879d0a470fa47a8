"""A torch vision backbone and a JAX head in one program: forward, backward and update, including batch norm's statistics.

The backbone is an ordinary `nn.Module` with batch norm; `bridge.module_function` makes a pure JAX function of it. The head is an Equinox
model. One `jax.jit` passes a batch of scikit-learn's digits through both, differentiates both, and updates both by optax. Finally the
weights and the running statistics are written back into the module, in place, and torch alone computes the same features.

    python examples/backbone_and_head.py               # about 20 seconds on two CPU cores
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from _gallery import option_parser, panels, save
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import bridge

TRAINING, BATCH, EPOCHS = 1300, 50, 6


def make_backbone() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten())


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images = jnp.asarray(digits.images[order, None] / 16, jnp.float32)
    labels = jnp.asarray(digits.target[order], jnp.int32)

    backbone = make_backbone()
    features_of = bridge.module_function(backbone)
    head, still = eqx.partition(eqx.nn.MLP(128, 10, 64, 1, key=jax.random.key(0)), eqx.is_array)
    params = {"backbone": bridge.module_tree(backbone), "head": head}
    buffers = bridge.module_buffers(backbone)
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, EPOCHS * TRAINING // BATCH), weight_decay=1e-3)

    def loss_of(params: Any, buffers: Any, x: Any, y: Any) -> tuple[Any, Any]:
        features, buffers = features_of(params["backbone"], x, buffers=buffers, train=True)
        logits = jax.vmap(eqx.combine(params["head"], still))(features)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), buffers

    traces = 0

    @jax.jit
    def step(params: Any, buffers: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any, Any]:
        nonlocal traces
        traces += 1
        (loss, buffers), grads = jax.value_and_grad(loss_of, has_aux=True)(params, buffers, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), buffers, state, loss

    @jax.jit
    def predict(params: Any, buffers: Any, x: Any) -> tuple[Any, Any]:
        features, _ = features_of(params["backbone"], x, buffers=buffers, train=False)
        return features, jax.vmap(eqx.combine(params["head"], still))(features).argmax(-1)

    state = tx.init(params)
    rng = np.random.default_rng(1)
    losses = []
    order = np.concatenate([rng.permutation(TRAINING).reshape(-1, BATCH) for _ in range(EPOCHS)])
    for index in tqdm(order, unit="step", disable=None):
        params, buffers, state, loss = step(params, buffers, state, images[index], labels[index])
        losses.append(float(loss))

    features, guesses = predict(params, buffers, images[TRAINING:])
    accuracy = float((guesses == labels[TRAINING:]).mean())
    print(f"Loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last.")
    print(f"One program for backbone, head and update, traced {traces} time(s): {accuracy:.1%} of the other images are read right")

    places = [x.data_ptr() for x in backbone.state_dict().values()]
    bridge.load_module_tree(backbone, params["backbone"])
    bridge.write_buffers(backbone, buffers)
    backbone.eval()
    with torch.no_grad():
        in_torch = backbone(torch.from_numpy(np.array(images[TRAINING:])))
    apart = float(np.abs(in_torch.numpy() - np.asarray(features)).max() / np.abs(features).max())
    print(f"Back in the module, torch computes the same features, but for {apart:.0e} of the largest")

    counts = np.zeros((10, 10), int)
    np.add.at(counts, (np.asarray(labels[TRAINING:]), np.asarray(guesses)), 1)
    figure, (left, right) = panels()
    left.semilogy(losses)
    left.set(title="Loss", xlabel="step")
    right.imshow(counts, cmap="Blues")
    for (row, column), count in np.ndenumerate(counts):
        right.text(column, row, count or "", ha="center", va="center", size=8, color="white" if count > 25 else "black")
    right.set(title="Images that were not trained on", xlabel="digit read", ylabel="digit", xticks=range(10), yticks=range(10))
    save(figure, plots, "backbone_and_head")
    assert accuracy > 0.97
    assert traces <= 2, "batch norm counts in int64, and in int32 from the first step on"
    assert apart < 1e-4
    assert int(backbone.get_buffer("1.num_batches_tracked")) == EPOCHS * TRAINING // BATCH
    assert places == [x.data_ptr() for x in backbone.state_dict().values()], "in place"


if __name__ == "__main__":
    main()
