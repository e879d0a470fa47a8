"""`doctor()`: a report of problems that keep torch and jax from working together in this process, each with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import _logs
from ._compat.lookup import asks_for_safe_mode
from ._process import was_forked
from ._xla.multi_output_fusion import FUSION_FLAG, FUSION_VARIABLE
from .environment import Environment, read_environment

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
CUDA_EXTRAS = ("12", "13")  # major versions for which the distribution has an extra


class Finding(NamedTuple):
    """One line of the report.

    level: "ok", "note" (worth knowing), "warning" (slower, or likely to cause an error later) or "error" (something does not work).
    """

    check: str
    level: str
    found: str
    fix: str = ""


class Report:
    """A list of findings that prints as text. `rows` has the findings as dicts; `exit_code` is 1 if one is an error, else 0."""

    def __init__(self, findings: list[Finding]) -> None:
        self.rows = [finding._asdict() for finding in findings]

    @property
    def exit_code(self) -> int:
        return int(any(row["level"] == ERROR for row in self.rows))

    def __str__(self) -> str:
        width = max(len(row["check"]) for row in self.rows)
        lines = []
        for row in self.rows:
            lines.append(f"{row['level']:<8} {row['check']:<{width}}  {row['found']}")
            lines += [f"{'':<8} {'':<{width}}  -> {row['fix']}"] if row["fix"] else []
        counts = {level: sum(row["level"] == level for row in self.rows) for level in (ERROR, WARNING, NOTE)}
        verdict = "nothing stands in the way" if not self.exit_code else "something does not work"
        return "\n".join([*lines, "", f"{verdict}: " + ", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in counts.items())])

    __repr__ = __str__


def doctor(start: bool = False) -> Report:
    """Report problems between torch and jax in this process and on this machine, with the fix for each.

    The function only reads: it changes no flag and does not start jax, which might take a GPU. Some checks need a running jax: its devices,
    whether XLA has read the flag in `XLA_FLAGS`, and the fast calls for import and export. They are left open until jax has started.
    `python -m bridge` prints the same report, and exits with its exit code.

    Args:
      start: Start jax, as its first use would. jax then takes devices and their memory.

    Returns:
      A `Report`. It prints as text; `rows` has check, level, found and fix of each finding; `exit_code` is 1 if one is an error.

    Example:
      >>> import bridge
      >>> report = bridge.doctor()
      >>> sorted(report.rows[0])
      ['check', 'fix', 'found', 'level']
    """
    return diagnose(read_environment(was_forked(), start))


def diagnose(facts: Environment) -> Report:
    """Return the report on an `Environment`, of this process or of any other."""
    return Report([finding for check in _CHECKS for finding in check(facts)])


def _versions(facts: Environment) -> Iterator[Finding]:
    known = {"python": facts.python} | {name: version for name, version in facts.versions.items() if version}
    text = ", ".join(f"{name} {version}" for name, version in known.items())
    wrong = []
    for name, specifier in facts.requirements.items():
        version = facts.versions.get(name)
        if name == "torch2jax" and version is None:
            fix = f"pip install '{name}{specifier}'"
            yield Finding("versions", WARNING, "torch2jax is not installed: module_function and JaxTrainStep do not work", fix)
        elif version is None or not SpecifierSet(specifier).contains(version, prereleases=True):
            wrong.append(f"'{name}{specifier}'")
    if wrong:
        yield Finding("versions", ERROR, f"not in the supported range: {', '.join(wrong)} ({text})", f"pip install {' '.join(wrong)}")
    elif not facts.requirements:
        found = f"maskbridge runs from a folder and is not installed, so its supported versions are unknown ({text})"
        yield Finding("versions", NOTE, found, "pip install -e THAT_FOLDER")
    else:
        yield Finding("versions", OK, text)
    ours, beneath = facts.versions.get("jax"), facts.versions.get("jaxlib")
    if ours and beneath and Version(beneath).release[:3] > Version(ours).release[:3]:
        yield Finding("versions", ERROR, f"jaxlib {beneath} is newer than jax {ours}", f"pip install 'jax=={beneath}' 'jaxlib=={beneath}'")


def _cuda_major(facts: Environment) -> str:
    """Return the major version of CUDA that torch was built for, "" if it was built for none."""
    return (facts.torch_cuda or "").partition(".")[0]


def _cuda(facts: Environment) -> Iterator[Finding]:
    """Compare the CUDA that torch was built for with that of jax's plugins."""
    major, prefix = _cuda_major(facts), "jax-cuda"
    plugins = [name for name in facts.plugins if name.startswith(prefix)]
    others = [name for name in plugins if name != f"{prefix}{major}-plugin"]
    text = f"torch is built for CUDA {facts.torch_cuda}, jax has {' and '.join(plugins) or 'no plugin for CUDA'}"
    if not major:
        yield Finding("CUDA", OK, "torch is built without CUDA")
    elif not others or not facts.may_start_gpu:
        yield Finding("CUDA", OK, text)
    elif major in CUDA_EXTRAS:
        removed = " ".join(f"{name} {name.replace('plugin', 'pjrt')}" for name in others)
        fix = f"pip uninstall {removed}, and then pip install 'maskbridge[cuda{major}]'"
        yield Finding("CUDA", WARNING, f"{text}: libraries of two versions of CUDA in one process may not work", fix)
    else:
        fix = f"a torch built for CUDA {' or '.join(CUDA_EXTRAS)}, and maskbridge[cuda{CUDA_EXTRAS[-1]}] to match"
        yield Finding("CUDA", WARNING, f"{text}: libraries of two versions of CUDA in one process may not work", fix)


