"""Report this machine's tools and devices, and try to compile a line into the cache: `python -m dcompile`."""

from __future__ import annotations

import argparse
import ctypes
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dcompile import compat
from dcompile.codegen.emit.build import KernelCompilers
from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.runtime.cache.disk import KernelCache, cache_directory, clear, files_in, prepare_directory
from dcompile.toolchain import compilers, cpu_features, own_version, triton_version

PEERS = ("transformers", "accelerate", "deepspeed", "lightning", "trl", "peft", "torchao")
"""Packages that dcompile integrates with, whose versions belong in a bug report."""

TRIAL = KernelSource("trial", 'extern "C" int trial() { return 42; }\n', arguments=(), cost=1, checked=False)

OTHERS = """other commands:
  python -m dcompile.calibrate    measure this machine for the cost model, once
  python -m dcompile.precompile   fill the cache for a training script before its job starts
"""


def main(arguments: list[str] | None = None) -> int:
    """Print the report and "ready", or clear the cache. Returns 1 if a compilation would not work."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m dcompile", description=__doc__, epilog=OTHERS, formatter_class=layout)
    parser.add_argument("--clear-cache", action="store_true", help="remove compiled kernels and graphs")
    chosen = parser.parse_args(arguments)
    if chosen.clear_cache:
        directory = cache_directory(Config.make())
        sys.stdout.write(f"{clear(directory) / 1e6:.1f} MB removed from {directory}\n")
        return 0
    problems: list[str] = []
    sys.stdout.writelines(f"{line}\n" for line in describe_machine(problems))
    sys.stdout.writelines([f"problem: {problem}\n" for problem in problems] or ["ready\n"])
    return 1 if problems else 0


def describe_machine(problems: list[str]) -> Iterator[str]:
    """Lines of the report. Missing requirements are appended to `problems`."""
    yield f"dcompile {own_version()}, torch {compat.versions.torch_version()} ({compat.versions.SUPPORTED} supported)"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield _compiler_line(problems)
    yield f"vectors: {_vectors() or 'neither AVX2 nor AVX-512'}"
    yield from _gpu_lines(problems)
    if peers := [f"{name} {found}" for name in PEERS if (found := _version(name))]:
        yield f"installed beside: {', '.join(peers)}"
    yield from _cache_lines()
    yield from () if problems else _trial_lines(problems)


def _compiler_line(problems: list[str]) -> str:
    for command in compilers():
        if shutil.which(command[0]):
            run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
            first = (run.stdout or run.stderr).splitlines()[:1]
            return f"C++ compiler: {shlex.join(command)}: {''.join(first)}"
    problems.append("no C++ compiler; install g++ or clang++, or set CXX: kernels for CPUs cannot be built without")
    return "C++ compiler: none"


def _vectors() -> str:
    features = cpu_features().split()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_bf16": "AMX", "asimd": "NEON"}
    return ", ".join(name for feature, name in known.items() if feature in features)


def _gpu_lines(problems: list[str]) -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        yield "GPUs: none that torch can use"
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"GPU {number}: {found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB"
    yield f"Triton: {triton_version() or 'none'}; CUDA {torch.version.cuda}"
    if triton_version() is None:
        problems.append("no Triton; pip install triton: kernels for GPUs cannot be built without")


def _cache_lines() -> Iterator[str]:
    config = Config.make()
    directory = cache_directory(config)
    files = files_in(directory) if directory.is_dir() else []
    kernels = sum(file.path.suffix == ".json" for file in files)
    graphs = sum(file.path.suffix == ".graph" for file in files)
    size = sum(file.size for file in files) / 1e6
    limit = f"of at most {config.cache_size_gib} GiB" if config.cache_size_gib else "without a limit"
    yield f"cache: {directory}, {size:.1f} MB {limit}, {kernels} kernels, {graphs} graphs"
    free = shutil.disk_usage(_existing(directory)).free / 1e9
    yield f"  {free:.1f} GB free there; python -m dcompile --clear-cache empties it, DCOMPILE_CACHE_DIR moves it"


def _trial_lines(problems: list[str]) -> Iterator[str]:
    """Compile a line, keep it in the cache and call it, as a first step does with its kernels."""
    config, began = Config.make(), time.perf_counter()
    directory, objection = prepare_directory(cache_directory(config))
    if objection is not None:
        problems.append(f"the cache {directory} cannot be used: {objection}; set DCOMPILE_CACHE_DIR to another folder")
        return
    try:
        # a folder of its own, so that the line is compiled each time, and nothing of it stays
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=directory) as folder:
            compilers = KernelCompilers(config, launcher=TRIAL)
            built = compilers.begin(Kernels((TRIAL,)), None, KernelCache(Path(folder))).result()
            ctypes.CDLL(str(built.libraries[TRIAL.name])).trial()
    except (BuildError, OSError) as error:
        problems.append(str(error).removeprefix("dcompile: "))
        return
    yield f"trial: a line of C++ was compiled, written to the cache and called in {time.perf_counter() - began:.1f} s"


def _existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
