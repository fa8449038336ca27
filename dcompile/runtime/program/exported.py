"""Check, load and call programs that `dcompile.export` has written, without a compiler.

A folder or a zip file holds `manifest.json`, the host program, compiled kernels and all tensors of the model. Nothing
in it is unpickled. Every file is compared with its SHA-256 before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcompile.compat import pytree
from dcompile.errors import ExportError
from dcompile.ir.index import element_span
from dcompile.runtime.program.artifact import Loadable, from_record
from dcompile.runtime.program.executable import HostProgram
from dcompile.toolchain import cpu_flags

FORMAT = 2
"""Version of the format, raised whenever the meaning of its content changes, also in `include/dcompile/runner.h`."""
MANIFEST, PROGRAM, STEPS, TENSORS = "manifest.json", "program.py", "steps.json", "tensors.bin"
_FILE = re.compile(r"[A-Za-z0-9_]{1,64}(\.[a-z]{1,8})?")
"""Names of an archive's files."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError, IndexError, OverflowError)
"""What reading a damaged zip file raises. RuntimeError: a flag for encryption, or for another method of compression."""
ALIGN_BYTES = 64
"""Alignment of each tensor in bytes: a cache line."""


def torch_range() -> str:
    """Version of torch that may run programs exported by this one: the same minor version."""
    return ".".join(torch.__version__.split(".")[:2])


def machine() -> dict[str, Any]:
    """Properties of the machine that compiled kernels depend on."""
    return {"system": platform.system(), "machine": platform.machine(), "flags": sorted(cpu_flags())}


