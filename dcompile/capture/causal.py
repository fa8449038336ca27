"""Attention masks that a model builds from nothing but constants: a causal one becomes `is_causal`, a full one goes.

Libraries hand `scaled_dot_product_attention` a mask when they cannot see whether one is needed, and Hugging Face's
models do so while being traced. A kernel with a mask reads it, and does the whole square where a causal kernel does
half. The graph that Dynamo hands over shows how the mask was made. If that takes no input, the mask is computed here,
once, and compared with the lower triangle, element by element: nothing is recognised by its look. A mask that depends
on an input (padding) stays as it is.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

ATTENTION = torch.nn.functional.scaled_dot_product_attention
LARGEST = 1 << 26
"""Elements of a mask that we are ready to compute: 8192 x 8192, which takes a tenth of a second on one core."""
MASK, CAUSAL = 3, 5
"""Positions of `attn_mask` and `is_causal`."""
INSTEAD = {
    "causal": "the kernel's own causal masking takes its place",
    "full": "it hides nothing, so they run without one",
}
"""What a rewritten call does without its mask, by the mask's kind, for the receipt."""

_CONSTANT = frozenset(
    (
        # creation
        "arange", "ones", "zeros", "full", "tensor", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros",
        "new_full", "scalar_tensor",
        # comparison and logic
        "le", "lt", "ge", "gt", "eq", "ne", "and_", "or_", "invert", "not_", "bitwise_and", "bitwise_or", "bitwise_not",
        "logical_and", "logical_or", "logical_not", "logical_xor", "where", "masked_fill", "tril", "triu",
        # arithmetic and sums
        "add", "sub", "mul", "neg", "rsub", "abs", "floordiv", "mod", "floor_divide", "remainder", "clamp", "cumsum",
        "diff", "sum", "all", "any", "min", "max",
        # shape and type
        "view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "getitem", "contiguous", "clone",
        "broadcast_to", "to", "bool", "float", "type", "int", "long", "detach", "expand_as", "type_as",
    )
)  # fmt: skip
"""Operations that compute the same from the same, by the names of functions and methods."""


def replace_constant_masks(gm: GraphModule) -> list[str]:
    """Rewrite the attention calls of a Dynamo graph whose mask is constant, and either causal or full.

    Returns a line for people about each kind of rewrite. The graph is changed in place.
    """
    verdicts: dict[tuple[Node, tuple[int, int]], str | None] = {}
    done: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        mask, square = _mask_of(node), _square(node)
        if mask is None or square is None or shape_of(mask)[-2:] != square:
            continue
        if (mask, square) not in verdicts:
            verdicts[mask, square] = _verdict(mask, square)
        verdict = verdicts[mask, square]
        if verdict is not None:
            _rewrite(node, causal=verdict == "causal")
            done[verdict] = done.get(verdict, 0) + 1
    if done:
        erased = set[Node]()
        for mask, _ in verdicts:
            _erase_unused(gm, mask, erased)
        gm.recompile()
    return [
        f"{count} attention calls were given a {kind} mask as a tensor; {INSTEAD[kind]}" for kind, count in done.items()
    ]


def _mask_of(node: Node) -> Node | None:
    if node.op != "call_function" or node.target is not ATTENTION or argument(node, CAUSAL, "is_causal"):
        return None
    mask = argument(node, MASK, "attn_mask")
    return mask if isinstance(mask, Node) else None


def argument(node: Node, position: int, name: str) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _verdict(mask: Node, square: tuple[int, int]) -> str | None:
    """ "causal", "full", or None: something else, or not known. `square` is (queries, keys)."""
    if square[0] * square[1] > LARGEST:
        return None
    steps = _construction(mask)
    value = None if steps is None else _computed(steps)
    if value is None or value.shape[-2:] != square:
        return None
    allowed = _allowed(value)
    if allowed is None:
        return None
    if bool(allowed.all()):
        return "full"
    lower = torch.ones(square, dtype=torch.bool, device=allowed.device).tril()
    return "causal" if bool((allowed == lower).all()) else None


