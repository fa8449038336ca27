"""Patches of torch that no stage enters: modules that need them do, at the time that `undone` says.

Three small ones come first: `torch.compile(model, backend='dcompile')` does the same as `dcompile.compile`, torch
reports the compute capability of a GPU that is not in this machine, and nodes that a layer's call adds are logged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from dcompile.compat import absent_ranks, aot_bundle, aot_trace, deepspeed, dispatch_watch, groups, guards
from dcompile.compat.patches.torch_patch import GRAPH_COMPILE, GUARDS, TRACERS, TorchPatch

if TYPE_CHECKING:  # importing dcompile loads no torch
    from torch.fx import Graph, Node

FORWARD = "_dcompile_forward"
"""Attribute of the context of an FSDP2 root: an object for each forward."""
CREATED, RENAMED = "created", "renamed"
"""What happens to a node while a layer is traced."""


def intercept_compile(handle: Callable[[Any, Any], Any]) -> None:
    """Pass every torch.compile call to `handle(context, fn)`. If it returns NotImplemented, torch proceeds as usual."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    context: Any = _TorchDynamoContext
    original = context.__call__
    if hasattr(original, "_dcompile"):
        return

    @functools.wraps(original)
    def __call__(self: Any, fn: Any) -> Any:
        result = handle(self, fn)
        return original(self, fn) if result is NotImplemented else result

    __call__._dcompile = True  # type: ignore[attr-defined]
    context.__call__ = __call__


def notice_sharding(sharded: Callable[[Any], None]) -> None:
    """Call `sharded` with each module that `fully_shard` shards from now on, if FSDP2 is loaded."""
    state = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state"), "FSDPState", None)
    original = getattr(state, "init", None)
    if state is None or original is None or hasattr(original, "_dcompile"):
        return

    @functools.wraps(original)
    def init(self: Any, modules: Any, *args: Any, **kwargs: Any) -> None:
        original(self, modules, *args, **kwargs)
        if len(modules) == 1:
            sharded(modules[0])

    init._dcompile = True  # type: ignore[attr-defined]
    state.init = init


