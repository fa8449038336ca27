"""DTensor: recognize one, and make one from a local tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_dtensor(value: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_mesh(value: Any) -> bool:
    """Whether this is a device mesh, which newer versions of Dynamo make an input of the graph."""
    module = sys.modules.get("torch.distributed.device_mesh")
    return module is not None and isinstance(value, module.DeviceMesh)


def is_opaque(value: Any) -> bool:
    """Whether traced graphs pass this on without reading it: a mesh, a process group, or a fake object for one.

    It compares classes only: `isinstance` of a mesh calls a function of torch's. In a step compiled as a whole, the
    backward is compiled while it runs, and Dynamo would trace that function.
    """
    named = (
        ("torch._library.fake_class_registry", "FakeScriptObject"),
        ("torch.distributed.device_mesh", "DeviceMesh"),
        ("torch.distributed", "ProcessGroup"),
    )
    opaque = [getattr(sys.modules.get(module), name, None) for module, name in named]
    return any(kind is not None and kind in type(value).__mro__ for kind in opaque)


def wrapper(example: Any) -> Callable[[Any], Any]:
    """Function that makes a DTensor like `example` (size, placements) from this rank's part, also for autograd.

    `example` may be one that Dynamo traces with: newer versions have a fake object for the mesh there.
    """
    mesh, placements = example.device_mesh, example.placements
    mesh = getattr(mesh, "real_obj", mesh)
    shape, stride = example.shape, example.stride()

    def as_dtensor(local: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return as_dtensor
