"""The training of finetune_digits.py with each step as one XLA program, compared with eager torch and torch.compile.

Forward, backward, batch norm's statistics and the masked AdamW are one program, `JaxTrainStep`, on parameters that torch can still use.
Pretraining on the digits 0 to 4 and fine-tuning of the head are as in that example, once by JaxTrainStep and once by an eager loop with
torch's fused AdamW: with the same batches, the losses and the accuracy must be the same.

    python examples/digits_train_step.py               # half a minute on two CPU cores
    python examples/digits_train_step.py --compiled    # also torch.compile of forward and backward, which takes a minute to build

It prints the accuracy, the largest difference of losses, and the time that a step takes each way.
"""

import statistics
import time
from collections.abc import Callable
from copy import deepcopy

import torch
from _gallery import option_parser, panels, save
from finetune_digits import GOAL, Data, DigitsNet, accuracy, load_data
from torch.nn import functional as F
from tqdm import tqdm

import torch_api

BATCH = 64
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(model: Callable[..., torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def compiled_step(model: DigitsNet, mask: str | None) -> Step:
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=2e-3, weight_decay=0.05, mask=mask)
    return torch_api.JaxTrainStep(model, loss_of, optimizer)


def eager_step(model: DigitsNet, mask: str | None, forward: Callable[..., torch.Tensor] | None = None) -> Step:
    """The body of torch's training loop; `forward` is the model compiled by torch.compile, if given."""
    params = list(model.parameters() if mask is None else model.head.parameters())
    optimizer = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.05, fused=True)
    for p in model.parameters():
        p.requires_grad_(any(p is q for q in params))

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(forward or model, images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(step: Step, data: Data, epochs: int) -> list[float]:
    """Train, and return the loss of each step; images that do not fill a batch are left out of that epoch."""
    order, losses = torch.Generator().manual_seed(0), []
    for _ in tqdm(range(epochs), unit="epoch", disable=None):
        for batch in torch.randperm(len(data.labels), generator=order).split(BATCH):
            if len(batch) == BATCH:
                losses.append(step(data.images[batch], data.labels[batch]).item())
    return losses


def run(model: DigitsNet, make: Callable[[DigitsNet, str | None], Step], data: Data, epochs: int) -> tuple[list[float], list[float]]:
    """Pretrain all parameters, then fine-tune the head alone; returns the losses of both."""
    low = data.labels <= 4
    model.train()
    pretraining = train(make(model, None), Data(data.images[low], data.labels[low]), epochs)
    model.eval()
    model.head.train()
    return pretraining, train(make(model, "head.*"), data, epochs)


def milliseconds(steps: dict[str, Step], data: Data, rounds: int = 60) -> dict[str, float]:
    """The median time of a step of each kind; they take turns, so that a busy moment affects all of them."""
    images, labels = data.images[:BATCH], data.labels[:BATCH]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in tqdm(range(rounds), desc="timing", unit="round", disable=None):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(images, labels)
            if i >= 5:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each of the two phases (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile; needs a C++ compiler")
    options = parser.parse_args()
    torch.manual_seed(0)
    training, test = load_data()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would spin at barriers while the machine is busy; the timing below uses all
    model = DigitsNet()
    twin, third = deepcopy(model), deepcopy(model)
    ours, theirs = run(model, compiled_step, training, options.epochs), run(twin, eager_step, training, options.epochs)
    reached, expected = accuracy(model, test), accuracy(twin, test)
    difference = max(abs(a - b) for a, b in zip(ours[0][:50], theirs[0][:50], strict=True))
    print(f"Test accuracy on all ten digits: {reached:.1%} by JaxTrainStep, {expected:.1%} by eager torch.")
    print(f"Losses of the first 50 steps differ by {difference:.1e} at most.")

    torch.set_num_threads(threads)
    for net in (model, twin, third):
        net.train()
    steps = {"JaxTrainStep": compiled_step(model, None), "eager torch, fused AdamW": eager_step(twin, None)}
    if options.compiled:
        steps["torch.compile, fused AdamW"] = eager_step(third, None, forward=torch.compile(third))
    times = milliseconds(steps, training)
    for name, value in times.items():
        print(f"{name}: {value:.2f} ms a step of {BATCH} images")

    figure, (left, right) = panels()
    left.semilogy(ours[0] + ours[1], label="JaxTrainStep")
    left.semilogy(theirs[0] + theirs[1], ":", label="eager torch, fused AdamW")
    left.axvline(len(ours[0]), color="0.7", linestyle=":")
    left.set(title="Loss of pretraining and of fine-tuning", xlabel="step")
    left.legend(frameon=False)
    right.bar_label(right.barh(list(times), list(times.values()), height=0.4), fmt="%.1f", padding=4)
    right.set(title=f"Milliseconds a step of {BATCH} images")
    right.margins(x=0.15)
    right.invert_yaxis()
    save(figure, options.plots, "digits_train_step")
    assert difference < 1e-3, "the program computes something else than the loop"
    assert min(reached, expected) >= GOAL, f"the test accuracy is {reached:.1%}, expected at least {GOAL:.0%}"


if __name__ == "__main__":
    main()
