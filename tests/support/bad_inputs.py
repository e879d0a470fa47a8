"""Bad inputs of torch_api as data: what is given, and the call that must raise. tests/repository/test_errors.py runs them."""

import copy
import pickle
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import torch

import bridge
import torch_api
from bridge import _process
from bridge._runtime.transaction import Transaction
from torch_api import (
    MaskedAdadelta,
    MaskedAdafactor,
    MaskedAdagrad,
    MaskedAdamW,
    MaskedASGD,
    MaskedMuon,
    MaskedNAdam,
    MaskedRMSprop,
    MaskedRprop,
    MaskedSGD,
    MultiOptimizer,
    OptaxOptimizer,
    PartitionedOptimizer,
    load_optax_state,
    to_optax_state,
)
from torch_api._step.launch_cache import GradSet


class Bad(NamedTuple):
    """`call(x)` must raise, where x is the result of `make(model)`, or the model itself if there is no `make`."""

    given: str
    call: Any
    make: Any = None


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"body": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 2)})


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def give(optimizer):
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)


def stepped(build=lambda named: MaskedAdamW(named, lr=0.1), after=None):
    """Return a function that makes an optimizer, takes a step, sets gradients for the next one and applies `after`."""

    def make(net):
        optimizer = build(net.named_parameters())
        give(optimizer)
        optimizer.step()
        give(optimizer)
        if after is not None:
            after(optimizer)
        return optimizer

    return make


def given(optimizer):
    give(optimizer)
    return optimizer


def adamw(**options):
    return lambda net: MaskedAdamW(net.named_parameters(), **options)


def with_optax(tx, **options):
    return lambda net: OptaxOptimizer(net.named_parameters(), tx, **options)


def group(**options):
    return lambda net: MaskedAdamW([{"params": list(net.named_parameters()), **options}])


def refused(cls, **options):
    return lambda net: cls([net["head"].weight], **options)


def alone(make, cls=MaskedAdamW, **options):
    """Return a call that constructs an optimizer of the model's parameters and one more."""
    return lambda net: cls([*net.parameters(), make()], **options)


def tail():
    return torch.nn.Parameter(torch.zeros(2))


def lazy_conjugate():
    return torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64).conj())


def over_one_memory(optimizer):
    optimizer.add_param_group({"params": [("twin", torch.nn.Parameter(torch.zeros(2)))]})
    params = params_of(optimizer)
    params[4].data = params[3].data
    give(optimizer)


PARAMETERS = [
    Bad("no parameters", lambda _: MaskedAdamW([])),
    Bad("a module", lambda net: MaskedAdamW(net["head"])),
    Bad("a method that was not called", lambda net: MaskedAdamW(net.parameters)),
    Bad("a state_dict of the model", lambda net: MaskedAdamW(net.state_dict())),
    Bad("a group without a list around it", lambda net: MaskedAdamW({"params": net.parameters()})),
    Bad("a module in a group", lambda net: MaskedAdamW([{"params": net["head"]}])),
    Bad("a list of modules", lambda net: MaskedAdamW([net["body"], net["head"]])),
    Bad("a list of iterators", lambda net: MaskedAdamW([net["body"].parameters(), net["head"].parameters()])),
    Bad("a vector for Muon", lambda net: MaskedMuon(net.named_parameters())),
    Bad("a complex parameter for Muon", lambda _: MaskedMuon([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])),
    Bad("a complex parameter for Adafactor", lambda _: MaskedAdafactor([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])),
    Bad("one parameter twice", lambda net: MaskedAdamW([*net.parameters(), net["head"].bias])),
    Bad("a group without params", lambda _: MaskedAdamW([{"lr": 0.1}])),
    Bad(
        "training integers",
        lambda opt: opt.set_trainable("positions", True),
        stepped(lambda named: MaskedAdamW([*named, ("positions", torch.arange(3))], mask=lambda name: name != "positions")),
    ),
    Bad("a parameter on the meta device", alone(lambda: torch.nn.Parameter(torch.zeros(3, device="meta")))),
    Bad("a sparse parameter", alone(lambda: torch.nn.Parameter(torch.zeros(3).to_sparse()))),
    Bad("a lazy module", lambda _: MaskedAdamW(torch.nn.LazyLinear(2).parameters())),
    Bad("a lazy conjugate", alone(lazy_conjugate)),
    Bad("an expanded parameter", alone(lambda: torch.nn.Parameter(torch.zeros(1).expand(4)))),
    Bad("two parameters over one memory", lambda opt: opt.step(), stepped(after=over_one_memory)),
]


