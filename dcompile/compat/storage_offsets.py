"""Operations of a traced graph with offsets from the start of a storage: `as_strided` and its variants.

If their argument is an input that is a part of a larger storage, they access memory around it. They also do so after a
scatter to such an input, for which ATen copies the whole storage. The traced storage of a scatter cannot be used. It
depends on whether the scatter was traced before in this process, as FakeTensor's cache leaves storages out.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

FROM_STORAGE = frozenset(
    f"aten.{name}.default" for name in ("as_strided", "as_strided_copy", "as_strided_scatter")
)  # fmt: skip
GIVES_DATA = frozenset(("aten.set_.source_Tensor", "aten.shallow_copy_data_.default"))
"""Operations that `tensor.data = source` is traced as; the latter since torch 2.14."""
RESIZE = "inductor::resize_storage_bytes_"
"""Operation that `tensor.untyped_storage().resize_(n)` of an input is traced as. Its schema does not show
the mutation.
"""
_SCATTERS = frozenset(f"aten.{kind}_scatter.default" for kind in ("select", "slice", "diagonal", "as_strided"))


def has_offset(node: Node) -> bool:
    """Whether a node has an offset from the start of a storage."""
    op = str(node.target)
    if op not in FROM_STORAGE:
        return False
    place = 4 if op == "aten.as_strided_scatter.default" else 3
    given = node.args[place] if len(node.args) > place else node.kwargs.get("storage_offset")
    return given is not None


def storage_input(node: Node, scattered: bool = False) -> Node | None:
    """Input whose storage such a node addresses, or None. `scattered`: only through a scatter."""
    of: Any = node.args[0]
    seen = not scattered
    while of.op == "call_function" and (_scatters(of) or _is_view(of)):
        seen, of = seen or _scatters(of), of.args[0]
    return of if seen and of.op == "placeholder" else None


def is_part(value: Any) -> bool:
    """Whether a tensor's storage holds more than the tensor."""
    nbytes = value.numel() * value.itemsize
    # compared as texts: comparing symbols would add a guard
    return str(value.storage_offset()) != "0" or str(value.untyped_storage().nbytes()) != str(nbytes)


def looked_around(gm: Any) -> list[Node]:
    """Inputs of a graph whose storages it addresses."""
    found = (storage_input(node) for node in gm.graph.nodes if node.op == "call_function" and has_offset(node))
    return list(dict.fromkeys(node for node in found if node is not None))


def looked_beyond(gm: Any) -> tuple[int, ...]:
    """Positions of inputs that can be replaced by a copy only if the copy includes their whole storage.

    The traced storage of an input cannot be used. For an input that is not a view, it covers the tensor alone, and
    nothing guards the storage of the next call's input.
    """
    places = {node: position for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    looks = ((node, storage_input(node)) for node in gm.graph.nodes if str(node.target) in FROM_STORAGE)
    return tuple(sorted({places[of] for node, of in looks if of is not None and not _stays_within(node, of)}))


def _stays_within(view: Node, of: Node) -> bool:
    """Whether `as_strided` without an offset certainly ends where `of` does, or before."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if has_offset(view) or str(view.target) != "aten.as_strided.default":
        return False
    return bool(statically_known_true(_last(view.meta["val"]) <= _last(of.meta["val"])))


def _last(value: Any) -> Any:
    """Offset of a tensor's last element from the start of its storage, by its strides."""
    return value.storage_offset() + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))


def resizes(target: Any) -> bool:
    """Whether an operation frees or allocates the memory of a tensor."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.name == RESIZE


def gives_data(gm: Any) -> bool:
    """Whether a graph gives an input other memory."""
    return any(str(node.target) in GIVES_DATA for node in gm.graph.nodes)


def _scatters(node: Any) -> bool:
    return str(node.target) in _SCATTERS


def _is_view(node: Any) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)
