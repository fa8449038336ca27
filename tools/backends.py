"""Print the page of other compilers, with the table recorded by `make test-backends`: `python -m tools.backends`."""

from __future__ import annotations

import sys

from dcompile.kernel_backends.names import NAMED
from tests.kernel_backends.fakes import FAKED
from tests.kernel_backends.matrix import CALLABLE, COLUMNS, NAMES, OF_ATEN, recorded

TEXT = """# Other compilers for the kernels

This page is printed by `python -m tools.backends`; its table is what `make test-backends` has found.

Option `kernels` says who makes the kernels between collectives. Everything else stays dcompile's: capture, adapters,
collectives and their overlap, agreement between ranks, and the memory plan.

```python
import torch
import dcompile


def eager(gm, example_inputs):
    \"\"\"A compiler by torch's contract: it gets a graph of ATen operations and fake inputs.\"\"\"
    return gm.forward


model = dcompile.compile(torch.nn.Linear(8, 8), options={"kernels": eager})
model(torch.randn(4, 8)).sum().backward()
print(dcompile.receipt(model).regions)
```

`torch.compile(model, backend="dcompile", options={"kernels": "inductor"})` does the same.

| `kernels=` | Who makes kernels |
|---|---|
| `"auto"` | dcompile |
| `"aten"` | ATen, operation by operation: for debugging communication |
| `"cudagraphs"` | ATen, replayed as CUDA graphs by dcompile's recorder |
| a name below | that compiler, once it is installed |
| another name in torch's registry (`torch._dynamo.list_backends(None)`), such as `"aot_eager"` | that backend |
| a callable `fn(gm, example_inputs)` | whatever it returns: a function of tensors |

## What is handed over

The graph is cut into regions at collectives, each as large as they allow. A backward under DDP has a region for each
bucket; FSDP2 has one for each gathered group, forward and backward. Views belong to the region that reads them. Random
numbers, changes of inputs, collectives of the model's own, and what returns sizes that depend on values stay outside.

A region is an FX graph with fixed strides. Its call is one opaque step of the schedule. Collectives are placed around
regions as around kernels. Gradients are copied from a region's results to their bucket; `bytes_copied` of the receipt
counts that. Equal regions are compiled once.

In a program with collectives, each kind of region is measured once, with random inputs, before the program is planned.
The first rank's time counts on all ranks, and is kept in the cache. Regions with symbolic sizes, or without room for
another set of inputs, are estimated from their matrix products and from what they read and write. So are those of
`dcompile.precompile`.

`inductor` gets operations that its own table takes apart. Under DDP and FSDP2 it trains bit for bit as
`torch.compile(backend="inductor")` does under stock's collectives, where kernels compute alike in smaller graphs.

## What is refused

A compiler that cannot take a region raises an error, or its row below says so. That region runs on dcompile's own
kernels. The receipt says how many of the regions the compiler made, and has a row for each reason:
`fallback: region left by onnxruntime: training graph x2`. `log="kernels"` names the regions. A compiler that is not
installed is an error at the call, with the line that installs it. One that returns another shape or dtype is an error
at the first call.

{table}

{legend}

Name and version enter the cache key and what ranks compare. Of a callable these are its module, qualified name, and the
version of its package or a digest of its file. A lambda, a closure or an object has no such name, and a name in torch's
registry no version unless an installed package declares it. Nothing that these make is cached, and the receipt says so.
A program from the cache has its regions compiled anew, by the compiler's own cache if it has one.

Programs with regions are recorded as CUDA graphs only with `inductor`. Parameters are inputs of regions, not constants:
updates and `load_state_dict` count at the next call.

| Compiler | Install |
|---|---|
{installs}
"""
OPEN = "own kernels: "


def page() -> str:
    """Return the whole page."""
    found = recorded()
    reasons = dict.fromkeys(cell.removeprefix(OPEN) for row in found.values() for cell in row.values() if OPEN in cell)
    marks = {reason: number for number, reason in enumerate(reasons, 1)}
    head = ["| Compiler | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = [f"| {_name(name)} | " + " | ".join(_cell(found[name][c], marks) for c in COLUMNS) + " |" for name in NAMES]
    legend = [f"- own kernels {number}: it refuses a region for this reason: {text}" for text, number in marks.items()]
    legend.append(f"- {OF_ATEN}: ATen's kernels, replayed as CUDA graphs on GPUs; on CPUs, where this was run, called")
    legend.append("- \\*: tested with a fake of its package that keeps torch's contract")
    installs = "\n".join(f"| `{name}` | `{row.install}` |" for name, row in NAMED.items())
    return _filled({"table": "\n".join([*head, *rows]), "legend": "\n".join(legend), "installs": installs})


def _filled(parts: dict[str, str]) -> str:
    """Return the text with its parts filled in; braces of its example stay."""
    text = TEXT
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    return text


def _name(name: str) -> str:
    return name if name == CALLABLE else f"`{name}`" + (" \\*" if name in FAKED else "")


def _cell(cell: str, marks: dict[str, int]) -> str:
    return f"own kernels {marks[cell.removeprefix(OPEN)]}" if cell.startswith(OPEN) else cell


if __name__ == "__main__":
    sys.stdout.write(page())