def changes_structure():
    """A transformation whose state gets longer with each update."""
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (grads, (*state, 1.0)))


def loses_all():
    """A transformation whose update has no leaves."""
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: ({}, state))


def by_truth(lr, weight_decay=0.1):
    """A factory that tests its decay for truth, so that the decay cannot be traced."""
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(lr)) if weight_decay else optax.sgd(lr)


def sgd_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


# (class, argument, value that torch refuses); the error texts are torch's.
TORCHS = [
    (MaskedRMSprop, "alpha", -0.1),
    (MaskedAdagrad, "lr_decay", -0.5),
    (MaskedAdadelta, "rho", 1.1),
    (MaskedNAdam, "momentum_decay", -0.2),
    (MaskedRprop, "etas", (1.0, 0.5)),
    (MaskedASGD, "lambd", -0.1),
    (MaskedASGD, "alpha", -0.1),
    (MaskedAdafactor, "d", 0.0),
    (MaskedAdafactor, "beta2_decay", 0.8),
    (MaskedAdafactor, "eps", (-1e-30, 1e-3)),
    (MaskedMuon, "adjust_lr_fn", "arbitrary"),
    (MaskedMuon, "adjust_lr_fn", 3),
    (MaskedMuon, "ns_steps", 2.5),
    (MaskedMuon, "ns_steps", 100),
]

