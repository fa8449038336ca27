"""DistributedDataParallel and its reducer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    BuiltinCommHookType,
    DebugLevel,
    _register_comm_hook,
    get_debug_level,
)
from torch.nn.parallel import DistributedDataParallel

from dcompile.compat.autograd import at_end_of_backward


def active_ddp() -> DistributedDataParallel | None:
    """DDP module whose forward is running, or None."""

    module = sys.modules.get("torch.nn.parallel.distributed")
    return module.DistributedDataParallel._active_ddp_module if module else None


def reduces_any(tensors: Iterable[Any]) -> bool:
    """Whether a DDP module's forward is running, and its reducer waits for the gradient of one of these tensors."""
    ddp = active_ddp()
    if ddp is None:
        return False
    parameters = {id(parameter) for parameter in ddp.parameters() if parameter.requires_grad}
    return any(id(tensor) in parameters for tensor in tensors)


def missing_names(ddp: Any) -> list[str]:
    """Private names that a takeover needs and this torch lacks."""
    names = (
        "_remove_autograd_hooks", "_module_parameters", "_comm_hooks", "_join_config", "mixed_precision", "reducer",
        "_delay_all_reduce_all_params", "_use_python_reducer", "require_backward_grad_sync", "bucket_bytes_cap",
        "logger", "bucket_bytes_cap_default", "_build_params_for_reducer", "_ddp_init_helper", "process_group",
    )  # fmt: skip
    engine = ("_will_engine_execute_node", "_current_graph_task_id", "_storage_Use_Count")
    missing = [name for name in names if not hasattr(ddp, name)]
    return missing + [f"torch._C.{name}" for name in engine if not hasattr(torch._C, name)]


