"""Selectors: what each form selects on every route, and the error of every wrong selector."""

import functools
import random
import re
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
from bridge._names import nest, unnest
from bridge._transforms.selectors import NamedLeaves, resolve_selector
from torch_api import MaskedAdamW

pytestmark = pytest.mark.quick

ENCODER = {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"}
HEAD = {"head.weight", "head.bias"}
ALL = ENCODER | HEAD
BIASES = {"encoder.0.bias", "encoder.1.bias", "head.bias"}
WEIGHTS = ALL - BIASES
MASK_KINDS = ["mask", "decay_mask"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)


class ByName:
    def __call__(self, name, param):
        return name in HEAD and isinstance(param, torch.Tensor)

    def is_bias(self, name, param):
        return name.endswith("bias") and param.ndim == 1


@pytest.fixture
def model():
    return Model()


def leaves_of(model, named=True):
    pairs = [(name if named else f"param{i}", leaf) for i, (name, leaf) in enumerate(model.named_parameters())]
    return NamedLeaves([name for name, _ in pairs], [leaf for _, leaf in pairs], lambda: nest(pairs), has_names=named)


def values(spec, model, kind):
    leaves = leaves_of(model)
    return dict(zip(leaves.names, [decision.value for decision in resolve_selector(spec, leaves, kind)], strict=True))


def by_optimizer(spec, model):
    statuses = {row["parameter"]: row["status"] for row in MaskedAdamW(model.named_parameters(), mask=spec).report().rows}
    assert set(statuses.values()) <= {"trained", "frozen"}
    return {name: status == "trained" for name, status in statuses.items()}


MASK_ROUTES = {
    "resolve_mask of a module": bridge.resolve_mask,
    "resolve_mask of a tree": lambda spec, model: unnest(bridge.resolve_mask(spec, nest(list(model.named_parameters())))),
    "mask column": lambda spec, model: values(spec, model, "mask"),
    "decay_mask column": lambda spec, model: values(spec, model, "decay_mask"),
    "MaskedAdamW": by_optimizer,
}
LABEL_ROUTES = {
    "resolve_labels of a module": bridge.resolve_labels,
    "resolve_labels of a tree": lambda spec, model: unnest(bridge.resolve_labels(spec, nest(list(model.named_parameters())))),
    "labels column": lambda spec, model: values(spec, model, "labels"),
}

every_mask_route = pytest.mark.parametrize("route", MASK_ROUTES.values(), ids=MASK_ROUTES)
every_label_route = pytest.mark.parametrize("route", LABEL_ROUTES.values(), ids=LABEL_ROUTES)


def tree_of(model, value, **replaced):
    """Return the nested dict of parameters with one value everywhere, except for entries of the head given by name."""
    tree = nest([(name, value) for name, _ in model.named_parameters()])
    tree["head"].update(replaced)
    return tree


SELECTORS = {
    "None": (lambda m: None, ALL),
    "True": (lambda m: True, ALL),
    "a whole name": (lambda m: "head.weight", {"head.weight"}),
    "a glob": (lambda m: "head.*", HEAD),
    "a glob across dots": (lambda m: "encoder*bias", ENCODER & BIASES),
    "a glob of one character": (lambda m: "*.?.weight", ENCODER & WEIGHTS),
    "a glob with a set": (lambda m: "encoder.[!0].*", {"encoder.1.weight", "encoder.1.bias"}),
    "a list of globs": (lambda m: ["head.*", "*.0.bias"], HEAD | {"encoder.0.bias"}),
    "a regular expression searches": (lambda m: re.compile("0"), {"encoder.0.weight", "encoder.0.bias"}),
    "a regular expression with anchors": (lambda m: re.compile(r"^head\.|1\.bias$"), HEAD | {"encoder.1.bias"}),
    "a list of a glob and a regular expression": (lambda m: ["head.*", re.compile("bias")], HEAD | BIASES),
    "a callable": (lambda m: lambda name, param: param.ndim == 1 and name != "head.bias", ENCODER & BIASES),
    "an object that is callable": (lambda m: ByName(), HEAD),
    "a bound method": (lambda m: ByName().is_bias, BIASES),
    "a partial": (lambda m: functools.partial(lambda suffix, name, param: name.endswith(suffix), "weight"), WEIGHTS),
    "pairs": (lambda m: [("head.bias", False), ("head.*", True)], {"head.weight"}),
    "pairs, the first match wins": (lambda m: [("head.*", True), ("*", False)], HEAD),
    "pairs of every selector": (
        lambda m: [
            (re.compile("1.bias"), False),
            (m.encoder[1], True),
            ([m.head.bias], True),
            (lambda name, param: name.startswith("encoder"), False),
            (["head.*", "*.weight"], True),
        ],
        {"encoder.1.weight", "head.bias", "head.weight"},
    ),
    "pairs, None alone": (lambda m: [(None, True)], ALL),
    "pairs, a callable gives bools of numpy": (lambda m: [(lambda name, param: np.bool_(name in HEAD), True)], HEAD),
    "pairs, None takes the rest": (lambda m: [("*.bias", False), (None, True)], WEIGHTS),
    "a dict by module": (lambda m: {"head": True}, HEAD),
    "a dict, the longest prefix wins": (
        lambda m: {"encoder.0": False, "encoder": True, "encoder.0.bias": True},
        ENCODER - {"encoder.0.weight"},
    ),
    "a dict with a default": (lambda m: {"encoder.1": False, "": True}, ALL - {"encoder.1.weight", "encoder.1.bias"}),
    "a dict whose default every other key overrides": (lambda m: {"": False, "encoder": False, "head": True}, HEAD),
    "a dict whose module every child overrides": (
        lambda m: {"encoder": True, "encoder.0": False, "encoder.1": True},
        {"encoder.1.weight", "encoder.1.bias"},
    ),
    "a module": (lambda m: m.head, HEAD),
    "the module itself": (lambda m: m, ALL),
    "a list of parameters": (lambda m: [m.head.bias, m.encoder[0].weight], {"head.bias", "encoder.0.weight"}),
    "a generator of parameters": (lambda m: m.encoder.parameters(), ENCODER),
    "a generator expression": (lambda m: (p for p in m.parameters() if p.ndim == 1), BIASES),
    "a tree": (lambda m: tree_of(m, True, weight=False), ALL - {"head.weight"}),
    "a prefix of the tree": (lambda m: {"encoder": False, "head": {"weight": True, "bias": False}}, {"head.weight"}),
    "a callable on the tree": (lambda m: lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 1, tree), BIASES),
    "a callable on the tree giving a prefix": (lambda m: lambda tree: {name: name == "head" for name in tree}, HEAD),
    "a callable on the tree that indexes it": (lambda m: lambda tree: {"encoder": False, "head": dict.fromkeys(tree["head"], True)}, HEAD),
}


