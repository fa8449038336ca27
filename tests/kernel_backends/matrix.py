"""Every compiler that option `kernels` names, in every way of running a model: what `docs/guide/backends.md` shows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dcompile
from dcompile.explain.receipt import Receipt
from dcompile.kernel_backends.names import NAMED, REPLAYED
from tests.kernel_backends.fakes import eager, installed

RECORDED = Path(__file__).parent.parent / "golden" / "kernel_backends" / "matrix.json"
CALLABLE = "a callable"
NAMES = ("inductor", REPLAYED, *(name for name in NAMED if name != "inductor"), CALLABLE)
COMPILED, OF_ATEN = "compiled", "ATen's"


class Block(nn.Module):
    """Embedding, attention, a norm and a residual layer: what a transformer is made of."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, width), nn.LayerNorm(width)
        self.all_heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.all_heads(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + nn.functional.gelu(self.out(attended.transpose(1, 2).flatten(2)), approximate="tanh")


def kernels_of(name: str) -> Any:
    return eager if name == CALLABLE else name


def outcome(name: str, receipt: Receipt) -> str:
    """`compiled`, or why regions ran on kernels of dcompile's own. CUDA graphs have no regions, and a CPU none."""
    if name == REPLAYED:
        assert not receipt.regions and not receipt.kernel_calls and not receipt.fallbacks
        assert receipt.replays or any("without a CUDA graph" in note for note in receipt.notes)
        return OF_ATEN
    left = {line.partition(": ")[2] for line in receipt.fallbacks if line.startswith("region left by")}
    assert receipt.regions or left, receipt
    assert not (receipt.regions and left), f"some regions, not others: {receipt}"
    return COMPILED if not left else f"own kernels: {', '.join(sorted(left))}"


def near(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def inference(name: str, dynamic: bool = False) -> Receipt:
    torch.manual_seed(0)
    model = Block().eval()
    twin = copy.deepcopy(model)
    call = dcompile.compile(model, dynamic=dynamic, options={"kernels": kernels_of(name), "receipt": False})
    with torch.no_grad():
        for length in (8, 8, 12, 5) if dynamic else (8, 8):
            tokens = torch.randint(32, (2, length))
            near(call(tokens), twin(tokens))
    return dcompile.receipt(call)


def dynamic_shapes(name: str) -> Receipt:
    return inference(name, dynamic=True)


def training(name: str) -> Receipt:
    torch.manual_seed(0)
    model = Block()
    twin, tokens = copy.deepcopy(model), torch.randint(32, (2, 8))
    call = dcompile.compile(model, options={"kernels": kernels_of(name), "receipt": False})
    for each in (call, twin):
        each(tokens).square().mean().backward()
    near([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    return dcompile.receipt(call)


ALONE: dict[str, Callable[[str], Receipt]] = {
    "inference": inference,
    "training": training,
    "dynamic shapes": dynamic_shapes,
}
RANKS = {"DDP": "ddp", "FSDP2": "fsdp2"}
"""By a case of `tests.distributed.backend_cases`."""
COLUMNS = ("inference", "training", "DDP", "FSDP2", "dynamic shapes")


def alone(name: str, column: str) -> str:
    with installed(name):
        return outcome(name, ALONE[column](name))


def recorded() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return found


def record(name: str, column: str, found: str) -> None:
    """Write a cell of the table."""
    table = recorded()
    table.setdefault(name, {})[column] = found
    ordered = {n: {c: table[n][c] for c in COLUMNS if c in table[n]} for n in NAMES if n in table}
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    RECORDED.write_text(json.dumps(ordered, indent=2) + "\n")