def parameters(ddp: Any, module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names (within `module`) and parameters that this DDP synchronizes, in its order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [(names[id(parameter)], parameter) for parameter in ddp._module_parameters if id(parameter) in names]


def objections(ddp: Any, module: torch.nn.Module) -> list[str]:
    """Features in use by this DDP, of `module`, that only its own reducer supports."""
    found = {
        "a communication hook is registered": wire(ddp) is None,
        "the Join context manager is on": bool(ddp._join_config.enable),
        "DDP mixed precision is on": ddp.mixed_precision is not None,
        "all-reduces are delayed (delay_all_reduce_named_params)": bool(
            ddp._delay_all_reduce_all_params or getattr(ddp, "_delay_all_reduce_params", None)
        ),
        "DDP was built with the python reducer": bool(ddp._use_python_reducer),
        "parameters are on several devices": bool(ddp.is_multi_device_module),
        "a module asks for sparse gradients": any(
            isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse for part in module.modules()
        ),
    }
    return [reason for reason, holds in found.items() if holds]


def makes_parameters_anew(module: torch.nn.Module) -> bool:
    """Whether DDP has replaced DTensor parameters by local tensors, which each forward converts again.

    `DistributedDataParallel(model, device_mesh=...)` does that. After the first forward, Dynamo finds tensors where it
    has traced parameters. In torch 2.13, the second backward raises with any backend.
    """
    return any(hasattr(parameter, "_st_info") for parameter in module.parameters())


def wire(ddp: Any) -> str | None:
    """Dtype in which this DDP module's communication hook sends gradients; "own" if it casts nothing.

    "" without a hook. None if only the reducer can call it: a user's hook, several hooks, or another group than DDP's.
    """
    if not ddp._comm_hooks:
        return _BUILTIN_WIRES.get(_builtin_hook(ddp))
    (hook, state), *others = ddp._comm_hooks
    # without a state, these hooks use the default group, whichever DDP has
    same_group = (dist.group.WORLD if state is None else state) is ddp.process_group
    return _wire_of_hook(hook) if same_group and not others else None


_BUILTIN_WIRES = {"": "", "BuiltinCommHookType.ALLREDUCE": "own", "BuiltinCommHookType.FP16_COMPRESS": "float16"}
"""Name of a hook of the reducer's own, in C++, as DDP logs it -> dtype in which it sends gradients."""


def _builtin_hook(ddp: Any) -> str:
    """Name of the reducer's own communication hook, which DDP itself does not keep; "" without one."""
    return str(ddp._get_ddp_logging_data().get("comm_hook") or "")


def _wire_of_hook(hook: Any) -> str | None:
    """Dtype in which one of torch's hooks sends gradients, wrapped or not; None for any other hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    known = (
        (default_hooks.allreduce_hook, "own"),
        (default_hooks.fp16_compress_hook, "float16"),
        (default_hooks.bf16_compress_hook, "bfloat16"),
    )
    wrappers = ((default_hooks.fp16_compress_wrapper, "float16"), (default_hooks.bf16_compress_wrapper, "bfloat16"))
    for make, dtype in wrappers:  # closures over the hook that they cast for
        name = f"{make.__qualname__}.<locals>"
        if getattr(hook, "__module__", "") == make.__module__ and hook.__qualname__.startswith(name):
            inner = [cell.cell_contents for cell in hook.__closure__ or ()]
            return dtype if inner == [default_hooks.allreduce_hook] else None
    return next((dtype for ours, dtype in known if ours is hook), None)


def allows_unused(ddp: Any) -> bool:
    """Whether ranks may use different parameters in a step."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


def bucket_bytes(ddp: Any) -> tuple[int, ...]:
    """Bytes at which DDP closes its buckets, in the order of reduction: two or more; the last is for all others."""
    cap = int(ddp.bucket_bytes_cap)
    each = tuple(map(int, getattr(ddp, "bucket_bytes_cap_list", ())))  # from torch 2.13 on
    if each:
        return each if len(each) > 1 else each * 2
    return (int(_DEFAULT_FIRST_BUCKET_BYTES) if ddp.bucket_bytes_cap_default else cap), cap


def hold_static_graph(ddp: Any) -> bool:
    """Keep a static_graph DDP from queueing its single large reduction. Return whether it would have queued it."""
    if not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued:
        return False
    ddp._static_graph_delay_allreduce_enqueued = True
    return True


def let_go_static_graph(ddp: Any) -> None:
    """Undo `hold_static_graph` within the same forward."""
    ddp._static_graph_delay_allreduce_enqueued = False


def release_static_graph(ddp: Any) -> None:
    """Queue the reduction that `hold_static_graph` prevented; call inside the backward."""
    at_end_of_backward(ddp.reducer._delay_all_reduce)


def is_joining(ddp: Any) -> bool:
    """Whether the Join context manager is on: on all ranks, some of which may have no input."""
    return bool(ddp._join_config.enable)


class LoggingData(NamedTuple):
    """DDP's logging data, with the fields of torch's own class."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


def nothing_logged(_sampled_ns: int) -> tuple[dict[str, str], dict[str, int]]:
    """Logging data of reductions that DDP's own reducer runs, and logs."""
    return {}, {}


class _Logger:
    """DDP's logger, which also reports when a Join context manager enters the module, or a hook is registered.

    DDP notifies nothing else of that before it relies on its reducer, for ranks without inputs and for hooks.
    """

    def __init__(self, logger: Any, wanted: Callable[[str], None]) -> None:
        self.logger = logger
        self.logged: Callable[[int], tuple[dict[str, str], dict[str, int]]] = nothing_logged
        """Strings and numbers to add to the logging data, of a backward begun after a time in nanoseconds."""
        self.errors: list[str] = []
        """Texts of errors that the reducer would have logged."""
        self._wanted = wanted

    def _get_ddp_logging_data(self) -> Any:
        """Return torch's data of strings and numbers, with what programs do in the reducer's place."""
        found = self.logger._get_ddp_logging_data()
        texts, numbers = self.logged(found.ints_map.get("backward_compute_time_start", 0))
        if self.errors:
            texts, numbers = texts | {"error": self.errors[-1]}, numbers | {"has_error": 1}
        return LoggingData(found.strs_map | texts, found.ints_map | numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)

    def _set_uneven_input_join(self) -> None:
        self._wanted("the Join context manager was entered")
        self.logger._set_uneven_input_join()

    def _set_comm_hook_name(self, name: str) -> None:
        self._wanted("a communication hook was registered")
        self.logger._set_comm_hook_name(name)


class _Reducer:
    """DDP's reducer, which also reports when the user prepares it for a backward. DDP's own forward does that, too.

    Accelerate and Lightning call it after a forward under no_sync, to request a reduction in its backward.
    """

    def __init__(self, reducer: Any, prepared: Callable[[], None]) -> None:
        self.reducer, self.prepared = reducer, prepared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None:
        if sys._getframe(1).f_globals.get("__name__") != "torch.nn.parallel.distributed":
            self.prepared()
        self.reducer.prepare_for_backward(outputs)


class _SilentReducer(_Reducer):
    """Reducer that reduces nothing.

    It ends backwards that the user ends by hand (`require_manual_backward_finalization`, since torch 2.15). Gradients
    are reduced once a backward has returned.
    """

    def __init__(
        self, ddp: Any, watched: _Reducer, check: Callable[[], None], used: Callable[[], torch.Tensor | None]
    ) -> None:
        super().__init__(watched.reducer, watched.prepared)
        self._ddp = weakref.ref(ddp)
        self._check = check
        self._used = used

    def _rebuild_buckets(self) -> bool:
        """Check that the prior reduction has finished; there are no buckets to rebuild."""
        self._check()
        return False

    def _get_local_used_map(self) -> torch.Tensor:
        """Return on how many ranks each parameter was used; the reducer's own zeros before the first reduction."""
        found = self._used()
        own: torch.Tensor = self.reducer._get_local_used_map()
        return own if found is None else found

    def _set_manual_finalization_required(self, required: bool) -> None:
        """Ignore the setting. DDP stores it, too, and passes it to a rebuilt reducer (`rebuild_reducer`)."""

    def _should_finalize_after_backward(self) -> bool:
        return True

    def _finalize_backward_manual(self) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.require_manual_backward_finalization:
            raise RuntimeError("finalize_backward() needs require_manual_backward_finalization = True")
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "dcompile: finalize_backward() was called inside a backward; call it once that has returned, as "
                "should_finalize_after_backward says, or give this model options={'distributed': 'stock'}"
            )


