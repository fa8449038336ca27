"""Cases for `tools/compare_programs.py`: models of tests/models, benchmark kernels, DDP and FSDP.

A case is a function of `explain`, which replaces compilation and has the signature of `dcompile.explain`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

Explain = Callable[..., Any]
Case = Callable[[Explain], Any]

ROWS, LENGTH = 2, 16
SAMPLE = (
    "phi3", "gemma2", "qwen3-moe", "mamba", "t5", "vit", "whisper", "gru", "u-net", "bag-mean", "messages", "attention",
    "in-place", "statistics", "mixer", "losses", "fourier",
)  # fmt: skip
"""Architectures of tests/models that are also planned without --all."""


def cases(*, everything: bool = False) -> Mapping[str, Case]:
    """Return name -> case, in the order of planning. `everything`: every architecture, in every mode."""
    return dict(
        (
            *_zoo(),
            *_architectures(everything),
            *_cpu_kernels(),
            *_gpu_kernels(),
            *_captured_for_gpus(),
            *_distributed(),
        )
    )


# --- models -----------------------------------------------------------------------------------------------------------


def _zoo() -> Iterator[tuple[str, Case]]:
    """Yield the models that most tests use: in training, and some of them in other modes."""
    from tests.models import zoo

    def case(name: str, **how: Any) -> Case:
        found = zoo.CASES[name]
        return functools.partial(_model, make=lambda: found.make(0.1), draw=lambda: found.draw(ROWS, LENGTH), **how)

    for name in zoo.CASES:
        yield f"models/{name}/train", case(name)
    for name in ("mlp", "resnet", "llama"):
        yield f"models/{name}/infer", case(name, grad=False)
    yield "models/llama/bfloat16", case("llama", dtype=torch.bfloat16)
    yield "models/bert/dynamic", case("bert", dynamic=True)
    yield "models/mlp/recompute", case("mlp", options={"recompute": "memory", "activation_memory_budget": 0.5})
    yield "models/mlp/own", case("mlp", options={"matmul": "own"})


def _architectures(everything: bool) -> Iterator[tuple[str, Case]]:
    """Yield small models of transformers' architectures, and modules of torch."""
    from tests.models.audio import AUDIO
    from tests.models.decoders import DECODERS, EXPERTS, RECURRENT
    from tests.models.encoders import ENCODERS, SEQ2SEQ
    from tests.models.modules import MODULES
    from tests.models.vision import VISION

    ways: dict[str, dict[str, Any]] = {"train": {}}
    if everything:
        ways |= {"infer": {"grad": False}, "bfloat16": {"dtype": torch.bfloat16}, "dynamic": {"dynamic": True}}
    known = {**DECODERS, **EXPERTS, **RECURRENT, **ENCODERS, **SEQ2SEQ, **VISION, **AUDIO, **MODULES}
    for name in known if everything else SAMPLE:
        found = known[name]
        for way, how in ways.items():
            if getattr(found, way, True):
                draw = functools.partial(found.batch, ROWS, found.lengths[0])
                yield f"architectures/{name}/{way}", functools.partial(_model, make=found.make, draw=draw, **how)


def _model(
    explain: Explain,
    make: Callable[[], torch.nn.Module],
    draw: Callable[[], Mapping[str, Any]],
    *,
    grad: bool = True,
    dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Plan one call of a model on one batch."""
    model, batch = make().train(grad), dict(draw())
    if dtype is not None:
        model = model.to(dtype)
        batch = {name: _in_dtype(value, dtype) for name, value in batch.items()}
    compiled: Any = torch.compile(model, backend="dcompile", dynamic=dynamic, options=options)
    with torch.set_grad_enabled(grad), torch._dynamo.config.patch(allow_rnn=True):
        explain(compiled, **batch)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


# --- kernels of benchmarks --------------------------------------------------------------------------------------------


def _compiled(explain: Explain, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that plans `function` in each call, and runs it eagerly."""

    def call(*args: Any) -> Any:
        explain(function, *args)
        return function(*args)

    return call


def _cpu_kernels() -> Iterator[tuple[str, Case]]:
    """Yield the kernels of benchmarks/cpu_kernels.py, on tensors without memory."""
    from benchmarks import cpu_kernels

    def run(explain: Explain, dtype: str, name: str) -> None:
        case = cpu_kernels.cases(dtype)[name]
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(case.gradients):
            case.make(functools.partial(_compiled, explain))()

    for dtype in cpu_kernels.DTYPES:
        for name in cpu_kernels.NAMES:
            yield f"cpu_kernels/{dtype}/{name}", functools.partial(run, dtype=dtype, name=name)


class _CpuInPlaceOfGpu(TorchFunctionMode):
    """Torch function mode that makes tensors on the CPU where a function makes them on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    def pause_around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` without this mode, which TorchDynamo would trace."""

        def alone(*args: Any) -> Any:
            self.__exit__(None, None, None)
            try:
                return call(*args)
            finally:
                self.__enter__()

        return alone


def _gpu_kernels() -> Iterator[tuple[str, Case]]:
    """Yield the kernels of benchmarks/gpu_kernels.py in their own sizes, on tensors without memory."""
    from benchmarks import gpu_kernels

    def run(explain: Explain, name: str) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), _CpuInPlaceOfGpu() as mode:
            gpu_kernels.CASES[name].make(lambda function: mode.pause_around(_compiled(explain, function)))()

    for name in gpu_kernels.CASES:
        if name == "adamw":  # torch refuses a capturable optimizer on the CPU; cpu_kernels has another one
            continue
        yield f"gpu_kernels/{name}", functools.partial(run, name=name)


