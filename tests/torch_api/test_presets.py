"""Presets of selectors: their answers for common kinds of models, and their use in optimizers."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from oracles import clones, movement_error, run_pair
from torch import nn

from bridge import resolve_labels, resolve_mask
from torch_api import MaskedAdamW
from torch_api.presets import layer_decay, muon_labels, no_decay, no_decay_on_bias_and_norm

pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]

# ------------------------------------------------------------------ models, never run forward


class LlamaRMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))


class MatrixNorm(nn.Module):
    """A norm whose parameter is a matrix."""

    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d, d))


class Attention(nn.Module):
    def __init__(self, d, out_name="out_proj"):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.add_module(out_name, nn.Linear(d, d))


class Block(nn.Module):
    """A block whose mlp is the longest stack in this file and has names like those of heads."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attn = Attention(d)
        self.mlp = nn.Sequential(*[nn.Linear(d, d) for _ in range(9)])
        self.fc = nn.Linear(d, d)
        self.output = nn.Linear(d, d)


class GPT(nn.Module):
    def __init__(self, depth=3, d=4, vocab=7, tied=True):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, d),
                "wpe": nn.Embedding(5, d),
                "h": nn.ModuleList([Block(d) for _ in range(depth)]),
                "ln_f": LlamaRMSNorm(d),
            }
        )
        self.lm_head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight


class PatchEmbed(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.proj = nn.Conv2d(3, d, 2)


class ViT(nn.Module):
    """A vision transformer with the names of timm, MAE and BEiT."""

    def __init__(self, depth=4, d=4, stem=PatchEmbed):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, d))
        self.patch_embed = stem(d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 3)


class Bottleneck(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv1 = nn.Conv2d(d, d, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(d)
        self.downsample = nn.Sequential(nn.Conv2d(d, d, 1), nn.BatchNorm2d(d))


class ResNet(nn.Module):
    def __init__(self, depths=(3, 4, 6, 3), d=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, d, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(d)
        for i, depth in enumerate(depths):
            self.add_module(f"layer{i + 1}", nn.Sequential(*[Bottleneck(d) for _ in range(depth)]))
        self.fc = nn.Linear(d, 3)


class Stage(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.downsample = nn.Linear(d, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(depth)])


class Swin(nn.Module):
    def __init__(self, depths=(2, 2, 6, 2), d=4):
        super().__init__()
        self.patch_embed = PatchEmbed(d)
        self.layers = nn.ModuleList([Stage(d, depth) for depth in depths])
        self.head = nn.Linear(d, 3)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))


class Tagger(nn.Module):
    """A model without a stack of blocks; its embedding is registered last."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5)
        self.fc1 = nn.Linear(5, 5)
        self.out = nn.Linear(5, 2)
        self.embed = nn.Embedding(9, 4)


class Wrapper(nn.Module):
    """A wrapper like DistributedDataParallel and torch.compile."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def model_with(**parts):
    model = nn.Module()
    for name, part in parts.items():
        model.register_parameter(name, part) if isinstance(part, nn.Parameter) else model.add_module(name, part)
    return model


def matrix(*shape):
    return nn.Parameter(torch.ones(*(shape or (3, 4))))


MODELS = {
    "gpt": GPT,
    "gpt untied": lambda: GPT(tied=False),
    "gpt of one block": lambda: GPT(depth=1),
    "vit": ViT,
    "resnet": ResNet,
    "swin": Swin,
    "mlp": MLP,
    "sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "tagger": Tagger,
    "wrapped": lambda: Wrapper(GPT()),
    "root": lambda: nn.Linear(3, 4),
    "prefixes": lambda: model_with(w=matrix(), w2=matrix(), b=nn.Linear(2, 2), bb=nn.LayerNorm(2)),
}
PRESETS = {"no_decay": no_decay, "layer_decay": layer_decay, "muon_labels": muon_labels}

every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
every_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


def of_value(answer, value):
    return {name for name, given in answer.items() if given == value}


# ------------------------------------------------------------------ all of them: plain dicts


@every_preset
@every_model
def test_answer_is_a_plain_dict_in_parameter_order(preset, build):
    model = build()
    answer = preset(model)
    assert type(answer) is dict
    assert list(answer) == [name for name, _ in model.named_parameters()]
    assert json.loads(json.dumps(answer)) == answer  # every value is plain and can be serialized
    assert {type(value) for value in answer.values()} == {{no_decay: bool, layer_decay: float, muon_labels: str}[preset]}


@every_preset
def test_model_on_the_meta_device_gets_the_same_answer(preset):
    with torch.device("meta"):
        meta = GPT()
    assert preset(meta) == preset(GPT())


@every_preset
def test_module_is_unchanged_and_frozen_parameters_are_listed(preset):
    model = ViT().requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert preset(model) == preset(ViT())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())


