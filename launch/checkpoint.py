"""Atomic checkpoints: written under another name, renamed when all ranks are done, then named in LATEST."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import World, raise_together
from errors import UserError, tell
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEEP = 3
"""Number of checkpoints that are kept on disk."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""

Settings = dict[str, Any]
"""Settings that must be equal to continue a run: seed, data, and the model's config."""


def save(
    folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, world: World
) -> Path:
    """Write `folder/step-000030`. Its names are the plain model's, without wrappers, so any backend can load it."""
    final, aside = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    if world.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=aside)
    dist.barrier()  # now every rank's part is on disk
    if world.is_main:
        (aside / "train.json").write_text(json.dumps({"step": step, **settings}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        pointer = folder / "LATEST.tmp"
        pointer.write_text(final.name)
        os.replace(pointer, folder / "LATEST")
        drop_old(folder, final)
    dist.barrier()
    return final


def drop_old(folder: Path, newest: Path) -> None:
    """Remove all but the last few by time of writing: an earlier, longer run may have left higher step numbers."""
    others = [path for path in folder.glob("step-*") if path != newest]
    for path in sorted(others, key=lambda p: p.stat().st_mtime, reverse=True)[KEEP - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def lock(folder: Path, world: World) -> TextIO | None:
    """Lock `folder` for this job until rank 0 ends in any way; the caller keeps the result. Every rank calls it.

    The lock is a record lock. Forked children do not inherit it, so it does not outlive a killed rank 0.
    """
    problem, stream = None, None
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stream = (folder / "LOCK").open("a+")
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}")
            stream.flush()
        except (BlockingIOError, PermissionError):  # which of the two depends on the system
            problem = f"--output-dir {folder}: another job writes there ({_owner(stream)}); give this one its own"
        except OSError as error:
            if error.errno not in NO_LOCKS:
                problem = f"--output-dir {folder}: {error.strerror}"
            else:
                tell(f"--output-dir {folder}: no locks on this file system; nothing stops a second job", sys.stderr)
    raise_together(problem, world)
    return stream


def _owner(stream: TextIO | None) -> str:
    if stream is None:
        return "its file LOCK cannot be opened"
    stream.seek(0)
    return stream.read()


def find(folder: Path, resume: str) -> Path | None:
    """Return the checkpoint for --resume: none, the newest of the output folder if any, or a given one."""
    if resume == "none":
        return None
    if resume == "auto":
        pointer = folder / "LATEST"
        if not pointer.exists():
            return None
        path = folder / pointer.read_text().strip()
    else:
        path = Path(resume)
    if not (path / "train.json").is_file():
        raise UserError(f"--resume {resume}: {path} is not a checkpoint of this script (it has no train.json)")
    return path


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> int:
    """Load parameters and optimizer in place, and return the number of steps done."""
    saved = json.loads((path / "train.json").read_text())
    for name, value in settings.items():
        if saved.get(name) != value:
            raise UserError(f"--resume {path}: it was trained with {name} {saved.get(name)}, this run has {value}")
    parameters, moments = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return int(saved["step"])