class LoadedFiles:
    """An exported program and its tensors, checked and mapped into memory.

    Raises ExportError for damaged or missing files, for another format or version of torch, and for another kind of
    machine. Raises FileNotFoundError if there is no program.
    """

    def __init__(self, path: Path) -> None:
        folder = path
        if path.is_file():
            folder = Path(tempfile.mkdtemp(prefix="dcompile-exported-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            _extract(path, folder)
        self.manifest = manifest = _manifest(folder)
        _check_versions(path, manifest)
        _check_gpu(path, manifest["gpu"])
        _check_files(folder, manifest)
        graph = from_record(manifest["graph"] | {"source": (folder / PROGRAM).read_text()})
        self.device = "cpu" if manifest["gpu"] is None else "cuda"
        """Type of the device that the program runs on."""
        self.tensors = _tensors(folder / TENSORS, manifest["tensors"], self.device)
        """Parameters, buffers and constants of the model, by name."""
        libraries = {name: folder / file for name, file in manifest["libraries"].items()}
        constants = {name: self.tensors[tensor] for name, tensor in manifest["constants"].items()}
        self._program = HostProgram("exported", Loadable(graph, libraries, constants))
        self._inputs: list[tuple[str, Any]] = [tuple(entry) for entry in manifest["inputs"]]
        self._separate: list[tuple[int, int]] = [tuple(entry) for entry in manifest["separate"]]

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Run the program on checked arguments, and return its results."""
        results = self._program(
            [self.tensors[what] if kind == "tensor" else given[what] for kind, what in self._inputs]
        )
        for place, earlier in self._separate:
            if results[place] is results[earlier]:
                results[place] = results[place].detach()
        return results


def open_archive(data: bytes) -> LoadedFiles:
    """Load the program of a zip file in memory. Raises ExportError as `LoadedFiles` does."""
    with tempfile.TemporaryDirectory(prefix="dcompile-aot-") as folder:
        path = Path(folder) / "program.zip"
        path.write_bytes(data)
        return LoadedFiles(path)


class ExportedModel:
    """A loaded program, called like the exported model. It computes without gradients.

    Raises ExportError for arguments whose structure, shape or dtype differs from the exported ones.
    """

    def __init__(self, files: LoadedFiles) -> None:
        self._files, manifest = files, files.manifest
        self.tensors = files.tensors
        """Parameters, buffers and constants of the model, by name."""
        self._arguments: list[dict[str, Any]] = manifest["arguments"]
        self._given = pytree.from_text(manifest["given"])
        self._keywords: list[str] = manifest["keywords"]
        self._returned = pytree.from_text(manifest["returned"])
        self._results: list[tuple[str, Any]] = [tuple(entry) for entry in manifest["results"]]
        self._changed: list[tuple[int, str]] = [tuple(entry) for entry in manifest["changed"]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = {name: kwargs[name] for name in self._keywords if name in kwargs}
        flat, structure = pytree.flatten((args, known | kwargs))
        if structure != self._given:
            raise ExportError(f"dcompile: called with {structure}, but exported with {self._given}")
        results = self._files.run(checked(flat, self._arguments, self._files.device))
        with torch.no_grad():
            for place, name in self._changed:
                self.tensors[name].copy_(results[place])
        leaves = [results[what] if kind == "result" else what for kind, what in self._results]
        return pytree.unflatten(leaves, self._returned)


def load(path: str | os.PathLike[str]) -> ExportedModel:
    """Load a program that `dcompile.export` has written to a folder or a zip file.

    It needs neither a C++ compiler nor Triton. Raises ExportError for damaged or missing files, for another format or
    version of torch, and for another kind of machine. Raises FileNotFoundError if there is no program.
    """
    return ExportedModel(LoadedFiles(Path(path)))


def _extract(archive: Path, folder: Path) -> None:
    """Extract a zip file. Raises ExportError if it is damaged, and OSError if its content cannot be written."""
    try:
        with zipfile.ZipFile(archive) as file:
            foreign = [name for name in file.namelist() if not _FILE.fullmatch(name)]
            if not foreign:
                file.extractall(folder)
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that one is of a seek to an impossible offset
            raise
        raise ExportError(f"dcompile: {archive} is damaged: {error}; export the model again") from error
    if foreign:
        raise ExportError(f"dcompile: {archive} is no exported program, or is damaged: it holds {foreign[0]!r}")
    if not (folder / MANIFEST).is_file():
        raise ExportError(f"dcompile: {archive} is damaged: it holds no {MANIFEST}; export the model again")


def _manifest(folder: Path) -> dict[str, Any]:
    text = (folder / MANIFEST).read_bytes()
    try:
        outer = json.loads(text)
        inner: dict[str, Any] = json.loads(outer["manifest"])
        damaged = hashlib.sha256(outer["manifest"].encode()).hexdigest() != outer["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ExportError(f"dcompile: {folder / MANIFEST} is damaged: {error}; export the model again") from error
    if damaged:
        raise ExportError(f"dcompile: {folder / MANIFEST} is damaged: its checksum differs; export the model again")
    return inner


def _check_versions(folder: Path, manifest: Mapping[str, Any]) -> None:
    if manifest["format"] != FORMAT:
        raise ExportError(
            f"dcompile: {folder} has format {manifest['format']}, this dcompile reads {FORMAT}; export the model again"
        )
    if manifest["torch"] != torch_range():
        raise ExportError(
            f"dcompile: {folder} was exported for torch {manifest['torch']}, this is {torch.__version__}; "
            "export the model again"
        )
    here, there = machine(), manifest["machine"]
    for what in ("system", "machine"):
        if here[what] != there[what]:
            raise ExportError(f"dcompile: {folder} is for {there[what]}, this machine is {here[what]}; export it here")
    if missing := sorted({*there["flags"]} - {*here["flags"]}):
        raise ExportError(
            f"dcompile: {folder} is for a processor with {', '.join(missing[:5])}, which this one lacks; "
            "export the model on a machine of this kind"
        )


def _check_gpu(folder: Path, wanted: Sequence[int] | None) -> None:
    """Raise ExportError unless the current GPU is of the kind that kernels were compiled for."""
    if wanted is None:
        return
    kind = f"a GPU of compute capability {wanted[0]}.{wanted[1]}"
    if not torch.cuda.is_available():
        raise ExportError(
            f"dcompile: {folder} is for {kind}, and torch finds no GPU here; export the model for the CPU"
        )
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != tuple(wanted):
        raise ExportError(
            f"dcompile: {folder} is for {kind}, this machine's has {major}.{minor}; "
            f"export it with gpu='sm_{major}{minor}'"
        )


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    for name, digest in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise ExportError(f"dcompile: {file} is missing; export the model again")
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != digest:
            raise ExportError(f"dcompile: {file} is damaged: its checksum differs; export the model again")


def _tensors(file: Path, entries: Mapping[str, Mapping[str, Any]], device: str) -> dict[str, torch.Tensor]:
    """Map tensors of a file, whose pages are read at their first use. Changes stay in this process.

    For a GPU they are copied to it.
    """
    nbytes = file.stat().st_size
    storage: Any = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=nbytes) if nbytes else None
    found = {name: _tensor(storage, entry) for name, entry in entries.items()}
    return found if device == "cpu" else {name: _with_place(x, device) for name, x in found.items()}


def _with_place(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Copy a tensor, and the memory between its elements, to a device."""
    span = tensor.as_strided((element_span(tensor.shape, tensor.stride()),), (1,)).to(device)
    return span.as_strided(tensor.shape, tensor.stride())


def _tensor(storage: Any, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    made = torch.empty(0, dtype=dtype, device="cpu")
    if storage is None or 0 in entry["shape"]:
        return torch.empty_strided(entry["shape"], entry["strides"], dtype=dtype, device="cpu")
    start = entry["offset"] // made.itemsize
    return made.set_(storage, start, entry["shape"], entry["strides"])  # type: ignore[call-overload, no-any-return, unused-ignore]


def checked(given: Sequence[Any], arguments: Sequence[Mapping[str, Any]], device: str = "cpu") -> list[Any]:
    """Check arguments, and return them with the strides that the program needs. Raises ExportError."""
    symbols: dict[str, int] = {}
    pairs = enumerate(zip(given, arguments, strict=True))
    return [_checked(value, said, n, symbols, device) for n, (value, said) in pairs]


def _checked(value: Any, said: Mapping[str, Any], number: int, symbols: dict[str, int], device: str) -> Any:
    """Check an argument's dtype and sizes, and return it with the strides that the program needs."""
    if "constant" in said:
        if value != said["constant"]:
            raise ExportError(f"dcompile: argument {number} is {value!r}, but the model was exported with "
                              f"{said['constant']!r}")  # fmt: skip
        return value
    if "number" in said:
        if not isinstance(value, (int, float)):
            raise ExportError(f"dcompile: argument {number} is a {type(value).__name__}, not a number")
        return value
    device = said.get("device", device)
    wanted = f"{said['dtype']} of shape {_shown(said['shape'])} on {'the CPU' if device == 'cpu' else 'a GPU'}"
    if not isinstance(value, torch.Tensor) or value.device.type != device or len(value.shape) != len(said["shape"]):
        raise ExportError(f"dcompile: argument {number} should be {wanted}")
    fits = str(value.dtype) == f"torch.{said['dtype']}"
    for size, allowed in zip(value.shape, said["shape"], strict=True):
        if isinstance(allowed, int):
            fits = fits and size == allowed
        else:
            name, low, high = allowed
            fits = fits and low <= size <= (size if high is None else high) and symbols.setdefault(name, size) == size
    if not fits:
        raise ExportError(f"dcompile: argument {number} is {value.dtype} of shape {[*value.shape]}, not {wanted}")
    return _with_strides(value, said["strides"])


def _with_strides(value: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a tensor with these strides, or in row-major order for None: itself, or a copy."""
    if strides is None:
        return value.contiguous()
    if value.stride() == tuple(strides):
        return value
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    with torch.no_grad():
        return made.copy_(value)


def _shown(shape: Sequence[Any]) -> str:
    sizes = (str(size) if isinstance(size, int) else f"{size[0]} ({size[1]} to {size[2] or 'any'})" for size in shape)
    return f"[{', '.join(sizes)}]"
