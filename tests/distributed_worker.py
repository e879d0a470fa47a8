"""What each process of tests/test_distributed.py runs: checks on two gloo processes, in families that share one start."""

import copy
import datetime
import io

import torch
import torch.distributed as dist
from oracles import movement_error
from torch.nn.parallel import DistributedDataParallel

import bridge
import torch_api

WORLD = 2
STEPS, LR = 6, 0.05


class Net(torch.nn.Module):
    """Sizes that two ranks cannot share evenly, a parameter of one element, and one frozen by requires_grad."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(6, 7), torch.nn.LayerNorm(7)
        self.fixed, self.head = torch.nn.Linear(7, 7), torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.fixed.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.fixed(torch.tanh(self.norm(self.body(x))))) * self.scale


MASK = {"": True, "fixed": False}  # fixed.weight requires grad all the same


def trained(model):
    return {name: p for name, p in model.named_parameters() if "fixed" not in name}


def masked_adamw(model, **kwargs):
    return torch_api.MaskedAdamW(model.named_parameters(), lr=LR, weight_decay=0.1, mask=MASK, **kwargs)


def torch_adamw(model):
    return torch.optim.AdamW(list(trained(model).values()), lr=LR, weight_decay=0.1)


def train(model, optimizer, steps=STEPS, start=0):
    """Steps `start` to `steps` on batches that depend only on step and rank; the losses."""
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


def assert_equal_bits(left, right):
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert x.numpy().tobytes() == right[name].numpy().tobytes(), name


def assert_same_on_every_rank(tensors):
    for name, x in tensors.items():
        others = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(others, x)
        assert all(x.numpy().tobytes() == other.numpy().tobytes() for other in others), name


def assert_near(ours, theirs, start):
    for name, x in theirs.items():
        if "fixed" in name:
            assert ours[name].numpy().tobytes() == x.numpy().tobytes() == start[name].numpy().tobytes(), name
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


def check_an_optimizer_made_before_ddp_wraps_the_model(_):
    """DDP gives every rank the parameters of rank 0: into the memory that the optimizer has moved them to."""
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
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when it is imported

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
    assert len(plain.state) == len(trained(model)) + 1  # fixed.weight has a lone step
    again = DistributedDataParallel(Net())
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, optimizer, STEPS, 3)
    resumed = zero(again)
    resumed.load_state_dict(saved[0])
    train(again, resumed, STEPS, 3)
    assert resumed.optim.param_groups[1]["lr"] == 0.5 * LR
    assert_equal_bits(values(again), values(model))


# ------------------------------------------------------------------ FSDP2


def sharded(net=None):
    from torch.distributed.fsdp import fully_shard

    model = Net() if net is None else net
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


FAMILIES = {
    "ddp": (check_ddp, check_an_optimizer_made_before_ddp_wraps_the_model, check_ddp_resumes_where_it_stopped),
    "zero": (check_zero, check_zero_resumes_where_it_stopped),
    "fsdp": (check_fsdp,),
}


def run(rank, family, directory):
    """One process: every check of the family, in order; the first that fails ends it."""
    torch.set_num_threads(1)
    method, timeout = f"file://{directory}/rendezvous", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=WORLD, timeout=timeout)
    try:
        for check in FAMILIES[family]:
            check(directory)
    finally:
        dist.destroy_process_group()
