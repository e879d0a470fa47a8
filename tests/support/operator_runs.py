"""torch's operator database (OpInfo): run its samples in eager torch and in traced code, and compare the two."""

import functools
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from bad_inputs_modules import Applies
from oracles import jitted
from torch.utils import _pytree as pytree

import bridge
from bridge._interop.dtypes import TORCH_DTYPES

TOGETHER = 8  # samples per compiled program, at most
# Kinds of samples and the dtype of each. Most code is float32.
KINDS = {
    "float32": torch.float32,
    "int64": torch.int64,
    "complex64": torch.complex64,
    "bfloat16": torch.bfloat16,
    "extremal": torch.float32,  # reference inputs with infinities, NaN, large numbers and negative zeros
    "complex results": torch.float32,  # gradients through them
}
LEFT_OUT = "sparse.", "jiterator"  # operators without dense tensors, or not for a CPU
LARGE = 1000


def seeded(seed=1234):
    """Seed as torch does before each sample, but only the CPU: for each missing device torch would store the whole stack as text."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@functools.cache
def database(dtype=torch.float32):
    """Return the operators that have samples of this dtype, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    for module in (common_utils, core):  # torch searches the whole stack for a test function, which is slow and finds none here
        module.extract_test_fn = lambda: None
    if not torch.cuda.is_available():
        common_utils.set_rng_seed = seeded
    named = {(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name): op for op in op_db}
    return {name: op for name, op in named.items() if dtype in op.supported_dtypes("cpu") and not name.startswith(LEFT_OUT)}


def is_extremal(sample):
    """Return whether a sample has a nonfinite number, a large number or a negative zero."""
    found = (x for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor))
    return any((~x.isfinite() | (x.abs() >= LARGE) | ((x == 0) & x.signbit())).any() for x in found if x.is_floating_point())


def samples_of(op, kind):
    torch.manual_seed(0)
    if kind == "extremal":
        return [sample for sample in op.reference_inputs("cpu", KINDS[kind], requires_grad=False) if is_extremal(sample)]
    return list(op.sample_inputs("cpu", KINDS[kind], requires_grad=False))


class Case(NamedTuple):
    """A sample in eager torch: its operator as a function of tensors, the input tensors, the outputs and their gradients.

    `function` takes as `constant` a function that turns the other tensors of the sample into constants. `at` lists the outputs that have
    gradients. `slopes` holds the gradients with respect to the inexact tensors of `given`.
    """

    function: Callable
    given: list
    out: list
    at: list
    weights: list
    slopes: tuple


def is_inexact(x):
    return x.is_floating_point() or x.is_complex()


def function_of(op, sample, kind):
    """Return the operator as a function of the sample's inexact tensors (for int64 samples: also of int64 tensors), and these tensors."""
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    at = [i for i in tensors if is_inexact(flat[i]) or flat[i].dtype == KINDS[kind] == torch.int64]

    def function(*given, constant=lambda x: x):
        leaves = list(flat)
        for i in tensors:
            if i not in at:
                leaves[i] = constant(flat[i])
        for i, x in zip(at, given, strict=True):
            leaves[i] = x
        first, args, kwargs = pytree.tree_unflatten(leaves, spec)
        return op(first, *args, **kwargs)

    return function, [flat[i].detach().resolve_conj().resolve_neg().clone().requires_grad_(is_inexact(flat[i])) for i in at]


def weights_for(x):
    return (torch.linspace(1, 2, x.numel()).reshape(x.shape) * ((1 + 0.5j) if x.is_complex() else 1)).to(x.dtype)


def eager(op, sample, kind, slopes=True, through_complex=True):
    """Run the sample in eager torch; return None if torch refuses it or there is nothing to compare."""
    function, given = function_of(op, sample, kind)
    try:
        out = [x for x in pytree.tree_leaves(function(*given)) if isinstance(x, torch.Tensor)]
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return None
    if not given or not out:
        return None
    known = [i for i, x in enumerate(out) if x.requires_grad and x.dtype in TORCH_DTYPES.values()]  # jax has no complex32
    at = [i for i in known if slopes and (through_complex or not out[i].is_complex())]
    weights, wanted = [weights_for(out[i]) for i in at], [x for x in given if x.requires_grad]
    try:
        found = torch.autograd.grad([out[i] for i in at], wanted, weights, allow_unused=True) if at else ()
    except (RuntimeError, NotImplementedError):
        at, weights, found = [], [], ()
    return Case(function, given, out, at, weights, found)


def ours(case):
    """Return the operator of a case as a function of arrays."""
    pure = bridge.module_function(Applies(case.function))
    return lambda *arrays: pure({}, *arrays, rng=jax.random.key(0))


def traced(case, arrays, as_jax=ours):
    """Return the outputs of a case and their gradients inside a trace."""
    pure, by = as_jax(case), [bridge.to_jax(w) for w in case.weights]
    wanted = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def results(inexact):
        given = list(arrays)
        for i, x in zip(wanted, inexact, strict=True):
            given[i] = x
        return [x for x in jax.tree.leaves(pure(*given)) if isinstance(x, jax.Array | np.ndarray)]

    def total(inexact):
        found = results(inexact)
        return sum(jnp.real(found[i] * jnp.conj(w)).sum() for i, w in zip(case.at, by, strict=True)), found

    if not case.at:
        return results([arrays[i] for i in wanted]), ()
    (_, found), grads = jax.value_and_grad(total, has_aux=True)([arrays[i] for i in wanted])
    return found, [jnp.conj(x) for x in grads]  # jax's gradients are the conjugates of torch's


