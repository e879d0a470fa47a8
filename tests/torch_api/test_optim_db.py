"""Every configuration and every error of torch's own optimizer tests, applied to the drop-in classes.

The configurations and errors are those of `torch.testing._internal.common_optimizers.optim_db`; the oracle is the torch
optimizer itself. Bounds are relative to the movement from the start, leaf by leaf: 1e-5 in float32 and complex64, 1e-12 in float64.
Half types must be within one rounding of torch's fused kernel, or of torch in float32 if there is no such kernel.

Muon has a wider bound. torch's CPU kernels and ours multiply the same bfloat16 numbers and round the same sums, but add them up in
another order. A sum halfway between two bfloat16 numbers may be rounded either way, and the iteration amplifies that.
"""

import copy
import io
import warnings

import pytest
import torch
from oracles import clones, movement_error, set_grads
from sampling import sampled

import torch_api

pytestmark = [pytest.mark.long, pytest.mark.unoptimized]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db
except ImportError as error:
    pytest.skip(f"torch's optimizer database needs more than is here: {error}", allow_module_level=True)

MUON = 1e-3
BOUNDS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-12}
HALVES = (torch.bfloat16, torch.float16)
# torch 2.13's fused SGD skips whole vectors of half types, and its fused Adagrad rounds weight_decay and the learning rate to the
# half type first, which is more than one rounding of the result.
FUSED = {"Adam", "AdamW"}
INFOS = {info.name: info for info in optim_db if hasattr(torch_api, f"Masked{info.name}")}
CONFIGS = [(name, config) for name, info in INFOS.items() for config in info.optim_inputs_func(device="cpu")]
ERRORS = [(name, e) for name, info in INFOS.items() for e in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)]


def masked(name):
    return getattr(torch_api, f"Masked{name}")


def ident(case):
    described = getattr(case[1], "optimizer_error_input", case[1])
    return f"{case[0]}-{described.desc}".replace(" ", "_")


@pytest.fixture
def counted(request):
    """Count the test in the summary line at the end of the run (conftest.py)."""
    request.node.user_properties.append(("optim_db", request.node.originalname.split("_")[2]))


def test_only_sparse_and_closure_optimizers_are_left_out():
    assert {info.name for info in optim_db} - INFOS.keys() == {"LBFGS", "SparseAdam"}


# ---------------------------------------------------------------------- the configurations


def parameters(name):
    """Return leaves of all kinds: 0-d, empty, matrices in both memory orders, channels last."""
    shapes = {torch.float32: [(7, 5), (), (0, 3)], torch.float64: [(4, 3), ()], torch.complex64: [(4,), ()]}
    if name == "Muon":
        shapes = {torch.float32: [(7, 5), (4, 9), (8, 8)], torch.float64: [(4, 3)]}
    if name == "Adafactor":  # torch divides by the number of elements
        shapes = {torch.float32: [(7, 5), (), (6,)], torch.float64: [(4, 3), ()]}
    leaves = [torch.randn(shape, dtype=dtype) for dtype, own in shapes.items() for shape in own]
    leaves.append(torch.randn(6, 4).t())
    if name != "Muon":
        leaves.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    leaves += [torch.randn(5, 7).to(dtype) for dtype in HALVES]
    return [torch.nn.Parameter(0.1 * x if x.dtype not in HALVES else x) for x in leaves]


def build(make, params, **options):
    """Return an optimizer with a group per kind of leaf; one group has its own lr."""
    dtypes = dict.fromkeys(p.dtype for p in params)
    groups = [{"params": [p for p in params if p.dtype is dtype]} for dtype in dtypes]
    groups[-1]["lr"] = 3e-3
    return make(groups, **copy.deepcopy(options))


