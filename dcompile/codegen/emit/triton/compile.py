"""Compile Triton kernels to machine code, in parallel and without a GPU; nothing is built twice.

A process imports Triton while the first program is still being planned. It forks one worker for each core
(`worker.py`), and these serve all programs of a model. Only `triton.compile` is used, never the just-in-time path. The
result is a cubin, which `runtime.program.cuda_launch` loads without importing Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dcompile.codegen.emit.cpp.compile import end_process, failure, tail, workers
from dcompile.codegen.emit.target import Built, Cache, KernelSource
from dcompile.codegen.emit.triton import worker as worker_module
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.toolchain import own_version, triton_version

Process: TypeAlias = "subprocess.Popen[bytes]"

OPTIONS: Mapping[str, bool] = {
    "enable_fp_fusion": False,  # an fma that appears when two loops are fused would change bits
    "enable_reflect_ftz": False,  # CUDA's library flushes denormals otherwise, unlike eager
}
TOLD = 512
"""Kernels sent to workers before they answer: fewer than a pipe holds, in either direction."""
OUTPUT = "output"
"""File of the workers' output."""
ADVICE = 'run without it: options={"kernels": "aten"}'


class TritonBuild:
    """Kernels of one program; those that were not in the cache are being compiled."""

    def __init__(
        self, sources: Iterable[KernelSource], arch: int, config: Config, cache: Cache, workers: WorkerPool
    ) -> None:
        unique = {source.name: source for source in sources}
        self._keys = {name: _key(source, arch) for name, source in unique.items()}
        found = {name: cache.find(key) for name, key in self._keys.items()}
        self._archives = {name: path for name, path in found.items() if path is not None}
        self._missing = [source for name, source in unique.items() if name not in self._archives]
        self._cache, self._workers = cache, workers
        self._timeout_s = config.compile_timeout_s
        # longest first; on ties in a fixed order
        ranked = sorted(self._missing, key=lambda source: (-source.cost, source.name))
        self._team = workers.begin(ranked) if ranked else None

    @property
    def waits(self) -> bool:
        """Whether any must be compiled."""
        return bool(self._missing)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of kernels that the workers have finished, and of all that they were given."""
        done = set() if self._team is None else self._team.done
        return sum(source.name in done for source in self._missing), len(self._missing)

    def result(self) -> Built:
        """Wait for all kernels. Raises BuildError."""
        files: dict[str, Path] = {}
        try:
            if self._team is not None:
                files = self._workers.finish(self._team, self._missing, time.monotonic() + self._timeout_s)
        except TimeoutError as error:
            raise BuildError(
                f"dcompile: Triton did not finish in {self._timeout_s} s (compile_timeout_s); {ADVICE}"
            ) from error
        for name, file in files.items():  # another program may have compiled and stored the same kernel
            self._archives[name] = self._cache.find(self._keys[name]) or self._cache.put([self._keys[name]], file)
        return Built(self._archives, frozenset(files), self._keys)


class WorkerPool:
    """The processes that compile kernels for one model. They end after an idle time, or with the model."""

    def __init__(self, arch: int, directory: Path) -> None:
        self._arch, self._directory = arch, directory
        self._lock = threading.Lock()
        self._team: _WorkerTeam | None = None

    def ready(self) -> None:
        """Start workers if there are none: importing Triton takes a second."""
        with self._lock:
            self._present()

    def begin(self, sources: Sequence[KernelSource]) -> _WorkerTeam:
        """Start compiling kernels in this order; return the team that does it at once."""
        with self._lock:
            team = self._present()
            team.begin(sources)
            return team

    def finish(self, team: _WorkerTeam, sources: Sequence[KernelSource], until: float) -> dict[str, Path]:
        """Wait for kernels that a team has started: name -> archive. Raises BuildError, or TimeoutError at `until`.

        The team may have ended since, with all of them compiled or just when they were sent; then a new team starts.
        """
        with self._lock:
            try:
                while not team.finish(sources, until):
                    team = self._present()
                    team.begin(sources)
            except (BuildError, TimeoutError):
                self._end()
                team.close()
                raise
            return {source.name: team.archive(source.name) for source in sources}

    def close(self) -> None:
        """End the processes now."""
        with self._lock:
            self._end()

    def _present(self) -> _WorkerTeam:
        if self._team is not None and self._team.process.poll() is not None:
            self._team = None  # its results may still be waited for
        if self._team is None:
            self._team = _WorkerTeam(self._arch, self._directory)
        return self._team

    def _end(self) -> None:
        if self._team is not None:
            self._team.close()
        self._team = None


class _WorkerTeam:
    """A process that imports Triton, its forked workers, and the folder that they share with this process."""

    def __init__(self, arch: int, directory: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=directory))
        self.process = _start(self.folder, arch)
        self.close = weakref.finalize(self, _close, self.process, self.folder, os.getpid())
        """Ends the processes and removes the folder, also when this object is collected or Python exits."""
        self._begun: set[str] = set()
        self.done: set[str] = set()
        self._untold: deque[str] = deque()
        """Kernels not sent to the workers yet: a pipe has limited room."""

    def begin(self, sources: Iterable[KernelSource]) -> None:
        """Describe new kernels in files, and send their names to the workers."""
        for source in sources:
            if source.name not in self._begun:
                (self.folder / f"{source.name}.json").write_text(json.dumps(_record(source)))
                self._begun.add(source.name)
                self._untold.append(source.name)
        self._tell()

    def _tell(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `finish` reports the reason
            while self._untold and len(self._begun) - len(self.done) - len(self._untold) < TOLD:
                self.process.stdin.write(worker_module.token(self._untold[0]))
                self._untold.popleft()

    def finish(self, sources: Iterable[KernelSource], until: float) -> bool:
        """Wait for these kernels; return False if the workers have ended before, by their idle time or from outside."""
        wanted = {source.name for source in sources}
        if not self.close.alive:
            return False
        while not wanted <= self.done:
            name = self._reply(until)
            if not name:
                if code := self.process.wait():
                    raise BuildError(f"dcompile: Triton {failure(code)}:\n{self._output()}\n{ADVICE}")
                return False
            self.done.add(name)
            self._tell()
        for name in wanted:
            if (error := self.folder / f"{name}.error").exists():
                raise BuildError(f"dcompile: Triton cannot compile {name}:\n{tail(error.read_text())}\n{ADVICE}")
        return True

    def _reply(self, until: float) -> str:
        """Return the next kernel that is compiled or has failed; an empty name if no worker is left."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
            raise TimeoutError
        name = stdout.read(worker_module.SIZE).decode().strip()
        if name.startswith(worker_module.ENDED):
            code = int(name.removeprefix(worker_module.ENDED))
            raise BuildError(f"dcompile: Triton {failure(code)}:\n{self._output()}\n{ADVICE}")
        return name

    def _output(self) -> str:
        return tail((self.folder / OUTPUT).read_text(errors="replace"))

    def archive(self, name: str) -> Path:
        return self.folder / f"{name}.gpu"


def _start(folder: Path, arch: int) -> Process:
    script = folder / "worker.py"  # dcompile itself may be in a zip archive
    script.write_text(inspect.getsource(worker_module))
    command = (sys.executable, "-P", str(script), str(folder), str(arch), str(workers()))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with open(folder / OUTPUT, "wb") as output:
        return subprocess.Popen(
            (*command, json.dumps(dict(OPTIONS))), env=environment, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
        )  # fmt: skip


def _close(process: Process, folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not end them
        end_process(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _key(source: KernelSource, arch: int) -> str:
    launches = [(launch.function, launch.warps, launch.types) for launch in source.launches]
    worker = inspect.getsource(worker_module)
    parts = (source.text, str(launches), str(arch), str(dict(OPTIONS)), str(triton_version()), own_version(), worker)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _record(source: KernelSource) -> dict[str, object]:
    functions = [{"name": n.function, "warps": n.warps, "types": list(n.types)} for n in source.launches]
    return {"name": source.name, "text": source.text, "functions": functions}
