"""A selector of the constructor treats parameters of a group that is added later like parameters given at construction."""

import copy
import functools
import pickle
import re

import jax
import numpy as np
import optax
import pytest
import torch

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2))), "head": torch.nn.Linear(2, 1)})


def parts(net):
    named = list(net.named_parameters())
    return named[:3], named[3:]  # the second part starts with the bias of the second layer


def only_weights(name, param):
    return name.endswith("weight")


class Callable:
    def __call__(self, name, param):
        return param.ndim > 1


MASKS = {
    "None": lambda net: None,
    "True": lambda net: True,
    "False": lambda net: False,
    "a glob": lambda net: "*weight",
    "globs": lambda net: ["body.0.*", "*bias"],
    "a glob that matches no new name": lambda net: "body.0.*",
    "a regular expression": lambda net: re.compile("weight$"),
    "mixed patterns": lambda net: ["body.0.weight", re.compile("bias$")],
    "name and parameter": lambda net: only_weights,
    "a callable object": lambda net: Callable(),
    "a partial": lambda net: functools.partial(lambda end, name, param: name.endswith(end), "bias"),
    "a name": lambda net: lambda name: "weight" in name,
    "the tree": lambda net: lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree),
    "a prefix of the tree": lambda net: lambda updates: {name: name == "body" for name in updates},
    "pairs": lambda net: [("*.1.*", False), (lambda n: n.endswith("bias"), True)],
    "a dict by prefix": lambda net: {"": False, "body": True, "body.1": False},
    "a dict that leaves the new ones out": lambda net: {"body.0": True},
    "a prefix tree": lambda net: {"body": {"0": False, "1": True}, "": False},
    "a module": lambda net: net["body"],
    "pairs with a module": lambda net: [(net["body"][0], False), ("*", True)],
    "elements": lambda net: {"body.0.weight": torch.tensor([[True, False], [True, True]]), "": True},
}


def decisions(optimizer):
    columns = ("parameter", "status", "lr", "decay", "label")
    return [[row[column] for column in columns] for row in optimizer.report().rows]


def at_once_and_later(build):
    """Build two optimizers: one gets both groups at construction, the other gets the second group later."""
    net = model()
    first, second = parts(net)
    at_once = build([{"params": first}, {"params": second}], net)
    net = model()
    first, second = parts(net)
    later = build([{"params": first}], net)
    later.add_param_group({"params": second})
    return at_once, later


@pytest.mark.parametrize("form", MASKS)
def test_every_form_of_mask_decides_about_added_groups(form):
    at_once, later = at_once_and_later(lambda groups, net: torch_api.MaskedAdamW(groups, mask=MASKS[form](net)))
    assert decisions(later) == decisions(at_once)
    assert [row["decided by"] for row in later.report().rows] == [row["decided by"] for row in at_once.report().rows]


@pytest.mark.parametrize("form", [form for form in MASKS if form != "elements"])
def test_every_form_of_decay_mask_decides_about_added_groups(form):
    at_once, later = at_once_and_later(lambda groups, net: torch_api.MaskedAdamW(groups, weight_decay=0.1, decay_mask=MASKS[form](net)))
    assert decisions(later) == decisions(at_once)


SCALES = {
    "a number": lambda net: 0.5,
    "by prefix": lambda net: {"body": 0.5, "body.1": 0.25},
    "pairs": lambda net: [("*bias", 0.1), ("*", 0.2)],
    "name and parameter": lambda net: lambda name, param: 1 / param.ndim,
    "a name": lambda net: lambda n: 0.5 if n.startswith("head") else 1.0,
    "the tree": lambda net: lambda params: {name: 0.1 if name == "body" else 0.2 for name in params},
}


@pytest.mark.parametrize("form", SCALES)
def test_every_form_of_lr_scale_decides_about_added_groups(form):
    at_once, later = at_once_and_later(lambda groups, net: torch_api.MaskedSGD(groups, lr=1.0, lr_scale=SCALES[form](net)))
    assert decisions(later) == decisions(at_once)


LABELS = {
    "by prefix": lambda net: {"body": "x", "": "y", "body.0.bias": "y"},
    "pairs": lambda net: [("*bias", "x"), ("*", "y")],
    "name and parameter": lambda net: lambda name, param: "x" if param.ndim > 1 else "y",
    "a name": lambda net: lambda path: "x" if path.endswith("bias") else "y",
    "the tree": lambda net: lambda tree: jax.tree.map(lambda p: "x" if p.ndim > 1 else "y", tree),
    "a callable object": lambda net: functools.partial(lambda name, param: "x" if "0.w" in name else "y"),
}


