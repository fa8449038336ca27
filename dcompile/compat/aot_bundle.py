"""AOTAutograd's own form of a compiled training graph that is saved: its record of the graph, and two programs.

AOTAutograd keeps in it what its wrappers need: which inputs change, which results are views, where gradients go. torch
pickles the record. The programs in it are objects of ours, which pickle as bytes.
"""

from __future__ import annotations

import contextlib
import unittest.mock
import uuid
from collections.abc import Callable, Iterator
from typing import Any


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
    import torch
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
