"""Compiles Triton kernels to machine code, in parallel and without a GPU; nothing is built twice.

A process imports Triton while the program is still being planned, then forks one worker for each share of the kernels
(`triton_worker.py`). Only `triton.compile` is used, never the just-in-time path: what comes out is a cubin, which
`runtime.gpu` loads without importing Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dcompile.codegen.emit import triton_worker
from dcompile.codegen.emit.build import (
    Built,
    Cache,
    balance,
    end_process,
    failure,
    start_process,
    tail,
    tell,
    workers,
)
from dcompile.codegen.emit.emitter import KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.machine import own_version, triton_version

Process: TypeAlias = "subprocess.Popen[bytes]"

OPTIONS: Mapping[str, bool] = {
    "enable_fp_fusion": False,  # an fma that appears when two loops are fused would change bits
    "enable_reflect_ftz": False,  # CUDA's library flushes denormals otherwise, where eager does not
}
SHARE = 2
"""Kernels that are worth a worker more: one takes 0.1 s, forking a worker some milliseconds."""
ADVICE = 'run without it: options={"kernels": "aten"}'


@contextlib.contextmanager
def started() -> Iterator[Process]:
    """A process that imports Triton, to be handed to `build`; it is ended with the context."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = start_process((sys.executable, "-P", triton_worker.__file__), environment)
    try:
        yield process
    finally:
        end_process(process)


def build(sources: Iterable[KernelSource], arch: int, config: Config, cache: Cache, process: Process) -> Built:
    """Find or compile all kernels for compute capability `arch` (90 for 9.0), with a `process` from `started`.

    Raises BuildError.
    """
    unique = {source.name: source for source in sources}
    if not unique:
        return Built({}, 0, 0)
    keys = {name: _key(source, arch) for name, source in unique.items()}
    archives = {name: path for name, key in keys.items() if (path := cache.find(key)) is not None}
    missing = [source for name, source in unique.items() if name not in archives]
    if missing:
        archives |= _compile(missing, arch, config.compile_timeout_s, cache, keys, process)
    return Built(archives, len(missing), len(unique) - len(missing), keys)


def _key(source: KernelSource, arch: int) -> str:
    launches = [(launch.function, launch.warps, launch.types) for launch in source.launches]
    worker = Path(triton_worker.__file__).read_text()
    parts = (source.text, str(launches), str(arch), str(dict(OPTIONS)), str(triton_version()), own_version(), worker)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _compile(
    sources: Sequence[KernelSource],
    arch: int,
    timeout_s: int,
    cache: Cache,
    keys: Mapping[str, str],
    process: Process,
) -> dict[str, Path]:
    """Build some kernels and publish them in the cache."""
    folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache.directory))
    try:
        parts = balance(sources, max(min(workers(), len(sources) // SHARE), 1))
        shares = [[_record(source) for source in part] for part in parts]
        job = {"folder": str(folder), "arch": arch, "options": dict(OPTIONS), "shares": shares}
        code, hung, said = tell(process, json.dumps(job), timeout_s)
        if hung:
            raise BuildError(f"dcompile: Triton did not finish in {timeout_s} s (compile_timeout_s); {ADVICE}")
        if code:
            raise BuildError(f"dcompile: Triton {failure(code)} on {len(sources)} kernels:\n{tail(said)}\n{ADVICE}")
        return {s.name: cache.put([keys[s.name]], folder / f"{s.name}.gpu") for s in sources}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _record(source: KernelSource) -> dict[str, object]:
    functions = [{"name": n.function, "warps": n.warps, "types": list(n.types)} for n in source.launches]
    return {"name": source.name, "text": source.text, "functions": functions}