def _square(node: Node) -> tuple[int, int] | None:
    """(queries, keys) of an attention call, if both are known numbers."""
    query, key = (shape_of(argument(node, place, name)) for place, name in ((0, "query"), (1, "key")))
    if len(query) < 2 or len(key) < 2 or not (isinstance(query[-2], int) and isinstance(key[-2], int)):
        return None
    return query[-2], key[-2]


def shape_of(node: Any) -> tuple[Any, ...]:
    """The shape of a node's value; empty if it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _construction(mask: Node) -> list[Node] | None:
    """Every node that the mask is made by, in order; None if one of them is no constant, or is changed in place."""
    found: set[Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        if not _is_constant(node) or any(changes(user) for user in node.users):
            return None
        found.add(node)
        pending += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in found]


def _name(node: Node) -> str:
    """The operation, whether called as a function, a method or an operator's method: "eq" for `__eq__` too."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.removeprefix("__").removesuffix("__") if name.startswith("__") else name


def _is_constant(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _CONSTANT and "out" not in node.kwargs


def changes(node: Node) -> bool:
    """Whether a node might write into its arguments. Names that end in an underscore do; operators are listed."""
    name = _name(node)
    if node.target in (operator.and_, operator.or_, operator.not_):
        return False
    if name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs or "mutation" in name:
        return True
    if node.kwargs.get("inplace") or (str(getattr(node.target, "__module__", "")) == _LAYERS and True in node.args):
        return True
    overloads = getattr(node.target, "overloads", None)
    ops = [getattr(node.target, o) for o in overloads()] if callable(overloads) else [node.target]
    return any(schema.is_mutable for op in ops if (schema := getattr(op, "_schema", None)) is not None)


_LAYERS = "torch.nn.functional"
"""Whose functions take `inplace` by place, too: True among their arguments may be that."""
_IN_PLACE = frozenset(
    (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
        "ilshift", "irshift",
    )
)  # fmt: skip


def _computed(steps: list[Node]) -> torch.Tensor | None:
    """The last node's value, computed on the CPU."""
    values: dict[Node, Any] = {}

    def real(arg: Any) -> Any:
        if isinstance(arg, Node):
            return values[arg]
        if isinstance(arg, torch.device):
            return torch.device("cpu")
        return "cpu" if isinstance(arg, str) and arg.partition(":")[0] == "cuda" else arg

    with torch.device("cpu"):  # for steps that name none: Dynamo traces `torch.arange(n)` as it is written
        for node in steps:
            args, kwargs = map_aggregate(node.args, real), map_aggregate(node.kwargs, real)
            assert isinstance(args, tuple) and isinstance(kwargs, dict), "arguments keep their form"
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target), f"{node} calls {node.target!r}"
                values[node] = node.target(*args, **kwargs)
    result = values[steps[-1]]
    return result if isinstance(result, torch.Tensor) else None


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    """Where attention may look; None for a mask that also adds something else than 0 or "never".

    "Never" is minus infinity or, as some libraries have it, the least number of the dtype: no finite score makes the
    exponential of either differ from 0, in a row where anything is allowed.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    allowed = mask == 0
    never = (mask == -torch.inf) | (mask == torch.finfo(mask.dtype).min)
    return allowed if bool((allowed | never).all()) else None


def _rewrite(node: Node, causal: bool) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    if len(args) > MASK:
        args[MASK] = None
    else:
        kwargs["attn_mask"] = None
    if len(args) > CAUSAL:
        args[CAUSAL] = causal
    else:
        kwargs["is_causal"] = causal
    node.args, node.kwargs = tuple(args), kwargs


def _erase_unused(gm: GraphModule, node: Node, erased: set[Node]) -> None:
    """Erase a mask that nothing uses any more, and what it alone was made from."""
    pending = [node]
    while pending:
        dead = pending.pop()
        if dead.users or not _is_constant(dead) or dead in erased:
            continue
        inputs = list(dead.all_input_nodes)
        gm.graph.erase_node(dead)
        erased.add(dead)
        pending += inputs
