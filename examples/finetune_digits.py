"""Fine-tune the head of a small convolutional network while a mask keeps its backbone frozen, bit for bit.

The network first learns the handwritten digits 0 to 4 with all its parameters. Then a mask freezes the backbone, and the head learns all
ten digits from the features that the backbone already has. A checkpoint is written half-way; a new model and optimizer resume from it and
end with exactly the same weights.

    python examples/finetune_digits.py                      # about 20 seconds on two CPU cores
    python examples/finetune_digits.py --epochs 30 --seed 1 --plots my_plots

It prints what the optimizer does with each parameter, the test accuracy before and after, and what stayed unchanged. It draws the losses,
and how far each parameter moved.
"""

import argparse
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from _gallery import option_parser, panels, save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import torch_api

GOAL = 0.96


class Data(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


class DigitsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        backbone = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 32, 3, padding=1), norm1=nn.BatchNorm2d(32), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1), norm2=nn.BatchNorm2d(64), relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2), flat=nn.Flatten(),
        )  # fmt: skip
        head = OrderedDict[str, nn.Module](hidden=nn.Linear(64 * 4 * 4, 64), norm=nn.LayerNorm(64), relu=nn.ReLU(), out=nn.Linear(64, 10))
        self.backbone, self.head = nn.Sequential(backbone), nn.Sequential(head)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))


@dataclass
class Run:
    """One phase of training: all that a checkpoint holds, except torch's random state, which determines the shuffling."""

    model: DigitsNet
    optimizer: torch_api.MaskedAdamW
    scheduler: CosineAnnealingLR
    epoch: int = 0

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"epoch": self.epoch, "random": torch.get_rng_state()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.epoch = saved["epoch"]
        torch.set_rng_state(saved["random"])


def load_data() -> tuple[Data, Data]:
    """1797 images of 8x8 pixels: two thirds for training, one third for testing, each digit split in the same ratio."""
    digits: Any = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    train, test = train_test_split(torch.arange(len(labels)), test_size=1 / 3, stratify=labels, random_state=0)
    return Data(images[train], labels[train]), Data(images[test], labels[test])


def start(model: DigitsNet, epochs: int, **masks: Any) -> Run:
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=2e-3, weight_decay=0.05, **masks)
    return Run(model, optimizer, CosineAnnealingLR(optimizer, T_max=epochs, eta_min=2e-5))


def start_fine_tuning(model: DigitsNet, epochs: int) -> Run:
    return start(model, epochs, mask="head.*", decay_mask=torch_api.no_decay_on_bias_and_norm)


def train_epoch(run: Run, data: Data) -> float:
    total = 0.0
    for batch in torch.randperm(len(data.labels)).split(64):
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(data.images[batch]), data.labels[batch])
        loss.backward()
        run.optimizer.step()
        total += loss.item() * len(batch)
    return total / len(data.labels)


def train(run: Run, trained: nn.Module, data: Data, until: int, title: str) -> list[float]:
    """Train to the end of epoch `until`; returns the mean loss of each epoch.

    Only `trained` is in training mode: the mask freezes parameters, but batch norm in training mode would still update its statistics.
    """
    run.model.eval()
    trained.train()
    losses = []
    progress = tqdm(range(run.epoch, until), desc=f"{title:<24}", unit="epoch", disable=None)
    for epoch in progress:
        losses.append(train_epoch(run, data))
        run.scheduler.step()
        run.epoch = epoch + 1
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses


def pretrain(data: Data, epochs: int) -> tuple[DigitsNet, list[float]]:
    model = DigitsNet()
    low = data.labels <= 4
    return model, train(start(model, epochs), model, Data(data.images[low], data.labels[low]), epochs, "pretraining")


