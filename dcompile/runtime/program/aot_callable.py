"""Callables for graphs that `aot_compile` has compiled, in the form that torch's container saves and loads.

torch's container pickles. Our part in it is bytes: archives as `dcompile.export` writes them. They are checked and
loaded without pickle, and without a C++ compiler. Of a graph with a backward, AOTAutograd's record is pickled, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import ExportError
from dcompile.runtime.program.exported import FORMAT, checked, open_archive, torch_range

_Base: Any = compat.dynamo.serializable_callable()
_HEAD = f"dcompile {FORMAT}, torch {torch_range()}\n".encode()
"""First line of a training function's bytes: format and range of torch. The record and its SHA-256 come after it."""
_DIGEST_BYTES = 32


class AheadOfTimeProgram(_Base):  # type: ignore[misc]
    """A program called by Dynamo's code with flat arguments, returning flat results. It computes without gradients."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive
        self._files = open_archive(archive)
        manifest = self._files.manifest
        self._arguments: list[dict[str, Any]] = manifest["arguments"]
        self._changed: list[tuple[int, int]] = [tuple(entry) for entry in manifest["changed"]]
        self._results: int = manifest["results"]
        """Number of results that are new values of changed arguments. They come first."""

    def __call__(self, *args: Any) -> list[Any]:
        if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            raise ExportError("dcompile: compiled ahead of time for inference; call it under torch.no_grad()")
        results = self._files.run(checked(args, self._arguments))
        with torch.no_grad():
            for place, argument in self._changed:
                args[argument].copy_(results[place])
        return results[self._results :]

    @classmethod
    def serialize_compile_artifacts(cls, fn: AheadOfTimeProgram) -> bytes:
        """Return the archive."""
        return fn._archive

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> AheadOfTimeProgram:
        """Load the program of an archive. Raises ExportError if it is damaged, or for another torch or machine."""
        return cls(data)


class AheadOfTimeTraining(_Base):  # type: ignore[misc]
    """A graph with a backward, called by Dynamo's code with flat arguments, returning flat results."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: AheadOfTimeTraining) -> bytes:
        """Return AOTAutograd's record, pickled, with the archives of both programs in it, after a line of versions."""
        record = compat.aot_bundle.to_bytes(fn._compiled)
        return _HEAD + hashlib.sha256(record).digest() + record

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> AheadOfTimeTraining:
        """Rebuild the graph. Raises ExportError for programs that are damaged, or for another torch or machine."""
        head, _, record = data.partition(b"\n")
        if head + b"\n" != _HEAD:  # before torch unpickles what another torch has pickled
            found, here = (text.decode(errors="replace").strip() for text in (head[:80], _HEAD))
            raise ExportError(f"dcompile: this function was compiled for {found!r}, here is {here!r}; compile it again")
        digest, record = record[:_DIGEST_BYTES], record[_DIGEST_BYTES:]
        if hashlib.sha256(record).digest() != digest:
            raise ExportError("dcompile: this compiled function is damaged: its checksum differs; compile it again")
        return cls(compat.aot_bundle.from_bytes(record))
