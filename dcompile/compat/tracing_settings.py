"""TorchDynamo's settings while a frame is compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dcompile.compat.patches.registry import patched
from dcompile.compat.patches.torch_patch import PatchRequest


@contextlib.contextmanager
def tracing_settings(
    dynamic: bool | None = None,
    sync_batch_norm: Callable[..., Any] | None = None,
    told_of_hooks: bool = False,
    group_experts: Callable[..., Any] | None = None,
    late_sizes: bool = False,
    sizes_alone: bool = False,
    layers_once: bool = False,
    certain_branches: bool = False,
) -> Iterator[None]:
    """Dynamo's settings while a frame is compiled with dcompile.

    They are restored afterwards, so no other backend sees them. `dynamic` as in torch.compile: sizes are symbols from
    the start, never, or once they have changed. `sync_batch_norm` is traced in place of the autograd Function of
    torch.nn.SyncBatchNorm. `told_of_hooks`: an argument of the frame tells whether hooks for saved tensors are traced
    with it. `group_experts(loop, grouped)` returns the function to trace in place of transformers' loop over experts.
    `late_sizes`: operations with data-dependent result sizes (nonzero, masks) break no graph. `sizes_alone`: with
    `dynamic`, floats of modules and arguments stay constants. `layers_once`: calls of equal layers are traced twice,
    and copied for the others. `certain_branches`: branches on random numbers that go one way break no graph.
    """
    import torch._dynamo.config as config

    settings = _settings(dynamic, late_sizes, sizes_alone)
    request = PatchRequest(
        sync_batch_norm=sync_batch_norm,
        told_of_hooks=told_of_hooks,
        group_experts=group_experts,
        layers_once=layers_once,
        certain_branches=certain_branches,
    )
    with config.patch(settings), patched("frame", request):  # type: ignore[no-untyped-call, unused-ignore]
        yield


def _settings(dynamic: bool | None, late_sizes: bool, sizes_alone: bool) -> dict[str, Any]:
    """Return the settings by name, as far as this torch has them."""
    import logging

    import torch
    import torch._dynamo.config as config

    # DDPOptimizer would split the graph at bucket limits and hide the identity of parameters. Models log in their loss
    # (transformers' warning_once): dropping the call keeps the graph whole.
    ignored = set(getattr(config, "ignore_logging_functions", ()))
    ignored |= {logging.Logger.warning, logging.Logger.info, logging.Logger.debug, logging.Logger.error}
    ignored |= _transformers_logging()
    settings: dict[str, Any] = {"optimize_ddp": False, "ignore_logging_functions": ignored}
    if late_sizes:
        settings["capture_dynamic_output_shape_ops"] = True
    if dynamic is not None:
        settings["assume_static_by_default"] = not dynamic
    if sizes_alone and hasattr(config, "specialize_float"):
        settings["specialize_float"] = True
    if dynamic:
        settings["fake_tensor_cache_enabled"] = False  # see sizes.remembering_numbers_alone
    if dynamic is False:
        settings["automatic_dynamic_shapes"] = False
    # torch 2.11 does not guard a parameter while it is the same object: it may have been frozen, converted or
    # transposed. A guard takes 0.1 us; 2.13 checks it in any case.
    if hasattr(config, "skip_tensor_guards_with_matching_dict_tags"):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if hasattr(config, "skip_fsdp_guards"):
        settings["skip_fsdp_guards"] = False  # FSDP1: guard a module's training mode like elsewhere
    # Traced code remembers tensors by weak references. Parameters that have some cannot be swapped
    # (torch.__future__.set_swap_module_params_on_conversion). Dynamo drops the references for backends that it knows.
    if hasattr(config, "invalidate_compile_context_weakrefs"):
        settings["invalidate_compile_context_weakrefs"] = True
    # Recurrent layers become dcompile's operators, except under autocast, which knows only torch's own.
    if hasattr(config, "allow_rnn") and not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        settings["allow_rnn"] = True
    if keeps_static_graphs():
        settings["automatic_dynamic_exclusion_guard"] = True
    # This marks each call for profilers, even without one: 2 of 17 us of a compiled call (docs/lab/runtime.md, R3).
    # After a kernel that evicted the cache, the code of each Python call is fetched from memory.
    if hasattr(config, "record_runtime_overhead"):
        settings["record_runtime_overhead"] = False
    return settings


def keeps_static_graphs() -> bool:
    """Whether this torch keeps a shape with a static graph on that graph when a dynamic graph fits as well.

    Otherwise Dynamo tries the newest graph first, so that one unusual batch moves the usual shape to the dynamic
    program.
    """
    import torch._dynamo.config as config

    return hasattr(config, "automatic_dynamic_exclusion_guard")


def _transformers_logging() -> set[Any]:

    module = sys.modules.get("transformers.utils.logging")
    names = ("warning_once", "warning_advice", "info_once")
    return {getattr(module, name) for name in names if hasattr(module, name)} if module else set()
