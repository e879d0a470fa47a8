"""Muon for the matrices and AdamW for the rest: a small character transformer on the help texts that come with Python.

`muon_labels` finds the matrices of the hidden layers. One `PartitionedOptimizer` updates these by optax's Muon, and embeddings, norms,
biases and head by optax's AdamW, each with its own lr, under one scheduler. For comparison, torch's AdamW alone trains on the same batches.

    python examples/muon_transformer.py     # prints the label of each parameter, both losses, and a sample
"""

from copy import deepcopy
from pydoc_data.topics import topics

import optax
import torch
from _gallery import option_parser, panels, save
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_api

STEPS, BATCH, LENGTH, WIDTH = 140, 32, 32, 64
TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore")))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = (nn.Embedding.from_pretrained(0.1 * torch.randn(n, WIDTH), freeze=False) for n in (128, LENGTH))
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])))


def train(model: Transformer, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train; returns the loss of each step, in nats per character."""
    random, losses, scheduler = torch.Generator().manual_seed(0), [], torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for _ in tqdm(range(STEPS), unit="step", disable=None):
        rows = TEXT[torch.randint(len(TEXT) - LENGTH, (BATCH, 1), generator=random) + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def sample(model: Transformer, text: str) -> str:
    for _ in range(200):
        tokens = torch.tensor([list(text[-LENGTH:].encode())])
        text += chr(int(torch.multinomial((model(tokens)[0, -1] / 0.7).softmax(-1), 1)))
    return text


def main() -> None:
    plots = option_parser(__doc__).parse_args().plots
    torch.set_num_threads(1)
    torch.manual_seed(0)
    twin = deepcopy(model := Transformer())
    transforms = {"muon": (optax.contrib.muon, {"lr": 4e-2}), "adamw": (optax.adamw, {"lr": 5e-3, "weight_decay": 0.1})}
    mixed = torch_api.PartitionedOptimizer(model.named_parameters(), transforms, labels=torch_api.muon_labels(model))
    print(mixed)
    losses = train(model, mixed)
    losses_alone = train(twin, torch.optim.AdamW(twin.parameters(), lr=5e-3, weight_decay=0.1))
    loss, alone = sum(losses[-20:]) / 20, sum(losses_alone[-20:]) / 20
    print(f"Loss at the end: {loss:.3f} nats a character with Muon and AdamW, {alone:.3f} with AdamW alone.\n{sample(model, 'The ')}")

    figure, axes = panels(1)
    axes.plot(losses_alone, color="tab:gray", label="AdamW alone")
    axes.plot(losses, label="Muon for the matrices, AdamW for the rest")
    axes.set(title="Loss, nats a character", xlabel="step")
    axes.legend(frameon=False)
    save(figure, plots, "muon_transformer")
    assert loss < min(2.35, alone - 0.15)


if __name__ == "__main__":
    main()
