"""A step runs through torch's wrapper (hooks, profiler marks) if a hook or a profiler listens, and bypasses it otherwise."""

import sys
import threading

import pytest
import torch
from oracles import random_grads, random_params, set_grads
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bridge._compat.torch import step_observers
from torch_api import MaskedAdamW
from torch_api._step import hooks

MARK = "Optimizer.step#{}.step"


def optimizer(cls=MaskedAdamW):
    params = random_params(shapes=[(4, 3), (3,)])
    made = cls(params, lr=0.1)
    set_grads(params, random_grads(params))
    made.step()
    return made


def runs_torchs_wrapper(call):
    """Return whether the call runs the code that torch wraps around each step."""
    found = []

    def watch(frame, event, _):
        if event == "call" and "profile_hook_step" in frame.f_code.co_qualname and "torch_api" not in frame.f_code.co_filename:
            found.append(frame.f_code)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return bool(found)


def test_step_without_listeners_bypasses_the_wrapper():
    assert not hooks.GLOBAL_HOOKS.is_any_thread_profiled(), "torch lacks the attributes that show listeners"
    assert not runs_torchs_wrapper(optimizer().step)


@pytest.mark.parametrize("before", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["of all optimizers", "of its own"])
def test_hook_is_called_until_it_is_removed(before, everywhere):
    own, calls = optimizer(), []
    register = {
        (True, True): register_optimizer_step_pre_hook,
        (False, True): register_optimizer_step_post_hook,
        (True, False): own.register_step_pre_hook,
        (False, False): own.register_step_post_hook,
    }[before, everywhere]
    handle = register(lambda *given: calls.append((given[0] is own, len(given[1]), given[2])))
    try:
        assert runs_torchs_wrapper(lambda: own.step(closure=None)) is before
    finally:
        handle.remove()
    assert calls == [(True, 1, {"closure": None})]
    assert not runs_torchs_wrapper(own.step)
    assert len(calls) == 1


@pytest.mark.parametrize("cls", [torch.optim.AdamW, MaskedAdamW])
@pytest.mark.parametrize("everywhere", [True, False], ids=["of all optimizers", "of its own"])
def test_hook_registered_during_a_step_is_called_after_it(cls, everywhere):
    own, calls, handles = optimizer(cls), [], []

    def closure():
        if not handles:
            register = register_optimizer_step_post_hook if everywhere else own.register_step_post_hook
            handles.append(register(lambda opt, args, kwargs: calls.append((opt is own, args[0] is own, len(args), kwargs))))
        return torch.tensor(1.0)

    try:
        own.step(closure)
        own.step(closure=closure)
    finally:
        handles[0].remove()
    assert calls == [(True, True, 2, {}), (True, True, 1, {"closure": closure})]


def marks(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return [event.name for event in profile.events() if event.name.startswith("Optimizer.step#")]


def test_profiler_shows_the_mark_of_each_step():
    own = optimizer()
    assert marks(lambda: [own.step() for _ in range(3)]) == [MARK.format("MaskedAdamW")] * 3


def test_profiler_of_another_thread_is_served_as_by_torch():
    own, listened = optimizer(), []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        thread = threading.Thread(target=lambda: listened.append(runs_torchs_wrapper(own.step)))
        thread.start()
        thread.join()
    assert listened == [True]


def test_autograd_profiler_shows_the_mark():
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        optimizer().step()
    assert MARK.format("MaskedAdamW") in {event.name for event in profile.function_events}


@pytest.mark.parametrize("missing", ["_profiler_enabled", "_optimizer_step_pre_hooks"])
def test_every_step_runs_the_wrapper_if_torch_hides_its_listeners(monkeypatch, missing):
    monkeypatch.delattr(torch.autograd, missing, raising=False)
    monkeypatch.delitem(torch.optim.Optimizer.__annotations__, missing, raising=False)
    found = hooks.GlobalHooks(*step_observers())
    assert found.is_any_thread_profiled()
    monkeypatch.setattr(hooks, "GLOBAL_HOOKS", found)

    class Other(MaskedAdamW):
        def step(self, closure=None):
            return super().step(closure)

    assert runs_torchs_wrapper(optimizer(Other).step)


def test_subclass_with_its_own_step_is_wrapped_as_in_torch():
    listened = []
    for base in (torch.optim.AdamW, MaskedAdamW):
        optimizer(base)  # torch wraps the step of a class when it is first made

        class OwnStep(base):
            def step(self, closure=None):
                return super().step(closure)

        own, calls = optimizer(OwnStep), []
        own.register_step_post_hook(lambda opt, *_, calls=calls: calls.append(type(opt).__name__))
        own.step()
        listened.append((calls, marks(own.step)))
    assert listened[0] == listened[1]
    assert listened[0][0]


def test_error_of_a_step_is_raised_and_the_next_step_works():
    own = optimizer()
    own.param_groups[0]["lr"] = "fast"
    with pytest.raises((TypeError, ValueError)):
        own.step()
    own.param_groups[0]["lr"] = 0.1
    own.step()
