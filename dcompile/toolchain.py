"""Dependences of generated code besides its input: processor, C++ compiler, OpenMP run time, and dcompile's source."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMPILERS = (("g++",), ("c++",), ("clang++",))
"""Commands that are tried in this order if CXX is not set."""


def compilers() -> list[tuple[str, ...]]:
    """Commands that may be the compiler: $CXX, or the usual ones."""
    chosen = tuple(shlex.split(os.environ.get("CXX", "")))
    return [chosen] if chosen else list(COMPILERS)


def compiler_stamp() -> str:
    """Identify the compiler without starting it: its command, and path, size and date of its files."""
    for command in compilers():
        if shutil.which(command[0]):
            files = [found for word in command if (found := shutil.which(word))]  # `ccache g++` is two
            return " ".join((shlex.join(command), *map(_stamp, files)))
    return "none"


def _stamp(file: str) -> str:
    path = os.path.realpath(file)
    status = os.stat(path)
    return f"{path}:{status.st_size}:{status.st_mtime_ns}"


@functools.cache
def cpu_features() -> str:
    """Processor features that -march=native selects: a kernel built elsewhere may not run here."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("vendor_id", "flags", "Features", "cpu family", "model\t", "CPU part")
        found = [line.split(":", 1)[1].strip() for line in lines if line.startswith(wanted)]
        if found:
            return " ".join(dict.fromkeys(found))
    return f"{platform.machine()} {platform.processor()}"


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor, as Linux names them; empty where they are not known."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = [line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))]
        return frozenset(found[0].split()) if found else frozenset()
    return frozenset()


def boot() -> str:
    """Identifier of this boot of this machine, whose processes share one clock and memory; empty if not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_products(matmul: str) -> bool:
    """Whether float32 matmuls and attention use dcompile's own kernels under this setting (`Config.matmul`)."""
    return matmul == "own" or (matmul == "auto" and own_products_pay())


def caches_are_far() -> bool:
    """Whether the third-level cache is so slow that loops should prefetch.

    That holds for Intel's servers, whose cache is distributed over the cores. AVX-512 identifies them: desktop
    processors since 2021 lack it.
    """
    features = cpu_features().split()
    return "avx512f" in features and "GenuineIntel" in features


@functools.cache
def cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that a core reads through; 0 if not known."""
    sizes = [0]
    for cache in caches.glob("index*"):
        with contextlib.suppress(OSError):  # not every kernel reports every size
            found = re.fullmatch(r"(\d+)([KMG]?)", (cache / "size").read_text().strip())
            sizes += [int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]] if found else []
    return max(sizes)


def own_products_pay() -> bool:
    """Whether dcompile's matmuls are faster than ATen's: MKL does not use AVX-512 on other processors than Intel's."""
    features = cpu_features().split()
    return "avx512f" in features and "GenuineIntel" not in features


def products_key() -> str:
    """Key of the GEMM kernel, known without its text, which a warm start does not load."""
    parts = ("products", own_source(), compiler_stamp(), cpu_features(), own_version(), str(openmp_library()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def openmp_library() -> str | None:
    """OpenMP run time that torch has loaded. Linking the same one keeps one thread pool and one setting."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if "libgomp" in Path(path).name and Path(path).is_file():
                return path
    return None


def triton_version() -> str | None:
    """Version of the installed Triton, without importing it."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


@functools.cache
def own_version() -> str:
    """Version of dcompile."""
    try:
        return version("dcompile")
    except PackageNotFoundError:
        return "source"


@functools.cache
def own_source() -> str:
    """Digest of dcompile's source, so that results of another version of the compiler are not reused."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    if not root.is_dir():  # inside a zip archive
        return hashlib.sha256(next(path for path in root.parents if path.is_file()).read_bytes()).hexdigest()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
