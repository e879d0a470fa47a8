"""Traced torch code against eager torch over torch's own database of operators: values, dtypes, shapes and gradients.

Each operator of it with samples in float32, a few of them spread over the list. `REFUSED` are those with the error that names them.
"""

import functools
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from oracles import jitted
from torch.utils import _pytree as pytree

import bridge
from bridge import torch_calls
from bridge.dlpack import x64
from bridge.residuals import IN_TORCH

SAMPLES = int(os.environ.get("MASKBRIDGE_TEST_SAMPLES", "3"))
TOGETHER = 8  # samples of a program, at most
PARTS = 24
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VERSION < (2, 11), reason="an older database has other samples"),
]

# Whose rarer arguments are refused: max_norm, which changes the weight; a custom operator of torch's.
IN_PART = (
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "nn.functional.linear_cross_entropy.chunked",
    "nn.functional.linear_cross_entropy.chunked_none",
)
# Random, without values, or of vectors whose sign is free: of these only shapes and dtypes are compared.
DRAWN = """
bernoulli empty_like linalg.eigh multinomial new_empty new_empty_strided nn.functional.alpha_dropout nn.functional.dropout
nn.functional.dropout2d nn.functional.dropout3d nn.functional.feature_alpha_dropout.with_train nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward nn.functional.rrelu normal normal.number_mean pca_lowrank
rand_like randint_like randn_like svd_lowrank
"""
# Whose result's shape depends on values.
BY_VALUE = {"argwhere", "nonzero", "unique", "unique_consecutive"}
# Sparse; private to torch's own compiler; and what nobody has asked for yet.
REFUSED = """
to_sparse
_chunk_cat _segment_reduce.lengths _segment_reduce.offsets _softmax_backward_data _unsafe_masked_index
_unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa max_pool2d_with_indices_backward native_dropout_backward
slice torch.ops.aten._safe_softmax.default
chalf geqrf hash_tensor histogramdd linalg.ldl_factor linalg.ldl_factor_ex linalg.ldl_solve
special.airy_ai special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.chebyshev_polynomial_t
special.chebyshev_polynomial_u special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.hermite_polynomial_h
special.hermite_polynomial_he special.laguerre_polynomial_l special.legendre_polynomial_p special.modified_bessel_k0
special.modified_bessel_k1 special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v
special.shifted_chebyshev_polynomial_w special.spherical_bessel_j0
"""
# torch 2.13 has its gradient at the elements that are overwritten, none at those that are kept; and samples with NaN, whose gradients
# are NaN at other elements.
VALUES = "as_strided_scatter", "masked.amax", "masked.amin", "masked.norm", "masked.prod"
LEFT_OUT = "sparse.", "jiterator"  # not of dense tensors on a CPU


def seeded(seed=1234):
    """As torch does before each sample, but for the CPU: for each device that is not there it would keep the whole stack as text."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@functools.cache
def database():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    for module in (common_utils, core):  # it looks through the whole stack, a fifth of a second for each operator: here in vain
        module.extract_test_fn = lambda: None
    if not torch.cuda.is_available():
        common_utils.set_rng_seed = seeded
    named = {(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name): op for op in op_db}
    return {name: op for name, op in named.items() if torch.float32 in op.supported_dtypes("cpu") and not name.startswith(LEFT_OUT)}


def function_of(op, sample):
    """The floating tensors of a sample, and the operator as a function of them."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def function(*given):
        leaves = list(flat)
        for i, x in zip(at, given, strict=True):
            leaves[i] = x
        first, args, kwargs = pytree.tree_unflatten(leaves, spec)
        return op(first, *args, **kwargs)

    return function, [flat[i].detach().clone().requires_grad_() for i in at]


def assert_close(ours, theirs):
    theirs = (theirs.float() if theirs.dtype == torch.bfloat16 else theirs).numpy()
    largest = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * largest)


class Case(NamedTuple):
    """A sample in eager torch: its tensors, the operator as a function of them, the results, and the gradients of some of them."""

    function: Callable
    given: list
    out: list
    at: list
    weights: list
    slopes: tuple


