"""Train a character model on the help texts that come with Python, each step as one XLA program; then let it write a text.

The model, its loss and the sampling are plain torch. `JaxTrainStep` traces the loss once, including dropout, and runs forward, backward and
AdamW (with masked weight decay and clipped gradients) in the memory of the parameters from which torch then samples. The learning rate
follows a torch scheduler, which needs no new compilation.

    python examples/character_model.py --steps 400    # half a minute on two CPU cores
"""

import time
from pydoc_data.topics import topics

import torch
from _gallery import option_parser, panels, save
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

import torch_api

BATCH, LENGTH, WIDTH, HEADS = 16, 64, 96, 4
TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore")))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class CharacterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.token.weight)  # the embedding is also the head


def loss_of(model: CharacterModel, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(model: CharacterModel, steps: int) -> tuple[list[float], list[float]]:
    """Train; returns the loss and the learning rate of each step."""
    decay_mask = torch_api.no_decay(model)
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=3e-3, weight_decay=0.1, decay_mask=decay_mask, max_grad_norm=1.0)
    scheduler = OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    train_step = torch_api.JaxTrainStep(model, loss_of, optimizer)
    losses, rates, begin = [], [], time.perf_counter()
    for step in tqdm(range(steps), unit="step", disable=None):
        rows = TEXT[torch.randint(len(TEXT) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(train_step(rows).item())
        if step < steps - 1:
            scheduler.step()
        if step == 0:
            tqdm.write(f"The first step, which compiles, took {time.perf_counter() - begin:.1f} s; loss {losses[0]:.3f} nats a character.")
    print(f"{steps} steps, {train_step.cache_info().compilations} program compiled; loss at the end {sum(losses[-50:]) / 50:.3f}.")
    return losses, rates


@torch.no_grad()
def sample(model: CharacterModel, text: str, characters: int) -> str:
    model.eval()
    for _ in range(characters):
        tokens = torch.tensor([list(text[-LENGTH:].encode())])
        text += chr(int(torch.multinomial((model(tokens)[0, -1] / 0.6).softmax(-1), 1)))
    return text


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches, dropout and sampling (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = CharacterModel()
    losses, rates = train(model, options.steps)
    print(f"A text of its own:\n\n{sample(model, 'The ', 300)}")
    figure, (left, right) = panels()
    left.plot(losses, linewidth=0.8)
    left.set(title="Loss, nats a character", xlabel="step")
    right.plot(rates)
    right.set(title="Learning rate: one compilation for all", xlabel="step")
    save(figure, options.plots, "character_model")
    assert sum(losses[-50:]) / 50 < 2.1, "the model has learned too little"


if __name__ == "__main__":
    main()
