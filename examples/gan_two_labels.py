"""Train a small GAN by one optimizer that has a separate transformation and learning rate for each of the two networks.

The generator learns eight Gaussians on a ring. The networks take turns, yet there is only one `PartitionedOptimizer`, one scheduler and one
state_dict, because a parameter whose `.grad` is None keeps its bits, its moments and its step count.

    python examples/gan_two_labels.py     # prints what is done with each parameter, the losses, and how the points spread over the ring
"""

import math

import optax
import torch
from _gallery import option_parser, panels, save
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import torch_api

ROUNDS, BATCH = 1000, 128
CENTRES = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * (math.pi / 4)))


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def real_points() -> torch.Tensor:
    return CENTRES[torch.randint(8, (BATCH,))] + 0.05 * torch.randn(BATCH, 2)


def turn(optimizer: torch_api.PartitionedOptimizer, loss: torch.Tensor, player: nn.Module) -> float:
    """Make a step of one network: the loss leaves gradients only in its parameters."""
    optimizer.zero_grad()
    loss.backward(inputs=list(player.parameters()))
    optimizer.step()
    return loss.item()


def train(generator: nn.Module, discriminator: nn.Module, optimizer: torch_api.PartitionedOptimizer) -> list[tuple[float, float]]:
    """Train; returns the losses of discriminator and generator in each round."""
    scheduler = CosineAnnealingLR(optimizer, T_max=ROUNDS, eta_min=1e-5)
    losses = []
    for _ in tqdm(range(ROUNDS), unit="round", disable=None):
        fake = generator(torch.randn(BATCH, 2))
        doubt = F.softplus(-discriminator(real_points())).mean() + F.softplus(discriminator(fake.detach())).mean()
        doubt = turn(optimizer, doubt, discriminator)
        failure = turn(optimizer, F.softplus(-discriminator(fake)).mean(), generator)
        scheduler.step()
        losses.append((doubt, failure))
    return losses


def bits(module: nn.Module, optimizer: torch_api.PartitionedOptimizer) -> list[bytes]:  # of parameters and state
    return [t.detach().numpy().tobytes() for p in module.parameters() for t in (p, *optimizer.state[p].values())]


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator, discriminator = network(2), network(1)
    optimizer = torch_api.PartitionedOptimizer(
        nn.ModuleDict({"generator": generator, "discriminator": discriminator}).named_parameters(),
        {"generator": (optax.adam, {"lr": 3e-3, "b1": 0.5}), "discriminator": (optax.adabelief, {"lr": 6e-3, "b1": 0.5})},
        labels={"generator": "generator", "discriminator": "discriminator"},
    )
    print(optimizer)
    losses = train(generator, discriminator, optimizer)
    print("Losses in the last round: discriminator {:.3f}, generator {:.3f}".format(*losses[-1]))
    before = bits(generator, optimizer), bits(discriminator, optimizer)
    turn(optimizer, discriminator(real_points()).mean(), discriminator)
    assert bits(generator, optimizer) == before[0], "the discriminator's turn changed the generator"
    assert not set(bits(discriminator, optimizer)) & set(before[1])
    with torch.no_grad():
        points = generator(torch.randn(4000, 2))
    distance, mode = torch.cdist(points, CENTRES).min(1)
    near = distance < 0.2  # true for all real points, and for 51% of points spread evenly along the ring
    shares = (torch.bincount(mode[near], minlength=8) / len(mode)).tolist()
    print("Generated points near each of the Gaussians:", " ".join(f"{share:.1%}" for share in shares), f"(together {sum(shares):.1%})")

    figure, (left, right) = panels()
    left.plot(*points[:500].T.numpy(), ".", markersize=3, rasterized=True)
    left.plot(*CENTRES.T.numpy(), "k+")
    left.set(title="Generated points, centers (+)", aspect="equal")
    right.plot(range(5, ROUNDS, 10), torch.tensor(losses).unflatten(0, (-1, 10)).mean(1), label=["discriminator", "generator"])
    right.set(title="Loss, mean of 10 rounds", xlabel="round")
    right.legend(frameon=False)
    save(figure, plots, "gan_two_labels")
    assert min(shares) > 0.02, "a Gaussian was left out"
    assert sum(shares) > 0.6, "the points are no better than any on the ring"


if __name__ == "__main__":
    main()