@every_mask_route
@pytest.mark.parametrize(("build", "expected"), SELECTORS.values(), ids=SELECTORS)
def test_every_selector_selects_exactly_its_parameters_on_every_route(build, expected, route, model):
    answer = route(build(model), model)
    assert set(answer) == ALL
    assert {name for name, value in answer.items() if value is True} == expected
    assert {name for name, value in answer.items() if value is False} == ALL - expected


@pytest.mark.parametrize("route", [route for name, route in MASK_ROUTES.items() if name != "MaskedAdamW"])
def test_false_selects_nothing(route, model):
    assert route(False, model) == dict.fromkeys(ALL, False)


def test_glob_is_case_sensitive():
    params = {"Head": jnp.ones(1), "head": jnp.ones(1)}
    assert bridge.resolve_mask("H*", params) == {"Head": True, "head": False}


@pytest.mark.parametrize(
    ("params", "spec", "expected"),
    [
        ([jnp.ones(2), jnp.ones(3)], "1", [False, True]),
        ((jnp.ones(2), {"a": torch.ones(3), "b": jnp.ones(1)}), "1.a", (False, {"a": True, "b": False})),
        ({"a": [np.ones(2), jnp.ones(3)], "b": jnp.ones(1)}, {"a": [True, False], "b": True}, {"a": [True, False], "b": True}),
        ({"a": [np.ones(2), jnp.ones(3)], "b": jnp.ones(1)}, {"a.1": True}, {"a": [False, True], "b": False}),
        (
            [(jnp.ones((2, 2)), jnp.ones(2)), (jnp.ones((2, 1)), jnp.ones(1))],
            [(True, False), (False, True)],
            [(True, False), (False, True)],
        ),
        ([jnp.ones(2), jnp.ones((3, 1))], lambda tree: [leaf.ndim == 2 for leaf in tree], [False, True]),
    ],
    ids=["list", "tuple", "tree of a list", "path through a list", "list of tuples", "callable on a list"],
)
def test_resolved_mask_has_the_structure_of_the_parameters(params, spec, expected):
    answer = bridge.resolve_mask(spec, params)
    assert jax.tree.structure(answer) == jax.tree.structure(expected)
    assert answer == expected


