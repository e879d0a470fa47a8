"""Checks that each of two gloo processes runs for tests/torch_api/test_distributed.py; families of checks share one start."""

import copy
import datetime
import io
import time
import warnings
from pathlib import Path

import jax
import optax
import optax.contrib
import torch
import torch.distributed as dist
from oracles import movement_error
from torch.nn.parallel import DistributedDataParallel

import bridge
import torch_api
from torch_api._rules import torch_rules

WORLD = 2
STEPS, LR = 6, 0.05


class Net(torch.nn.Module):
    """A module with sizes that two ranks cannot share evenly, a one-element parameter, and one frozen by requires_grad."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(6, 7), torch.nn.LayerNorm(7)
        self.fixed, self.head = torch.nn.Linear(7, 7), torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.fixed.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.fixed(torch.tanh(self.norm(self.body(x))))) * self.scale


MASK = {"": True, "fixed": False}  # fixed.weight requires grad and is masked


def trained(model):
    return {name: p for name, p in model.named_parameters() if "fixed" not in name}


def masked_adamw(model, **kwargs):
    return torch_api.MaskedAdamW(model.named_parameters(), lr=LR, weight_decay=0.1, mask=MASK, **kwargs)


def torch_adamw(model):
    return torch.optim.AdamW(list(trained(model).values()), lr=LR, weight_decay=0.1)


def train(model, optimizer, steps=STEPS, start=0):
    """Train from step `start` to `steps` on batches that depend only on step and rank; return the losses."""
    losses = []
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(100 * (step % 2) + dist.get_rank())
        x = torch.randn(16, 6, generator=generator)
        loss = (model(x) - x[:, :3].cumsum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def values(model):
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal_bits(left, right):
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert bits(x) == bits(right[name]), name


def assert_same_on_every_rank(tensors):
    for name, x in tensors.items():
        others = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(others, x)
        assert all(bits(x) == bits(other) for other in others), name


def assert_near(ours, theirs, start):
    for name, x in theirs.items():
        if "fixed" in name:
            assert bits(ours[name]) == bits(x) == bits(start[name]), name
        else:
            assert movement_error(ours[name], x, start[name]) < 1e-5, name


def assert_warm_steps_compile_nothing(model, optimizer):
    compiled, traced = bridge.compilations(), bridge.traces()
    train(model, optimizer, STEPS + 2, STEPS)
    assert (bridge.compilations(), bridge.traces()) == (compiled, traced)


def through_bytes(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def raised(kind, action):
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind}")


# ------------------------------------------------------------------ DistributedDataParallel


def check_ddp(_):
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        start = values(Net())
        reference = DistributedDataParallel(Net(), **options)
        train(reference, torch_adamw(reference))
        model = DistributedDataParallel(Net(), **options)
        optimizer = masked_adamw(model.module)
        losses = train(model, optimizer)
        assert losses[-2] < 0.9 * losses[0]
        assert_near(values(model), values(reference), start)
        assert_same_on_every_rank(values(model))
        state = optimizer.state_dict()["state"]
        assert_same_on_every_rank({f"{i}.{key}": x for i, fields in state.items() for key, x in fields.items()})
        assert_warm_steps_compile_nothing(model, optimizer)


def check_optimizer_may_be_made_before_ddp_wraps_the_model(_):
    """DDP broadcasts the parameters of rank 0 into the memory that the optimizer has adopted."""
    model = Net()
    with torch.no_grad():
        model.body.weight += dist.get_rank()
    optimizer = masked_adamw(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    train(wrapped, optimizer)
    assert_same_on_every_rank(values(wrapped))
    assert all(row["write-back"] in ("inplace", "none") for row in optimizer.report().rows)


def check_ddp_resumes_where_it_stopped(_):
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = masked_adamw(model.module)
    train(model, optimizer, 3)
    saved = through_bytes({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, STEPS, 3)
    again = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    resumed = masked_adamw(again.module)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, STEPS, 3)
    assert_equal_bits(values(again), values(model))
    torch.optim.AdamW(Net().parameters()).load_state_dict(saved["optimizer"])


# ------------------------------------------------------------------ ZeroRedundancyOptimizer


def groups_of(model):
    return [
        {"params": [p for name, p in model.named_parameters() if name.startswith("fixed")], "trainable": False},
        {"params": list(trained(model).values())},
    ]


def zero(model, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns about torch.jit

    return ZeroRedundancyOptimizer(groups_of(model.module), optimizer_class=torch_api.MaskedAdamW, lr=LR, weight_decay=0.1, **options)


def check_zero(_):
    for options in ({}, {"parameters_as_bucket_view": True}):
        start = values(Net())
        reference = DistributedDataParallel(Net())
        train(reference, torch_adamw(reference))
        model = DistributedDataParallel(Net())
        optimizer = zero(model, **options)
        losses = train(model, optimizer)
        assert losses[-2] < 0.9 * losses[0]
        assert_near(values(model), values(reference), start)
        assert_same_on_every_rank(values(model))
        held = sum(x.numel() for state in optimizer.optim.state.values() for x in state.values())
        assert 0 < held < 2 * sum(p.numel() for p in trained(model).values())
        assert_warm_steps_compile_nothing(model, optimizer)


def check_zero_resumes_where_it_stopped(_):
    model = DistributedDataParallel(Net())
    optimizer = zero(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 3)
    schedule.step()
    optimizer.consolidate_state_dict(to=0)
    saved = [through_bytes(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    plain = torch.optim.AdamW(groups_of(Net()))
    plain.load_state_dict(saved[0])
    assert len(plain.state) == len(trained(model)) + 1  # fixed.weight has an empty entry
    again = DistributedDataParallel(Net())
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, STEPS, 3)
    resumed = zero(again)
    resumed.load_state_dict(saved[0])
    train(again, resumed, STEPS, 3)
    assert resumed.optim.param_groups[1]["lr"] == 0.5 * LR
    assert_equal_bits(values(again), values(model))


# ------------------------------------------------------------------ DTensors made by hand


def check_sharded_dtensors_with_given_gradients_match_whole_parameters(_):
    """Rows, columns, uneven shards and empty shards give the numbers and the state of the whole parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    plain = {"rows": torch.randn(7, 5), "columns": torch.randn(3, 4), "one": torch.randn(1), "bias": torch.randn(6), "0-d": torch.randn(())}
    placements = {"columns": [Shard(1)], "0-d": [Replicate()]}
    plain = {name: torch.nn.Parameter(x) for name, x in plain.items()}
    lying = {
        name: torch.nn.Parameter(distribute_tensor(x.detach().clone(), mesh, placements.get(name, [Shard(0)]))) for name, x in plain.items()
    }
    mask = {"": True, "rows": torch.randn(7, 5) > 0, "bias": False}
    pair = [torch_api.MaskedAdamW(params.items(), lr=0.1, weight_decay=0.1, mask=mask) for params in (plain, lying)]
    for step in range(4):
        for name, p in plain.items():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            # Gradients may come with other placements and are then redistributed like the parameter.
            like = [Replicate()] if step % 2 else lying[name].placements
            lying[name].grad = distribute_tensor(p.grad.clone(), mesh, like)
        for optimizer in pair:
            optimizer.step()
    lying["columns"].grad = torch.ones(3, 4)
    text = raised(ValueError, pair[1].step)
    assert "has shape (3, 4), dtype torch.float32 on cpu; the parameter has shape (3, 2) here, a part of (3, 4): expected a D" in text
    for name, p in lying.items():
        torch.testing.assert_close(p.full_tensor(), plain[name], rtol=1e-6, atol=1e-6)
        assert pair[1].state.get(p, {}).keys() == pair[0].state.get(plain[name], {}).keys()
        for key, x in pair[1].state.get(p, {}).items():
            torch.testing.assert_close(whole(x), pair[0].state[plain[name]][key], rtol=1e-6, atol=1e-6)