ARGUMENTS = [
    Bad("an unknown argument", adamw(learnig_rate=0.1)),
    Bad("an unknown key in a group", group(weigth_decay=0.1)),
    Bad("a key of a group that has no effect", lambda net: OptaxOptimizer([{"params": net.parameters(), "eps": 1e-6}], optax.sgd, lr=0.1)),
    Bad("an argument of the constructor in a group", group(max_grad_norm=1.0)),
    Bad(
        "a misspelled key that came into a group later",
        lambda opt: opt.step(),
        stepped(after=lambda opt: opt.param_groups[0].update(wieght_decay=0.1)),
    ),
    Bad("a negative lr", adamw(lr=-1.0)),
    Bad("a negative lr_scale", group(lr_scale=-1.0)),
    Bad("a beta of one", adamw(betas=(0.9, 1.0))),
    Bad(
        "a beta of one in a factory of one's own",
        with_optax(lambda lr, betas=(0.9, 0.99): optax.adam(lr, *betas), lr=0.1, betas=(0.9, 1.0)),
    ),
    Bad("betas that are no pair", adamw(betas=0.9)),
    Bad("betas of three numbers for MaskedLion", lambda net: torch_api.MaskedLion(net.parameters(), lr=0.1, betas=(0.9, 0.99, 0.5))),
    Bad("betas beside b1", lambda net: torch_api.MaskedLion(net.parameters(), lr=0.1, b1=0.8, betas=(0.9, 0.99))),
    Bad("one beta in a tensor", adamw(betas=(0.9, torch.tensor(0.99)))),
    Bad("lr in a tensor with foreach", adamw(lr=torch.tensor(0.1), foreach=True)),
    *(Bad(f"{name}={bad} for {cls.__name__}", refused(cls, **{name: bad})) for cls, name, bad in TORCHS),
    Bad("Nesterov without momentum", lambda net: MaskedSGD(net.parameters(), nesterov=True)),
    Bad("differentiable=True", adamw(differentiable=True)),
    Bad("fused with foreach", adamw(fused=True, foreach=True)),
    Bad("fused with differentiable", adamw(fused=True, differentiable=True)),
    Bad("an option that is no bool", adamw(amsgrad=1)),
    Bad("lr that is no number", adamw(lr="fast")),
    Bad("a schedule as lr", adamw(lr=optax.cosine_decay_schedule(0.1, 10))),
    Bad("a schedule as lr of a group", group(lr=optax.cosine_decay_schedule(0.1, 10))),
    Bad("a scheduler of torch as lr", lambda net: MaskedAdamW(net.parameters(), lr=torch.optim.lr_scheduler.StepLR(sgd_of(net), 2))),
    Bad("lr of two elements", adamw(lr=torch.tensor([0.1, 0.2]))),
    Bad("a bad write-back", adamw(writeback="fast")),
    Bad("a norm of zero", adamw(max_grad_norm=0)),
    Bad("a type of state that is no float", adamw(state_dtype=torch.int32)),
    Bad("an average with decay one", adamw(ema_decay=1.0)),
    Bad("a seed below zero", adamw(rounding_seed=-1)),
    Bad("master weights with stochastic rounding", adamw(master_weights=True, stochastic_rounding=True)),
    Bad("a group edited by hand", lambda opt: opt.step(), stepped(after=lambda opt: opt.param_groups[0].update(eps="small"))),
    Bad(
        "a parameter put in by hand without a name, beside a mask by name",
        lambda opt: opt.step(),
        stepped(lambda named: MaskedAdamW(named, mask="*weight"), lambda opt: opt.param_groups[0]["params"].append(tail())),
    ),
    Bad("decay_mask without a decay", lambda net: OptaxOptimizer(net.named_parameters(), optax.sgd, lr=0.1, decay_mask="*.weight")),
    Bad(
        "decay_mask where parameters are updated together",
        with_optax(optax.contrib.prodigy, weight_decay=0.1, decay_mask="*.weight"),
    ),
    Bad("wd_scale without a decay", lambda net: OptaxOptimizer([{"params": list(net.parameters()), "wd_scale": 2.0}], optax.sgd, lr=0.1)),
    Bad(
        "wd_scale of a decay that is no traced number",
        lambda net: OptaxOptimizer([{"params": list(net.parameters()), "wd_scale": 2.0}], by_truth, lr=0.1),
    ),
    Bad("no transformation", with_optax("adam")),
    Bad("a factory without an argument that it needs", with_optax(optax.lamb)),
    Bad("an unknown argument of a factory", with_optax(optax.adam, lr=0.1, beta=0.9)),
    Bad("hyperparams beside a ready transformation", with_optax(optax.adam(0.1), b1=0.9)),
    Bad("an optimizer class", with_optax(torch.optim.AdamW, lr=0.1)),
    Bad("a class of this package", with_optax(torch_api.MaskedLion, lr=0.1)),
    Bad("an optimizer", lambda net: OptaxOptimizer(net.parameters(), sgd_of(net))),
    Bad("a module for the transformation", lambda net: OptaxOptimizer(net.parameters(), net)),
    Bad("a schedule for the transformation", with_optax(optax.cosine_decay_schedule(0.1, 10))),
    Bad("lr and learning_rate", with_optax(optax.adam, lr=0.1, learning_rate=0.1)),
    Bad("lr and learning_rate of a class", adamw(lr=0.1, learning_rate=0.1)),
    Bad("lr and learning_rate of a group", group(lr=0.1, learning_rate=0.1)),
    Bad("a transformation that changes the structure of its state", with_optax(changes_structure())),
    Bad("a transformation that loses parameters", with_optax(loses_all())),
    Bad("a factory that makes none", with_optax(lambda lr: "adam", lr=0.1)),
]

ROWS = torch.tensor([True, False, True])


def foreign():
    return torch.nn.Linear(2, 2)


