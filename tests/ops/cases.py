"""What the sweep runs: an entry of torch's table of operators, a dtype, and how it is called."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
KINDS = ("plain", "inplace", "dynamic")
LIMIT = 2
"""Sample inputs of one case; some entries have over a thousand, and each costs a kernel or two to compile."""
LARGEST = 1 << 20
"""Elements of a sample input; larger ones show nothing that smaller ones do not."""
EAGER_CRASHES = frozenset(
    ("nn.functional.pdist", "native_batch_norm", "_segment_reduce.offsets", "_segment_reduce.lengths")
)
"""Entries that, in eager itself, end the process on empty inputs (torch 2.13)."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """`entry` is the operator's name and variant; `kind`: called as it is (with a backward where there is one), in
    place on an input of the graph, or with dynamic=True."""

    entry: str
    dtype: str
    kind: str = "plain"

    def __str__(self) -> str:
        return f"{self.entry}|{self.dtype}|{self.kind}"

    @staticmethod
    def parse(text: str) -> Case:
        return Case(*text.split("|"))


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
            if getattr(torch, dtype) not in op.supported_dtypes("cpu"):
                continue
            yield Case(entry, dtype)
            if op.inplace_variant is not None and dtype in ("float32", "int64"):
                yield Case(entry, dtype, "inplace")
            # every third entry: with symbolic sizes the graph runs on ATen's kernels, so capture is what is tried
            if dtype == "float32" and random.Random(entry).randrange(3) == 0:
                yield Case(entry, dtype, "dynamic")


def has_backward(case: Case) -> bool:
    op = operators()[case.entry]
    dtype = getattr(torch, case.dtype)
    return case.kind == "plain" and bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")


@dataclass(frozen=True, slots=True)
class Sample:
    """One way to call the operator; `label` says where it comes from."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Any
    """What torch's table does with the result before it can be compared: signs of singular vectors, for example."""


def samples(case: Case, limit: int = LIMIT) -> list[Sample]:
    """Up to `limit` of the table's sample inputs, chosen by a seed, then one strided and one empty variant."""
    op = operators()[case.entry]
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=has_backward(case)))
    numbered = [(n, s) for n, s in enumerate(found) if _numel(s) <= LARGEST]
    random.Random(str(case)).shuffle(numbered)
    chosen = sorted(numbered[:limit], key=lambda pair: pair[0])
    result = [_sample(f"sample {n}", s) for n, s in chosen]
    if case.kind != "plain":
        return result
    largest = max(chosen, key=lambda pair: _numel(pair[1]), default=None)
    if largest is not None:
        result.append(_sample(f"sample {largest[0]}, strided", largest[1].noncontiguous()))
        if case.entry not in EAGER_CRASHES:
            result.append(_emptied(_sample(f"sample {largest[0]}, empty", largest[1])))
    return result


def _sample(label: str, given: Any) -> Sample:
    return Sample(label, (given.input, *given.args), dict(given.kwargs), given.output_process_fn_grad)


def _numel(sample: Any) -> int:
    return max((t.numel() for t in tensors_in((sample.input, sample.args, sample.kwargs))), default=0)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def mapped(sample: Sample, function: Any) -> Sample:
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
