"""One case: eager and compiled on the same inputs under the same seed, and how near they have to be.

Results must agree within torch.testing's defaults for their dtype. Where they do not, sums were taken in another order:
then ours may be no further from the float64 answer than twice eager's own largest error, beside those defaults.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch

import dcompile
from dcompile.errors import DcompileError
from tests.ops.cases import LIMIT, Case, Sample, has_backward, mapped, operators, samples, tensors_in

SEED = 7
ALONE = "each sample has to start from the seed"


def run(case: Case, limit: int = LIMIT, only: str = "") -> dict[str, Any]:
    """What became of a case, as plain data: status, how many samples, fallbacks by name, and what went wrong.

    `only` is the label of one sample.
    """
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what eager warns about is torch's business
        try:
            given = [sample for sample in samples(case, limit) if only in ("", sample.label)]
            usable = [(s, e) for s in given if (e := _eager(case, s)) is not None]
        except Exception as error:
            return {"case": str(case), "status": "skip", "detail": f"no samples: {_short(error)}"}
        if not usable:
            return {"case": str(case), "status": "skip", "detail": "eager refuses every sample"}
        problems, fallbacks = _compare(case, usable) if not _is_random(case, usable) else ([ALONE], Counter())
        if problems and (len(usable) > 1 or problems == [ALONE]):  # which of them was it?
            each = [_compare(case, [pair]) for pair in usable]
            together = [] if problems == [ALONE] else [f"together only: {problems[0]}"]
            problems = [problem for found, _ in each for problem in found] or together
            fallbacks = sum((counted for _, counted in each), Counter())
    return {
        "case": str(case),
        "status": "fail" if problems else "pass",
        "samples": len(usable),
        "backward": has_backward(case) and any(expected.grads is not None for _, expected in usable),
        "fallbacks": dict(fallbacks),
        "detail": "; ".join(problems),
        "seconds": round(time.perf_counter() - began, 2),
    }


class Expected:
    """Eager's answer; `grads` is None where there is no backward; `exact` is the float64 answer where there is one."""

    def __init__(self, outputs: list[Any], grads: list[Any] | None, repeatable: bool) -> None:
        self.outputs, self.grads, self.repeatable = outputs, grads, repeatable
        self.exact: Expected | None = None

    @property
    def parts(self) -> tuple[list[Any], list[Any] | None]:
        return self.outputs, self.grads


def _eager(case: Case, sample: Sample) -> Expected | None:
    """Eager's answer, or None where eager raises."""
    try:
        first, second = (_call(case, _function(case, [sample]), [sample]) for _ in range(2))
    except Exception:
        return None
    filled = "empty" not in case.entry  # what memory happened to hold is nothing to compare
    expected = Expected(*first[0], repeatable=filled and _same(first[0], second[0]))
    try:
        (exact,) = _call(case, _function(case, [sample]), [mapped(sample, _double)])
        expected.exact = Expected(*exact, repeatable=True)
    except Exception:
        expected.exact = None  # integers, or an operator without float64
    return expected


def _is_random(case: Case, usable: list[tuple[Sample, Expected]]) -> bool:
    """Does the answer depend on the seed? Then samples cannot share a graph, where only the first starts from it."""
    return any(
        expected.repeatable and not _same(_call(case, _function(case, [s]), [s], SEED + 1)[0], expected.parts)
        for s, expected in usable
    )