# --- passes on captured graphs that are for GPUs ----------------------------------------------------------------------


@contextlib.contextmanager
def _gpu_passes_on_cpu() -> Iterator[None]:
    """Make passes on captured graphs treat the CPU as a GPU while the context lasts. Raises LookupError."""
    with contextlib.ExitStack() as patches:
        for patch in _gpu_traits() or _gpu_lists():
            patches.enter_context(patch)
        yield


def _gpu_traits() -> list[Any]:
    """Return patches that give the CPU a GPU's traits; none for a revision without traits."""
    try:
        from dcompile.device_traits import CPU, DEVICE_TRAITS
    except ImportError:
        return []
    gpu = replace(CPU.aten, wants_aligned_matmul=True, shares_attention_heads=True, splits_single_query=False)
    return [mock.patch.dict(DEVICE_TRAITS, {"cpu": replace(CPU, aten=gpu)})]


def _gpu_lists() -> list[Any]:
    """Return the same patches for revisions whose passes have lists of devices."""
    modules = [module for name, module in sys.modules.items() if name.startswith("dcompile.capture.")]
    lists = [module for module in modules if getattr(module, "DEVICES", None) == ("cuda",)]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    graphs = [value for value in classes if vars(value).get("gpu") == "cuda"]
    if not lists or not graphs:
        raise LookupError("no DEVICES or no gpu in dcompile.capture: tell tools/program_cases.py what replaced them")
    changes = [mock.patch.object(module, "DEVICES", ("cpu", "cuda")) for module in lists]
    return [*changes, *(mock.patch.object(graph, "gpu", "cpu") for graph in graphs)]


def _captured_for_gpus() -> Iterator[tuple[str, Case]]:
    """Yield padded matmuls, shared heads of attention, and decomposed attention of one query a head."""

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.t()).float().logsumexp(-1).mean()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :, None].expand(2, 2, 4, 64, 32).reshape(2, 8, 64, 32) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def run(explain: Explain, function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], grad: bool) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), _gpu_passes_on_cpu(), torch.set_grad_enabled(grad):
            explain(function, *(torch.randn(shape, dtype=torch.bfloat16, requires_grad=grad) for shape in shapes))

    cached = (2, 2, 64, 32)
    shapes = {
        "padding": (loss, ((1024, 768), (1003, 768)), True),
        "shared-heads": (attend, ((2, 8, 64, 32), cached, cached), True),
        "decoding": (attend, ((2, 8, 1, 32), cached, cached), False),
    }
    for name, (function, sizes, grad) in shapes.items():
        yield f"gpu_capture/{name}", functools.partial(run, function=function, shapes=sizes, grad=grad)


# --- several ranks ----------------------------------------------------------------------------------------------------

WORLD = 4


def _distributed() -> Iterator[tuple[str, Case]]:
    """Yield one rank's programs under DDP and FSDP; other ranks are faked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(model: Any, shape: tuple[int, ...] = (WORLD,), **how: Any) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, **how)
        return fully_shard(model, mesh=mesh, **how)

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ways: dict[str, Callable[[Any], Any]] = {
        "ddp": DistributedDataParallel,
        "ddp-small-buckets": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.001),
        "fsdp": sharded,
        "fsdp-mixed": lambda model: sharded(model, mp_policy=mixed),
        "fsdp-kept": lambda model: sharded(model, reshard_after_forward=False),
        "hsdp": lambda model: sharded(model, (2, WORLD // 2)),
        "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    }
    for way, spread in ways.items():
        yield f"ranks/{way}/mlp", functools.partial(_on_ranks, spread=spread, name="mlp")
    for way in ("ddp", "fsdp"):
        yield f"ranks/{way}/llama", functools.partial(_on_ranks, spread=ways[way], name="llama")


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts of a test model that are sharded separately."""
    found = model.model.layers if hasattr(model, "model") else model.layers
    return [layer for layer in found if any(True for _ in layer.parameters())]


def _on_ranks(explain: Explain, spread: Callable[[Any], Any], name: str) -> None:
    """Plan a test model on rank 0 of a process group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.models import zoo

    case = zoo.CASES[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        explain(spread(case.make(0.0)), **case.draw(ROWS, LENGTH))
    finally:
        dist.destroy_process_group()
