"""Benchmark of decoding with a Llama of 8B parameters and a static cache, on one GPU or several.

    python -m benchmarks.gpu_decode [--batch 1,8,32] [--only eager,dcompile] [--layers 32] [--json] [--save]
    python -m benchmarks.gpu_decode --tp 2 [--route dtensor] [--device cpu --shape tiny --layers 2]
    python -m benchmarks.gpu_decode --merge FIRST.json SECOND.json

The model is Hugging Face's with random weights in bfloat16. A prompt fills the cache. Then each token is chosen from
the previous logits on the GPU, as in greedy decoding. The figure is the median over runs of milliseconds a token of
each sequence. `floor` is the time to read all weights once, and the allocated cache, at the rate of a copy. The same
job measures that rate on the same GPU. Before it is timed, a peer decodes given tokens. Its logits are compared with
those of the same weights in float32. Their distance may be at most 1.2 times eager's.

With `--batch 1,8,32`, all peers run with each number of sequences.

With `--tp N`, N ranks split the model (`benchmarks/tensor_parallel.py`), all peers in one job. The slowest rank's time
counts. `floor` is then that of one rank's parts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import dcompile  # noqa: F401  registers the backend
from benchmarks.common import environment, finish, gpu_time, last_lines, stored, table
from benchmarks.tensor_parallel import ROUTES, local_bytes

BANDWIDTH = 4.3e12
"""Copy bandwidth of an H200 in bytes a second, for the floor of runs on CPUs, which only test the benchmark."""
PROMPT, CHECKED = 128, 16
"""Tokens of the prompt, and tokens decoded for the comparison of logits."""
TOLERANCE = 1.2
"""Limit of a peer's distance from float32's logits over eager's: each order of sums rounds differently in bfloat16."""
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 512},
}  # fmt: skip
"""Name -> shape. `tiny` tests the benchmark itself."""
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token [batch, 1], position [batch, 1]) -> logits [batch, vocabulary]."""
PEERS: dict[str, Callable[[Step], Step]] = {
    "eager": lambda step: step,
    "torch.compile": lambda step: torch.compile(step, fullgraph=True),
    "torch.compile reduce-overhead": lambda step: torch.compile(step, mode="reduce-overhead", fullgraph=True),
    "dcompile": lambda step: torch.compile(step, backend="dcompile", fullgraph=True, options={"receipt": False}),
    "dcompile reduce-overhead": lambda step: torch.compile(
        step, backend="dcompile", fullgraph=True, options={"receipt": False, "triton.cudagraphs": True}
    ),
}


def make(shape: str, layers: int, device: str) -> Any:
    """Make the model, with the same parameters each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], num_hidden_layers=layers, max_position_embeddings=8192, use_cache=True,
                         tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Decoder:
    """A peer: its own cache, filled by the prompt, and its step."""

    def __init__(self, model: Any, length: int, peer: str, device: str, batch: int = 1) -> None:
        from transformers import StaticCache

        config = model.config
        self.device, self.position = device, 0
        self.cache = StaticCache(config=config, max_cache_len=length)
        heads = config.num_key_value_heads // getattr(model, "ranks", 1)
        self.cache.early_initialization(batch, heads, config.head_dim, model.dtype, device)

        def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            result = model(token, position_ids=position, past_key_values=self.cache, logits_to_keep=1)
            return result.logits[:, -1]

        torch.manual_seed(1)
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT), device=device)
        self.tokens = torch.randint(0, config.vocab_size, (CHECKED, batch, 1), device=device)
        self.positions = torch.arange(length, device=device)[:, None, None].repeat(1, batch, 1)
        step(prompt, torch.arange(PROMPT, device=device).repeat(batch, 1))
        self.position, self.step = PROMPT, PEERS[peer](step)

    def next(self, token: torch.Tensor) -> torch.Tensor:
        """Return the logits after `token`, which takes the next position in the cache."""
        torch.compiler.cudagraph_mark_step_begin()
        logits = self.step(token, self.positions[self.position])
        self.position += 1
        return logits

    def checked(self) -> torch.Tensor:
        """Return the logits of given tokens [CHECKED, batch, vocabulary], in float32."""
        return torch.stack([self.next(token).float() for token in self.tokens])

    def time(self, count: int) -> float:
        """Return the milliseconds a token, averaged over `count`."""
        token = self.tokens[0].clone()
        _wait(self.device)
        began = time.perf_counter()
        for _ in range(count):
            token.copy_(self.next(token).argmax(-1, keepdim=True))
        _wait(self.device)
        return (time.perf_counter() - began) / count * 1e3

    def longest(self, count: int = 16) -> list[list[Any]]:
        """Return a step's GPU kernels: name, launches, and microseconds in all."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.next(self.tokens[0])
            _wait(self.device)
        found = [(e.key[:80], e.count, e.self_device_time_total) for e in profile.key_averages()]
        return [list(line) for line in sorted(found, key=lambda line: -line[2])[:count]]


def exact_logits(model: Any, length: int, device: str, batch: int) -> torch.Tensor:
    """Return the logits of the given tokens with the same weights in float32; the model is restored afterwards."""
    parameters = list(model.parameters())
    dtypes = [parameter.dtype for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    try:
        return Decoder(model, length, "eager", device, batch).checked()
    finally:
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)


def spread(model: Any, route: str) -> Any:
    """Replace the model by this rank's part."""
    model = ROUTES[route](model)
    model.ranks = dist.get_world_size()
    gc.collect()
    return model


