"""Cases of one operator: eager and compiled on the same inputs under the same seed; was it compiled, and is it right?

All cases of an operator go into one graph, since compiling is what costs; what is wrong there is run alone. A sample
counts as captured only if a graph of it ran that our backend compiled. Most are captured whole: fullgraph=True says so.
Where Dynamo refuses that, each sample is run alone and with graph breaks, and its receipt is asked.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import dcompile
from tests.device import device
from tests.ops.cases import Case, Sample, has_backward, is_elementwise, mapped, operators, samples, tensors_in
from tests.ops.compare import Answer, difference, same

SEED = 7
OPTIONS = {"receipt": False, "fallback_random": True}
"""Random numbers are eager's here, so that results can be compared."""
SEEDED = ("torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward")
"""They return a seed behind two results: without dropout, memory that nothing was written to."""
Usable = list[tuple[Sample, Answer]]


@dataclass(slots=True)
class Found:
    """What compiling some samples came to."""

    problems: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    """Samples that were captured in one graph."""
    missed: list[str] = field(default_factory=list)
    """Samples of which nothing was captured, and why."""
    broken: list[str] = field(default_factory=list)
    """Samples that were captured in part, and what broke the graph."""
    torch: list[str] = field(default_factory=list)
    """What is wrong, and is as wrong when torch's own backend "aot_eager" compiles it: tracing makes it so."""

    def __add__(self, other: Found) -> Found:
        return Found(
            self.problems + other.problems, self.fallbacks + other.fallbacks, self.whole + other.whole,
            self.missed + other.missed, self.broken + other.broken, self.torch + other.torch,
        )  # fmt: skip


def run(cases: Sequence[Case], limit: int | None = None, only: str = "") -> list[dict[str, Any]]:
    """What became of each case, as plain data; cases as `grouped` puts them together. `only`: one sample's label.

    status: pass, fail, torch (fails in the same way with torch's own backend "aot_eager"), uncaptured (right, but not
    one sample of it was compiled), skip (eager refuses every sample).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what eager warns about is torch's business
        if cases[0].kind == "errors":
            return [_refusals(case, limit, only) for case in cases]
        usable: dict[Case, Usable] = {}
        skipped: dict[Case, str] = {}
        for case in cases:
            try:
                given = [sample for sample in samples(case, limit) if only in ("", sample.label)]
                usable[case] = [(s, answer) for s in given if (answer := _eager(s)) is not None]
            except ImportError:
                raise  # what is missing here would pass for what eager refuses
            except Exception as error:
                skipped[case] = f"no samples: {_short(error)}"
                continue
            if not usable[case]:
                skipped[case] = "eager refuses every sample"
        began = time.perf_counter()
        found = _compare_all({case: pairs for case, pairs in usable.items() if pairs})
        seconds = round(time.perf_counter() - began, 2)
    return [
        {"case": str(case), "status": "skip", "detail": skipped[case]}
        if case in skipped
        else {**_answer(case, usable[case], found[case]), "seconds": seconds}
        for case in cases
    ]


def _answer(case: Case, usable: Usable, found: Found) -> dict[str, Any]:
    uncaptured = len(found.missed) == len(usable)
    status = "fail" if found.problems else "torch" if found.torch else "uncaptured" if uncaptured else "pass"
    details = {"fail": found.problems, "torch": found.torch, "uncaptured": found.missed[:1], "pass": []}
    return {
        "case": str(case),
        "status": status,
        "samples": len(usable),
        "whole": found.whole,
        "missed": found.missed,
        "broken": found.broken,
        "backward": has_backward(case) and any(expected.grads is not None for _, expected in usable),
        "fallbacks": dict(found.fallbacks),
        "detail": "; ".join(details[status]),
    }


# --- eager ------------------------------------------------------------------------------------------------------------


def _eager(sample: Sample) -> Answer | None:
    """Eager's answer, or None where eager raises."""
    if device() == "cuda" and sample.label.endswith("empty") and _refused_on_cpu(sample):
        return None
    try:
        first, second = (_call(_function([sample]), [sample])[0] for _ in range(2))
    except ImportError:
        raise
    except Exception:
        return None
    first.repeatable = not _shows_old_memory(sample, first) and same(first, second)
    try:
        first.exact = _call(_function([sample]), [_in_float64(sample)])[0]
    except Exception:
        first.exact = None  # integers, or an operator without float64
    return first


