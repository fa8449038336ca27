"""Training data: any text, as bytes, in batches that depend only on the seed, the step and the rank."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from errors import UserError

END = 256
"""The only token that is no byte; it precedes every file."""

HELD_OUT = 0.02
"""Fraction of the text, at its end, that is used only for evaluation."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens for training, and separate ones for evaluation."""

    description: str
    train: np.ndarray
    held_out: np.ndarray


def find_files(path: str | None) -> tuple[str, list[Path]]:
    """Return a file, all text files of a folder, or by default the Python standard library, which every machine has."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
        return "the Python standard library", sorted(files)
    root = Path(path)
    if not root.exists():
        raise UserError(f"--data {path}: no such file or folder")
    if root.is_file():
        return path, [root]
    return path, sorted(p for p in root.rglob("*") if p.is_file() and not _is_binary(p))


def _is_binary(file: Path) -> bool:
    """Is a file binary? Text has no zero byte; pictures and programs have one near the start."""
    with file.open("rb") as stream:
        return b"\0" in stream.read(4096)


def load_text(path: str | None, max_mb: int, seq_len: int) -> Text:
    """Read up to `max_mb` of the files, in an order that mixes folders but is the same on every rank."""
    name, files = find_files(path)
    random.Random(0).shuffle(files)
    parts = list(_read(files, max_mb * 2**20))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    cut = len(tokens) - int(len(tokens) * HELD_OUT)
    train, held_out = tokens[:cut], tokens[cut:]
    if len(held_out) < seq_len:
        raise UserError(
            f"{name}: {len(tokens)} bytes are too few for --seq-len {seq_len}: "
            f"{HELD_OUT:.0%} of them are held out, which must be a sequence at least"
        )
    description = f"{name}, {len(tokens) / 2**20:.1f} MB in {len(parts)} of {len(files)} files"
    return Text(description, train, held_out)


def _read(files: list[Path], room: int) -> Iterator[np.ndarray]:
    for file in files:
        if room <= 0:
            return
        content = np.fromfile(file, np.uint8, count=room)
        room -= len(content)
        yield np.concatenate((np.array([END], np.uint16), content))


def batch(tokens: np.ndarray, size: int, seq_len: int, key: tuple[int, ...]) -> torch.Tensor:
    """Return `size` windows at random positions. Equal keys (seed, step, micro-step, rank) give equal batches."""
    starts = np.random.default_rng(key).integers(0, len(tokens) - seq_len + 1, size)
    return torch.from_numpy(np.stack([tokens[start : start + seq_len] for start in starts]).astype(np.int64))
