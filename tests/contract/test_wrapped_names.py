"""Parameter names of a wrapped model: checkpoints load with and without the wrapper's prefix, and patterns match without it."""

import copy
import itertools
import re

import pytest
import torch

import torch_api

pytestmark = pytest.mark.unoptimized

PREFIXES = ("", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.", "module.module.", "_fsdp_wrapped_module.")


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def named(model, prefix, inner=""):
    """Return named parameters with a wrapper's prefix on all names, and another one on those of the second layer."""
    return [(prefix + name.replace("1.", f"1.{inner}"), p) for name, p in model.named_parameters()]


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def resumed(saved, loaded, inner_saved="", inner_loaded=""):
    """Return the weights of a run that continues and of a run resumed with its parameters in another order."""
    model, twin = net(), net()
    optimizer = torch_api.MaskedAdamW(named(model, saved, inner_saved), lr=0.1)
    step(model, optimizer)
    twin.load_state_dict(model.state_dict())
    other = torch_api.MaskedAdamW(named(twin, loaded, inner_loaded)[::-1], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["param_names"] == [name for name, _ in named(twin, loaded, inner_loaded)[::-1]]
    step(model, optimizer)
    step(twin, other)
    return list(model.parameters()), list(twin.parameters())


@pytest.mark.parametrize("saved", PREFIXES)
def test_checkpoints_load_with_and_without_a_wrapper(saved):
    for loaded in PREFIXES:
        torch.testing.assert_close(*resumed(saved, loaded), rtol=1e-5, atol=1e-6, msg=f"{saved} -> {loaded}")


@pytest.mark.parametrize("inner", ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."])
def test_checkpoints_load_if_part_of_the_model_is_wrapped(inner):
    for saved, loaded in itertools.permutations((inner, ""), 2):
        ours, theirs = resumed("module.", "", saved, loaded)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_checkpoints_load_through_wrappers_of_torch():
    model = net()
    wrapped = torch.compile(torch.nn.DataParallel(model), backend="eager")
    optimizer = torch_api.MaskedAdamW(wrapped.named_parameters(), lr=0.1, mask="1.*")
    assert [row["status"] for row in optimizer.report().rows] == ["frozen", "frozen", "trained", "trained"]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    other = torch_api.MaskedAdamW(averaged.named_parameters(), lr=0.1, mask={"1": True})
    other.load_state_dict(optimizer.state_dict())


SELECTORS = {
    "glob": ("1.*", "0.*"),
    "globs": (["1.weight", "1.bias"], ["0.*"]),
    "regex": (re.compile(r"^1\."), re.compile(r"^0\.weight$")),
    "prefix": ({"1": True, "0": False}, {"0": True}),
    "nested": ({"1": {"weight": True, "bias": True}, "0": False}, {"0": {"weight": True, "bias": False}, "1": False}),
    "pairs": ([("1.weight", True), ("1.*", True)], [("0.*", True)]),
}


@pytest.mark.parametrize("form", SELECTORS)
def test_patterns_match_without_the_prefix(form):
    for prefix in PREFIXES:
        for spec in SELECTORS[form]:
            expected = torch_api.MaskedAdamW(named(net(), ""), lr=0.1, mask=spec).report().rows
            rows = torch_api.MaskedAdamW(named(net(), prefix), lr=0.1, mask=spec).report().rows
            assert [row["status"] for row in rows] == [row["status"] for row in expected]
            assert [row["parameter"] for row in rows] == [name for name, _ in named(net(), prefix)]


def test_patterns_with_the_prefix_still_match():
    for prefix in PREFIXES:
        for spec in (f"{prefix}1.*", {f"{prefix}1": True}, re.compile(f"^{re.escape(prefix)}1")):
            rows = torch_api.MaskedAdamW(named(net(), prefix), lr=0.1, mask=spec).report().rows
            assert [row["status"] for row in rows] == ["frozen", "frozen", "trained", "trained"]


def test_dict_made_from_the_wrapped_model_matches_the_plain_model():
    model = net()
    for prefix in PREFIXES:
        decay = {prefix + name: value for name, value in torch_api.no_decay(model).items()}
        optimizer = torch_api.MaskedAdamW(named(model, ""), lr=0.1, decay_mask=decay, weight_decay=0.5)
        assert [row["decay"] for row in optimizer.report().rows] == [0.5, 0.0, 0.5, 0.0]


def test_other_selectors_and_labels_match_without_the_prefix():
    model = net()
    optimizer = torch_api.PartitionedOptimizer(
        named(model, "_orig_mod."), {"a": (_sgd, {"lr": 0.1}), "b": (_sgd, {"lr": 0.2})}, labels={"0": "a", "1": "b"}
    )
    optimizer.set_trainable("0.*", False)
    assert [row["label"] for row in optimizer.report().rows] == ["a", "a", "b", "b"]
    assert [row["status"] for row in optimizer.report().rows] == ["frozen", "frozen", "trained", "trained"]
    plain = torch_api.MaskedAdamW(named(model, "_orig_mod."), lr=0.1, lr_scale={"0": 0.5})
    assert [row["lr"] for row in plain.report().rows] == [0.05, 0.05, 0.1, 0.1]


def _sgd(lr):
    import optax

    return optax.sgd(lr)


def test_submodule_named_module_is_not_a_wrapper():
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="matches none of 4 parameters"):
        torch_api.MaskedAdamW(model.named_parameters(), mask="weight")
    params = {"module.enc": torch.nn.Parameter(torch.ones(2)), "enc": torch.nn.Parameter(torch.ones(2))}
    rows = torch_api.MaskedAdamW(params.items(), mask={"module.enc": True}).report().rows
    assert [row["status"] for row in rows] == ["trained", "frozen"]
    optimizer = torch_api.MaskedAdamW(params.items())
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["param_names"] = ["_orig_mod.module.enc", "_orig_mod.enc"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["module.enc", "enc"]


def test_errors_use_the_names_of_the_optimizer():
    optimizer = torch_api.MaskedAdamW(named(net(), "_orig_mod."))
    saved = torch_api.MaskedAdamW(named(net(), "")).state_dict()
    names = saved["param_groups"][0]["param_names"]
    saved["param_groups"][0]["param_names"] = [name.replace("1.bias", "1.offset") for name in names]
    with pytest.raises(ValueError, match=re.escape("no parameter '_orig_mod.1.bias'")):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match=re.escape("'2.*' matches none of 4 parameters")):
        torch_api.MaskedAdamW(named(net(), "_orig_mod."), mask="2.*")


def test_groups_are_matched_by_names_without_wrappers():
    model = net()

    def groups(prefix, order):
        parts = [named(model, prefix)[:2], named(model, prefix)[2:]]
        return [{"params": parts[i], "lr": (0.1, 0.2)[i]} for i in order]

    saved = torch_api.MaskedAdamW(groups("module.", (0, 1))).state_dict()
    other = torch_api.MaskedAdamW(groups("", (1, 0)), lr=9.0)
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]


def test_parameters_frozen_by_set_trainable_are_matched_without_wrappers():
    optimizer = torch_api.MaskedAdamW(named(net(), "_orig_mod."))
    optimizer.set_trainable("0.*", False)
    other = torch_api.MaskedAdamW(named(net(), "")[::-1])
    other.load_state_dict(optimizer.state_dict())
    assert [row["status"] for row in other.report().rows] == ["trained", "trained", "frozen", "frozen"]


def test_trained_flags_are_loaded_by_name_after_a_group_was_added():
    def build(names):
        return [(name, torch.nn.Parameter(torch.zeros(2))) for name in names]

    saved = torch_api.MaskedSGD(build(["weight", "bias"]), lr=0.1)
    saved.set_trainable("bias", False)
    saved.add_param_group({"params": build(["head"])})
    loaded = torch_api.MaskedSGD(build(["bias", "weight"]), lr=0.1)
    loaded.add_param_group({"params": build(["head"])})
    loaded.load_state_dict(saved.state_dict())
    rows = {row["parameter"]: row["status"] for row in loaded.report().rows}
    assert rows == {"bias": "frozen", "weight": "trained", "head": "trained"}
