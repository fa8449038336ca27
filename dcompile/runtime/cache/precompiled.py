"""Manifest of a precompiled folder: the jobs that it was made for, and reasons for missing programs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcompile.config import Config
from dcompile.runtime.cache.disk import precompiled_folder
from dcompile.runtime.cache.key import environment

MANIFEST = "precompiled.manifest"
_FORMAT = 1
_LONGEST = 60
"""Maximum number of characters of a value in a message."""


@dataclass(frozen=True)
class PrecompiledJob:
    """One job that a folder was precompiled for."""

    model: str
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    """Dimensions of the mesh and their ranks; empty if the model makes its own mesh."""
    settings: str
    """`Config.key()`."""


def write_manifest(folder: Path, jobs: Iterable[PrecompiledJob]) -> None:
    """Add jobs to a folder's manifest, and make the folder readable for all users."""
    earlier = _read(folder)
    known = earlier["jobs"] if earlier is not None and earlier["environment"] == environment() else []
    new = [json.loads(json.dumps(asdict(job))) for job in jobs]
    record = {
        "format": _FORMAT,
        "environment": environment(),
        "jobs": [*(job for job in known if job not in new), *new],
    }
    temporary = folder / "tmp-manifest"
    temporary.write_text(json.dumps(record, indent=1))
    temporary.rename(folder / MANIFEST)
    folder.chmod(0o755)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o644)


def reason_for_miss(config: Config) -> str:
    """Return why a program is missing from the folder of option `precompiled`, by its manifest."""
    record = _read(precompiled_folder(config))
    if record is None:
        return "the folder has no manifest that this dcompile reads; fill it anew"
    here = environment()
    for what, value in record["environment"].items():
        if here.get(what) != value:
            return f"the folder is for another {what}: {_differing(value, here.get(what, 'none'))}"
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sizes = sorted({int(job["world_size"]) for job in record["jobs"]})
    if world_size not in sizes:
        return f"the folder is for {_listed(sizes)} ranks, this job has {world_size}"
    if config.key() not in {job["settings"] for job in record["jobs"]}:
        return "the folder is for other options"
    return "the folder has no such graph: another model, other shapes or dtypes, or another way to wrap it"


def _read(folder: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((folder / MANIFEST).read_text())
        complete = isinstance(record["environment"], dict) and isinstance(record["jobs"], list)
        return record if record["format"] == _FORMAT and complete else None
    return None


def _differing(there: str, here: str) -> str:
    """Format two values; for long ones, only their differences."""
    if len(there) <= _LONGEST and len(here) <= _LONGEST:
        return f"{there}, here {here}"
    ours, theirs = here.split(), there.split()
    lacking = [word for word in theirs if word not in ours][:4]
    more = [word for word in ours if word not in theirs][:4]
    return f"it has {' '.join(lacking) or 'nothing more'}, here {' '.join(more) or 'nothing more'}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"
