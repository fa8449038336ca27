"""What the sweep runs: an entry of torch's table of operators, a dtype, and how it is called."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tests.device import device

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
KINDS = ("plain", "inplace", "dynamic", "special", "errors")
LIMITS = {"float32": 6, "dynamic": 2, "errors": 3}
LIMIT = 3
"""Sample inputs of a case, by its dtype or kind, beside the variants made of them; most entries have about seven.
With symbolic sizes each costs seconds: Dynamo then reasons about every size."""
LARGEST = 1 << 20
"""Elements of a sample input; larger ones show nothing that smaller ones do not."""
EAGER_CRASHES = frozenset(
    ("nn.functional.pdist", "native_batch_norm", "_segment_reduce.offsets", "_segment_reduce.lengths")
)
"""Entries that, in eager itself, end the process on empty inputs (torch 2.13)."""
EAGER_WRONG = frozenset({("nn.functional.avg_pool2d", "cuda")})
"""(entry, device) where eager's gradient of channels-last images is wrong: with a divisor_override of 2, torch 2.11 on
an H200 is off by 5.5 from what it gives for row-major ones, and from the CPU's, which are equal."""
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e30, -1e30, 1e-30)
"""What every input of a case of kind `special` holds somewhere."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """`entry` is the operator's name and variant; `kind` is one of KINDS.

    plain: called as it is, with a backward where there is one; inplace: on an input of the graph, which it changes;
    dynamic: with dynamic=True; special: on infinities, NaN and signed zeros; errors: on what eager refuses.
    """

    entry: str
    dtype: str
    kind: str = "plain"

    def __str__(self) -> str:
        return f"{self.entry}|{self.dtype}|{self.kind}"

    @staticmethod
    def parse(text: str) -> Case:
        return Case(*text.split("|"))


def grouped(cases: Iterable[Case]) -> list[tuple[Case, ...]]:
    """Cases that one graph may hold: those of one entry, with fixed sizes or with symbolic ones; in the order given."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        apart = case.kind if case.kind in ("dynamic", "errors") else ""
        groups.setdefault((case.entry, apart), []).append(case)
    return list(map(tuple, groups.values()))


@cache
def operators() -> dict[str, Any]:
    """torch's table, by name and variant."""
    import torch.testing._internal.common_methods_invocations as table

    # the table seeds random operators inside the call, which Dynamo will not trace: ours are seeded before it
    table.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in table.op_db}


def all_cases() -> Iterator[Case]:
    """Every case of the full sweep."""
    for entry, op in operators().items():
        for dtype in DTYPES:
            if getattr(torch, dtype) not in op.supported_dtypes(device()):
                continue
            yield Case(entry, dtype)
            if op.inplace_variant is not None:
                yield Case(entry, dtype, "inplace")
            if dtype in ("float32", "int64") and random.Random(f"{entry} {dtype}").randrange(3) == 0:
                yield Case(entry, dtype, "dynamic")
            if dtype in ("float32", "bfloat16") and _is_elementary(op):
                yield Case(entry, dtype, "special")
        if op.error_inputs_func is not None:
            yield Case(entry, "float32", "errors")


def _is_elementary(op: Any) -> bool:
    """One element, or the elements of one row, at a time: what infinities and NaN give is defined."""
    import torch.testing._internal.opinfo.core as core

    return isinstance(op, (core.UnaryUfuncInfo, core.BinaryUfuncInfo, core.ReductionOpInfo))


def is_elementwise(case: Case) -> bool:
    """One element at a time, and on inputs that it leaves as they are."""
    import torch.testing._internal.opinfo.core as core

    op = operators()[case.entry]
    return case.kind == "plain" and isinstance(op, (core.UnaryUfuncInfo, core.BinaryUfuncInfo))


def has_backward(case: Case) -> bool:
    op = operators()[case.entry]
    dtype = getattr(torch, case.dtype)
    return case.kind == "plain" and bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device())