def test_mask_mapped_over_parameters_with_none_fits_them():
    params = {"weight": jnp.ones((2, 2)), "bias": None, "scale": jnp.ones(2)}
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, params)
    assert bridge.resolve_mask(mask, params) == {"weight": True, "bias": None, "scale": False}


class TestBoolTensors:
    PARTIAL = np.array([[True, False, False, True], [False, True, False, False]])

    @pytest.mark.parametrize("convert", [torch.tensor, np.array, jnp.asarray], ids=["torch", "numpy", "jax"])
    def test_bool_array_selects_elements_of_its_parameter(self, convert, model):
        answer = bridge.resolve_mask(tree_of(model, False, weight=convert(self.PARTIAL), bias=True), model)
        elements = answer.pop("head.weight")
        assert isinstance(elements, np.ndarray)
        assert elements.dtype == bool
        np.testing.assert_array_equal(elements, self.PARTIAL)
        assert answer == {name: name == "head.bias" for name in ALL - {"head.weight"}}

    @pytest.mark.parametrize(
        "spec",
        [
            lambda mask: [("head.weight", mask), ("*", False)],
            lambda mask: {"head.weight": mask},
            lambda mask: lambda name, param: mask if name == "head.weight" else False,
            lambda mask: lambda tree: {"encoder": False, "head": {"weight": mask, "bias": False}},
        ],
        ids=["pair", "dict", "callable", "callable on the tree"],
    )
    def test_every_rule_may_return_a_bool_tensor(self, spec, model):
        decided = values(spec(torch.tensor(self.PARTIAL)), model, "mask")
        np.testing.assert_array_equal(decided.pop("head.weight"), self.PARTIAL)
        assert decided == dict.fromkeys(ALL - {"head.weight"}, False)

    @pytest.mark.parametrize("convert", [torch.tensor, np.array, jnp.asarray], ids=["torch", "numpy", "jax"])
    @pytest.mark.parametrize("wrap", [list, tuple, lambda layer: [tuple(layer)]], ids=["list", "tuple", "list of one pair"])
    def test_bool_array_fits_parameters_in_sequences(self, wrap, convert):
        params = wrap([jnp.ones((2, 4)), jnp.ones(4)])
        answer = bridge.resolve_mask(wrap([convert(self.PARTIAL), True]), params)
        assert jax.tree.structure(answer) == jax.tree.structure(params)
        elements, bias = jax.tree.leaves(answer)
        np.testing.assert_array_equal(elements, self.PARTIAL)
        assert bias is True

    @pytest.mark.parametrize("everywhere", [True, False])
    @pytest.mark.parametrize("convert", [torch.tensor, np.array, jnp.asarray], ids=["torch", "numpy", "jax"])
    def test_constant_bool_array_becomes_a_bool(self, everywhere, convert, model):
        mask = tree_of(model, not everywhere, weight=convert(np.full((2, 4), everywhere)))
        answer = bridge.resolve_mask(mask, model)
        assert answer["head.weight"] is everywhere
        assert answer["head.bias"] is (not everywhere)

    def test_transposed_bool_tensor_keeps_its_elements(self, model):
        mask = torch.tensor(self.PARTIAL.T.copy()).t()
        assert not mask.is_contiguous()
        np.testing.assert_array_equal(bridge.resolve_mask({"head.weight": mask}, model)["head.weight"], self.PARTIAL)

    def test_later_change_of_a_bool_tensor_has_no_effect(self, model):
        mask = torch.tensor(self.PARTIAL)
        answer = bridge.resolve_mask({"head.weight": mask}, model)
        mask.logical_not_()
        np.testing.assert_array_equal(answer["head.weight"], self.PARTIAL)

    @pytest.mark.parametrize(
        ("mask", "got", "expected"),
        [
            (torch.ones(4, 2, dtype=torch.bool), r"\(4, 2\)", r"\(2, 4\)"),
            (torch.ones(2, 1, dtype=torch.bool), r"\(2, 1\)", r"\(2, 4\)"),
            (torch.tensor(True), r"\(\)", r"\(2, 4\)"),
            (torch.ones(2, 4), "float32", "bool"),
            (torch.ones(2, 4, dtype=torch.uint8), "uint8", "bool"),
            (torch.ones(2, 4, dtype=torch.bfloat16), "bfloat16", "bool"),
            (np.ones((2, 4), np.int64), "int64", "bool"),
        ],
        ids=["transposed shape", "broadcastable shape", "no dimensions", "float", "uint8", "bfloat16", "numpy int64"],
    )
    @pytest.mark.parametrize("resolve", [bridge.resolve_mask, by_optimizer], ids=["resolve_mask", "MaskedAdamW"])
    def test_tensor_of_wrong_shape_or_dtype_raises_and_names_both(self, mask, got, expected, resolve, model):
        with pytest.raises((ValueError, TypeError), match=f"'head.weight'.*{got}.*expected.*{expected}"):
            resolve(tree_of(model, False, weight=mask), model)

    @pytest.mark.parametrize(
        ("kind", "text"),
        [("decay_mask", "decay_mask: 'head.weight'.*expected True or False"), ("labels", "labels: 'head.weight'.*label is")],
    )
    def test_only_masks_accept_bool_tensors(self, kind, text, model):
        mask = torch.tensor(self.PARTIAL)
        with pytest.raises(TypeError, match=f"(?s){text}"):
            resolve_selector([("head.weight", mask), ("*", False)], leaves_of(model), kind)


