"""Print the page that follows one program through every stage, from the compiler's dump.

`python -m tools.one_program` compiles a small model in DistributedDataParallel, in a process group of one rank, with
`DCOMPILE_DUMP`, and prints `docs/internals/one-program.md`. `tests/test_docs.py` checks that the page is up to date.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dcompile


class Block(torch.nn.Module):
    """A linear layer, ReLU, and RMSNorm in elementary operations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.scale = torch.nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.relu(self.up(x))
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * self.scale


INTRODUCTION = """# One program, stage by stage

This page is printed by `python -m tools.one_program`, which compiles the model below and reads the dump.
For a model of your own, `DCOMPILE_DUMP=1 python your_script.py` writes the same files.

The model is in DistributedDataParallel, so its backward ends in an all-reduce:
"""

STAGES = {
    "captured": """## 1. Captured graph

TorchDynamo traces the call, and AOTAutograd splits it into a forward and a backward of ATen operations.
The partitioner decides which values the forward saves. File: `forward0/graph.py`.
""",
    "lowered": """## 2. Lowered program

`dcompile/codegen/lower/` turns each operation into a loop or a library call. File: `forward0/00_lower.txt`.
Each loop has a row space and an inner space; [ir.md](ir.md) explains the notation.
""",
    "scheduled": """## 3. Scheduled program

The passes of [passes.md](passes.md) rewrite the program. Here is what each of them changes, the forward first.
Fusion makes one kernel of all loops, and memory planning gives each buffer its place.
""",
    "backward": """## 4. Backward with its collective

The backward gets the gradient of the result and the saved values. Lowered:
""",
    "collective": """Fusion works as in the forward. `insert_ddp_buckets` then places the gradients in one bucket
and adds `start all_reduce`; the wait moves to the end. The planned program:
""",
    "kernel": """## 5. Kernel

The C++ target prints one function for each loop; equal loops share it. This is the forward's: two passes over each
row, and `g++` finds the vectors. [cpp-codegen.md](cpp-codegen.md) says when dcompile writes vectors itself.
""",
    "host": """## 6. Host program

The host program is Python that calls kernels and libraries in order. The backward's starts its all-reduce through
`buckets`, a `BucketSource`; `dcompile/collectives/` says what that is. File: `backward0/host.py`.
""",
    "receipt": """## 7. Receipt

Rank 0 prints it after the first step: what became of the model, in three lines.
[receipt.md](../guide/receipt.md) explains them and the fields behind them.
""",
}


def dump_block(folder: Path) -> str:
    """Compile and run one training step with a dump in `folder`; return the receipt."""
    logging.getLogger("dcompile").setLevel(logging.WARNING)  # the folder's name is not of the page
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(Block())
        options = {"dump": str(folder), "matmul": "aten", "receipt": False, "cache_dir": str(folder / "cache")}
        dcompile.compile(model, options=options)
        model(torch.randn(32, 64)).square().mean().backward()
        return str(dcompile.receipt(model))
    finally:
        dist.destroy_process_group()


def graph_lines(text: str) -> Iterator[str]:
    """Yield an FX graph's lines without annotations, comments and deletions, which depend on the version of torch."""
    for line in text.splitlines():
        bare = re.sub(r': "[^"]*"', "", line).split(";")[0].rstrip()
        if bare.strip() and not bare.strip().startswith(("#", "class ")):
            yield bare.removeprefix("    ")


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def changes(folder: Path) -> Iterator[str]:
    """Yield the difference that each pass makes that changes the program."""
    for path in sorted(folder.glob("*.diff")):
        number, name = path.stem.split("_", 1)
        lines = path.read_text().splitlines()[2:]
        yield f"Pass {int(number)}, `{name}`:\n\n{fenced('diff', chr(10).join(lines))}"


def page() -> str:
    """Return the whole page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        receipt = dump_block(folder)
        forward, backward = folder / "rank0" / "forward0", folder / "rank0" / "backward0"
        source = Path(__file__).read_text()
        model = source[source.index("class Block") : source.index("INTRODUCTION")]
        (kernel,) = (forward / "kernels").glob("*.cpp")
        last = max(backward.glob("[0-9]*.txt"))
        parts = [
            INTRODUCTION,
            fenced("python", model),
            STAGES["captured"],
            fenced("python", "\n".join(graph_lines((forward / "graph.py").read_text()))),
            STAGES["lowered"],
            fenced("text", (forward / "00_lower.txt").read_text()),
            STAGES["scheduled"],
            *changes(forward),
            STAGES["backward"],
            fenced("text", (backward / "00_lower.txt").read_text()),
            STAGES["collective"],
            fenced("text", last.read_text()),
            STAGES["kernel"],
            fenced("cpp", kernel.read_text()),
            STAGES["host"],
            fenced("python", (backward / "host.py").read_text()),
            STAGES["receipt"],
            fenced("text", re.sub(r"[\d.]+ s\b", "... s", receipt)),
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
