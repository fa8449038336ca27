"""Callables for graphs that `aot_compile` has compiled, in the form that torch's container saves and loads.

torch's container pickles. Our part in it is bytes: archives as `dcompile.export` writes them. They are checked and
loaded without pickle, and without a C++ compiler. Of a graph with a backward, torch pickles AOTAutograd's record, which
holds an archive each for forward and backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from dcompile import compat
from dcompile.errors import ExportError
from dcompile.results import result_steps
from dcompile.results.unshare_gradients import keep_apart, shared_pairs
from dcompile.runtime.program.exported import FORMAT, LoadedFiles, checked, open_archive, torch_range

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


_TrainingBase: Any = compat.aot_bundle.output_code()


class WrittenProgram(_TrainingBase):  # type: ignore[misc]
    """A program called with a list of arguments, which it empties. It is the same object for its whole life."""

    def __init__(self, archive: bytes) -> None:
        super().__init__()
        self._archive = archive
        self._files: LoadedFiles = open_archive(archive)
        self._boxed_call = True  # wrappers copy it: they call with one list

    def __reduce__(self) -> Any:
        return type(self), (self._archive,)

    def __copy__(self) -> WrittenProgram:
        return self

    def __deepcopy__(self, _memo: Any) -> WrittenProgram:
        return self

    def prepare_for_serialization(self) -> None:
        """Do nothing: the archive is all that is saved."""

    def post_compile(self, _example_inputs: Any, _constants: Any, _settings: Any) -> None:
        """Do nothing: the program is loaded already."""

    def set_triton_bundle(self, _bundle: Any) -> None:
        """Do nothing: the archive holds the kernels."""


class ForwardProgram(WrittenProgram):
    """The forward: results, then what the backward needs. Raises ExportError for arguments that do not fit."""

    def __init__(self, archive: bytes) -> None:
        super().__init__(archive)
        manifest = self._files.manifest
        self._arguments: list[dict[str, Any]] = manifest["arguments"]
        self._steps = [(STEPS[name], plan) for name, plan in manifest["steps"]]

    def __call__(self, args: list[Any]) -> list[Any]:
        for number, (given, fitting) in enumerate(zip(args, checked(args, self._arguments), strict=True)):
            if given is not fitting:  # a copy would not do where the graph writes to it
                raise ExportError(
                    f"dcompile: argument {number} has strides {given.stride()}, but was compiled with those of "
                    f"{fitting.stride()}; pass a tensor that is stored alike"
                )
        results = [*self._files.run(args)]
        args.clear()
        for step, plan in self._steps:
            step(results, plan)
        return results


class BackwardProgram(WrittenProgram):
    """The backward: gradients of the forward's inputs from saved tensors and gradients of the results."""

    def __init__(self, archive: bytes) -> None:
        super().__init__(archive)
        self._tangents: list[int] = self._files.manifest["tangents"]
        self._is_batch = compat.aot.batch_test()
        self._shared: Any = None

    def __call__(self, args: list[Any]) -> list[Any]:
        for place in self._tangents:
            if self._is_batch(args[place]):
                raise ExportError(
                    "dcompile: compiled ahead of time for single gradients, not for a batch of them "
                    "(is_grads_batched=True, vectorize=True); take them one by one"
                )
            args[place] = args[place].resolve_neg()  # kernels read memory
        gradients = [*self._files.run(args)]
        args.clear()
        if self._shared is None:
            self._shared = shared_pairs(gradients)
        return keep_apart(gradients, self._shared)


def _return_views(outputs: list[Any], plan: Any) -> None:
    result_steps.return_views(outputs, dict(plan))


STEPS: dict[str, Any] = {
    "return_views": _return_views,
    "separate_results": result_steps.separate_results,
    "detach_saved_views": result_steps.detach_saved_views,
    "detach_results": result_steps.detach_results,
    "repeat_results": result_steps.repeat_results,
}
"""Steps on results by their names in the manifest."""
