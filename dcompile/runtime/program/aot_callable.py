"""Callable for a graph that `aot_compile` has compiled, in the form that torch's container saves and loads.

torch's container pickles. Our part in it is bytes: an archive as `dcompile.export` writes it. It is checked and loaded
without pickle, and without a C++ compiler.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import ExportError
from dcompile.runtime.program.exported import LoadedFiles, checked

_Base: Any = compat.dynamo.serializable_callable()


class AheadOfTimeProgram(_Base):  # type: ignore[misc]
    """A program called by Dynamo's code with flat arguments, returning flat results. It computes without gradients."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive
        with tempfile.TemporaryDirectory(prefix="dcompile-aot-") as folder:
            path = Path(folder) / "program.zip"
            path.write_bytes(archive)
            self._files = LoadedFiles(path)
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