LABELS = {
    "pairs": (lambda m: [("head.*", "new"), ("*", "old")], HEAD),
    "pairs with a module and the rest": (lambda m: [(m.head, "new"), (None, "old")], HEAD),
    "a dict with a default": (lambda m: {"": "old", "head": "new"}, HEAD),
    "a dict over every module": (lambda m: {"encoder": "old", "encoder.0": "new", "head": "old"}, {"encoder.0.weight", "encoder.0.bias"}),
    "a callable": (lambda m: lambda name, param: "new" if param.ndim == 1 else "old", BIASES),
    "a tree": (lambda m: tree_of(m, "old", weight="new"), {"head.weight"}),
    "a prefix of the tree": (lambda m: {"encoder": "old", "head": {"weight": "new", "bias": "old"}}, {"head.weight"}),
    "a callable on the tree": (lambda m: lambda tree: jax.tree.map(lambda p: "new" if p.ndim == 2 else "old", tree), WEIGHTS),
    "a callable on the tree giving a prefix": (lambda m: lambda tree: {key: "new" if key == "head" else "old" for key in tree}, HEAD),
}


@every_label_route
@pytest.mark.parametrize(("build", "new"), LABELS.values(), ids=LABELS)
def test_every_selector_gives_labels_on_every_route(build, new, route, model):
    assert route(build(model), model) == {name: "new" if name in new else "old" for name in ALL}


