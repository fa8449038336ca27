"""CPUs that passes take for devices with other traits."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from dcompile import device_traits
from dcompile.device_traits import CPU, AtenTraits


def cpu_with(**traits: Any) -> device_traits.DeviceTraits:
    """The CPU's row with some traits changed, those of ATen's among them."""
    names = {field.name for field in fields(AtenTraits)}
    aten = {name: value for name, value in traits.items() if name in names}
    return replace(CPU, aten=replace(CPU.aten, **aten), **{name: traits[name] for name in traits.keys() - names})


def change_cpu(monkeypatch: Any, **traits: Any) -> None:
    """Have passes find this row for the CPU."""
    monkeypatch.setitem(device_traits.DEVICE_TRAITS, "cpu", cpu_with(**traits))
