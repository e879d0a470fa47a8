"""Patterns of training loops: optimizers inside the backward pass, forked data loaders, changing sets of gradients."""

import gc
import os
import re
import warnings

import numpy as np
import pytest
import torch
from oracles import clones, movement_error, random_grads, random_params, run_pair, set_grads
from sampling import sampled

import torch_api
from bridge._runtime import cache

pytestmark = pytest.mark.unoptimized

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"momentum": 0.9}),
}


# ---------------------------------------------------------------------- one optimizer per parameter, stepped inside the backward pass


class Deep(torch.nn.Module):
    """A module with 200 parameters of ten shapes."""

    def __init__(self, each=20):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(0.3 * torch.randn(n, n + 1)) for _ in range(each) for n in range(2, 12))

    def forward(self, x):
        return torch.stack([torch.tanh(w @ x[: w.shape[1]]).square().mean() for w in self.weights]).sum()


def in_backward(model, make):
    """Make one optimizer per parameter, which steps and frees the gradient as soon as it is computed."""
    optimizers = {p: make([p]) for p in model.parameters()}
    alive = []

    def hook(p):
        alive.append(sum(q.grad is not None for q in optimizers))
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    return optimizers, alive


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["AdamW", "SGD"]))
def test_optimizers_in_the_backward_pass_share_programs_and_move_as_one(name):
    ours, _, options = PAIRS[name]
    options = {"lr": 0.0123, **options}  # hyperparameters are not part of a program, so a program of another test may be reused
    model, twin = Deep(), Deep()
    twin.load_state_dict(model.state_dict())
    compiled = cache.compilations()
    optimizers, alive = in_backward(model, lambda params: ours(params, **options))
    whole = ours(twin.parameters(), **options)
    xs = torch.randn(4, 12)
    model(xs[0]).backward()
    assert cache.compilations() - compiled <= 10
    assert all(row["write-back"] == "inplace" for o in optimizers.values() for row in o.report().rows)
    assert len({p.data_ptr() for p in optimizers}) == 200
    for x in xs[1:]:
        model(x).backward()
    assert set(alive) == {1}, "a gradient outlived its hook"
    assert all(p.grad is None for p in optimizers)
    assert cache.compilations() - compiled <= 10
    for x in xs:
        whole.zero_grad()
        twin(x).backward()
        whole.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_parameters_outlive_their_optimizers():
    model = Deep(3)
    optimizers, _ = in_backward(model, lambda params: torch_api.MaskedAdam(params))
    model(torch.randn(12)).backward()
    values = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p._post_accumulate_grad_hooks.clear()
    del optimizers
    gc.collect()
    junk = [torch.full((n, n + 1), 7.0) for n in range(2, 12) for _ in range(50)]  # would reuse memory that was freed
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    del junk
    torch_api.MaskedSGD(model.parameters(), lr=0.1)
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


# ---------------------------------------------------------------------- autograd's own rules


def spoiled(cls):
    """Step between forward and backward of one graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = cls(model.parameters(), lr=0.1)
    set_grads(list(model.parameters()), random_grads(model.parameters()))
    loss = model(torch.ones(2, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        loss.backward()
    return re.sub(r"version \d+", "version n", str(caught.value))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("writeback", ["inplace", "copy"])
def test_step_between_forward_and_backward_raises_torchs_error(name, writeback):
    ours, theirs, _ = PAIRS[name]
    assert spoiled(lambda *args, **kwargs: ours(*args, writeback=writeback, **kwargs)) == spoiled(theirs)


@pytest.mark.parametrize("name", PAIRS)
def test_version_of_a_parameter_grows_only_with_a_gradient(name):
    seen = []
    for cls in PAIRS[name][:2]:
        params = random_params(shapes=[(3,), (4,)])
        optimizer = cls(params, lr=0.1)
        versions = [p._version for p in params]
        set_grads(params, [torch.ones(3), None])
        optimizer.step()
        seen.append([p._version > v for p, v in zip(params, versions, strict=True)])
    assert seen[0] == seen[1] == [True, False]


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_steps_work_as_in_torch_in_every_grad_mode(first, second):
    """The first step makes the state; state made under inference_mode also works outside of it, unlike torch's."""
    ends = []
    for cls, modes in ((torch_api.MaskedAdamW, (first, second)), (torch.optim.AdamW, ("no_grad", "no_grad"))):
        torch.manual_seed(0)
        params = random_params(shapes=[(4, 3), (4,)])
        optimizer = cls(params, lr=0.1)
        for mode in modes:
            set_grads(params, random_grads(params))
            with MODES[mode]():
                optimizer.step()
        ends.append(params)
        assert all(p.requires_grad and p.is_leaf and not p.is_inference() for p in params)
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    torch.nn.functional.linear(torch.ones(2, 3), *ends[0]).sum().backward()


