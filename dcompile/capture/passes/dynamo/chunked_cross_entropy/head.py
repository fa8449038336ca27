"""Recognize a linear layer whose result only a loss reads, and steps in between."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import argument, changes, is_call, shape_of, value_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import LogitStep
from dcompile.compat.aot_metadata import user_line

LOSS = torch.nn.functional.cross_entropy
_ARGUMENTS = {
    "input": None, "target": None, "weight": None, "size_average": None, "ignore_index": -100, "reduce": None,
    "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip
"""Arguments of the loss, in order -> their defaults."""
_PRODUCTS = (operator.matmul, torch.matmul, torch.mm, "matmul", "mm")
CONVERSIONS = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone")
RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_SIZES = ("size", "dim", "numel")
_ROW_RESULTS = ("logsumexp", "argmax")
"""Reductions of each row of logits that chunks compute, too."""
ALL = slice(None, None, None)


class NotChunked(Exception):
    """Reason why a loss is not computed in chunks."""


@dataclass(frozen=True)
class OutputLayer:
    """A linear layer whose result is read only by a loss, and by reductions of its rows."""

    layer: Node
    hidden: Node
    weight: Node
    bias: Node | None
    steps: tuple[Node, ...]
    """Operations between the logits and the loss, in order."""
    others: tuple[Node, ...]
    """Operations between the logits and the reductions, in the graph's order."""
    row_results: tuple[Node, ...]
    """Reductions of each row to its logarithm of the sum of exponentials, or to its largest class."""

    @property
    def learns_by_rows(self) -> bool:
        """Whether a row result has a gradient."""
        return any(value_of(node).requires_grad for node in self.row_results)


def given_to(loss: Node) -> dict[str, Any]:
    """Return all arguments of a loss by name, with defaults."""
    return {**_ARGUMENTS, **dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}


def head_of(loss: Node) -> OutputLayer:
    """Return the linear layer of a loss. Raises NotChunked."""
    given = given_to(loss)
    for name in ("size_average", "reduce"):
        if given[name] is not None:
            raise NotChunked(f"it is given `{name}`")
    target, of_class = (value_of(given[name]) for name in ("target", "weight"))
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        raise NotChunked("its targets are probabilities")
    if given["weight"] is not None and (not isinstance(of_class, torch.Tensor) or of_class.requires_grad):
        raise NotChunked("its class weights have a gradient")
    steps: list[Node] = []
    node = given["input"]
    while not _is_linear(node):
        steps.append(node)
        node = _source_of(node)
    steps.reverse()
    others, row_results = _other_readers(node, steps, loss)
    hidden, weight, bias = _operands(node)
    _check_values(node, (hidden, weight, bias, given["weight"]), loss)
    return OutputLayer(node, hidden, weight, bias, tuple(steps), others, row_results)


def _source_of(node: Any) -> Any:
    """Return the logits before one step. Raises NotChunked."""
    if isinstance(node, Node):
        if is_call(node, *CONVERSIONS, *RESHAPES, "getitem", "transpose"):
            return first_input(node)
        if logit_step(node) is not None:
            return node.all_input_nodes[0]
    raise NotChunked(f"they are not a linear layer's result alone, but `{getattr(node, 'name', node)}`'s")


def first_input(node: Node) -> Any:
    """Return the argument that a step works on."""
    return argument(node, 0, "input")


