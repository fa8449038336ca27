"""Forward and backward program of a graph that `aot_compile` has compiled, inside AOTAutograd's record of the graph.

torch pickles the record. A program in it is bytes: an archive as `dcompile.export` writes it. It is checked and loaded
without pickle, and without a C++ compiler.
"""

from __future__ import annotations

from typing import Any

from dcompile import compat
from dcompile.errors import ExportError
from dcompile.results import result_steps
from dcompile.results.unshare_gradients import keep_apart, shared_pairs
from dcompile.runtime.program.exported import LoadedFiles, checked, open_archive

_Base: Any = compat.aot_bundle.output_code()


class WrittenProgram(_Base):  # type: ignore[misc]
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