def tell_forwards_apart() -> bool:
    """Let each forward of an FSDP2 root have an object of its own, if this torch can; see `fsdp2.current_pass`."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state: Any = FSDPState
    original = getattr(state, "_root_pre_forward", None)
    if original is None or hasattr(original, "_dcompile"):
        return original is not None

    @functools.wraps(original)
    def _root_pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if self._state_ctx.iter_forward_root is self:
            setattr(self._state_ctx, FORWARD, object())
        return found

    _root_pre_forward._dcompile = True  # type: ignore[attr-defined]
    state._root_pre_forward = _root_pre_forward
    return True


@contextlib.contextmanager
def gpu_capability_as(capability: tuple[int, int]) -> Iterator[None]:
    """Let torch report this compute capability for every GPU."""
    with unittest.mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability):
        yield


@contextlib.contextmanager
def watched_tracing(graph: Graph, log: list[tuple[str, Node, str]], assume: Callable[[], None]) -> Iterator[None]:
    """Log nodes that are added to a graph and names that they get; `assume`: called for results that are constants."""
    from torch._dynamo.variables import functions

    create, rename, constant = graph.create_node, Node._rename, functions.invoke_and_store_as_constant

    def creating(*args: Any, **keywords: Any) -> Node:
        node = create(*args, **keywords)
        log.append((CREATED, node, node.name))
        return node

    def renaming(node: Node, candidate: str) -> None:
        if node.graph is graph:
            log.append((RENAMED, node, candidate))
        rename(node, candidate)

    def invoking(*args: Any, **keywords: Any) -> Any:
        assume()
        return constant(*args, **keywords)

    with (
        unittest.mock.patch.object(functions, "invoke_and_store_as_constant", invoking),
        unittest.mock.patch.object(graph, "create_node", creating),
        unittest.mock.patch.object(Node, "_rename", renaming),
    ):
        yield


ON_DEMAND: tuple[TorchPatch, ...] = (
    TorchPatch(
        guards.collect_finalizers,
        ("torch._dynamo.guards.weakref",),
        "correctness",
        "finalizers of guards keep these alive as long as what they compare",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        guards.guard_tensor_identity,
        (f"{GUARDS}.TENSOR_MATCH",),
        "takeover",
        "what is compiled with a parameter that is kept in step serves its own module alone",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        watched_tracing,
        (
            "torch._dynamo.variables.functions.invoke_and_store_as_constant",
            "torch.fx.Graph.create_node",
            "torch.fx.Node._rename",
        ),
        "speed",
        "the call of a layer is recorded, for copies of it",
        undone="when the call is traced",
    ),
    TorchPatch(
        aot_trace.recording_metadata,
        (*TRACERS, f"{GRAPH_COMPILE}._create_wrappers_for_dispatch"),
        "takeover",
        "what AOTAutograd finds out of a graph is kept for later starts",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        aot_trace.replayed,
        (*TRACERS, "torch._functorch.aot_autograd.run_functionalized_fw_and_collect_metadata"),
        "speed",
        "a kept trace stands in for tracing, which is half of a warm start",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        aot_bundle.unread_gradients_left_out,
        ("torch._dynamo.guards.GuardsStatePickler.reducer_override",),
        "correctness",
        "saved guards on a tensor that had a gradient cannot be loaded",
        last=(2, 14),
        undone="when the function is compiled",
    ),
    TorchPatch(
        aot_bundle.globals_saved,
        ("torch._dynamo.convert_frame.GraphCaptureOutput.get_runtime_env",),
        "correctness",
        "saved code names modules by Dynamo's globals, which no other process has",
        undone="when the function is compiled",
    ),
    TorchPatch(
        aot_bundle.recording_programs,
        (
            "torch._functorch._aot_autograd.autograd_cache.autograd_cache_key",
            "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save",
        ),
        "takeover",
        "a graph that is compiled ahead of time is saved in a file, and neither found in torch's cache nor kept there",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        absent_ranks.SingleRankCollectives,
        ("torch.distributed.all_reduce", "torch.distributed.all_gather", "torch.distributed.broadcast"),
        "takeover",
        "a model that is explained alone finds nobody to answer its collectives",
        undone="when explaining ends",
    ),
    TorchPatch(
        absent_ranks.for_all_groups,
        (
            "torch.distributed.init_process_group",
            "torch.distributed.new_group",
            "torch.distributed.rendezvous",
            "torch.distributed.TCPStore",
            "torch.distributed.all_gather_object",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.barrier",
            "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
        ),
        "takeover",
        "a job that is precompiled finds no other ranks to meet, and none that could tell it something",
        undone="when precompiling ends",
    ),
    TorchPatch(
        absent_ranks.without_data,
        (
            "torch.distributed.device_mesh.init_device_mesh",
            "torch.distributed.device_mesh.DeviceMesh.__init__",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
            "torch.nn.parallel.distributed._sync_module_states",
            "torch.optim.adam._get_value",
            "torch.utils.swap_tensors",
            "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty",
        ),
        "correctness",
        "wrappers, meshes and optimizers read memory, which tensors of a precompiled job do not have",
        undone="when precompiling ends",
    ),
    TorchPatch(
        deepspeed.stock_linear,
        ("torch.nn.functional.linear",),
        "correctness",
        "ZeRO 3's own linear has no gradients where it is traced",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        notice_sharding,
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState.init",),
        "takeover",
        "a root whose blocks are compiled each by itself becomes one program before its first call",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        tell_forwards_apart,
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_pre_forward",),
        "speed",
        "a program starts the next one's gather in the same forward alone, after which parameters may change",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        intercept_compile,
        ("torch._dynamo.eval_frame._TorchDynamoContext.__call__",),
        "takeover",
        "torch.compile(model, backend='dcompile') is an entry point, and must see whole modules",
        undone="never; other backends go torch's way",
    ),
    TorchPatch(
        guards.hooks_behind_guards,
        ("torch._C._dynamo.eval_frame.set_guard_complete_hook",),
        "correctness",
        "guards that are asked without Dynamo would leave other ranks alone in its collective",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        groups.hear_of_destroyed_groups,
        ("torch.distributed.destroy_process_group",),
        "correctness",
        "CUDA graphs hold communicators, which must not be destroyed before them",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        gpu_capability_as,
        ("torch.cuda.get_device_capability",),
        "takeover",
        "an export for a GPU that is not in this machine compiles for its compute capability",
        undone="when the export ends",
    ),
    TorchPatch(
        dispatch_watch.watch_tensor_texts,
        ("torch._tensor_str._str",),
        "correctness",
        "printing a parameter that has no memory while a graph gathers it would read what is not there",
        undone="never; other tensors print as ever",
    ),
)
"""In the order of what they are for."""
