"""Every setting once: default, help, environment name, whether it is in the cache key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcompile.errors import OptionError
from dcompile.inductor_options import REASON_OF
from dcompile.kernel_backends.names import REPLAYED, KernelBackend, find_backend

CHANNELS = ("passes", "overlap", "kernels", "memory")
"""What `log` may name, the loggers `dcompile.passes` and so on; beside them `all`: log on every rank."""

LEVELS: Mapping[str, int] = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Levels of a channel in `log`."""

TRACE_DIRECTORY = "dcompile_trace"
"""Where trace.enabled writes to, under the working directory."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "lite": {"kernels": "aten"},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}
"""Modes of torch.compile and the options each stands for."""


def setting(default: Any, text: str, *, in_key: bool = True, option: str = "", idle: str = "") -> Any:
    """A field of `Config`: default, help, whether kernels depend on it, its name as an option if that has a dot.

    `idle` says why an option that torch.compile knows changes nothing here: the docs and the receipt repeat it.
    """
    return dataclasses.field(default=default, metadata={"help": text, "in_key": in_key, "option": option, "idle": idle})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each is an option of `dcompile.compile` and an environment variable, `DCOMPILE_` and its name."""

    kernels: str | KernelBackend = setting(  # noqa: RUF009  a frozen value, as all others
        "auto",
        "Who makes the kernels between collectives. auto: dcompile; aten: ATen, for debugging communication; "
        "cudagraphs: ATen, replayed as CUDA graphs; inductor, onnxruntime, openvino, tensorrt, tvm, ipex, openxla: "
        "that compiler; or a callable with torch's contract for backends, `fn(gm, example_inputs)`.",
    )
    matmul: Literal["auto", "aten", "own"] = setting(
        "auto",
        "Who multiplies float32 matrices on CPU, where auto is own if ATen's library leaves AVX-512 idle (AMD), and "
        "one row by a matrix on GPUs, where it is own.",
    )
    activation_memory_budget: float = setting(
        1.0,
        "Part of the activations that the backward may keep, 0 to 1: what is left out is computed again. 1 keeps what "
        "saves time.",
    )
    recompute: Literal["registers", "memory"] = setting(
        "registers",
        "Which pointwise work of the forward the backward does again in place of keeping its results. registers: what "
        "stays inside its kernels; memory: also what it has to write for library calls, such as inputs of products.",
    )
    chunked_loss: int = setting(
        0,
        "Compute `cross_entropy` of a linear layer's result in so many parts of its classes, at least 2, which the "
        "backward computes again: the logits are never there as a whole. 0: off. Losses differ by rounding.",
    )
    autocast_experts: bool = setting(
        False,
        "Under autocast, multiply Hugging Face's experts in autocast's dtype, as linear layers are. Eager multiplies "
        "them in their weights' dtype: with float32 weights, several times slower on a GPU.",
    )
    overlap_mb: int = setting(
        -1,
        "What starting all-gathers early and waiting late for reductions may add to a graph's peak memory, in MiB. "
        "-1: as much as the largest all-gather and the largest reduce-scatter hold.",
    )
    figures: Literal["table", "measured"] = setting(
        "table",
        "Where the cost model's figures of the machine come from: a table by kind of GPU, or what "
        "`python -m dcompile.calibrate` has measured on rank 0.",
        in_key=False,  # the figures themselves are
    )
    gathers: Literal["auto", "collective"] = setting(
        "auto",
        "How sharded parameters are gathered on GPUs. auto: where the ranks of a group can reach each other's memory, "
        "as those of one machine, each copies the others' shards, which takes no processors; elsewhere by all-gathers. "
        "collective: always by all-gathers.",
        in_key=False,  # what ranks came to is
    )
    shard_copies: Literal["auto", "kept", "gather"] = setting(
        "auto",
        "Under mixed precision, where shards are converted to the dtype that computing uses. kept: in memory of ours, "
        "which other ranks may copy from; gather: in new memory for each all-gather. auto: kept, unless it takes a "
        "sixteenth of a GPU's memory, recompute is memory, or the model checkpoints activations.",
        in_key=False,  # what ranks came to is
    )
    distributed: Literal["auto", "stock"] = setting("auto", "stock leaves communication to DDP and FSDP themselves.")
    zero: Literal["off", "graph"] = setting(
        "off",
        "Of a DeepSpeed engine. graph: ZeRO's collectives, stages 0 to 3, are part of the compiled graph where that is "
        "possible; off: they are left to DeepSpeed.",
    )
    layers_once: bool = setting(
        True,
        "Trace a few of the layers that repeat, and copy what comes of them for the others. Off, each is traced.",
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
        "Capture operations whose results' sizes depend on values (`nonzero`, masks), where torch.compile breaks the "
        "graph unless its own setting says otherwise. Off with CUDA graphs.",
        in_key=False,  # the graph is another
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
    log: str = setting(
        "",
        "Log channels with their levels, comma-separated: `passes=INFO,overlap`. Channels: passes, overlap, kernels, "
        "memory. A bare name means DEBUG. With `all` among them, every rank logs, otherwise rank 0 alone.",
        in_key=False,
    )
    dump: str = setting(
        "", "Directory for programs, kernels and the receipt; a second model gets a folder in it.", in_key=False
    )
    trace_enabled: bool = setting(
        False,
        "Write a dump, to `dcompile_trace` unless `dump` names a directory.",
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
    skip: str = setting("", "Passes to leave out, comma-separated.")
    until: str = setting("", "Stop after this pass.")
    cache_dir: str = setting("", "Kernel cache; default: dcompile under XDG_CACHE_HOME or ~/.cache.", in_key=False)
    cache_size_gib: int = setting(
        20,
        "Size in GiB above which the kernel cache gives up what was used longest ago, once a day. 0: no limit.",
        in_key=False,
    )
    share_artifacts: bool = setting(
        True,
        "The first rank to come to a graph compiles it and sends the code to the others of its process group through "
        "the job's store; off, each rank compiles what its cache lacks.",
        in_key=False,
    )
    compile_timeout_s: int = setting(300, "Longest time one compiler process may take, in seconds.", in_key=False)
    epilogue_fusion: bool = setting(
        True,
        "With max_autotune: have matrix products in 16 bits on GPUs end in the pointwise kernel behind them, by a "
        "kernel of our own, where that is measured faster than the library's product and the kernel.",
    )
    max_autotune: bool = setting(
        False,
        "Measure cuBLASLt's algorithms for each large matrix product in 16 bits on a GPU, two seconds each, and take "
        "the fastest where ATen's choice is not.",
    )
    coordinate_descent_tuning: bool = setting(
        False,
        "Measure block sizes and warps of kernels, step by step.",
        in_key=False,
        idle="block sizes and warps of our kernels follow from their sizes and are not measured",
    )
    shape_padding: bool = setting(
        True,
        "Put zeros behind large 16-bit matrices on GPUs whose rows do not end at whole 16 bytes: their products take "
        "half the time or less. Off, matrices keep the sizes they have.",
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
        idle="recordings of a model always share memory, in a tree as torch's",
    )
    fallback_by_default: bool = setting(
        False, "Leave every kernel to ATen, as `kernels='aten'` does, unless `kernels` says otherwise.", in_key=False
    )
    selective_decompose: bool = setting(
        False,
        "Take apart only operations that kernels are generated for.",
        in_key=False,
        idle="what is taken apart follows from `kernels` alone",
    )
    reorder_for_peak_memory: bool = setting(
        True,
        "Order operations by what is held in memory meanwhile.",
        in_key=False,
        idle="one order is planned for memory and overlap together",
    )
    reorder_for_compute_comm_overlap: bool = setting(
        False,
        "Move collectives to where computing hides them.",
        in_key=False,
        idle="collectives of ours always are, by the cost model; the model's own are waited for where they stand",
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
        in_key=False,
        idle="inductor's passes do not run",
    )
    use_joint_graph_passes: bool = setting(
        True,
        "Rewrite graphs of forward and backward.",
        in_key=False,
        idle="inductor's passes do not run",
    )
    use_post_grad_passes: bool = setting(
        True,
        "Rewrite graphs once they are cut apart.",
        in_key=False,
        idle="inductor's passes do not run",
    )
    use_dce: bool = setting(
        True,
        "Leave out operations whose results nobody reads.",
        in_key=False,
        idle="they always are",
    )
    allow_buffer_reuse: bool = setting(
        True,
        "Use a buffer's memory again once its last reader is through.",
        in_key=False,
        idle="memory is always planned so",
    )
    ignored: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), compare=False)
    """Options of TorchInductor that were given and change nothing here, with their values; not an option itself."""

    @classmethod
    def make(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
        """Defaults, then environment, then mode, then options. Raises OptionError naming the valid ones."""
        if mode is not None and options:
            raise OptionError("dcompile: give either mode or options, not both (a mode is a set of options)")
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"dcompile: options must be a dict, not {type(options).__name__}")
        options = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
        ignored = tuple((name, value) for name, value in options.items() if name in REASON_OF)
        chosen = {_field_of(name): value for name, value in options.items() if name not in REASON_OF}
        mode = chosen.pop("mode", mode) or "default"
        if mode not in MODES:
            raise OptionError(
                f"dcompile: unknown mode {mode!r}{_nearest(str(mode), MODES)}; valid modes: {', '.join(MODES)}"
            )
        values = {**_from_environment(), **{_field_of(name): value for name, value in MODES[mode].items()}, **chosen}
        config = cls(**{name: _checked(name, value) for name, value in values.items()}, ignored=ignored)
        if config.fallback_by_default and "kernels" not in chosen:
            config = dataclasses.replace(config, kernels="aten")
        if config.kernels == REPLAYED:
            config = dataclasses.replace(config, kernels="aten", triton_cudagraphs=True)
        if (config.trace_enabled or config.trace_graph_diagram) and not config.dump:
            return dataclasses.replace(config, dump=TRACE_DIRECTORY)
        return config

    @property
    def own_kernels(self) -> bool:
        """Whether kernels are dcompile's own, where it can make them."""
        return self.kernels == "auto"

    @property
    def backend(self) -> KernelBackend | None:
        """The other compiler that regions are handed to, if there is one."""
        return self.kernels if isinstance(self.kernels, KernelBackend) else None

    def idle(self) -> tuple[str, ...]:
        """A line for each option that was changed and has no effect, with the reason; and for misspelt variables."""
        options = (
            f"option {_option_of(f)}={getattr(self, name)} has no effect: {f.metadata['idle']}"
            for name, f in _fields().items()
            if f.metadata["idle"] and getattr(self, name) != f.default
        )
        ignored = (f"option {name}={value} has no effect: {REASON_OF[name]}" for name, value in self.ignored)
        ours = [_variable(name) for name in _fields()]
        others = sorted(set(os.environ).difference(ours))
        variables = (
            f"environment variable {name} has no effect: there is no such setting{_nearest(name, ours)}"
            for name in others
            if name.startswith("DCOMPILE_")
        )
        return (*options, *ignored, *variables)

    def key(self) -> str:
        """Text of all settings that generated code depends on."""
        return ",".join(f"{name}={getattr(self, name)}" for name, f in _fields().items() if f.metadata["in_key"])


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Config) if f.metadata}


