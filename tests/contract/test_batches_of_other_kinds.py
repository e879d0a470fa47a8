"""Batches that are mappings but not dicts, and packed sequences."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import bridge
import torch_api

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


class Encoding(collections.UserDict):
    """A mapping like a tokenizer's output: its items can also be read as attributes."""

    def __init__(self, data, note="none"):
        super().__init__(data)
        self.note = note

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Named(dict):
    __getattr__ = dict.__getitem__


class Read(collections.abc.Mapping):
    """A read-only mapping."""

    def __init__(self, data):
        self._data = data

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Itself(dict):
    """A dict that is its own `__dict__`: items and attributes share one storage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Twice(dict):
    """A dict that stores each item also as an attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self).update(self)


class Slotted(dict):
    __slots__ = ("scale",)
    __getattr__ = dict.__getitem__


class Inside(dict):
    """A mapping whose copy shares the storage of its items."""

    def __init__(self, data):
        self.inner = dict(data)

    def __getitem__(self, key):
        return self.inner[key]

    def __setitem__(self, key, value):
        self.inner[key] = value

    def keys(self):
        return self.inner.keys()

    def values(self):
        return self.inner.values()

    def items(self):
        return self.inner.items()

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Shares(collections.UserDict):
    def __init__(self, data):
        self.data = data

    def __copy__(self):
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new


class Noted(collections.UserDict):
    def __init__(self, data, note):
        super().__init__(data)
        self.note = note


class NotedDict(dict):
    def __init__(self, data, note):
        super().__init__(data)
        self.note = note


DATA = {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([0, 1]), "extra": [torch.ones(2), 3]}
KINDS = [collections.UserDict, Read]  # some tests add other kinds


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))


def loss(model, batch):
    assert batch["extra"][1] == 3
    return F.cross_entropy(model(batch["ids"]), batch["labels"]) * batch["extra"][0].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_is_a_batch(kind):
    model = classifier()
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.0))
    expected = loss(model, DATA).detach()
    for _ in range(2):
        np.testing.assert_allclose(step(kind(DATA)), expected, rtol=1e-6)
    swapped = DATA | {"labels": torch.tensor([1, 0])}
    np.testing.assert_allclose(step(kind(swapped)), loss(model, swapped).detach(), rtol=1e-6)
    assert step.cache_info().compilations == 1


@pytest.mark.parametrize("kind", [Encoding, Named])
def test_a_mapping_keeps_its_type_and_attributes(kind):
    model, seen = classifier(), []

    def by_attribute(model, batch, nested):
        seen.append((type(batch), type(nested["inner"]), getattr(nested["inner"], "note", None)))
        return F.cross_entropy(model(batch.ids), nested["inner"].labels)

    step = torch_api.JaxTrainStep(model, by_attribute, torch_api.MaskedSGD(model.named_parameters(), lr=0.0))
    inner = Encoding(DATA, note="mine")
    np.testing.assert_allclose(step(kind(DATA), {"inner": inner}), F.cross_entropy(model(DATA["ids"]), DATA["labels"]).detach(), rtol=1e-6)
    assert seen == [(kind, Encoding, "mine")]
    assert all(isinstance(x, torch.Tensor) for x in (inner["ids"], inner["labels"]))


@pytest.mark.parametrize("kind", [collections.UserDict, collections.OrderedDict, Encoding, Named, Read, types.MappingProxyType])
def test_a_module_function_takes_a_mapping(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, batch, scale=None):
            return self.linear(batch["x"]) * scale["s"]

    net, x = Model(), torch.ones(2, 3)
    got = bridge.module_function(net)(bridge.module_tree(net), kind({"x": jnp.ones((2, 3))}), scale=kind({"s": jnp.asarray(2.0)}))
    np.testing.assert_allclose(got, net({"x": x}, {"s": 2}).detach(), rtol=1e-6)
    with pytest.raises(TypeError, match=r"input 0\.x is a torch tensor|input 0.0.x is a torch tensor"):
        bridge.module_function(net)(bridge.module_tree(net), kind({"x": x}))


