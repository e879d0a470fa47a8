"""A step that fails or is interrupted while it prepares itself changes nothing that a later step relies on."""

import itertools
import os
import signal
import sys

import jax
import optax
import pytest
import torch

import bridge
import torch_api

FOLDERS = tuple(os.path.dirname(package.__file__) + os.sep for package in (bridge, torch_api))
SHAPES = [(5, 4)] * 4 + [(90, 90), (7,)]


def build(cls, momentum=0.9, shapes=SHAPES):
    """Parameters, of which some are updated together and every other one has half the rate, and their optimizer after a step."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    opt = cls([{"params": named[0::2]}, {"params": named[1::2], "lr": 0.5}], lr=1.0, momentum=momentum)
    step(params, opt)
    return params, opt


def step(params, opt, live=None):
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, i + 1.0) if live is None or i in live else None
    opt.step()


def interrupt_at(line, function):
    """Call a function, with SIGINT at one of the lines of the library that it runs: the number of lines, and whether it returned."""
    count = 0

    def local(frame, event, argument):
        nonlocal count
        count += event == "line"
        if event == "line" and count == line:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return local

    traced = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(FOLDERS) else None)
    try:
        function()
    except KeyboardInterrupt:
        return count, False
    finally:
        sys.settrace(traced)
    return count, True


def flip(params, opt):
    opt.param_groups[1]["maximize"] = not opt.param_groups[1]["maximize"]


def replace(params, opt):
    for p in params[:2] + params[4:5]:
        p.data = p.data.clone()


def exchange(params, opt):
    params[0].data, params[3].data = params[3].data, params[0].data


def edit_state(params, opt):
    opt.state[params[1]]["momentum_buffer"] = torch.full(SHAPES[1], 0.25)


def add_options(params, opt):
    if isinstance(opt, torch_api.MaskedSGD):
        opt.max_grad_norm, opt.ema_decay = 1e9, 0.5


@pytest.mark.parametrize("change", [flip, replace, exchange, edit_state, add_options])
def test_a_step_that_was_interrupted_while_it_prepared_itself_is_made_anew(change):
    params, opt = build(torch_api.MaskedSGD)
    change(params, opt)
    lines, _ = interrupt_at(None, lambda: step(params, opt))  # compiles
    for line in range(7, lines, max(lines // 12, 1)):
        (params, opt), (expected, theirs) = build(torch_api.MaskedSGD), build(torch.optim.SGD)
        for tensors, optimizer in ((params, opt), (expected, theirs)):
            change(tensors, optimizer)
        before = params[4].clone()
        interrupt_at(line, lambda params=params, opt=opt: step(params, opt))
        if not torch.equal(params[4], before):  # the signal came behind the update
            step(expected, theirs)
        for live in (None, (0, 2, 4)):
            step(params, opt, live)
            step(expected, theirs, live)
        assert all(map(torch.allclose, params, expected)), (change, line)
        assert all(
            torch.allclose(opt.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
            for p, q in zip(params, expected, strict=True)
        )


def test_another_set_of_gradients_after_an_interrupt_in_its_first_step():
    params, opt = build(torch_api.MaskedSGD)
    lines, _ = interrupt_at(None, lambda: step(params, opt, (0, 2, 5)))
    for line in range(3, lines, max(lines // 12, 1)):
        (params, opt), (expected, theirs) = build(torch_api.MaskedSGD), build(torch.optim.SGD)
        before = params[5].clone()
        interrupt_at(line, lambda params=params, opt=opt: step(params, opt, (0, 2, 5)))
        if not torch.equal(params[5], before):
            step(expected, theirs, (0, 2, 5))
        for live in ((0, 2, 5), None):
            step(params, opt, live)
            step(expected, theirs, live)
        assert all(map(torch.allclose, params, expected)), line


def thaw_expanded(params, last):
    last.requires_grad_(True)
    last.grad = torch.ones(last.shape)


def clone(params, last):
    last.data = torch.zeros(last.shape)


def freeze_again(params, last):
    last.requires_grad_(False)
    last.grad = None


def share(params, last):
    params[5].data = params[0].data


def separate(params, last):
    params[5].data = torch.zeros(params[5].shape)


MISTAKES = [(thaw_expanded, clone), (thaw_expanded, freeze_again), (share, separate)]


@pytest.mark.parametrize(("mistake", "remedy"), MISTAKES)
@pytest.mark.parametrize("shape", [(70, 40), (5, 4)])
def test_a_step_goes_on_once_the_cause_of_an_error_was_put_right(mistake, remedy, shape):
    params = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(6)]
    last = torch.nn.Parameter(torch.zeros(1).expand(shape), requires_grad=False)
    named = [(f"p{i}", p) for i, p in enumerate([*params, last])]
    opt = torch_api.MaskedSGD(named, lr=1.0, lr_scale=[("p[135]", 0.5), ("*", 1.0)])
    step(params, opt)
    mistake(params, last)
    before = [p.clone() for p in params]
    with pytest.raises(ValueError, match=r"param\.(clone\(\)|data)"):
        step(params, opt)
    assert all(map(torch.equal, params, before))
    assert len(opt.state_dict()["param_groups"][0]["params"]) == 7
    remedy(params, last)
    with torch.no_grad():
        for p in params:
            p.zero_()
    step(params, opt)
    assert [p[0, 0].item() for p in params] == [-1.0, -1.0, -3.0, -2.0, -5.0, -3.0]


def test_arguments_that_are_refused_are_forgotten():
    def init(params):
        return optax.EmptyState()

    def update(updates, state, params=None, *, factor=1.0, **extra):
        if extra:
            raise ValueError(f"unknown arguments {sorted(extra)}")
        return jax.tree.map(lambda u: -factor * u, updates), state

    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    opt = torch_api.OptaxOptimizer(params, optax.GradientTransformationExtraArgs(init, update))
    for p, value in zip(params, itertools.count(1.0)):
        p.grad = torch.full((3,), value)
    opt.step()
    with pytest.raises(ValueError, match="unknown arguments"):
        opt.step(wrong=1.0)
    opt.step()
    opt.step(factor=2.0)
    assert [p[0].item() for p in params] == [-4.0, -8.0]