def _pair_of_layouts(layouts):
    """Return whole parameters and the same ones on meshes: for each name a shape, and a mesh with placements or None for a plain tensor."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    plain = {name: torch.nn.Parameter(torch.randn(shape)) for name, (shape, _) in layouts.items()}
    lying = {
        name: torch.nn.Parameter(plain[name].detach().clone() if at is None else distribute_tensor(plain[name].detach().clone(), *at))
        for name, (_, at) in layouts.items()
    }
    return plain, lying


def _give(plain, lying, step):
    """Give both the same random gradients."""
    for name, p in plain.items():
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
        p.grad = torch.randn(p.shape, generator=generator)
        lying[name].grad = distributed_like(lying[name], p.grad.clone()) if hasattr(lying[name], "placements") else p.grad.clone()


def check_norm_and_metrics_cover_all_shards(_):
    """SGD moves by the clip factor itself. The layouts have uneven, empty, replicated and whole parameters, and two meshes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    line, grid = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    rows, columns = (line, [Shard(0)]), (line, [Shard(1)])
    one_mesh = {"rows": ((7, 5), rows), "columns": ((3, 4), columns), "empty": ((1,), rows), "copied": ((4,), (line, [Replicate()]))}
    hybrid = {"rows": ((7, 5), (grid, [Replicate(), Shard(0)])), "empty": ((1,), (grid, [Shard(0), Shard(0)]))}
    plain_beside = {f"plain{i}": ((6,), None) for i in range(5)}  # five make a bucket
    cases = {
        "one mesh": one_mesh,
        "hybrid": hybrid,
        "mixed": one_mesh | plain_beside,
        "two meshes": one_mesh | {"grid": ((7, 5), (grid, [Shard(0), Replicate()]))},
    }
    reduced = {"one mesh": 1, "hybrid": 2, "mixed": 1, "two meshes": 3}
    calls, all_reduce = [], dist.all_reduce
    for case, layouts in cases.items():
        if case == "hybrid":
            layouts = layouts | {"twice": ((5,), (grid, [Replicate(), Replicate()]))}
        plain, lying = _pair_of_layouts(layouts)
        start = {name: p.detach().clone() for name, p in plain.items()}
        groups = lambda params: [{"params": list(params.items())[i::2]} for i in range(2)]  # noqa: E731
        pair = [torch_api.MaskedSGD(groups(ps), lr=1.0, momentum=0.9, max_grad_norm=0.1, metrics=True) for ps in (plain, lying)]
        for step in range(STEPS):
            _give(plain, lying, step)
            pair[0].step()
            calls.clear()
            dist.all_reduce = lambda *args, **kwargs: (calls.append(args), all_reduce(*args, **kwargs))[1]
            try:
                pair[1].step()
            finally:
                dist.all_reduce = all_reduce
            assert len(calls) == 2 * reduced[case], (case, len(calls))  # one for the norm, one for the metrics
            torch.testing.assert_close(pair[1].grad_norm, pair[0].grad_norm, rtol=1e-6, atol=0)
            whole_metrics, metrics = (optimizer.metrics() for optimizer in pair)
            assert metrics.keys() == whole_metrics.keys()
            assert "grad_norm/group_1" in metrics
            for name, value in whole_metrics.items():
                assert abs(metrics[name] - value) <= 2e-6 * abs(value), (case, name)
            if step == 2:
                counts = bridge.compilations(), bridge.traces()
        assert (bridge.compilations(), bridge.traces()) == counts
        for name, p in lying.items():
            assert movement_error(whole(p), plain[name].detach(), start[name]) < 1e-6, (case, name)


