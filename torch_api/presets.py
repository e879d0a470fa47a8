"""Ready-made selectors. One is a function of name and parameter; the others are plain dicts made from a module.

The keys of a dict are parameter names in the order of `module.named_parameters()`; a tied parameter has its first name. A dict
prints as it is and may be edited before use. Its values are guesses from the modules' classes, names and order of registration,
because a module does not say how its forward pass runs. Print them once.
"""

from __future__ import annotations

import fnmatch
import inspect
import numbers
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from bridge._compat.torch import CONVOLUTIONS, NORMS

from ._rules.decay_masks import mark_decay_function, mark_decay_mask

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, NORMS)
_NORM_CLASS = re.compile(r"norm(act)?(\dd)?(fp\d+|gated)?$", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"(embed|embeddings?|positional_?encoding)$", re.IGNORECASE)
_EMBEDDING_WORDS = {"emb", "embed", "embeds", "embedding", "embeddings", "token", "tokens", "wte", "wpe"}
_POSITION_WORDS = {"pos", "position", "positional"}
_ATTENTION = re.compile(r"(attn|attention)\d*$", re.IGNORECASE)
_BIAS_WORDS = {"bias", "biases"}
_HEAD_WORDS = {"head", "heads", "classifier", "fc", "output", "outputs", "logits", "score", "unembed"}


class _Registration(NamedTuple):
    """Where a parameter is registered: the path of the module, the parameter's local name in it, and the module."""

    path: str
    local_name: str
    module: nn.Module


class _NamedParam(NamedTuple):
    """A parameter with all its registrations, the first one first. A tied parameter has more than one."""

    param: nn.Parameter
    registrations: list[_Registration]


class _Tree(NamedTuple):
    """The submodules that have parameters, by path, and the paths of each one's children."""

    modules: dict[str, nn.Module]
    children: dict[str, list[str]]


@mark_decay_function
def no_decay_on_bias_and_norm(name: str, param: torch.Tensor) -> bool:
    """For `decay_mask`: True for matrices and kernels, False for biases, norm scales and other vectors and scalars.

    The test is the number of dimensions (two or more decay), as in common GPT recipes. Names do not matter, so embeddings
    decay. `no_decay(module)` also looks at the modules.

    Args:
      name: the parameter's name, which is not read.
      param: the parameter.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Linear(2, 1)
      >>> opt = torch_api.MaskedAdamW(model.named_parameters(), weight_decay=0.1, decay_mask=torch_api.no_decay_on_bias_and_norm)
      >>> [row["decay"] for row in opt.report().rows]
      [0.1, 0.0]
    """
    return param.ndim >= 2


def no_decay(module: nn.Module) -> dict[str, bool]:
    """For `decay_mask`: parameter name -> True (decays) or False, decided from the modules. As `mask` it is an error.

    These parameters have False: every bias (a name with the word bias, of any shape); every parameter of a norm module (torch's
    norms and classes with such names, like LlamaRMSNorm); embeddings (nn.Embedding, nn.EmbeddingBag, classes with such names, and
    bare parameters with such names: pos_embed, cls_token, ...); every name that a `no_weight_decay()` method of the module or
    of a submodule lists; and all others with fewer than two dimensions. Matrices and kernels have True. A tied parameter has
    False if one of its registrations says so: an embedding tied to the head does not decay.

    The kinds are minGPT's [1], without its error for an unknown module; the method and its patterns are timm's [2]. Hugging
    Face's Trainer and nanoGPT decay embeddings: set those entries to True.
    [1] https://github.com/karpathy/minGPT/blob/37baab71b9abea1b76ab957409a1cc2fbfba8a26/mingpt/model.py#L215
    [2] https://github.com/huggingface/pytorch-image-models/blob/aa4b5850c1543fa488abf260f18390eda46cf85d/timm/optim/_param_groups.py#L17

    Args:
      module: any nn.Module.

    Raises:
      TypeError: module is no nn.Module.
      ValueError: the module has no parameters, or lazy ones that no forward pass has initialized.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
      >>> torch_api.no_decay(model)
      {'0.weight': True, '0.bias': False, '1.weight': False, '1.bias': False}
    """
    named = _named("no_decay", module)
    listed = _no_weight_decay_patterns(module)

    def decays(name: str, param: torch.Tensor, places: Iterable[_Registration]) -> bool:
        exempt = any(_is_bias(p) or _is_norm(p) or _is_embedding(p) for p in places)
        return param.ndim >= 2 and not exempt and not _matches(name, listed)

    return mark_decay_mask({name: decays(name, param, places) for name, (param, places) in named.items()})