def _function(case: Case, given: list[Sample]) -> Any:
    """The operator on several samples, so that one graph holds them all: compiling is what costs."""
    op = operators()[case.entry]
    function = op.inplace_variant if case.kind == "inplace" else op.op
    finishers = [sample.finish for sample in given]

    def step(inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [finish(function(*args, **kwargs)) for finish, (args, kwargs) in zip(finishers, inputs, strict=True)]

    return step


def _call(case: Case, step: Any, given: list[Sample], seed: int = SEED) -> list[tuple[list[Any], list[Any] | None]]:
    """(outputs, gradients) for each sample."""
    inputs = [mapped(sample, _fresh) for sample in given]
    torch.manual_seed(seed)
    with torch.set_grad_enabled(has_backward(case)):
        results = step([(sample.args, sample.kwargs) for sample in inputs])
    found: list[tuple[list[Any], list[Any] | None]] = []
    for sample, result in zip(inputs, results, strict=True):
        outputs = list(torch.utils._pytree.tree_leaves(result))
        grads = _gradients(sample, outputs) if has_backward(case) else None
        outputs += list(tensors_in((sample.args, sample.kwargs)))  # which the operator may have changed
        found.append(([o.detach() if isinstance(o, torch.Tensor) else o for o in outputs], grads))
    return found


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: some operators change their arguments, such as running statistics."""
    if t.layout != torch.strided or t.is_quantized or t.is_conj() or t.is_neg():
        return t.detach().clone().requires_grad_(t.requires_grad)
    storage = t.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)


def _gradients(sample: Sample, outputs: list[Any]) -> list[Any] | None:
    wanted = [t for t in tensors_in((sample.args, sample.kwargs)) if t.requires_grad]
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not wanted or not roots:
        return None
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in roots]
    return list(torch.autograd.grad(roots, wanted, cotangents, allow_unused=True, retain_graph=True))


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.dtype.is_floating_point else t


def _compare(case: Case, usable: list[tuple[Sample, Expected]]) -> tuple[list[str], Counter[str]]:
    """(what went wrong, fallbacks)."""
    torch._dynamo.reset()
    given = [sample for sample, _ in usable]
    label = given[0].label if len(given) == 1 else f"{len(given)} samples"
    dynamic = case.kind == "dynamic"
    try:
        step = dcompile.compile(_function(case, given), dynamic=dynamic, options={"receipt": False})
        actual = _call(case, step, given)
    except Exception as error:
        return [f"{label}: {_short(error)}"], Counter()
    try:
        fallbacks = Counter(dcompile.receipt(step).fallbacks)
    except DcompileError:
        fallbacks = Counter()  # Dynamo found nothing to compile
    problems = []
    for (sample, expected), (outputs, grads) in zip(usable, actual, strict=True):
        problem = _differs(expected, outputs, grads)
        if problem:
            problems.append(f"{sample.label}: {problem}")
    return problems, fallbacks


def _differs(expected: Expected, outputs: list[Any], grads: list[Any] | None) -> str | None:
    exact = expected.exact
    pairs = [("output", expected.outputs, outputs, exact.outputs if exact else None)]
    if (expected.grads is None) != (grads is None):
        return "gradients are " + ("missing" if grads is None else "there where eager has none")
    if grads is not None:
        pairs.append(("gradient", expected.grads or [], grads, exact.grads if exact else None))
    for what, theirs, ours, reference in pairs:
        if len(theirs) != len(ours):
            return f"{len(ours)} {what}s where eager has {len(theirs)}"
        aligned = reference if reference is not None and len(reference) == len(theirs) else [None] * len(theirs)
        for number, (their, our, right) in enumerate(zip(theirs, ours, aligned, strict=True)):
            problem = _far(their, our, right, expected.repeatable)
            if problem:
                return f"{what} {number}: {problem}"
    return None


def _far(their: Any, our: Any, right: Any, repeatable: bool) -> str | None:
    if not isinstance(their, torch.Tensor):
        return None if our == their or our != our or not repeatable else f"{our} where eager has {their}"
    if not isinstance(our, torch.Tensor):
        return f"a {type(our).__name__}"
    if (our.dtype, our.shape, our.layout) != (their.dtype, their.shape, their.layout):
        return f"{our.dtype} {tuple(our.shape)} where eager has {their.dtype} {tuple(their.shape)}"
    if not repeatable:
        return None  # uninitialised memory: nothing to compare but shapes
    try:
        torch.testing.assert_close(our, their, equal_nan=True)
    except AssertionError as error:
        if isinstance(right, torch.Tensor) and _as_near(our, their, right):
            return None
        return " ".join(str(error).split()[:40])
    return None


def _as_near(our: torch.Tensor, their: torch.Tensor, right: torch.Tensor) -> bool:
    """No further from the float64 answer than twice eager, beside the default tolerance."""
    if not our.dtype.is_floating_point or right.shape != our.shape or not right.dtype.is_floating_point:
        return False
    ours, theirs = our.double(), their.double()
    known = right.isfinite() & (ours.isfinite() | theirs.isfinite())  # eager may overflow where the answer does not
    special = [torch.where(known, 0, values).nan_to_num(1, 2, 3) for values in (ours, theirs)]
    if not torch.equal(*special):
        return False
    rtol, atol = torch.testing._comparison.default_tolerances(our.dtype)
    off = (theirs - right)[known & theirs.isfinite()].abs()
    allowed = atol + rtol * right[known].abs() + (2 * off.max() if off.numel() else 0)
    return bool(((ours - right)[known].abs() <= allowed).all())


def _same(first: Any, second: Any) -> bool:
    """Did eager give the same twice?"""
    return all(map(_equal, torch.utils._pytree.tree_leaves(list(first)), torch.utils._pytree.tree_leaves(list(second))))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b or a != a)
    if a.layout != torch.strided or a.is_quantized:
        return True
    return torch.equal(*(t.nan_to_num() if t.dtype.is_floating_point else t for t in (a, b)))


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])[:300]}"


def main(case: str, only: str = "") -> None:
    """Run one case here, to debug it: python -m tests.ops.check 'add|float32|plain' ['sample 0, strided']."""
    print(json.dumps(run(Case.parse(case), only=only), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