def sums(model, batch):
    return model(batch["x"]).mean()


def a_step(loss):
    model = nn.Linear(2, 1)
    return torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.0)), model


@pytest.mark.parametrize("kind", [Itself, Twice, Slotted, collections.UserDict])
def test_item_attributes_have_the_values_of_each_batch(kind):
    attributes = kind is not collections.UserDict
    step, model = a_step(lambda model, batch: model(batch.inner.x if attributes else batch["inner"]["x"]).mean())
    for scale in (1.0, 2.0, 3.0):
        x = torch.full((3, 2), scale)
        np.testing.assert_allclose(step(kind(inner=kind(x=x))), model(x).mean().detach(), rtol=1e-6)
    assert step.cache_info().compilations == 1


@pytest.mark.parametrize("kind", [Itself, Twice])
def test_module_function_reads_item_attributes(kind):
    class Model(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x).mean()

    model = Model(2, 1)
    tree = bridge.module_tree(model)
    got = jax.jit(lambda x: bridge.module_function(model)(tree, kind(x=x)))(jnp.full((3, 2), 2.0))
    np.testing.assert_allclose(got, model(kind(x=torch.full((3, 2), 2.0))).detach(), rtol=1e-6)


@pytest.mark.parametrize("kind", [Inside, Shares])
def test_mapping_whose_copy_shares_storage_is_left_unchanged(kind):
    class Model(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"]).mean()

    step, model = a_step(sums)
    data = {"x": torch.ones(3, 2)}
    batch = kind(data)
    np.testing.assert_allclose(step(batch), sums(model, data).detach(), rtol=1e-6)
    assert batch["x"] is data["x"]
    assert torch.equal(data["x"], torch.ones(3, 2))
    function, array = Model(2, 1), jnp.ones((3, 2))
    given = {"x": array}
    batch = kind(given)
    bridge.module_function(function)(bridge.module_tree(function), batch)
    assert batch["x"] is given["x"] is array


@pytest.mark.parametrize("kind", [Noted, NotedDict])
def test_attributes_of_a_mapping_have_the_values_of_each_call(kind):
    step, _ = a_step(lambda model, batch: model(batch["x"]).mean() * 0 + batch.note[0])
    x = torch.ones(3, 2)
    assert [float(step(kind({"x": x}, note))) for note in ([1.0], [5.0], [1.0], (2, "a"))] == [1, 5, 1, 2]
    assert step.cache_info().compilations == 3


@pytest.mark.parametrize("kind", [Noted, NotedDict])
@pytest.mark.parametrize("note", [torch.ones(()), [{"a": np.ones(2)}], jnp.ones(2)], ids=["tensor", "nested", "jax"])
def test_tensor_in_an_attribute_of_a_mapping_raises(kind, note):
    step, _ = a_step(sums)
    with pytest.raises(TypeError, match=r"attribute 'note' holds a tensor.*Put it among the items"):
        step({"inner": kind({"x": torch.ones(3, 2)}, note)})


def test_reading_an_attribute_without_a_value_raises():
    x, note = torch.ones(3, 2), [object()]
    step, _ = a_step(sums)
    for _ in range(2):
        step(Noted({"x": x}, [object()]))
    assert step.cache_info().compilations == 1
    step, _ = a_step(lambda model, batch: sums(model, batch) * len(batch.note))
    with pytest.raises(TypeError, match=r"reads the attribute 'note' of a Noted.*among the items"):
        step(Noted({"x": x}, note))


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.lbfgs(0.1)], ids=["no arguments", "further arguments"])
def test_batch_unpacked_into_keywords_raises(tx):
    model = classifier()
    step = torch_api.JaxTrainStep(model, loss, torch_api.OptaxOptimizer(model.named_parameters(), tx))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match="Pass the batch as one dict"):
        step(**DATA)
    assert all(map(torch.equal, before, model.parameters()))