def partitioned(groups, labels, **options):
    return torch_api.PartitionedOptimizer(groups, {"x": optax.sgd(0.1), "y": (optax.adam, {"lr": 0.2})}, labels, **options)


@pytest.mark.parametrize("form", LABELS)
def test_every_form_of_labels_decides_about_added_groups(form):
    at_once, later = at_once_and_later(lambda groups, net: partitioned(groups, LABELS[form](net), mask="*"))
    assert sorted(map(str, decisions(later))) == sorted(map(str, decisions(at_once)))


def test_selectors_of_a_multi_optimizer_decide_about_added_groups():
    pairs = ("*weight", optax.sgd(0.1)), (lambda name: name == "body.0.bias", optax.adam(0.1))
    at_once, later = at_once_and_later(lambda groups, net: torch_api.MultiOptimizer(groups, *pairs))
    assert sorted(map(str, decisions(later))) == sorted(map(str, decisions(at_once)))


def test_masks_of_parameters_and_iterators_are_remembered():
    net = model()
    first, second = parts(net)
    for mask in ([p for _, p in first[:2]], (p for _, p in first[:2]), iter(["*weight"])):
        optimizer = torch_api.MaskedSGD(first, mask=mask)
        before = [row["status"] for row in optimizer.report().rows]
        optimizer.add_param_group({"params": second[:1]})
        assert [row["status"] for row in optimizer.report().rows] == [*before, "frozen"]
        assert {"trained", "frozen"} >= set(before) > {"frozen"}


def test_later_changes_of_a_selector_have_no_effect():
    net = model()
    first, second = parts(net)
    patterns, by_name = ["*weight"], {"": True, "body.1": False}
    one, two = torch_api.MaskedSGD(first, mask=patterns), torch_api.MaskedSGD(first, mask=by_name)
    patterns[0], by_name["body.1"] = "*", True
    for optimizer in (one, two):
        optimizer.add_param_group({"params": second[:1]})
        assert optimizer.report().rows[-1]["status"] == "frozen"


def test_flags_of_a_group_override_selectors():
    both = ["trained", "trained"]
    for flags, statuses in (({"mask": "*bias"}, ["trained", "frozen"]), ({"mask": True}, both), ({"trainable": True}, both)):
        for at_once in (True, False):
            net = model()
            first, second = parts(net)
            own = {"params": second[:2], **flags}  # a bias and a weight
            groups = [{"params": first}, own] if at_once else [{"params": first}]
            optimizer = torch_api.MaskedAdamW(groups, mask="body.0.weight")
            if not at_once:
                optimizer.add_param_group(own)
            assert [row["status"] for row in optimizer.report().rows][3:] == statuses
    optimizer.add_param_group({"params": [("further.weight", torch.nn.Parameter(torch.ones(2)))], "trainable": False, "mask": True})
    assert optimizer.report().rows[-1]["status"] == "frozen"
    labelled = partitioned([{"params": parts(model())[0]}], {"": "x", "body.0.bias": "y"})
    labelled.add_param_group({"params": second, "label": "y"})
    assert {row["label"] for row in labelled.report().rows[3:]} == {"y"}


def test_pattern_without_match_at_construction_raises():
    first, _ = parts(model())
    for mask in ("head.*", ["*", "head.*"], {"head": True, "": False}, [("head.*", True)]):
        with pytest.raises(ValueError, match="head"):
            torch_api.MaskedAdamW(first, mask=mask)


def test_mask_tree_without_the_new_parameters_raises_with_advice():
    first, second = parts(model())
    optimizer = torch_api.MaskedAdamW(first, mask={"body": {"0": {"weight": True, "bias": True}, "1": {"weight": False}}})
    with pytest.raises(ValueError, match=r"body\.1\.bias") as error:
        optimizer.add_param_group({"params": second})
    assert "trainable=True" in "".join(error.value.__notes__)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": second, "mask": "head.*"})
    assert [row["status"] for row in optimizer.report().rows] == ["trained", "trained", "frozen", "frozen", "trained", "trained"]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["deepcopy", "pickle"])
