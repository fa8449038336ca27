"""Model FLOPs utilization (MFU), tokens a second, and the time of a step by kinds of kernels.

FLOPs of a token in training follow PaLM (Chowdhery et al., 2022, appendix B), as torchtitan and nanoGPT count them:

    6 * N + 12 * layers * hidden * length

N is the number of parameters without the embedding table, which needs no FLOPs. The second term is attention's two
matmuls, forward and backward, over all positions: a causal mask does not halve it. Recomputation by checkpointing does
not count. MFU is the rate of these FLOPs over the device's peak for dense bfloat16 matmuls in its data sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Shape(Protocol):
    """Sizes of a model that determine its FLOPs; `gpu_train.Shape` is one."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...


PEAK_TFLOPS: Mapping[str, float] = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H20": 148.0,
    "GH200": 989.4,
    "B200": 2250.0,
    "B100": 1750.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "RTX 4090": 165.2,
}
"""Part of a device's name -> 10^12 dense bfloat16 operations a second (V100: float16), from NVIDIA's data sheets."""


def peak_flops(device: str) -> float | None:
    """Return the peak operations a second of a device of this name; None if the name is unknown."""
    words = device.replace("-", " ").split()
    found = [name for name in PEAK_TFLOPS if set(name.split()) <= set(words)]
    return PEAK_TFLOPS[max(found, key=len)] * 1e12 if found else None


def flops_per_token(shape: Shape, parameters: int) -> float:
    """Return the FLOPs of a token, forward and backward; `parameters` includes the embedding table."""
    return 6 * (parameters - shape.vocabulary * shape.hidden) + 12 * shape.layers * shape.hidden * shape.length


def utilization(shape: Shape, parameters: int, tokens: int, ms: float, device: str) -> dict[str, float]:
    """Return the tokens a second of a rank that takes `ms` for its `tokens`, and its MFU if the peak is known."""
    rate, peak = tokens / (ms / 1e3), peak_flops(device)
    found = {"tokens_per_s": rate}
    return found if peak is None else found | {"mfu": flops_per_token(shape, parameters) * rate / peak}


KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl",)),
    ("copies between GPUs", ("memcpy ptop",)),
    ("copies and fills", ("memcpy", "memset")),
    ("attention", ("flash", "fmha", "sdpa", "attention", "compute_dot_do_o", "convert_dq_to_16bits")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv", "xmma", "ampere_")),
    ("optimizer", ("adam", "multi_tensor_apply", "foreach", "fused_sgd")),
    ("conversions and copies", ("copy_kernel", "direct_copy", "catarray", "split_with_sizes", "chunk_cat")),
    ("fused kernels", ("triton", "dcompile_")),
)
"""Kind -> substrings of kernels' names; the first match counts."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name, one of `KINDS`, or "ATen's others"."""
    name = kernel.lower()
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "ATen's others"


def by_kind(events: Iterable[tuple[str, float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """Return kind -> (launches a step, ms a step), longest first; `events`: kernels as (name, begin, end) in ms."""
    found: dict[str, tuple[float, float]] = {}
    for name, begin, end in events:
        count, taken = found.get(kind_of(name), (0.0, 0.0))
        found[kind_of(name)] = count + 1 / steps, taken + (end - begin) / steps
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def kinds_table(peers: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """Return rows of kinds, longest first, with "ms (launches)" of each peer, and a last row of sums."""
    longest = {kind: max(found.get(kind, (0, 0))[1] for found in peers.values()) for f in peers.values() for kind in f}
    rows = []
    for kind in sorted(longest, key=lambda kind: -longest[kind]):
        cells = (found.get(kind) for found in peers.values())
        rows.append([kind, *("" if cell is None else f"{cell[1]:.2f} ({cell[0]:.0f})" for cell in cells)])
    sums = (found.values() for found in peers.values())
    return [*rows, ["all", *(f"{sum(ms for _, ms in f):.2f} ({sum(count for count, _ in f):.0f})" for f in sums)]]