def eager(name, op, sample):
    """The sample in eager torch; None where torch itself refuses, or there is nothing to compare."""
    function, given = function_of(op, sample)
    try:
        out = [x for x in pytree.tree_leaves(function(*given)) if isinstance(x, torch.Tensor)]
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return None
    if not given or not out:
        return None
    at = [i for i, x in enumerate(out) if x.requires_grad and x.is_floating_point() and name not in VALUES]
    weights = [torch.linspace(1, 2, out[i].numel()).reshape(out[i].shape) for i in at]
    try:
        slopes = torch.autograd.grad([out[i] for i in at], given, weights, allow_unused=True) if at else ()
    except (RuntimeError, NotImplementedError):
        at, weights, slopes = [], [], ()
    return Case(function, given, out, at, weights, slopes)


def traced(case, arrays):
    """The results of a case and their gradients in a program that is being traced."""
    pure, by = bridge.module_function(Applies(case.function)), [bridge.to_jax(w) for w in case.weights]

    def total(arrays):
        found = [x for x in jax.tree.leaves(pure({}, *arrays, rng=jax.random.key(0))) if isinstance(x, jax.Array | np.ndarray)]
        return sum((found[i] * w).sum() for i, w in zip(case.at, by, strict=True)), found

    if not case.at:
        return total(arrays)[1], ()
    (_, found), grads = jax.value_and_grad(total, has_aux=True)(arrays)
    return found, grads


def compare(name, sample, case, found, grads):
    assert [tuple(x.shape) for x in found] == [tuple(x.shape) for x in case.out]
    assert [IN_TORCH[str(x.dtype)] for x in found] == [x.dtype for x in case.out]
    if name in DRAWN.split() or sample.kwargs.get("dropout_p"):
        return
    for ours, theirs in zip(found, case.out, strict=True):
        assert_close(ours, theirs.detach().resolve_conj().resolve_neg())
    for ours, theirs, x in zip(grads, case.slopes, case.given, strict=bool(case.at)):
        theirs = torch.zeros(()) if theirs is None else theirs.to_dense() if theirs.is_sparse else theirs
        assert_close(ours, torch.zeros_like(x) + theirs)  # a sum: some are torch's zeros without memory


def outcome(name, op):
    """What came of the samples of an operator: compared, skipped, refused, refused for its values, or the first difference."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    counts, wrong = Counter(), []

    def attempt(call, *arguments):
        """What a call gives, or None and what its error means counted."""
        try:
            return call(*arguments)
        except NotImplementedError as error:
            counts["refused" if "has no implementation in jax" in str(error) else "other"] += 1
        except jax.errors.ConcretizationTypeError as error:
            if not re.search(rf"torch\.(functional\.)?{name} in .* asks for values", str(error)):
                raise
            counts["by value"] += 1
        except Exception as error:  # noqa: BLE001 - of any operator, to name all that differ
            wrong.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return None

    cases = []
    for sample in samples[:: max(1, len(samples) // SAMPLES)]:
        case = attempt(eager, name, op.op, sample)
        if case is None:
            counts["skipped"] += 1
        else:
            cases.append((sample, case))
    # A program for all of them: XLA takes longer to begin one than to compile most operators.
    for some in (cases[i : i + TOGETHER] for i in range(0, len(cases), TOGETHER)):
        arrays = [[bridge.to_jax(x.detach()) for x in case.given] for _, case in some]
        program = jitted(lambda arrays, some=some: [attempt(traced, case, each) for (_, case), each in zip(some, arrays, strict=True)])
        for (sample, case), of in zip(some, attempt(program, arrays) or [], strict=False):
            if of is not None:
                done = len(wrong)
                attempt(compare, name, sample, case, *of)
                counts["compared"] += len(wrong) == done
    return counts, wrong[0] if wrong else None


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_every_operator_gives_what_torch_gives_or_names_itself(part):
    names = sorted(database())[part::PARTS]
    with x64():
        found = {name: outcome(name, database()[name]) for name in names}
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    refused = {name for name, (counts, _) in found.items() if counts["refused"]}
    if VERSION == (2, 13):
        assert refused - set(IN_PART) == set(REFUSED.split()) & set(names)
    assert {name for name, (counts, _) in found.items() if counts["by value"]} == BY_VALUE & set(names)
    assert sum(counts["compared"] for counts, _ in found.values()) > len(names)


def test_a_wrong_operator_is_caught(monkeypatch):
    cosine = torch_calls.OPS[torch.cos]
    monkeypatch.setitem(torch_calls.OPS, torch.cos, cosine._replace(handler=lambda x: 1.01 * jax.numpy.cos(x)))
    with x64():
        assert "Mismatched elements" in (outcome("cos", database()["cos"])[1] or "")
        monkeypatch.undo()
        assert outcome("cos", database()["cos"])[1] is None
