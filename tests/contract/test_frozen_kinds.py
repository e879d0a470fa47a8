"""Frozen parameters may have any dtype, layout and device; only trained parameters need a floating dtype and memory."""

import copy
import pickle
import warnings

import jax
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


class Wrapper(torch.Tensor):
    """A tensor subclass without memory of its own, as in quantization libraries."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Wrapper(args[0].inner.clone())
        raise NotImplementedError(func)


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8)


KINDS = {
    "uint8": lambda: torch.zeros(6, 1, dtype=torch.uint8),
    "int8": lambda: torch.zeros(3, 2, dtype=torch.int8),
    "int64": lambda: torch.arange(3),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "float8": lambda: torch.ones(3, 2).to(torch.float8_e4m3fn),
    "qint8": quantized,
    "meta": lambda: torch.zeros(3, 2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 1.0], size=(2, 2)),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "a subclass": lambda: Wrapper(torch.ones(2)),
}
CLASSES = {
    "AdamW": lambda params, **options: torch_api.MaskedAdamW(params, lr=0.1, **options),
    "a factory": lambda params, **options: torch_api.OptaxOptimizer(params, optax.lion, lr=0.1, **options),
    "all together": lambda params, **options: torch_api.OptaxOptimizer(
        params, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), **options
    ),
    "labels": lambda params, **options: torch_api.PartitionedOptimizer(params, {"x": optax.sgd(0.1)}, {"head": "x"}, **options),
    "pairs": lambda params: torch_api.MultiOptimizer(params, ("head.*", optax.sgd(0.1))),
}


def model(kind=None):
    torch.manual_seed(0)
    net = torch.nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about sparse rows
        net.base = None if kind is None else torch.nn.Parameter(KINDS[kind](), requires_grad=False)
    net.head = torch.nn.Linear(2, 2)
    return net


def step(net, optimizer):
    optimizer.zero_grad()
    net.head(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()


def bits(net):
    return [p.detach().numpy().copy() for p in net.head.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True], ids=["requires_grad=False", "and the mask"])
def test_parameters_beside_the_frozen_one_move_as_in_torch(kind, masked):
    net, theirs = model(kind), model()
    base = net.base
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1, **({"mask": "head.*"} if masked else {}))
    other = torch.optim.AdamW(theirs.named_parameters(), lr=0.1)
    for _ in range(3):
        step(net, optimizer)
        step(theirs, other)
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(bits(net), bits(theirs), strict=True))
    assert net.base is base
    row = optimizer.report().rows[0]
    assert (row["parameter"], row["status"], row["dtype"]) == ("base", "frozen", str(base.dtype).removeprefix("torch."))
    saved = optimizer.state_dict()
    assert sorted(saved["state"]) == [1, 2]
    again = model(kind)
    loaded = torch_api.MaskedAdamW(again.named_parameters(), lr=0.1, **({"mask": "head.*"} if masked else {}))
    again.head.load_state_dict(net.head.state_dict())
    loaded.load_state_dict(copy.deepcopy(saved))
    step(again, loaded)
    step(net, optimizer)
    assert all(map(np.array_equal, bits(again), bits(net)))


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "AdamW"])
def test_every_optimizer_accepts_frozen_parameters_of_any_kind(name):
    net = model()
    net.base = torch.nn.ParameterList(
        torch.nn.Parameter(KINDS[kind](), requires_grad=False) for kind in ("uint8", "bool", "meta", "sparse", "conjugated")
    )
    before = bits(net)
    optimizer = CLASSES[name](net.named_parameters())
    step(net, optimizer)
    step(net, optimizer)
    assert not any(map(np.array_equal, bits(net), before))
    assert str(optimizer).count("frozen") == 5


@pytest.mark.parametrize("kind", ["uint8", "bool", "qint8", "meta", "sparse", "sparse rows", "conjugated", "negated"])
def test_thawing_an_untrainable_parameter_raises_and_changes_nothing(kind):
    net = model(kind)
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1, mask="head.*")
    step(net, optimizer)
    rows, before = optimizer.report().rows, bits(net)
    with pytest.raises(ValueError, match="parameter 'base'"):
        optimizer.set_trainable("base", True)
    assert optimizer.report().rows == rows
    step(net, optimizer)
    assert not any(map(np.array_equal, bits(net), before))
    if net.base.is_floating_point() or net.base.is_complex():
        net.base.requires_grad_(True)
        with pytest.raises(ValueError, match="parameter 'base'"):
            torch_api.MaskedAdamW(net.named_parameters(), lr=0.1)


def test_first_gradient_of_a_sparse_parameter_raises():
    net = model("sparse")
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1)
    for _ in range(2):
        step(net, optimizer)
    net.base.requires_grad_(True)
    net.base.grad = torch.eye(3).to_sparse()
    before = bits(net)
    for p in net.head.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"parameter 'base' of shape \(3, 3\) has layout torch.sparse_coo"):
        optimizer.step()
    assert all(map(np.array_equal, bits(net), before))
    net.base.requires_grad_(False)
    step(net, optimizer)
    assert not any(map(np.array_equal, bits(net), before))


def test_copies_and_added_groups_keep_frozen_integer_parameters():
    net = model("uint8")
    optimizer = torch_api.MaskedAdamW(net.head.named_parameters("head"), lr=0.1, mask="head.*")
    optimizer.add_param_group({"params": [("base", net.base)]})
    step(net, optimizer)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [row["status"] for row in twin.report().rows] == ["trained", "trained", "frozen"]
        assert torch.equal(twin.param_groups[1]["params"][0], net.base)


@pytest.mark.parametrize("kind", ["uint8", "int64", "bool", "conjugated", "negated"])
def test_train_step_reads_frozen_parameters_of_any_dtype(kind):
    net, theirs = model(kind), model(kind)
    loss = lambda model, x: (model.head(x).square().sum(-1) * torch.real(model.base[:2].flatten())).sum()  # noqa: E731
    x = torch.ones(2, 2)
    optimizer, other = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1), torch.optim.AdamW(theirs.head.parameters(), lr=0.1)
    train = torch_api.JaxTrainStep(net, loss, optimizer)
    for _ in range(2):
        train(x)
        other.zero_grad()
        loss(theirs, x).backward()
        other.step()
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(bits(net), bits(theirs), strict=True))


@pytest.mark.parametrize("kind", ["qint8", "sparse", "sparse rows", "a subclass", "meta"])
def test_train_step_names_the_parameter_that_it_cannot_read(kind):
    net = model(kind)
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), lr=0.1)
    text = "'base' on meta" if kind == "meta" else "JaxTrainStep: 'base' is .*no JAX array can stand for it"
    with pytest.raises(ValueError, match=text):
        torch_api.JaxTrainStep(net, lambda model, x: model.head(x).square().sum(), optimizer)
    before = bits(net)
    step(net, optimizer)
    assert not any(map(np.array_equal, bits(net), before))


def test_frozen_integer_parameter_leaves_extra_arguments_in_float64():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda g: -g * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    moved = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    frozen = torch.nn.Parameter(torch.ones(1, dtype=torch.uint8), requires_grad=False)
    optimizer = torch_api.OptaxOptimizer([moved, frozen], tx)
    moved.grad = torch.ones_like(moved)
    optimizer.step(value=1 / 3)
    assert moved.item() == 1 - 1 / 3
