"""Fine-tune a pretrained model from a safetensors file, and unfreeze it gradually: first the head, then layer after layer.

A small convolutional network first learns to read scikit-learn's handwritten digits, and its weights go to a file. A new network loads
them, gets a new head, and learns from 60 images how many closed loops a digit has: one in 0, 6 and 9, two in 8. At first only the head is
trained; `set_trainable` adds a layer after each quarter of the epochs, from the top down. For comparison, the same network learns from the
same images without the file.

    python examples/finetune_from_file.py                # 20 seconds on two CPU cores
    python examples/finetune_from_file.py --epochs 4     # a quick look

It prints the accuracy after each stage, and checks that each layer keeps the bits of the file until it is unfrozen.
"""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from _gallery import option_parser, panels, save
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_api

RATE = 3e-3
LAYERS = ["head", "layer3", "layer2", "layer1"]  # in the order in which they are trained
LOOPS = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0, 2, 1])  # of each digit

# The first step after a layer was added compiles a new program, as expected.
warnings.filterwarnings("ignore", category=torch_api.CompilationWarning)


def layer(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = layer(1, 16), layer(16, 32), layer(32, 64)
        self.head = nn.Linear(64 * 4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.layer2(self.layer1(x)), 2)
        return self.head(F.max_pool2d(self.layer3(x), 2).flatten(1))


class Data(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def load_data() -> tuple[Data, Data, Data]:
    """1000 images with the digit as label; 60 with the number of loops as label; and the other 737 likewise."""
    digits: Any = load_digits()
    order = torch.randperm(len(digits.target))
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16, torch.tensor(digits.target)[order]
    loops = LOOPS[labels]
    return Data(images[:1000], labels[:1000]), Data(images[1000:1060], loops[1000:1060]), Data(images[1060:], loops[1060:])


def train_epoch(model: Net, optimizer: torch.optim.Optimizer, data: Data) -> None:
    for index in torch.randperm(len(data.labels)).split(20):
        optimizer.zero_grad()
        F.cross_entropy(model(data.images[index]), data.labels[index]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: Net, data: Data) -> float:
    return (model(data.images).argmax(1) == data.labels).float().mean().item()


def train(model: Net, data: Data, test: Data, epochs: int, title: str) -> list[float]:
    """Train all parameters; returns the accuracy after each epoch."""
    reached = []
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=RATE)
    for _ in tqdm(range(epochs), desc=f"{title:<16}", unit="epoch", disable=None):
        train_epoch(model, optimizer, data)
        reached.append(accuracy(model, test))
    return reached


@torch.no_grad()
def movement(model: Net, start: dict[str, torch.Tensor]) -> dict[str, float]:
    """The length of the change of each layer's parameters, relative to their length at the start."""

    def length(name: str, tensors: dict[str, torch.Tensor]) -> float:
        return torch.cat([x.flatten() for key, x in tensors.items() if key.startswith(f"{name}.")]).norm().item()

    change = {name: p - start[name] for name, p in model.named_parameters()}
    return {name: length(name, change) / length(name, start) for name in LAYERS}


def fine_tune(path: Path, data: Data, test: Data, epochs: int) -> tuple[list[float], dict[str, list[float]]]:
    """Train a network from a file, by stages; returns the accuracy, and the movement of each layer, after each epoch."""
    model = Net(3)
    pretrained = {name: x for name, x in load_file(path).items() if not name.startswith("head.")}
    missing, _ = model.load_state_dict(pretrained, strict=False)
    assert missing == ["head.weight", "head.bias"], "the file has all but the new head"
    scale = {"head": 1.0, "layer3": 0.3, "layer2": 0.1, "layer1": 0.03}  # of the learning rate
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=RATE, mask="head.*", lr_scale=scale)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    reached, moved = [], {name: [] for name in LAYERS}
    for epoch in tqdm(range(epochs), desc=f"{'fine-tuning':<16}", unit="epoch", disable=None):
        stage = epoch * len(LAYERS) // epochs
        optimizer.set_trainable(f"{LAYERS[stage]}.*", True)
        train_epoch(model, optimizer, data)
        reached.append(accuracy(model, test))
        for name, change in movement(model, start).items():
            moved[name].append(change)
        assert all(moved[name][-1] == 0 for name in LAYERS[stage + 1 :]), "a layer moved before it was unfrozen"
    print(optimizer.report())
    return reached, moved


def draw(reached: list[float], alone: list[float], moved: dict[str, list[float]], folder: Path) -> None:
    figure, (left, right) = panels()
    epochs = range(1, len(reached) + 1)
    left.plot(epochs, reached, label="pretrained, unfrozen gradually")
    left.plot(epochs, alone, label="without the file", color="tab:gray")
    left.set(title="Accuracy on new images", xlabel="epoch")
    left.legend(frameon=False, loc="lower right")
    for name, values in moved.items():
        right.plot(epochs, values, label=name)
    right.set(title="Movement of each layer, relative to its size", xlabel="epoch")
    right.legend(frameon=False)
    for stage in range(1, len(LAYERS)):
        for axes in (left, right):
            axes.axvline(stage * len(reached) / len(LAYERS) + 0.5, color="0.7", linestyle=":")
    save(figure, folder, "finetune_from_file")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of fine-tuning (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits, few, others = load_data()
    pretrained, scratch = Net(10), Net(3)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "pretrained.safetensors"
        read = train(pretrained, digits, digits, max(1, options.epochs // 8), "pretraining")
        save_file(pretrained.state_dict(), path)
        reached, moved = fine_tune(path, few, others, options.epochs)
    alone = train(scratch, few, others, options.epochs, "without the file")

    print(f"The pretrained network reads {read[-1]:.1%} of its training images right.")
    for stage, name in enumerate(LAYERS, 1):
        print(f"After the stage of {name}: {reached[stage * options.epochs // len(LAYERS) - 1]:.1%} of new images are told right.")
    print(f"Without the file: {alone[-1]:.1%}.")
    draw(reached, alone, moved, options.plots)
    assert reached[-1] > alone[-1] or options.epochs < 20, "the file does not help"


if __name__ == "__main__":
    main()