def _refused_on_cpu(sample: Sample) -> bool:
    """A position in a table without rows raises there; on a GPU it ends what the process may do with the device."""
    try:
        _call(_function([mapped(sample, lambda t: t.cpu())]), [mapped(sample, lambda t: t.cpu())])
    except Exception:
        return True
    return False


def _shows_old_memory(sample: Sample, answer: Answer) -> bool:
    """Does it return memory that nothing was written to? What that happened to hold is nothing to compare."""
    if sample.case.entry not in ("resize_", "resize_as_"):
        return "empty" in sample.case.entry
    return answer.outputs[0].numel() > sample.args[0].numel()  # type: ignore[no-any-return]


def _among_many(sample: Sample) -> Answer:
    """Eager's answer for the same numbers at the beginning of 64 rows of them.

    ATen's loops over 16-bit numbers go by vectors, and may round otherwise for what is left behind the last whole one:
    rsqrt of a lone float16 number rounds the root too. Either answer is eager's.
    """
    function = _callee(sample.case)

    def first_row(inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.expand(64, *t.shape).contiguous(), inputs[0]
        )
        return [sample.finish(function(*args, **kwargs)[0])]

    return _call(first_row, [sample])[0]


def _is_random(usable: Usable) -> bool:
    """Does the answer depend on the seed? Then samples cannot share a graph, where only the first starts from it."""
    return any(
        expected.repeatable and not same(_call(_function([s]), [s], SEED + 1)[0], expected) for s, expected in usable
    )


def _function(given: list[Sample]) -> Any:
    """The operator on several samples, in one function."""
    parts = [(_callee(sample.case), sample.finish) for sample in given]
    function, finish = parts[0]

    def step(inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [
            finish(function(*args, **kwargs)) for (function, finish), (args, kwargs) in zip(parts, inputs, strict=True)
        ]

    def single(inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Without a loop, where a graph break would leave the whole frame to eager."""
        args, kwargs = inputs[0]
        return [finish(function(*args, **kwargs))]

    return single if len(given) == 1 else step


def _callee(case: Case) -> Any:
    op = operators()[case.entry]
    if case.kind != "inplace":
        return op.op
    method = op.inplace_variant
    if torch.Tag.inplace_view not in _tags(method.__name__) or case.entry.startswith("resize"):
        return method  # of resize_, Dynamo traces nothing anyway
    # Dynamo traces what gives a tensor another shape in place, but not for an input of the graph
    return lambda x, *args, **kwargs: method(x.clone(), *args, **kwargs)


def _tags(name: str) -> Sequence[torch.Tag]:
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, packet.overloads()[0]).tags if packet is not None else ()  # type: ignore[no-any-return]


def _call(step: Any, given: list[Sample], seed: int = SEED) -> list[Answer]:
    """The answer for each sample."""
    inputs = [mapped(sample, _fresh) for sample in given]
    torch.manual_seed(seed)
    with torch.set_grad_enabled(any(has_backward(sample.case) for sample in given)):
        results = step([(sample.args, sample.kwargs) for sample in inputs])
    found: list[Answer] = []
    for sample, result in zip(inputs, results, strict=True):
        outputs = list(torch.utils._pytree.tree_leaves(result))
        if sample.case.entry in SEEDED:
            outputs[2:] = [torch.zeros_like(o) if isinstance(o, torch.Tensor) else o for o in outputs[2:]]
        grads = _gradients(sample, outputs) if has_backward(sample.case) else None
        arguments = list(tensors_in((sample.args, sample.kwargs)))
        aliases = [_lies_in(output, arguments) for output in outputs]
        leaves = [o.detach() if isinstance(o, torch.Tensor) else o for o in (*outputs, *arguments)]
        found.append(Answer(leaves, grads, aliases))
    return found


def _lies_in(output: Any, arguments: list[torch.Tensor]) -> tuple[int, ...]:
    if not isinstance(output, torch.Tensor) or not _has_storage(output):
        return ()
    place = output.untyped_storage().data_ptr()
    return tuple(
        n for n, t in enumerate(arguments) if _has_storage(t) and place and t.untyped_storage().data_ptr() == place
    )


def _has_storage(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and type(t) in (torch.Tensor, torch.nn.Parameter)


def _fresh(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: some operators change their arguments, such as running statistics."""
    if t.layout != torch.strided or t.is_quantized or t.is_conj() or t.is_neg():
        return t.detach().clone().requires_grad_(t.requires_grad)
    storage = t.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)


def _gradients(sample: Sample, outputs: list[Any]) -> list[Any] | None:
    wanted = [t for t in tensors_in((sample.args, sample.kwargs)) if t.requires_grad]
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not wanted or not roots:
        return None
    generator = torch.Generator().manual_seed(SEED)
    drawn = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in roots]
    cotangents = [c.to(o.device, o.dtype) for c, o in zip(drawn, roots, strict=True)]
    return list(torch.autograd.grad(roots, wanted, cotangents, allow_unused=True, retain_graph=True))


