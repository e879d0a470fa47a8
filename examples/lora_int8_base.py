"""LoRA over a quantized base: adapt a character model whose weights are kept in int8, by training small adapters only.

A small transformer first learns English prose, the help texts that come with Python. Then the weights of its linear layers are rounded to
int8, one scale a row, and each layer gets an adapter: two thin matrices whose product is added to its output. `mask="*.lora_*"` trains the
adapters on Python code, by their names. For comparison, a copy of the model in float32 trains all its weights on the same batches.

    python examples/lora_int8_base.py                  # half a minute on two CPU cores
    python examples/lora_int8_base.py --steps 20       # a quick look

It prints what is trained, the loss on Python code that is in no batch, and the bytes of weights, gradients and optimizer state. The base
keeps its bits, which is checked.
"""

import argparse
import inspect
import statistics
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from _gallery import option_parser, panels, save
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_api

BATCH, LENGTH, WIDTH, HEADS, RANK, EVERY = 16, 48, 96, 4, 4, 10


def characters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("ascii", "ignore")))


PROSE = characters("".join(topics.values()))
CODE = characters("".join(map(inspect.getsource, (argparse, inspect, statistics))))
CODE, NEW_CODE = CODE[:-4000], CODE[-4000:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = (nn.Embedding.from_pretrained(0.1 * torch.randn(n, WIDTH), freeze=False) for n in (128, LENGTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)  # the embedding is also the head


class Int8Product(torch.autograd.Function):
    """x @ weight.T for int8 weights. Neither pass keeps the weights in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ weight.to(x.dtype).T * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, scale = ctx.saved_tensors
        return (grad * scale) @ weight.to(grad.dtype), None, None


class LoraLinear(nn.Module):
    """A linear layer in int8 and its adapter. `lora_up` starts as zeros, so that the adapter at first adds nothing."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1) / 127
        self.weight = nn.Parameter((base.weight.detach() / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale, requires_grad=False), base.bias
        self.lora_down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Int8Product.apply(x, self.weight, self.scale) + self.bias + x @ self.lora_down.T @ self.lora_up.T


def add_adapters(model: CharacterModel) -> None:
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoraLinear(getattr(block, name)))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def loss_on_new_code(model: nn.Module) -> float:
    return loss_of(model, NEW_CODE.unfold(0, LENGTH + 1, LENGTH)).item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, steps: int, title: str) -> list[float]:
    """Train on random pieces of a text; returns the loss on new code, in nats a character, at the start and after every `EVERY` steps."""
    random, losses = torch.Generator().manual_seed(1), [loss_on_new_code(model)]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in tqdm(range(1, steps + 1), desc=f"{title:<20}", unit="step", disable=None):
        rows = text[torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random) + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        scheduler.step()
        if step % EVERY == 0:
            losses.append(loss_on_new_code(model))
    return losses


def memory(model: nn.Module, optimizer: torch_api.MaskedAdamW) -> dict[str, int]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    tensors = {"weights": list(model.parameters()), "gradients": grads, "optimizer state": state}
    return {name: sum(x.nbytes for x in own) for name, own in tensors.items()}


def draw(losses: dict[str, list[float]], used: dict[str, dict[str, int]], folder: Path) -> None:
    figure, (left, right) = panels()
    for name, values in losses.items():
        left.plot(range(0, EVERY * len(values), EVERY), values, label=name)
    left.set(title="Loss on Python code that is in no batch", xlabel="step", ylabel="nats a character")
    left.legend(frameon=False)
    begin = [0.0] * len(used)
    for part in next(iter(used.values())):
        sizes = [own[part] / 1e6 for own in used.values()]
        right.barh(list(used), sizes, left=begin, label=part)
        begin = [a + b for a, b in zip(begin, sizes, strict=True)]
    right.set(title="Memory while fine-tuning", xlabel="MB")
    right.invert_yaxis()
    right.legend(frameon=False)
    save(figure, folder, "lora_int8_base")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of each of the three trainings (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = CharacterModel()
    train(model, torch_api.MaskedAdamW(model.named_parameters(), lr=3e-3), PROSE, options.steps, "pretraining, prose")

    full = deepcopy(model)  # for comparison: float32, all weights trained
    add_adapters(model)
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)  # torch need not compute other gradients
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=1e-2, mask="*.lora_*")
    print(optimizer.report(), end="\n\n")
    optimizer_of_full = torch_api.MaskedAdamW(full.named_parameters(), lr=1e-3)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = {
        "LoRA, int8 base": train(model, optimizer, CODE, options.steps, "LoRA, code"),
        "all weights, float32": train(full, optimizer_of_full, CODE, options.steps, "all weights, code"),
    }
    used = {"LoRA, int8 base": memory(model, optimizer), "all weights, float32": memory(full, optimizer_of_full)}

    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    print(f"{len(moved)} of {len(before)} parameters moved; the other {len(before) - len(moved)} have the same bits as before.")
    for name, values in losses.items():
        bytes_used = ", ".join(f"{part} {size:,}" for part, size in used[name].items())
        print(f"{name}: loss on new code {values[0]:.3f} before, {values[-1]:.3f} after; bytes: {bytes_used}")
    draw(losses, used, options.plots)
    assert moved == {name for name in before if ".lora_" in name}, "only the adapters move"
    assert losses["LoRA, int8 base"][-1] < losses["LoRA, int8 base"][0] - 0.1 or options.steps < 100, "the adapters have learned nothing"


if __name__ == "__main__":
    main()