def check_close(found, theirs, kind, what, exact):
    """Raise a `MismatchError` if numbers differ; half types pass if they are as near to the exact result as torch's."""
    given = theirs
    found, half = np.asarray(found), theirs.dtype in (torch.bfloat16, torch.float16)
    if half:
        found, theirs = found.astype(np.float32), theirs.float()
    theirs = theirs.numpy()
    largest = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
    rtol, atol = (2e-2, 2e-2) if half or kind == "bfloat16" else (1e-3, 1e-4)
    try:
        np.testing.assert_allclose(found, theirs, rtol=rtol, atol=atol * largest)
    except AssertionError as error:
        if not (kind == "bfloat16" and given.dtype == torch.bfloat16 and is_nearer(found, given, exact)):
            raise MismatchError(f"{what}{error}") from None


class MismatchError(AssertionError):
    """A result differs from torch's."""


def exact(case):
    """Return outputs and gradients of the case in eager torch in float32, the exact reference for half types."""
    given = [x.detach().float().requires_grad_() for x in case.given]
    out = [x for x in pytree.tree_leaves(case.function(*given)) if isinstance(x, torch.Tensor)]
    slopes = torch.autograd.grad([out[i] for i in case.at], given, [w.float() for w in case.weights], allow_unused=True) if case.at else ()
    return out, [torch.zeros_like(x) if slope is None else slope for x, slope in zip(given, slopes, strict=bool(case.at))]


def is_nearer(found, theirs, exact):
    """Return whether our results are about as near to the exact ones as torch's are."""
    try:
        numbers = exact().detach().float()
    except (RuntimeError, NotImplementedError):
        return False
    found, theirs, numbers = (np.asarray(x, np.float32) for x in (found, theirs.detach().float(), numbers))
    return bool(np.abs(found - numbers).max() <= 1.5 * np.abs(theirs - numbers).max())


def compare(case, found, grads, kind, values=True):
    """Raise a `MismatchError` if outputs or gradients differ; without `values` compare only shapes and dtypes."""
    for what, ours, theirs in (
        ("shapes", [tuple(x.shape) for x in found], [tuple(x.shape) for x in case.out]),
        ("dtypes", [TORCH_DTYPES[str(x.dtype)] for x in found], [x.dtype for x in case.out]),
    ):
        if ours != theirs:
            raise MismatchError(f"{what}: {ours}, torch's {theirs}")
    if not values:
        return
    for i, (x, theirs) in enumerate(zip(found, case.out, strict=True)):
        check_close(x, theirs.detach().resolve_conj().resolve_neg(), kind, "", lambda i=i: exact(case)[0][i])
    wanted = [x for x in case.given if x.requires_grad] if case.at else []
    for i, (x, theirs, like) in enumerate(zip(grads, case.slopes, wanted, strict=True)):
        theirs = torch.zeros(()) if theirs is None else theirs.to_dense() if theirs.is_sparse else theirs
        theirs = torch.zeros_like(like.detach()) + theirs  # the sum materializes torch's zero tensors without memory
        check_close(x, theirs.resolve_conj().resolve_neg(), kind, "gradient: ", lambda i=i: exact(case)[1][i])


def refusal(name, error):
    """Return the category of a refusal by maskbridge; None if the error is not a refusal."""
    if isinstance(error, NotImplementedError):
        return "refused" if "has no implementation in jax" in str(error) else "other"
    asks = isinstance(error, jax.errors.ConcretizationTypeError)
    return "by value" if asks and re.search(rf"torch\.(functional\.)?{name} in .* asks for values", str(error)) else None


class Outcome(NamedTuple):
    """Result of an operator's samples: counts by category (compared, skipped, refused, by value), and the mismatches.

    `wrong` maps "forward" or "gradient" to the first difference of that part.
    """

    counts: Counter
    wrong: dict


def outcome(name, op, kind="float32", limit=3, drawn=(), no_slopes=(), as_jax=ours, refusal=refusal, through_complex=True):
    """Run about `limit` samples of an operator, spread over its list; all samples if `limit` is 0.

    Args:
      drawn: operators of which only shapes and dtypes are compared.
      no_slopes: operators whose gradients are not compared.
    """
    samples = samples_of(op, kind)
    counts, wrong = Counter(), {}

    def attempt(call, *arguments, **keywords):
        """Return the result of a call; after an error count its category and return None."""
        try:
            return call(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - of any operator, to name all that differ
            if word := refusal(name, error):
                counts[word] += 1
            else:
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                wrong.setdefault("gradient" if "gradient: " in text[:40] else "forward", text)
        return None

    cases = []
    for sample in samples[:: max(1, len(samples) // limit) if limit else 1]:
        case = attempt(eager, op.op, sample, kind, name not in no_slopes, through_complex)
        if case is None:
            counts["skipped"] += 1
        else:
            cases.append((sample, case))
    # One program for several samples: XLA takes longer to start a compilation than to compile most operators.
    for some in (cases[i : i + TOGETHER] for i in range(0, len(cases), TOGETHER)):
        arrays = [[bridge.to_jax(x.detach(), copy=None) for x in case.given] for _, case in some]
        program = jitted(lambda arrays, some=some: [attempt(traced, c, each, as_jax) for (_, c), each in zip(some, arrays, strict=True)])
        for (sample, case), of in zip(some, attempt(program, arrays) or [], strict=False):
            if of is not None:
                values = name not in drawn and not sample.kwargs.get("dropout_p")
                counts["compared"] += attempt(lambda *given: compare(*given) or True, case, *of, kind, values) is not None
    return Outcome(counts, wrong)
