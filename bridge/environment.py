"""Read the state of this process and machine that matters to torch and jax together. Nothing is changed or started."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ._compat.jax import client_started, has_per_program_flag, stream_calls
from ._compat.torch import storage_use_count
from ._interop import dlpack
from ._runtime import openmp
from ._xla.compile import compile_lowered

PACKAGES = ("jax", "jaxlib", "torch", "optax", "numpy", "ml-dtypes", "torch2jax", "packaging")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin", "libtpu")
_PROBED_SIZES = (1, 3, 16, 100, 1000, 4097)


@dataclass(frozen=True)
class Environment:
    """The versions, settings and devices of a process, for `bridge.doctor`.

    env: The environment variables.
    versions: The version of each package, None if it is not installed.
    requirements: The supported versions of each package, as in ">=2.8,<3"; empty if this distribution is not installed.
    torch_gpus: The number of GPUs by torch's count, which opens no device.
    plugins: jax's installed plugins for accelerators.
    jax_devices: Platform and number of jax's devices; None until jax has started.
    start_error: Why jax cannot start; None if it can, or has not tried.
    fuses_outputs: Whether XLA writes two results of our programs from one loop; None until jax has started.
    has_per_program_flag: Whether a single program can ask for that.
    misaligned_sizes: Sizes at which torch gave memory that is not aligned to 64 bytes.
    has_fast_import, has_fast_export: Whether the calls below jax's public ones are used; None until jax has started.
    has_streams: Whether jaxlib can run programs in several execution streams.
    has_use_count: Whether torch tells how many tensors use a storage.
    openmp_can_pause: Whether a step can end torch's OpenMP threads.
    """

    env: Mapping[str, str]
    versions: Mapping[str, str | None]
    requirements: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    torch_cuda: str | None = None
    torch_gpus: int = 0
    plugins: tuple[str, ...] = ()
    jax_devices: tuple[tuple[str, int], ...] | None = None
    start_error: str | None = None
    x64: bool = False
    fuses_outputs: bool | None = None
    has_per_program_flag: bool = True
    misaligned_sizes: tuple[int, ...] = ()
    has_fast_import: bool | None = None
    has_fast_export: bool | None = None
    has_streams: bool = True
    has_use_count: bool = True
    start_method: str = "spawn"
    forked: bool = False
    cores: int = 1
    torch_threads: int = 1
    openmp_can_pause: bool = False
    cache_dir: str | None = None
    cache_writable: bool = field(default=True)

    @property
    def has_jax_started(self) -> bool:
        return self.jax_devices is not None

    @property
    def may_start_gpu(self) -> bool:
        """Return whether jax may take an accelerator when it starts."""
        return bool(self.plugins) and self.env.get("JAX_PLATFORMS", "").split(",")[0] != "cpu"


def read_environment(forked: bool = False, start_jax: bool = False) -> Environment:
    """Return the `Environment` of this process.

    Args:
      forked: Whether this process was forked from one in which jax had started.
      start_jax: Start jax first.
    """
    devices, failure = _devices() if (start_jax or client_started()) and not forked else (None, None)
    started = devices is not None
    has_cpu = started and _has_cpu()
    versions = {name: _version(name) for name in PACKAGES}
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Environment(
        env=dict(os.environ),
        versions=versions,
        requirements=_read_requirements(),
        python=platform.python_version(),
        torch_cuda=torch.version.cuda,
        torch_gpus=torch.cuda.device_count() if torch.version.cuda else 0,
        plugins=tuple(name for name in _PLUGINS if _version(name) is not None),
        jax_devices=devices,
        start_error=failure,
        x64=bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
        fuses_outputs=_fuses_outputs() if has_cpu else None,
        has_per_program_flag=has_per_program_flag(),
        misaligned_sizes=tuple(n for n in _PROBED_SIZES if torch.empty(n).data_ptr() % dlpack.ALIGNMENT),
        has_fast_import=dlpack._importer("cpu") is not dlpack._public_import if has_cpu else None,
        has_fast_export=dlpack._exporter() is not torch.from_dlpack if has_cpu else None,
        has_streams=stream_calls is not None,
        has_use_count=storage_use_count(torch.empty(1)) > 0,
        start_method=multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        forked=forked,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        openmp_can_pause=openmp.pause is not None,
        cache_dir=cache,
        cache_writable=cache is None or "://" in str(cache) or _writable(str(cache)),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_requirements() -> dict[str, str]:
    """Return the version specifier of each dependency, by the metadata of the installed distribution."""
    try:
        listed = importlib.metadata.requires("maskbridge") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    every = [Requirement(text) for text in listed]
    needed = [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {canonicalize_name(each.name): str(each.specifier) for each in needed}  # build tools write ml_dtypes or ml-dtypes


def _devices() -> tuple[tuple[tuple[str, int], ...] | None, str | None]:
    """Return platform and number of jax's devices, or why there are none."""
    found: dict[str, int] = {}
    try:
        devices = jax.local_devices()
    except Exception as error:  # noqa: BLE001 - jax raises RuntimeError, or AssertionError without a text
        return None, " ".join(str(error).split()) or type(error).__name__
    for device in devices:
        found[device.platform] = found.get(device.platform, 0) + 1
    return tuple(sorted(found.items())), None


def _has_cpu() -> bool:
    try:
        return dlpack.cpu_device() is not None
    except RuntimeError:
        return False


def _fuses_outputs() -> bool:
    """Return whether XLA's CPU compiler writes two results from one loop in our programs, by the text of a small executable."""
    anew = time.time_ns() % 2**20 / 2**10  # a new constant, so that the persistent cache of another process does not answer

    def two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * anew, jnp.sin(x) + x

    with jax.default_device(dlpack.cpu_device()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unusable cache has a finding of its own
        text = compile_lowered(jax.jit(two).lower(jax.ShapeDtypeStruct((1024,), "float32")), fuse_outputs=True).as_text()
    return (text or "").count(" fusion(") == 1


def _writable(folder: str) -> bool:
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder or ".") and os.access(folder or ".", os.W_OK)