def check_process_without_gradients_takes_part_in_the_norm(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    plain, lying = _pair_of_layouts({"a": ((4, 3), (mesh, [Shard(0)])), "b": ((6,), (mesh, [Shard(0)]))})
    optimizer = torch_api.MaskedSGD(lying.items(), lr=1.0, max_grad_norm=0.5, metrics=True)
    _give(plain, lying, 0)
    own = sum(float(p.grad[: len(p) // 2].square().sum()) for p in plain.values()) ** 0.5
    before = {name: whole(p) for name, p in lying.items()}
    if dist.get_rank() == 1:
        for p in lying.values():
            p.grad = None
    optimizer.step()
    assert abs(float(optimizer.grad_norm) / own - 1) < 1e-6
    assert abs(optimizer.metrics()["grad_norm"] / own - 1) < 1e-6
    for name, p in lying.items():
        half = len(plain[name]) // 2
        expected = before[name][:half] - plain[name].grad[:half] * 0.5 / own
        torch.testing.assert_close(whole(p)[:half], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(whole(p)[half:], before[name][half:])


def check_process_without_gradients_counts_a_step_that_others_skip(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    plain, lying = _pair_of_layouts({"a": ((4, 3), (mesh, [Shard(0)]))})
    optimizer = torch_api.MaskedSGD(lying.items(), lr=1.0, max_grad_norm=1.0, fused=True)
    for step, value in enumerate((1.0, torch.inf, torch.inf)):
        _give(plain, lying, step)
        lying["a"].grad.to_local().fill_(value)
        if dist.get_rank() == 1:
            lying["a"].grad = None
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert optimizer.skipped_steps == step


def check_element_masks_and_frozen_shards_are_in_no_norm(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    plain, lying = _pair_of_layouts({name: ((5, 2), (mesh, [Shard(0)])) for name in ("a", "b", "frozen")})
    mask = {"a": torch.arange(10).reshape(5, 2) % 3 > 0, "b": True, "frozen": False}
    optimizer = torch_api.MaskedSGD(lying.items(), lr=1.0, max_grad_norm=0.5, mask=mask)
    _give(plain, lying, 0)
    optimizer.step()
    expected = (plain["a"].grad[mask["a"]].square().sum() + plain["b"].grad.square().sum()).sqrt()
    torch.testing.assert_close(optimizer.grad_norm.float(), expected)


def check_every_process_skips_a_step_that_is_not_finite_in_one(_):
    """The infinity is in a gradient of process 0, or its scaler has found one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for bound in (None, 1.0):
        plain, lying = _pair_of_layouts({"a": ((4, 3), (mesh, [Shard(0)]))})
        optimizer = torch_api.MaskedSGD(lying.items(), lr=1.0, max_grad_norm=bound, fused=True)
        for step, kind in enumerate(("finite", "gradient", "scaler")):
            _give(plain, lying, step)
            found = torch.tensor(float(kind == "scaler" and dist.get_rank() == 0))
            if kind == "gradient" and dist.get_rank() == 0:
                lying["a"].grad.to_local()[0, 0] = torch.inf
            before = whole(lying["a"])
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), found
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            assert torch.equal(whole(lying["a"]), before) is (kind != "finite"), (bound, kind)
            assert optimizer.skipped_steps == step


def check_clipped_fsdp_moves_as_torch_clips(_):
    """Compare with torch.optim.AdamW after torch's own clipping."""
    start = values(Net())
    reference, model = sharded(), sharded()
    theirs, optimizer = torch_adamw(reference), masked_adamw(model, max_grad_norm=0.1)
    theirs.register_step_pre_hook(lambda *_: (torch.nn.utils.clip_grad_norm_(trained(reference).values(), 0.1), None)[1])
    train(reference, theirs)
    train(model, optimizer)
    assert_near(values(model), values(reference), start)
    assert_same_on_every_rank(values(model))
    assert_warm_steps_compile_nothing(model, optimizer)


def check_every_kind_of_state_can_be_sharded(_):
    """Update one parameter per rule in one program, and compare with whole parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    # Other rules have the same kinds of state; tests/bridge/_compiler/test_separability.py checks that every rule can be sharded.
    rules = {name: (getattr(torch_rules, name), {}) for name in ("ADAGRAD", "NADAM", "RPROP", "ASGD")}
    plain = {name: torch.nn.Parameter(torch.full((5, 2), 0.5)) for name in rules}
    lying = {name: torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for name, p in plain.items()}
    labels = {name: name for name in rules}
    pair = [torch_api.PartitionedOptimizer(params.items(), rules, labels) for params in (plain, lying)]
    for step in range(4):
        for name, p in plain.items():
            p.grad = torch.randn(5, 2, generator=torch.Generator().manual_seed(step))
            lying[name].grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in pair:
            optimizer.step()
    for name, p in lying.items():
        torch.testing.assert_close(p.full_tensor(), plain[name], rtol=1e-6, atol=1e-6, msg=name)
        ours, theirs = pair[1].state.get(p, {}), pair[0].state.get(plain[name], {})
        assert ours.keys() == theirs.keys(), name
        for key, x in ours.items():
            torch.testing.assert_close(whole(x), theirs[key], rtol=1e-6, atol=1e-6, msg=f"{name} {key}")
            assert hasattr(x, "placements") == (x.shape == (5, 2)), (name, key)


def check_replicated_dtensors_are_updated_like_plain_parameters(_):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(4, 5))
    p = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Replicate()]))
    pair = [torch_api.OptaxOptimizer([q], optax.lamb(1e-2), max_grad_norm=0.5) for q in (plain, p)]
    for step in range(3):
        plain.grad = torch.full((4, 5), float(step + 1))
        # Tensor parallelism leaves the gradient of a replicated parameter as partial sums.
        p.grad = type(p.data).from_local(plain.grad / WORLD, mesh, [Partial()])
        for optimizer in pair:
            optimizer.step()
    assert torch.equal(p.full_tensor(), plain)
    assert optimizer.state[p]["mu"].placements == (Replicate(),)


# ------------------------------------------------------------------ FSDP2


def sharded(net=None):
    from torch.distributed.fsdp import fully_shard

    model = Net() if net is None else net
    if net is None:
        fully_shard(model.body)
    return fully_shard(model)


def check_fsdp(_):
    start = values(Net())
    reference = sharded()
    theirs = torch_adamw(reference)
    train(reference, theirs)
    model = sharded()
    optimizer = masked_adamw(model)
    losses = train(model, optimizer)
    assert losses[-2] < 0.9 * losses[0]
    assert_near(values(model), values(reference), start)
    assert_same_on_every_rank(values(model))
    assert_warm_steps_compile_nothing(model, optimizer)
    for name, p in model.named_parameters():
        if "fixed" in name:
            assert p not in optimizer.state
            continue
        ours, other = optimizer.state[p], theirs.state[dict(reference.named_parameters())[name]]
        assert ours.keys() == other.keys()
        for key, x in ours.items():
            assert (type(x), x.shape, x.stride(), x.dtype) == (type(other[key]), other[key].shape, other[key].stride(), other[key].dtype)
            if key != "step":
                assert (x.device_mesh, x.placements) == (p.device_mesh, p.placements)
                assert x.to_local().shape == p.to_local().shape


def check_all_ways_of_sharding_match_torch(_):
    """Shard by columns, by two mesh dimensions, in mixed precision, and without resharding; compare with torch.optim.AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def columns(p):
        return Shard(1) if p.ndim == 2 and p.shape[1] % WORLD == 0 else None

    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ways = {
        "columns": {"shard_placement_fn": columns},
        "hybrid": {"mesh": hybrid},
        "half": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "reshard_after_forward": False},
    }
    for way, options in ways.items():
        start = values(Net())
        reference, model = fully_shard(Net(), **options), fully_shard(Net(), **options)
        train(reference, torch_adamw(reference), 3)
        train(model, masked_adamw(model), 3)
        for name, x in values(reference).items():
            assert "fixed" in name or movement_error(values(model)[name], x, start[name]) < (0.1 if way == "half" else 1e-5), (way, name)
        assert_same_on_every_rank(values(model))


def check_updates_that_need_the_whole_parameter_are_refused(_):
    model = sharded()
    before = values(model)
    named = list(model.named_parameters())
    refused = {
        "scale": (optax.lamb(1e-2), optax.adafactor(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
        "body.weight": (optax.contrib.muon(1e-2),),  # it uses Adam for parameters that are not matrices
    }
    for name, tx in [(name, tx) for name, several in refused.items() for tx in several]:
        text = raised(ValueError, lambda tx=tx: torch_api.OptaxOptimizer(named, tx, mask=MASK))
        shape = tuple(dict(named)[name].shape)
        assert text.startswith(f"OptaxOptimizer: parameter {name!r} of shape {shape} is sharded over processes as (Shard(dim=0),), but"), (
            text
        )
        assert "clip the global norm by max_grad_norm" in text
        assert "ignored_params" in text
    for made in (torch_api.MaskedMuon, torch_api.MaskedAdafactor):
        text = raised(ValueError, lambda made=made: made(named, lr=LR, mask="body.weight"))
        assert text.startswith(f"{made.__name__}: parameter 'body.weight' of shape (7, 6) is sharded"), text
    assert_equal_bits(values(model), before)
    rest = {"": "rest", "norm": "norm"}
    split = {"rest": (optax.adam, {"lr": 1e-3}), "norm": optax.lamb(1e-2)}
    assert "'norm.weight'" in raised(ValueError, lambda: torch_api.PartitionedOptimizer(named, split, rest))


def check_elementwise_optax_transformations_match_a_whole_copy(_):
    """Compare with a whole copy that gets the same gradients."""
    made = {
        "adamw": (optax.adamw, {"lr": LR, "weight_decay": 0.1}),
        "chain": (optax.chain(optax.clip(0.1), optax.trace(0.9), optax.scale(-1e-2)), {}),
    }
    for name, (tx, options) in made.items():
        model, copied = sharded(), Net()
        optimizer = torch_api.OptaxOptimizer(model.named_parameters(), tx, mask=MASK, **options)
        alone = torch_api.OptaxOptimizer(copied.named_parameters(), tx, mask=MASK, **options)

        def hand_over(optimizer, *_, model=model, copied=copied):
            for p, q in zip(model.parameters(), copied.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.full_tensor()

        optimizer.register_step_pre_hook(hand_over)
        optimizer.register_step_post_hook(lambda *_, alone=alone: alone.step())
        train(model, optimizer)
        for key, x in values(copied).items():
            torch.testing.assert_close(values(model)[key], x, rtol=1e-6, atol=1e-6, msg=f"{name} {key}")
        for p, q in zip(model.parameters(), copied.parameters(), strict=True):
            assert optimizer.state[p].keys() == alone.state[q].keys()
            for key, x in optimizer.state[p].items():
                torch.testing.assert_close(whole(x), alone.state[q][key], rtol=1e-6, atol=1e-6)


def check_element_masks_have_the_shape_of_the_whole_parameter(_):
    generator = torch.Generator().manual_seed(1)
    start = values(Net())
    masks = {name: torch.rand(x.shape, generator=generator) < 0.5 for name, x in start.items() if name in ("body.weight", "head.weight")}
    masks["norm.weight"] = torch.arange(7) < 4  # rank 1 has none of these
    for given in (lambda name, p: masks.get(name, False), lambda name, p: p > 0 if name == "body.weight" else masks.get(name, False)):
        model = sharded()
        optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=LR, mask=given)
        chosen = {name: whole(mask) for name, p in model.named_parameters() if torch.is_tensor(mask := given(name, p))}
        train(model, optimizer)
        for name, x in values(model).items():
            mask = chosen.get(name, torch.zeros_like(x, dtype=torch.bool))
            assert torch.equal(x != start[name], mask), name
    text = raised(ValueError, lambda: torch_api.MaskedAdamW(model.named_parameters(), mask={"body.weight": torch.ones(4, 6) > 0}))
    assert "expected shape (7, 6)" in text


def check_changes_by_hand_take_effect(_):
    model, twin = sharded(), sharded()
    optimizer, other = masked_adamw(model), torch_adamw(twin)
    for net, opt in ((model, optimizer), (twin, other)):
        train(net, opt, 2)
        p, q = net.body.weight, net.head.weight
        opt.state[p]["exp_avg"].mul_(0.5)
        opt.state[q]["exp_avg"] = torch.zeros_like(q)
        net._apply(lambda x: x.clone())  # FSDP pads again, so local tensors move
        with torch.no_grad():
            net.body.bias.add_(1.0)
        train(net, opt, 4, 2)
    for name, x in values(twin).items():
        torch.testing.assert_close(values(model)[name], x, rtol=1e-5, atol=1e-6)
    optimizer.set_trainable("fixed.weight", True)
    before = values(model)
    train(model, optimizer, 5, 4)
    assert not torch.equal(values(model)["fixed.weight"], before["fixed.weight"])
    rows = {row["parameter"]: row for row in optimizer.report().rows}
    local = model.body.weight.to_local().numel()
    assert rows["body.weight"]["write-back"] == "copy: the local tensor of a DTensor, which FSDP may read"
    assert rows["body.weight"]["state bytes"] == 2 * 4 * local + 4
    assert rows["body.weight"]["shape"] == (7, 6)


def check_whole_checkpoint_is_split_into_shards(_):
    plain = Net()
    before = masked_adamw(plain)
    train(plain, before, 3)  # without DDP: each rank has its own batches
    saved = [before.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    model = sharded()
    optimizer = masked_adamw(model)
    optimizer.load_state_dict(saved[0])
    train(model, optimizer, 1)
    held = {index: state for index, state in optimizer.state_dict()["state"].items() if "exp_avg" in state}
    optimizer.load_state_dict(saved[0])
    for index, state in held.items():
        assert float(state["step"]) == 4
        again = whole(optimizer.state_dict()["state"][index]["exp_avg"])
        assert torch.equal(again, saved[0]["state"][index]["exp_avg"])


def check_half_parameters_with_master_weights_ema_and_stochastic_rounding(_):
    """Compare with a whole copy that gets the same gradients, also while the average is swapped in."""
    options = {"master_weights": True, "state_dtype": torch.float32, "ema_decay": 0.5}
    model, copied = sharded(Net().bfloat16()), Net().bfloat16()
    optimizer, alone = masked_adamw(model, **options), masked_adamw(copied, **options)
    for _ in range(3):
        for p, q in zip(model.parameters(), copied.parameters(), strict=True):
            q.grad = torch.randn(q.shape).bfloat16()
            dist.broadcast(q.grad, src=0)
            p.grad = distributed_like(p, q.grad)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(values(model), values(copied))
    before = values(model)
    with optimizer.ema_params(), alone.ema_params():
        torch.testing.assert_close(values(model), values(copied))
        assert not torch.equal(values(model)["body.weight"], before["body.weight"])
    assert_equal_bits(values(model), before)
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        assert optimizer.state.get(p, {}).keys() == alone.state.get(q, {}).keys()
    model = sharded(torch.nn.Linear(2, 2, bias=True).bfloat16())  # the bias has the shape of a rounding key
    optimizer = torch_api.MaskedSGD(model.named_parameters(), lr=1e-4, momentum=0.9, stochastic_rounding=True)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(state["rounding_key"].shape == (2,) for state in optimizer.state.values())


def distributed_like(p, tensor):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, p.device_mesh, p.placements)


def check_every_rank_skips_the_step_if_one_sees_infinity(_):
    for fused in (False, True):
        model = sharded()
        optimizer = masked_adamw(model, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        train(model, optimizer, 2)
        before = values(model)
        loss = model(torch.ones(2, 6)).square().mean()
        scaler.scale(loss).backward()
        model.scale.grad.to_local().fill_(torch.inf)  # the parameter has one element, which rank 0 holds
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert_equal_bits(values(model), before)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
        scaler.step(optimizer)
        assert not torch.equal(values(model)["scale"], before["scale"])


# ------------------------------------------------------------------ torch.distributed.checkpoint


def check_making_state_for_a_checkpoint_changes_no_weight(_):
    """torch makes the state by a step with zero gradients and lr=0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, reference = sharded(), sharded()
    optimizer, theirs = masked_adamw(model), torch_adamw(reference)
    before = values(model)
    ours, others = get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(reference, theirs)
    assert_equal_bits(values(model), before)
    assert ours["state"].keys() == others["state"].keys() | {"fixed.weight"}
    assert [group["lr"] for group in optimizer.param_groups] == [LR]
    for name, state in others["state"].items():
        assert ours["state"][name].keys() == state.keys()
        for key, x in state.items():
            assert torch.equal(whole(ours["state"][name][key]), whole(x)), (name, key)
    assert ours["param_groups"][0].keys() - {"params", "param_names"} >= others["param_groups"][0].keys() - {"params", "param_names"}
    ready = torch_api.OptaxOptimizer(model.named_parameters(), optax.adamw(1e-2), mask=MASK)  # the transformation contains its lr
    get_optimizer_state_dict(model, ready)
    assert_equal_bits(values(model), before)


def check_resumed_runs_equal_the_uninterrupted_run(directory):
    """Resume in other shards, in a whole model and from a whole model; the run equals the uninterrupted one bit for bit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded()
    optimizer = masked_adamw(model)
    train(model, optimizer, 3)
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=f"{directory}/sharded")
    train(model, optimizer, STEPS, 3)

    def resumed(net):
        opt = masked_adamw(net)
        parts = get_state_dict(net, opt)
        saved = {"model": parts[0], "optimizer": parts[1]}
        dcp.load(saved, checkpoint_id=f"{directory}/sharded")
        incompatible = set_state_dict(net, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        assert not any(incompatible)
        return opt

    again = sharded()
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    optimizer_again = resumed(again)
    assert all(float(optimizer_again.state[p]["step"]) == 3 for p in trained(again).values())
    train(again, optimizer_again, STEPS, 3)
    assert_equal_bits(values(again), values(model))

    other = Net()
    optimizer_other = resumed(other)
    train(DistributedDataParallel(other), optimizer_other, STEPS, 3)  # equal mean gradients, perhaps summed in another order
    if torch.__version__.startswith("2.8."):
        return  # torch 2.8 gives other numbers for one-element parameters, also with torch.optim.AdamW
    for name, x in values(model).items():
        torch.testing.assert_close(values(other)[name], x, rtol=1e-5, atol=1e-6)


def check_full_state_dicts_are_saved_and_loaded(_):
    """Save full state dicts on the CPU, and load them on one process that broadcasts to the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_optimizer_state_dict

    whole_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded()
    optimizer = masked_adamw(model)
    train(model, optimizer, 3)
    # Copy: torch does not copy state that one rank holds alone and that already lies on the CPU.
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=whole_options))
    if dist.get_rank() == 0:
        assert not any(hasattr(x, "full_tensor") for fields in state["state"].values() for x in fields.values())
        assert state["state"]["body.weight"]["exp_avg"].shape == (7, 6)
    else:
        assert not weights
    train(model, optimizer, STEPS, 3)
    again = sharded()
    resumed = masked_adamw(again)
    set_model_state_dict(again, weights, options=from_first)
    set_optimizer_state_dict(again, resumed, state, options=from_first)
    for p in trained(again).values():
        assert resumed.state[p]["exp_avg"].placements == p.placements
    train(again, resumed, STEPS, 3)
    assert_equal_bits(values(again), values(model))


FAMILIES = {
    "replicas": (
        check_ddp,
        check_optimizer_may_be_made_before_ddp_wraps_the_model,
        check_ddp_resumes_where_it_stopped,
        check_zero,
        check_zero_resumes_where_it_stopped,
    ),
    "dtensor": (
        check_sharded_dtensors_with_given_gradients_match_whole_parameters,
        check_norm_and_metrics_cover_all_shards,
        check_process_without_gradients_takes_part_in_the_norm,
        check_process_without_gradients_counts_a_step_that_others_skip,
        check_element_masks_and_frozen_shards_are_in_no_norm,
        check_every_process_skips_a_step_that_is_not_finite_in_one,
        check_every_kind_of_state_can_be_sharded,
        check_replicated_dtensors_are_updated_like_plain_parameters,
    ),
    "fsdp": (
        check_fsdp,
        check_clipped_fsdp_moves_as_torch_clips,
        check_all_ways_of_sharding_match_torch,
        check_updates_that_need_the_whole_parameter_are_refused,
        check_elementwise_optax_transformations_match_a_whole_copy,
        check_element_masks_have_the_shape_of_the_whole_parameter,
        check_half_parameters_with_master_weights_ema_and_stochastic_rounding,
        check_every_rank_skips_the_step_if_one_sees_infinity,
        check_changes_by_hand_take_effect,
        check_whole_checkpoint_is_split_into_shards,
        check_making_state_for_a_checkpoint_changes_no_weight,
        check_resumed_runs_equal_the_uninterrupted_run,
        check_full_state_dicts_are_saved_and_loaded,
    ),
}


def checked(directory, rank):
    """Return the names of the checks that this rank has passed."""
    path = Path(directory) / f"rank{rank}"
    return path.read_text().split() if path.exists() else []


def run(rank, families, directory):
    """Run every check of the families in order in one process; the first failure ends it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"(bridge|torch_api)\.")
    method, timeout = f"file://{directory}/rendezvous", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=WORLD, timeout=timeout)
    try:
        with jax.numpy_dtype_promotion("standard"), open(f"{directory}/rank{rank}", "w") as passed:  # optax fails under strict promotion
            for check in (check for family in families for check in FAMILIES[family]):
                begun = time.monotonic()
                check(directory)
                print(f"rank {rank}: {check.__name__} {time.monotonic() - begun:.1f} s", flush=True)
                print(check.__name__, file=passed, flush=True)
    finally:
        dist.destroy_process_group()