def slowest(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest of all ranks' lines of a peer, or the first that failed."""
    failed = [line for line in lines if "error" in line]
    return failed[0] if failed else max(lines, key=lambda line: line["ms"])


def of_all_ranks(line: dict[str, Any]) -> dict[str, Any]:
    """Return the slowest rank's line, from this rank's line; every rank calls it."""
    if not dist.is_initialized():
        return line
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    return slowest(lines)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ||got - want|| / ||want||."""
    return ((got - want).norm() / want.norm()).item()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure(
    model: Any, peer: str, length: int, device: str, wanted: Sequence[torch.Tensor], rounds: int
) -> dict[str, Any]:
    """Measure one peer. `wanted` are exact logits, and eager's, for as many sequences as are decoded.

    Raises ArithmeticError if its logits are too far from the exact ones, compared to eager's.
    """
    exact, eager = wanted
    torch.compiler.reset()
    count = min((length - PROMPT - CHECKED - 8) // (rounds + 1), 40)
    decoder = Decoder(model, length, peer, device, exact.shape[1])
    began = time.perf_counter()
    got = decoder.checked()
    warm_up = time.perf_counter() - began
    off, allowed = distance(got, exact), distance(eager, exact)
    if not off <= TOLERANCE * allowed:
        raise ArithmeticError(f"logits are {off:.1e} of their norm from those in float32, eager's {allowed:.1e}")
    decoder.time(count)
    times = [decoder.time(count) for _ in range(rounds)]
    line = {"ms": statistics.median(times), "off": off, "eager_off": allowed, "off_eager": distance(got, eager)}
    line |= {"warm_up_s": warm_up, "runs": times}
    line["same_token"] = (got.argmax(-1) == eager.argmax(-1)).float().mean().item()
    if device == "cuda":
        line["longest"] = decoder.longest()
    return line


def copy_rate(device: str) -> float:
    """Return the bytes a second that `copy_` of 2 GiB reads and writes on a GPU."""
    if device != "cuda":
        return BANDWIDTH
    source = torch.ones(1 << 30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / (gpu_time(lambda: target.copy_(source), 20) * 1e-3)


def floor_ms(model: Any, length: int, batch: int, rate: float) -> float:
    """Return the milliseconds to read one rank's weights, and its cache, at `rate` bytes a second."""
    config = model.config
    read = sum(local_bytes(p) for name, p in model.named_parameters() if "embed_tokens" not in name)
    heads = config.num_key_value_heads // getattr(model, "ranks", 1)
    read += 2 * config.num_hidden_layers * batch * heads * config.head_dim * length * 2
    return read / rate * 1e3


def line_name(peer: str, batch: int) -> str:
    """Return the name of a peer's line: `eager`, `eager, batch 8`."""
    return peer if batch == 1 else f"{peer}, batch {batch}"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all peers one after another, and print each when it is done."""
    device, batches = arguments.device, [int(count) for count in arguments.batch.split(",")]
    rate = copy_rate(device)
    model = make(arguments.shape, arguments.layers, device)
    with torch.no_grad():
        exact = {batch: exact_logits(model, arguments.length, device, batch) for batch in batches}
    if arguments.tp > 1:
        model = spread(model, arguments.route)
    lines: dict[str, Any] = {}
    for batch in batches:
        with torch.no_grad():
            eager = Decoder(model, arguments.length, "eager", device, batch).checked()
        lines |= lines_of(arguments, model, batch, (exact[batch], eager))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    name += f" x{arguments.tp} {arguments.route}" if arguments.tp > 1 else ""
    floors = {str(batch): floor_ms(model, arguments.length, batch, rate) for batch in batches}
    return {"benchmark": "gpu_decode", "complete": not any("error" in line for line in lines.values()),
            "copy_bytes_per_second": rate, "floor_ms": floors, "layers": arguments.layers,
            "length": arguments.length, "tp": arguments.tp, "lines": lines, "device": name,
            "environment": environment(torch.get_num_threads())}  # fmt: skip


def lines_of(arguments: argparse.Namespace, model: Any, batch: int, wanted: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Measure all peers with one number of sequences."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    lines: dict[str, Any] = {}
    for peer in arguments.only.split(","):
        name = line_name(peer, batch)
        try:
            line = measure(model, peer, arguments.length, arguments.device, wanted, arguments.rounds)
        except Exception as error:  # one peer's failure must not hide the others' numbers
            line = {"error": f"{type(error).__name__}: {error}"[:400]}
        lines[name] = of_all_ranks(line) | {"batch": batch}
        if is_first:
            print(name, {key: value for key, value in lines[name].items() if key != "longest"}, flush=True)
        for kernel, times, us in lines[name].get("longest", []) if arguments.profile and is_first else []:
            print(f"    {kernel:80s} x{times} {us:.0f} us", flush=True)
        gc.collect()
    return lines


def start_ranks(count: int) -> int:
    """Run this benchmark with the same arguments as `count` ranks of this machine; return the exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    settings = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*launcher, "-m", "benchmarks.gpu_decode", *sys.argv[1:]], env=settings).returncode


