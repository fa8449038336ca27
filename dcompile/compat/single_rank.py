"""Replace collectives by local results, for a model that is inspected and not trained, without other ranks.

Each gives the result that it would have if all ranks held this rank's data. A gather repeats this rank's part, so that
values have the usual size. Sums of equal terms differ by a factor only, so they stay unscaled.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dcompile.ir.collective_kinds import COLLECTIVES, KINDS, CollectiveKind

if TYPE_CHECKING:
    import torch

FUNCTIONAL = "_c10d_functional"


class SingleRankCollectives:
    """Local replacements of torch.distributed's functions, in effect while `active`.

    They are removed while Dynamo traces, since it recognizes the functions that it can trace by identity.
    """

    def __init__(self) -> None:
        self._patches = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Replace collectives of Python code in this context."""
        self._begin()
        try:
            yield
        finally:
            self._patches.close()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Restore torch's own functions in this context, inside `active`."""
        self._patches.close()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        for name, answer in _ANSWERS.items():
            for place in (dist, c10d):
                if hasattr(place, name):
                    self._patches.enter_context(unittest.mock.patch.object(place, name, answer))


class _CompletedWork:
    """Work of a completed collective."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        import torch

        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def _work(async_op: bool) -> Any:
    return _CompletedWork() if async_op else None


def _all_gather(output: torch.Tensor, value: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    output.view(-1).copy_(_repeat_part(value.reshape(-1), output.numel()))
    return _work(async_op)


def _all_gather_list(outputs: Any, value: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    for output in outputs:
        output.copy_(value)
    return _work(async_op)


def _reduce_scatter(
    output: torch.Tensor, value: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    output.view(-1).copy_(value.reshape(-1)[: output.numel()])
    return _work(async_op)


def _all_to_all(
    output: torch.Tensor,
    value: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    output.view(-1).copy_(_repeat_part(value.reshape(-1), output.numel()))
    return _work(async_op)


def _return_unchanged(tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
    return _work(async_op)


def _return_nothing(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return _work(async_op)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "all_gather_single": _all_gather,  # since torch 2.13; the next is its former name
    "all_gather_into_tensor": _all_gather,
    "all_gather": _all_gather_list,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "all_reduce": _return_unchanged,
    "broadcast": _return_unchanged,
    "reduce": _return_unchanged,
    "barrier": _return_nothing,
}


def _repeat_part(part: torch.Tensor, count: int) -> torch.Tensor:
    """Repeat `part` to `count` elements; zeros if it is empty."""
    if not part.numel():
        return part.new_zeros(count)
    return part.repeat(-(-count // part.numel()))[:count]


def whole(shard: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Make a parameter in the shape, device and dtype of `like` from this rank's shard alone.

    `offset`: the parameter's beginning among all gathered elements. With one rank, the result is the parameter.
    """
    flat = shard.detach().reshape(-1).to(like.device, like.dtype)
    return _repeat_part(flat, offset + like.numel())[offset:].view(like.shape)


def run_alone(gm: Any, values: list[Any]) -> Any:
    """Run a graph with its own collectives replaced by local results. No gradients are computed."""
    from torch.fx import Interpreter

    exchanges = [node for node in gm.graph.nodes if node.op == "call_function" and _functional(node.target)]
    if not exchanges:
        return gm(*values)

    class Answering(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            name = _functional(target)
            return _answer(name, args, kwargs) if name else super().call_function(target, args, kwargs)

    return Answering(gm).run(*values)


def _functional(target: Any) -> str:
    """The name of a functional collective, or of a wait; empty for all other operators."""
    return target._schema.name.partition("::")[2] if getattr(target, "namespace", "") == FUNCTIONAL else ""


def _answer(name: str, args: Any, kwargs: Any) -> Any:
    """Local result of a functional collective on a tensor or a list of tensors."""
    if isinstance(args[0], list | tuple):
        return [_answer(name, (value, *args[1:]), kwargs) for value in args[0]]
    value, out = args[0], kwargs.get("out")
    kind = KINDS.get(name.removesuffix("_out"))
    made = value if kind is None else _made(kind, value, args)  # waits, and those in place, return what they are given
    return made if out is None else out.copy_(made)


def _made(kind: CollectiveKind, value: torch.Tensor, args: Any) -> torch.Tensor:
    match COLLECTIVES[kind].result:
        case "same":
            return value.clone()
        case "gathered":
            return value.repeat(args[1], *[1] * (value.dim() - 1))
        case "part":
            return value[: value.shape[0] // args[2]].clone()
        case "splits":
            rows = sum(args[1])
            return _repeat_part(value.reshape(-1), rows * value[:1].numel()).view(rows, *value.shape[1:])