def test_copied_optimizer_decides_like_the_original(twin):
    for mask in ("*weight", only_weights, {"": False, "body.1.weight": True}):
        first, second = parts(model())
        optimizer = twin(torch_api.MaskedAdamW(first, mask=mask))
        optimizer.add_param_group({"params": second[:1]})
        assert optimizer.report().rows[-1]["status"] == "frozen"


def test_unpicklable_selector_raises_when_a_group_is_added():
    first, second = parts(net := model())
    for mask in (lambda name, p: name.endswith("weight"), net["body"]):
        optimizer = pickle.loads(pickle.dumps(torch_api.MaskedAdamW(first, mask=mask)))
        with pytest.raises(ValueError, match="not pickled"):
            optimizer.add_param_group({"params": second})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": second, "mask": "*weight"})
        assert [row["status"] for row in optimizer.report().rows][3:] == ["frozen", "trained", "frozen"]


def test_added_group_steps_and_saves_like_an_initial_group():
    """The mask is a glob, so a bias in the added group stays frozen; an optimizer that loads the checkpoint has the same statuses."""
    ends = []
    for at_once in (True, False):
        net = model()
        first, second = parts(net)
        optimizer = torch_api.MaskedAdamW(first + second if at_once else first, lr=0.1, mask="*weight")
        if not at_once:
            optimizer.add_param_group({"params": second})
        for _ in range(2):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append([p.detach().clone() for p in net.parameters()])
    np.testing.assert_array_equal(*[torch.cat([x.flatten() for x in end]).numpy() for end in ends])
    assert torch.equal(ends[1][3], model()["body"][1].bias)
    again = model()
    loaded = torch_api.MaskedAdamW([{"params": part} for part in parts(again)], lr=0.1, mask="*weight")
    loaded.load_state_dict(optimizer.state_dict())
    assert [row["status"] for row in loaded.report().rows] == [row["status"] for row in optimizer.report().rows]


def test_selectors_decide_about_parameters_added_by_hand():
    first, second = parts(model())
    optimizer = torch_api.MaskedAdamW(first, lr=0.1, mask="*weight", decay_mask={"": False, "body.1": True})
    for name, p in second:
        optimizer.param_groups[0]["params"].append(p)
        optimizer.param_groups[0]["param_names"].append(name)
    at_once = torch_api.MaskedAdamW(first + second, lr=0.1, mask="*weight", decay_mask={"": False, "body.1": True})
    assert decisions(optimizer) == decisions(at_once)
    for _, p in first + second:
        p.grad = torch.ones_like(p)
    before = {name: p.detach().clone() for name, p in second}
    optimizer.step()
    assert [name for name, p in second if not torch.equal(p, before[name])] == ["head.weight"]


def test_group_mask_applies_across_labels():
    first, second = parts(model())
    for later in (False, True):
        own = {"params": second, "mask": "head.*"}
        optimizer = partitioned([{"params": first}] if later else [{"params": first}, own], {"": "x", "body": "y", "body.0.bias": "x"})
        if later:
            optimizer.add_param_group(own)
        statuses = {row["parameter"]: row["status"] for row in optimizer.report().rows}
        assert [statuses[name] for name, _ in second] == ["frozen", "trained", "trained"]
    with pytest.raises(ValueError, match=r"pattern 'haed.\*' matches none of 3"):
        partitioned([{"params": first}, {"params": second, "mask": "haed.*"}], {"": "x", "body": "y"})


def test_copied_partitioned_optimizer_takes_a_labeled_group():
    first, later = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch_api.PartitionedOptimizer([("first", first)], {"a": optax.sgd(0.1)}, labels={"first": "a"})
    twin = copy.deepcopy(optimizer)
    twin.add_param_group({"params": [("later", later)], "label": "a"})
    assert [row["label"] for row in twin.report().rows] == ["a", "a"]


DECIDE = {
    "name and parameter": lambda net: lambda name, param: param.ndim > 1,
    "a callable object": lambda net: Callable(),
    "a module": lambda net: net["body"],
    "modules": lambda net: [net["body"][0], net["body"][1]],
    "pairs": lambda net: [(net["body"][0], False), (lambda name, param: param.ndim > 1, True)],
    "True": lambda net: True,
    "None": lambda net: None,
}
BY_HAND = {
    "appended": lambda optimizer, params: optimizer.param_groups[0]["params"].extend(params),
    "a group": lambda optimizer, params: optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(params)}),
}