@functools.cache
def _types() -> dict[str, Any]:
    """What the fields declare. It is Python that is evaluated, 80 pieces of it."""
    return typing.get_type_hints(Config)


def _variable(name: str) -> str:
    """The environment variable of a field."""
    return f"DCOMPILE_{name.upper()}"


def _option_of(f: dataclasses.Field[Any]) -> str:
    """The name of a field in options={...}: torch writes some with a dot."""
    return f.metadata["option"] or f.name


def _field_of(option: Any) -> str:
    """The field that an option names, dashes read as underscores, as torch does. Raises OptionError."""
    names = {_option_of(f): name for name, f in _fields().items()} | {"mode": "mode"}
    spelt = str(option).replace("-", "_")
    if spelt in names:
        return names[spelt]
    raise OptionError(
        f"dcompile: unknown option {option!r}{_nearest(spelt, names)}; valid options: {', '.join(option_names())}"
    )


def _nearest(name: str, valid: Iterable[str]) -> str:
    """`, did you mean 'dump'?`, if anything comes near."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _from_environment() -> dict[str, str]:
    names = {_variable(name): name for name in _fields()}
    return {names[variable]: value for variable, value in os.environ.items() if variable in names}


def _checked(name: str, value: Any) -> Any:
    """`value` as the type that the field declares; strings are read as the environment writes them."""
    if name == "kernels":
        return find_backend(value)
    hint = _types()[name]
    if typing.get_origin(hint) in (Literal, types.UnionType):
        if value not in typing.get_args(hint):
            valid = ", ".join(map(str, typing.get_args(hint)))
            raise OptionError(f"dcompile: {name}={value!r} is not one of: {valid}")
        return value
    if hint is bool and isinstance(value, str):
        if value.lower() not in ("0", "1", "false", "true", ""):
            raise OptionError(f"dcompile: {name}={value!r} is not a truth value (use 0 or 1)")
        return value.lower() in ("1", "true")
    if hint is float:
        return _fraction(name, value)
    if hint is int and isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if name == "chunked_loss" and (isinstance(value, bool) or not isinstance(value, int) or value < 0 or value == 1):
        raise OptionError(f"dcompile: {name}={value!r} should be a number of parts, at least 2, or 0 for none")
    if not isinstance(value, hint):
        raise OptionError(f"dcompile: {name}={value!r} should be {hint.__name__}, not {type(value).__name__}")
    if name == "cache_size_gib" and value < 0:
        raise OptionError(f"dcompile: {name}={value!r} should be a number of GiB, or 0 for no limit")
    if name == "log":
        parse_log(value)
    return value


@dataclass(frozen=True, slots=True)
class LogSetting:
    """Option `log`, parsed: the level of each channel that it names, and whether every rank logs."""

    levels: Mapping[str, int]
    every_rank: bool


@functools.cache
def parse_log(text: str) -> LogSetting:
    """Parse `passes=INFO,overlap,all`. Raises OptionError, which lists the valid channels or levels."""
    levels: dict[str, int] = {}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        channel, has_level, level = (part.strip() for part in word.partition("="))
        if channel not in CHANNELS and word != "all":
            known = (*CHANNELS, "all")
            raise OptionError(
                f"dcompile: unknown log channel {word!r}{_nearest(channel, known)}; channels: {', '.join(known)}"
            )
        if has_level and level.upper() not in LEVELS:
            raise OptionError(f"dcompile: unknown log level {level!r} in {word!r}; levels: {', '.join(LEVELS)}")
        if word != "all":
            levels[channel] = LEVELS[level.upper()] if has_level else logging.DEBUG
    return LogSetting(levels, "all" in words)


def _fraction(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if isinstance(value, bool) or not 0 <= found <= 1:
        raise OptionError(f"dcompile: {name}={value!r} should be a number from 0 to 1")
    return found


def option_types() -> dict[str, tuple[str, Any, str]]:
    """Field of `Config` -> its name in options={...}, its type, and its help: what a front end offers."""
    return {name: (_option_of(f), _types()[name], f.metadata["help"]) for name, f in _fields().items()}


def option_names() -> list[str]:
    """Names accepted in options={...}."""
    return ["mode", *map(_option_of, _fields().values())]


def describe() -> list[tuple[str, str, str, str]]:
    """(option, environment variable, default, help) of every setting: the docs table."""
    return [
        (_option_of(f), _variable(name), repr(f.default), f.metadata["help"] + _idle_text(f))
        for name, f in _fields().items()
    ]


def _idle_text(f: dataclasses.Field[Any]) -> str:
    return f" Accepted without effect: {f.metadata['idle']}." if f.metadata["idle"] else ""