SELECTORS = [
    Bad("a pattern that matches nothing", adamw(mask="hed.*")),
    Bad("a pattern without names", lambda net: MaskedAdamW(net.parameters(), mask="head.*")),
    Bad("an empty list", adamw(mask=[])),
    Bad("a list that mixes forms", adamw(mask=["head.*", ("body.*", True)])),
    Bad("a dict with a foreign key", adamw(mask={"neck": True})),
    Bad("a nested dict with a gap", adamw(mask={"body": {"weight": True, "bias": False}, "head": {"weight": True}})),
    Bad("a tree of another structure", adamw(mask=(True, False, [True]))),
    Bad("a value that is no bool", adamw(mask={"head": "yes"})),
    Bad("rows for a matrix", adamw(mask={"body.weight": ROWS})),
    Bad("a module of another model", lambda net: MaskedAdamW(net.named_parameters(), mask=foreign())),
    Bad("parameters of another model", lambda net: MaskedAdamW(net.named_parameters(), mask=list(foreign().parameters()))),
    Bad("a function of three", adamw(mask=lambda name, param, value: True)),
    Bad("a function of one argument of another name", adamw(mask=lambda x: True)),
    Bad("a decay mask given as mask", lambda net: MaskedAdamW(net.named_parameters(), mask=torch_api.no_decay(net))),
    Bad("a builtin without a signature", adamw(mask=max)),
    Bad("a function of the tree that gives nothing", adamw(mask=lambda tree: None)),
    Bad("a dict in a list of pairs", adamw(mask=[({"head": True}, True)])),
    Bad("labels in a list of pairs", adamw(mask=[(lambda name, param: "head", True)])),
    Bad("what is no selector", adamw(mask=3.5)),
    Bad("a negative scale", adamw(lr_scale={"head": -1.0})),
    Bad("a label for some only", lambda net: PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.1)}, {"head": "a"})),
    Bad(
        "integers of the state that become floating",
        lambda net: OptaxOptimizer(
            net.named_parameters(),
            optax.GradientTransformation(lambda _: {"mean": jnp.int32(0)}, lambda u, s, p: (u, {"mean": s["mean"] + 0.5})),
        ),
    ),
    Bad(
        "Muon for all, vectors too",
        lambda net: PartitionedOptimizer(net.named_parameters(), {"a": (bridge.matrix_rules.muon, {"lr": 0.1})}, {"": "a"}),
    ),
    Bad("a label that is an array", lambda net: PartitionedOptimizer(net.named_parameters(), {"a": optax.sgd(0.1)}, {"": np.zeros(2)})),
    Bad("a pattern to set_trainable that matches nothing", lambda opt: opt.set_trainable("neck", False), stepped()),
    Bad(
        "a group for an unpickled optimizer whose mask is a lambda",
        lambda opt: opt.add_param_group({"params": [("x", foreign().weight)]}),
        lambda net: pickle.loads(pickle.dumps(adamw(mask=lambda name, param: True)(net))),
    ),
    Bad("a mask for another group", lambda opt: opt.add_param_group({"params": [("x", foreign().weight)], "mask": "head.*"}), stepped()),
]


def norm_sized():
    """A transformation with one state vector whose length depends on the parameters with a gradient."""
    return optax.flatten(optax.adam(0.1))


def with_all(named):
    """A transformation that closes over a tree of all parameters."""
    anchor = {"body": {"weight": 0.0, "bias": 0.0}, "head": {"weight": 0.0, "bias": 0.0}}
    return OptaxOptimizer(named, optax.stateless(lambda g, p: jax.tree.map(lambda g, p, a: -0.1 * (g + p - a), g, p, anchor)))


def without_last(optimizer):
    params_of(optimizer)[-1].grad = None


def sparse(optimizer):
    params_of(optimizer)[1].grad = torch.zeros(3).to_sparse()


def other_shape(optimizer):
    p = params_of(optimizer)[1]
    p.grad = None
    p.data = torch.zeros(6)
    p.grad = torch.ones(6)


def with_a_large_one(named):
    """Add a large parameter, whose gradient is read by address before the update."""
    return MaskedAdamW([*named, ("large", torch.nn.Parameter(torch.ones(1024, 1024)))], max_grad_norm=1.0)


def freed(optimizer):
    params_of(optimizer)[-1].grad.untyped_storage().resize_(0)


