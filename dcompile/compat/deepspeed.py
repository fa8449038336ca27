"""DeepSpeed: the engine around a module, ZeRO's storage of parameters, and its way of collecting gradients.

Nothing here imports DeepSpeed: where there is an engine, it is imported.

Below, the state of ZeRO's optimizers for parameters and gradients, stage by stage.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from dcompile.compat.dispatch_watch import STANDS_IN

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


# --- state of ZeRO's optimizers ---------------------------------------------------------------------------------------


# --- stages 1 and 2: parameters in flat groups, of which each rank updates a part -------------------------------------


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One group of the optimizer's parameters, end to end.

    Each rank owns `part` elements of it, in the order of ranks.
    """

    index: int
    part: int
    places: tuple[tuple[Any, int], ...]
    """(parameter, its offset), in the order of offsets."""


def flat_groups(engine: Any) -> list[FlatGroup]:
    """All groups, in the optimizer's order."""
    optimizer = engine.optimizer
    known = getattr(optimizer, "round_robin_bit16_offsets", None)  # since 0.19: parameters may be aligned
    found: list[FlatGroup] = []
    for index, parameters in enumerate(optimizer.round_robin_bit16_groups):
        sizes = [parameter.numel() for parameter in parameters]
        offsets = [0, *accumulate(sizes)][:-1] if known is None else map(int, known[index])
        places = sorted(zip(parameters, offsets, strict=True), key=lambda place: place[1])
        found.append(FlatGroup(index, int(optimizer.partition_size[index]), tuple(places)))
    return found


def bucket_elements(engine: Any) -> int:
    """Largest number of elements that DeepSpeed would reduce at once."""
    return int(engine.zero_reduce_bucket_size())


class PartGradients(list[Any]):
    """This rank's gradients of a flat group, in the form that the optimizer takes: views of one flat tensor, in order.

    An optimizer that knows `flat_partition` (since 0.19) copies nothing; an older one concatenates the views.
    """

    flat_partition: Any = None


def new_partition(engine: Any, group: FlatGroup, rank: int) -> PartGradients:
    """Zero gradients of this rank's part of a group. Views that belong to no parameter are marked as padding."""
    dtype, device = engine.optimizer.gradient_accumulation_dtype, group.places[0][0].device
    flat = torch.zeros(group.part, dtype=dtype, device=device)
    views, end, first = PartGradients(), 0, rank * group.part
    for parameter, offset in group.places:
        start, stop = max(offset - first, 0), min(offset + parameter.numel() - first, group.part)
        if start >= stop:
            continue
        if start > end:
            views.append(_padding(flat[end:start]))
        whole = stop - start == parameter.numel()
        views.append(flat[start:stop].view(parameter.shape) if whole else flat[start:stop])
        end = stop
    if end < group.part:
        views.append(_padding(flat[end:]))
    views.flat_partition = flat
    return views


def _padding(view: Any) -> Any:
    view._zero_padding = True  # the optimizer leaves it out of norms
    return view


def hand_over(engine: Any, index: int, gradients: Any) -> None:
    """Pass the gradients of a step to the optimizer."""
    engine.optimizer.averaged_gradients[index] = gradients
    engine.optimizer.all_grad_tensors[index] = None


def holds(engine: Any, index: int, gradients: Any) -> bool:
    """Whether the optimizer has not consumed the passed gradients yet."""
    return engine.optimizer.averaged_gradients.get(index) is gradients


def silence(engine: Any) -> None:
    """Remove ZeRO's own hooks from gradients."""
    optimizer = engine.optimizer
    for handle in (*optimizer._grad_acc_hooks, *getattr(optimizer, "_leaf_module_hooks", ())):
        handle.remove()
    optimizer._grad_acc_hooks = []
    if hasattr(optimizer, "_leaf_module_hooks"):
        optimizer._leaf_module_hooks = []


