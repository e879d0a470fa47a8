"""A torch network and an Equinox network learn scikit-learn's digits side by side, from the labels and from each other.

Both read the same batch, which is in memory only once, and see each other's predictions without a copy. `MaskedAdam` updates the torch
network, optax the Equinox network. Then torch hands its network and the state of its optimizer over to optax, which trains for an epoch in
pure JAX and hands both back, in place: the weights are the same as if torch had continued.

    python examples/two_worlds.py                      # about 15 seconds on two CPU cores
"""

import copy
from collections.abc import Iterator
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
from torch.nn import functional as F
from tqdm import tqdm

import bridge
import torch_api

RATE, TRAINING = 3e-3, 1200


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The images, each as 64 numbers; the labels as one-hot rows; the labels as numbers."""
    digits: Any = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(digits.target)[order]
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, F.one_hot(labels).float(), labels


def batches(epoch: int) -> Iterator[torch.Tensor]:
    return iter(torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch)).split(50))


def learn_from(logits: Any, rows: Any, other: Any) -> Any:
    """In JAX, the cross entropy with the labels, plus that with the predictions of the other network."""
    return (optax.softmax_cross_entropy(logits, rows) + optax.softmax_cross_entropy(logits, jax.nn.softmax(other))).mean()


def accuracies(net: nn.Module, model: Any, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """The accuracy of the torch network and of the Equinox model on the images that neither was trained on."""
    new, expected = images[TRAINING:], labels[TRAINING:].numpy()
    guesses = jax.vmap(model)(jnp.asarray(new.numpy())).argmax(-1)
    return float((net(new).argmax(-1).numpy() == expected).mean()), float((np.asarray(guesses) == expected).mean())


def together(
    net: nn.Module, model: Any, images: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, epochs: int
) -> tuple[torch_api.MaskedAdam, Any, list[tuple[float, float]]]:
    """Train both networks in one loop; returns the torch network's optimizer, the trained Equinox model, and the accuracies by epoch."""
    optimizer = torch_api.MaskedAdam(net.named_parameters(), lr=RATE)
    tx = optax.adam(RATE)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def update(model: Any, state: Any, x: Any, y: Any, other: Any) -> tuple[Any, Any]:
        grads = eqx.filter_grad(lambda m: learn_from(jax.vmap(m)(x), y, other))(model)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state

    predict = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    reached = []
    for epoch in tqdm(range(epochs), unit="epoch", disable=None):
        for index in batches(epoch):
            x, y = images[index], rows[index]
            seen = bridge.to_jax({"x": x, "y": y})
            assert seen["x"].unsafe_buffer_pointer() == x.data_ptr(), "the batch lies in memory once"
            theirs = predict(model, seen["x"])
            ours = net(x)
            model, state = update(model, state, seen["x"], seen["y"], bridge.to_jax(ours.detach()))
            loss = F.cross_entropy(ours, y) + F.cross_entropy(ours, bridge.to_torch(theirs).softmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached.append(accuracies(net, model, images, labels))
    return optimizer, model, reached


def forward(params: Any, x: Any) -> Any:
    """Compute the torch network in JAX, from the nested dict of its parameters."""
    hidden = jax.nn.relu(x @ params["hidden"]["weight"].T + params["hidden"]["bias"])
    return hidden @ params["out"]["weight"].T + params["out"]["bias"]


def epoch_in_jax(net: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, rows: torch.Tensor, epoch: int) -> None:
    """Hand network and optimizer over to optax for one epoch, and take them back."""
    tx = optax.adam(RATE)
    params = bridge.to_jax(net)
    state = torch_api.to_optax_state(optimizer, tx)  # exp_avg becomes mu, exp_avg_sq nu, step count
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: optax.softmax_cross_entropy(forward(p, x), y).mean())(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    for index in batches(epoch):
        params, state = step(params, state, *bridge.to_jax((images[index], rows[index])))
    bridge.load_module_tree(net, params)
    torch_api.load_optax_state(optimizer, state)


def epoch_in_torch(net: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, rows: torch.Tensor, epoch: int) -> None:
    for index in batches(epoch):
        optimizer.zero_grad()
        F.cross_entropy(net(images[index]), rows[index]).backward()
        optimizer.step()


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    images, rows, labels = load()
    net = nn.Sequential()
    net.add_module("hidden", nn.Linear(64, 64))
    net.add_module("relu", nn.ReLU())
    net.add_module("out", nn.Linear(64, 10))
    model = eqx.nn.MLP(64, 10, 48, 2, key=jax.random.key(0))
    optimizer, model, reached = together(net, model, images, rows, labels, 9)
    ours, theirs = reached[-1]
    print(f"Learning side by side: {ours:.1%} for the torch network, {theirs:.1%} for the Equinox model")
    assert min(ours, theirs) > 0.93

    twin = copy.deepcopy(net)
    going_on = torch.optim.Adam(twin.parameters(), lr=RATE)
    going_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # copied, because torch.optim would share the tensors
    places = [p.data_ptr() for p in net.parameters()]
    epoch_in_jax(net, optimizer, images, rows, 9)
    handed_over = [accuracies(net, model, images, labels)[0]]
    epoch_in_torch(twin, going_on, images, rows, 9)
    epoch_in_torch(net, optimizer, images, rows, 10)  # torch continues
    handed_over.append(accuracies(net, model, images, labels)[0])
    epoch_in_torch(twin, going_on, images, rows, 10)
    apart = max((a - b).abs().max().item() for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    print(f"An epoch in optax and one in torch: weights at most {apart:.1e} from those of two epochs in torch")

    figure, axes = panels(1)
    axes.plot(range(1, 10), reached, "o-", markersize=3, label=["torch network, MaskedAdam", "Equinox network, optax.adam"])
    axes.plot(
        [9, 10, 11], [ours, *handed_over], "o-", markersize=3, color="tab:green", label="torch network: an epoch in optax, one in torch"
    )
    axes.set(title="Accuracy on new images", xlabel="epoch")
    axes.legend(frameon=False)
    save(figure, plots, "two_worlds")
    assert apart < 1e-5
    assert places == [p.data_ptr() for p in net.parameters()]
    assert {int(state["step"]) for state in optimizer.state.values()} == {11 * 24}


if __name__ == "__main__":
    main()
