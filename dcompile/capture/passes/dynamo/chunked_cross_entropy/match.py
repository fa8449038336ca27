"""Find cross-entropies of a linear layer's result, for the option `chunked_loss`.

Slices and reshapes of the logits' rows move to the layer's input, which has as many rows, and mostly shorter ones. If
anything else reads the logits, they must be stored, and the call stays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.causal_mask import argument, changes, shape_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import chunked_cross_entropy, spans
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.compat.user_line import user_line
from dcompile.passes import PassReport

LOSS = torch.nn.functional.cross_entropy
_ARGUMENTS = {
    "input": None, "target": None, "weight": None, "size_average": None, "ignore_index": -100, "reduce": None,
    "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip
"""Arguments of the loss, in order -> their defaults."""
_PRODUCTS = (operator.matmul, torch.matmul, torch.mm, "matmul", "mm")
_CONVERSIONS = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone")
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_SIZES = ("size", "dim", "numel")
ALL = slice(None, None, None)


LEFT_WHOLE = "loss that chunked_loss leaves whole"


class NotChunked(Exception):
    """Reason why a loss is not computed in chunks."""


@dataclass(frozen=True)
class OutputLayer:
    """A linear layer whose result is read only by a loss."""

    layer: Node
    hidden: Node
    weight: Node
    bias: Node | None
    steps: tuple[Node, ...]
    """Operations between the logits and the loss, in order."""


def chunk_losses(gm: GraphModule, chunks: int) -> PassReport:
    """Compute each cross-entropy of a linear layer's result in chunks of classes, in subgraphs, too.

    The graph is changed in place. The report counts losses that are not chunked as fallbacks.
    """
    nest = NestedGraphs(gm)
    losses = [loss for graph in nest.graphs for loss in graph.graph.find_nodes(op="call_function", target=LOSS)]
    notes, begun, whole = list[str](), 0, 0
    for loss in losses:
        where = user_line(loss) or loss.name
        try:
            if not nest.is_inlined(nest.owner(loss)):
                raise NotChunked("they are in a part of the model that may run several times (a loop, a condition)")
            head = _head_of(loss)
            hidden = _rows(head, loss)
        except NotChunked as reason:
            notes.append(f"chunked_loss: the logits of {where} are computed whole: {reason}")
            whole += 1
            continue
        parts = list(spans(shape_of(head.weight)[0], chunks))
        notes.append(f"chunked_loss: {_logits(head, parts)} of {where}; the backward recomputes them")
        _replace(loss, head, hidden, {"chunks": chunks, "begun": begun})
        begun += len(parts)
    if losses:
        nest.recompile()
        return PassReport(len(losses) - whole, tuple(notes), {LEFT_WHOLE: whole} if whole else {})
    return PassReport(
        notes=("chunked_loss: a graph computes no cross_entropy; where the loss is outside, its logits are results",)
    )


def _logits(head: OutputLayer, parts: list[tuple[int, int]]) -> str:
    """Describe the logits: `4 parts of at most 0.3 MB are there ... in place of the logits (float32[5, 32], 1 MB)`."""
    value = head.layer.meta["example_value"]
    sizes = ", ".join(map(str, value.shape))
    size, most = "", ""
    if compat.sizes.is_fixed(value):
        size = f", {value.numel() * value.itemsize / 1e6:.1f} MB"
        most = f" of at most {value[..., : parts[0][1]].numel() * value.itemsize / 1e6:.1f} MB"
    kind = str(value.dtype).removeprefix("torch.")
    return f"{len(parts)} parts{most} are there one after another in place of the logits ({kind}[{sizes}]{size})"


def given_to(loss: Node) -> dict[str, Any]:
    """Return all arguments of a loss by name, with defaults."""
    return {**_ARGUMENTS, **dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}


def _head_of(loss: Node) -> OutputLayer:
    given = given_to(loss)
    for name in ("weight", "size_average", "reduce"):
        if given[name] is not None:
            raise NotChunked(f"it is given `{name}`")
    target = given["target"].meta["example_value"]
    if target.is_floating_point():
        raise NotChunked("its targets are probabilities")
    steps: list[Node] = []
    node = given["input"]
    while not _is_linear(node):
        if not isinstance(node, Node) or not is_call(node, *_CONVERSIONS, *_RESHAPES, "getitem", "transpose"):
            raise NotChunked(f"they are not a linear layer's result alone, but `{getattr(node, 'name', node)}`'s")
        steps.append(node)
        node = node.args[0]
    _check_readers([node, *steps], loss)
    hidden, weight, bias = _operands(node)
    _check_values(node, hidden, weight, bias, loss)
    return OutputLayer(node, hidden, weight, bias, tuple(reversed(steps)))


def is_call(node: Node, *names: str) -> bool:
    """Does a node call a function or method of one of these names?"""
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names


def _is_linear(node: Any) -> bool:
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    return node.target is torch.nn.functional.linear or (
        node.target in _PRODUCTS and _transposed_matrix(node.args[1]) is not None
    )


def _transposed_matrix(node: Any) -> Node | None:
    """Return the matrix whose transpose a node is, or None."""
    if not isinstance(node, Node) or not node.args or len(shape_of(node.args[0])) != 2:
        return None
    (matrix,) = node.all_input_nodes[:1]
    is_attribute = node.target is getattr and node.args[1] in ("T", "mT")
    return matrix if is_attribute or is_call(node, "t") or _swaps(node, 0, 1) else None


def _swaps(node: Node, first: int, second: int) -> bool:
    """Does a node transpose these two dimensions, which are the last ones?"""
    return is_call(node, "transpose") and {*node.args[1:]} in ({first, second}, {-1, -2}) and not node.kwargs


def _operands(layer: Node) -> tuple[Node, Node, Node | None]:
    if layer.target is torch.nn.functional.linear:
        found = [argument(layer, place, name) for place, name in enumerate(("input", "weight", "bias"))]
        return found[0], found[1], found[2]
    weight = _transposed_matrix(layer.args[1])
    assert isinstance(layer.args[0], Node) and weight is not None, "a product was found to be a linear layer"
    return layer.args[0], weight, None


def _check_readers(nodes: list[Node], loss: Node) -> None:
    """Check that only the loss reads the logits. Raises NotChunked."""
    for node in nodes:
        for user in node.users:
            if user.op == "output":
                raise NotChunked("the compiled graph returns them; have what is compiled return its loss alone")
            if user not in nodes and user is not loss and not is_call(user, *_SIZES):
                where = user_line(user)
                raise NotChunked(f"`{user.name}`{where and f' ({where})'} reads them too; have it left out in training")


def _check_values(layer: Node, hidden: Node, weight: Node, bias: Node | None, loss: Node) -> None:
    """Check that the layer's operands are plain tensors that are unchanged at the loss. Raises NotChunked."""
    operands = [node for node in (hidden, weight, bias) if node is not None]
    found = [node.meta.get("example_value") for node in operands]
    values = [value for value in found if isinstance(value, torch.Tensor) and not compat.tensors.is_wrapper(value)]
    if len(values) < len(operands):
        raise NotChunked("the linear layer works on tensors of a class of their own")
    if len(shape_of(layer)) < 2 or len(shape_of(weight)) != 2 or not isinstance(shape_of(weight)[0], int):
        raise NotChunked("the linear layer has no rows, or a symbolic number of classes")
    memory = {compat.tensors.storage_key(value) for value in values}
    for node in between(layer, loss):
        changed = node.args[0] if node.args else None
        value = changed.meta.get("example_value") if isinstance(changed, Node) else None
        if changes(node) and (
            not isinstance(value, torch.Tensor) or "out" in node.kwargs or compat.tensors.storage_key(value) in memory
        ):
            raise NotChunked(f"`{node.name}` changes something meanwhile")