def unsilence(engine: Any) -> None:
    """Restore ZeRO's own hooks on gradients."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "create_reduce_and_remove_grad_hooks"):  # stage 3
        optimizer.create_reduce_and_remove_grad_hooks()
    else:
        optimizer.create_gradient_handling_hooks()


# --- stage 3: each parameter in shards --------------------------------------------------------------------------------


def virtual_parameter(parameter: Any) -> torch.nn.Parameter:
    """Parameter like the gathered one, but without memory, for tracing. Its elements must not be read."""
    tensor = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device=parameter.ds_tensor.device)
    tensor.untyped_storage().resize_(0)
    made = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    setattr(made, STANDS_IN, True)
    return made


def add_gradient(engine: Any, parameter: Any, shard: torch.Tensor, first: bool) -> None:
    """Set or add to this rank's gradient of a parameter. `first`: nothing was added to it in this step."""
    buffer = engine.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id]
    own = buffer.narrow(0, 0, shard.numel())
    if first:
        own.copy_(shard)
    else:
        own.add_(shard.to(own.dtype))


def begins_step(engine: Any) -> bool:
    """Whether the current micro-step is the first one of a step, by ZeRO 3's own count."""
    return bool(engine.optimizer.micro_step_id == 0)


def end_backward(engine: Any) -> None:
    """Run ZeRO 3's work at the end of each backward, except reductions."""
    engine.optimizer.independent_gradient_partition_epilogue()


def hide_hooks(engine: Any, hide: Callable[[Any], Any]) -> None:
    """Replace ZeRO 3's hooks on modules by `hide(hook)`, for as long as the engine lives."""
    for table_of, key in _module_hooks(engine):
        table = table_of()
        if table is not None and key in table:
            table[key] = hide(table[key])


def _module_hooks(engine: Any) -> list[tuple[Callable[[], Any], int]]:
    """(table of hooks, key in it) of ZeRO 3's hooks."""
    offload = engine.optimizer.parameter_offload
    handles = (offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks)
    return [(handle.hooks_dict_ref, handle.id) for handle in handles]


def _nothing(*_: Any, **__: Any) -> None:
    """Replacement of a hook."""


class ShownModules:
    """Modules of a ZeRO 3 model, which show stand-ins for parameters and run without ZeRO's hooks during a call."""

    def __init__(self, engine: Any, stand_ins: dict[int, torch.nn.Parameter]) -> None:
        """`stand_ins`: identity of a parameter -> the tensor to show in its place."""
        self._modules = [
            (
                weakref.ref(module),
                {name: stand_ins[id(p)] for name, p in module._parameters.items() if id(p) in stand_ins},
            )
            for module in engine.module.modules()
            if module._parameters
        ]
        self._hooks = _module_hooks(engine)

    def owners(self) -> list[Any]:
        """Modules that have parameters."""
        return [module for reference, _ in self._modules if (module := reference()) is not None]

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Context of a compiled call."""
        before: list[tuple[dict[str, Any], Any]] = []
        hooks: list[tuple[dict[int, Any], int, Any]] = []
        try:
            for reference, shown in self._modules:
                known = vars(reference())
                before.append((known, known["_parameters"]))
                # by items(): DeepSpeed's own table gathers parameters that are read by name
                known["_parameters"] = {n: shown.get(n, p) for n, p in known["_parameters"].items()}
            for table_of, key in self._hooks:
                table = table_of()
                if table is not None and key in table:
                    hooks.append((table, key, table[key]))
                    table[key] = _nothing
            yield
        finally:
            for known, parameters in before:
                known["_parameters"] = parameters
            for table, key, hook in hooks:
                table[key] = hook


@contextlib.contextmanager
def stock_linear() -> Iterator[None]:
    """Restore torch's own `linear` where ZeRO 3 has replaced it by an autograd function for the rest of the process.

    That function saves no gathered weight; compiled graphs save parameters as such. When torch 2.11's TorchDynamo
    traces it, with any backend, layers with a bias have no gradients: `output += bias` in its forward detaches them.
    """
    known = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    stock = getattr(getattr(known, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    before = functional.linear
    if stock is None or before is stock:
        yield
        return
    functional.linear = stock
    try:
        yield
    finally:
        functional.linear = before
