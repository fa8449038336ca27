"""All settings, each defined once: default, help, environment variable, whether it is in the cache key."""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcompile.errors import OptionError
from dcompile.inductor_options import REASON_OF
from dcompile.kernel_backends.names import REPLAYED, KernelBackend, find_backend
from dcompile.log_setting import parse_log
from dcompile.settings import (
    TRUTH_VALUES,
    check_type,
    chunk_count,
    idle_text,
    option_name,
    setting,
    size_bounds,
    suggestion,
    variable_name,
)

DUMP_DIRECTORY = "dcompile_dump"
"""Directory of a dump that names none, relative to the working directory."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "lite": {"kernels": "aten"},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}
"""Modes of torch.compile, and the options that each sets."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each is an option of `dcompile.compile` and an environment variable, `DCOMPILE_` and its name."""

    kernels: str | KernelBackend = setting(  # noqa: RUF009  a frozen value, as all others
        "auto",
        "Compiler of the kernels between collectives. auto: dcompile; aten: ATen's kernels, for debugging "
        "communication; cudagraphs: ATen's, replayed as CUDA graphs; inductor, onnxruntime, openvino, tensorrt, tvm, "
        "ipex, openxla, or another backend that torch knows: that compiler. Or a callable with their signature, "
        "`fn(gm, example_inputs)`.",
    )
    matmul: Literal["auto", "aten", "own"] = setting(
        "auto",
        "Kernel for float32 matmul and attention on CPU, and for products of one row, in 16 bits of up to 16 rows, on "
        "GPU. own: dcompile's; aten: ATen's; auto: dcompile's on GPU, and on CPUs whose BLAS does not use AVX-512 "
        "(AMD).",
    )
    activation_memory_budget: float = setting(
        1.0,
        "Part of the activations that the backward may keep, 0 to 1; the others are recomputed. 1 keeps those that "
        "save time.",
    )
    recompute: Literal["registers", "memory"] = setting(
        "registers",
        "Pointwise operations of the forward that the backward recomputes instead of keeping their results. registers: "
        "those inside its kernels; memory: also those that it must write for library calls, such as matmul operands.",
    )
    chunked_loss: int | str = setting(
        "auto",
        "`cross_entropy` of a linear layer's result without its logits as a whole. auto: where the cost model says "
        "that this saves memory for little time, in chunks of rows, whose gradients the forward computes. A number, at "
        "least 2: in this many chunks of classes, which the backward recomputes. 0: never. Losses differ by rounding.",
    )
    autocast_experts: bool = setting(
        False,
        "Under autocast, multiply Hugging Face's experts in autocast's dtype, like linear layers. Eager multiplies "
        "them in their weights' dtype: with float32 weights, several times slower on a GPU.",
    )
    overlap_mb: int = setting(
        -1,
        "MiB that early all-gathers and late waits for reductions may add to a graph's peak memory. -1: the memory of "
        "the largest all-gather and the largest reduce-scatter.",
    )
    figures: Literal["table", "measured"] = setting(
        "table",
        "Source of the cost model's machine figures. table: by kind of GPU; measured: by "
        "`python -m dcompile.calibrate` on rank 0.",
        in_key=False,  # the figures themselves are in the key
    )
    gathers: Literal["auto", "collective"] = setting(
        "auto",
        "How sharded parameters are gathered on GPUs. auto: copy-engine all-gathers where a group's ranks can map each "
        "other's memory, as on one machine, which takes no multiprocessors; elsewhere collectives. collective: always "
        "collectives.",
        in_key=False,  # the ranks' agreement is in the key
    )
    all_reduces: Literal["auto", "collective"] = setting(
        "auto",
        "How small all-reduces of the model's own, as in tensor parallelism, run on GPUs. auto: as one kernel, where a "
        "group's ranks can map each other's memory; elsewhere, and with collective, by the group's own collective.",
    )
    shard_copies: Literal["auto", "kept", "gather"] = setting(
        "auto",
        "Memory of shards converted to the compute dtype, under mixed precision. kept: a permanent buffer, from which "
        "other ranks may copy; gather: new memory for each all-gather. auto: kept, unless it takes a sixteenth of a "
        "GPU's memory, recompute is memory, or the model checkpoints activations.",
        in_key=False,  # the ranks' agreement is in the key
    )
    distributed: Literal["auto", "stock"] = setting("auto", "stock: communication is left to DDP and FSDP.")
    zero: Literal["off", "graph"] = setting(
        "off",
        "ZeRO's collectives of a DeepSpeed engine, stages 0 to 3. graph: part of the compiled graph where possible; "
        "off: left to DeepSpeed.",
    )
    layers_once: bool = setting(
        True,
        "Trace a few of several equal layers, and copy the result for the others. Off: trace each layer.",
        in_key=False,  # the graph is the same
    )
    trace_cache: bool = setting(
        True,
        "Keep what AOTAutograd traces in the kernel cache, so that a later start runs Dynamo alone. Off, each start "
        "traces anew.",
        in_key=False,
    )
    late_sizes: bool = setting(
        True,
        "Capture operations with data-dependent result sizes (`nonzero`, masks), where torch.compile breaks the graph "
        "by default. Off with CUDA graphs.",
        in_key=False,  # the graph differs
    )
    size_classes: str = setting(
        "",
        "For batches of many lengths: the largest size of each class, as a list or `'512,1024,2048'`, or `auto` for "
        "powers of two. Sizes of inputs are then symbols from the first call on, so that no other size compiles, on "
        "any rank; and with `triton.cudagraphs` each class has one CUDA graph.",
    )
    fallback_random: bool = setting(
        False, "Draw every random number as eager does, bit for bit; dropout masks are then saved for the backward."
    )
    in_place: bool = setting(
        False,
        "With `torch.compile(module, backend='dcompile')`: compile the module in place and return it, as "
        "`dcompile.compile` does, so that names in its `state_dict` stay as they are.",
        in_key=False,
    )
    receipt: bool = setting(True, "Print the receipt on rank 0 after the first compiled step.", in_key=False)
    progress: bool = setting(
        True,
        "While a step is compiled for more than five seconds, show in a terminal what is done: a line on rank 0 that "
        "goes away. It needs tqdm, and option `receipt`.",
        in_key=False,
    )
    log: str = setting(
        "",
        "Log channels with their levels, comma-separated: `passes=INFO,overlap`. Channels: passes, overlap, kernels, "
        "memory. A bare name means DEBUG. With `all` among them, every rank logs, otherwise rank 0 alone.",
        in_key=False,
    )
    dump: str = setting(
        "",
        "Directory for programs, kernels and the receipt; a second model gets a folder in it. True or 1: "
        "`dcompile_dump`.",
        in_key=False,
    )
    trace_enabled: bool = setting(
        False,
        "Write a dump, as `dump=True` does, unless `dump` names a directory.",
        in_key=False,
        option="trace.enabled",
    )
    trace_graph_diagram: bool = setting(
        False,
        "Add a picture of each graph after fusion to the dump: graph_diagram.dot, and .svg if Graphviz is installed.",
        in_key=False,
        option="trace.graph_diagram",
    )
    verify: bool = setting(False, "Verify after each pass; compare collective order across ranks.", in_key=False)
    skip: str = setting("", "Passes to skip, comma-separated.")
    until: str = setting("", "Stop after this pass.")
    cache_dir: str = setting("", "Kernel cache; default: dcompile under XDG_CACHE_HOME or ~/.cache.", in_key=False)
    cache_size_gib: int = setting(
        20,
        "Size in GiB above which the kernel cache evicts its least recently used files, once a day. 0: no limit.",
        in_key=False,
    )
    precompiled: str = setting(
        "",
        "Folder that `dcompile.precompile` has filled: read where the kernel cache lacks something, never written to. "
        "All ranks may share it, and it may belong to root.",
        in_key=False,
    )
    share_artifacts: bool = setting(
        True,
        "Compile each graph on the first rank that reaches it, and send the code to its process group through the "
        "job's store. Off: each rank compiles what its cache lacks.",
        in_key=False,
    )
    compile_timeout_s: int = setting(300, "Longest time of one compiler process, in seconds.", in_key=False)
    epilogue_fusion: bool = setting(
        True,
        "With max_autotune: fuse pointwise kernels into dcompile's 16-bit matmuls on GPUs as epilogues, where that is "
        "measured to be faster than the library's matmul and a separate kernel.",
    )
    max_autotune: bool = setting(
        False,
        "Measure cuBLASLt's algorithms for each large 16-bit matmul on a GPU, two seconds each, and use the fastest "
        "one if it beats ATen's choice. For products of 2 to 16 rows, measure tiles of dcompile's kernels, and the "
        "library.",
    )
    coordinate_descent_tuning: bool = setting(
        False,
        "Measure block sizes and warps of kernels, step by step.",
        idle="block sizes and warps of dcompile's kernels follow from their sizes and are not measured",
    )
    shape_padding: bool = setting(
        True,
        "Pad large 16-bit matrices on GPUs with zeros if their rows are not multiples of 16 bytes: their matmuls take "
        "half the time or less. Off: matrices keep their sizes.",
    )
    triton_cudagraphs: bool = setting(
        False,
        "Replay programs on GPUs as CUDA graphs.",
        in_key=False,
        option="triton.cudagraphs",
    )
    triton_cudagraph_trees: bool = setting(
        True,
        "Let the CUDA graphs of a model share memory.",
        in_key=False,
        option="triton.cudagraph_trees",
        idle="recordings of a model always share memory, in a tree like torch's",
    )
    fallback_by_default: bool = setting(
        False, "Leave every kernel to ATen, as `kernels='aten'` does, unless `kernels` says otherwise.", in_key=False
    )
    selective_decompose: bool = setting(
        False,
        "Decompose only operations that kernels are generated for.",
        idle="decompositions follow from `kernels` alone",
    )
    reorder_for_peak_memory: bool = setting(
        True,
        "Order operations by the memory that is live meanwhile.",
        idle="one order is planned for memory and overlap together",
    )
    reorder_for_compute_comm_overlap: bool = setting(
        False,
        "Move collectives to where computation hides them.",
        idle="the cost model always places dcompile's collectives so; the model's own keep the places of their waits",
    )
    triton_reorder_for_reducing_graph_partitions: bool = setting(
        True,
        "Order operations for few CUDA graphs.",
        in_key=False,
        option="triton.reorder_for_reducing_graph_partitions",
        idle="a program is one CUDA graph or none",
    )
    use_pre_grad_passes: bool = setting(
        True,
        "Rewrite graphs before they are traced.",
        idle="inductor's passes do not run",
    )
    use_joint_graph_passes: bool = setting(
        True,
        "Rewrite graphs of forward and backward.",
        idle="inductor's passes do not run",
    )
    use_post_grad_passes: bool = setting(
        True,
        "Rewrite graphs after their partition.",
        idle="inductor's passes do not run",
    )
    use_dce: bool = setting(
        True,
        "Remove operations whose results are not used.",
        idle="they always are",
    )
    allow_buffer_reuse: bool = setting(
        True,
        "Reuse a buffer's memory after its last reader.",
        idle="memory is always planned so",
    )
    ignored: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), compare=False)
    """Options of TorchInductor that were given but have no effect, with their values; not an option itself."""

    @classmethod
    def make(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
        """Combine defaults, environment, mode and options, in this order. Raises OptionError."""
        if mode is not None and options:
            raise OptionError("dcompile: give either mode or options, not both (a mode is a set of options)")
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"dcompile: options must be a dict, not {type(options).__name__}")
        options = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
        ignored = tuple((name, value) for name, value in options.items() if name in REASON_OF)
        chosen = {_field_of(name): value for name, value in options.items() if name not in REASON_OF}
        mode = chosen.pop("mode", mode) or "default"
        if mode not in MODES:
            raise OptionError(f"dcompile: unknown mode {mode!r}{suggestion(str(mode), MODES, 'valid modes')}")
        values = {**_from_environment(), **{_field_of(name): value for name, value in MODES[mode].items()}, **chosen}
        config = cls(**{name: _checked(name, value) for name, value in values.items()}, ignored=ignored)
        if config.fallback_by_default and "kernels" not in chosen:
            config = dataclasses.replace(config, kernels="aten")
        if config.kernels == REPLAYED:
            config = dataclasses.replace(config, kernels="aten", triton_cudagraphs=True)
        if (config.trace_enabled or config.trace_graph_diagram) and not config.dump:
            return dataclasses.replace(config, dump=DUMP_DIRECTORY)
        return config

    @property
    def own_kernels(self) -> bool:
        """Whether kernels are dcompile's own where possible."""
        return self.kernels == "auto"

    @property
    def backend(self) -> KernelBackend | None:
        """Other compiler for regions, or None."""
        return self.kernels if isinstance(self.kernels, KernelBackend) else None

    @property
    def size_bounds(self) -> tuple[int, ...] | None:
        """The largest size of each class, ascending; none for powers of two; None without classes."""
        if not self.size_classes:
            return None
        return () if self.size_classes == "auto" else tuple(map(int, self.size_classes.split(",")))

    def idle(self) -> tuple[str, ...]:
        """A line for each changed option without effect, with the reason, and for misspelt environment variables."""
        options = (
            f"option {option_name(f)}={getattr(self, name)} has no effect: {f.metadata['idle']}"
            for name, f in _fields().items()
            if f.metadata["idle"] and getattr(self, name) != f.default
        )
        ignored = (f"option {name}={value} has no effect: {REASON_OF[name]}" for name, value in self.ignored)
        ours = [variable_name(name) for name in _fields()]
        others = sorted(set(os.environ).difference(ours))
        variables = (
            f"environment variable {name} has no effect: there is no such setting{suggestion(name, ours)}"
            for name in others
            if name.startswith("DCOMPILE_")
        )
        return (*options, *ignored, *variables)

    def key(self) -> str:
        """Text of all settings that generated code depends on, one a line."""
        return "\n".join(f"{name}={getattr(self, name)}" for name, f in _fields().items() if f.metadata["in_key"])


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Config) if f.metadata}