def _in_float64(sample: Sample) -> Sample:
    """The sample in float64, also where it names a dtype: else that would be rounded to."""
    wide = mapped(sample, _double)
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.dtype, lambda dtype: torch.float64 if dtype.is_floating_point else dtype, (wide.args, wide.kwargs)
    )
    return replace(wide, args=args, kwargs=kwargs)


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.dtype.is_floating_point else t


# --- compiled ---------------------------------------------------------------------------------------------------------


def _compare_all(usable: dict[Case, Usable]) -> dict[Case, Found]:
    """All cases in one graph; if that is not to be had, or something is wrong, each case by itself."""
    if len(usable) > 1 and not any(map(_is_random, usable.values())):
        together = _compiled([pair for pairs in usable.values() for pair in pairs], fullgraph=True)
        if together.whole:
            # counted by operator: which of its cases calls what is not asked
            return {case: Found(fallbacks=together.fallbacks, whole=len(pairs)) for case, pairs in usable.items()}
    return {case: _compare(pairs) for case, pairs in usable.items()}


def _compare(usable: Usable) -> Found:
    """All samples of a case in one graph; if that is not to be had, or is wrong, each by itself."""
    together = Found()
    if len(usable) > 1 and not _is_random(usable):
        together = _compiled(usable, fullgraph=True)
        if together.whole:
            return together
    alone = sum((_compare_one(pair) for pair in usable), Found())
    if together.problems and not together.missed and not alone.problems and not alone.torch:
        alone.problems = [f"together only: {together.problems[0]}"]
    return alone


def _compare_one(pair: tuple[Sample, Answer]) -> Found:
    """Whole if Dynamo can; else, and where torch itself goes wrong then, as far as it can."""
    whole = _compiled([pair], fullgraph=True)
    if not whole.missed and not (whole.problems and _torch_fails(pair, whole.problems[0], fullgraph=True)):
        return whole
    found = _compiled([pair], fullgraph=False)
    if found.problems and not _torch_fails(pair, found.problems[0], fullgraph=False):
        return found
    if whole.problems or found.problems:
        return Found(torch=whole.problems or found.problems)
    if not found.missed:
        found.broken = [f"{pair[0].label}: {whole.missed[0]}"]
        return found
    captured = _torch_captures(pair)
    if captured:
        return Found([f"{pair[0].label}: nothing is captured where backend aot_eager gets {captured} operations"])
    return Found(missed=whole.missed)


def _torch_fails(pair: tuple[Sample, Answer], problem: str, *, fullgraph: bool) -> bool:
    """Is there the same difference, or the same error, when ATen runs what AOTAutograd traced?"""
    torch._dynamo.reset()
    sample, expected = pair
    dynamic = sample.case.kind == "dynamic"
    try:
        step = torch.compile(_function([sample]), dynamic=dynamic, fullgraph=fullgraph, backend="aot_eager")
        theirs = difference(expected, _call(step, [sample])[0])
    except Exception as error:
        ours = f"{sample.label}: {_short(error)}".replace("aot_eager", "dcompile")
        ours, problem = (text.partition("got types")[0] for text in (ours, problem))  # of what each has saved
        return ours[:200] == problem[:200]
    return f"{sample.label}: {theirs}" == problem or _has_traced_strides(sample, problem)