def _devices(facts: Environment) -> Iterator[Finding]:
    torch_side = f"torch sees {facts.torch_gpus} GPUs" if facts.torch_gpus else "torch sees the CPU alone"
    asked = facts.env.get("JAX_PLATFORMS", "")
    wants_cpu = asked.split(",")[0] == "cpu"
    gpus = dict(facts.jax_devices or ()).get("gpu", 0) or dict(facts.jax_devices or ()).get("cuda", 0)
    jax_side = (
        "jax has not started" if facts.jax_devices is None else f"jax has {', '.join(f'{n} {kind}' for kind, n in facts.jax_devices)}"
    )
    both = f"{torch_side}, {jax_side}"
    major = _cuda_major(facts)
    extra = f"cuda{major if major in CUDA_EXTRAS else ''}"
    install = f"pip install 'maskbridge[{extra}]' (a jax built for torch's CUDA), and see CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
    if facts.start_error is not None:
        why = f"jax does not start{f' (JAX_PLATFORMS={asked})' if asked else ''}: {facts.start_error}"
        fix = f"unset JAX_PLATFORMS, or {install}" if asked else f"JAX_PLATFORMS=cpu, or {install}"
        yield Finding("devices", ERROR, f"{torch_side}, {why}", fix)
    elif facts.torch_gpus and wants_cpu:
        yield Finding("devices", WARNING, f"{both}: JAX_PLATFORMS={asked} keeps jax off them", "unset JAX_PLATFORMS to train on a GPU")
    elif facts.torch_gpus and facts.has_jax_started and not gpus:
        loaded = "; torch's cuDNN or CUDA may have been loaded first: import jax before torch" if facts.plugins else ""
        yield Finding("devices", ERROR, f"{both}: parameters on a GPU cannot be updated", install + loaded)
    elif facts.torch_gpus and not facts.has_jax_started and not facts.plugins:
        yield Finding("devices", ERROR, f"{both} and has no plugin for GPUs", install)
    elif facts.torch_gpus and facts.has_jax_started and gpus != facts.torch_gpus:
        yield Finding("devices", WARNING, f"{both}: not the same number", "set CUDA_VISIBLE_DEVICES for both before either starts")
    elif gpus and not facts.torch_gpus:
        fix = "JAX_PLATFORMS=cpu, or a torch built for CUDA" + (f" ({facts.torch_cuda})" if facts.torch_cuda else "")
        yield Finding("devices", WARNING, f"{both}: jax puts its own arrays on a GPU, where no tensor is", fix)
    elif facts.has_jax_started and asked and "cpu" not in asked.split(","):
        yield Finding("devices", NOTE, f"{both}: JAX_PLATFORMS={asked} leaves out the CPU", f"JAX_PLATFORMS={asked},cpu for tensors there")
    else:
        is_undecided = facts.jax_devices is None and facts.may_start_gpu
        yield Finding(
            "devices", NOTE if is_undecided else OK, both, "bridge.doctor(start=True) starts it and compares" if is_undecided else ""
        )