def layer_decay(module: nn.Module, decay: float = 0.75) -> dict[str, float]:
    """For `lr_scale`: parameter name -> decay ** (layers above it). The head has 1.0 and embeddings have the smallest value.

    Layer 0 has the modules registered before the first block, and every embedding outside of blocks. Each block is a layer. The
    top layer has the modules after the last block (final norm, pooler, head), and those named as a head (see `muon_labels`).
    This follows BEiT [1], MAE [2] and timm's `param_groups_layer_decay`, but reads no per-model `group_matcher`. All parameters
    are listed, including frozen ones. The blocks are:

    1. The elements of the longest nn.ModuleList or nn.Sequential (the first of equal ones) in which a class with
       submodules repeats: transformer blocks, stages. One inside another does not count, nor one named as a head. If there
       is none, of one that holds a single such module; if there is none, of the longest with two elements: each layer
       of a plain nn.Sequential.
    2. But if the stack, or a module around it, is one of three or more siblings of one kind (ResNet's layer1 to layer4), each
       sibling is one block. Without a repeating stack, two such siblings are enough.
    3. With no stack at all, the top-level children in order of registration.

    A model with several towers, or with encoder and decoder, has one chain of blocks here: call this for each part and merge.
    [1] https://github.com/microsoft/unilm/blob/768a3c873f598bb9b4d4dfb9267b099e35f8fe56/beit/optim_factory.py#L33
    [2] https://github.com/facebookresearch/mae/blob/efb2a8062c206524e35e47d04501ed4f544c0ae8/util/lr_decay.py#L15

    Args:
      module: any nn.Module.
      decay: factor from a layer to the one below, 0 < decay <= 1.

    Raises:
      TypeError: module is no nn.Module, or decay is no number.
      ValueError: decay is out of range; or the module has no parameters, or lazy ones that no forward pass has initialized.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
      >>> torch_api.layer_decay(model, 0.5)
      {'0.weight': 0.25, '0.bias': 0.25, '1.weight': 0.5, '1.bias': 0.5, '2.weight': 1.0, '2.bias': 1.0}
    """
    if not isinstance(decay, numbers.Real) or isinstance(decay, bool):
        raise TypeError(f"layer_decay: decay is {decay!r}; expected a number with 0 < decay <= 1, such as 0.75.")
    if not 0 < decay <= 1:
        raise ValueError(f"layer_decay: decay is {decay!r}; expected 0 < decay <= 1, such as 0.75, or 1 for the same lr everywhere.")
    layers = _layers(_named("layer_decay", module), module)
    # Only layers with parameters count, so that the last one has exactly 1.0 in a model without head.
    rank = {layer: i for i, layer in enumerate(sorted(set(layers.values()), reverse=True))}
    return {name: float(decay) ** rank[layer] for name, layer in layers.items()}


def muon_labels(module: nn.Module) -> dict[str, str]:
    """For `labels` of `PartitionedOptimizer`: parameter name -> "muon" for matrices of hidden layers, otherwise "adamw".

    "muon" parameters have exactly two dimensions, neither of size 1, and belong to no bias, norm, embedding or head. The packed
    in_proj_weight of nn.MultiheadAttention and the weights of recurrent layers are among them. All others are "adamw", for example
    kernels of convolutions, stacked experts (three and more dimensions), and everything below a module named as an embedding
    (patch_embed). A parameter tied to an embedding or a head counts as one. A head is
    - a Linear (or a class named so), or a bare parameter, outside of the blocks, whose name has the last word head, classifier,
      fc, output, logits, score or unembed;
    - the very last Linear registered in the module, unless it is inside a block or belongs to an attention (out_proj).
    Blocks are the repeating elements with submodules, or the single one, of any stack not named as a head (rule 1 of
    `layer_decay`). A first Linear that takes raw inputs looks like a hidden layer. So does the last Linear of each parallel
    network except the last one. Set these to "adamw".

    The division is Muon's own [1], except for kernels, which Muon flattens and torch.optim.Muon rejects. Each label has its own
    lr: `PartitionedOptimizer(model.named_parameters(), {"muon": ..., "adamw": ...}, labels=muon_labels(model))`.
    [1] https://github.com/KellerJordan/Muon/blob/857d1adc159e098212f828d927460782d3da59e9/README.md#usage

    Args:
      module: any nn.Module.

    Raises:
      TypeError: module is no nn.Module.
      ValueError: the module has no parameters, or lazy ones that no forward pass has initialized.

    Example:
      >>> import torch, torch_api
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
      >>> torch_api.muon_labels(model)
      {'0.weight': 'muon', '0.bias': 'adamw', '1.weight': 'adamw', '1.bias': 'adamw'}
    """
    named = _named("muon_labels", module)
    tree = _tree(module, named)
    blocks = _blocks_of_all_stacks(tree)
    last = [path for path, part in module.named_modules(remove_duplicate=False) if _is_linear(part)][-1:]

    def hidden(p: _Registration) -> bool:
        if _is_bias(p) or _is_norm(p) or _is_embedding(p):
            return False
        if _inside(p.path, blocks):
            return True
        head = _is_head(p) or (p.path in last and not _in_attention(module, p.path))
        return not head and not any(_words(part)[-1] in _EMBEDDING_WORDS for part in p.path.split("."))

    return {
        name: "muon" if param.ndim == 2 and 1 not in param.shape and all(map(hidden, places)) else "adamw"
        for name, (param, places) in named.items()
    }