def join(device: str) -> None:
    """Join the process group as a rank."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    lines, floors = result["lines"], _floors(result)
    found = []
    for peer, line in lines.items():
        if "error" in line:
            found.append([peer, "failed", "", "", "", ""])
            continue
        batch = line.get("batch", 1)
        base = lines.get(line_name("torch.compile reduce-overhead", batch), {}).get("ms")
        floor = floors[str(batch)]
        ratio = f"{base / line['ms']:.2f}" if base else ""
        off = f"{line['off']:.1e}" if "off" in line else ""
        found.append([peer, f"{line['ms']:.2f}", f"{floor / line['ms']:.0%}", ratio, off, f"{line['warm_up_s']:.0f}"])
    return found


def _floors(result: dict[str, Any]) -> dict[str, float]:
    """Return the floor by number of sequences; older files have that of one."""
    floors = result["floor_ms"]
    return floors if isinstance(floors, dict) else {"1": floors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS), help="peers, comma-separated")
    parser.add_argument("--batch", default="1", help="sequences that are decoded together, comma-separated")
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024, help="tokens that the cache has room for")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model, started by this command")
    parser.add_argument("--route", default="manual", choices=ROUTES, help="how they share it")
    parser.add_argument("--profile", action="store_true", help="show what runs on the GPU in a step")
    parser.add_argument("--merge", nargs="+", help="show files of earlier runs as one")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.tp > 1 and not arguments.merge:
        if "RANK" not in os.environ:
            return start_ranks(arguments.tp)
        join(arguments.device)
    result = merged(arguments.merge) if arguments.merge else run(arguments)
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return 0
    header = ["", "ms a token", "of the floor", "over reduce-overhead", "logits off", "warm-up s"]
    print(table(header, rows(result)))
    print("floor:", ", ".join(f"{ms:.2f} ms for batch {batch}" for batch, ms in _floors(result).items()))
    return finish("gpu_decode", result["device"].replace(" ", "-").lower(), result, keep=arguments.save,
                  as_json=arguments.json)  # fmt: skip


def merged(files: Sequence[str]) -> dict[str, Any]:
    """Merge several runs: the last result of each peer."""
    results = stored(files)
    lines = last_lines(results)
    floors = {batch: ms for result in results for batch, ms in _floors(result).items()}
    return {
        **results[-1],
        "floor_ms": floors,
        "lines": lines,
        "complete": not any("error" in line for line in lines.values()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
