"""A training script with a checkpoint after each step. Rank 1 is killed once, if the folder says so.

It prints the sum of all parameters after the last step, on rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import dcompile
from tests.distributed.step_cases import _batches, _loss, _make

STEPS, KILLED = 6, 3


def main() -> None:
    folder, way = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun keeps one store over restarts, which has addresses of the ranks of the last attempt
    store, *_ = next(dist.rendezvous("env://", rank, world))
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, optimizer = _make(way, "AdamW", False)
    step = dcompile.train_step(model, _loss, optimizer, clip_norm=0.5, options={"receipt": False})
    done, mine = 0, folder / f"rank{rank}.pt"
    if mine.exists():
        saved = torch.load(mine, weights_only=False)
        done = saved["done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for number, batch in enumerate(_batches(STEPS, rank)):
        if number < done:
            continue
        if number == KILLED and rank == 1 and (folder / "kill").exists():
            (folder / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        step(batch)
        torch.save({"done": number + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, mine)
        dist.barrier()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank == 0:
        total = [float(p.detach().double().sum()) for p in parameters]
        sys.stdout.write(f"RESULT from step {done}: {total}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