def nameless(net):
    return [[p for _, p in part] for part in parts(net)]


@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("form", DECIDE)
def test_selectors_decide_about_unnamed_parameters_added_by_hand(form, way):
    def make(params, net):
        return torch_api.MaskedAdamW(params, weight_decay=0.1, mask=DECIDE[form](net), decay_mask=DECIDE[form](net))

    net = model()
    first, second = nameless(net)
    expected = decisions(make(first + second, net))
    optimizer = make(first, net)
    BY_HAND[way](optimizer, second)
    assert decisions(optimizer) == expected
    for p in first + second:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in first + second]
    optimizer.step()
    statuses = ["frozen" if torch.equal(p, q) else "trained" for p, q in zip(first + second, before, strict=True)]
    assert statuses == [row[1] for row in expected]


@pytest.mark.parametrize("form", ["a glob", "globs", "a regular expression", "name and parameter", "a name", "pairs", "a dict by prefix"])
def test_parameter_added_by_hand_needs_a_name_if_a_selector_reads_names(form):
    net = model()
    first, second = parts(net)
    optimizer = torch_api.MaskedAdamW(first, lr=0.1, mask=MASKS[form](net))
    optimizer.param_groups[0]["params"] += [p for _, p in second]
    for _, p in first + second:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for _, p in first + second]
    for call in (optimizer.step, optimizer.report, optimizer.state_dict):
        with pytest.raises(ValueError, match=r"put into param group 0 by hand, has no name, and mask .* group\['param_names'\]"):
            call()
    assert all(torch.equal(p, q) for (_, p), q in zip(first + second, before, strict=True))
    optimizer.param_groups[0]["param_names"] += [name for name, _ in second]
    assert decisions(optimizer) == decisions(torch_api.MaskedAdamW(first + second, lr=0.1, mask=MASKS[form](net)))
    optimizer.step()


@pytest.mark.parametrize("form", ["None", "True", "a module", "parameters"])
def test_selector_without_names_decides_about_an_unnamed_parameter(form):
    net = model()
    first, second = parts(net)
    mask = [p for _, p in first[:1]] if form == "parameters" else MASKS[form](net)
    optimizer = torch_api.MaskedAdamW(first, lr=0.1, mask=mask)
    optimizer.param_groups[0]["params"] += [p for _, p in second]
    at_once = torch_api.MaskedAdamW(first + second, lr=0.1, mask=mask)
    assert [row[1] for row in decisions(optimizer)] == [row[1] for row in decisions(at_once)]


HELD = {
    "a module": lambda net: net["body"],
    "modules": lambda net: [net["body"][1], net["body"][0]],
    "pairs": lambda net: [(net["body"], True), ("*.0.bias", False)],
    "parameters": lambda net: [net["body"][0].weight],
    "pairs with parameters": lambda net: [([net["body"][0].weight], True), (net["body"][1], True)],
    "a method of a module": lambda net: net.picks,
}


class Picking(torch.nn.ModuleDict):
    def picks(self, name, param):
        return any(param is p for p in self["body"].parameters())


@pytest.mark.parametrize("form", HELD)
def test_copied_selector_refers_to_the_copied_modules(form):
    net = Picking(dict(model()))
    first, second = parts(net)
    optimizer = torch_api.MaskedSGD(first, mask=HELD[form](net))
    twin_net, twin = copy.deepcopy((net, optimizer))
    alone = copy.deepcopy(optimizer)
    twin.add_param_group({"params": parts(twin_net)[1]})
    for one in (optimizer, alone):
        one.add_param_group({"params": second})
    assert decisions(twin) == decisions(optimizer) == decisions(alone)
    assert {row[1] for row in decisions(twin)} == {"trained", "frozen"}


def test_copied_multi_optimizer_refers_to_the_copied_modules():
    net = model()
    first, second = parts(net)
    optimizer = torch_api.MultiOptimizer(first, (net["body"], optax.sgd(0.1)))
    twin_net, twin = copy.deepcopy((net, optimizer))
    optimizer.add_param_group({"params": second})
    twin.add_param_group({"params": parts(twin_net)[1]})
    assert decisions(twin) == decisions(optimizer)
    assert {row[1] for row in decisions(twin)} == {"trained", "frozen"}