def without_memory(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def functional(optimizer):
    p = params_of(optimizer)[-1]
    p.grad = torch._to_functional_tensor(torch.ones_like(p))


def scaled_by_nothing(optimizer):
    optimizer.grad_scale, optimizer.found_inf = without_memory(torch.ones(1)), torch.zeros(1)
    optimizer.step()


def other_gradient(optimizer):
    p = params_of(optimizer)[1]
    p.grad = None
    p.data, data = torch.zeros(5), p.data
    p.grad = torch.zeros(5)
    p.data = data


def on_two_devices(optimizer):
    """Pretend that a parameter lies on a GPU; devices are compared before anything runs."""
    optimizer._trainable[-1].device = torch.device("cuda:0")


def launched(optimizer):
    optimizer._launch_cache.prepare(GradSet((0, 1, 2, 3)), optimizer._hyperparams(), Transaction(()))


def made_in_a_fork(net):
    with mock.patch.object(_process, "_forked", True):
        MaskedAdamW(net.named_parameters(), lr=0.1)


def forked(optimizer):
    with mock.patch.object(_process, "_forked", True):
        optimizer.step()


def inside(context, call):
    def enter(optimizer):
        with getattr(optimizer, context)():
            call(optimizer)

    return enter


def averaged(named):
    return MaskedAdamW(named, lr=0.1, ema_decay=0.9)


STEPS = [
    Bad("an average with decay one, later", lambda opt: setattr(opt, "ema_decay", 1.0), stepped(averaged)),
    Bad("a norm below zero, later", lambda opt: setattr(opt, "max_grad_norm", -1.0), stepped(averaged)),
    Bad("a sparse gradient", lambda opt: opt.step(), stepped(after=sparse)),
    Bad("a gradient whose memory was freed", lambda opt: opt.step(), stepped(with_a_large_one, freed)),
    Bad("a gradient that torch cannot copy", lambda opt: opt.step(), stepped(with_a_large_one, functional)),
    Bad("a scale of the loss whose memory was freed", scaled_by_nothing, stepped(lambda named: MaskedAdamW(named, fused=True))),
    Bad(
        "an argument whose memory was freed",
        lambda opt: opt.step(value=without_memory(torch.ones(1))),
        stepped(lambda named: OptaxOptimizer(named, optax.adamw, lr=0.1)),
    ),
    Bad("no gradient where a transformation needs all", lambda opt: opt.step(), stepped(with_all, without_last)),
    Bad("a gradient of another shape", lambda opt: opt.step(), stepped(after=other_gradient)),
    Bad("a parameter of another shape than its state", lambda opt: opt.step(), stepped(after=other_shape)),
    Bad(
        "state that lacks a field",
        lambda opt: opt.step(),
        stepped(after=lambda opt: opt.state[params_of(opt)[0]].pop("exp_avg_sq")),
    ),
    Bad("an argument that nothing reads", lambda opt: opt.step(value=1.0), stepped()),
    Bad("the loss", lambda opt: opt.step(torch.ones(())), stepped()),
    Bad("the loss as a number", lambda opt: opt.step(1.5), stepped()),
    Bad("gradients", lambda opt: opt.step({"head": 0.0}), stepped()),
    Bad(
        "no value for a transformation that needs one",
        lambda opt: opt.step(),
        lambda net: given(OptaxOptimizer(net.named_parameters(), optax.polyak_sgd())),
    ),
    Bad(
        "another set of gradients, where the shared state depends on it",
        lambda opt: opt.step(),
        stepped(lambda named: OptaxOptimizer(named, norm_sized()), without_last),
    ),
    Bad("one norm over several devices", launched, stepped(lambda named: MaskedAdamW(named, max_grad_norm=1.0), on_two_devices)),
    Bad("one transformation over several devices", launched, stepped(lambda named: OptaxOptimizer(named, norm_sized()), on_two_devices)),
    Bad("a step in a forked process", forked, stepped()),
    Bad("an optimizer that is made in a forked process", made_in_a_fork),
    Bad("an average that is not kept", inside("ema_params", lambda opt: None), stepped()),
    Bad("metrics that are not computed", lambda opt: opt.metrics(), stepped()),
    Bad("a step inside ema_params", inside("ema_params", lambda opt: opt.step()), stepped(averaged)),
    Bad(
        "a step between eval and train",
        lambda opt: opt.step(),
        stepped(lambda named: torch_api.MaskedScheduleFreeAdamW(named), lambda opt: opt.eval()),
    ),
]


def loading(change, build=lambda named: MaskedAdamW(named, lr=0.1)):
    """Return the `call` and `make` of an entry that loads the optimizer's own state_dict after `change`."""

    def call(optimizer):
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved)
        optimizer.load_state_dict(saved)

    return {"call": call, "make": stepped(build)}


