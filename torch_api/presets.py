"""Ready selectors."""

from __future__ import annotations

import torch


def no_decay_on_bias_and_norm(name: str, param: torch.Tensor) -> bool:
    """For `decay_mask`: decay matrices and kernels, leave biases, norm scales and other vectors and scalars alone.

    The test is the number of dimensions (two or more decay), as in common GPT recipes; names are not looked at.
    """
    return param.ndim >= 2