def between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes after `first` and before `last`."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _rows(head: OutputLayer, loss: Node) -> list[tuple[str, Any]]:
    """Return operations for the layer's input: ("slice", index) or ("reshape", leading sizes), in order.

    Raises NotChunked if an operation changes the elements within rows.
    """
    classes, done = shape_of(head.weight)[0], list[tuple[str, Any]]()
    by_class = len(shape_of(given_to(loss)["input"])) > 2
    steps = head.steps
    if by_class:
        if not steps or len(shape_of(steps[-1])) != 3 or not _swaps(steps[-1], 1, 2):
            raise NotChunked("classes are not the last dimension of a linear layer's result")
        steps = steps[:-1]
    for step in steps:
        source, made = (value.meta["example_value"] for value in (step.all_input_nodes[0], step))
        if source.shape[-1] != classes or made.shape[-1] != classes or source.device != made.device:
            raise NotChunked(f"`{step.name}` does not leave rows as they are")
        if is_call(step, *_CONVERSIONS) and made.is_floating_point():
            continue
        if is_call(step, *_RESHAPES) and source.dtype == made.dtype:
            done.append(("reshape", _leading_sizes(step, made)))
        elif is_call(step, "getitem") and _takes_rows(step.args[1], source.dim()):
            done.append(("slice", step.args[1]))
        else:
            raise NotChunked(f"`{step.name}` does not leave rows as they are")
    return done


def _leading_sizes(step: Node, made: torch.Tensor) -> tuple[int, ...]:
    """Return the leading sizes of a reshaped tensor; that of a matrix may be symbolic. Raises NotChunked."""
    if made.dim() == 2:
        return (-1,)
    leading = tuple(made.shape[:-1])
    if not all(isinstance(size, int) for size in leading):
        raise NotChunked(f"`{step.name}` gives rows a symbolic number of dimensions' sizes")
    return leading


def _takes_rows(index: Any, dims: int) -> bool:
    """Does an index select rows by slices, and all elements of each row?"""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    reaches = len(parts) == dims if Ellipsis not in parts else parts[-1] is not Ellipsis
    return not reaches or parts[-1] == ALL


def _replace(loss: Node, head: OutputLayer, steps: list[tuple[str, Any]], settings: dict[str, Any]) -> None:
    given, graph = given_to(loss), loss.graph
    hidden, width = head.hidden, shape_of(head.weight)[1]
    with graph.inserting_before(loss):
        for kind, how in steps:
            if kind == "slice":
                hidden = graph.call_function(operator.getitem, (hidden, how))
            else:
                hidden = graph.call_method("reshape", (hidden, *how, width))
        settings |= {name: given[name] for name in ("ignore_index", "reduction", "label_smoothing")}
        logits = head.layer.meta["example_value"]
        settings |= {"dtype": logits.dtype, "result": loss.meta["example_value"].dtype, "grad": logits.requires_grad}
        arguments = (hidden, head.weight, head.bias, given["target"])
        parts = graph.call_function(chunked_cross_entropy, arguments, settings)
    parts.meta = dict(loss.meta)
    loss.replace_all_uses_with(parts)
    for node in (loss, *reversed(head.steps), head.layer):
        if not node.users:
            graph.erase_node(node)
