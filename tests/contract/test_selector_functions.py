"""The argument name of a selector function decides what it gets; a decay mask given as `mask` raises."""

import functools
import operator

import jax
import numpy as np
import optax
import pytest
import torch

import bridge
import torch_api

pytestmark = pytest.mark.unoptimized


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})


def trained(optimizer):
    return [row["parameter"] for row in optimizer.report().rows if row["status"] == "trained"]


def annotated(key: str) -> bool:
    return "head" in key


class ByName:
    def __call__(self, name):
        return "head" in name

    def method(self, path):
        return "head" in path


NAMES = {
    "name": lambda name: "head" in name,
    "n": lambda n: "head" in n,
    "path": lambda path: "head" in path,
    "annotated": annotated,
    "annotated by text": functools.wraps(annotated)(lambda key: "head" in key),
    "with a default": lambda name, word="head": word in name,
    "an object": ByName(),
    "a method": ByName().method,
    "a partial": functools.partial(lambda word, name: word in name, "head"),
    "a keyword in a partial": functools.partial(lambda name, word: word in name, word="head"),
}
TREES = {
    "tree": lambda tree: {key: key == "head" for key in tree},
    "params": lambda params: {key: key == "head" for key in params},
    "updates": lambda updates: {key: key == "head" for key in updates},
    "gives a glob": lambda tree: "head.*",
}


@pytest.mark.parametrize("form", [*NAMES, *TREES])
def test_argument_name_decides_what_a_selector_gets(form):
    function = (NAMES | TREES)[form]
    assert trained(torch_api.MaskedSGD(model().named_parameters(), mask=function)) == ["head.weight", "head.bias"]
    optimizer = torch_api.MaskedSGD(model().named_parameters())
    optimizer.set_trainable(function, False)
    assert trained(optimizer) == ["body.weight", "body.bias"]


def test_every_selector_of_torch_api_reads_the_argument_name():
    label = lambda name: "x" if "head" in name else "y"  # noqa: E731
    optimizer = torch_api.PartitionedOptimizer(model().named_parameters(), {"x": optax.sgd(0.1), "y": optax.adam(0.1)}, label)
    assert [row["label"] for row in optimizer.report().rows] == ["y", "y", "x", "x"]
    optimizer = torch_api.MultiOptimizer(model().named_parameters(), (lambda n: "head" in n, optax.sgd(0.1)))
    assert trained(optimizer) == ["head.weight", "head.bias"]
    optimizer = torch_api.MaskedAdamW(
        model().named_parameters(), lr=1.0, decay_mask=lambda name: "weight" in name, lr_scale=lambda path: 0.5 if "head" in path else 1.0
    )
    assert [(row["lr"], row["decay"] > 0) for row in optimizer.report().rows] == [(1.0, True), (1.0, False), (0.5, True), (0.5, False)]
    pairs = [(lambda name: "bias" in name, False), (lambda tree: {"body": False, "head": True}, True)]
    assert trained(torch_api.MaskedSGD(model().named_parameters(), mask=pairs)) == ["head.weight"]
    groups = [{"params": list(model().named_parameters()), "mask": lambda name: "bias" in name}]
    assert trained(torch_api.MaskedSGD(groups)) == ["body.bias", "head.bias"]


