"""Checkpoints: torch's layout, loading in both directions, exact resumption, and errors that change nothing."""

import copy
import io

import pytest
import torch
from oracles import clones, movement_error, random_grads, random_params, run_pair, set_grads
from sampling import sampled

import torch_api

pytestmark = pytest.mark.unoptimized

PAIRS = {
    "Adam": (torch_api.MaskedAdam, torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch_api.MaskedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (torch_api.MaskedSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "plain SGD": (torch_api.MaskedSGD, torch.optim.SGD, {}),
}


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def named(params):
    return [(f"layer{i}.weight", p) for i, p in enumerate(params)]


def advance(optimizer, params, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        set_grads(params, random_grads(params))
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_keys_shapes_and_dtypes_are_those_of_torch(name):
    masked, original, options = PAIRS[name]
    ours = random_params()
    theirs = clones(ours)
    a, b = masked(ours, lr=0.01, **options), original(theirs, lr=0.01, **options)
    assert a.state_dict()["state"] == b.state_dict()["state"] == {}
    run_pair(a, ours, b, theirs, 3)
    one, two = a.state_dict(), b.state_dict()
    assert one["state"].keys() == two["state"].keys()
    for index, fields in two["state"].items():
        assert one["state"][index].keys() == fields.keys()
        for key, tensor in fields.items():
            assert one["state"][index][key].shape == tensor.shape
            assert one["state"][index][key].dtype == tensor.dtype
            torch.testing.assert_close(one["state"][index][key], tensor)
    ours_group, theirs_group = one["param_groups"][0], two["param_groups"][0]
    assert {k: v for k, v in ours_group.items() if k in theirs_group} == theirs_group
    assert ours_group.keys() == theirs_group.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_checkpoints_load_from_and_into_torch_during_a_run(name):
    masked, original, options = PAIRS[name]
    ours = random_params()
    theirs, start = clones(ours), clones(ours)
    a, b = masked(ours, lr=0.01, **options), original(theirs, lr=0.01, **options)
    run_pair(a, ours, b, theirs, 10)
    a2, b2 = masked(ours, lr=0.5, **options), original(theirs, lr=0.5, **options)
    a2.load_state_dict(through_a_file(b.state_dict()))
    b2.load_state_dict(through_a_file(a.state_dict()))
    assert a2.param_groups[0]["lr"] == b2.param_groups[0]["lr"] == 0.01
    run_pair(a2, ours, b2, theirs, 15)
    assert max(map(movement_error, ours, theirs, start)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.bfloat16, torch.float64, torch.complex64]), ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_resumed_run_equals_the_uninterrupted_one(name, dtype):
    masked, _, options = PAIRS[name]
    params = random_params(dtype)
    optimizer = masked(named(params), lr=0.01, max_grad_norm=1.0, **options)
    advance(optimizer, params, 5, seed=1)
    twins = clones(params)
    resumed = masked(named(twins), lr=9.0, max_grad_norm=1.0, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    advance(optimizer, params, 5, seed=2)
    advance(resumed, twins, 5, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_loaded_moments_are_copies():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params)
    advance(optimizer, params, 2, seed=1)
    twins = clones(params)
    other = torch_api.MaskedAdam(twins)
    other.load_state_dict(optimizer.state_dict())
    before = optimizer.state[params[0]]["exp_avg"].clone()
    advance(other, twins, 2, seed=2)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], before)
    optimizer.load_state_dict(optimizer.state_dict())
    advance(optimizer, params, 2, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_float32_moments_of_bfloat16_parameters_stay_float32():
    params = random_params(torch.bfloat16)
    optimizer = torch_api.MaskedAdam(params)
    advance(optimizer, params, 1, seed=1)
    saved = copy.deepcopy(optimizer.state_dict())
    for fields in saved["state"].values():
        fields["exp_avg"] = fields["exp_avg"].float() + 1e-4
    optimizer.load_state_dict(saved)
    advance(optimizer, params, 1, seed=2)
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in params)
    assert all(optimizer.state[p]["exp_avg_sq"].dtype is torch.bfloat16 for p in params)


def test_float64_moments_of_float32_parameters_become_float32_as_in_torch():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params)
    advance(optimizer, params, 1, seed=1)
    saved = copy.deepcopy(optimizer.state_dict())
    for fields in saved["state"].values():
        fields["exp_avg"] = fields["exp_avg"].double()
        fields["step"] = float(fields["step"])  # torch before 1.12 saved a float
    optimizer.load_state_dict(saved)
    advance(optimizer, params, 1, seed=2)
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in params)
    assert all(float(optimizer.state[p]["step"]) == 2.0 for p in params)


