"""DeepSpeed: the engine around a module, ZeRO's storage of parameters, and its way of collecting gradients.

Nothing here imports DeepSpeed: where there is an engine, it is imported.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from dcompile.compat.zero import stock_linear

_ENGINE = "deepspeed.runtime.engine"
_PRE = "_forward_pre_hooks"
_ENGINE_NAMES = ("module", "optimizer", "zero_optimization_stage", "is_gradient_accumulation_boundary",
                 "inside_no_sync_ctxt", "allreduce_gradients", "seq_data_parallel_group", "communication_data_type",
                 "has_moe_layers", "gradient_average", "zero_offload_optimizer", "zero_offload_param")  # fmt: skip
_FLAT_NAMES = ("round_robin_bit16_groups", "bit16_groups_flat", "partition_size", "real_dp_process_group",
               "averaged_gradients", "all_grad_tensors", "_grad_acc_hooks", "create_gradient_handling_hooks",
               "reduce_bucket_size", "partition_gradients", "use_grad_accum_attribute",
               "gradient_accumulation_dtype")  # fmt: skip
_SHARD_NAMES = ("parameter_offload", "_grad_acc_hooks", "_leaf_module_hooks", "create_reduce_and_remove_grad_hooks",
                "independent_gradient_partition_epilogue", "micro_step_id",
                "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")  # fmt: skip
_OPTIMIZERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
_PARAMETER_NAMES = ("ds_id", "ds_tensor", "ds_numel", "ds_shape", "ds_process_group")


# --- the engine -------------------------------------------------------------------------------------------------------


def is_engine(thing: Any) -> bool:
    """Whether this is a DeepSpeedEngine."""
    module = sys.modules.get(_ENGINE)
    return module is not None and isinstance(thing, module.DeepSpeedEngine)


class EngineHooks:
    """Hooks of an engine on its module. Removed from the module, they run around a compiled call, and are not traced.

    They manage timers and flags. If traced, a timer's counter would be guarded, and the whole model would be recompiled
    in the second and the third step.
    """

    def __init__(self, engine: Any, places: list[tuple[str, int]]) -> None:
        """`places`: (table of the module's, key in it) of each hook."""
        self._engine = weakref.ref(engine)
        self._places = places
        self._before: list[Any] = []
        self._after: list[Any] = []
        self.taken = False

    @property
    def engine(self) -> Any:
        """The engine; None if it no longer exists."""
        return self._engine()

    def take(self) -> None:
        """Remove the hooks from the module."""
        known = vars(self.engine.module)
        for kind, key in self._places:
            hook = known[kind].pop(key, None)
            known[f"{kind}_with_kwargs"].pop(key, None)
            if hook is not None:
                (self._before if kind == _PRE else self._after).append(hook)
        self.taken = True

    def around(self, call: Callable[..., Any], belongs: Callable[[], bool]) -> Callable[..., Any]:
        """Wrap `call` with the hooks before and after it.

        `belongs`: whether the module itself is called through this call, so that no other caller misses the hooks.
        """

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self.taken:
                if not belongs():
                    return call(*args, **kwargs)
                self.take()
            owner = self.engine.module
            for hook in self._before:
                changed = hook(owner, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            with stock_linear():
                result = call(*args, **kwargs)
            for hook in self._after:
                changed = hook(owner, args, result)
                if changed is not None:
                    result = changed
            return result

        return hooked


def hooks_on(module: Any) -> EngineHooks | None:
    """Hooks of a DeepSpeed engine on its module; None if there are none."""
    if _ENGINE not in sys.modules or not hasattr(module, _PRE):
        return None
    places: list[tuple[str, int]] = []
    engine = None
    for kind in (_PRE, "_forward_hooks"):
        for key, hook in vars(module)[kind].items():
            owner = _owner(hook) if getattr(hook, "__module__", "") == _ENGINE else None
            if owner is not None and owner.module is module:
                engine = owner
                places.append((kind, key))
    return None if engine is None else EngineHooks(engine, places)


def _owner(hook: Any) -> Any:
    """Engine in a hook's closure, or None."""
    cells = getattr(hook, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if is_engine(cell.cell_contents)), None)


def stage_of(engine: Any) -> int:
    """ZeRO's stage, 0 to 3."""
    return int(engine.zero_optimization_stage())


def process_group(engine: Any) -> Any:
    """Process group over which gradients are averaged."""
    group = engine.seq_data_parallel_group
    return dist.group.WORLD if group is None else group


def ends_step(engine: Any) -> bool:
    """Whether the current micro-step is the last one of a step."""
    return bool(engine.is_gradient_accumulation_boundary())


def reduces(engine: Any) -> bool:
    """Whether a backward that runs now reduces gradients: stages 0 and 1 do so at the end of a step only."""
    if engine.inside_no_sync_ctxt:
        return False
    return stage_of(engine) >= 2 or ends_step(engine)


def is_coalescing(engine: Any) -> bool:
    """Whether DeepSpeed itself reduces gradients of several backwards (`engine.coalesce_grad_reduction`)."""
    return bool(getattr(engine.optimizer, "_coalesce_grad_reduction", False))


def take_reduction(engine: Any, reduce: Callable[[], None]) -> None:
    """Call `reduce` where the engine itself would reduce gradients, at the end of a backward."""

    def allreduce_gradients(*_: Any, **__: Any) -> None:
        reduce()

    engine.allreduce_gradients = allreduce_gradients


def give_back_reduction(engine: Any) -> None:
    """Undo `take_reduction`."""
    vars(engine).pop("allreduce_gradients", None)


# --- what can be taken over -------------------------------------------------------------------------------------------


def missing_names(engine: Any) -> list[str]:
    """Private names that a takeover needs and this DeepSpeed lacks."""
    missing = [name for name in _ENGINE_NAMES if not hasattr(engine, name)]
    if missing:
        return missing
    stage, optimizer = stage_of(engine), engine.optimizer
    if stage == 0 or optimizer is None or type(optimizer).__name__ == "BF16_Optimizer":
        return []
    names = _SHARD_NAMES if stage == 3 else _FLAT_NAMES
    missing = [name for name in names if not hasattr(optimizer, name)]
    if stage == 3:
        parameters = list(engine.module.parameters())
        missing += [name for name in _PARAMETER_NAMES if not all(hasattr(p, name) for p in parameters)]
    return missing


def objections(engine: Any) -> list[str]:
    """Features in use by this engine that only DeepSpeed itself supports."""
    return list(dict.fromkeys((*_of_engine(engine), *_of_optimizer(engine))))


def _of_engine(engine: Any) -> Iterator[str]:
    if getattr(engine, "pipeline_parallelism", False):
        yield "pipeline parallelism"
    if engine.mpu is not None or _setting_of(engine, "autotp_size") > 1:
        yield "tensor parallelism by DeepSpeed"
    if engine.has_moe_layers:
        yield "MoE layers of DeepSpeed's, with process groups of their own"
    if getattr(engine, "sequence_parallel_size", 1) > 1:
        yield "sequence parallelism"
    if _offloads(engine.zero_offload_optimizer()) or _offloads(engine.zero_offload_param()):
        yield "optimizer states or parameters are offloaded"
    if getattr(engine, "zenflow", False):
        yield "zenflow"
    if _setting_of(engine, "zero_hpz_partition_size") > 1 or _setting_of(engine, "zero_quantized_weights"):
        yield "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights)"
    if _setting_of(engine, "zero_quantized_gradients") or _setting_of(engine, "zero_quantized_nontrainable_weights"):
        yield "ZeRO++ (quantized gradients or weights)"
    if not _setting_of(engine, "managed_gradient_accumulation", default=True):
        yield "managed_gradient_accumulation is false"
    if not _setting_of(engine, "postscale_gradients", default=True):
        yield "prescale_gradients"
    if _setting_of(engine, "gradient_predivide_factor", default=1.0) != 1.0:
        yield "gradient_predivide_factor"
    if not engine.gradient_average:
        yield "gradients are summed up, not averaged"
    if _setting_of(engine, "sparse_gradients_enabled"):
        yield "sparse_gradients"
    if _setting_of(engine, "torch_autocast_enabled"):
        yield "torch_autocast, which exchanges gradients in several dtypes"
    if getattr(engine, "_is_compiled_autograd_enabled", False):
        yield "compiled autograd"


def _of_optimizer(engine: Any) -> Iterator[str]:
    stage, optimizer = stage_of(engine), engine.optimizer
    kind = type(optimizer).__name__
    if optimizer is None or kind in ("DummyOptim", "DeepSpeedZeRoOffload"):
        yield "the engine has no optimizer"
    elif kind == "BF16_Optimizer":
        yield (
            "BF16_Optimizer accumulates gradients in float32 before they are reduced; "
            "leave out data_types.grad_accum_dtype, or use stage 2"
        )
    elif stage and kind != _OPTIMIZERS[stage]:
        yield f"an optimizer of another kind ({kind})"
    elif stage == 1 and optimizer.use_grad_accum_attribute:
        yield "gradients are accumulated in another dtype than the model's before they are reduced (grad_accum_dtype)"
    parameters = list(engine.module.parameters())
    if any(getattr(parameter, "use_muon", False) for parameter in parameters):
        yield "Muon, which needs whole gradients"
    if any(not parameter.is_floating_point() for parameter in parameters):
        yield "a parameter is not of floating point"
    if stage == 3 and len({id(parameter.ds_process_group) for parameter in parameters}) > 1:
        yield "parameters are spread over several process groups"


def _setting_of(engine: Any, name: str, default: Any = 0) -> Any:
    found = getattr(engine, name, None)
    return default if found is None else found()


def _offloads(config: Any) -> bool:
    device = getattr(config, "device", None)
    return device is not None and str(getattr(device, "value", device)) != "none"