OTHERS = {
    "another name": lambda x: True,
    "p": lambda p: p.ndim > 1,
    "annotated otherwise": lambda parameter: True,
    "none": lambda: True,
    "three": lambda name, param, group: True,
    "a builtin": operator.itemgetter(0),
    "a method of a set": {"head.weight"}.__contains__,
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_signature_raises_and_lists_the_forms(form):
    for use in (
        lambda function: torch_api.MaskedSGD(model().named_parameters(), mask=function),
        lambda function: torch_api.MaskedSGD(model().named_parameters(), mask=[(function, True)]),
        lambda function: torch_api.MaskedSGD(model().named_parameters()).set_trainable(function, True),
    ):
        with pytest.raises(TypeError, match=r"\(name, param\) or \(tree\) or \(name\).*annotated str or called name, n or path"):
            use(OTHERS[form])


def test_bridge_passes_the_tree_to_a_function_of_one_argument():
    params = {"a": np.ones(2, np.float32), "b": np.ones((2, 2), np.float32)}
    matrices = lambda x: jax.tree.map(lambda leaf: leaf.ndim > 1, x)  # noqa: E731
    for tx, moved in (
        (bridge.select(optax.sgd(1.0), matrices), ["b"]),
        (optax.chain(optax.sgd(1.0), bridge.freeze(frozen=matrices)), ["a"]),
        (bridge.partition({True: optax.sgd(1.0), False: optax.set_to_zero()}, matrices), ["b"]),
        (bridge.masked(optax.set_to_zero(), matrices), ["a"]),
    ):
        updates, _ = tx.update(params, tx.init(params), params)
        assert [key for key, update in updates.items() if np.any(np.asarray(update))] == moved
    assert bridge.resolve_mask(lambda name: {"a": True, "b": False}, params) == {"a": True, "b": False}


# ---------------------------------------------------------------------- decay masks

DECAY_MASKS = {
    "no_decay": torch_api.no_decay,
    "the function": lambda net: torch_api.no_decay_on_bias_and_norm,
    "a partial of it": lambda net: functools.partial(torch_api.no_decay_on_bias_and_norm),
}


@pytest.mark.parametrize("form", DECAY_MASKS)
def test_decay_mask_given_as_mask_raises_and_names_decay_mask(form):
    net = model()
    mask, named = DECAY_MASKS[form](net), list(net.named_parameters())
    for use in (
        lambda: torch_api.OptaxOptimizer(named, optax.adamw, lr=1e-3, mask=mask),
        lambda: torch_api.MaskedAdamW(named, mask=mask),
        lambda: torch_api.PartitionedOptimizer(named, {"x": optax.sgd(0.1)}, {"": "x"}, mask=mask),
        lambda: torch_api.MaskedLion([{"params": named, "mask": mask}], lr=0.1),
    ):
        with pytest.raises(ValueError, match="decay_mask"):
            use()
    optimizer = torch_api.MaskedAdamW(named[:2])
    with pytest.raises(ValueError, match="decay_mask"):
        optimizer.add_param_group({"params": named[2:], "mask": mask})
    assert len(optimizer.param_groups) == 1


def test_mask_may_be_derived_from_a_decay_mask():
    """Only biases are trained."""
    net = model()
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), mask={name: not decays for name, decays in torch_api.no_decay(net).items()})
    assert trained(optimizer) == ["body.bias", "head.bias"]


def test_names_of_a_decay_mask_are_plain_strings(tmp_path):
    """Checkpoints hold these names and are loaded with weights_only=True."""
    net = model()
    decays, params = torch_api.no_decay(net), dict(net.named_parameters())
    optimizer = torch_api.MaskedAdamW(
        [{"params": [(name, params[name]) for name in decays if decays[name] is each]} for each in (True, False)]
    )
    torch.save([decays, optimizer.state_dict()], tmp_path / "saved.pt")
    loaded, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert loaded == decays
    optimizer.load_state_dict(state)


def test_decay_mask_behaves_like_a_plain_dict():
    net = model()
    decays = torch_api.no_decay(net)
    plain = {"body.weight": True, "body.bias": False, "head.weight": True, "head.bias": False}
    assert type(decays) is dict
    assert decays == plain
    assert repr(decays) == repr(plain)
    assert jax.tree.structure(decays) == jax.tree.structure(plain)
    optimizer = torch_api.MaskedAdamW(net.named_parameters(), weight_decay=0.1, decay_mask=decays)
    assert [row["decay"] for row in optimizer.report().rows] == [0.1, 0.0, 0.1, 0.0]
    matrices = torch_api.MaskedAdamW(net.named_parameters(), mask=lambda name: decays[name])
    assert trained(matrices) == ["body.weight", "head.weight"]
    params = {name: np.ones(p.shape, np.float32) for name, p in net.named_parameters()}
    tx = optax.masked(optax.set_to_zero(), decays)  # pure JAX reads it as a dict
    updates, _ = tx.update(params, tx.init(params), params)
    assert [name for name, update in updates.items() if np.any(update)] == ["body.bias", "head.bias"]
