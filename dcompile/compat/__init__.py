"""Private torch names, by area. Functions import them at their first call, so that runtime/ loads no compiler.

Supported: torch 2.11 to 2.15. A name that may be missing has a probe here, and its caller works without it.
"""

from dcompile.compat import (
    alone,
    aot,
    composable,
    ddp,
    deepspeed,
    dispatch_watch,
    dtensor,
    dynamo,
    fsdp1,
    fsdp2,
    groups,
    guards,
    hooks,
    inductor,
    shapes,
    sizes,
    storage_offsets,
    tensors,
    torch_logs,
    versions,
    zero,
)
from dcompile.compat.patches import compile_call, cse, index_strides, lean_wrappers, skip_frame_eval, symbolic_views

__all__ = [
    "alone",
    "aot",
    "compile_call",
    "composable",
    "cse",
    "ddp",
    "deepspeed",
    "dispatch_watch",
    "dtensor",
    "dynamo",
    "fsdp1",
    "fsdp2",
    "groups",
    "guards",
    "hooks",
    "index_strides",
    "inductor",
    "lean_wrappers",
    "shapes",
    "sizes",
    "skip_frame_eval",
    "storage_offsets",
    "symbolic_views",
    "tensors",
    "torch_logs",
    "versions",
    "zero",
]
