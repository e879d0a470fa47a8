"""Trained parameters that overlap in memory, with each other or with themselves, raise; adjacent parameters are accepted."""

import pytest
import torch
from sampling import sampled_tuples

import torch_api

pytestmark = pytest.mark.unoptimized

BOTH = r"parameters '\w+' and '\w+' share memory.*clone\(\)"
ITSELF = r"parameter '\w+' overlaps itself in memory.*clone\(\)"
Parameter = torch.nn.Parameter

SECOND = {
    "transposed": lambda w: w.t(),
    "the same": lambda w: w.data,
    "rows": lambda w: w.data[1:],
    "columns": lambda w: w.data[:, 1:3],
    "every second column": lambda w: w.data[:, ::2],
    "flat": lambda w: w.data.view(-1),
    "one element": lambda w: w.data[1, 1],
    "other bits": lambda w: w.data.view(torch.bfloat16),
    "overlapping itself": lambda w: w.data.as_strided((3, 3), (3, 1)),
}


def over_torchs_memory():
    return Parameter(torch.zeros(3, 4))


def in_a_larger_buffer():
    return Parameter(torch.zeros(100)[7:19].view(3, 4))


def in_the_memory_of_an_optimizer():
    p = Parameter(torch.zeros(3, 4))
    torch_api.MaskedSGD([p], lr=0.1)
    return p


MADE_OVER = [(over_torchs_memory, second) for second in SECOND] + [
    (make, second) for make in (in_a_larger_buffer, in_the_memory_of_an_optimizer) for second in ("transposed", "columns")
]


@pytest.mark.parametrize(("make", "kind"), sampled_tuples(MADE_OVER))
def test_overlapping_parameters_raise_at_construction_and_later(make, kind):
    first, second = make(), SECOND[kind]
    twin, other, before = Parameter(second(first)), Parameter(torch.zeros(second(first).shape)), first.data_ptr()
    with pytest.raises(ValueError, match=BOTH):
        torch_api.MaskedSGD([("encoder", first), ("decoder", twin)], lr=1.0)
    assert first.data_ptr() == before
    optimizer = torch_api.MaskedSGD([("encoder", first)], lr=1.0)
    twin = Parameter(second(first))
    with pytest.raises(ValueError, match=BOTH):
        optimizer.add_param_group({"params": [("decoder", twin)]})
    assert len(optimizer.param_groups) == 1
    optimizer = torch_api.MaskedSGD([("encoder", first), ("decoder", other.to(twin.dtype).detach().requires_grad_())], lr=1.0)
    other = optimizer.param_groups[0]["params"][1]
    other.data = second(first)
    for p in (first, other):
        p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(ValueError, match=BOTH):
            optimizer.step()
        assert bool((first == 0).all())
    other.data = other.data.clone()
    optimizer.step()
    assert bool((first == -1).all())
    assert bool((other == -1).all())


STRIDED = {
    "a step of one": ((4, 3), (1, 1)),
    "a step of two": ((3, 5), (4, 1)),
    "expanded": ((4, 3), (0, 1)),
    "in an odd way": ((4, 3), (2, 3)),
}


@pytest.mark.parametrize(("size", "stride"), STRIDED.values(), ids=STRIDED)
def test_parameter_that_overlaps_itself_raises(size, stride):
    with pytest.raises(ValueError, match=ITSELF):
        torch_api.MaskedSGD([("weight", Parameter(torch.ones(40).as_strided(size, stride)))], lr=0.25)


def columns(buffer):
    return list(buffer[:24].view(4, 6).split(2, dim=1))


APART = {
    "slices": lambda buffer: [buffer[:12], buffer[12:24].view(3, 4)],
    "columns of one matrix": columns,
    "every second element": lambda buffer: [buffer[:24:2], buffer[1:24:2]],
    "strides that interleave": lambda buffer: [buffer[:24].as_strided((2, 2), (2, 3)), buffer[1:2], buffer[4:5]],
    "steps that meet no element twice": lambda buffer: [buffer.as_strided((3, 2), (2, 3))],
    "without elements": lambda buffer: [buffer[:4], buffer[:0], buffer[:0].view(3, 0), buffer[2:2].expand(2, 0)],
}


