"""What torch saves of an ahead-of-time compilation: AOTAutograd's record of a graph, and Dynamo's function.

AOTAutograd keeps in its record what its wrappers need: which inputs change, which results are views, where gradients
go. torch pickles the record. The programs in it are objects of ours, which pickle as bytes.

What `aot_compile` saves of a function is made whole. torch replaces the `.grad` of a guard's tensor by a mark where it
pickles guards, and fails to assign that mark where it loads them. A function whose arguments had gradients when it was
compiled could be saved, but not loaded. Dynamo's code names modules by globals of its own process, as `collections`
where it makes an OrderedDict (outputs of transformers). torch 2.11 also leaves out builtins.
"""

from __future__ import annotations

import builtins
import contextlib
import types
import unittest.mock
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch


def output_code() -> Any:
    """Base class of compiled programs that AOTAutograd's record may hold."""
    from torch._inductor.output_code import OutputCode

    return OutputCode


@contextlib.contextmanager
def recording_programs() -> Iterator[None]:
    """Have AOTAutograd make its record of a graph, whose compiled programs are objects of `output_code()`.

    It compiles the backward at once. It neither looks for the record in torch's cache nor writes it there: the cache
    knows graphs by their text, whichever compiler they were for.
    """
    import torch._functorch.config as config
    from torch._functorch._aot_autograd import autograd_cache

    settings = {
        "donated_buffer": False,  # see `aot.aot_compile`
        "enable_autograd_cache": True,
        "force_autograd_cache": True,
        "strict_autograd_cache": True,
        "bundled_autograd_cache": True,
        "force_non_lazy_backward_lowering": True,
        "graphsafe_rng_functionalization": False,
    }
    known = {name: value for name, value in settings.items() if hasattr(config, name)}

    def own_key(*_args: Any, **_kwargs: Any) -> tuple[str, list[str]]:
        return f"dcompile-{uuid.uuid4()}", []

    def keep_nothing(_key: str, entry: Any, remote: bool) -> None:
        entry.serialized_bw_module = None  # the graph's Python text, for compiled autograd alone
        entry.pre_save()

    with (
        config.patch(known),  # type: ignore[no-untyped-call, unused-ignore]
        torch.compiler.config.patch(force_disable_caches=False),  # type: ignore[attr-defined, unused-ignore]
        unittest.mock.patch.object(autograd_cache, "autograd_cache_key", own_key),
        unittest.mock.patch.object(autograd_cache.AOTAutogradCache, "save", keep_nothing),
    ):
        yield


def is_recorded(compiled: Callable[..., Any]) -> bool:
    """Whether AOTAutograd has made the record of a compiled graph."""
    return getattr(compiled, "serialize", None) is not None


def to_bytes(compiled: Callable[..., Any]) -> bytes:
    """Pickle AOTAutograd's record of a compiled graph, as torch's container does."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    data: bytes = Bundled.serialize_compile_artifacts(Bundled(compiled))
    return data


def from_bytes(data: bytes) -> Callable[..., Any]:
    """Rebuild a compiled graph from its pickled record."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

    loaded: Callable[..., Any] = Bundled.deserialize_compile_artifacts(data).compiled_fn
    return loaded


@contextlib.contextmanager
def unread_gradients_left_out() -> Iterator[None]:
    """Pickle tensors of guards without a `.grad` that no guard reads."""
    from torch._dynamo import guards

    pickler: Any = getattr(guards, "GuardsStatePickler", None)
    if not hasattr(pickler, "_unpickle_tensor"):
        yield
        return
    own = pickler.reducer_override

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = own(self, obj)
        if not isinstance(reduced, tuple) or reduced[0] != type(self)._unpickle_tensor:
            return reduced
        function, (*others, grad) = reduced
        is_read = not isinstance(grad, torch.Tensor) or id(grad) in self.guard_tree_values
        return function, (*others, grad if is_read else None)

    with unittest.mock.patch.object(pickler, "reducer_override", reducer_override):
        yield


@contextlib.contextmanager
def globals_saved() -> Iterator[None]:
    """Save with a function the modules, by name, and the builtins that its code reads."""
    from torch._dynamo import convert_frame

    captured: Any = getattr(convert_frame, "GraphCaptureOutput", None)
    if not hasattr(captured, "get_runtime_env"):
        yield
        return
    own = captured.get_runtime_env

    def get_runtime_env(self: Any) -> Any:
        environment, known = own(self), self.f_globals
        for name in getattr(environment, "external_refs", ()):
            if isinstance(module := known.get(name), types.ModuleType):
                environment.import_sources.setdefault(name, module.__name__)
            elif name not in known and hasattr(builtins, name):
                environment.used_globals.setdefault(name, getattr(builtins, name))
        return environment

    with unittest.mock.patch.object(captured, "get_runtime_env", get_runtime_env):
        yield