def _named(owner: str, module: nn.Module) -> dict[str, _NamedParam]:
    """Return first name -> parameter and registrations, in the order of `named_parameters()`. Errors name `owner` as the caller."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{owner}: got {type(module).__name__}; expected an nn.Module. Pass the model itself, not its parameters.")
    named: dict[str, _NamedParam] = {}
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"{owner}: parameter {name!r} is not initialized yet (a lazy module). Run one forward pass before.")
        named.setdefault(first.setdefault(id(param), name), _NamedParam(param, [])).registrations.append(_find_registration(module, name))
    if not named:
        raise ValueError(f"{owner}: {type(module).__name__} has no parameters; expected a module with at least one. Pass the whole model.")
    return named


def _find_registration(module: nn.Module, name: str) -> _Registration:
    """Return where a name is registered. An entry of a ParameterList has the name of the list."""
    path, _, own = re.sub(r"(\.\d+)+$", "", _unparametrized(name)).rpartition(".")
    return _Registration(path, own, module.get_submodule(path))


def _unparametrized(name: str) -> str:
    """Return the name without parametrizations: 'head.parametrizations.weight.original0' -> 'head.weight'."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", name)


def _words(name: str) -> list[str]:
    return name.lower().split("_")


def _is_bias(place: _Registration) -> bool:
    return not _BIAS_WORDS.isdisjoint(_words(place.local_name))