@every_preset
@pytest.mark.parametrize(
    ("given", "title"),
    [
        (lambda: GPT().named_parameters(), "generator"),
        (lambda: list(GPT().parameters()), "list"),
        (lambda: GPT, "type"),
        (lambda: torch.ones(2), "Tensor"),
        (lambda: None, "NoneType"),
    ],
)
def test_error_names_an_argument_that_is_not_a_module(preset, given, title):
    expected = rf"^{preset.__name__}: got {title}; expected an nn\.Module\. Pass the model itself, not its parameters\.$"
    with pytest.raises(TypeError, match=expected):
        preset(given())


@every_preset
def test_module_without_parameters_raises(preset):
    expected = rf"^{preset.__name__}: ReLU has no parameters; expected a module with at least one\. Pass the whole model\.$"
    with pytest.raises(ValueError, match=expected):
        preset(nn.ReLU())


@every_preset
def test_lazy_module_raises_until_it_has_run(preset):
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    expected = rf"^{preset.__name__}: parameter '1\.weight' is not initialized yet \(a lazy module\)\. Run one forward pass before\.$"
    with pytest.raises(ValueError, match=expected):
        preset(model)
    model(torch.ones(1, 3))
    assert set(preset(model)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


# ------------------------------------------------------------------ no_decay


def test_no_decay_of_a_gpt():
    answer = no_decay(GPT(depth=1, tied=False))
    linears = ["attn.qkv", "attn.out_proj", *[f"mlp.{i}" for i in range(9)], "fc", "output"]
    assert of_value(answer, True) == {f"transformer.h.0.{name}.weight" for name in linears} | {"lm_head.weight"}


def test_no_decay_of_a_vit_keeps_the_patch_kernel():
    answer = no_decay(ViT(depth=1))
    assert {"cls_token", "pos_embed", "norm.weight", "patch_embed.proj.bias"} <= of_value(answer, False)
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= of_value(answer, True)


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_tied_embedding_does_not_decay_in_any_registration_order(first):
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    model = model_with(a=embedding, b=head) if first == "embedding" else model_with(a=head, b=embedding)
    assert no_decay(model) == {"a.weight": False}
    assert muon_labels(model) == {"a.weight": "adamw"}


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm((3, 4)),
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm((3, 4)),
        LlamaRMSNorm(4),
        MatrixNorm(4),
        type("T5LayerNorm", (MatrixNorm,), {})(4),
        type("LayerNorm2d", (MatrixNorm,), {})(4),
        type("BatchNormAct2d", (MatrixNorm,), {})(4),
        type("LayerNormFp32", (MatrixNorm,), {})(4),
        type("RMSNormGated", (MatrixNorm,), {})(4),
        type("Scale", (nn.LayerNorm,), {})((3, 4)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_parameters_of_norms_do_not_decay_and_are_not_for_muon(norm):
    model = model_with(inner=norm, head=nn.Linear(4, 2))
    inner = [name for name, _ in model.named_parameters() if name.startswith("inner.")]
    assert inner
    assert [no_decay(model)[name] for name in inner] == [False] * len(inner)
    assert [muon_labels(model)[name] for name in inner] == ["adamw"] * len(inner)


@pytest.mark.parametrize("title", ["NormLinear", "Normalizer", "LayerNormMLP", "Enormous"])
def test_class_that_only_mentions_norms_decays(title):
    assert no_decay(type(title, (MatrixNorm,), {})(4)) == {"gain": True}


def test_norm_with_submodules_covers_its_own_parameters_only():
    """As in the PreNorm of many transformers: one module holds a norm and a function."""
    pre_norm = type("PreNorm", (nn.Module,), {})()
    pre_norm.scale, pre_norm.fn = matrix(), nn.Linear(3, 3)
    assert no_decay(pre_norm) == {"scale": False, "fn.weight": True, "fn.bias": False}


EMBEDDING_NAMES = ["pos_embed", "positional_embedding", "rel_pos_h", "cls_token", "register_tokens", "tok_emb", "wpe", "class_embedding"]


@pytest.mark.parametrize("name", EMBEDDING_NAMES)
def test_parameter_named_like_an_embedding_is_one(name):
    model = model_with(**{name: matrix(), "body": nn.Linear(3, 3), "tail": nn.Linear(3, 3)})
    assert no_decay(model)[name] is False
    assert muon_labels(model)[name] == "adamw"
    assert layer_decay(model, 0.5)[name] < layer_decay(model, 0.5)["body.weight"]


@pytest.mark.parametrize("name", ["w", "compose", "embed_proj", "token_mixing", "tokenizer", "biased", "prompt"])
def test_matrix_with_another_name_decays_and_is_for_muon(name):
    model = model_with(**{name: matrix(), "head": nn.Linear(3, 3)})
    assert no_decay(model)[name] is True
    assert muon_labels(model)[name] == "muon"


@pytest.mark.parametrize(
    "embedding",
    [
        nn.Embedding(5, 4),
        nn.EmbeddingBag(5, 4),
        type("VocabParallelEmbedding", (MatrixNorm,), {})(4),
        type("Mine", (nn.Embedding,), {})(5, 4),
    ],
    ids=lambda embedding: type(embedding).__name__,
)
def test_embedding_classes_do_not_decay(embedding):
    model = model_with(a=embedding, b=nn.Linear(4, 4), c=nn.Linear(4, 2))
    (name,) = [name for name, _ in model.named_parameters() if name.startswith("a.")]
    assert no_decay(model)[name] is False
    assert muon_labels(model)[name] == "adamw"
    assert layer_decay(model, 0.5)[name] == 0.25


def test_convolution_named_like_an_embedding_is_a_convolution():
    model = model_with(stem=type("PatchEmbedding", (nn.Conv2d,), {})(3, 4, 2))
    assert no_decay(model) == {"stem.weight": True, "stem.bias": False}


def test_biases_of_every_shape_do_not_decay():
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    assert attention.bias_k.ndim == 3
    assert of_value(no_decay(attention), True) == {"in_proj_weight", "out_proj.weight"}
    assert of_value(no_decay(nn.LSTM(3, 4)), True) == {"weight_ih_l0", "weight_hh_l0"}
    assert no_decay(model_with(relative_position_bias_table=matrix(), attention_biases=matrix(), q_bias=matrix(4))) == {
        "relative_position_bias_table": False,
        "attention_biases": False,
        "q_bias": False,
    }


def test_bias_table_is_not_for_muon():
    assert of_value(muon_labels(model_with(attention_biases=matrix(), hidden=matrix(), head=nn.Linear(2, 2))), "muon") == {"hidden"}


def test_vectors_do_not_decay_but_kernels_and_stacked_experts_do():
    model = model_with(gamma=matrix(4), scale=nn.Parameter(torch.tensor(1.0)), experts=matrix(2, 3, 4), conv=nn.Conv1d(2, 2, 3))
    assert no_decay(model) == {"gamma": False, "scale": False, "experts": True, "conv.weight": True, "conv.bias": False}


class Timm(ViT):
    def no_weight_decay(self):
        return {"dist_token", "head.weight", "blocks.0.attn.*"}


def test_parameters_listed_by_the_module_do_not_decay():
    listed = {"head.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.out_proj.weight"}
    assert of_value(no_decay(ViT()), True) - of_value(no_decay(Timm()), True) == listed
    nested = Wrapper(Timm())
    assert of_value(no_decay(Wrapper(ViT())), True) - of_value(no_decay(nested), True) == {f"module.{name}" for name in listed}


def test_attribute_that_is_not_a_method_is_ignored():
    model = nn.Linear(2, 2)
    model.no_weight_decay = True
    assert no_decay(model) == {"weight": True, "bias": False}


def test_parametrized_modules_are_read_under_their_plain_names():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    for part in model:
        nn.utils.parametrizations.weight_norm(part)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    scales = layer_decay(model, 0.5)
    assert {name.split(".")[0]: scale for name, scale in scales.items()} == {
        name.split(".")[0]: scale for name, scale in layer_decay(plain, 0.5).items()
    }
    # weight_norm: original0 is the (rows, 1) length, original1 the direction.
    assert of_value(muon_labels(model), "muon") == {"0.parametrizations.weight.original1", "1.parametrizations.weight.original1"}


def test_parts_of_a_parametrized_module_are_not_layers():
    linear = nn.Linear(3, 4)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(linear, name, nn.Identity())
    assert set(layer_decay(linear).values()) == {1.0}


def test_parametrized_bias_and_listed_position_embeddings_do_not_decay():
    linear = nn.Linear(3, 4)
    nn.utils.parametrize.register_parametrization(linear, "bias", nn.Identity())
    assert no_decay(linear) == {"weight": True, "parametrizations.bias.original": False}
    assert no_decay(model_with(pos_embeds=nn.ParameterList([matrix(), matrix()]), mats=nn.ParameterList([matrix()]))) == {
        "pos_embeds.0": False,
        "pos_embeds.1": False,
        "mats.0": True,
    }


def test_no_decay_differs_from_no_decay_on_bias_and_norm_as_documented():
    model = GPT(tied=False)
    by_shape = {name: no_decay_on_bias_and_norm(name, p) for name, p in model.named_parameters()}
    assert {name for name, decays in no_decay(model).items() if decays != by_shape[name]} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }


def decayed_run(decay_mask, twin_decays, steps=25):
    """Return the error of a small GPT's movement against torch's AdamW with two groups; `twin_decays` names the decayed ones."""
    model, twin = GPT(depth=1), GPT(depth=1)
    twin.load_state_dict(model.state_dict())
    start = clones(model.parameters())
    ours = MaskedAdamW(model.named_parameters(), lr=0.01, weight_decay=0.5, decay_mask=decay_mask)
    named = list(twin.named_parameters())
    theirs = torch.optim.AdamW(
        [{"params": [p for name, p in named if (name in twin_decays) == decays], "weight_decay": 0.5 * decays} for decays in (True, False)],
        lr=0.01,
    )
    run_pair(ours, list(model.parameters()), theirs, list(twin.parameters()), steps)
    return max(map(movement_error, model.parameters(), twin.parameters(), start))


def test_answer_is_a_decay_mask():
    decays = {
        name
        for name, p in GPT(depth=1).named_parameters()
        if p.ndim == 2 and not name.startswith(("transformer.wte", "transformer.wpe"))  # wte is the tied head
    }
    answer = no_decay(GPT(depth=1))
    assert decayed_run(answer, decays) < 1e-5
    assert decayed_run(answer | {"transformer.wpe.weight": True}, decays | {"transformer.wpe.weight"}) < 1e-5  # edited


@pytest.mark.parametrize("wrong", [lambda a: {n: not v for n, v in a.items()}, lambda a: a | {"transformer.wpe.weight": True}])
def test_comparison_detects_a_wrong_decay_mask(wrong):
    answer = no_decay(GPT(depth=1))
    assert decayed_run(wrong(answer), of_value(answer, True)) > 1e-2


@every_model
def test_answers_used_as_selectors_give_the_same_values(build):
    """Full names are prefix keys; names that start like another, or have no dot, must match only themselves."""
    model = build()
    assert resolve_mask(no_decay(model), model) == no_decay(model)
    assert resolve_labels(muon_labels(model), model) == muon_labels(model)
    optimizer = MaskedAdamW(model.named_parameters(), weight_decay=0.5, decay_mask=no_decay(model))
    assert {row["parameter"]: row["decay"] == 0.5 for row in optimizer.report().rows} == no_decay(model)
    each_its_own = {name: str(i) for i, name in enumerate(no_decay(model))}
    assert resolve_labels(each_its_own, model) == each_its_own


# ------------------------------------------------------------------ layer_decay


def beit_scale(name, depth, decay):
    """Return BEiT's scale by its names: 0 for embeddings, 1 to depth for blocks, depth + 1 for others, as exact fractions."""
    if name in ("cls_token", "mask_token", "pos_embed") or name.startswith("patch_embed."):
        layer = 0
    elif name.startswith("blocks."):
        layer = int(name.split(".")[1]) + 1
    else:
        layer = depth + 1
    return float(Fraction(decay) ** (depth + 1 - layer))


def differences(answer, expected):
    return {name for name in answer if not math.isclose(answer[name], expected(name), rel_tol=1e-12)}


@pytest.mark.parametrize("depth", [1, 2, 12])
@pytest.mark.parametrize("decay", [0.75, 0.5, 1])
def test_layer_decay_of_a_vit_equals_beit(depth, decay):
    assert differences(layer_decay(ViT(depth), decay), lambda name: beit_scale(name, depth, decay)) == set()


def test_comparison_detects_a_wrong_table():
    answer = layer_decay(ViT(3), 0.75)
    assert differences(answer, lambda name: beit_scale(name, 4, 0.75)) == {n for n in answer if not n.startswith(("norm.", "head."))}
    assert differences({name: 1 / scale for name, scale in answer.items()}, lambda name: beit_scale(name, 3, 0.75))
    assert differences(layer_decay(ViT(3), 0.76), lambda name: beit_scale(name, 3, 0.75))


def test_default_decay_is_three_quarters():
    assert layer_decay(ViT()) == layer_decay(ViT(), 0.75) != layer_decay(ViT(), 0.7)


def by_part(answer, *parts):
    """Return the single scale of each part; a part with several scales is an error."""
    scales = {part: {scale for name, scale in answer.items() if f"{name}.".startswith(f"{part}.")} for part in parts}
    assert sorted(name for name in answer if not any(f"{name}.".startswith(f"{part}.") for part in parts)) == []
    assert all(len(values) == 1 for values in scales.values()), scales
    return [scales[part].pop() for part in parts]


GPT_PARTS = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.h.2", "transformer.ln_f"]


def test_layer_decay_of_a_gpt():
    assert by_part(layer_decay(GPT(tied=False), 0.5), *GPT_PARTS, "lm_head") == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 1]
    assert by_part(layer_decay(GPT(), 0.5), *GPT_PARTS) == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]  # tied: the embedding's


