"""A step that raises during its preparation leaves nothing behind that a later step relies on."""

import copy
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import optax
import pytest
import safetensors.torch
import torch
from sampling import sampled

import bridge
import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

FOLDERS = tuple(os.path.dirname(package.__file__) + os.sep for package in (bridge, torch_api))
# Files whose lines call the update or enter and leave contexts.
UPDATES = os.path.join("_runtime", "execute.py"), os.path.join("_train", "call.py")
CONTEXTS = os.path.join("_runtime", "transaction.py"), os.path.join("bridge", "_process.py")
MEMORY_FOLDER = os.path.join(os.path.dirname(bridge.__file__), "_memory") + os.sep  # where construction moves parameters
SHAPES = [(5, 4)] * 4 + [(90, 90), (7,)]


def build(cls, momentum=0.9, shapes=SHAPES):
    """Return parameters and their optimizer after one step; some parameters share a bucket, and every other one has half the lr."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    opt = cls([{"params": named[0::2]}, {"params": named[1::2], "lr": 0.5}], lr=1.0, momentum=momentum)
    step(params, opt)
    return params, opt


def step(params, opt, live=None):
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, i + 1.0) if live is None or i in live else None
    opt.step()


def test_files_with_uncounted_lines_exist():
    folder = os.path.dirname(bridge.__file__)
    assert all(
        os.path.exists(os.path.join(os.path.dirname(folder) if file.startswith("bridge") else folder, file)) for file in UPDATES + CONTEXTS
    )


class LineError(Exception):
    pass


def fail_at(line, function, *arguments, folders=FOLDERS):
    """Call a function and raise an error at the given line of its preparation; return the number of lines and whether it returned.

    Lines that enter or leave a context, and all lines from the update on, are not counted.
    """
    count, updates = 0, False

    def local(frame, event, argument):
        nonlocal count, updates
        file = frame.f_code.co_filename
        updates = updates or (frame.f_code.co_name == "run" and file.endswith(UPDATES))
        if event == "line" and not updates and not file.endswith(CONTEXTS):
            count += 1
            if count == line:
                sys.settrace(None)
                raise LineError
        return local

    traced = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(folders) else None)
    try:
        function(*arguments)
    except LineError:
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


@pytest.mark.parametrize("change", sampled([flip, replace, exchange, edit_state, add_options]))
def test_step_that_failed_in_preparation_is_prepared_again(change):
    for _ in range(2):  # the first round compiles
        params, opt = build(torch_api.MaskedSGD)
        change(params, opt)
        lines, _ = fail_at(None, step, params, opt)
    for line in range(7, lines - 20, lines // 6):
        (params, opt), (expected, theirs) = build(torch_api.MaskedSGD), build(torch.optim.SGD)
        for tensors, optimizer in ((params, opt), (expected, theirs)):
            change(tensors, optimizer)
        before = [p.clone() for p in params]
        assert not fail_at(line, step, params, opt)[1]
        assert all(map(torch.equal, params, before))
        for live in (None, (0, 2, 4)):
            step(params, opt, live)
            step(expected, theirs, live)
        assert all(map(torch.allclose, params, expected)), (change, line)
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(opt.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])


def add_group(params, opt):
    params.append(torch.nn.Parameter(torch.ones(5, 4)))
    opt.add_param_group({"params": [("p6", params[-1])], "lr": 0.25})


def freeze(params, opt):
    opt.set_trainable([params[1]], False)


def load(params, opt):
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["maximize"] = True
    for fields in saved["state"].values():
        fields["momentum_buffer"] += 1.0
    opt.load_state_dict(saved)


@pytest.mark.parametrize("call", [add_group, freeze, load])
def test_failed_call_changes_nothing(call):
    for _ in range(2):
        params, opt = build(torch_api.MaskedSGD)
        lines, _ = fail_at(None, call, params, opt)
    for line in range(5, lines - 20, lines // 6):
        (params, opt), (expected, theirs) = build(torch_api.MaskedSGD), build(torch.optim.SGD)
        assert not fail_at(line, call, params, opt)[1]
        del params[6:]
        for live in (None, (0, 2, 4)):
            step(params, opt, live)
            step(expected, theirs, live)
        assert [len(group["params"]) for group in opt.param_groups] == [3, 3], line
        assert all(map(torch.allclose, params, expected)), (call, line)
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(opt.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])


@pytest.mark.fast_path
def test_failed_construction_affects_no_later_optimizer(tmp_path):
    params = []  # kept, so that each file has addresses of its own

    def build_from_file():
        path = tmp_path / f"{len(params)}.safetensors"
        safetensors.torch.save_file({"w": torch.ones(4, 4)}, path)
        params.append(torch.nn.Parameter(safetensors.torch.load_file(path)["w"]))
        return torch_api.MaskedSGD(params[-1:], lr=0.1)

    def check():
        for line in range(1, 100):
            assert not fail_at(line, build_from_file, folders=MEMORY_FOLDER)[1]
            (row,) = build_from_file().report().rows
            assert row["write-back"] == "inplace", line

    # In a thread of its own: with Python 3.11 a trace function that raises can leave a handled exception behind for its thread.
    with ThreadPoolExecutor(1) as executor:
        executor.submit(check).result()
    assert sys.exception() is None


def test_other_gradients_work_after_an_error_in_their_first_step():
    for _ in range(2):
        params, opt = build(torch_api.MaskedSGD)
        lines, _ = fail_at(None, step, params, opt, (0, 2, 5))
    for line in range(3, lines - 20, lines // 6):
        (params, opt), (expected, theirs) = build(torch_api.MaskedSGD), build(torch.optim.SGD)
        assert not fail_at(line, step, params, opt, (0, 2, 5))[1]
        for live in ((0, 2, 5), None):
            step(params, opt, live)
            step(expected, theirs, live)
        assert all(map(torch.allclose, params, expected)), line


def build_train_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    opt = torch_api.MaskedAdam(model.parameters(), lr=0.1)
    return model, opt, torch_api.JaxTrainStep(model, lambda m, x: m(x).square().mean(), opt)


@pytest.mark.usefixtures("unoptimized_training")
def test_train_step_that_failed_in_preparation_is_prepared_again():
    def change(model, opt):
        opt.param_groups[0]["maximize"] = True
        model[0].bias.data = model[0].bias.data.clone()
        model[2].weight.requires_grad_(False)

    x = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    expected, theirs, call = build_train_step()
    call(x)
    change(expected, theirs)
    lines, _ = fail_at(None, call, x)
    call(x)
    for line in (200, lines // 5, lines // 3, lines // 2):
        model, opt, call = build_train_step()
        call(x)
        change(model, opt)
        before = copy.deepcopy(model.state_dict())
        assert not fail_at(line, call, x)[1]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        call(x)
        call(x)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], msg=f"{name} after an error at line {line}")


@pytest.mark.usefixtures("unoptimized_training")
def test_train_step_checks_its_module_again_after_an_error():
    model, opt, call = build_train_step()
    x = torch.ones(3, 4)
    call(x)
    model.append(torch.nn.Linear(4, 4))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"3\.weight"):
            call(x)
    del model[3]
    call(x)
    assert float(opt.state[model[0].weight]["step"]) == 2.0


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
def test_step_continues_after_the_cause_of_an_error_is_fixed(mistake, remedy, shape):
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


def test_refused_extra_arguments_are_not_remembered():
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