def renamed(saved, name):
    saved["param_groups"][0]["param_names"][0] = name


def one_more(saved):
    saved["param_groups"][0]["params"].append(9)
    saved["param_groups"][0]["param_names"].append("tail.weight")


def fewer(saved):
    saved["param_groups"][0]["params"].pop()


def labelled(named):
    return PartitionedOptimizer(named, {"a": (optax.sgd, {"lr": 0.1}), "b": (optax.sgd, {"lr": 0.2})}, {"body": "a", "head": "b"})


def of_another_size(optimizer):
    """Load the state of optax.flatten, one vector for all parameters with a gradient, saved when only the head had gradients."""
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {index: fields for index, fields in saved["state"].items() if index >= 2}
    size = sum(p.numel() for p in params_of(optimizer)[2:])
    for fields in saved["state"].values():
        fields.update({key: torch.zeros(size) for key, value in fields.items() if value.numel() > 1})
    optimizer.load_state_dict(saved)


def shared_of_another_size(saved):
    saved["state"][1].update(mu=torch.zeros(7))


CHECKPOINTS = [
    Bad("a dict without param_groups", **loading(lambda d: d.pop("param_groups"))),
    Bad("a state_dict of the model", lambda opt: opt.load_state_dict(model().state_dict()), stepped()),
    Bad("a checkpoint that has it as an entry", lambda opt: opt.load_state_dict({"epoch": 3, "optimizer": opt.state_dict()}), stepped()),
    Bad("a checkpoint of Lightning", lambda opt: opt.load_state_dict({"epoch": 3, "optimizer_states": [opt.state_dict()]}), stepped()),
    Bad("a state of optax", lambda opt: opt.load_state_dict(to_optax_state(opt, optax.adam(0.1))), stepped()),
    Bad("a checkpoint of torch.optim.SGD", lambda opt: opt.load_state_dict(sgd_of(model()).state_dict()), stepped()),
    Bad("a checkpoint of AdamW for SGD", lambda opt: opt.load_state_dict(adamw()(model()).state_dict()), lambda net: MOMENTUM(net)),
    Bad(
        "another number of groups", **loading(lambda d: d["param_groups"].append(d["param_groups"][0] | {"params": [], "param_names": []}))
    ),
    Bad("a parameter that it lacks", **loading(lambda d: renamed(d, "neck.weight"))),
    Bad("a parameter too many", **loading(one_more)),
    Bad("another number of parameters", **loading(fewer, lambda named: MaskedAdamW([p for _, p in named]))),
    Bad("names that do not fit", **loading(lambda d: d["param_groups"][0]["param_names"].pop())),
    Bad("state of another optimizer", **loading(lambda d: d["state"].update({0: {"square_avg": torch.zeros(3, 4)}}))),
    Bad("state that lacks a field", **loading(lambda d: d["state"][0].pop("exp_avg_sq"))),
    Bad("state of another shape", **loading(lambda d: d["state"][1].update(exp_avg=torch.zeros(5)))),
    Bad("shared state of another shape", **loading(shared_of_another_size, lambda named: OptaxOptimizer(named, norm_sized()))),
    Bad("sparse state", **loading(lambda d: d["state"][1].update(exp_avg=torch.zeros(4).to_sparse()))),
    Bad("state that is no tensor", **loading(lambda d: d["state"][1].update(exp_avg="zeros"))),
    Bad("complex state of a real parameter", **loading(lambda d: d["state"][1].update(exp_avg=d["state"][1]["exp_avg"] * 1j))),
    Bad("state of a parameter that is no dict", **loading(lambda d: d["state"].update({1: torch.zeros(4)}))),
    Bad("a state that is no dict", **loading(lambda d: d.update(state=None))),
    Bad("groups that are no dicts", **loading(lambda d: d.update(param_groups=[None]))),
    Bad("a group without params", **loading(lambda d: d["param_groups"][0].pop("params"))),
    Bad("a parameter in two places", **loading(lambda d: d["param_groups"][0].update(params=[0, 1, 0, 3]))),
    Bad("a group without a number that is needed", **loading(lambda d: d["param_groups"][0].pop("lr"), lambda named: labelled(named))),
    Bad("a group with another label", **loading(lambda d: d["param_groups"][0].update(label="c"), labelled)),
    Bad(
        "shared state of a part of the parameters",
        lambda opt: opt.step(),
        stepped(lambda named: OptaxOptimizer(named, norm_sized()), of_another_size),
    ),
]

