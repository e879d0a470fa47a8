"""Special functions in traced torch code: at special points, of integers, and under the names of `torch.special`."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bad_inputs_modules import Applies
from oracles import jitted
from traced_oracle import compare, compare_on_integers

import bridge

pytestmark = pytest.mark.quick

POINTS = {
    "digamma": (torch.digamma, [-12.3, -0.7, 0.4, 0.5, 3.0]),
    "polygamma": (lambda x: x.polygamma(2), [-12.3, -0.7, 0.4, 0.5, 3.0]),
    "logit": (lambda x: torch.logit(x, 0.1), [0.0, 0.1, 0.5, 0.9, 1.0]),
    "entr": (torch.special.entr, [0.0, 0.5, 2.0]),
    "i0e": (torch.special.i0e, [0.0, -1.0, 30.0]),
    "i1": (torch.special.i1, [0.0, -1.0, 3.0]),
    "xlog1py": (lambda x: torch.special.xlog1py(x, 2.0), [0.0, 1.0]),
}


@pytest.mark.parametrize("name", POINTS)
def test_derivatives_at_special_points_match_torch(name):
    function, at = POINTS[name]
    compare(function, torch.tensor(at))


INTEGERS = {
    "i0": torch.i0,
    "float_power": lambda x: torch.float_power(x, 2),
    "ldexp": lambda x: torch.ldexp(x, x),
    "heaviside": lambda x: torch.heaviside(x, x),
    "signbit": torch.signbit,
    "special.expm1": torch.special.expm1,
    "special.round": lambda x: torch.special.round(x / 3),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_dtypes_match_torch(name):
    compare_on_integers(INTEGERS[name])


def test_every_special_function_with_a_derivative_is_found():
    given = {"logsumexp": (0,), "softmax": (0,), "log_softmax": (0,), "multigammaln": (1,), "xlogy": (0.5,), "xlog1py": (0.5,)}
    plain = "digamma psi gammaln expm1 exp2 logit sinc erf erfc erfinv expit log1p i0 i0e i1 i1e ndtr ndtri log_ndtr entr"
    given |= dict.fromkeys(plain.split(), ())
    x = torch.tensor([0.2, 0.4, 0.7])

    def every(x):
        return [getattr(torch.special, name)(x, *args) for name, args in given.items()]

    found = jitted(bridge.module_function(Applies(every)))({}, jnp.asarray(x.numpy()))
    for name, ours, theirs in zip(given, found, every(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
