"""The CPU in the place of GPUs: PyTorch's tests ask for accelerators, and name them by number."""

from __future__ import annotations

import multiprocessing
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

RANKS = 2
"""Ranks of a test, each of which counts as an accelerator."""


def take_cpu_for_accelerators() -> None:
    """Before the test file is imported, in the process that runs tests and in each rank."""
    let_cpu_be_the_accelerator()
    let_ddp_take_device_ids()
    let_modules_stay_on_cpu()
    let_ranks_fork()


def let_cpu_be_the_accelerator() -> None:
    """Two ranks on the CPU count as two accelerators, wherever tests ask for some."""
    import torch
    from torch.testing._internal import common_distributed as common

    torch.cpu.device_count = lambda: RANKS
    torch.accelerator.device_count = _for_tests(torch.accelerator.device_count, lambda: RANKS)
    torch.accelerator.current_accelerator = _for_tests(
        torch.accelerator.current_accelerator, lambda check_available=False: torch.device("cpu")
    )

    def enough(ranks: int, **_more: Any) -> Callable[[Any], Any]:
        return (lambda test: test) if ranks <= RANKS else unittest.skip(f"needs {ranks} ranks")

    common.skip_if_lt_x_gpu = enough
    common.at_least_x_gpu = lambda ranks: ranks <= RANKS
    common.requires_accelerator_dist_backend = lambda backends=None: lambda test: test
    from torch.testing._internal import common_fsdp, common_utils

    if hasattr(common_utils, "_cpu_sleep"):  # tests of delays ask whether the device can sleep
        cycles = common_utils.get_cycles_per_ms
        common_utils.get_cycles_per_ms = lambda device="cpu": cycles("cpu")
        torch.cpu._sleep = common_utils._cpu_sleep
    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.FSDPTestContinuous.world_size = RANKS  # type: ignore[misc]
    common.MultiProcessTestCase.__init_subclass__ = classmethod(_bound_world_size)  # type: ignore[assignment, arg-type]


def let_modules_stay_on_cpu() -> None:
    """Tests choose the rank's device, and make or move modules and tensors there by its number: the CPU has none."""
    import torch
    from torch.utils._device import _device_constructors

    for module, name in (
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (torch.cuda, "manual_seed"),
        (torch.accelerator, "set_device_index"),
    ):
        setattr(module, name, lambda *args, **kwargs: None)  # Dynamo wants a function for each name
    torch.cuda.current_device = lambda: 0
    torch.nn.Module.to = _moving_to_cpu(torch.nn.Module.to)  # type: ignore[method-assign]
    torch.Tensor.to = _moving_to_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    _device_constructors()  # before the names change: `with torch.device(...)` looks up what is called
    for name in ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"):
        setattr(torch, name, _making_on_cpu(getattr(torch, name)))


def _is_gpu(device: Any) -> bool:
    """Whether a test names an accelerator: by its number, or as one of CUDA's."""
    named = device.type if hasattr(device, "index") and hasattr(device, "type") else device
    return type(device) is int or (isinstance(named, str) and named.startswith("cuda"))


def _moving_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to` or `Module.to`, which take an accelerator for the CPU."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return move(self, *(("cpu", *args[1:]) if args and _is_gpu(args[0]) else args), **kwargs)

    return to


def _making_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, which takes an accelerator for the CPU."""
    from torch.jit import _builtins

    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    if (operator := _builtins._find_builtin(make)) is not None:
        _builtins._register_builtin(made, operator)  # some files have functions in TorchScript
    return made


def _bound_world_size(case: type, **more: Any) -> None:
    """A class of tests that starts more processes on the CPU than on few accelerators starts as many as we have."""
    super(case.__mro__[-2], case).__init_subclass__(**more)
    asked = vars(case).get("world_size")
    if isinstance(asked, property) and asked.fget is not None:
        get = asked.fget
        case.world_size = property(lambda self: min(int(get(self)), RANKS))  # type: ignore[attr-defined]


def _for_tests(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`instead` for tests and what helps them; torch itself goes on as it is."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        helps = not caller.startswith("torch.") or caller.startswith("torch.testing.")
        return (instead if helps else original)(*args, **kwargs)

    return chosen


def let_ddp_take_device_ids() -> None:
    """DDP of a module on the CPU takes no device_ids; tests give the rank's."""
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__

    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        make(self, module, device_ids, output_device, **more)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def let_ranks_fork() -> None:
    """Fork ranks that tests spawn: an import of torch and of all of dcompile takes longer than most tests."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase as Ranks

    spawn = Ranks._spawn_processes

    def start(self: Any) -> None:
        if os.environ.get("PEERS_RAN_HERE"):  # autograd's threads run since then, and forks could not use it
            spawn(self)
        else:
            self._start_processes(multiprocessing.get_context("fork").Process)

    Ranks._spawn_processes = start  # type: ignore[method-assign]
