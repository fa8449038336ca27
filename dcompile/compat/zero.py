"""State of DeepSpeed's ZeRO optimizers for parameters and gradients, stage by stage."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as functional

from dcompile.compat.dispatch_watch import STANDS_IN

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
