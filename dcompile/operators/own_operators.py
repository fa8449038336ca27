"""Define torch operators of dcompile: an implementation, and a function for tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

Functions: TypeAlias = "tuple[Callable[..., Any], Callable[..., Any]]"
"""(implementation, function from the same arguments to results without values)."""
ANY_DEVICE = "CompositeExplicitAutograd"


def define_operators(
    namespace: str, schemas: Iterable[str], functions: Mapping[str, Functions], device: str = ANY_DEVICE
) -> torch.library.Library:
    """Define operators. They exist as long as the returned library.

    `functions`: name of each schema, with its overload -> its functions. `device`: torch's dispatch key.
    """
    library = torch.library.Library(namespace, "DEF")  # type: ignore[no-untyped-call, unused-ignore]
    for schema in schemas:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call, unused-ignore]
        implementation, traced = functions[name]
        library.impl(name, implementation, device)  # type: ignore[no-untyped-call, unused-ignore]
        torch.library.register_fake(f"{namespace}::{name}", traced, lib=library)
    return library
