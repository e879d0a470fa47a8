"""Unmodified models of transformers and diffusers as one program: output, loss and gradients match eager torch."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bridge
import torch_api

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
FEW_KEYS = TEXT | {"num_key_value_heads": 2}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37, "image_size": 32, "patch_size": 8}
PAIR = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 37))}
SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
EXPERTS = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
BLOCKS = {"sample_size": 16, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4, "layers_per_block": 1}


def text():
    """Return the tokens of two texts; the second is shorter, so the mask matters."""
    ids, mask = torch.randint(3, 90, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def of_classes():
    return text() | {"labels": torch.tensor([0, 1])}


def of_tokens():
    given = text()
    return given | {"labels": given["input_ids"]}


def images():
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def noisy():
    return {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}


def conditioned():
    return noisy() | {"encoder_hidden_states": torch.randn(2, 5, 12)}


def spectrum():
    return {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(3, 90, (2, 12))}


def wave():
    return {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])}


CASES = {
    "BertForSequenceClassification": (of_classes, TEXT),
    "DebertaV2ForMaskedLM": (of_tokens, TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "ModernBertForMaskedLM": (of_tokens, TEXT | {f"{kind}_token_id": i for i, kind in enumerate(["pad", "bos", "eos", "cls", "sep"])}),
    "GPT2LMHeadModel": (of_tokens, {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "LlamaForCausalLM": (of_tokens, FEW_KEYS),
    "MistralForCausalLM": (of_tokens, FEW_KEYS | {"sliding_window": 4}),
    "Gemma3ForCausalLM": (of_tokens, FEW_KEYS | {"head_dim": 8, "sliding_window": 4}),
    "Qwen3MoeForCausalLM": (of_tokens, FEW_KEYS | EXPERTS),
    "BloomForCausalLM": (of_tokens, {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MambaForCausalLM": (of_tokens, {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "T5ForConditionalGeneration": (
        of_tokens,
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": (of_tokens, PAIR | {"vocab_size": 99, "d_model": 32}),
    "WhisperForConditionalGeneration": (
        spectrum,
        PAIR
        | {"vocab_size": 99, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 20}
        | {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "WavLMForSequenceClassification": (wave, TEXT | SOUND | {"mask_time_prob": 0.0}),
    "ViTForImageClassification": (images, IMAGE),
    "SwinForImageClassification": (
        images,
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
    ),
    "ConvNextV2ForImageClassification": (images, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "UNet2DConditionModel": (
        conditioned,
        BLOCKS
        | {"in_channels": 3, "out_channels": 3, "cross_attention_dim": 12}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
    ),
    "AutoencoderKL": (
        lambda: {"sample": noisy()["sample"]},
        {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    ),
}


def made(name, given):
    torch.manual_seed(0)
    if hasattr(diffusers, name):
        return getattr(diffusers, name)(**given).eval()
    kind = getattr(transformers, name)
    config = kind.config_class(**given)
    config.use_cache = False  # the cache is not an array
    return kind(config).eval()


def loss_of(model, batch):
    out = model(**batch)
    return out.loss if "loss" in out else F.mse_loss(out.sample, batch["sample"])


def main_output(out):
    """Return the main output of eager torch's result, or of the plain dict that a pure function returns."""
    return out["logits"] if "logits" in out else out["sample"]


def slopes(name, given, batch):
    model = made(name, given)
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def moved(name, given, batch):
    """Return the change by one step of plain SGD with an lr of 1."""
    model = made(name, given)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = torch_api.JaxTrainStep(model, loss_of, torch_api.MaskedSGD(model.named_parameters(), lr=1.0))(batch)
    return loss.item(), {n: before[n] - p.detach() for n, p in model.named_parameters()}


def check(ours, theirs):
    """Compare relative to the largest gradient: those of a layer before a softmax may be rounding noise."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    scale = max(float(slope.abs().max()) for slope in theirs[1].values())
    for n, slope in theirs[1].items():
        np.testing.assert_allclose(ours[1][n] / scale, slope / scale, atol=1e-5, rtol=0, err_msg=n)


@pytest.mark.parametrize("name", CASES)
def test_train_step_matches_eager_torch(name):
    batch, given = CASES[name]
    batch = batch()
    check(moved(name, given, batch), slopes(name, given, batch))


def test_comparison_detects_a_step_on_other_labels():
    batch, given = CASES["LlamaForCausalLM"]
    batch = batch()
    with pytest.raises(AssertionError):
        check(moved("LlamaForCausalLM", given, batch | {"labels": batch["labels"].roll(1, 0)}), slopes("LlamaForCausalLM", given, batch))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "ViTForImageClassification", "UNet2DConditionModel"])
def test_module_function_matches_eager_torch(name):
    batch, given = CASES[name]
    model, batch = made(name, given), batch()
    batch.pop("labels", None)
    expected = main_output(model(**batch)).detach()
    pure = bridge.module_function(model)
    found = jax.jit(lambda params, batch: main_output(pure(params, **batch)))(bridge.module_tree(model), bridge.to_jax(batch, copy=None))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
