"""Values that jax knows while it traces: torch itself computes what has no implementation, such as the places of a fixed mask."""

import jax
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from traced_oracle import compare

import bridge


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[tuple(torch.ones(4, 4).triu(1).nonzero().T)],
        lambda x: x[torch.ones(4, 4).triu(1).nonzero(as_tuple=True)],
        lambda x: x[torch.argwhere(torch.eye(4))],
        lambda x: x[torch.unique(torch.arange(6) // 2)],
        lambda x: x * torch.unique_consecutive(torch.arange(6).clamp(max=3), return_counts=True)[1],
        lambda x: x * torch.linalg.ldl_factor(torch.eye(4) * 2).LD,
        lambda x: torch.masked_select(x, torch.eye(4).bool()),
        lambda x: x.masked_select(torch.arange(4) > 1),
    ],
)
def test_what_is_known_is_computed_by_torch(function):
    torch.manual_seed(0)
    compare(function, torch.randn(4, 4))


def run(function):
    return jax.jit(lambda x: bridge.module_function(Applies(function))({}, x, rng=jax.random.key(0)))(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),  # not known
        lambda x: x[torch.argwhere(x > 0)],
        lambda x: x + torch.ones(4, 1).squeeze_(),  # in place: the tensor itself would not see it
        lambda x: x + torch.binomial(torch.ones(4), torch.ones(4) / 2),  # from torch's generator
    ],
)
def test_what_torch_cannot_stand_in_for_is_the_error(function):
    with pytest.raises(NotImplementedError, match="has no implementation in jax"):
        run(function)


def test_a_mask_that_is_not_known_cannot_select():
    with pytest.raises(NotImplementedError, match="how many elements it chooses depends on values"):
        run(lambda x: torch.masked_select(x, x > 0))


def test_the_generator_of_torch_is_left_alone():
    before = torch.get_rng_state()
    run(lambda x: x[torch.argwhere(torch.eye(4))])
    assert torch.equal(torch.get_rng_state(), before)