class HalfReference:
    """torch's arithmetic for half leaves: its fused kernel on equal leaves, or torch on float32 leaves, one step at a time."""

    def __init__(self, name, halves, options):
        fused = name in FUSED
        self.params = [torch.nn.Parameter(p.detach().clone() if fused else p.detach().float()) for p in halves]
        groups = [{"params": [p]} for p in self.params]
        if name == "Adafactor":  # eps[0] None is the half type's machine epsilon
            for group, p in zip(groups, halves, strict=True):
                group["eps"] = (torch.finfo(p.dtype).eps, 1e-3)
        options = copy.deepcopy(options) | ({"fused": True} if fused else {})
        self.optimizer = INFOS[name].optim_cls(groups, **options)
        self.optimizer.param_groups[-1]["lr"] = 3e-3

    def compare(self, ours, state_of):
        """Check that each value is within one rounding, then continue from ours, so that roundings do not add up."""
        for p, q in zip(ours, self.params, strict=True):
            pairs = {"the parameter": (p.detach(), q.detach())}
            pairs |= {key: (state_of(p)[key], theirs) for key, theirs in self.optimizer.state[q].items()}
            for key, (mine, theirs) in pairs.items():
                info = torch.finfo(mine.dtype)
                size = torch.maximum(mine.abs().double(), theirs.abs().double())
                distance = (mine.double() - theirs.double()).abs()
                assert bool((distance <= info.eps * size + info.smallest_normal).all()), (key, p.dtype, float(distance.max()))
                theirs.copy_(mine)


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def check_same_state(ours, theirs, skip=()):
    """Compare keys, shapes, dtypes and values of two state_dicts; skip values of the parameters in `skip`."""
    assert ours["state"].keys() == theirs["state"].keys()
    for index, fields in theirs["state"].items():
        assert ours["state"][index].keys() == fields.keys()
        for key, expected in fields.items():
            value = ours["state"][index][key]
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype), (key, value.dtype, expected.dtype)
            if index not in skip and expected.numel():
                # Relative to the whole array, like the movement: single elements of a signed average may be near 0.
                error = torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected).clamp(min=1e-30)
                assert float(error) < BOUNDS.get(expected.dtype, 1e-5), (key, index, float(error))
    for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {key: mine[key] for key in group} == group