def test_layer_decay_works_in_wrappers_and_sequences():
    wrapped = Wrapper(Wrapper(GPT(tied=False)))
    parts = [f"module.module.{part}" for part in [*GPT_PARTS, "lm_head"]]
    assert by_part(layer_decay(wrapped, 0.5), *parts) == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 1]
    single = model_with(backbone=nn.Sequential(ViT(2)), fc=nn.Linear(3, 2))
    parts = [f"backbone.0.{part}" for part in ("cls_token", "pos_embed", "patch_embed", "blocks.0", "blocks.1", "norm", "head")]
    assert by_part(layer_decay(single, 0.5), *parts, "fc") == [1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 2, 1, 1, 1]
    with_head = nn.Sequential(ViT(2), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    parts = ["0.cls_token", "0.pos_embed", "0.patch_embed", "0.blocks.0", "0.blocks.1", "0.norm", "0.head", "1"]
    assert by_part(layer_decay(with_head, 0.5), *parts) == [1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 2, 1, 1, 1]
    lists = nn.Sequential(nn.Sequential(Block(4), Block(4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert by_part(layer_decay(lists, 0.5), "0.0", "0.1", "1") == [1 / 4, 1 / 2, 1]


@pytest.mark.parametrize("depths", [(3, 4, 6, 3), (2, 2, 2, 2), (1, 1, 1, 1), (3, 3, 9)])
def test_layer_decay_of_a_resnet_is_by_stage(depths):
    stages = [f"layer{i + 1}" for i in range(len(depths))]
    scales = [0.5 ** (len(depths) + 1 - i) for i in range(len(depths) + 2)]
    assert by_part(layer_decay(ResNet(depths), 0.5), "conv1", "bn1", *stages, "fc") == [scales[0], *scales]


def test_layer_decay_of_staged_blocks_is_by_stage():
    assert by_part(layer_decay(Swin((2, 3)), 0.5), "patch_embed", "layers.0", "layers.1", "head") == [1 / 8, 1 / 4, 1 / 2, 1]
    parts = ["patch_embed", *[f"layers.{i}" for i in range(4)], "head"]
    assert by_part(layer_decay(Swin(), 0.5), *parts) == [0.5 ** (5 - i) for i in range(6)]


def test_layer_decay_of_a_plain_sequential_is_by_child_with_parameters():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    assert by_part(layer_decay(model, 0.5), "1", "3", "4", "6") == [1 / 8, 1 / 4, 1 / 2, 1]
    assert by_part(layer_decay(MLP(), 0.5), "net.0", "net.2", "net.4") == [1 / 4, 1 / 2, 1]
    model = model_with(embed=nn.Embedding(5, 4), net=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert by_part(layer_decay(model, 0.5), "embed", "net.0", "net.2") == [1 / 4, 1 / 2, 1]
    model = nn.Sequential(nn.Embedding(5, 4), Block(4), Block(4), nn.Linear(4, 2))
    assert by_part(layer_decay(model, 0.5), "0", "1", "2", "3") == [1 / 8, 1 / 4, 1 / 2, 1]


def test_layer_decay_without_a_stack_goes_by_top_level_children():
    assert by_part(layer_decay(Tagger(), 0.5), "embed", "rnn", "fc1", "out") == [1 / 8, 1 / 4, 1 / 2, 1]
    assert by_part(layer_decay(Wrapper(Tagger()), 0.5), *["module." + n for n in ("embed", "rnn", "fc1", "out")]) == [
        1 / 8,
        1 / 4,
        1 / 2,
        1,
    ]
    assert layer_decay(nn.Linear(3, 4), 0.5) == {"weight": 1.0, "bias": 1.0}
    assert by_part(layer_decay(model_with(temperature=matrix(1), a=nn.Linear(2, 2), b=nn.Linear(2, 2)), 0.5), "temperature", "a", "b") == [
        1 / 4,
        1 / 2,
        1,
    ]


def test_last_block_of_a_bare_encoder_has_scale_one():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 3, enable_nested_tensor=False)
    assert by_part(layer_decay(encoder, 0.5), "layers.0", "layers.1", "layers.2") == [1 / 4, 1 / 2, 1]


def test_registration_order_of_head_and_embedding_does_not_matter():
    model = model_with(
        lm_head=nn.Linear(4, 7),
        blocks=nn.ModuleList([Block(4), Block(4)]),
        norm=nn.LayerNorm(4),
        embed=nn.Embedding(7, 4),
        mask_token=matrix(),
    )
    assert by_part(layer_decay(model, 0.5), "embed", "mask_token", "blocks.0", "blocks.1", "norm", "lm_head") == [
        *[1 / 8, 1 / 8, 1 / 4, 1 / 2, 1, 1],
    ]


def test_head_like_names_inside_blocks_are_ignored():
    stem = nn.Sequential(*[model_with(fc=nn.Linear(4, 4), output=matrix(), pos_embed=matrix()) for _ in range(2)])
    model = model_with(fc=matrix(), stem=stem, blocks=nn.ModuleList([Block(4) for _ in range(3)]))
    parts = ["stem", "blocks.0", "blocks.1", "blocks.2", "fc"]
    assert by_part(layer_decay(model, 0.5), *parts) == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]


def test_longest_stack_is_the_body_and_a_head_never_is():
    stem, head = nn.Sequential(Bottleneck(3), Bottleneck(3)), nn.Sequential(*[Block(4) for _ in range(5)])
    model = model_with(stem=stem, layers=nn.ModuleList([Attention(4) for _ in range(3)]), head=head)
    parts = ["stem", "layers.0", "layers.1", "layers.2", "head"]
    assert by_part(layer_decay(model, 0.5), *parts) == [0.5 ** (4 - i) for i in range(5)]


def test_equal_children_without_a_list_are_the_blocks():
    model = model_with(conv=nn.Conv2d(3, 4, 1), block1=Bottleneck(4), block2=Bottleneck(4), fc=nn.Linear(4, 2))
    assert by_part(layer_decay(model, 0.5), "conv", "block1", "block2", "fc") == [1 / 8, 1 / 4, 1 / 2, 1]


def test_module_between_two_stages_belongs_to_the_earlier_one():
    parts = {f"layer{i}" if even else f"down{i}": nn.Sequential(Bottleneck(4), Bottleneck(4)) if even else nn.Linear(4, 4)
             for i in range(3) for even in (True, False)}  # fmt: skip
    assert by_part(layer_decay(model_with(**parts), 0.5), *parts) == [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1]


def test_encoder_is_the_stack_of_an_encoder_decoder():
    def tower():
        return model_with(blocks=nn.ModuleList([model_with(relative_bias=nn.Embedding(3, 2), body=Block(4)) for _ in range(2)]))

    model = model_with(embed=nn.Embedding(7, 4), encoder=tower(), decoder=tower())
    parts = ["embed", "encoder.blocks.0", "encoder.blocks.1", "decoder"]
    assert by_part(layer_decay(model, 0.5), *parts) == [1 / 8, 1 / 4, 1 / 2, 1]
    named = {name for name, _ in model.named_parameters() if "attn" in name and name.endswith("weight")}
    assert named < of_value(muon_labels(model), "muon")


def test_block_shared_by_all_layers_is_one_layer():
    """ALBERT shares its block like this."""
    block = Block(4)
    model = model_with(embed=nn.Embedding(5, 4), blocks=nn.ModuleList([block] * 6), head=nn.Linear(4, 2))
    assert by_part(layer_decay(model, 0.5), "embed", "blocks.0", "head") == [1 / 4, 1 / 2, 1]


@pytest.mark.parametrize("decay", [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf])
def test_decay_out_of_range_raises(decay):
    with pytest.raises(
        ValueError, match=r"^layer_decay: decay is .+; expected 0 < decay <= 1, such as 0\.75, or 1 for the same lr everywhere\.$"
    ):
        layer_decay(ViT(), decay)


@pytest.mark.parametrize("decay", ["0.75", None, True, [0.5], 0.5j])
def test_decay_that_is_not_a_number_raises(decay):
    with pytest.raises(TypeError, match=r"^layer_decay: decay is .+; expected a number with 0 < decay <= 1, such as 0\.75\.$"):
        layer_decay(ViT(), decay)


def test_decay_of_other_number_types_gives_plain_floats():
    for decay in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        answer = layer_decay(ViT(), decay)
        assert answer == layer_decay(ViT(), 0.5)
        assert {type(scale) for scale in answer.values()} == {float}


# ------------------------------------------------------------------ muon_labels


def block_matrices(prefix):
    return {f"{prefix}.{name}.weight" for name in ["attn.qkv", "attn.out_proj", *[f"mlp.{i}" for i in range(9)], "fc", "output"]}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_muon_gets_the_block_matrices_of_a_gpt(depth, tied):
    expected = set().union(*[block_matrices(f"transformer.h.{i}") for i in range(depth)])
    answer = muon_labels(GPT(depth, tied=tied))
    assert of_value(answer, "muon") == expected
    assert of_value(answer, "adamw") == set(answer) - expected
    assert of_value(muon_labels(Wrapper(GPT(depth, tied=tied))), "muon") == {f"module.{name}" for name in expected}


def test_muon_gets_the_block_matrices_of_a_vit():
    expected = block_matrices("blocks.0") | block_matrices("blocks.1")
    assert of_value(muon_labels(ViT(2)), "muon") == expected
    assert of_value(muon_labels(ViT(2, stem=lambda d: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, d)))), "muon") == expected
    assert of_value(muon_labels(nn.Sequential(nn.Embedding(5, 4), Block(4), Block(4), nn.Linear(4, 2))), "muon") == block_matrices(
        "1"
    ) | block_matrices("2")


def test_convolutions_are_for_adamw():
    assert set(muon_labels(ResNet()).values()) == {"adamw"}
    assert muon_labels(model_with(experts=matrix(2, 3, 4), conv=nn.Conv1d(2, 2, 3), a=nn.Linear(2, 2), b=nn.Linear(2, 2))) == {
        "experts": "adamw",
        "conv.weight": "adamw",
        "conv.bias": "adamw",
        "a.weight": "muon",
        "a.bias": "adamw",
        "b.weight": "adamw",
        "b.bias": "adamw",
    }


def test_muon_gets_all_but_the_last_matrix_of_an_mlp():
    assert of_value(muon_labels(MLP()), "muon") == {"net.0.weight", "net.2.weight"}
    assert of_value(muon_labels(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))), "muon") == {"0.weight", "1.weight"}
    assert muon_labels(nn.Linear(3, 4)) == {"weight": "adamw", "bias": "adamw"}