def _torch_captures(pair: tuple[Sample, Answer]) -> int:
    """How many operations of a sample Dynamo hands to torch's own backend "aot_eager"."""
    torch._dynamo.reset()
    sample, _ = pair
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _call(torch.compile(_function([sample]), dynamic=sample.case.kind == "dynamic", backend=counter), [sample])
    return counter.op_count


def _has_traced_strides(sample: Sample, problem: str) -> bool:
    """Are the strides in which an output differs those that torch's fake tensors have for the operator?"""
    found = re.search(r"output (\d+): strides (\(.*?\)) of", problem)
    if found is None:
        return False
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = mapped(sample, mode.from_tensor)
            outputs = torch.utils._pytree.tree_leaves(_function([sample])([(faked.args, faked.kwargs)]))
    except Exception:
        return False
    number = int(found[1])
    return number < len(outputs) and str(tuple(outputs[number].stride())) == found[2]


def _compiled(usable: Usable, *, fullgraph: bool) -> Found:
    """Samples in one function. If Dynamo refuses a full graph, or finds nothing to compile, they count as missed."""
    torch._dynamo.reset()
    given = [sample for sample, _ in usable]
    label = given[0].label if len(given) == 1 else f"{len(given)} samples"
    dynamic = given[0].case.kind == "dynamic"
    try:
        step = dcompile.compile(_function(given), dynamic=dynamic, fullgraph=fullgraph, options=OPTIONS)
        actual = _call(step, given)
    except torch._dynamo.exc.TorchDynamoException as refusal:
        if fullgraph and not isinstance(refusal, torch._dynamo.exc.BackendCompilerFailed):
            return Found(missed=[_reason(refusal)])
        return Found([f"{label}: {_short(refusal)}"])
    except Exception as error:
        return Found([f"{label}: {_short(error)}"])
    pairs = zip(usable, actual, strict=True)
    problems = [f"{s.label}: {problem}" for (s, expected), ours in pairs if (problem := _wrong(s, expected, ours))]
    receipt = dcompile.receipt(step)
    if not receipt.graphs:
        return Found(problems, missed=["no operation is left for a graph"])
    return Found(problems, Counter(receipt.fallbacks), whole=len(given) if fullgraph and not problems else 0)


def _wrong(sample: Sample, expected: Answer, actual: Answer) -> str | None:
    """What is wrong with `actual`, None if nothing is."""
    problem = difference(expected, actual)
    short = sample.case.dtype in ("bfloat16", "float16") and is_elementwise(sample.case)
    if problem is None or not short or difference(_among_many(sample), actual) is not None:
        return problem
    return None


# --- errors -----------------------------------------------------------------------------------------------------------


def _refusals(case: Case, limit: int | None, only: str) -> dict[str, Any]:
    """Whether what eager refuses is refused compiled as well, in whatever words."""
    given = [sample for sample in samples(case, limit) if only in ("", sample.label)]
    refused = [sample for sample in given if _error(_function([sample]), sample)]
    if not refused:
        return {"case": str(case), "status": "skip", "detail": "eager refuses none of the samples"}
    ours, theirs = [], []
    for sample in refused:
        torch._dynamo.reset()
        step = dcompile.compile(_function([sample]), options=OPTIONS)
        if not _error(step, sample):
            torch._dynamo.reset()
            traced = _error(torch.compile(_function([sample]), backend="aot_eager"), sample)
            (ours if traced else theirs).append(
                f"{sample.label}: no error; eager: {_error(_function([sample]), sample)}"
            )
    status = "fail" if ours else "torch" if theirs else "pass"
    return {"case": str(case), "status": status, "samples": len(refused), "detail": "; ".join(ours or theirs)}


def _error(step: Any, sample: Sample) -> str:
    try:
        _call(step, [sample])
    except Exception as error:
        return _short(error)
    return ""


def _reason(refusal: Exception) -> str:
    """Dynamo's first lines, which name the construct."""
    lines = [line.strip() for line in str(refusal).splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    return f"{lines[0] if lines else type(refusal).__name__} {explanation}"[:240].strip()


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])[:300]}"


def main(case: str, only: str = "") -> None:
    """Run one case here, to debug it: python -m tests.ops.check 'add|float32|plain' ['sample 0, strided']."""
    print(json.dumps(run([Case.parse(case)], only=only)[0], indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
