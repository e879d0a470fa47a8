"""Parameters that swap their `data`, some without a gradient: as in torch.optim, the state stays with the parameter."""

import itertools

import pytest
import torch
from sampling import sampled_tuples

import torch_api

pytestmark = pytest.mark.unoptimized


def swap_all(params):
    params[0].data, params[-1].data = params[-1].data, params[0].data


def rotate(params):
    first, second, last = (p.data for p in (params[0], params[1], params[-1]))
    params[0].data, params[1].data, params[-1].data = last, first, second


def swap_with_frozen(params):
    params[1].requires_grad_(False)
    params[1].data, params[-1].data = params[-1].data, params[1].data


def train(cls, count, shape, exchange, without):
    params = [torch.nn.Parameter(torch.full(shape, float(i))) for i in range(count)]
    opt = cls(params, lr=0.1, momentum=0.9)
    steps = [(), without, (), without]
    for number, missing in enumerate(steps):
        for i, p in enumerate(params):
            p.grad = None if i % count in {j % count for j in missing} or not p.requires_grad else torch.full(shape, 1.0 + i + number)
        opt.step()
        if number == 0:
            exchange(params)
    return params, opt


@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient")
@pytest.mark.parametrize("exchange", [swap_all, rotate, swap_with_frozen])
@pytest.mark.parametrize(("count", "shape"), sampled_tuples([(6, (4, 3)), (3, (4, 3)), (3, (300, 200))]))
def test_updates_follow_swapped_parameters(exchange, count, shape):
    for without in ((-1,), (0,), (0, 1), (0, 1, -1)):
        (ours, opt), (theirs, expected) = (train(cls, count, shape, exchange, without) for cls in (torch_api.MaskedSGD, torch.optim.SGD))
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q)
            torch.testing.assert_close(opt.state[p].get("momentum_buffer"), expected.state[q].get("momentum_buffer"))


def test_parameters_of_two_optimizers_may_swap_data():
    def train(cls):
        params = [torch.nn.Parameter(torch.full((4, 3), float(i))) for i in range(12)]
        opts = [cls(params[:6], lr=0.1), cls(params[6:], lr=0.2)]
        for p, opt in itertools.product(params, opts):
            p.grad = torch.ones(4, 3)
            if p is params[-1]:
                opt.step()
        params[0].data, params[7].data = params[7].data, params[0].data
        params[7].grad = None
        for opt in (*opts, *opts):
            opt.step()
        return params

    for p, q in zip(train(torch_api.MaskedSGD), train(torch.optim.SGD), strict=True):
        torch.testing.assert_close(p, q)


def test_offloaded_parameter_without_gradient_returns_unchanged():
    params = [torch.nn.Parameter(torch.full((4, 3), float(i))) for i in range(4)]
    opt = torch_api.MaskedSGD(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    kept, params[1].grad, params[1].data = params[1].data, None, torch.empty(0)
    params[2].data = params[2].data.clone()
    opt.step()
    params[1].data = kept
    params[1].grad = torch.ones(4, 3)
    opt.step()
    assert [round(p[0, 0].item(), 5) for p in params] == [-0.3, 0.8, 1.7, 2.7]
