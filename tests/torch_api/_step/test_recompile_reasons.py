"""A step that compiles again warns, and names the reason, the parameters and the caller."""

import warnings

import pytest
import torch
from oracles import clones, random_grads, same, set_grads
from packing import assert_near, run, step_all

import torch_api
from torch_api import CompilationWarning

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


def named(shape):
    params = [torch.nn.Parameter(0.1 * torch.randn(shape)) for _ in range(3)]
    return [(f"w{i}", p) for i, p in enumerate(params)], params


def thaw(optimizer, params):
    optimizer.set_trainable("w1", True)


def freeze(optimizer, params):
    optimizer.set_trainable("w2", False)


def amsgrad(optimizer, params):
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()


def maximize(optimizer, params):
    optimizer.param_groups[0]["maximize"] = True


def other_dtype(optimizer, params):
    params[0].grad, params[0].data = None, params[0].data.to(torch.float64)


def clip(optimizer, params):
    optimizer.max_grad_norm = 1.0


def scaled(optimizer, params):
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)


def without_gradient(optimizer, params):
    params[2].requires_grad_(False)


CAUSES = {
    "thawed": (thaw, r"it now updates 'w1'$"),
    "frozen": (freeze, r"it no longer updates 'w2' \(frozen or without gradient\)$"),
    "requires_grad": (without_gradient, r"it no longer updates 'w2' \(frozen or without gradient\)$"),
    "amsgrad": (amsgrad, r"amsgrad is True, was False, of 'w0', 'w2'"),
    "maximize": (maximize, r"maximize is True, was False, of 'w0', 'w2'$"),
    "dtype": (other_dtype, r"the dtype is float64, was float32, of 'w0'"),
    "max_grad_norm": (clip, r"max_grad_norm is set now$"),
    "scaled": (scaled, r"the gradients are those of a scaled loss$"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_compilation_warning_names_the_cause(case):
    change, cause = CAUSES[case]
    pairs, params = named((3, 120 + list(CAUSES).index(case)))  # a shape that no other test uses
    ours = torch_api.MaskedAdamW(pairs, mask=["w0", "w2"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([(ours, params)], 2)
    compiled = ours.cache_info().compilations
    change(ours, params)
    with pytest.warns(CompilationWarning, match=rf"^MaskedAdamW\.step compiled another program: .*{cause}") as caught:
        run([(ours, params)], 1)
    assert len(caught) == 1
    assert ours.cache_info().compilations == compiled + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([(ours, params)], 2)


@pytest.mark.parametrize(("before", "after", "counts"), [(0.0, 0.9, "1, was 0"), (0.9, 0.0, "0, was 1")])
def test_compilation_warning_says_that_momentum_adds_or_removes_state(before, after, counts):
    pairs, params = named((3, 134 + int(after == 0.0)))  # shapes that no other test uses
    optimizer = torch_api.MaskedSGD(pairs, lr=0.1, momentum=before)
    run([(optimizer, params)], 1)
    optimizer.param_groups[0]["momentum"] = after
    with pytest.warns(CompilationWarning, match=rf"program: the number of state arrays is {counts}, of 'w0', 'w1', 'w2'$"):
        run([(optimizer, params)], 1)


def test_compilation_warning_points_to_the_caller_of_step():
    pairs, params = named((3, 131))
    ours = torch_api.MaskedAdamW(pairs)
    run([(ours, params)], 1)
    set_grads(params, [None, *random_grads(params[1:])])
    with pytest.warns(CompilationWarning) as caught:
        ours.step()
    assert caught[0].filename == __file__


def test_warning_raised_as_an_error_changes_nothing():
    pairs, params = named((3, 132))
    others = clones(params)
    start = clones(params)
    ours, theirs = torch_api.MaskedAdamW(pairs, lr=0.01), torch.optim.AdamW(others, lr=0.01)
    run([(ours, params), (theirs, others)], 1)
    grads = [None, *random_grads(params[1:])]
    set_grads(params, grads)
    values = clones(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CompilationWarning):
            ours.step()
        assert same(params, values)
        step_all([(ours, params), (theirs, others)], grads)
    assert_near(params, others, start)
