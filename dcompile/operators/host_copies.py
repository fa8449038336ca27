"""Copies between a device and host memory as torch operators: how a saved value is offloaded.

`torch.ops.dcompile_host.offload(x)` is a copy of `x` in host memory, and `load(host, device)` copies it back. Both keep
strides of memory without gaps. Programs make a start and a wait of each (`lower_host_copy`). The operators themselves
run where ATen runs a whole graph, and wait at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcompile.ir.collective_kinds import HostCopyKind
from dcompile.operators.own_operators import define_operators

NAMESPACE = "dcompile_host"
KINDS: Mapping[str, HostCopyKind] = {f"{NAMESPACE}.offload.default": "offload", f"{NAMESPACE}.load.default": "load"}
"""Text of an operator -> the kind of its steps."""


def _offload(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu").copy_(x)


def _offloaded(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


def _load(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device).copy_(host)


def _loaded(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device)


_LIBRARY = define_operators(
    NAMESPACE,
    ("offload(Tensor x) -> Tensor", "load(Tensor host, Device device) -> Tensor"),
    {"offload": (_offload, _offloaded), "load": (_load, _loaded)},
)
"""Library of the operators, which exist as long as this object."""
OFFLOAD, LOAD = torch.ops.dcompile_host.offload.default, torch.ops.dcompile_host.load.default
