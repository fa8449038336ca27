"""Train a small model by DeepSpeed as its users do, in one process for many cases. Prints a JSON line for each, rank 0.

The argument is a JSON list of cases: {"stage": 2, "zero": "off", "ga": 2, ...}, see `Case`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

BATCH, LENGTH, WORDS = 2, 8, 50


@dataclass
class Case:
    """One training run. `zero`: "eager" runs without dcompile; otherwise the option of that name."""

    stage: int
    zero: str = "eager"
    ga: int = 1
    clip: float = 0.0
    dtype: str = "float32"
    groups: bool = False
    frozen: bool = False
    tied: bool = False
    unused: bool = False
    outside: bool = False
    second: bool = False
    """Whether the model has a second result, which the loss of rank 0 alone uses; of none, where ZeRO could not."""
    breaks: bool = False
    style: str = "engine"
    """How backwards start: "engine", by engine.backward; "torch", by loss.backward; "twice", two for each loss."""
    no_sync: bool = False
    """Whether one more micro-step comes before each step, under engine.no_sync()."""
    steps: int = 3
    folder: str = ""
    """Where to save a checkpoint after these steps, load it into a new engine, and go on for as many."""
    round_robin: bool = False
    offload: bool = False
    door: str = "dcompile"
    extra: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, two blocks, a head: about what a small language model does to its parameters."""

    def __init__(self, case: Case, width: int = 16) -> None:
        super().__init__()
        self.breaks = case.breaks
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.blocks[0].up.requires_grad_(False)
        self.second = case.second
        if case.unused or case.second:
            self.spare = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return (loss, self.spare(x).square().mean().float()) if self.second else loss


def make_engine(case: Case) -> Any:
    torch.manual_seed(0)
    model = Model(case)
    given: Any = [p for p in model.parameters() if p.requires_grad]
    if case.groups:
        given = [
            {"params": [p for p in given if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0},
        ]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.ga,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 20,
            "round_robin_gradients": case.round_robin,
            **({"offload_optimizer": {"device": "cpu"}} if case.offload else {}),
        },
        "zero_force_ds_cpu_optimizer": False,
        **case.extra,
    }
    if case.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if case.dtype == "float16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}  # the first steps overflow
    optimizer = torch.optim.AdamW(given, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if case.zero != "eager":
        options = {"zero": case.zero, "receipt": False} if case.zero else {"receipt": False}
        if case.door == "deepspeed":
            engine.compile(backend="dcompile", compile_kwargs={"options": options})
        else:
            from dcompile.integrations import deepspeed as door

            door.compile(engine, options=options)
    return engine


def norm_of(engine: Any) -> float | None:
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def train(engine: Any, case: Case, first: int) -> dict[str, Any]:
    losses, norms = [], []
    for step in range(first, first + case.steps):
        for micro in range(case.ga):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator).to(engine.device)
            if case.no_sync and micro == 0:
                with engine.no_sync():
                    engine.backward(engine(tokens.flip(1)))
            loss = engine(tokens)
            if case.second:
                loss, other = loss
                loss = loss + other if case.stage == 0 and dist.get_rank() == 0 else loss
            if case.outside:
                loss = loss + engine.module.blocks[0].norm.weight.square().mean().float()
            backward(engine, case, loss)
            engine.step()
            mean = loss.detach().float()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        norms.append(norm_of(engine))
    return {"losses": losses, "norms": norms}


def backward(engine: Any, case: Case, loss: torch.Tensor) -> None:
    if case.style == "torch":
        loss.backward()
        return
    engine.backward(loss, retain_graph=case.style == "twice")
    if case.style == "twice":
        engine.backward(2 * loss)


@torch.no_grad()
def evaluate(engine: Any) -> float:
    engine.eval()
    loss = engine(torch.arange(2 * LENGTH, device=engine.device).view(2, LENGTH))
    loss = (loss[0] if isinstance(loss, tuple) else loss).item()
    engine.train()
    return loss


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """All parameters, whole, by the names of the model."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[name] = parameter.detach().float().cpu()
    return found


def receipt_of(engine: Any) -> dict[str, Any]:
    import dcompile
    from dcompile.capture.entry import find_model

    found = dataclasses.asdict(dcompile.receipt(engine))
    model = find_model(engine.module)
    executables = [e for graph in model.graphs for e in graph.executables.values()]
    found["kinds"] = sorted({bucket.kind for executable in executables for bucket in executable.buckets})
    found["all_graphs"] = len(model.graphs)
    return found


def run(case: Case) -> dict[str, Any]:
    torch._dynamo.reset()
    engine = make_engine(case)
    result = {"case": dataclasses.asdict(case), **train(engine, case, 0)}
    if case.zero != "eager":
        result["receipt"] = receipt_of(engine)
    result["evaluated"] = evaluate(engine)
    result["names"] = sorted(engine.module.state_dict())
    if case.folder:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        engine.save_checkpoint(case.folder, tag="here")
        result["saved_names"] = sorted(engine.module_state_dict() or [])
        dist.barrier()
        whole = {}
        if case.stage and dist.get_rank() == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(case.folder, tag="here")
        now = weights_of(engine)
        result["fp32_names"] = sorted(whole)
        result["fp32_equal"] = all(
            torch.allclose(now[name], whole[name], rtol=1e-2, atol=1e-3) for name in (now if whole else ())
        )
        result["on"] = train(engine, case, case.steps)
        again = make_engine(case)
        again.load_checkpoint(case.folder, tag="here")
        result["again"] = train(again, case, case.steps)
        again.destroy()
        engine.load_checkpoint(case.folder, tag="here")
        result["back"] = train(engine, case, case.steps)
    total = torch.cat([weight.flatten() for weight in weights_of(engine).values()])
    other = total.to(engine.device, copy=True)
    dist.broadcast(other, 0)
    result["ranks_equal"] = torch.equal(total, other.cpu())
    result["weights"] = total.double().square().sum().item()
    engine.destroy()
    return result


def main() -> None:
    cuda = os.environ.get("DS_ACCELERATOR") == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=False)
    torch.set_num_threads(1)
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        result = run(Case(**fields))
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # DeepSpeed's threads and hooks outlive the process group


if __name__ == "__main__":
    main()
