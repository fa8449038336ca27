"""What the launch scripts share: the process group, devices, model configs, compiling, stopping, digests."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

CONFIGS = Path(__file__).parent / "configs"


class UserError(Exception):
    """Something the user can put right: printed without a traceback."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the job that torchrun started; a job of one outside torchrun."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` is CUDA where there is any. Each process of a host takes the GPU of its local rank."""
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
        # torchrun keeps one store over restarts. Without a prefix of its own, a restarted rank may read the address
        # that a peer of the last attempt left there, and fail with "connection refused".
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    else:
        store, rank, size = dist.HashStore(), 0, 1
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device)


RELEASE_SECONDS = 0.2
"""For Gloo's threads to release the tensors of the last collective, which takes microseconds once they get to run."""


def leave_world() -> None:
    """End the process group, and its threads with it, before the interpreter ends.

    Models hold on to their group in reference cycles. Left to the interpreter's end, a thread of Gloo's that has yet to
    release the last collective's tensors asks for the interpreter's lock meanwhile, and the process aborts (torch 2.13
    on busy machines, once in some thousand runs; about one in thirty where that thread is starved). And the group,
    which waits for its threads, waits for ever if it ends before: so they are left the lock for a moment first.
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
"""Kinds of models ("model_type") of one shape: RMSNorm, rotary positions, grouped queries, gated MLP."""


def load_config(name: str, families: Sequence[str] = ("llama",)) -> Any:
    """A Hugging Face config from a JSON file or the folder that has it, or from the name of one in launch/configs."""
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
    """The one line that differs between backends. dcompile compiles in place: same object, same parameters."""
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
    except (ValueError, RuntimeError) as error:  # torch raises both for options that it does not know
        raise UserError(str(error)) from error


def parse_options(pairs: Iterable[str]) -> dict[str, str]:
    """`k=v` pairs of --compile.options."""
    split = [pair.partition("=") for pair in pairs]
    for name, sign, _ in split:
        if not (name and sign):
            raise UserError(f"--compile.options {name!r}: write it as name=value")
    return {name: text for name, _, text in split}


def _value(text: str) -> Any:
    """Inductor wants typed values: true, 3 and 0.5 are read as JSON, all else is a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def digest_of(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters, bit for bit; sharded ones are put together."""
    return digest_of_tensors(dict(model.named_parameters()))


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same for tensors by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def gather(value: Any, world: World) -> list[Any]:
    """The values of all ranks, on all ranks."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def stop_on_signals(seconds: float = 5.0) -> None:
    """End soon after SIGTERM or SIGINT, even inside a collective that no other rank will join any more.

    The Python handler runs only when the main thread is back in Python, which a blocked collective prevents. The
    interpreter also writes the signal number to a pipe at once; a thread waiting there gives the main thread `seconds`
    to unwind (which ends compilers it started) and then ends the process.
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


def tell(text: str, stream: TextIO | None) -> None:
    """Print a line. A stream that is absent, closed or full never ends the run that the line is about."""
    with contextlib.suppress(Exception):
        print(text, file=stream, flush=True)


USER_ERROR = 2
"""Exit status of a script that has said in one line what the user can put right."""


def raise_together(problem: str | None, world: World) -> None:
    """Raise rank 0's problem as a UserError there, and end the other ranks in silence; nothing if there is none."""
    said = [problem]
    dist.broadcast_object_list(said, 0)
    if said[0] is not None:
        if world.is_main:
            raise UserError(said[0])
        raise SystemExit(USER_ERROR)


@contextlib.contextmanager
def clear_errors() -> Any:
    """Print a UserError as one line on each rank that has it, and exit with status 2.

    Under torchrun the line goes into its error file, too, so that its summary ends with what is wrong.
    """
    try:
        yield
    except UserError as error:
        tell(f"error (rank {os.environ.get('RANK', '0')}): {error}", sys.stderr)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            text = {
                "message": str(error),
                "extraInfo": {"py_callstack": str(error), "timestamp": str(int(time.time()))},
            }
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": text}))
        raise SystemExit(USER_ERROR) from None