@dataclass(frozen=True, slots=True)
class Sample:
    """One way to call the operator of a case; `label` says where it comes from."""

    case: Case
    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Any
    """What torch's table does with the result before it can be compared: signs of singular vectors, for example."""


def samples(case: Case, limit: int | None = None) -> list[Sample]:
    """Up to `limit` of the table's sample inputs, chosen by a seed; then one of them strided, empty, channels-last."""
    op = operators()[case.entry]
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    if case.kind == "errors":
        found = [error.sample_input for error in op.error_inputs(device())]
    else:
        found = list(op.sample_inputs(device(), dtype, requires_grad=has_backward(case)))
    numbered = [(n, s) for n, s in enumerate(found) if _numel(s) <= LARGEST]
    random.Random(str(case)).shuffle(numbered)
    if limit is None:
        limit = LIMITS.get(case.kind, LIMITS.get(case.dtype, LIMIT))
    chosen = sorted(numbered[:limit], key=lambda pair: pair[0])
    result = [_sample(case, f"sample {n}", s) for n, s in chosen]
    if case.kind == "special":
        return [_spoilt(sample) for sample in result]
    if case.kind in ("dynamic", "errors"):
        return result
    largest = max(chosen, key=lambda pair: _numel(pair[1]), default=None)
    return result if largest is None else [*result, *_variants(case, *largest)]


def _variants(case: Case, number: int, given: Any) -> Iterator[Sample]:
    """Other layouts and sizes of one sample."""
    sample = _sample(case, f"sample {number}", given)
    yield _sample(case, f"sample {number}, strided", given.noncontiguous())
    if case.entry not in EAGER_CRASHES:
        yield _emptied(replace(sample, label=f"{sample.label}, empty"))
    if any(t.dim() == 4 for t in tensors_in(sample.args)) and (case.entry, device()) not in EAGER_WRONG:
        yield mapped(replace(sample, label=f"{sample.label}, channels last"), _channels_last)


def _sample(case: Case, label: str, given: Any) -> Sample:
    return Sample(case, label, (given.input, *given.args), dict(given.kwargs), given.output_process_fn_grad)


def _numel(sample: Any) -> int:
    return max((t.numel() for t in tensors_in((sample.input, sample.args, sample.kwargs))), default=0)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def mapped(sample: Sample, function: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    """The sample with a function applied to each of its tensors."""
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, function, (sample.args, sample.kwargs))
    return replace(sample, args=args, kwargs=kwargs)


def _emptied(sample: Sample) -> Sample:
    """No elements along the first dimension of the first tensor, and of all that are as long there."""
    size = next((t.shape[0] for t in tensors_in(sample.args) if t.dim()), 0)

    def cut(t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided or not t.dim() or t.shape[0] != size:
            return t
        return t.detach()[:0].clone().requires_grad_(t.requires_grad)

    return mapped(sample, cut)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    if t.dim() != 4 or t.layout != torch.strided:
        return t
    return t.detach().clone(memory_format=torch.channels_last).requires_grad_(t.requires_grad)


def _spoilt(sample: Sample) -> Sample:
    """Special values spread over the floating-point inputs, at places that differ from one input to the next."""
    starts = iter(range(len(SPECIAL) ** 2))

    def spoil(t: torch.Tensor) -> torch.Tensor:
        if not t.dtype.is_floating_point or t.layout != torch.strided:
            return t
        t = t.detach().clone()
        if t.is_contiguous():
            put_round(t.view(-1), SPECIAL, next(starts))
        return t

    return mapped(replace(sample, label=f"{sample.label}, special"), spoil)


def put_round(flat: torch.Tensor, values: Sequence[float], start: int) -> None:
    """Every third element becomes the next of `values`, going round."""
    places = range(start % 3, flat.numel(), 3)
    for count, place in enumerate(places):
        flat[place] = values[(start + count) % len(values)]