def _visible(facts: Environment) -> Iterator[Finding]:
    env = facts.env
    names = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    text = ", ".join(f"{name}={env[name]}" for name in names if name in env) or "CUDA_VISIBLE_DEVICES and LOCAL_RANK are not set"
    visible = env.get("JAX_CUDA_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    many = facts.torch_gpus > 1 if visible in (None, "all") else len(visible.split(",")) > 1
    ranks = int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1")) or 1)
    if "LOCAL_RANK" in env and ranks > 1 and many and facts.may_start_gpu:
        yield Finding(
            "visible devices",
            WARNING,
            f"{text}: jax in each of {ranks} processes takes every GPU that it sees",
            "JAX_CUDA_VISIBLE_DEVICES=$LOCAL_RANK and XLA_PYTHON_CLIENT_PREALLOCATE=false, before jax is imported",
        )
    else:
        yield Finding("visible devices", OK, text)


def _preallocation(facts: Environment) -> Iterator[Finding]:
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
    given = {name: facts.env[name] for name in names if name in facts.env}
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    off = given.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")
    if facts.torch_gpus and facts.may_start_gpu and not off and not any("FRACTION" in name or "ALLOCATOR" in name for name in given):
        yield Finding(
            "preallocation",
            WARNING,
            "jax takes 75% of the GPU's memory at its first use, and torch gets the rest",
            "XLA_PYTHON_CLIENT_PREALLOCATE=false (or XLA_PYTHON_CLIENT_MEM_FRACTION=.3), before jax is imported",
        )
    else:
        yield Finding("preallocation", OK, text or "not set; no GPU is shared with torch")


def _x64(facts: Environment) -> Iterator[Finding]:
    if facts.x64:
        yield Finding(
            "x64", NOTE, "on: 0.5 in your own JAX code makes float64", "jax_enable_x64 is not needed: float64 parameters work without"
        )
    else:
        yield Finding("x64", OK, "off: to_jax keeps float64 and int64, jnp.asarray and jnp.zeros make 32-bit arrays")


def _flags(facts: Environment) -> Iterator[Finding]:
    flags, opted_out = facts.env.get("XLA_FLAGS", ""), facts.env.get(FUSION_VARIABLE) == "0"
    text, asks_per_program = f"XLA_FLAGS={flags!r}", facts.has_per_program_flag and not opted_out
    slower = "Adam moves 40 bytes a parameter on the CPU instead of 28"
    newer = "another jaxlib (0.8 to 0.12 know it)"
    if FUSION_FLAG in flags and facts.fuses_outputs is not False:
        yield Finding("XLA flags", OK, f"{text}: {'XLA has read it' if facts.fuses_outputs else 'set, jax will read it when it starts'}")
    elif asks_per_program and facts.fuses_outputs is not False:
        yield Finding("XLA flags", OK, f"{text}; each update asks for {FUSION_FLAG}")
    elif asks_per_program:
        yield Finding("XLA flags", WARNING, f"this jaxlib does not know {FUSION_FLAG}; {slower}", newer)
    elif FUSION_FLAG in flags:
        fix = f"import bridge before jax computes anything; {newer}"
        yield Finding("XLA flags", WARNING, f"{text}: jax started without it, or this jaxlib does not know it; {slower}", fix)
    elif opted_out:
        yield Finding("XLA flags", NOTE, f"{FUSION_VARIABLE}=0: {slower}", "unset it")
    elif "xla_backend_extra_options" in flags:
        yield Finding("XLA flags", NOTE, f"{text}: your own options are kept; {slower}", f"add {FUSION_FLAG} to them, with a comma")
    else:
        yield Finding("XLA flags", WARNING, f"jax had started before bridge was imported; {slower}", "import bridge or torch_api first")


def _alignment(facts: Environment) -> Iterator[Finding]:
    if facts.misaligned_sizes:
        sizes = ", ".join(map(str, facts.misaligned_sizes))
        yield Finding(
            "alignment",
            WARNING,
            f"torch gave memory that is not aligned to 64 bytes (tensors of {sizes} floats): copy=False refuses it, copy=None copies it",
            "copy=None, and report it: torch's allocator promises 64 bytes. Parameters that an optimizer has moved are aligned",
        )
    else:
        yield Finding("alignment", OK, "torch's own tensors are aligned to 64 bytes; slices (t[1:]) may not be")


def _fast_paths(facts: Environment) -> Iterator[Finding]:
    if asks_for_safe_mode(facts.env):
        text = "MASKBRIDGE_SAFE is set: optimizers use no private names, copy all arguments and results, and are several times slower"
        yield Finding("fast paths", NOTE, text, "unset it before Python starts")
        return
    ways = {"import": facts.has_fast_import, "export": facts.has_fast_export}
    slow = [name for name, fast in ways.items() if fast is False]
    if slow:
        yield Finding(
            "fast paths",
            NOTE,
            f"{' and '.join(slow)} by jax's public call, which takes several times as long",
            "this jax or torch has other private names than maskbridge knows; report it",
        )
    else:
        yield Finding(
            "fast paths", OK, "chosen when jax starts" if facts.has_fast_import is None else "import and export skip jax's public wrappers"
        )
    if not facts.has_streams:
        yield Finding(
            "execution streams",
            NOTE,
            "this jaxlib has only one for each thread: on the CPU the programs of a step run one after the other",
            "a jaxlib between 0.8 and 0.12, or report it",
        )
    if not facts.has_use_count:
        yield Finding(
            "write-back",
            WARNING,
            "this torch does not tell how many tensors use a storage: every parameter is updated by a copy",
            "a torch between 2.8 and 2.15, or report it",
        )


def _processes(facts: Environment) -> Iterator[Finding]:
    fix = "DataLoader(..., multiprocessing_context='forkserver'), or torch.multiprocessing.set_start_method('forkserver') at the start"
    if facts.forked:
        yield Finding("processes", ERROR, "this process was forked after jax had started: nothing of jax works in it", fix)
    elif facts.start_method == "fork":
        now = "jax runs here, and" if facts.has_jax_started else "once jax has started,"
        yield Finding("processes", NOTE, f"{now} workers of a DataLoader are forked: jax in them may hang, torch alone does not", fix)
    else:
        yield Finding("processes", OK, f"workers are started by {facts.start_method}")


def _threads(facts: Environment) -> Iterator[Finding]:
    env = facts.env
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    text = f"{facts.torch_threads} threads of torch on {facts.cores} cores" + "".join(
        f", {name}={env[name]}" for name in names if name in env
    )
    spins = env.get("GOMP_SPINCOUNT", "")
    spins_briefly = spins.isdecimal() and int(spins) <= 10_000
    stops_spinning = (
        facts.openmp_can_pause or spins_briefly or env.get("OMP_WAIT_POLICY", "").lower() == "passive" or env.get("KMP_BLOCKTIME") == "0"
    )
    if facts.torch_threads > facts.cores:
        yield Finding("threads", WARNING, f"{text}: more than there are cores", "torch.set_num_threads(n), or OMP_NUM_THREADS")
    elif facts.torch_threads > 1 and not stops_spinning:
        yield Finding(
            "threads",
            NOTE,
            f"{text}: after each operation torch's threads spin for some milliseconds, on the cores that XLA would use",
            "GOMP_SPINCOUNT=10000, before torch is imported",
        )
    else:
        yield Finding("threads", OK, text)


def _cache(facts: Environment) -> Iterator[Finding]:
    if facts.cache_dir is None:
        fix = "JAX_COMPILATION_CACHE_DIR=/a/folder (docs/performance/compiling.md)"
        yield Finding("compilation cache", NOTE, "off: every process compiles anew", fix)
    elif not facts.cache_writable:
        yield Finding("compilation cache", WARNING, f"{facts.cache_dir} cannot be written to", "choose another folder")
    else:
        yield Finding("compilation cache", OK, str(facts.cache_dir))


def _inspection(facts: Environment) -> Iterator[Finding]:
    names, unknown = _logs.requested_logs(facts.env)
    known = ",".join(_logs.NAMES)
    if unknown:
        text = f"{_logs.VARIABLE} names {', '.join(map(repr, unknown))}, which is no log"
        yield Finding("logs", WARNING, text, f"{_logs.VARIABLE}={known}, or some of them")
    else:
        logs = f"{_logs.VARIABLE}={','.join(names)} is set" if names else f"{_logs.VARIABLE}={known} logs what is compiled, and why"
        yield Finding("logs", OK, f"{logs}; optimizer.explain() prints what a step runs")


_CHECKS: tuple[Callable[[Environment], Iterator[Finding]], ...] = (
    _versions, _cuda, _devices, _visible, _preallocation, _x64, _flags, _alignment, _fast_paths, _processes, _threads, _cache, _inspection,
)  # fmt: skip
