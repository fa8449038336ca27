"""AOTAutograd's descriptions of placeholders and outputs in its graphs: inputs, results, gradients and changes."""

from __future__ import annotations

from typing import Any


def returned_changes(gm: Any) -> dict[Any, Any]:
    """Placeholders of inputs that AOTAutograd changes after this graph -> the results that it copies to them."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    output = gm.graph.output_node()
    placeholders = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    described = zip(output.args[0], output.meta.get("desc", ()), strict=False)
    return {placeholders[d.mutated_input]: node for node, d in described if isinstance(d, InputMutationAOTOutput)}


def primal_index(node: Any) -> int | None:
    """Position among the Dynamo graph's inputs of the tensor whose gradient this is, or None.

    `node`: output description.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    if not isinstance(node, GradAOTOutput) or not isinstance(node.grad_of, PlainAOTInput):
        return None
    return node.grad_of.idx


def changed_behind(joint: Any) -> frozenset[Any]:
    """Placeholders of a joint graph whose tensors AOTAutograd changes to results once the forward has run."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    described = joint.graph.output_node().meta.get("desc", ())
    changed = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    return frozenset(node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed)


def input_index(placeholder: Any) -> int | None:
    """Position among the Dynamo graph's inputs that a placeholder of AOTAutograd's graphs represents, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def is_tangent(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs is a gradient that autograd passes to the backward.

    It may also be a component of such a gradient, such as a DTensor's local tensor.
    """
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    description = placeholder.meta.get("desc")
    while is_part_of_subclass(placeholder) and hasattr(description, "base"):
        description = description.base
    return isinstance(description, TangentAOTInput)


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
    from torch._functorch._aot_autograd.descriptors import ViewBaseAOTInput

    return isinstance(placeholder.meta.get("desc"), ViewBaseAOTInput)


def plain_result(description: Any) -> int | None:
    """Position among the Dynamo graph's results of an output that is described so, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    return description.idx if isinstance(description, PlainAOTOutput) else None


def result_index(tangent: Any) -> int | None:
    """Position among a graph's results of the one whose gradient this placeholder of a backward is, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    result = getattr(tangent.meta.get("desc"), "output", None)
    return result.idx if isinstance(result, PlainAOTOutput) else None