def _class_matches(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    """Return whether the name of the class matches. Linear and convolution classes never do: PatchEmbedding(nn.Conv2d) is a kernel."""
    return bool(pattern.search(type(module).__name__)) and not isinstance(module, (nn.Linear, CONVOLUTIONS))


def _is_norm(place: _Registration) -> bool:
    return isinstance(place.module, _NORMS) or _class_matches(place.module, _NORM_CLASS)


def _is_embedding_module(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or _class_matches(module, _EMBEDDING_CLASS)


def _is_embedding(place: _Registration) -> bool:
    words = _words(place.local_name)
    return _is_embedding_module(place.module) or words[-1] in _EMBEDDING_WORDS or not _POSITION_WORDS.isdisjoint(words)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__.endswith("Linear")


def _is_head(place: _Registration) -> bool:
    """Return whether the parameter is named as a head. The caller checks whether it is outside of the blocks."""
    called = place.path.rpartition(".")[2] if _is_linear(place.module) else place.local_name
    return _words(called)[-1] in _HEAD_WORDS


def _in_attention(module: nn.Module, path: str) -> bool:
    parent = path.rpartition(".")[0]
    return bool(_ATTENTION.search(parent) or _ATTENTION.search(type(module.get_submodule(parent)).__name__))


def _no_weight_decay_patterns(module: nn.Module) -> list[str]:
    """Return patterns of full names from all `no_weight_decay()` methods, which list names below their own module."""
    patterns = []
    for path, part in module.named_modules():
        method = getattr(part, "no_weight_decay", None)
        if inspect.ismethod(method):
            patterns += [f"{path}.{name}" if path else name for name in method()]
    return patterns


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _list_ancestors(path: str) -> list[str]:
    """Return the path and its ancestors, outermost first, without the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _inside(path: str, paths: Iterable[str]) -> bool:
    return not set(_list_ancestors(path)).isdisjoint(paths)


def _tree(module: nn.Module, named: Iterable[str]) -> _Tree:
    holders = {""} | {path for name in named for path in _list_ancestors(_unparametrized(name))}
    modules = {path: part for path, part in module.named_modules() if path in holders}
    children: dict[str, list[str]] = {path: [] for path in modules}
    for path in modules:
        if path:
            children[path.rpartition(".")[0]].append(path)
    return _Tree(modules, children)


def _kind(tree: _Tree, path: str) -> tuple[type, ...]:
    """Return the kind of a module: its class, and for a container also the kind of its first element."""
    part, elements = tree.modules[path], tree.children[path]
    return (type(part), *(_kind(tree, elements[0]) if elements and isinstance(part, nn.ModuleList | nn.Sequential) else ()))


def _repeated_elements(tree: _Tree, stack: str) -> list[str]:
    """Return the elements with submodules whose kind occurs more than once in the stack."""
    kinds = {element: _kind(tree, element) for element in tree.children[stack] if tree.children[element]}
    several = {kind for kind, count in Counter(kinds.values()).items() if count > 1}
    return [element for element, kind in kinds.items() if kind in several]


def _stacks(tree: _Tree) -> dict[str, int]:
    """Return path -> rank: 2 if a kind with submodules repeats, 1 if there is one such element alone, 0 for other lists of layers."""
    lists = [path for path, part in tree.modules.items() if isinstance(part, nn.ModuleList | nn.Sequential)]
    lists = [path for path in lists if _words(path.rpartition(".")[2])[-1] not in _HEAD_WORDS]
    repeating = {path for path in lists if _repeated_elements(tree, path)}
    wrappers = {""}.union(*map(_list_ancestors, repeating))
    ranks = {}
    for path in lists:
        elements = tree.children[path]
        if path in repeating:
            ranks[path] = 2
        elif len(elements) > 1:
            ranks[path] = 0
        elif path not in wrappers and any(tree.children[element] for element in elements):
            ranks[path] = 1
    return ranks


def _blocks_of_all_stacks(tree: _Tree) -> set[str]:
    """Return the blocks of every stack, whether they are in the chain of `layer_decay` or not."""
    return {block for stack, rank in _stacks(tree).items() if rank for block in _repeated_elements(tree, stack) or tree.children[stack]}


def _blocks(tree: _Tree) -> list[str]:
    """Return the chain of blocks by the three rules of `layer_decay`."""
    ranks = _stacks(tree)
    if not ranks:
        path = ""
        while len(tree.children[path]) == 1:  # wrappers such as DistributedDataParallel
            path = tree.children[path][0]
        return tree.children[path]
    best = max(ranks.values())
    stacks = [path for path, rank in ranks.items() if rank == best]
    outermost = [path for path in stacks if {path}.issuperset({"", *_list_ancestors(path)}.intersection(stacks))]
    stack = max(outermost, key=lambda path: len(tree.children[path]))
    for path in _list_ancestors(stack):
        siblings = tree.children[path.rpartition(".")[0]]
        alike = [sibling for sibling in siblings if _kind(tree, sibling) == _kind(tree, path)]
        if len(alike) >= (3 if best == 2 else 2):
            return alike
    return tree.children[stack]


def _layers(named: dict[str, _NamedParam], module: nn.Module) -> dict[str, int]:
    """Return name -> layer, from 0 below the first block to one more than the number of blocks."""
    tree = _tree(module, named)
    blocks = [path for path in _blocks(tree) if not _is_embedding_module(tree.modules[path])]
    numbers_of = {path: i + 1 for i, path in enumerate(blocks)}
    inside = _blocks_of_all_stacks(tree)  # includes blocks of other stacks, such as T5's decoder
    layers, reached = {}, 0
    for name, (_, places) in named.items():
        block = next((numbers_of[path] for path in _list_ancestors(name) if path in numbers_of), None)
        if block is not None:
            layers[name] = reached = block
            continue
        outside = not _inside(places[0].path, inside)
        if outside and _is_embedding(places[0]):
            layers[name] = 0
        elif reached == len(blocks) or (outside and _is_head(places[0])):
            layers[name] = len(blocks) + 1
        else:  # between two blocks: the layer of the block before
            layers[name] = reached
    return layers
