"""What AOTAutograd says of a graph: metadata of inputs and results, and descriptions of placeholders and outputs.

The metadata can be read inside its compilers: changes, views and gradients. Descriptions are on nodes of its graphs,
and say which input, result, gradient or change each is.

`user_line` finds the user's line among the frames that torch stores on a traced node.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def _metadata() -> Any:
    """AOTAutograd's metadata of the forward's inputs and results, inside one of its compilers; None elsewhere."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def no_donation() -> None:
    """Declare, inside the backward compiler, that this graph donates no buffer: torch's run-time check needs a list."""
    metadata = _metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


def changed_inputs(count: int) -> frozenset[int] | None:
    """Positions of inputs, of `count`, that the graph writes to. To be called inside a compiler of AOTAutograd.

    None if unknown: where one input represents several that share memory.
    """
    metadata = _metadata()
    if metadata is None or len(metadata.input_info) != count:
        return None
    return frozenset(n for n, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)


def not_only_read() -> frozenset[int]:
    """Positions of inputs that the graph changes, or returns as they are or as views. Inside a compiler of AOTAutograd.

    AOTAutograd processes these outside the graph, on the tensors that the caller passes.
    """
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    changed = (n for n, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)
    aliases = (o.base_idx for o in metadata.output_info if o.output_type.name in ("alias_of_input", "is_input"))
    return frozenset((*changed, *(n for n in aliases if n is not None)))


def looks_at_inputs() -> dict[int, int]:
    """Position of a result -> of the input that it is a view of.

    Inside the compiler of a forward or an inference graph. AOTAutograd returns views of the inputs for them, and reads
    only the layout of the results. Inputs whose shape the graph changes are left out: their views are of the changed
    input.
    """
    metadata = _metadata()
    if metadata is None:
        return {}
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    kinds = enumerate(metadata.output_info, changed)
    looks = ((place, info.base_idx) for place, info in kinds if info.output_type.name == "alias_of_input")
    return {place: base for place, base in looks if not metadata.input_info[base].mutates_metadata}


def own_results() -> tuple[int, ...]:
    """Positions of results that the graph's autograd node has made itself. Inside a compiler of AOTAutograd.

    Views of intermediates come last: they share memory with a tensor that the node has made.
    """
    metadata = _metadata()
    if metadata is None:
        return ()
    own = ("non_alias", "unsafe_view_alias", "alias_of_intermediate", "alias_of_intermediate_save_as_output",
           "alias_of_intermediate_base_is_user_output")  # fmt: skip
    kinds = [info.output_type.name if info.requires_grad else "" for info in _shown_results(metadata)]
    found = [n for n, kind in enumerate(kinds) if kind in own]
    return tuple(sorted(found, key=lambda n: own.index(kinds[n]) > 1))