def watch_reducer(ddp: Any, wanted: Callable[[str], None], prepared: Callable[[], None]) -> None:
    """Call `wanted`, with the reason, before something needs the reducer itself.

    `prepared` is called when the user, rather than DDP, has prepared it for a backward.
    """
    if not isinstance(ddp.logger, _Logger):
        ddp.logger = _Logger(ddp.logger, wanted)
    if not isinstance(ddp.reducer, _Reducer):
        ddp.reducer = _Reducer(ddp.reducer, prepared)


def leave_reducer(ddp: Any) -> None:
    """Undo `watch_reducer`."""
    if isinstance(ddp.logger, _Logger):
        ddp.logger = ddp.logger.logger
    if isinstance(ddp.reducer, _Reducer):
        ddp.reducer = ddp.reducer.reducer


def silence_reducer(
    ddp: Any,
    check: Callable[[], None],
    logged: Callable[[int], tuple[dict[str, str], dict[str, int]]],
    used: Callable[[], torch.Tensor | None],
) -> None:
    """Remove DDP's reduction from its parameters. Its forward, no_sync and buffer broadcast stay.

    `check` is called where the reducer raises if the prior reduction has not finished: at the start of each forward
    with gradients. `logged`: see `_Logger.logged`. `used`: the map of used parameters after a reduction, or None.
    Relies on: the reducer is watched.
    """
    ddp._remove_autograd_hooks()
    ddp.logger.logged = logged
    ddp.reducer = _SilentReducer(ddp, ddp.reducer, check, used)


def names_parameters() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL, so that the reducer's errors name parameters."""
    return get_debug_level() != DebugLevel.OFF


def log_error(ddp: Any, text: str) -> None:
    """Add an error of the reduction to DDP's logging data. Relies on: the reducer is watched."""
    ddp.logger.errors.append(text)


def rebuild_reducer(ddp: Any, inside_forward: bool) -> None:
    """Restore DDP's reduction with a new reducer, built like its constructor does."""
    builtin = "" if ddp._comm_hooks else _builtin_hook(ddp)
    parameters, sparse = ddp._build_params_for_reducer()
    static = bool(ddp.static_graph)
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), static)
    if static:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if getattr(ddp, "require_manual_backward_finalization", False):
        ddp.require_manual_backward_finalization = True  # of the new reducer
    for hook, state in ddp._comm_hooks:
        _register_comm_hook(ddp.reducer, state, hook)
    if builtin:
        ddp._register_builtin_comm_hook(getattr(BuiltinCommHookType, builtin.rpartition(".")[2]))
    if inside_forward and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        ddp.logger.set_runtime_stats_and_log()
        ddp.reducer.prepare_for_forward()  # DDP.forward has called it on the former reducer


# --- torch.distributed._composable.replicate: a DDP of a module's parameters alone, called by the module's hooks -----