BODY_HEAD = {"body": "a", "head": "b"}


def parts(labels=None, **transforms):
    return lambda net: PartitionedOptimizer(net.named_parameters(), transforms, labels or BODY_HEAD)


def pairs(*given):
    return lambda net: MultiOptimizer(net.named_parameters(), *given)


TWO = (("body.*", bridge.Momentum(lr=0.1)), ("head.bias", bridge.GradientDescent(lr=0.1)))


def body_frozen(net):
    optimizer = pairs(*TWO)(net)
    optimizer.set_trainable("body.*", False)
    return optimizer


LABELS = [
    Bad("no transformations", parts()),
    Bad("a label without a transformation", parts(a=optax.sgd(0.1))),
    Bad("a transformation without a parameter", parts(a=optax.sgd(0.1), b=optax.sgd(0.1), c=optax.sgd(0.1))),
    Bad(
        "an unknown key in a group",
        lambda net: PartitionedOptimizer([{"params": list(net.named_parameters()), "labels": 1}], {"a": optax.sgd(0.1)}, {"": "a"}),
    ),
    Bad(
        "a key of a group that none of its labels takes",
        lambda net: PartitionedOptimizer(
            [{"params": list(net.body.named_parameters("body")), "momentum": 0.9}, {"params": list(net.head.named_parameters("head"))}],
            {"a": optax.sgd(0.1), "b": (optax.sgd, {"lr": 0.1, "momentum": 0.5})},
            {"body": "a", "head": "b"},
        ),
    ),
    Bad("a trained parameter without a label", lambda net: parts(a=optax.sgd(0.1), labels={"head": "a"})(net)),
    Bad("a new group without a label", lambda opt: opt.add_param_group({"params": [("x", foreign().weight)]}), stepped(labelled)),
    Bad(
        "a new group with an unknown label",
        lambda opt: opt.add_param_group({"params": [("x", foreign().weight)], "label": "c"}),
        stepped(labelled),
    ),
    Bad("no pairs", pairs()),
    Bad("two pairs for one parameter", pairs(("head.*", bridge.Adam(lr=0.1)), ("*.bias", bridge.Adam(lr=0.1)))),
    Bad("training what no pair picks", lambda opt: opt.set_trainable("*", True), body_frozen),
    Bad("hyper_params that are no list", lambda opt: opt.step(hyper_params={"lr": 0.1}), pairs(*TWO)),
    Bad("too few hyper_params", lambda opt: opt.step(hyper_params=[None]), pairs(*TWO)),
    Bad("hyper_params of one pair that are a number", lambda opt: opt.step(hyper_params=[None, 0.1]), pairs(*TWO)),
    Bad("an optimizer class for a label", lambda net: parts(a=optax.sgd(0.1), b=torch.optim.SGD)(net)),
    Bad("lr and learning_rate of a pair", lambda opt: opt.step(hyper_params=[{"lr": 0.1, "learning_rate": 0.1}, None]), pairs(*TWO)),
    Bad("an unknown hyper_param", lambda opt: opt.step(hyper_params=[{"momentum": 0.9}, None]), pairs(*TWO)),
]

PRESETS = [
    Bad("layer_decay of a string", lambda net: torch_api.layer_decay(net, "0.75")),
    Bad("layer_decay above one", lambda net: torch_api.layer_decay(net, 1.5)),
    Bad("parameters for the model", lambda net: torch_api.no_decay(net.parameters())),
    Bad("a module without parameters", lambda _: torch_api.no_decay(torch.nn.ReLU())),
    Bad("a lazy module", lambda _: torch_api.no_decay(torch.nn.LazyLinear(2))),
]