@pytest.mark.parametrize("parts", APART.values(), ids=APART)
def test_adjacent_parameters_move_as_in_torch(parts):
    results = []
    for optimizer_class in (torch.optim.SGD, torch_api.MaskedSGD):
        buffer = torch.arange(30.0)
        params = list(map(Parameter, parts(buffer)))
        optimizer = optimizer_class(params, lr=0.25, momentum=0.5)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        results.append(buffer)
    torch.testing.assert_close(*results)


def test_frozen_view_of_a_trained_parameter_gets_its_updates():
    for frozen in ({"mask": "encoder"}, {}):
        encoder = Parameter(torch.zeros(3, 4))
        decoder = Parameter(encoder.data.t(), requires_grad=bool(frozen))
        optimizer = torch_api.MaskedSGD([("encoder", encoder), ("decoder", decoder)], lr=1.0, **frozen)
        encoder.grad = decoder.grad = None
        encoder.grad = torch.ones_like(encoder)
        optimizer.step()
        assert bool((decoder == -1).all())
        if frozen:
            with pytest.raises(ValueError, match=BOTH):
                optimizer.set_trainable("decoder", True)


def test_parameters_with_swapped_data_do_not_overlap():
    params = [Parameter(torch.full((4,), float(i))) for i in range(3)]
    optimizer = torch_api.MaskedSGD(params, lr=1.0)
    params[0].data, params[1].data = params[1].data, params[0].data
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert [p[0].item() for p in params] == [0.0, 0.0, 2.0]


class Tied(torch.nn.Module):
    """An autoencoder whose decoder weight is a view of the encoder's memory."""

    def __init__(self, *, trained, late=False):
        super().__init__()
        self.encoder = Parameter(torch.full((3, 4), 0.5))
        self.decoder = Parameter(torch.zeros(4, 3), requires_grad=trained)
        if not late:
            self.tie()

    def tie(self, view=lambda w: w.t()):
        self.decoder.data = view(self.encoder.data)

    def forward(self, x):
        return x @ self.encoder.t() @ self.decoder.t()


def loss(model, x):
    return model(x).square().mean()


def test_train_step_refuses_overlapping_trained_parameters():
    with pytest.raises(ValueError, match=BOTH):
        torch_api.MaskedSGD(Tied(trained=True).parameters(), lr=0.1)
    model = Tied(trained=True, late=True)
    step = torch_api.JaxTrainStep(model, loss, torch_api.MaskedSGD(model.named_parameters(), lr=0.1))
    step(torch.ones(2, 4))
    model.tie()
    before = model.encoder.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=BOTH):
            step(torch.ones(2, 4))
        assert torch.equal(model.encoder, before)


@pytest.mark.parametrize("late", [False, True])
def test_train_step_reads_a_frozen_view_before_the_update(late):
    results = []
    for ours in (False, True):
        model = Tied(trained=False, late=late)
        optimizer = (torch_api.MaskedSGD if ours else torch.optim.SGD)([("encoder", model.encoder)], lr=0.1)
        step = torch_api.JaxTrainStep(model, loss, optimizer) if ours else None
        for i in range(6):
            if i == 2:  # the optimizer has adopted the memory by now
                model.tie()
            if i == 4:
                model.decoder.data = model.encoder.data.view(-1)[:12].view(4, 3)
            x = torch.full((2, 4), 1.0 + i)
            if step is not None:
                step(x)
            else:
                model.encoder.grad = None
                loss(model, x).backward()
                optimizer.step()
        results.append((model.encoder.detach(), model.decoder.detach()))
    torch.testing.assert_close(results[1], results[0])
