"""Compile the kernels of all targets in parallel."""

from __future__ import annotations

from dataclasses import dataclass

from dcompile.codegen.emit.cpp import compile as cpp_compile
from dcompile.codegen.emit.cpp import sgemm
from dcompile.codegen.emit.target import Built, Cache, Kernels, KernelSource
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.config import Config
from dcompile.toolchain import products_key


@dataclass(frozen=True, slots=True)
class PendingBuild:
    """Kernels of a graph, which g++ and Triton compile in parallel."""

    cpu: cpp_compile.Building
    gpu: triton_compile.TritonBuild | None

    @property
    def waits(self) -> bool:
        return self.cpu.waits or (self.gpu is not None and self.gpu.waits)

    def progress(self) -> str:
        """Say how many kernels are built, for people."""
        counts = [building.counts for building in (self.cpu, self.gpu) if building is not None]
        done, total = (sum(column) for column in zip(*counts, strict=True))
        return f"building kernels, {done} of {total} done"

    def result(self) -> Built:
        """Wait for all kernels. Raises BuildError."""
        cpu = self.cpu.result()
        if self.gpu is None:
            return cpu
        gpu = self.gpu.result()
        libraries, keys = {**cpu.libraries, **gpu.libraries}, {**cpu.keys, **gpu.keys}
        return Built(libraries, cpu.compiled | gpu.compiled, keys)


class KernelCompilers:
    """Compilers of one model's kernels. `launcher`: C++ code that starts kernels on a GPU."""

    def __init__(self, config: Config, launcher: KernelSource) -> None:
        self._config, self._launcher = config, launcher
        self._cpp = cpp_compile.Compilers(config)
        self._pools: dict[int, triton_compile.WorkerPool] = {}
        """Triton worker pools by compute capability, for all graphs."""

    def prepare(self, arch: int, cache: Cache) -> None:
        """Start the workers for a compute capability, which import Triton while a program is planned."""
        self._pool(arch, cache).ready()

    def begin(self, kernels: Kernels, arch: int | None, cache: Cache) -> PendingBuild:
        """Start compiling all kernels. `arch`: compute capability of the GPU, if some are for a GPU."""
        sources = [source for source in kernels.sources if not source.launches]
        others = [source for source in kernels.sources if source.launches]
        if not others:
            return PendingBuild(self._begin_cpp(sources, cache), None)
        assert arch is not None, "a graph with kernels for a GPU is on one"
        theirs = triton_compile.TritonBuild(others, arch, self._config, cache, self._pool(arch, cache))
        return PendingBuild(self._begin_cpp([*sources, self._launcher], cache), theirs)

    def begin_matmul(self, cache: Cache) -> None:
        """Start compiling the GEMM kernel. Its first user waits for it, and gets its error."""
        if cpp_compile.workers() > 1:  # with one core, it would take as long later
            self._begin_cpp([sgemm.source()], cache, early=True)

    def _pool(self, arch: int, cache: Cache) -> triton_compile.WorkerPool:
        return self._pools.setdefault(arch, triton_compile.WorkerPool(arch, cache.directory))

    def _begin_cpp(self, sources: list[KernelSource], cache: Cache, *, early: bool = False) -> cpp_compile.Building:
        return self._cpp.begin(sources, cache, early=early, aliases={sgemm.source().name: products_key()})
