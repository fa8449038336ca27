"""Every private torch name, by area. A function imports what it needs when it is called: runtime/ loads no compiler.

Supported: torch 2.11 to 2.15. A name that may be missing has a probe here, and its caller a way to go on without it.
"""

from dcompile.compat import (
    alone,
    aot,
    composable,
    ddp,
    dtensor,
    dynamo,
    frames,
    fsdp1,
    fsdp2,
    groups,
    guards,
    hooks,
    indexed,
    lean,
    regions,
    shapes,
    sizes,
    storages,
    tensors,
    versions,
    views,
    watching,
)

__all__ = [
    "alone",
    "aot",
    "composable",
    "ddp",
    "dtensor",
    "dynamo",
    "frames",
    "fsdp1",
    "fsdp2",
    "groups",
    "guards",
    "hooks",
    "indexed",
    "lean",
    "regions",
    "shapes",
    "sizes",
    "storages",
    "tensors",
    "versions",
    "views",
    "watching",
]
