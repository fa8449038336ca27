"""Functions shared by launch scripts: process group, devices, model configs, compilation, signals, digests."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from errors import USER_ERROR, UserError
from torch.distributed.tensor import DTensor

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class World:
    """Rank and size of the job that torchrun started; outside of torchrun, a job of one process."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device: `auto` is CUDA if available. Each process of a host uses the GPU of its local rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no CUDA GPU; use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"more processes than the {torch.cuda.device_count()} GPU(s): lower --nproc-per-node or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def join_world(wanted_device: str) -> World:
    """Join the process group: NCCL for CUDA tensors, Gloo for CPU tensors."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(wanted_device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        # torchrun keeps one store over restarts. Without a prefix for each attempt, a restarted rank may read the
        # address of a peer of the last attempt, and fail with "connection refused".
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device)


RELEASE_SECONDS = 0.2
"""Time for Gloo's threads to release the last collective's tensors, which takes microseconds once they run."""


def leave_world() -> None:
    """End the process group and its threads before the interpreter ends.

    Models keep their group alive in reference cycles. At the interpreter's end, a thread of Gloo that has not released
    the last collective's tensors yet requests the interpreter's lock. Then the process aborts: on busy machines once in
    some thousand runs (torch 2.13), about once in thirty if that thread is starved. Also, the group waits for its
    threads when it is destroyed, and for ever if they still need the lock. So the threads get the lock for a moment
    first.
    """
    time.sleep(RELEASE_SECONDS)
    dist.destroy_process_group()
    gc.collect()


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Kinds of models ("model_type") of one architecture: RMSNorm, rotary positions, grouped queries, gated MLP."""


def load_config(name: str, families: Sequence[str] = ("llama",)) -> Any:
    """Load a Hugging Face config from a JSON file, a folder with one, or by the name of one in launch/configs."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    elif path.suffix != ".json":
        path = CONFIGS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json")))
        raise UserError(f"--config {name}: no such file {path}; give a JSON file or one of: {known}")
    try:
        fields = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"--config {path}: not JSON: {error}") from None
    kind = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if kind not in families:
        wanted = " or ".join(f'"{family}"' for family in families)
        raise UserError(f'--config {path}: not a {families[0].title()} config ("model_type" is {kind!r}, not {wanted})')
    try:
        return AutoConfig.for_model(kind, **{**fields, "use_cache": False})
    except (TypeError, ValueError, StrictDataclassError) as error:  # fields that contradict each other
        raise UserError(f"--config {path}: {error.__cause__ or error}") from error


def compile_model(
    model: torch.nn.Module, backend: str, mode: str | None, fullgraph: bool, options: Mapping[str, str]
) -> torch.nn.Module:
    """Compile the model: the one line that differs between backends.

    dcompile compiles in place: the object and its parameters stay the same.
    """
    if backend == "eager":
        if mode or fullgraph or options:
            raise UserError("--compile.* settings need --backend inductor or dcompile")
        return model
    try:
        if backend == "dcompile":
            import dcompile

            return dcompile.compile(model, mode=mode, fullgraph=fullgraph, options=dict(options) or None)
        parsed = {name: _value(text) for name, text in options.items()} or None
        return torch.compile(model, backend=backend, mode=mode, fullgraph=fullgraph, options=parsed)
    except (ValueError, RuntimeError) as error:  # torch raises either for unknown options
        raise UserError(str(error)) from error


def parse_options(pairs: Iterable[str]) -> dict[str, str]:
    """Parse the `k=v` pairs of --compile.options."""
    split = [pair.partition("=") for pair in pairs]
    for name, sign, _ in split:
        if not (name and sign):
            raise UserError(f"--compile.options {name!r}: write it as name=value")
    return {name: text for name, _, text in split}


def _value(text: str) -> Any:
    """Parse a value for Inductor, which needs types: true, 3 and 0.5 are read as JSON, all else is a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def digest_of(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all parameters, bit for bit; sharded ones are gathered."""
    return digest_of_tensors(dict(model.named_parameters()))


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def gather(value: Any, world: World) -> list[Any]:
    """Return the values of all ranks, on all ranks."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def stop_on_signals(seconds: float = 5.0) -> None:
    """End soon after SIGTERM or SIGINT, even inside a collective that no other rank joins any more.

    The Python handler runs only when the main thread is back in Python, which a blocked collective prevents. The
    interpreter also writes the signal number to a pipe at once, where a thread waits. It gives the main thread
    `seconds` to unwind, which ends compilers that it started, and then ends the process.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch() -> None:
        while (number := os.read(read_end, 1)[0]) not in (signal.SIGTERM, signal.SIGINT):
            pass
        time.sleep(seconds)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


def raise_together(problem: str | None, world: World) -> None:
    """Raise rank 0's problem as a UserError there, and end the other ranks silently; do nothing without a problem."""
    said = [problem]
    dist.broadcast_object_list(said, 0)
    if said[0] is not None:
        if world.is_main:
            raise UserError(said[0])
        raise SystemExit(USER_ERROR)
