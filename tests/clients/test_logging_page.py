"""docs/logging.md: TensorBoard's writer and the callbacks of Lightning and Hugging Face get the numbers of `metrics()`."""

import re
from pathlib import Path

import pytest
import torch

import torch_api

PAGE = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
NAMES = {f"optimizer/{name}" for name in ("grad_norm", "update_norm", "param_norm", "update_ratio", "skipped", "skipped_steps")}


def run_block(package, names):
    """Run the block of the page that needs a package, after those that need none."""
    pytest.importorskip(package)
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        if not block.startswith("# needs") or block.startswith(f"# needs {package}\n"):
            exec(compile(block, "logging.md", "exec"), names)
    return names


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_block("tensorboard", {})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs" / "example"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES | {"optimizer/grad_norm/head"}
    assert [event.step for event in events.Scalars("optimizer/grad_norm")] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")
def test_lightning_gets_the_numbers(tmp_path):
    names = run_block("lightning", {})
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def configure_optimizers(self):
            return torch_api.MaskedAdamW(self.net.named_parameters(), lr=1e-3, metrics=True)

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[names["LogOptimizer"]()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    assert trainer.callback_metrics.keys() >= NAMES
    assert trainer.callback_metrics["optimizer/grad_norm"] > 0


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_gets_the_numbers(tmp_path):
    names = run_block("transformers", {})
    import transformers

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def forward(self, x):
            return {"loss": self.net(x).square().mean()}

    model = Net()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, logging_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
        dataloader_pin_memory=False,
    )  # fmt: skip
    optimizer = torch_api.MaskedAdamW(model.named_parameters(), lr=1e-3, max_grad_norm=1.0, metrics=True)
    data = [{"x": torch.randn(4)} for _ in range(16)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.add_callback(names["LogOptimizer"](trainer))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "optimizer/grad_norm" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert all(entry.keys() >= NAMES for entry in logged)