def test_muon_gets_the_matrices_of_recurrent_layers():
    assert of_value(muon_labels(Tagger()), "muon") == {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "fc1.weight"}


def test_attention_outside_blocks_is_for_muon():
    assert of_value(muon_labels(nn.MultiheadAttention(4, 2)), "muon") == {"in_proj_weight", "out_proj.weight"}
    model = model_with(embed=nn.Embedding(5, 4), self_attn=nn.MultiheadAttention(4, 2))
    assert of_value(muon_labels(model), "muon") == {"self_attn.in_proj_weight", "self_attn.out_proj.weight"}
    for name, attention in {"mixer": Attention(4, "o"), "attn1": model_with(q=nn.Linear(4, 4), o=nn.Linear(4, 4))}.items():
        assert muon_labels(model_with(embed=nn.Embedding(5, 4), **{name: attention}))[f"{name}.o.weight"] == "muon"


def test_blocks_of_a_bare_encoder_contain_no_head():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 2, enable_nested_tensor=False)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert of_value(muon_labels(encoder), "muon") == {f"layers.{i}.{name}" for i in range(2) for name in names}


@pytest.mark.parametrize("name", ["head", "lm_head", "classifier", "fc", "output", "value_head", "qa_outputs", "score"])
def test_linear_named_like_a_head_outside_blocks_is_a_head(name):
    model = model_with(**{name: nn.Linear(4, 2), "hidden": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    assert of_value(muon_labels(model), "muon") == {"hidden.weight"}
    bare = model_with(**{name: matrix(), "hidden": matrix(), "last": nn.Linear(4, 4)})
    assert of_value(muon_labels(bare), "muon") == {"hidden"}


def test_linear_class_of_another_library_is_a_linear():
    linear = type("ColumnParallelLinear", (MatrixNorm,), {})
    model = model_with(a=linear(4), lm_head=linear(4), b=linear(4), c=linear(4))
    assert of_value(muon_labels(model), "muon") == {"a.gain", "b.gain"}


def test_head_of_several_layers_has_one_output_layer():
    model = model_with(blocks=nn.ModuleList([Attention(4), Attention(4)]), head=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert of_value(muon_labels(model), "adamw") == {name for name in no_decay(model) if name.endswith("bias")} | {"head.1.weight"}


def test_last_linear_tied_to_the_first_is_the_only_head():
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    assert muon_labels(model_with(a=first, b=nn.Linear(4, 4, bias=False), c=last)) == {"a.weight": "adamw", "b.weight": "muon"}


def test_head_of_a_wrapped_model_is_not_a_block():
    assert of_value(muon_labels(nn.Sequential(MLP())), "muon") == {"0.net.0.weight", "0.net.2.weight"}
    single = model_with(backbone=nn.Sequential(ViT(2)), last=nn.Linear(3, 2))
    assert of_value(muon_labels(single), "muon") == block_matrices("backbone.0.blocks.0") | block_matrices("backbone.0.blocks.1")


def test_matrix_with_one_row_or_column_is_a_vector():
    model = model_with(gate=nn.Linear(4, 1), column=nn.Linear(1, 4), hidden=nn.Linear(2, 2), head=nn.Linear(4, 4))
    assert of_value(muon_labels(model), "muon") == {"hidden.weight"}


def test_labels_can_be_edited():
    labels = muon_labels(MLP())
    labels["net.0.weight"] = "adamw"
    assert of_value(resolve_labels(labels, MLP()), "muon") == {"net.2.weight"}
