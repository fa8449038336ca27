"""What a user's Accelerate script looks like: accumulation, clipping, checkpoints, saving. Trains once for each of
`--backends`, in turn, and prints one JSON line on rank 0."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2


class Model(nn.Module):
    """An embedding, two blocks, a head: about what a small language model does to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_plugin(backend: str) -> dict[str, Any]:
    """Arguments of Accelerator: by the plugin, by the name, or with regional compilation."""
    if backend == "eager":
        return {}
    from dcompile.integrations.accelerate import DcompilePlugin

    if backend == "dcompile by name":
        return {"dynamo_backend": "dcompile"}
    if backend == "dcompile by regions":
        return {"dynamo_plugin": TorchDynamoPlugin(backend="dcompile", use_regional_compilation=True)}
    return {"dynamo_plugin": DcompilePlugin(fullgraph=True)}


def make_accelerator(backend: str, wrap: str) -> Accelerator:
    arguments: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATION, **make_plugin(backend)}
    if wrap == "ddp":
        return Accelerator(cpu=True, **arguments)
    # Accelerate shards on accelerators only, and makes DDP of it without a word on a CPU
    state = PartialState(cpu=False, backend="gloo")
    state.__dict__["distributed_type"] = DistributedType.MULTI_GPU
    state.__dict__["device"] = torch.device("cpu")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Sequential"]
    )
    return Accelerator(fsdp_plugin=plugin, **arguments)


def train(accelerator, model, optimizer, batches) -> list[float]:
    losses = []
    for tokens, labels in batches:
        with accelerator.accumulate(model):
            loss = model(tokens, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def synced_late(accelerator, model, optimizer, batches) -> list[float]:
    """Two forwards under no_sync, of which the second's backward reduces after all."""
    with accelerator.no_sync(model):
        losses = [model(tokens, labels) for tokens, labels in batches[:2]]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    found = [float(p.grad.norm()) for p in model.parameters()]
    optimizer.zero_grad()
    return found


def run(backend: str, wrap: str, folder: Path) -> dict[str, Any]:
    accelerator = make_accelerator(backend, wrap)
    torch.manual_seed(0)
    raw: Any = Model()
    optimizer: Any = torch.optim.AdamW(raw.parameters(), lr=1e-2)
    tokens = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, loader)
    batches = list(loader)
    result: dict[str, Any] = {"ranks": accelerator.num_processes, "kind": type(model).__name__}
    result["first"] = train(accelerator, model, optimizer, batches[:4])
    accelerator.save_state(str(folder / "state"))
    result["second"] = train(accelerator, model, optimizer, batches[4:])
    accelerator.load_state(str(folder / "state"))
    result["again"] = train(accelerator, model, optimizer, batches[4:])
    if wrap == "ddp":
        result["late"] = synced_late(accelerator, model, optimizer, batches)
    state = accelerator.get_state_dict(model)
    result["unwrapped"] = type(accelerator.unwrap_model(model)).__name__
    accelerator.save_model(model, str(folder / "model"))
    if accelerator.is_main_process:
        result["keys"] = list(state)
        result["saved"] = sorted(safe_open(str(folder / "model/model.safetensors"), "pt").keys())
    flat = torch.cat([whole(p).flatten() for p in accelerator.unwrap_model(model).parameters()])
    everyone = [torch.empty_like(flat) for _ in range(accelerator.num_processes)]
    torch.distributed.all_gather(everyone, flat)
    result["ranks_equal"] = all(torch.equal(everyone[0], other) for other in everyone)
    if backend != "eager":
        import dcompile

        receipt = dcompile.receipt(model)
        result["receipt"] = {name: getattr(receipt, name) for name in ("adapter", "eligible", "reasons", "graphs")}
        result["receipt"] |= {name: getattr(receipt, name) for name in ("graph_breaks", "collectives", "buckets")}
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return result


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", nargs="+", default=["eager"])
    parser.add_argument("--wrap", default="ddp")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    results = {
        backend: run(backend, arguments.wrap, arguments.folder / backend.replace(" ", "-"))
        for backend in arguments.backends
    }
    if torch.distributed.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps(results, default=list) + "\n")
    torch.distributed.barrier()  # else one rank may close connections while the other still reads
    time.sleep(0.5)  # else Gloo's thread may let go of what it gathered while Python ends, which aborts (torch 2.13)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