def handed(change=lambda state: state, tx=None):
    """Return a call that converts the optimizer's state to optax, changes it and loads it back."""
    return lambda opt: load_optax_state(opt, change(to_optax_state(opt, optax.adam(0.1) if tx is None else tx)))


def one_has_no_gradient(optimizer):
    params_of(optimizer)[0].grad = None
    optimizer.step()


def misspelled(state):
    return jax.tree.map(lambda x: x, (state[0]._replace(mu={"boby": state[0].mu["body"], "head": state[0].mu["head"]}), state[1]))


def without(field):
    return lambda state: (state[0]._replace(**{field: None}), state[1])


def with_moment(change):
    return lambda state: (state[0]._replace(mu=jax.tree.map(change, state[0].mu)), state[1])


def frozen_since(optimizer):
    optimizer.set_trainable("body.*", False)


def tree_of(optimizer):
    return bridge._names.nest(zip(optimizer._param_names(), map(torch.Tensor.detach, params_of(optimizer)), strict=True))


def begun(optimizer, tx=None):
    """Return optax's initial state of all parameters."""
    return (optax.adam(0.1) if tx is None else tx).init(bridge.to_jax(tree_of(optimizer), copy=True))


def two_counts(optimizer):
    first, last = begun(optimizer, optax.adam(optax.constant_schedule(0.1)))
    return first, last._replace(count=last.count + 1)


MOMENTUM = stepped(lambda named: MaskedSGD(named, lr=0.1, momentum=0.9))
ADAM = stepped(lambda named: MaskedAdamW(named, lr=0.1))


def plain(net):
    class Plain(torch.optim.Optimizer):
        pass

    return Plain(net.named_parameters(), {})


STATES = [
    Bad("a factory for the transformation", lambda opt: to_optax_state(opt, optax.adam), ADAM),
    Bad("an optimizer that no rule stands for", to_optax_state, plain),
    Bad("a module of other parameters", lambda opt: to_optax_state(opt, module=foreign()), ADAM),
    Bad("a field that the transformation has no place for", lambda opt: to_optax_state(opt, optax.sgd(0.1)), ADAM),
    Bad("a place that no field is for", lambda opt: to_optax_state(opt, optax.chain(optax.ema(0.9), optax.adam(0.1))), ADAM),
    Bad("two places for a field", lambda opt: to_optax_state(opt, optax.chain(optax.adam(0.1), optax.adam(0.1))), ADAM),
    Bad("a place of another shape", lambda opt: to_optax_state(opt, optax.flatten(optax.trace(0.9))), MOMENTUM),
    Bad("one count for unequal steps", lambda opt: to_optax_state(opt, optax.adam(0.1)), stepped(after=one_has_no_gradient)),
    Bad("state of what is frozen", lambda opt: load_optax_state(opt, begun(opt)), stepped(after=frozen_since)),
    Bad("a state of other parameters", handed(misspelled), ADAM),
    Bad("a state without a moment", handed(without("nu")), ADAM),
    Bad("a state without its count", lambda opt: load_optax_state(opt, without("count")(begun(opt))), adamw(lr=0.1)),
    Bad("a state of a field that is not known", lambda opt: load_optax_state(opt, begun(opt)), MOMENTUM),
    Bad("two counts", lambda opt: load_optax_state(opt, two_counts(opt)), ADAM),
    Bad("a moment of another shape", handed(with_moment(lambda x: x[None])), ADAM),
    Bad("a moment that loses digits", handed(with_moment(lambda x: np.asarray(x, np.float64))), ADAM),
    Bad("a moment that is no array", handed(with_moment(str)), ADAM),
]

TABLE = {
    "Parameters": PARAMETERS,
    "Arguments and groups": ARGUMENTS,
    "Selectors": SELECTORS,
    "Steps": STEPS,
    "Checkpoints": CHECKPOINTS,
    "Labels and pairs": LABELS,
    "States between torch and optax": STATES,
    "Presets": PRESETS,
}