@pytest.mark.parametrize("name", PAIRS)
def test_tied_parameter_gets_the_sum_of_its_gradients(name):
    ours, theirs, options = PAIRS[name]
    ends = []
    for cls in (ours, theirs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        start = model[0].weight.detach().clone()
        optimizer = cls(model.named_parameters(), lr=0.05, **options)
        for i in range(6):
            optimizer.zero_grad()
            model(torch.tensor([i % 5, 1, 2])).logsumexp(-1).sum().backward()
            optimizer.step()
        assert model[1].weight is model[0].weight
        assert len(optimizer.state_dict()["state"]) == 1
        ends.append(model[0].weight)
    assert movement_error(*ends, start) < 1e-5


# ---------------------------------------------------------------------- missing gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient")
@pytest.mark.parametrize("name", PAIRS)
def test_parameters_without_gradient_keep_bits_moments_and_count(name):
    """All shapes are equal, so that most subsets share a program."""
    ours, theirs, options = PAIRS[name]
    mine = random_params(shapes=[(4, 3)] * 4 + [(5,)] * 2)
    others, start = clones(mine), clones(mine)
    a, b = ours(mine, lr=0.01, **options), theirs(others, lr=0.01, **options)
    choose = np.random.default_rng(4)
    subsets = [tuple(choose.random(6) < choose.random()) for _ in range(20)]
    assert len(set(subsets)) > 10
    for subset in subsets:
        before = [(p.detach().clone(), {k: v.clone() for k, v in a.state.get(p, {}).items()}) for p in mine]
        run_pair(
            a, mine, b, others, 1, grads=lambda ps, subset=subset: [g if s else None for g, s in zip(random_grads(ps), subset, strict=True)]
        )
        for p, q, (value, state), has_grad in zip(mine, others, before, subset, strict=True):
            now = a.state.get(p, {})
            assert now.keys() == b.state.get(q, {}).keys()
            if "step" in now:
                assert now["step"] == b.state[q]["step"]
            if has_grad:
                assert not torch.equal(p, value)
            else:
                assert torch.equal(p, value)
                assert now.keys() == state.keys()
                assert all(torch.equal(now[k], state[k]) for k in state)
    assert max(map(movement_error, mine, others, start)) < 1e-5
    for p, q in zip(mine, others, strict=True):
        torch.testing.assert_close(dict(a.state[p]), dict(b.state[q]), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- processes


class Numbers(torch.utils.data.Dataset):
    def __init__(self, call=None):
        self.call = call

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if self.call is not None:
            self.call()
        return torch.tensor([float(i), float(os.getpid())], dtype=torch.float64)


@pytest.fixture
def forks():
    """Ignore the warning of jax and Python 3.12 about forks of a process with threads; as errors they would be lost in the handler."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said
    rest = [str(w.message) for w in said if "fork" not in str(w.message)]
    assert not rest


def test_forked_workers_load_while_the_optimizer_steps(forks):
    params = random_params(shapes=[(6, 5)])
    twins, start = clones(params), clones(params)
    ours, theirs = torch_api.MaskedAdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    run_pair(ours, params, theirs, twins, 2)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context="fork")
        seen = []
        for batch in loader:
            seen += batch.tolist()
            run_pair(ours, params, theirs, twins, 1)
        assert [i for i, _ in seen] == list(range(12))
        assert os.getpid() not in {int(pid) for _, pid in seen}
    run_pair(ours, params, theirs, twins, 2)
    assert movement_error(params[0], twins[0], start[0]) < 1e-5
    assert any("os.fork() was called" in str(w.message) for w in forks)


def test_persistent_workers_see_parameters_as_of_the_fork(forks):
    (p,) = random_params(shapes=[(3,)])
    optimizer = torch_api.MaskedSGD([p], lr=1.0)
    p.grad = torch.ones(3)
    optimizer.step()
    before = p.detach().clone()

    class Reads(Numbers):
        def __getitem__(self, i):
            return p.detach().clone()

    loader = torch.utils.data.DataLoader(Reads(), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    for _ in range(2):
        for seen in loader:
            assert torch.equal(seen, before)
        optimizer.step()
    torch.testing.assert_close(p.detach(), before - 2)


@pytest.mark.slow
def test_step_in_a_forked_worker_raises_and_the_parent_continues(forks):
    (p,) = random_params(shapes=[(3,)])
    optimizer = torch_api.MaskedSGD([p], lr=1.0)
    p.grad = torch.ones(3)
    optimizer.step()
    before = p.detach().clone()
    loader = torch.utils.data.DataLoader(Numbers(optimizer.step), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"forked after jax had started.*Start it with 'spawn'"):
        next(iter(loader))
    assert torch.equal(p, before)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 1)