class Run:
    """One configuration on both sides, with a checkpoint in the middle that each side loads from the other."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        self.ours = parameters(name)
        self.theirs, self.start = clones(self.ours), clones(self.ours)
        self.halves = [p for p in self.ours if p.dtype in HALVES]
        self.a, self.b = build(masked(name), self.ours, **options), build(INFOS[name].optim_cls, self.theirs, **options)
        self.reference = HalfReference(name, self.halves, options)
        self.schedulers = self.schedule()

    def schedule(self, last_epoch=-1):
        return [torch.optim.lr_scheduler.ExponentialLR(o, 0.95, last_epoch) for o in (self.a, self.b)]

    def steps(self, count):
        for _ in range(count):
            grads = [torch.randn_like(p) for p in self.ours]
            set_grads(self.ours, grads)
            set_grads(self.theirs, grads)
            half_grads = [p.grad for p in self.halves]
            set_grads(self.reference.params, [g.to(q.dtype) for g, q in zip(half_grads, self.reference.params, strict=True)])
            rates = {p: group["lr"] for group in self.a.param_groups for p in group["params"]}
            for group, p in zip(self.reference.optimizer.param_groups, self.halves, strict=True):
                group["lr"] = float(rates[p])
            for optimizer in (self.a, self.b, self.reference.optimizer):
                optimizer.step()
            self.reference.compare(self.halves, self.a.state.__getitem__)
            for p, q in zip(self.ours, self.theirs, strict=True):
                if p.dtype in HALVES:
                    q.data.copy_(p.data)  # torch's own half arithmetic is not the reference
            for scheduler in self.schedulers:
                scheduler.step()

    def exchange_checkpoints(self):
        self.check_state()
        ours, theirs = through_a_file(self.a.state_dict()), through_a_file(self.b.state_dict())
        self.a, self.b = (build(make, params, **self.options) for make, params in ((type(self.a), self.ours), (type(self.b), self.theirs)))
        self.a.load_state_dict(theirs)
        self.b.load_state_dict(ours)
        for fields in self.b.state.values():
            for key, value in fields.items():  # torch's loader gives scalars but `step` the parameter's type: here eta, mu and mu_product
                fields[key] = value.float() if value.ndim == 0 and key in ("eta", "mu", "mu_product") else value
        for p, q in zip(self.halves, self.reference.params, strict=True):
            for key, value in self.reference.optimizer.state[q].items():
                value.copy_(self.a.state[p][key])
        self.schedulers = self.schedule(last_epoch=self.schedulers[0].last_epoch - 1)

    def check_state(self):
        indices = {i for i, p in enumerate(p for group in self.a.param_groups for p in group["params"]) if p.dtype in HALVES}
        check_same_state(self.a.state_dict(), self.b.state_dict(), skip=indices)

    def errors(self):
        """Return the error of each nonempty leaf of full precision relative to its movement, and whether it is nearly equal.

        A single element may return to its start, so that two roundings are a large part of its movement.
        """
        for p, q, s in zip(self.ours, self.theirs, self.start, strict=True):
            if p.numel() and p.dtype not in HALVES:
                equal = p.numel() == 1 and (p - q).abs().item() <= 2 * torch.finfo(p.dtype).eps * p.abs().item()
                yield p.dtype, movement_error(p, q, s), equal


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CONFIGS, [ident(config) for config in CONFIGS], every=2))
def test_every_configuration_moves_as_in_torch(case, counted, record_property):
    name, config = case
    run = Run(name, config.kwargs)
    addresses = [p.data_ptr() for p in run.ours]
    strides = [p.stride() for p in run.ours]
    run.steps(10)
    run.exchange_checkpoints()
    run.steps(10)
    assert addresses == [p.data_ptr() for p in run.ours]
    assert strides == [p.stride() for p in run.ours]
    for dtype, error, equal in run.errors():
        assert equal or error < (MUON if name == "Muon" else BOUNDS[dtype]), (dtype, error)
        record_property("movement", [name, str(dtype), error])
    run.check_state()


# ---------------------------------------------------------------------- the errors


def given(params):
    for p in params if isinstance(params, list) else ():
        if isinstance(p, torch.Tensor):
            p.requires_grad_()  # torch also updates parameters that do not require grad; here they are frozen
    return [torch.nn.Parameter(torch.randn(2, 3))] if params is None else params


@pytest.mark.parametrize("case", ERRORS, ids=ident)
def test_every_error_has_torchs_type_and_text(case, counted):
    name, expected = case
    wrong = expected.optimizer_error_input
    if expected.error_type is UserWarning:  # duplicates: torch warns that this will be an error
        with pytest.warns(UserWarning, match=expected.error_regex):
            INFOS[name].optim_cls(given(wrong.params), **copy.deepcopy(wrong.kwargs))
        with pytest.raises(ValueError, match="is the one at 0 again; give each parameter once"):
            masked(name)(given(wrong.params), **copy.deepcopy(wrong.kwargs))
        return
    theirs = [INFOS[name].optim_cls(given(wrong.params), **wrong.kwargs)] if expected.error_on is OptimizerErrorEnum.STEP_ERROR else []
    with pytest.raises(expected.error_type, match=expected.error_regex):
        theirs[0].step() if theirs else INFOS[name].optim_cls(given(wrong.params), **copy.deepcopy(wrong.kwargs))
    with pytest.raises(expected.error_type, match=expected.error_regex):  # our constructor raises it
        masked(name)(given(wrong.params), **copy.deepcopy(wrong.kwargs))


@pytest.mark.parametrize("other", ["foreach", "differentiable"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_excludes_foreach_and_differentiable_as_in_torch(name, other):
    """The database lacks this case."""
    raised = []
    for make in (INFOS[name].optim_cls, masked(name)):
        with pytest.raises(RuntimeError, match="fused") as caught:
            make(given(None), fused=True, **{other: True})
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


WRONG_KEYS = [(n, e) for n, e in ERRORS if e.optimizer_error_input.params is None and "Tensor" not in e.optimizer_error_input.desc]


@pytest.mark.parametrize("case", WRONG_KEYS, ids=ident)
def test_added_groups_and_checkpoints_are_validated_as_in_torch(case):
    """A scheduler may write out-of-range hyperparameters into a group; whatever a step accepts can be loaded."""
    name, expected = case
    keys = expected.optimizer_error_input.kwargs
    optimizer = masked(name)([torch.nn.Parameter(torch.randn(2, 3))], **({"foreach": True} if "foreach" in keys else {}))
    before = optimizer.state_dict()
    with pytest.raises(expected.error_type, match=expected.error_regex):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.randn(2, 3))], **keys})
    assert len(optimizer.param_groups) == 1
    saved = copy.deepcopy(before)
    saved["param_groups"][0].update(keys)
    optimizer.load_state_dict(saved)
    assert {key: optimizer.param_groups[0][key] for key in keys} == keys


# ---------------------------------------------------------------------- the oracle can fail


BROKEN = {
    "Adadelta": [{"maximize": True}, {"rho": 0.901}, {"eps": 1.01e-6}, {"lr": 1.001}],
    "Adafactor": [{"maximize": True}, {"beta2_decay": -0.81}, {"d": 1.1}, {"lr": 1.001e-2}, {"eps": (3.0, 1e-3)}, {"eps": (None, 3.0)}],
    "Adagrad": [{"maximize": True}, {"lr_decay": 1e-3}, {"initial_accumulator_value": 1e-3}, {"eps": 1e-3}],
    "Adam": [{"maximize": True}, {"betas": (0.901, 0.999)}, {"betas": (0.9, 0.9989)}, {"amsgrad": True}],
    "AdamW": [{"maximize": True}, {"weight_decay": 0.0101}, {"decoupled_weight_decay": False}],
    "Adamax": [{"maximize": True}, {"betas": (0.901, 0.999)}, {"betas": (0.9, 0.99)}, {"eps": 1e-4}],
    "ASGD": [{"maximize": True}, {"lambd": 2e-3}, {"lr": 1.001e-2}, {"weight_decay": 1e-3}],
    "Muon": [{"momentum": 0.9}, {"nesterov": False}, {"ns_steps": 4}, {"adjust_lr_fn": "match_rms_adamw"}, {"lr": 1.01e-3}],
    "NAdam": [{"maximize": True}, {"momentum_decay": 4.1e-3}, {"betas": (0.901, 0.999)}, {"betas": (0.9, 0.9989)}],
    "RAdam": [{"maximize": True}, {"betas": (0.901, 0.999)}, {"betas": (0.9, 0.9989)}, {"eps": 1e-4}],
    "RMSprop": [{"maximize": True}, {"alpha": 0.9901}, {"eps": 1e-5}, {"momentum": 0.01}, {"centered": True}],
    "Rprop": [{"maximize": True}, {"etas": (0.51, 1.2)}, {"etas": (0.5, 1.21)}, {"lr": 1.001e-2}, {"step_sizes": (1e-6, 0.01)}],
    "SGD": [{"maximize": True}, {"momentum": 0.01}, {"weight_decay": 1e-3}],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), [(n, b) for n, all_ in BROKEN.items() if n in INFOS for b in all_], ids=str)
def test_comparison_with_torch_detects_a_broken_rule(name, broken):
    torch.manual_seed(1)
    (p,) = [torch.nn.Parameter(torch.randn(6, 4))]
    coupled = broken.get("decoupled_weight_decay") is False
    ours = torch_api.MaskedAdam([p], weight_decay=1e-2) if coupled else masked(name)([p], **broken)
    (q,) = (start,) = clones([p])
    start = start.detach().clone()
    theirs = INFOS[name].optim_cls([q])
    for _ in range(20):
        set_grads([p], [torch.randn_like(p)])
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert movement_error(p, q, start) > (MUON if name == "Muon" else BOUNDS[torch.float32])


# ---------------------------------------------------------------------- modules: tied weights, missing gradients, masks


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head, self.frozen = (torch.nn.Linear(3, 3, bias=False) for _ in range(4))
        self.b.weight = self.a.weight

    def forward(self, x, with_head):
        y = self.frozen(self.b(torch.tanh(self.a(x))))
        return self.head(y) if with_head else y


@pytest.mark.slow
@pytest.mark.parametrize("name", INFOS)
def test_tied_frozen_and_inactive_weights_move_as_in_torch(name):
    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())
    bits = model.frozen.weight.detach().clone()
    ours = masked(name)(model.named_parameters(), mask={"frozen": False, "a": True, "head": True}, lr=0.01)
    theirs = INFOS[name].optim_cls([*twin.a.parameters(), *twin.head.parameters()], lr=0.01)
    start = clones([model.a.weight, model.head.weight])
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        x = torch.randn(5, 3, generator=generator)
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            net.zero_grad()
            net(x, step % 3 != 1).square().mean().backward()
            assert (net.head.weight.grad is None) == (step % 3 == 1)
            optimizer.step()
    for p, q, s in zip((model.a.weight, model.head.weight), (twin.a.weight, twin.head.weight), start, strict=True):
        # The gradients come from weights that differ in their last digits, and Rprop uses only the sign of a gradient.
        assert movement_error(p, q, s) < (20 * MUON if name == "Muon" else 1e-4)
        if "step" in theirs.state[q]:
            assert torch.equal(ours.state[p]["step"], theirs.state[q]["step"])
    assert torch.equal(model.frozen.weight, bits)
    assert model.frozen.weight not in ours.state
    assert model.b.weight is model.a.weight
