"""Hugging Face's Trainer on tiny random models: `optimizers=`, `optimizer_cls_and_kwargs=`, `resume_from_checkpoint=`."""

import pytest
import torch
from contract import LR, SAVED, STEPS, check, lion, masked_adamw

import torch_api

transformers = pytest.importorskip("transformers")


def gpt2(**more):
    config = transformers.GPT2Config(vocab_size=16, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **more)
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=12
    )
    return transformers.BertForMaskedLM(config)


def language():
    """Return sequences that count modulo 16."""
    rows = [(torch.arange(8) + first) % 16 for first in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(model, data, folder, **how):
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SAVED, logging_steps=1, per_device_train_batch_size=4, learning_rate=LR, weight_decay=0.1,
        lr_scheduler_type="cosine", use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data, **how)


def fit(client, folder, resume):
    client.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    return client.optimizer.optimizer, [entry["loss"] for entry in client.state.log_history if "loss" in entry]


def with_optimizers(data):
    def train(model, make, folder, resume):
        optimizer = make(model.named_parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        return fit(trainer(model, data, folder, optimizers=(optimizer, scheduler)), folder, resume)

    return train


def with_class(name, lr=LR):
    """The Trainer makes groups and scheduler, as with `optim=`; its groups have no names and may be empty."""

    def train(model, make, folder, resume):
        frozen = model.get_parameter(name)
        kwargs = {"lr": lr, "mask": lambda name, p: p is not frozen, "max_grad_norm": 1.0}
        return fit(trainer(model, language(), folder, optimizer_cls_and_kwargs=(torch_api.MaskedAdamW, kwargs)), folder, resume)

    return train


GPT2 = {"frozen": "transformer.h.0.attn.c_attn.weight", "still": "transformer.wpe.weight"}
BERT = {"frozen": "bert.encoder.layer.0.attention.self.query.weight", "still": "bert.embeddings.position_embeddings.weight"}


@pytest.mark.parametrize("optimizer", [masked_adamw, lion])
def test_gpt2_with_optimizers_meets_the_contract(optimizer, tmp_path):
    check(with_optimizers(language()), optimizer, tmp_path, model=gpt2, **GPT2)


def test_gpt2_with_optimizer_class_meets_the_contract(tmp_path):
    check(with_class(GPT2["frozen"]), None, tmp_path, model=gpt2, **GPT2)


def test_bert_with_optimizers_meets_the_contract(tmp_path):
    check(with_optimizers(language()), masked_adamw, tmp_path, model=bert, **BERT)


def test_weights_from_files_are_updated_in_their_own_memory(tmp_path):
    bert().save_pretrained(tmp_path)
    model, twin = (transformers.BertForMaskedLM.from_pretrained(tmp_path) for _ in range(2))
    ours, theirs = torch_api.MaskedAdamW(model.named_parameters(), lr=LR), torch.optim.AdamW(twin.named_parameters(), lr=LR)
    assert {row["write-back"] for row in ours.report().rows} == {"inplace"}
    addresses = [p.data_ptr() for p in model.parameters()]
    rows = torch.arange(32).view(4, 8) % 16
    for each, optimizer in ((model.eval(), ours), (twin.eval(), theirs)):
        for _ in range(3):
            optimizer.zero_grad()
            each(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
    assert [p.data_ptr() for p in model.parameters()] == addresses
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-3, atol=LR / 10)
