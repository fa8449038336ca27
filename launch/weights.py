"""Sources of parameters: a Hugging Face checkpoint, read slice by slice, or random numbers of the model's shapes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from errors import UserError

INIT_STD = 0.12
"""Standard deviation of random weights, six times the usual one: with less, a random model repeats one byte."""


@dataclass(frozen=True, slots=True)
class Part:
    """Slice `index` of `count` equal ones along `dim`; the whole tensor if `count` is 1."""

    dim: int = 0
    index: int = 0
    count: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the slice's first and end position in a dimension of `size`, which `count` divides."""
        length = size // self.count
        return self.index * length, (self.index + 1) * length


class Weights(Protocol):
    """A source of parameters by name."""

    def read(self, name: str, shape: torch.Size, part: Part) -> torch.Tensor:
        """Return a part of a parameter of whole shape `shape`, on the CPU or the device of the source."""


class CheckpointWeights:
    """Parameters in the safetensors files of a folder. Only the bytes of a slice are read, through the page cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files_by_name(folder)
        self.opened: dict[str, Any] = {}
        self.bytes_read = 0

    def read(self, name: str, shape: torch.Size, part: Part) -> torch.Tensor:
        """Read a part; see `Weights`. Raises UserError if the tensor is missing or has another shape."""
        if name not in self.files:
            raise UserError(f"--model {self.folder}: its safetensors files have no tensor {name}")
        view = self._open(self.files[name]).get_slice(name)
        if list(view.get_shape()) != list(shape):
            raise UserError(
                f"--model {self.folder}: {name} has shape {list(view.get_shape())}, its config.json says {list(shape)}"
            )
        first, last = part.bounds(shape[part.dim])
        tensor: torch.Tensor = view[first:last] if part.dim == 0 else view[:, first:last]
        self.bytes_read += tensor.nbytes
        return tensor

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self.opened:
            try:
                self.opened[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"--model {self.folder}: {file}: {error}") from None
        return self.opened[file]


def _files_by_name(folder: Path) -> dict[str, str]:
    """Return name of a tensor -> its file, from the index, or for the only file."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        with contextlib.suppress(KeyError, ValueError):
            return dict(json.loads(index.read_text())["weight_map"])
        raise UserError(f"--model {folder}: {index.name} is not an index of safetensors files")
    if not single.is_file():
        raise UserError(f"--model {folder}: no model.safetensors and no index; convert other formats to safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {folder}: {single.name}: {error}") from None


class RandomWeights:
    """Random parameters that depend only on seed and name: every rank draws the same ones, and keeps its slice."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    def read(self, name: str, shape: torch.Size, part: Part) -> torch.Tensor:
        """Draw a part; see `Weights`. Weights of norms are near 1 but differ, so that results show a missing norm."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.randn(shape, generator=generator, device=self.device) * INIT_STD
        if name.endswith("norm.weight"):
            whole += 1
        first, last = part.bounds(shape[part.dim])
        return whole.narrow(part.dim, first, last - first)
