"""Description of a patch of torch, and the plainest way to make one."""

from __future__ import annotations

import contextlib
import functools
import re
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dcompile.compat.versions import torch_version

Stage: TypeAlias = Literal["frame", "graph", "partition"]
"""frame: Dynamo compiles a frame; graph: AOTAutograd traces a graph; partition: a joint graph is partitioned."""
Version: TypeAlias = tuple[int, int]
FIRST, LAST = (2, 11), (2, 15)
GUARDS = "torch._dynamo.guards.GuardBuilder"
GRAPH_COMPILE = "torch._functorch._aot_autograd.graph_compile"
TRACERS = (f"{GRAPH_COMPILE}.aot_dispatch_autograd_graph", f"{GRAPH_COMPILE}.aot_dispatch_base_graph")
"""Names of torch's that several patches replace, or parts of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRequest:
    """Arguments for the patches of a stage."""

    example_inputs: Sequence[Any] = ()
    sync_batch_norm: Callable[..., Any] | None = None
    group_experts: Callable[..., Any] | None = None
    told_of_hooks: bool = False
    layers_once: bool = False
    certain_branches: bool = False
    eager_kernels: bool = False
    fusible: tuple[frozenset[Any], frozenset[Any]] | None = (frozenset(), frozenset())
    minimum_cut: Callable[..., Any] | None = None
    choose_saved: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class TorchPatch:
    """One patch. `apply` makes it: a context manager, unless `undone` says otherwise."""

    apply: Callable[..., Any]
    targets: tuple[str, ...]
    """Dotted names of the replaced objects."""
    kind: Literal["correctness", "speed", "takeover"]
    """takeover: dcompile's behavior replaces torch's."""
    reason: str
    stages: tuple[Stage, ...] = ()
    given: Callable[[PatchRequest], tuple[Any, ...]] = lambda _: ()
    """Selects the arguments of `apply` from the request."""
    first: Version = FIRST
    last: Version = LAST
    """First version of torch that needs the patch."""
    undone: str = "when its stage ends"

    @property
    def name(self) -> str:
        return self.apply.__name__

    def applies_to(self, version: Version) -> bool:
        """Whether a version of torch needs the patch."""
        return self.first <= version <= self.last

    @property
    def versions(self) -> str:
        """Range of versions as text."""
        ends = [f"{major}.{minor}" for major, minor in dict.fromkeys((self.first, self.last))]
        return " to ".join(ends)


def replaced_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace an attribute by `make(original)` in a context. Without such an attribute, nothing changes."""
    original = getattr(owner, name, None)
    return contextlib.nullcontext() if original is None else unittest.mock.patch.object(owner, name, make(original))


@functools.cache
def installed_version() -> Version:
    """Return major and minor version of the installed torch."""
    found = re.match(r"(\d+)\.(\d+)", torch_version())
    assert found is not None, "checked by `versions.check_torch`"
    return int(found[1]), int(found[2])
