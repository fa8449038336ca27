"""Private torch names, by area. Functions import them at their first call, so that runtime/ loads no compiler.

Supported: torch 2.11 to 2.15. A name that may be missing has a probe here, and its caller works without it.
"""

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
    losses,
    shapes,
    shard_extensions,
    sizes,
    storage_holders,
    storage_offsets,
    tensors,
    torch_logs,
    versions,
    zero,
)
from dcompile.compat.patches import (
    lean_wrappers,
    on_demand,
    partitioner,
    skip_frame_eval,
    traced_sizes,
)