def fine_tune(model: DigitsNet, data: Data, epochs: int, checkpoint: Path) -> tuple[Run, list[float]]:
    run = start_fine_tuning(model, epochs)
    first_half = train(run, model.head, data, epochs // 2, "fine-tuning, first half")
    run.save(checkpoint)
    return run, first_half + train(run, model.head, data, epochs, "fine-tuning, second half")


def resume(data: Data, epochs: int, checkpoint: Path) -> tuple[DigitsNet, list[float]]:
    model = DigitsNet()
    run = start_fine_tuning(model, epochs)
    run.load(checkpoint)
    return model, train(run, model.head, data, epochs, "resumed, second half")


@torch.no_grad()
def accuracy(model: DigitsNet, data: Data) -> float:
    model.eval()
    return (model(data.images).argmax(1) == data.labels).float().mean().item()


def snapshot(model: DigitsNet) -> dict[str, tuple[int, torch.Tensor]]:
    """The address and a copy of each parameter and buffer."""
    return {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


def check_frozen(run: Run, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    now, params = run.model.state_dict(), [row["parameter"] for row in run.optimizer.report().rows]
    frozen = [row["parameter"] for row in run.optimizer.report().rows if row["status"] == "frozen"]
    buffers = [name for name in now if name.startswith("backbone.") and name not in params]
    kept = [name for name in frozen + buffers if same_bits(now[name], before[name][1])]
    in_place = [name for name in params if now[name].data_ptr() == before[name][0]]
    total = f"{len(frozen + buffers)} ({len(frozen)} parameters, {len(buffers)} batch norm buffers)"
    print(f"Frozen: {len(kept)} of {total} have the same bits as before fine-tuning.")
    print(f"In place: {len(in_place)} of {len(params)} parameters have the same address in memory as before fine-tuning.")
    assert frozen, "the mask froze nothing"
    assert kept == frozen + buffers, f"frozen, but changed: {set(frozen + buffers) - set(kept)}"
    assert in_place == params, f"moved in memory: {set(params) - set(in_place)}"


def check_resumed(model: DigitsNet, resumed: DigitsNet) -> None:
    pairs = list(zip(model.state_dict().values(), resumed.state_dict().values(), strict=True))
    same = sum(same_bits(a, b) for a, b in pairs)
    print(f"Resumed from the checkpoint: {same} of {len(pairs)} tensors have the same bits as without the interruption.")
    assert same == len(pairs), "the resumed run ended with other weights"


def draw_losses(axes: Any, pretraining: list[float], fine_tuning: list[float], resumed: list[float]) -> None:
    end = len(fine_tuning)
    axes.plot(range(1, end + 1), pretraining, color="tab:gray", label="pretraining, digits 0 to 4")
    axes.plot(range(1, end + 1), fine_tuning, color="tab:blue", label="fine-tuning, ten digits")
    axes.plot(range(end - len(resumed) + 1, end + 1), resumed, "o", color="tab:orange", ms=4, label="resumed half-way")
    axes.set(title="Training loss", xlabel="epoch of the phase", ylabel="cross entropy", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def draw_movement(axes: Any, model: DigitsNet, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    change = {name: float((p.detach() - before[name][1]).norm() / before[name][1].norm()) for name, p in model.named_parameters()}
    colors = ["tab:blue" if value else "tab:gray" for value in change.values()]
    bars = axes.barh(list(change), list(change.values()), color=colors)
    axes.bar_label(bars, [f"{value:.2f}" if value else "0 (frozen)" for value in change.values()], padding=4)
    axes.set(title="Movement of each parameter", xlabel="length of the change / length before")
    axes.invert_yaxis()
    axes.margins(x=0.25, y=0.02)


def parse_options() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each of the two phases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the shuffling (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # a small network gains little from more threads, which spin at barriers when the machine is busy
    training, test = load_data()
    model, pretraining = pretrain(training, options.epochs)
    before, accuracy_before = snapshot(model), accuracy(model, test)
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        run, fine_tuning = fine_tune(model, training, options.epochs, checkpoint)
        resumed_model, resumed = resume(training, options.epochs, checkpoint)

    reached = accuracy(model, test)
    print(run.optimizer.report(), end="\n\n")
    print(f"Test accuracy on all ten digits: {accuracy_before:.1%} before fine-tuning, {reached:.1%} after.")
    check_frozen(run, before)
    check_resumed(model, resumed_model)

    figure, (left, right) = panels()
    draw_losses(left, pretraining, fine_tuning, resumed)
    draw_movement(right, model, before)
    save(figure, options.plots, "finetune_digits")
    assert reached >= GOAL, f"the test accuracy is {reached:.1%}, expected at least {GOAL:.0%}; --epochs was {options.epochs}"


if __name__ == "__main__":
    main()