class Recurrent(nn.Module):
    """A recurrent network. Its input is a packed sequence, or `forward` packs it."""

    def __init__(self, kind, lengths=None, **options):
        super().__init__()
        self.net, self.lengths = getattr(nn, kind)(3, 5, **options), lengths

    def forward(self, x):
        if self.lengths is not None:
            x = rnn.pack_padded_sequence(x, self.lengths, batch_first=self.net.batch_first, enforce_sorted=False)
        out, last = self.net(x)
        padded, lengths = rnn.pad_packed_sequence(out, batch_first=self.net.batch_first, padding_value=-1.0, total_length=6)
        return padded, last, lengths


CELLS = [("LSTM", {"batch_first": True, "proj_size": 2}), ("GRU", {"bidirectional": True, "num_layers": 2})]
CELLS += [("RNN", {"nonlinearity": "relu", "bias": False})]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), CELLS)
def test_forward_packs_with_constant_lengths(kind, options):
    torch.manual_seed(0)
    lengths = [1, 4, 3] if options.get("batch_first") else torch.tensor([1, 4, 3])
    net = Recurrent(kind, lengths, **options)
    x = torch.randn((3, 5, 3) if options.get("batch_first") else (5, 3, 3))
    function = bridge.module_function(net)

    def loss(params):
        out = function(params, bridge.to_jax(x))
        return (out[0] ** 2).sum(), out

    grads, got = jax.jit(jax.grad(loss, has_aux=True))(bridge.module_tree(net))
    expected = net(x)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-6), got, expected)
    expected[0].square().sum().backward()
    for name, p in net.net.named_parameters():
        np.testing.assert_allclose(grads["net"][name], p.grad, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_packed_sequence_is_a_batch():
    torch.manual_seed(0)
    net = Recurrent("GRU")
    step = torch_api.JaxTrainStep(net, lambda model, x: model(x)[0].square().mean(), torch_api.MaskedSGD(net.named_parameters(), lr=0.0))
    for lengths, sort in (([4, 3, 1], True), ([1, 4, 3], False)):
        packed = rnn.pack_padded_sequence(torch.randn(4, 3, 3), lengths, enforce_sorted=sort)
        np.testing.assert_allclose(step(packed), net(packed)[0].square().mean().detach(), rtol=1e-5)
    assert step.cache_info().compilations == 2


def test_to_jax_and_module_function_take_a_packed_sequence():
    net = Recurrent("GRU")
    packed = rnn.pack_padded_sequence(torch.randn(4, 3, 3), [2, 4, 1], enforce_sorted=False)
    arrays = bridge.to_jax(packed, copy=None)
    assert isinstance(arrays.data, jax.Array)
    assert arrays.batch_sizes.tolist() == packed.batch_sizes.tolist()
    got = bridge.module_function(net)(bridge.module_tree(net), arrays)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-6), got, net(packed))
    back = bridge.to_torch(arrays)
    assert all(torch.equal(one, other) for one, other in zip(back, packed, strict=True))


def test_wrong_or_traced_lengths_raise():
    for lengths in ([4, 3], [3, 4, 1], [5, 1, 1], [4, 1, 0]):
        with pytest.raises(RuntimeError, match=r"expected one length of 1 or more for each sequence"):
            bridge.module_function(Packs(lengths))({}, jnp.ones((4, 3, 2)))
    with pytest.raises(jax.errors.ConcretizationTypeError, match="_pack_padded_sequence"):
        jax.jit(bridge.module_function(Packs(None)))({}, jnp.ones((4, 3, 2)), jnp.asarray([3, 2, 1]))


class Packs(nn.Module):
    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def forward(self, x, lengths=None):
        return rnn.pack_padded_sequence(x, self.lengths if lengths is None else lengths).data