@functools.cache
def _types() -> dict[str, Any]:
    """Types of the fields. Evaluating them runs 80 pieces of Python."""
    return typing.get_type_hints(Config)


def _field_of(option: Any) -> str:
    """Field of an option, with dashes read as underscores, as torch does. Raises OptionError."""
    names = {option_name(f): name for name, f in _fields().items()} | {"mode": "mode"}
    spelt = str(option).replace("-", "_")
    if spelt in names:
        return names[spelt]
    raise OptionError(f"dcompile: unknown option {option!r}{suggestion(spelt, option_names(), 'valid options')}")


def _from_environment() -> dict[str, str]:
    names = {variable_name(name): name for name in _fields()}
    return {names[variable]: value for variable, value in os.environ.items() if variable in names}


def _checked(name: str, value: Any) -> Any:
    """`value` as the type that the field declares, and what the field demands beyond that."""
    if name == "kernels":
        return find_backend(value)
    if name == "chunked_loss":
        return chunk_count(value)
    if name == "size_classes":
        return size_bounds(value)
    if name == "dump" and (isinstance(value, bool) or str(value).lower() in TRUTH_VALUES):
        value = DUMP_DIRECTORY if check_type(name, bool, value) else ""
    value = check_type(name, _types()[name], value)
    if name == "cache_size_gib" and value < 0:
        raise OptionError(f"dcompile: {name}={value!r} should be a number of GiB, or 0 for no limit")
    if name == "log":
        parse_log(value)
    return value


def option_types() -> dict[str, tuple[str, Any, str]]:
    """Field of `Config` -> its name in options={...}, its type, and its help, for front ends."""
    return {name: (option_name(f), _types()[name], f.metadata["help"]) for name, f in _fields().items()}


def option_names() -> list[str]:
    """Names accepted in options={...}."""
    return ["mode", *map(option_name, _fields().values())]


def describe() -> list[tuple[str, str, str, str]]:
    """(option, environment variable, default, help) of every setting, for the docs' table."""
    return [
        (option_name(f), variable_name(name), repr(f.default), f.metadata["help"] + idle_text(f))
        for name, f in _fields().items()
    ]
