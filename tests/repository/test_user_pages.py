"""What README.md and pages of docs/ show as printed is printed, and each message of docs/troubleshooting.md is the true one."""

import contextlib
import io
import re
import sys
import types
import warnings
from pathlib import Path

import optax
import pytest
import torch

import bridge
import torch_api
from bridge._own_packages import refuse_foreign
from bridge._process import raise_if_forked
from bridge.doctor import diagnose
from bridge.environment import Environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
pytestmark = [pytest.mark.quick, pytest.mark.unoptimized]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/get_started.md", "docs/selectors.md", "docs/troubleshooting.md"])
def test_page_shows_what_its_blocks_print(name, standard_promotion, tmp_path, monkeypatch):
    """sybil runs these blocks too, but does not compare what they print with the text block behind them."""
    monkeypatch.chdir(tmp_path)
    names, printed, compared = {"__name__": "__main__"}, "", 0
    for language, block in re.findall(r"^```(python|text)\n(.*?)^```", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
                exec(compile(block, name, "exec"), names)
            printed = output.getvalue()
        elif printed and not re.match(r"\w+(Error|Warning): |error |warning ", block):
            assert block == printed
            printed, compared = "", compared + 1
    assert compared


def test_readme_has_the_tested_sets_of_the_page_about_versions():
    rows = re.findall(r"^\| (3\.\d+ \| [\d.]+ \| [\d.]+) \|", (ROOT / "docs" / "versions.md").read_text(), flags=re.MULTILINE)
    shown = re.findall(r"^\| (3\.\d+ \| [\d.]+ \| [\d.]+) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert shown == rows


def test_readme_has_the_times_of_the_page_about_performance():
    tables = [
        re.findall(r"^\|.*\(quartiles\) \|\n(?:\|.*\n)+", (ROOT / name).read_text(), re.M)
        for name in ("README.md", "docs/performance/index.md")
    ]
    assert len(tables[0]) == 1
    assert tables[0] == tables[1][:1]


# ------------------------------------------------------------------ docs/troubleshooting.md


def make_model():
    return torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 2)})


def backward(model, scale=1.0):
    (scale * model["head"](model["body"](torch.ones(4, 8))).square().sum()).backward()


def pattern_without_match():
    torch_api.MaskedAdamW(make_model().named_parameters(), mask="haed.*")


def no_gradient():
    torch_api.MaskedAdamW(make_model().named_parameters()).step()


def late_compilation():
    model = make_model()
    opt = torch_api.MaskedAdamW(model.named_parameters(), eps=1.25e-8)
    for _ in range(2):
        backward(model)
        opt.step()
        opt.zero_grad()
        model["body"].bias.requires_grad_(False)


def fork(monkeypatch):
    monkeypatch.setattr("bridge._process._forked", True)
    raise_if_forked()


def foreign_memory():
    layer = torch.nn.Linear(3, 3)
    layer.weight.data = torch.from_numpy(torch.ones(3, 3).numpy().copy())
    torch_api.MaskedAdamW(layer.named_parameters())


def two_learning_rates():
    torch_api.OptaxOptimizer(make_model().named_parameters(), optax.adam(1e-3), lr=1e-3)


def schedule_as_lr():
    torch_api.MaskedAdamW(make_model().named_parameters(), lr=optax.cosine_decay_schedule(1e-3, 100))


def decay_mask_as_mask():
    model = make_model()
    torch_api.OptaxOptimizer(model.named_parameters(), optax.adamw, lr=1e-3, mask=torch_api.no_decay(model))


def unscaled_twice():
    model = make_model()
    opt, scaler = torch_api.MaskedAdamW(model.named_parameters()), torch.amp.GradScaler("cpu")
    backward(model, scaler.scale(torch.tensor(1.0)))
    scaler.unscale_(opt)
    scaler.unscale_(opt)


def checkpoint_of_sgd():
    model = make_model()
    torch_api.MaskedAdamW(model.named_parameters()).load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


def foreign_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bridge", types.SimpleNamespace(__file__="/home/you/project/bridge.py"))
    try:
        refuse_foreign("bridge")
    except ImportError as error:
        own = Path(bridge.__file__).parent
        raise ImportError(str(error).replace(str(own), "/home/you/.venv/lib/python3.11/site-packages/bridge")) from None


MESSAGES = {
    "The pattern matches none of the parameters": pattern_without_match,
    "The step updated nothing: no parameter has a gradient": no_gradient,
    "A later step compiled": late_compilation,
    "This process was forked after jax had started": fork,
    "Each step copies a parameter, or a NumPy view is stale": foreign_memory,
    "Learning rate has no effect, or training is far too slow": two_learning_rates,
    "lr is a schedule; expected a number": schedule_as_lr,
    "mask is a result of no_decay": decay_mask_as_mask,
    "unscale_() has already been called on this optimizer": unscaled_twice,
    "The loaded state dict was saved by another optimizer": checkpoint_of_sgd,
    "import bridge finds another file": foreign_package,
}
ON_GPU = Environment({}, {}, torch_cuda="12.8", torch_gpus=1)
WITH_PLUGIN = Environment({}, {}, torch_cuda="12.8", torch_gpus=1, plugins=("jax-cuda13-plugin",))
FINDINGS = {
    "jax has no plugin for CUDA, or one for another CUDA": [ON_GPU, WITH_PLUGIN],
    "Out of memory on the GPU, though the model fitted before": [WITH_PLUGIN],
    "A step is slow on a CPU": [Environment({}, {}, torch_threads=16, cores=2)],
}


def texts():
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {section.partition("\n")[0]: re.findall(r"^```text\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE) for section in sections}


def test_each_message_of_the_page_is_provoked():
    quoted = {title for title, blocks in texts().items() if blocks}
    assert quoted == {*MESSAGES, *FINDINGS, "A frozen part of the model still changes"}
    assert len(texts()) == 15


@pytest.mark.parametrize("title", MESSAGES)
def test_message_is_the_true_one(title, monkeypatch, standard_promotion):
    provoke = MESSAGES[title]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((Exception, Warning)) as caught:
            provoke(*[monkeypatch] * provoke.__code__.co_argcount)
    assert " ".join(texts()[title][0].split()) == f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("title", FINDINGS)
def test_finding_is_the_true_one(title):
    shown = [" ".join(text.split()) for text in texts()[title]]
    for text, facts in zip(shown, FINDINGS[title], strict=True):
        assert text in [" ".join(f"{row['level']} {row['check']} {row['found']} -> {row['fix']}".split()) for row in diagnose(facts).rows]
