"""A new optimizer in ten lines: `bridge.OptimizerDef` asks only for the state of one parameter and for its update.

The example is Signum (Bernstein et al., arXiv:1802.04434), which steps by the sign of the average gradient. It trains a torch network on
scikit-learn's digits, first for all parameters, then for the weights only, with flax's Momentum for the biases. Its hyperparameters are in
`param_groups`: a torch scheduler changes the learning rate at every step, and nothing is compiled again.

    python examples/optimizer_in_ten_lines.py
"""

from collections import namedtuple
from typing import Any

import jax.numpy as jnp
import torch
from _gallery import option_parser, panels, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

import bridge
import torch_api

HyperParams = namedtuple("HyperParams", "learning_rate beta")


class Signum(bridge.OptimizerDef):
    def __init__(self, learning_rate=1e-3, beta=0.9):
        super().__init__(HyperParams(learning_rate, beta))

    def init_param_state(self, param):
        return jnp.zeros_like(param)

    def apply_param_gradient(self, step, hyper_params, param, state, grad):
        state = hyper_params.beta * state + (1 - hyper_params.beta) * grad
        return param - hyper_params.learning_rate * jnp.sign(state), state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, peaks: list[float]) -> tuple[list[float], list[list[float]], float]:
    """Train for ten epochs, in which each group's lr rises to its peak and falls.

    Returns the loss and the learning rates of each step, and the accuracy on the last 597 images.
    """
    digits: Any = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    scheduler = OneCycleLR(optimizer, max_lr=peaks, total_steps=10 * 19, cycle_momentum=False)
    losses, rates, compiled = [], [], []
    for _ in tqdm(range(10), unit="epoch", disable=None):
        for batch in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), targets[batch])
            loss.backward()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            compiled.append(bridge.compilations())
    assert compiled[0] == compiled[-1], "a change of the learning rate compiled a program"
    assert optimizer.param_groups[0]["lr"] < 1e-3 * peaks[0], "the scheduler does not reach the groups"
    with torch.no_grad():
        return losses, rates, (model(images[1200:]).argmax(1) == targets[1200:]).float().mean().item()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.set_num_threads(1)
    model = network()
    alone = torch_api.OptaxOptimizer(model.named_parameters(), Signum(learning_rate=3e-3))
    losses_alone, _, reached = train(model, alone, [3e-3])
    print(f"Signum alone: accuracy {reached:.1%}", alone, sep="\n", end="\n\n")
    assert reached > 0.85

    model = network()
    both = torch_api.MultiOptimizer(model.named_parameters(), ("*.weight", Signum(beta=0.95)), ("*.bias", bridge.Momentum(lr=0.1)))
    losses_both, rates, reached = train(model, both, [3e-3, 0.1])
    print(f"Signum for weights, Momentum for biases: accuracy {reached:.1%}", both, sep="\n")

    figure, (left, right) = panels()
    left.semilogy(losses_alone, label="Signum")
    left.semilogy(losses_both, label="Signum for weights, Momentum for biases")
    left.set(title="Loss", xlabel="step")
    right.semilogy(rates, label=["Signum, weights", "Momentum, biases"])
    right.set(title="Learning rates of the second run", xlabel="step")
    for axes in (left, right):
        axes.legend(frameon=False, loc="lower center")
    save(figure, plots, "optimizer_in_ten_lines")
    assert reached > 0.85


if __name__ == "__main__":
    main()