@every_label_route
@pytest.mark.parametrize(
    "spec",
    [
        [("*.weight", "a"), ("encoder.*", "b")],
        {"encoder": "a", "head.weight": "b"},
        lambda name, param: "a" if name != "head.bias" else None,
    ],
    ids=["pairs", "dict", "callable"],
)
def test_leaf_without_label_raises_and_is_named(spec, route, model):
    with pytest.raises(ValueError, match=r"labels.*'head\.bias'.*label"):
        route(spec, model)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_leaf_without_matching_rule_of_a_mask_is_false(kind, model):
    assert values([("head.weight", True)], model, kind) == {name: name == "head.weight" for name in ALL}


ERRORS = {
    "a module's name without its star": ("head", ValueError, r"'head' matches none.*Did you mean.*'head\.\*'"),
    "a misspelt glob": ("hed.*", ValueError, r"'hed\.\*' matches none of 6 parameters.*Did you mean.*'head\."),
    "a misspelt name": ("head.wieght", ValueError, r"'head\.wieght' matches none.*Did you mean 'head\.weight'"),
    "a glob nothing resembles": ("zzz*", ValueError, r"'zzz\*' matches none.*encoder\.0\.weight"),
    "a glob of the wrong case": ("HEAD.*", ValueError, r"'HEAD\.\*' matches none.*'?head\."),
    "an empty pattern": ("", ValueError, "'' matches none"),
    "one wrong glob in a list": (["head.*", "encoder"], ValueError, r"\[1\].*'encoder' matches none.*Did you mean.*'encoder\.\*'"),
    "a regular expression": (re.compile("^weight"), ValueError, r"'\^weight' matches none"),
    "one wrong glob in pairs": ([("*.bias", True), ("head", False)], ValueError, r"\[1\].*'head' matches none.*Did you mean.*'head\.\*'"),
    "a misspelt key": ({"encodr": True, "": False}, ValueError, "'encodr'.*Did you mean.*'encoder'"),
    "half a key": ({"enc": True}, ValueError, "'enc'.*Did you mean.*'encoder'"),
    "a glob as a key": ({"head.*": True}, ValueError, r"'head\.\*'.*Did you mean.*'head'"),
    "a misspelt key over nothing": ({"": True, "hed": {}}, ValueError, "'hed'.*Did you mean.*'head'"),
    "a tree without a leaf": (
        {"encoder": True, "head": {"weight": True}},
        ValueError,
        r"no entry for 'head\.bias'.*Expected the nested dict",
    ),
    "a tree without a module": (
        {"head": {"weight": True, "bias": True}},
        ValueError,
        r"'encoder\.0\.\w+'.*4 of 6.*Expected the nested dict",
    ),
    "a tree with a further leaf": ({"encoder": True, "head": {"weight": True, "bias": True, "gain": True}}, ValueError, r"'head\.gain'"),
    "a callable's tree without a leaf": (lambda tree: {"encoder": True, "head": {"weight": True}}, ValueError, r"'head\.bias'.*Expected"),
    "a tree of another kind": ([True], ValueError, "structure"),
    "an empty list": ([], ValueError, "empty list selects nothing"),
    "an empty generator": (iter(()), ValueError, "empty .*selects nothing"),
    "a number": (3, TypeError, "int.*3.*Expected None, a bool, a glob"),
    "an object": (object(), TypeError, "object.*Expected None, a bool, a glob"),
    "a label in pairs": ([("head.*", "slow")], TypeError, r"'head\.\w+' got 'slow'.*expected True or False"),
    "a label in a dict": ({"head": "slow"}, TypeError, r"'head\.\w+' got 'slow'.*expected True or False"),
    "an int in a dict": ({"head": 1}, TypeError, r"'head\.\w+' got 1.*expected True or False"),
    "an int in a tree": (
        {"encoder": True, "head": {"weight": 1, "bias": True}},
        TypeError,
        r"'head\.weight' got 1.*expected True or False",
    ),
    "None from a callable": (lambda name, param: None, TypeError, r"'encoder\.0\.\w+' got None.*expected True or False"),
    "pairs with a match object from a callable": (
        [(lambda name, param: re.search("bias", name), False), ("*", True)],
        TypeError,
        r"'encoder\.0\.\w+' got .*expected True or False",
    ),
    "pairs with a label from a callable": (
        [(lambda name, param: "x", True)],
        TypeError,
        r"'encoder\.0\.\w+' got 'x'.*expected True or False",
    ),
    "pairs with a number as the selector": ([(3, True)], TypeError, r"\[0\].*int.*3.*Expected None, a bool, a glob"),
    "pairs with an array as the selector": ([(np.ones((2, 4), bool), True)], (TypeError, ValueError), "array"),
    "a callable of three": (lambda name, param, more: True, TypeError, r"3 arguments; expected \(name, param\) or \(tree\)"),
    "a callable of none": (lambda: True, TypeError, r"0 arguments; expected \(name, param\) or \(tree\)"),
    "another module": (nn.Linear(4, 2), ValueError, "Linear.*2 parameters.*6 optimized"),
    "a module without parameters": (nn.ReLU(), ValueError, "ReLU.*0 parameters"),
    "another parameter": ([nn.Parameter(torch.ones(5, 7))], ValueError, r"1 of 1.*\(5, 7\).*not optimized"),
}


