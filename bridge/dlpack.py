"""Tensors and arrays between torch and jax: the only file that touches DLPack.

Zero-copy means that both sides see the same bytes, in both directions: a write through torch is visible in the jax
array, although jax calls it immutable. Import afresh after a write; a jax array that was printed keeps the old values
(https://github.com/jax-ml/jax/issues/19123).
"""

from __future__ import annotations
