"""A physics loss in JAX trains a torch network: it learns the unknown friction of a pendulum from a noisy film of its angle.

    angle'' = -(g / length) * sin(angle) - friction(velocity)

`friction` is a torch network. JAX integrates the equation, by Runge-Kutta steps in a `lax.scan`, and `bridge.jax_function` makes a torch
function of the loss: torch's backward runs through the whole integration into the network, which `MaskedAdamW` updates. torch evaluates the
network itself, on a grid of velocities; JAX interpolates between them.

    python examples/ode_physics.py                     # about 10 seconds on two CPU cores
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _gallery import option_parser, panels, save
from jax import lax
from torch import nn
from tqdm import tqdm

import bridge
import torch_api

LENGTH, GRAVITY, DT, STEPS = 1.0, 9.81, 0.02, 150
GRID = np.linspace(-6.0, 6.0, 61, dtype=np.float32)


def true_friction(velocity: Any) -> Any:
    """The friction that the network has to find: proportional to the velocity if slow, to its square if fast."""
    return 0.3 * velocity + 0.08 * velocity * jnp.abs(velocity)


def integrate(friction: Any, start: Any) -> Any:
    """The angle at each step, for a start at (angle, velocity)."""

    def slope(state: Any) -> Any:
        angle, velocity = state
        return jnp.stack([velocity, -GRAVITY / LENGTH * jnp.sin(angle) - friction(velocity)])

    def step(state: Any, _: None) -> tuple[Any, Any]:
        k1 = slope(state)
        k2 = slope(state + DT / 2 * k1)
        k3 = slope(state + DT / 2 * k2)
        k4 = slope(state + DT * k3)
        state = state + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state[0]

    return lax.scan(step, start, None, length=STEPS)[1]


def misfit(friction_on_grid: Any, starts: Any, films: Any) -> Any:
    """The mean square difference between the filmed angles and those that result from this friction."""

    def friction(velocity: Any) -> Any:
        return jnp.interp(velocity, GRID, friction_on_grid)

    angles = jax.vmap(lambda start: integrate(friction, start))(starts)
    return jnp.mean((angles - films) ** 2)


def films(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Films of four pendulums let go at different angles, with noise in the measured angles."""
    starts = np.array([[0.5, 0.0], [1.5, 0.0], [2.5, 0.0], [-1.0, 3.0]], np.float32)
    angles = np.asarray(jax.vmap(lambda start: integrate(true_friction, start))(jnp.asarray(starts)))
    seen = angles + noise * np.random.default_rng(0).standard_normal(angles.shape).astype(np.float32)
    return torch.from_numpy(starts), torch.from_numpy(seen)


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.manual_seed(0)
    starts, seen = films(0.02)
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=3e-2, weight_decay=1e-4, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    loss_of = bridge.jax_function(misfit)
    grid = torch.from_numpy(GRID)[:, None]

    loss = torch.tensor(torch.inf)
    for _ in tqdm(range(250), unit="step", disable=None):
        optimizer.zero_grad()
        loss = loss_of(net(grid / 6)[:, 0], starts, seen)
        loss.backward()
        optimizer.step()
        schedule.step()

    with torch.no_grad():
        found = net(grid / 6)[:, 0].numpy()
    visited = np.abs(GRID) < 4  # the velocities that occur in the films
    print(f"After 250 steps the films are missed by {loss.item() ** 0.5:.3f} rad.")
    apart = np.abs(found - np.asarray(true_friction(GRID)))[visited].max()
    print(f"The friction is found to {apart:.2f}, of at most {true_friction(4.0):.1f}; {loss_of.programs} program(s) compiled")

    angles = jax.vmap(lambda start: integrate(lambda velocity: jnp.interp(velocity, GRID, found), start))(starts.numpy())
    figure, (left, right) = panels()
    for film, learned in zip(seen.numpy(), np.asarray(angles), strict=True):
        left.plot(DT * np.arange(1, STEPS + 1), film, ".", color="0.7", markersize=3, rasterized=True)
        left.plot(DT * np.arange(1, STEPS + 1), learned)
    left.set(title="Films (dots) and what was learned", xlabel="seconds", ylabel="angle")
    right.plot(GRID, true_friction(GRID), color="0.6", label="true")
    right.plot(GRID, found, "--", label="learned")
    right.axvspan(-4, 4, color="0.95", label="velocities in the films")
    right.set(title="Friction", xlabel="velocity")
    right.legend(frameon=False)
    save(figure, plots, "ode_physics")
    assert loss.item() ** 0.5 < 0.03, "as good as the noise, 0.02, allows"
    assert apart < 0.3
    assert loss_of.programs == 1


if __name__ == "__main__":
    main()