@every_mask_route
@pytest.mark.parametrize(("spec", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_every_wrong_selector_raises_and_states_what_was_expected(spec, error, text, route, model):
    with pytest.raises(error, match=f"(?s)^(decay_)?mask.*{text}"):
        route(spec, model)


def test_error_counts_parameters_that_are_not_optimized(model):
    with pytest.raises(ValueError, match=r"mask.*1 of 3.*\(5, 7\).*not optimized"):
        bridge.resolve_mask([*model.head.parameters(), nn.Parameter(torch.ones(5, 7))], model)


@pytest.mark.parametrize("kind", [*MASK_KINDS, "labels"])
def test_error_names_its_argument(kind, model):
    with pytest.raises(ValueError, match=f"^{kind}.*'nothing'"):
        resolve_selector([("nothing", True), ("*", True)], leaves_of(model), kind)


@pytest.mark.parametrize(
    "spec",
    ["head.*", ["head.*"], re.compile("bias"), [("head.*", True), (None, False)], {"head": True}],
    ids=["glob", "list of globs", "regular expression", "pairs", "dict"],
)
def test_pattern_on_unnamed_parameters_raises_with_advice(spec, model):
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        MaskedAdamW(model.parameters(), mask=spec)
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        resolve_selector(spec, leaves_of(model, named=False), "decay_mask")


@pytest.mark.parametrize(
    ("build", "trained"),
    [
        (lambda m: None, 6),
        (lambda m: m.head, 2),
        (lambda m: m.encoder.parameters(), 4),
        (lambda m: lambda name, param: param.ndim == 1, 3),
        (lambda m: [(m.head, False), (None, True)], 4),
    ],
    ids=["None", "module", "parameters", "callable", "pairs"],
)
def test_selector_that_is_not_a_pattern_needs_no_names(build, trained, model):
    rows = MaskedAdamW(model.parameters(), mask=build(model)).report().rows
    assert [row["status"] for row in rows].count("trained") == trained


@pytest.mark.parametrize(
    "spec",
    [
        lambda traced: {"head": traced > 0},
        lambda traced: {"head.bias": jnp.full(2, True) & (traced > 0)},
        lambda traced: lambda name, param: traced > 0,
        lambda traced: [("head.*", traced > 0)],
        lambda traced: traced > 0,
    ],
    ids=["dict", "array", "callable", "pair", "bare"],
)
def test_value_made_inside_jit_raises_and_is_called_traced(spec, model):
    @jax.jit
    def inside(traced):
        bridge.resolve_mask(spec(traced), model)
        return traced

    with pytest.raises(TypeError, match=r"mask: .*'(head|encoder).*traced.*outside jit"):
        inside(jnp.float32(1))


class TestReport:
    @pytest.mark.parametrize(
        ("spec", "trained_by", "frozen_by"),
        [
            ("head.*", "'head.*'", "'head.*'"),
            (["head.*"], "'head.*'", "mask"),
            ([("encoder.*", False), ("head.*", True)], "'head.*'", "'encoder.*'"),
            ({"": False, "head": True}, "['head']", "['']"),
            ([("head.*", True)], "[0] 'head.*'", "no rule"),
        ],
        ids=["glob", "list", "pairs", "dict", "no rule"],
    )
    def test_decided_by_names_the_deciding_rule(self, spec, trained_by, frozen_by, model):
        decided = {row["parameter"]: row["decided by"] for row in MaskedAdamW(model.named_parameters(), mask=spec).report().rows}
        assert all(trained_by in decided[name] for name in HEAD)
        assert all(frozen_by in decided[name] for name in ENCODER)
        assert decided["head.bias"] != decided["encoder.0.bias"]

    @pytest.mark.parametrize(("count", "status"), [(0, "frozen"), (3, "trained in 3 of 12 elements"), (12, "trained")])
    def test_status_counts_the_elements_of_a_bool_tensor(self, count, status, model):
        mask = (torch.arange(12) < count).reshape(4, 3)
        optimizer = MaskedAdamW(model.named_parameters(), mask={"encoder.0.weight": mask, "head": True})
        statuses = {row["parameter"]: row["status"] for row in optimizer.report().rows}
        assert statuses == {name: "trained" if name in HEAD else "frozen" for name in ALL} | {"encoder.0.weight": status}


def random_glob(rng, names):
    """Return a glob made from one of the names, or sometimes from a name that does not exist."""
    segments = rng.choice(names).split(".") if rng.random() < 0.97 else ["d", "a", "b"]
    for index, segment in enumerate(segments):
        segments[index] = rng.choice([segment, segment, "*", "?", "[ab]", "[!a]", f"{segment}*"])
    glob = ".".join(segments)
    return "*" + glob[rng.randrange(len(glob)) :] if rng.random() < 0.3 else glob


@pytest.mark.parametrize("kind", [*MASK_KINDS, "labels"])
def test_random_pairs_decide_like_the_first_match_in_a_loop(kind):
    rng = random.Random(kind)
    outcomes = {"no match": 0, "no label": 0, "decided": 0}
    for _ in range(300):
        names = sorted({".".join(rng.choice(["a", "b", "ab", "A"]) for _ in range(3)) for _ in range(rng.randint(2, 12))})
        rules = [
            (random_glob(rng, names), rng.choice(["x", "y", "z"] if kind == "labels" else [True, False])) for _ in range(rng.randint(1, 6))
        ]
        if rng.random() < 0.5:
            rules.append(("*", "rest" if kind == "labels" else False))
        params = [jnp.zeros(1)] * len(names)
        leaves = NamedLeaves(names, params, functools.partial(nest, list(zip(names, params, strict=True))), has_names=True)
        unmatched = [glob for glob, _ in rules if not any(fnmatchcase(name, glob) for name in names)]
        first = [next(((glob, value) for glob, value in rules if fnmatchcase(name, glob)), None) for name in names]
        unlabelled = [name for name, rule in zip(names, first, strict=True) if rule is None and kind == "labels"]
        if unmatched or unlabelled:
            outcomes["no match" if unmatched else "no label"] += 1
            with pytest.raises(ValueError, match=re.escape(repr((unmatched or unlabelled)[0]))):
                resolve_selector(rules, leaves, kind)
            continue
        outcomes["decided"] += 1
        decisions = resolve_selector(rules, leaves, kind)
        assert [decision.value for decision in decisions] == [rule[1] if rule else False for rule in first]
        for decision, rule in zip(decisions, first, strict=True):
            assert (repr(rule[0]) if rule else "no rule") in decision.rule
    assert min(count for outcome, count in outcomes.items() if kind == "labels" or outcome != "no label") > 20


class TestEquinox:
    @pytest.fixture
    def net(self):
        eqx = pytest.importorskip("equinox")

        class Net(eqx.Module):
            layers: list
            scale: object

            def __call__(self, x):
                raise AssertionError("a mask must not be called")

        class Layer(eqx.Module):
            weight: object
            bias: object

            def __call__(self, x):
                raise AssertionError("a mask must not be called")

        def build(first, second, third, fourth, scale):
            return Net([Layer(first, second), Layer(third, fourth)], scale)

        build.prefix = Net
        return build

    @pytest.fixture
    def params(self, net):
        return net(jnp.ones((2, 3)), jnp.ones(3), jnp.ones((3, 1)), jnp.ones(1), jnp.ones(()))

    def test_callable_module_of_bools_is_a_mask_and_not_called(self, net, params):
        mask = net(True, False, False, True, False)
        answer = bridge.resolve_mask(mask, params)
        assert jax.tree.structure(answer) == jax.tree.structure(params)
        assert jax.tree.leaves(answer) == [True, False, False, True, False]

    def test_callable_module_may_hold_bool_arrays(self, net, params):
        elements = np.array([[True, False, True], [False, False, True]])
        answer = bridge.resolve_mask(net(elements, False, jnp.ones((3, 1), bool), False, False), params)
        np.testing.assert_array_equal(answer.layers[0].weight, elements)
        assert answer.layers[1].weight is True

    def test_callable_module_may_be_a_prefix(self, net, params):
        assert jax.tree.leaves(bridge.resolve_mask(net.prefix([True, False], True), params)) == [True, True, False, False, True]

    def test_callable_module_of_strings_gives_labels(self, net, params):
        assert jax.tree.leaves(bridge.resolve_labels(net("a", "b", "c", "d", "e"), params)) == ["a", "b", "c", "d", "e"]

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("layers.*.bias", [False, True, False, True, False]),
            ({"layers.1": True, "layers.1.bias": False}, [False, False, True, False, False]),
            (lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree), [True, False, True, False, False]),
            (lambda name, param: name == "scale" and param.ndim == 0, [False, False, False, False, True]),
        ],
        ids=["glob", "dict", "callable on the tree", "callable"],
    )
    def test_key_paths_joined_by_dots_are_the_names(self, spec, expected, params):
        answer = bridge.resolve_mask(spec, params)
        assert jax.tree.structure(answer) == jax.tree.structure(params)
        assert jax.tree.leaves(answer) == expected

    def test_module_with_a_callable_leaf_is_called(self, params):
        eqx = pytest.importorskip("equinox")

        class Predicate(eqx.Module):
            test: object

            def __call__(self, name, param):
                return self.test(name)

        answer = bridge.resolve_mask(Predicate(lambda name: name.endswith("weight")), params)
        assert jax.tree.leaves(answer) == [True, False, True, False, False]

    def test_module_of_another_structure_raises(self, net, params):
        with pytest.raises(ValueError, match=r"(?s)mask.*structure"):
            bridge.resolve_mask(net.prefix([True, False, True], True), params)

    def test_module_of_parameters_as_mask_raises_and_names_the_leaf(self, params):
        with pytest.raises(ValueError, match=r"'layers\.0\.weight'.*float32.*expected.*bool"):
            bridge.resolve_mask(params, params)


def test_equinox_module_with_parameter_names_is_a_mask():
    eqx = pytest.importorskip("equinox")

    class Lin(eqx.Module):
        weight: bool
        bias: bool

    class Net(eqx.Module):
        body: object
        head: object

    params = {"body": {"weight": 0.0, "bias": 0.0}, "head": {"weight": 0.0, "bias": 0.0}}
    expected = {"body": {"weight": False, "bias": True}, "head": {"weight": True, "bias": True}}
    assert bridge.resolve_mask(Net(Lin(False, True), True), params) == expected
    with pytest.raises(ValueError, match="does not fit the parameters"):
        bridge.resolve_mask(Lin(False, True), params)
