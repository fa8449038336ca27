"""Private torch names, by area, each loaded at its first use: `import dcompile` loads no torch, runtime/ no compiler.

Areas import at their top what `import torch` has loaded. Functions import the rest, TorchDynamo above all.
Supported: torch 2.11 to 2.15. A name that may be missing has a probe here, and its caller works without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcompile.compat import (
        absent_ranks,
        aot,
        aot_bundle,
        aot_metadata,
        aot_trace,
        attention,
        autograd,
        cache_artifacts,
        composable,
        ddp,
        deepspeed,
        dispatch_watch,
        dynamo,
        flex,
        fsdp1,
        fsdp2,
        grad_scaler,
        groups,
        guards,
        hooks,
        inductor,
        process_state,
        shard_extensions,
        sizes,
        storage_holders,
        storage_offsets,
        tensors,
        versions,
    )
    from dcompile.compat.patches import (
        lean_wrappers,
        on_demand,
        partitioner,
        skip_frame_eval,
        traced_sizes,
    )

_PATCHES = ("lean_wrappers", "on_demand", "partitioner", "skip_frame_eval", "traced_sizes")


def __getattr__(area: str) -> Any:
    """Load an area."""
    try:
        found = importlib.import_module(f"{__name__}.patches.{area}" if area in _PATCHES else f"{__name__}.{area}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {area!r}") from error
    return globals().setdefault(area, found)