def logit_step(node: Node) -> LogitStep | None:
    """Return a node's elementwise step, if it is one: a tanh, a sigmoid, or arithmetic with a number."""
    if is_call(node, "tanh", "sigmoid") and not node.kwargs:
        return ("tanh" if is_call(node, "tanh") else "sigmoid"), 0.0
    divides, subtracts = is_call(node, "truediv", "div", "divide", "true_divide"), is_call(node, "sub", "subtract")
    adds, scales = subtracts or is_call(node, "add"), divides or is_call(node, "mul", "multiply")
    if not (adds or scales) or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 1:
        return None
    numbers = [arg for arg in node.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
    if len(numbers) != 1 or ((divides or subtracts) and node.args[1] is not numbers[0]) or (divides and not numbers[0]):
        return None
    number = float(numbers[0])
    return ("shift", -number if subtracts else number) if adds else ("scale", 1 / number if divides else number)


def _is_linear(node: Any) -> bool:
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    if node.target is torch.nn.functional.linear:
        return True
    return node.target in _PRODUCTS and len(node.args) == 2 and _transposed_matrix(node.args[1]) is not None


def _transposed_matrix(node: Any) -> Node | None:
    """Return the matrix whose transpose a node is, or None."""
    if not isinstance(node, Node) or not node.args or len(shape_of(node.args[0])) != 2:
        return None
    (matrix,) = node.all_input_nodes[:1]
    is_attribute = node.target is getattr and node.args[1] in ("T", "mT")
    return matrix if is_attribute or is_call(node, "t") or swaps(node, 0, 1) else None


def swaps(node: Node, first: int, second: int) -> bool:
    """Does a node transpose these two dimensions, which are the last ones?"""
    return is_call(node, "transpose") and {*node.args[1:]} in ({first, second}, {-1, -2}) and not node.kwargs


def _operands(layer: Node) -> tuple[Node, Node, Node | None]:
    if layer.target is torch.nn.functional.linear:
        found = [argument(layer, place, name) for place, name in enumerate(("input", "weight", "bias"))]
        return found[0], found[1], found[2]
    weight = _transposed_matrix(layer.args[1])
    assert isinstance(layer.args[0], Node) and weight is not None, "a product was found to be a linear layer"
    return layer.args[0], weight, None


# --- readers of the logits --------------------------------------------------------------------------------------------


def _other_readers(layer: Node, steps: list[Node], loss: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return conversions and reshapes for other readers than the loss, and these readers.

    Raises NotChunked if a reader needs more than a number for each row. Logits that a reader gets must have passed all
    steps that change their elements or drop rows.
    """
    last = max((n for n, step in enumerate(steps, 1) if not is_call(step, *CONVERSIONS, *RESHAPES)), default=0)
    others, found = list[Node](), list[Node]()
    pending = [layer, *steps]
    while pending:
        node = pending.pop()
        done = node in others or ([layer, *steps].index(node) >= last)
        for user in node.users:
            if user is loss or user in steps or user in others or is_call(user, *_SIZES):
                continue
            if done and is_call(user, *_ROW_RESULTS) and _reduces_rows(user):
                found.append(user)
            elif done and user.op != "output" and is_call(user, *CONVERSIONS, *RESHAPES) and _keeps_rows(user):
                others.append(user)
                pending.append(user)
            else:
                raise NotChunked(_read_by(user))
    order = {node: number for number, node in enumerate(loss.graph.nodes)}
    return tuple(sorted(others, key=order.__getitem__)), tuple(sorted(set(found), key=order.__getitem__))


def _read_by(user: Node) -> str:
    if user.op == "output":
        return (
            "the compiled graph returns them; compile a function that returns the loss alone, "
            "such as `lambda **batch: model(**batch).loss`"
        )
    where = user_line(user)
    return f"`{user.name}`{where and f' ({where})'} reads them too; have it left out in training"


def _keeps_rows(node: Node) -> bool:
    source, made = value_of(first_input(node)), value_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(made, torch.Tensor) or not made.dim():
        return False
    return made.is_floating_point() and made.device == source.device and source.shape[-1] == made.shape[-1]


def _reduces_rows(node: Node) -> bool:
    """Does a reduction give one number for each row, of a static shape or a flat one?"""
    source, made = shape_of(first_input(node)), shape_of(node)
    dim = argument(node, 1, "dim")
    keeps = argument(node, 2, "keepdim") or False
    if not isinstance(dim, int) or not source or dim % len(source) != len(source) - 1 or not made:
        return False
    return all(isinstance(size, int) for size in made) or (len(made) == 1 and not keeps)


# --- values -----------------------------------------------------------------------------------------------------------


def _check_values(layer: Node, given: tuple[Any, ...], loss: Node) -> None:
    """Check that the operands are plain tensors that are unchanged at the loss. Raises NotChunked."""
    operands = [node for node in given if node is not None]
    found = [value_of(node) for node in operands]
    values = [value for value in found if isinstance(value, torch.Tensor) and not compat.tensors.is_wrapper(value)]
    if len(values) < len(operands):
        raise NotChunked("the linear layer works on tensors of a class of their own")
    weight = shape_of(given[1])
    if len(shape_of(layer)) < 2 or len(weight) != 2 or not isinstance(weight[0], int):
        raise NotChunked("the linear layer has no rows, or a symbolic number of classes")
    memory = {compat.tensors.storage_key(value) for value in values}
    for node in nodes_between(layer, loss):
        changed = node.args[0] if node.args else None
        value = changed.meta.get("example_value") if isinstance(changed, Node) else None
        if changes(node) and (
            not isinstance(value, torch.Tensor) or "out" in node.kwargs or compat.tensors.storage_key(value) in memory
        ):
            raise NotChunked(f"`{node.name}` changes something meanwhile")


def nodes_between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes after `first` and before `last`."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def insertion_point(head: OutputLayer, loss: Node) -> Node:
    """Return the node before which the loss is to be computed: itself, or a reduction of rows that comes earlier.

    What computes the targets moves before that. Raises NotChunked if it cannot.
    """
    order = {node: number for number, node in enumerate(loss.graph.nodes)}
    first = min((loss, *head.row_results), key=order.__getitem__)
    if first is loss:
        return loss
    late, pending = set[Node](), [given_to(loss)["target"], given_to(loss)["weight"]]
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and order[node] >= order[first] and node not in late:
            late.add(node)
            pending += node.all_input_nodes
    if not late.isdisjoint(head.row_results) or any(map(changes, nodes_between(first, loss))):
        raise NotChunked(f"`{first.name}` reads them before the targets are known")
    for node in sorted(late, key=order.__getitem__):
        first.prepend(node)
    return first


# --- rows -------------------------------------------------------------------------------------------------------------


def row_steps(head: OutputLayer, loss: Node) -> tuple[list[tuple[str, Any]], int]:
    """Return operations for the layer's input: ("slice", index) or ("reshape", leading sizes), in order.

    Also returns the number of classes: a slice may leave out the last ones, those of a padded vocabulary. Raises
    NotChunked if an operation changes the elements within rows otherwise than one by one.
    """
    classes, done = shape_of(head.weight)[0], list[tuple[str, Any]]()
    by_class = len(shape_of(given_to(loss)["input"])) > 2
    steps = head.steps
    if by_class:
        if not steps or len(shape_of(steps[-1])) != 3 or not swaps(steps[-1], 1, 2) or head.row_results:
            raise NotChunked("classes are not the last dimension of a linear layer's result")
        steps = steps[:-1]
    for step in steps:
        source, made = value_of(step.all_input_nodes[0]), value_of(step)
        if not isinstance(source, torch.Tensor) or not isinstance(made, torch.Tensor) or not made.dim():
            raise NotChunked(f"`{step.name}` is no tensor with rows")
        index = _rows_taken(step.args[1], source.dim()) if is_call(step, "getitem") else None
        if index is not None and isinstance(made.shape[-1], int):
            classes = made.shape[-1]
            done.append(("slice", index))
            continue
        if source.shape[-1] != classes or made.shape[-1] != classes or source.device != made.device:
            raise NotChunked(f"`{step.name}` does not leave rows as they are")
        if (is_call(step, *CONVERSIONS) or logit_step(step)) and made.is_floating_point():
            continue
        if is_call(step, *RESHAPES) and source.dtype == made.dtype:
            done.append(("reshape", _leading_sizes(step, made)))
        else:
            raise NotChunked(f"`{step.name}` does not leave rows as they are")
    return done, classes


def _leading_sizes(step: Node, made: torch.Tensor) -> tuple[int, ...]:
    """Return the leading sizes of a reshaped tensor; that of a matrix may be symbolic. Raises NotChunked."""
    if made.dim() == 2:
        return (-1,)
    leading = tuple(made.shape[:-1])
    if not all(isinstance(size, int) for size in leading):
        raise NotChunked(f"`{step.name}` gives rows a symbolic number of dimensions' sizes")
    return leading


def _rows_taken(index: Any, dims: int) -> tuple[Any, ...] | None:
    """Return the index of whole rows, if an index selects rows by slices, and the first elements of each; else None."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return None
    reaches = len(parts) == dims if Ellipsis not in parts else parts[-1] is not Ellipsis
    if not reaches:
        return parts
    return (*parts[:-1], ALL) if parts[-1].start in (None, 0) and parts[-1].step in (None, 1) else None