def test_state_is_matched_by_name_if_both_sides_have_names():
    first, second = random_params(shapes=[(4,), (4,)])
    optimizer = torch_api.MaskedAdam([("a", first), ("b", second)])
    advance(optimizer, [first, second], 3, seed=1)
    a, b = clones([first, second])
    swapped = torch_api.MaskedAdam([("b", b), ("a", a)])
    swapped.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(swapped.state[a]["exp_avg"], optimizer.state[first]["exp_avg"])
    assert torch.equal(swapped.state[b]["exp_avg"], optimizer.state[second]["exp_avg"])
    assert swapped.param_groups[0]["param_names"] == ["b", "a"]


def test_scalar_entry_means_no_state():
    first, second = random_params(shapes=[(4,), (4,)])
    optimizer = torch_api.MaskedAdam([("a", first), ("b", second)], mask="a")
    advance(optimizer, [first, second], 1, seed=1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = {"step": torch.tensor(0.0)}
    optimizer.load_state_dict(saved)
    assert second not in optimizer.state


def test_set_trainable_and_group_flags_are_saved_and_loaded():
    params = random_params(shapes=[(4,), (4,), (4,)])
    groups = lambda ps: [{"params": [("a", ps[0]), ("b", ps[1])], "lr_scale": 0.5}, {"params": [("c", ps[2])]}]  # noqa: E731
    optimizer = torch_api.MaskedAdam(groups(params), lr=0.1)
    optimizer.set_trainable("b", False)
    advance(optimizer, params, 2, seed=1)
    twins = clones(params)
    plain = torch_api.MaskedAdam(groups(twins), lr=0.1)
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    advance(optimizer, params, 2, seed=2)
    advance(plain, twins, 2, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    assert [row["status"] for row in plain.report().rows] == ["trained", "frozen", "trained"]
    from_torch = torch.optim.Adam([{"params": twins[:2]}, {"params": twins[2:]}], lr=0.2)
    plain.load_state_dict(from_torch.state_dict())
    assert plain.report().rows[0]["lr"] == 0.1


def test_set_trainable_is_matched_by_name_and_kept_without_saved_flags():
    def build(names):
        return torch_api.MaskedSGD([(name, torch.nn.Parameter(torch.zeros(3))) for name in names], lr=1.0)

    status = lambda o: {row["parameter"]: row["status"] for row in o.report().rows}  # noqa: E731
    optimizer, swapped = build("ab"), build("ba")
    optimizer.set_trainable("a", False)
    swapped.load_state_dict(optimizer.state_dict())
    assert status(swapped) == {"a": "frozen", "b": "trained"}
    swapped.load_state_dict(build("ba").state_dict())
    third = build("ab")
    third.load_state_dict(swapped.state_dict())
    assert status(third) == status(swapped) == {"a": "frozen", "b": "trained"}


def test_step_uses_state_whose_data_was_replaced():
    params = random_params(shapes=[(4,)])
    theirs = clones(params)
    a, b = torch_api.MaskedAdam(params), torch.optim.Adam(theirs)
    run_pair(a, params, b, theirs, 2)
    for o in (a, b):
        for state in o.state.values():
            for tensor in state.values():
                tensor.data = tensor.data.clone() * 2
    run_pair(a, params, b, theirs, 2)
    torch.testing.assert_close(params[0], theirs[0])
    assert float(a.state_dict()["state"][0]["step"]) == 6.0


def test_half_moments_of_float32_parameters_become_float32_as_in_torch():
    half = random_params(torch.bfloat16)
    optimizer = torch.optim.Adam(half)
    advance(optimizer, half, 1, seed=1)
    params = random_params()
    ours = torch_api.MaskedAdam(params)
    ours.load_state_dict(optimizer.state_dict())
    advance(ours, params, 1, seed=2)
    assert all(ours.state[p]["exp_avg"].dtype is torch.float32 for p in params)


def test_user_keys_of_a_group_are_saved_and_loaded():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params)
    optimizer.param_groups[0]["layer"] = "first"
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["layer"] == "first"


def test_state_dict_hooks_run():
    params = random_params()
    optimizer = torch_api.MaskedAdam(params)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, sd: sd | {"extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: calls.append(sorted(sd)))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    advance(optimizer, params, 1, seed=1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", ["extra", "param_groups", "state"], "loaded"]


def test_step_uses_state_edited_or_cleared_by_hand():
    params = random_params(shapes=[(4,)])
    theirs = clones(params)
    a, b = torch_api.MaskedSGD(params, lr=0.1, momentum=0.9), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    run_pair(a, params, b, theirs, 2)
    for o, p in ((a, params[0]), (b, theirs[0])):
        o.state[p]["momentum_buffer"].zero_()
    run_pair(a, params, b, theirs, 2)
    for o, p in ((a, params[0]), (b, theirs[0])):
        o.state[p]["momentum_buffer"] = torch.ones(4)
    run_pair(a, params, b, theirs, 2)
    torch.testing.assert_close(params[0], theirs[0])
    for o in (a, b):
        o.state.clear()
    run_pair(a, params, b, theirs, 2)
    torch.testing.assert_close(params[0], theirs[0])
    torch.testing.assert_close(a.state[params[0]]["momentum_buffer"], b.state[theirs[0]]["momentum_buffer"])


def other(change):
    def make(saved):
        saved = copy.deepcopy(saved)
        change(saved)
        return saved

    return make


BAD = {
    "another shape": (
        other(lambda s: s["state"][0].update(exp_avg=torch.zeros(9))),
        r"state 'exp_avg' of 'layer0.weight' has shape \(9,\), expected \(7, 5\)",
    ),
    "a scalar for a tensor": (other(lambda s: s["state"][0].update(exp_avg=1.0)), r"has shape \(\), expected \(7, 5\)"),
    "another optimizer's fields": (
        other(lambda s: s["state"].update({0: {"momentum_buffer": torch.zeros(7, 5)}})),
        r"state of 'layer0.weight' has the fields \['momentum_buffer'\], expected \['exp_avg', 'exp_avg_sq', 'step'\]",
    ),
    "amsgrad without its state": (
        other(lambda s: s["param_groups"][0].update(amsgrad=True)),
        r"expected \['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step'\].*another option such as amsgrad",
    ),
    "fewer groups": (other(lambda s: s["param_groups"].pop()), "different number of parameter groups: 1, expected 2"),
    "a parameter more": (
        other(lambda s: (s["param_groups"][0]["params"].append(99), s["param_groups"][0]["param_names"].append("new"))),
        "has a parameter 'new' that this optimizer does not have",
    ),
    "a renamed parameter": (
        other(lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "layer0.weights")),
        r"has no parameter 'layer0.weight' \(1 are missing\).*Did you mean 'layer0.weights'",
    ),
    "another size without names": (
        other(lambda s: [g.pop("param_names") for g in s["param_groups"]] and s["param_groups"][0]["params"].pop()),
        "group 0 of the loaded state dict has 2 parameters, expected 3.*Were layers frozen or added",
    ),
    "an unknown group key": (
        other(lambda s: s["param_groups"][0].update(learnig_rate=1)),
        "unknown key 'learnig_rate' in a param group",
    ),
    "no state": (lambda s: {"param_groups": s["param_groups"]}, r"no 'state' in it.*got \['param_groups'\]"),
}


