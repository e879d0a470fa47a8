"""Lightning: automatic and manual optimization, resumed by `ckpt_path`."""

import pytest
import torch
from contract import OURS, SAVED, STEPS, check, masked_adamw, samples

lightning = pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


class Automatic(lightning.LightningModule):
    def __init__(self, network, make):
        super().__init__()
        self.network, self.make, self.seen = network, make, []

    def configure_optimizers(self):
        optimizer = self.make(self.network.named_parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.network(x), y)
        self.seen.append(loss.item())
        return loss


class Manual(Automatic):
    def __init__(self, network, make):
        super().__init__(network, make)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        self.lr_schedulers().step()


def trained_as(kind, **options):
    def train(network, make, folder, resume):
        module = kind(network, make)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1)
        trainer = lightning.Trainer(
            max_epochs=STEPS // SAVED, limit_train_batches=SAVED, accelerator="cpu", callbacks=[saving], logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            **options,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), 8)
        trainer.fit(module, loader, ckpt_path=folder / f"step={SAVED}.ckpt" if resume else None)
        return trainer.optimizers[0], module.seen

    return train


@pytest.mark.parametrize("optimizer", OURS)
def test_automatic_optimization_meets_the_contract(optimizer, tmp_path):
    check(trained_as(Automatic, gradient_clip_val=1.0), optimizer, tmp_path)


def test_manual_optimization_meets_the_contract(tmp_path):
    check(trained_as(Manual), masked_adamw, tmp_path)
