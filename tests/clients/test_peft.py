"""LoRA by peft: peft freezes the base model, the mask freezes an adapter, and only adapters are saved."""

import pytest
import torch
from contract import SAVED, STEPS, check, lion, masked_adamw, samples

peft = pytest.importorskip("peft")
LAYER = "base_model.model.{}.lora_{}.default.weight"


def lora():
    """Return a LoRA model; the base does not depend on the seed, because peft does not save it."""
    base = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    for p in base.parameters():
        p.data = torch.linspace(-0.5, 0.5, p.numel()).sin().reshape(p.shape)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"]))


def train(model, make, folder, resume):
    optimizer = make(model.named_parameters())
    if resume:
        peft.set_peft_model_state_dict(model, peft.utils.load_peft_weights(str(folder), "cpu"))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    losses = []
    while len(losses) < STEPS - (SAVED if resume else 0):
        x, y = samples()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == SAVED and not resume:
            model.save_pretrained(str(folder))
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    assert all("base_layer" not in name or torch.equal(p, lora().get_parameter(name)) for name, p in model.named_parameters())
    return optimizer, losses


@pytest.mark.parametrize("optimizer", [masked_adamw, lion])
def test_adapters_meet_the_contract(optimizer, tmp_path):
    check(train, optimizer, tmp_path, model=lora, frozen=LAYER.format(0, "A"), still="base_model.model.0.base_layer.weight")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_trainer_saves_and_resumes_adapters(tmp_path):
    pytest.importorskip("transformers")
    from test_transformers import gpt2, with_class

    def model():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            base = gpt2(initializer_range=0.3)  # with smaller weights the frozen head would give constant outputs
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_fc", "c_proj"], fan_in_fan_out=True))

    block = "base_model.model.transformer.h.0.mlp.c_fc"
    names = {"frozen": f"{block}.lora_A.default.weight", "still": f"{block}.base_layer.weight"}
    check(with_class(names["frozen"], lr=0.05), None, tmp_path, model=model, **names)