@pytest.mark.parametrize(("make", "text"), BAD.values(), ids=BAD.keys())
def test_wrong_checkpoint_raises_and_changes_nothing(make, text):
    params = random_params()
    groups = [{"params": named(params)[:3]}, {"params": named(params)[3:], "lr": 0.5}]
    optimizer = torch_api.MaskedAdam(groups)
    advance(optimizer, params, 2, seed=1)
    before = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(make(optimizer.state_dict()))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i][k], before["state"][i][k]) for i in before["state"] for k in before["state"][i])
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    advance(optimizer, params, 1, seed=2)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "SGD", "RMSprop", "Adamax", "Adadelta", "ASGD", "Rprop", "Adafactor"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_torch_continues_from_a_checkpoint_with_frozen_parameters(name, frozen):
    """torch continues the trained parameter as we would, and the frozen one, which torch trains, without state."""
    params, options = random_params()[:2], {"lr": 0.01} | ({"momentum": 0.9} if name == "SGD" else {})
    optimizer = getattr(torch_api, f"Masked{name}")(named(params), mask=f"layer{1 - frozen}.*", **options)
    advance(optimizer, params, 3, seed=1)
    theirs, alone = clones(params), clones(params)
    plain, fresh = (getattr(torch.optim, name)(own, **options) for own in (theirs, alone))
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    for one, own in ((optimizer, params), (plain, theirs), (fresh, alone)):
        advance(one, own, 2, seed=2)
    torch.testing.assert_close(theirs[1 - frozen], params[1 - frozen], rtol=1e-5, atol=1e-6)
    assert torch.equal(theirs[frozen], alone[frozen])
    assert not torch.equal(alone[1 - frozen], params[1 - frozen]), "the saved state had no effect"


def test_loaded_state_of_a_frozen_parameter_is_saved_again_and_used_after_a_thaw():
    params = random_params(shapes=[(5, 4), (4,)])
    source = torch.optim.AdamW(named(params), lr=0.01)
    advance(source, params, 3, seed=0)
    ours, theirs = clones(params), clones(params)
    optimizer = torch_api.MaskedAdamW(named(ours), lr=0.01, mask="layer1.*")
    optimizer.load_state_dict(through_a_file(source.state_dict()))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], source.state[params[0]]["exp_avg"])
    reference = torch.optim.AdamW(named(theirs), lr=0.01)
    reference.load_state_dict(through_a_file(source.state_dict()))
    optimizer.set_trainable("layer0.*", True)
    run_pair(optimizer, ours, reference, theirs, 20)
    assert all(movement_error(*each) < 1e-5 for each in zip(ours, theirs, params, strict=True))
    optimizer.set_trainable("layer0.*", False, keep_state=False)
    assert "exp_avg" not in optimizer.state_dict()["state"].get(0, {})