def learning_results() -> frozenset[int]:
    """Positions of results that require a gradient. Inside the compiler of a forward or an inference graph."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    return frozenset(n for n, info in enumerate(_shown_results(metadata)) if info.requires_grad)


def _shown_results(metadata: Any) -> list[Any]:
    """AOTAutograd's metadata of each result that the caller sees. For a DTensor it describes the local tensor.

    A DTensor's mesh counts as a result of the traced graph, and is left out.
    """
    return [info for info in metadata.output_info if not issubclass(info.raw_type, FakeScriptObject)]


def constant_results() -> tuple[int, ...]:
    """Positions of results without a gradient. Inside the compiler of a forward."""
    metadata = _metadata()
    if metadata is None:
        return ()
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    return tuple(changed + n for n, info in enumerate(metadata.output_info) if not info.requires_grad)


def take_views() -> tuple[int, ...]:
    """Positions of views that the caller must return as separate tensors. Inside the compiler of a forward.

    It removes them from AOTAutograd's metadata, so that AOTAutograd does not separate them, too. Empty if this torch
    has no such list.
    """
    metadata = _metadata()
    views = getattr(metadata, "unsafe_view_out_indices", ())
    if metadata is None or not views:
        return ()
    metadata.unsafe_view_out_indices, metadata.num_unsafe_view_outputs = [], 0
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    return tuple(changed + place for place in views)


def result_kinds() -> dict[int, tuple[str, bool]]:
    """Inside a compiler of AOTAutograd: for each result by its position, whether it is a view, and has a gradient."""
    metadata = _metadata()
    shown = () if metadata is None else _shown_results(metadata)
    return {place: (info.output_type.name, info.requires_grad) for place, info in enumerate(shown)}


def why_wrapped() -> str:
    """Why AOTAutograd's own code around a forward and its backward matters; "" if it does nothing. Inside a compiler.

    It changes inputs or results after the program, or takes tensor subclasses apart, or saves more than tensors.
    """
    from dcompile.compat.patches.lean_wrappers import saves_plain

    metadata = _metadata()
    if metadata is None:
        return "AOTAutograd's metadata is unknown"
    try:
        if not saves_plain(metadata) or metadata.dynamic_outputs:
            return "AOTAutograd changes inputs or results after the program"
    except AttributeError:  # a torch with other names
        return "AOTAutograd's metadata is unknown"
    subclasses = getattr(metadata, "subclass_inp_meta", None) or ()
    is_subclass = any(type(meta).__name__ == "SubclassCreationMeta" for meta in subclasses)
    return "inputs are of a tensor subclass" if is_subclass else ""


def changed_in_graph() -> tuple[int, ...]:
    """Positions of inputs that the graph itself writes to, and whose versions tell of it. Inside a compiler."""
    metadata = _metadata()
    return () if metadata is None else tuple(metadata.mutated_graph_handled_indices_seen_by_autograd)


def returned_changes(gm: Any) -> dict[Any, Any]:
    """Placeholders of inputs that AOTAutograd changes after this graph -> the results that it copies to them."""
    output = gm.graph.output_node()
    placeholders = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    described, change = (
        zip(output.args[0], output.meta.get("desc", ()), strict=False),
        descriptors.InputMutationAOTOutput,
    )
    return {placeholders[d.mutated_input]: node for node, d in described if isinstance(d, change)}


def primal_index(node: Any) -> int | None:
    """Position among the Dynamo graph's inputs of the tensor whose gradient this is, or None.

    `node`: output description.
    """
    if not isinstance(node, descriptors.GradAOTOutput) or not isinstance(node.grad_of, descriptors.PlainAOTInput):
        return None
    return node.grad_of.idx


def changed_behind(joint: Any) -> frozenset[Any]:
    """Placeholders of a joint graph whose tensors AOTAutograd changes to results once the forward has run."""
    described = joint.graph.output_node().meta.get("desc", ())
    changed = {d.mutated_input for d in described if isinstance(d, descriptors.InputMutationAOTOutput)}
    return frozenset(node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed)


def input_index(placeholder: Any) -> int | None:
    """Position among the Dynamo graph's inputs that a placeholder of AOTAutograd's graphs represents, or None."""
    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, descriptors.PlainAOTInput) else None


def is_tangent(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs is a gradient that autograd passes to the backward.

    It may also be a component of such a gradient, such as a DTensor's local tensor.
    """
    description = placeholder.meta.get("desc")
    while is_part_of_subclass(placeholder) and hasattr(description, "base"):
        description = description.base
    return isinstance(description, descriptors.TangentAOTInput)


def backward_nodes(joint: Any) -> set[Any]:
    """Return the nodes of a joint graph that depend on a tangent, tangents and the output node included."""
    found = set(filter(is_tangent, joint.graph.find_nodes(op="placeholder")))
    for node in joint.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_part_of_subclass(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs is a component of a tensor subclass."""
    return type(placeholder.meta.get("desc")).__name__.startswith("Subclass")


def is_base_of_inputs(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs is the base of which several inputs are views."""
    return isinstance(placeholder.meta.get("desc"), descriptors.ViewBaseAOTInput)


def plain_result(description: Any) -> int | None:
    """Position among the Dynamo graph's results of an output that is described so, or None."""
    return description.idx if isinstance(description, descriptors.PlainAOTOutput) else None


def result_index(tangent: Any) -> int | None:
    """Position among a graph's results of the one whose gradient this placeholder of a backward is, or None."""
    result = getattr(tangent.meta.get("desc"), "output", None)
    return result.idx if isinstance(result, descriptors.PlainAOTOutput) else None


@functools.cache
def description_types() -> Mapping[str, Any]:
    """Name -> dataclass or enumeration of AOTAutograd's graph descriptions."""
    from torch._functorch._aot_autograd import schemas

    kinds = {
        name: kind
        for name, kind in vars(descriptors).items()
        if isinstance(kind, type) and issubclass(kind, (descriptors.AOTInput, descriptors.AOTOutput))
    }
    names = ("ViewAndMutationMeta", "InputAliasInfo", "OutputAliasInfo", "PlainTensorMeta", "MemoryFormatMeta")
    kinds |= {name: getattr(schemas, name) for name in (*names, "OutputType", "MutationType") if hasattr(schemas, name)}
    return kinds


@functools.cache
def result_types() -> Mapping[str, type]:
    """Name -> type that AOTAutograd records for results."""
    found: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
    found += (int, float, bool, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)
    return {kind.__name__: kind for kind in found}


# --- the user's line of a node ----------------------------------------------------------------------------------------


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = f"{Path(__file__).parents[1]}/"


def user_line(node: Any) -> str:
    """`model.py:88` of an FX node: its last frame outside of torch and dcompile; empty if there is none.

    A node that torch alone made has torch's line.
    """
    return _last_frame(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _last_frame(trace: str) -> str:
    found = _FRAME.findall(trace)
    frames = [frame for frame in found if not frame[0].startswith(_OURS)]
    frames = [frame for frame in frames if not frame[0].startswith(_torchs_folder())] or frames
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""


@cache
def _torchs_folder() -> str:
    return f"{Path(torch.__file__).parent}/"
