"""Entries: compiled callables and their state; compile a module in place, a method or a function, and find it again."""

from __future__ import annotations

import contextlib
import functools
import re
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import FallBackToStock, ShardedAdapter
from dcompile.capture.adapters.plain import WATCHED
from dcompile.capture.adapters.table import WrappedModule, sync_for
from dcompile.capture.callables import (
    compiled_part,
    fresh_function,
    label_of,
    name_of,
    original_function,
    twin_of,
    unwrap_module,
    with_owner,
)
from dcompile.capture.captured_graph import CaptureMode
from dcompile.capture.compiled_model import CompiledModel, Settings, settings_inside
from dcompile.capture.dynamo_backend import RUN, Backend
from dcompile.capture.services import Services
from dcompile.capture.train_step.optimizer_step import OptimizerStep
from dcompile.errors import DcompileError, PlanMismatchError


@dataclass(eq=False)
class EntryRecord:
    """Objects of an entry that Dynamo keeps in tables that outlive the entry."""

    codes: list[types.CodeType] = field(default_factory=list)
    finalizers: list[Any] = field(default_factory=list)
    backends: list[Any] = field(default_factory=list)

    def forget(self, model: CompiledModel) -> None:
        """Remove the compiled code of an entry that was collected, with all that the code keeps alive."""
        for finalizer in self.finalizers:
            finalizer.detach()
        self.forget_code()
        for backend in self.backends:
            compat.dynamo.forget_backend(backend)
        model.release()

    def forget_code(self) -> None:
        """Remove what is compiled so far, since another adapter serves the model: equal modules must not run it."""
        for code in self.codes:
            compat.skip_frame_eval.forget_code(code)
        self.codes.clear()


@dataclass(frozen=True, eq=False)
class EqualModules:
    """Modules inside one module that are of one class, compiled with equal settings, and synchronized alike.

    Each runs whole frames of the others, if all guards hold for it: N equal layers are compiled once.
    """

    of: tuple[Any, ...]
    """What is equal."""
    frames: list[weakref.ref[compat.skip_frame_eval.Frames]] = field(default_factory=list)
    """The compiled code of each module, in order of first calls."""

    def leave(self, own: compat.skip_frame_eval.Frames) -> None:
        """Take a module out, whose code is going to be for another adapter."""
        self.frames[:] = [reference for reference in self.frames if reference() not in (own, None)]

    def others(self, own: compat.skip_frame_eval.Frames) -> Iterator[compat.skip_frame_eval.Frames]:
        """Yield the compiled code of all modules but one."""
        for reference in self.frames:
            frames = reference()
            if frames is not None and frames is not own:
                yield frames


_EQUAL: weakref.WeakKeyDictionary[Module, list[EqualModules]] = weakref.WeakKeyDictionary()
"""Outermost module in whose call compiled modules ran -> those that are equal: separate models share nothing."""


def equal_modules(module: Module, own: compat.skip_frame_eval.Frames, of: tuple[Any, ...]) -> EqualModules:
    """Return the modules that are equal to one, inside the outermost module whose call runs now; add it to them."""
    known = _EQUAL.setdefault(compat.hooks.outermost_caller(module), [])
    found = next((each for each in known if each.of == of), None)
    if found is None:
        known.append(found := EqualModules(of))
    found.frames.append(weakref.ref(own))
    return found


@contextlib.contextmanager
def dynamo_settings(model: CompiledModel, code: Any, own: Any, spec: Any, late_sizes: bool) -> Iterator[None]:
    """Set up Dynamo's work on a frame. `spec`: the shapes of the outermost frame, whose code is `own`."""
    with model.compiling(code, own, late_sizes), compat.sizes.in_entry(spec if code is own else None):
        yield


_NEWEST: weakref.WeakKeyDictionary[Module, weakref.ref[Entry]] = weakref.WeakKeyDictionary()
"""Module -> its newest entry. Both references are weak, since an entry may keep its module alive."""


class Entry:
    """A compiled callable: its target, its state, and the function that Dynamo compiles.

    The entry of a module that was compiled in place belongs to the module. It has a weak reference to the module, so
    that the module is freed with its last user reference. Code that Dynamo has compiled for an entry is freed with it.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        root: Module | None,
        settings: Settings,
        services: Services,
        mode: CaptureMode = RUN,
        *,
        in_place: bool = False,
        method: Callable[..., Any] | None = None,
        engine: Any = None,
    ) -> None:
        """Make an entry. `method`: function that is called with the module `root` first; None means `_call_impl`.

        `engine`: the hooks of a DeepSpeed engine on the module, which run around a call once they are taken over.
        """
        self._method, self._engine = method, engine
        self._held = compat.skip_frame_eval.CallTarget(target if root is None else root, weakly=in_place)
        self._is_module = root is not None
        self._mode = mode
        self._hooks = None if root is None else compat.hooks.Hooks(root)
        self._checkpointed = None if root is None else compat.composable.CheckpointedLayers(root)
        self.model = CompiledModel(settings, services)
        thing = target if root is None else root
        self.model.name, self.model.is_function = name_of(thing, method), root is None
        self.model.thing = compat.groups.weak(thing)
        self._ddp: Callable[[], Any] = compat.groups.weak(None)
        self._around: Callable[[], Any] = compat.groups.weak(None)
        """Weak reference to the DDP module in whose forward the newest call began, if any.

        The compiled callable is a part of that module, or its loss.
        """
        self._compiled: Callable[..., Any] | None = None
        self._frames = compat.skip_frame_eval.Frames()
        """Compiled code that calls may enter directly, in models that synchronize nothing around a call."""
        self._equal: EqualModules | None = None
        """Equal modules, from the first call with an adapter on."""
        self.parts = 0
        """Number of parts whose user compiled each by itself, and in whose place this whole is compiled."""
        self._whole: Callable[[], Entry | None] = compat.groups.weak(None)
        """Weak reference to the entry of the FSDP2 root that is compiled in place of this part and others."""
        self._apart_because = ""
        """Why the module is compiled by itself although its FSDP2 root could be, with it; empty if that is unknown."""
        self._made = EntryRecord()
        weakref.finalize(self, self._made.forget, self.model).atexit = False
        if root is not None:
            _NEWEST[root] = weakref.ref(self)
            compat.on_demand.notice_sharding(promote_root)

    @property
    def root(self) -> Module | None:
        """The compiled module; None for a function. Raises DcompileError if the module is gone."""
        return self._thing() if self._is_module else None

    @property
    def target(self) -> Callable[..., Any]:
        """The uncompiled callable."""
        thing = self._thing()
        if self._method is not None:
            return types.MethodType(self._method, thing)
        target: Callable[..., Any] = thing._call_impl if self._is_module else thing
        return target

    def _thing(self) -> Any:
        thing = self._held.thing()
        if thing is None:
            raise DcompileError("dcompile: a module that was compiled in place is gone; call the module, and keep it")
        return thing

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._mode.needs_data and self.model.services.needs_data and compat.dynamo.is_traced_by_another():
            return self.target(*args, **kwargs)
        state = compat.composable.replicate_state(self.root)
        if state is not None and not torch.compiler.is_compiling():
            return compat.composable.run_between_hooks(self.root, state, self._enter, args, kwargs)
        return self._enter(args, kwargs)

    def _enter(self, args: Any, kwargs: Any) -> Any:
        """Run a call; take over DDP first if the module is called inside its forward."""
        ddp = compat.ddp.active_ddp()
        if ddp is not self._around():
            self._around = compat.groups.weak(ddp)
        inside_ddp = ddp is not None and self._is_root_of(ddp)
        if inside_ddp and (self._ddp() is not ddp or self.model.has_moved()):
            self._attach(ddp)
        elif inside_ddp and self.model.is_outdated():
            self._compiled = None
        if self.model.is_replanned and self._compiled is not None:
            self.model.is_replanned = False
            self._compiled = self._compile()
        if self._compiled is None:
            if self._is_part_of_whole():
                return self.target(*args, **kwargs)
            root = self.root
            if root is not None and _belongs_to(root, self):
                self._held.weaken()
            self._take_over_shards()
            if self.parts and not self.has_taken_over:
                return self._take_apart("; ".join(self.model.adapter.reasons), args, kwargs)
            self._note_promotion()
            self._compiled = self._compile()
        if self.model.adapter.eager:
            return self._call_eager(args, kwargs)
        if self.model.shards is not None and self.model.sync.sharded is not None:
            return self._call_sharded(args, kwargs)
        return self._call(inside_ddp, args, kwargs)

    @property
    def has_taken_over(self) -> bool:
        """Whether the compiled graphs, and nothing else, synchronize parameters."""
        adapter = self.model.adapter
        return adapter.synchronizes and adapter.eligible

    def entrance(self, traced: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for the user to call. Inside a larger compiled function, `traced` replaces it."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            return traced(*args, **kwargs) if torch.compiler.is_compiling() else self(*args, **kwargs)

        call = compat.skip_frame_eval.entrance(self._frames, self._held, whole, self.model.calls, self._hooks)
        if not self._is_module:
            functools.update_wrapper(call, self.target)
        call._dcompile_entry = self  # type: ignore[attr-defined]
        call._torchdynamo_inline = traced  # type: ignore[attr-defined]
        return call

    def _call(self, inside_ddp: bool, args: Any, kwargs: Any) -> Any:
        assert self._compiled is not None, "called before it was compiled"
        regions = contextlib.nullcontext if self._checkpointed is None else self._checkpointed.as_regions
        text, model, run = self._guarded_text(), self.model, self._compiled
        with regions():
            way = self._lent(text, args, kwargs)
        if way is not None:
            model, run = way.owner(), way.run
        call = model.begin(inside_ddp, self.model.sync)
        try:
            with regions():
                result = run(text, self._thing(), *args, **kwargs)
        except RuntimeError as error:
            inner = compat.dynamo.raised_by_backend(error)
            if isinstance(
                inner, PlanMismatchError | FallBackToStock
            ):  # the same error on all ranks, wherever it is raised
                raise inner from None
            if (missing := self._missing_weights(error)) is not None:
                raise missing from None
            raise
        finally:
            model.end(call)
        model.after_call(call, result)
        self._frames.settle()
        return result

    def _missing_weights(self, error: RuntimeError) -> DcompileError | None:
        """What to say in place of torch's error about two devices, if one is meta, where weights have no values."""
        thing = self._thing()
        module = thing if self._is_module else getattr(thing, "__self__", None)
        if not isinstance(module, Module) or not re.search(r"\bmeta\b(?!-)", str(error)):  # not torch's `meta-pytorch`
            return None
        weights = [*module.named_parameters(), *module.named_buffers()]
        missing = [name for name, value in weights if value.is_meta]
        if not missing:
            return None
        return DcompileError(
            f"dcompile: {len(missing)} of {len(weights)} parameters and buffers of {type(module).__name__} are on the "
            f"meta device and have no values, such as {missing[0]}, while others or the inputs are not; before the "
            "call, use model.to_empty(device=...), then load or initialize the weights"
        )

    def _lent(self, text: str, args: Any, kwargs: Any) -> Any:
        """Return code that fits a call, of this module or of an equal one; None if Dynamo is to look for it."""
        if self._equal is None:
            self._equal = self._find_equal()
        if len(self._equal.frames) < 2:
            return None
        scope = {"hooked": text, "target": self._thing(), "args": args, "kwargs": kwargs}
        way = self._frames.fitting(scope, self._equal.others(self._frames))
        owner = None if way is None else way.owner()
        if owner is None:
            return None
        if owner is not self.model:
            owner.sync.lend_to(self.model.sync)
        return way

    def _find_equal(self) -> EqualModules:
        """Find the modules whose code this one may run: those in one model that are equal to it."""
        root, settings, likeness = self.root, self.model.settings, self.model.adapter.likeness()
        recorded = settings.config.triton_cudagraphs  # a recording has the addresses of one module's parameters
        apart = self._method is not None or self._engine is not None or settings.guard_filter_fn is not None
        planned = self._mode is not RUN or self.model.services.renew is None
        if root is None or likeness is None or apart or recorded or planned:
            return EqualModules(())
        in_ddp = compat.ddp.active_ddp() is not None
        return equal_modules(root, self._frames, (type(root), settings, likeness, in_ddp))

    @property
    def model_run(self) -> CompiledModel:
        """The state of the model whose programs calls run: its own, or that of an equal module."""
        whole = self._whole()
        if whole is not None and not self.model.graphs and whole.model.graphs:
            return whole.model
        ways = () if self.model.graphs else self._frames.ways
        owner = ways[0].owner() if ways else None
        return self.model if owner is None else owner

    def _guarded_text(self) -> str:
        """Return what the code of a call depends on beside its target and arguments: Dynamo guards on this text."""
        hooked, adapter = compat.hooks.active_hook_kinds(self._hooks), self.model.sync.sharded
        return hooked if adapter is None or not adapter.eligible else f"{hooked} {adapter.setting()}"

    def _take_over_shards(self) -> None:
        """Take over sharded parameters, if the module has some, before anything is traced."""
        known, root = self.model.sync.sharded, self.root
        if root is None or (known is not None and not known.eligible):
            return
        engine = self._engine.engine if self._engine is not None and self._engine.taken else None
        if engine is not None and self.model.adapter.serves_wrapper:
            return
        with torch.inference_mode(False):  # virtual parameters made in that mode would never get a gradient
            sync = sync_for(WrappedModule(root, self.model.settings.config, engine=engine))
            if sync is not None:
                self.model.adopt(sync)

    def _is_part_of_whole(self) -> bool:
        """Is the FSDP2 root in whose forward this module runs compiled as one program, from its next call on?

        That is so if the blocks were compiled after the root was sharded (see `promote_root`). In this call the root's
        forward has begun already, and runs eagerly with FSDP's own hooks.
        """
        root = self.root
        if root is None or self._apart_because or not self.may_be_promoted:
            return False
        whole, entry = compat.fsdp2.outermost_in_forward(root), self._whole()
        if whole is None:  # a checkpoint may recompute this module's part of that eager forward
            entry = entry if compat.autograd.backward_task() >= 0 else None
        elif whole is root:
            entry = None
        else:
            entry = entry or newest_entry(compiled_part(whole)) or self.promote(whole)
        return entry is not None and entry.parts > 0 and (entry._compiled is None or entry.has_taken_over)

    @property
    def may_be_promoted(self) -> bool:
        """Whether the settings let a module be compiled as a part of its FSDP2 root."""
        config = self.model.settings.config
        runs = self.model.services.renew is not None and self._method is None and not self.parts
        return runs and config.promote and config.distributed != "stock"

    def promote(self, whole: Module) -> Entry | None:
        """Compile an FSDP2 root in place of its parts, of which this is one; return its entry.

        None, with a reason for the receipt, if not all that are like a compiled part are compiled alike.
        """
        entries = {module: newest_entry(module) for module in whole.modules() if module is not whole}
        parts = [entry for entry in entries.values() if entry is not None and not entry.parts]
        kinds = {name_of(module) for module, entry in entries.items() if entry is not None}
        objection, renew = "", self.model.services.renew
        assert renew is not None, "programs that only plan leave the root alone"
        if compiled_part(whole) is not whole or vars(whole).get("_compiled_call_impl") is not None:
            objection = "the root is compiled by itself"
        elif not all(part._is_alike(self) for part in parts):
            objection = "they are compiled with different settings, or with different optimizers"
        elif any(entry is None and name_of(module) in kinds for module, entry in entries.items()):
            objection = "some of the same class are not compiled"
        if objection:
            for part in parts:
                part._apart_because = objection
            return None
        for module, inner in entries.items():
            if inner is not None and inner.parts:  # a root until another was sharded around it
                vars(module).pop("_compiled_call_impl", None)
        compat.fsdp2.let_wrappers_be_traced(entries)
        settings = replace(settings_inside(self.model.settings), fullgraph=False)
        compile_module(whole, settings, renew(), self._optimizer)
        entry = newest_entry(whole)
        assert entry is not None, "a module that was compiled has an entry"
        entry.parts = len(parts)
        for part in parts:
            part._whole = weakref.ref(entry)
            part.model.leave_optimizer()
        return entry

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer with which the module was compiled."""
        return None if self.model.step is None else self.model.step.optimizer

    def _is_alike(self, other: Entry) -> bool:
        """Was this module compiled with the arguments of another one, apart from the folder of its dump?"""
        mine, its = (
            replace(entry.model.settings, config=replace(entry.model.settings.config, dump=""))
            for entry in (self, other)
        )
        return mine == its and self._method is None and self._optimizer is other._optimizer

    def _note_promotion(self) -> None:
        """Say in the receipt that a whole stands for its parts, or why a part stands for itself."""
        adapter = self.model.adapter
        if self.parts:
            adapter.note(
                f"{self.parts} parts that were compiled each by itself run in one program, so that their gathers "
                "overlap; option promote=False leaves them apart"
            )
            adapter.way_to_differ = (
                "Code around blocks that is meant to differ by rank needs options={'promote': False}."
            )
        elif self._apart_because:
            adapter.note(f"blocks of one FSDP2 root are programs of their own: {self._apart_because}")

    def _take_apart(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Run a call, and all later ones, with each part compiled by itself: the whole cannot be one program."""
        root = self.root
        assert root is not None, "an FSDP2 root is a module"
        if self.model.leave_optimizer():
            reason += "; the optimizer updates by itself"
        for module in root.modules():
            if (part := newest_entry(module)) is not None and part is not self:
                part._apart_because = reason
        vars(root).pop("_compiled_call_impl", None)
        return root(*args, **kwargs)

    def _call_sharded(self, args: Any, kwargs: Any) -> Any:
        """Run a call with virtual parameters, or with FSDP's own hooks if that is not possible."""
        adapter = self.model.sync.sharded
        assert adapter is not None, "only FSDP shards parameters"
        if reason := adapter.wants_stock():
            return self._call_given_back(adapter, reason, args, kwargs)
        if adapter.shown_by_another():
            return self.target(*args, **kwargs)
        if (off := compat.dynamo.is_off()) or compat.dynamo.is_watched():
            assert self.model.shards is not None, "sharded parameters are taken over"
            if torch.is_grad_enabled():
                self.model.shards.give_back(from_now_on=False)
            if off:
                return self.target(*args, **kwargs)
            adapter.note_eager(WATCHED)
            return self._call_eager(args, kwargs)
        args, kwargs = adapter.prepare(args, kwargs)
        regions, shards = self.model.eager_regions, self.model.shards
        assert regions is not None and shards is not None, "sharded parameters are taken over"
        shards.update_scales()
        try:
            with adapter.scope(), regions.watching(self.root):
                result = self._call(False, args, kwargs)
            compat.autograd.keep_for_backward(result, self.root)
            return result
        except FallBackToStock as error:
            reason = str(error)
        return self._call_given_back(adapter, reason, args, kwargs)

    def _call_given_back(self, adapter: ShardedAdapter, reason: str, args: Any, kwargs: Any) -> Any:
        """Fall back to FSDP's own hooks, in this call and all later ones."""
        self.model.give_back(adapter, reason)
        if self.parts:
            return self._take_apart(reason, args, kwargs)
        self._compiled = self._compile()
        return self(*args, **kwargs)

    def _call_eager(self, args: Any, kwargs: Any) -> Any:
        """Run a call eagerly, since the wrapper cannot be traced."""
        result = self.target(*args, **kwargs)
        self.model.ran_eagerly()
        return result

    def _is_root_of(self, ddp: Any) -> bool:
        """Does `ddp` wrap this entry's module itself? A part of its module is compiled as plain, with DDP's reducer."""
        if self.root is None:
            return False
        return unwrap_module(ddp.module) is self.root or compat.composable.is_replicate(ddp, self.root)

    def _attach(self, ddp: Any) -> None:
        """Adopt a DDP module in whose forward this module runs for the first time."""
        self._ddp, root = weakref.ref(ddp), self.root
        assert root is not None, "DDP wraps modules"
        sync = sync_for(WrappedModule(root, self.model.settings.config, ddp=ddp))
        assert sync is not None, "DDP has a row"
        self.model.adopt(sync)
        self._compiled = None

    def _leaves_to_eager(self, owner: Any) -> bool:
        """Does a frame of `owner` run eagerly this time? If DDP or FSDP synchronizes `owner`, it is compiled by itself.

        A frame of a fully_shard module is in a call already. That call uses FSDP's own hooks, and the next is compiled.
        """
        if not isinstance(owner, Module) or self.model.adapter.synchronizes:
            return False
        if isinstance(owner, DistributedDataParallel):
            self._compile_inside(owner)
            return False
        if compat.deepspeed.is_engine(owner):
            self._note_engine(owner)
            return False
        ddp = compat.ddp.active_ddp()
        if ddp is not None and ddp is not self._around():  # torch 2.11 does not show DDP's own frame
            self._compile_inside(ddp)
            return bool(self.model.inside)
        outermost = compat.fsdp2.outermost_in_forward(owner)
        if outermost is None or outermost is self.root:
            return False
        self._compile_inside(outermost)
        return bool(self.model.inside)

    def _leaves_out_hooks(self, error: Exception) -> bool:
        """Do hooks of the module run eagerly, around its compiled forward, since they cannot be captured with it?

        With `fullgraph=True` the forward is one graph, as where torch.compile skips the frame that calls the hooks.
        """
        root = self.root
        if root is None or self._method is not None or not compat.hooks.has_hooks_around(root):
            return False
        why = str(error).partition("\n")[0]
        self.model.adapter.note(f"the module's own hooks run eagerly, around its compiled forward: {why}")
        return True

    def _note_engine(self, engine: Any) -> None:
        """Add a DeepSpeed engine that a call has reached, or note that it is not compiled by itself."""
        entry = newest_entry(compiled_part(engine))
        if entry is None:
            self.model.adapter.leave_to_others(
                "a DeepSpeed engine inside keeps parameters in step by itself; compile that: "
                "dcompile.integrations.deepspeed.compile(engine)"
            )
        else:
            self.model.add_inside(entry.model)

    def _compile_inside(self, wrapper: Module) -> None:
        """Compile by itself a module inside that DDP or FSDP synchronizes, when a call first reaches it."""
        model, module = self.model, compiled_part(wrapper)
        if model.settings.config.distributed == "stock":
            model.adapter.leave_to_others("option distributed='stock'")
        elif (entry := newest_entry(module)) is not None:
            model.add_inside(entry.model)
        elif vars(module).get("_compiled_call_impl") is not None:
            name = type(wrapper).__name__
            model.adapter.leave_to_others(
                f"a {name} inside is compiled by another backend; leave that out, or give it backend='dcompile'"
            )
        else:
            compile_module(wrapper, settings_inside(model.settings), self._services_inside())
            self._compile_inside(wrapper)

    def _services_inside(self) -> Services:
        """Return services for a module inside, whose reports are this model's."""
        services, outer = self.model.services, weakref.ref(self.model)
        assert services.renew is not None, "programs that only plan leave modules inside alone"

        def report(_inner: CompiledModel) -> None:
            if (model := outer()) is not None:
                model.services.first_step(model)

        return replace(services.renew(), first_step=report)

    def _compile(self) -> Callable[..., Any]:
        """Make a new function for Dynamo, and a new backend: graphs of one model or adapter never serve another."""
        settings = self.model.settings
        backend = Backend(self.model, self._mode)
        context = compat.dynamo.optimize(
            backend,
            fullgraph=settings.fullgraph,
            guard_filter_fn=settings.guard_filter_fn,
            limits=settings.limits,
        )
        function = fresh_function(self._is_module, self._method, label_of(self._thing(), self._method))
        model, own, made = self.model, function.__code__, self._made
        made.forget_code()
        made.codes.append(own)
        made.backends.append(backend)
        self._frames.begin(function, weakref.ref(model), direct=not model.adapter.synchronizes)
        model.frames = weakref.ref(self._frames)
        if self._equal is not None:
            self._equal.leave(self._frames)
            self._equal = None
        known, parts = weakref.ref(self._frames), self.parts  # Dynamo never drops its callback
        spec = compat.sizes.for_entry(settings.limits, self.target)

        def compiled_frame(code: Any, guarded: Any) -> None:
            if parts and code is own and guarded is None and model.eager_regions is not None:
                model.eager_regions.refuse("the code around them breaks the graph")
            model.compiled(code, own, guarded is not None)
            frames = known()
            if guarded is not None and frames is not None:
                frames.add(code, guarded)

        @contextlib.contextmanager
        def compiling(code: types.CodeType, late: bool) -> Iterator[None]:
            finalizers = made.finalizers if code is own else []  # other code outlives this entry
            with compat.guards.collect_finalizers(finalizers), dynamo_settings(model, code, own, spec, late):
                yield

        config = model.settings.config
        # CUDA graphs record fixed sizes
        late_sizes = config.late_sizes and not config.triton_cudagraphs
        entry = weakref.ref(self)

        def left_to_eager(owner: Any) -> bool:
            known = entry()
            return known is not None and model.services.renew is not None and known._leaves_to_eager(owner)

        def skipped(code: types.CodeType, error: Exception) -> bool:
            known = entry()
            return code is own and known is not None and known._leaves_out_hooks(error)

        compat.dynamo.wrap_frame_callback(context, compiling, compiled_frame, late_sizes, left_to_eager, skipped)
        compiled: Callable[..., Any] = context(function)
        return compiled


def _belongs_to(root: Module, entry: Entry) -> bool:
    """Do calls of the module itself go through this entry?"""
    return getattr(vars(root).get("_compiled_call_impl"), "_dcompile_entry", None) is entry


def module_call(
    root: Module, settings: Settings, services: Services, *, in_place: bool = False, optimizer: Any = None
) -> Callable[..., Any]:
    """Return a compiled replacement for `root._call_impl`.

    `in_place`: it will belong to the module, and has a weak reference to it. `optimizer`: its updates may run in the
    module's backward programs.
    """
    engine, before = compat.deepspeed.hooks_on(root), newest_entry(root)
    entry = Entry(root._call_impl, root, settings, services, in_place=in_place, engine=engine)
    if before is not None:
        before.model.leave_optimizer()
    entry.model.step = None if optimizer is None else OptimizerStep(optimizer)
    module: Callable[[], Any] = weakref.ref(root)
    apart = compat.dynamo.no_dynamo(entry.__call__, "a module whose parameters dcompile keeps in step")

    def traced(*args: Any, **kwargs: Any) -> Any:
        """Run inside a larger compiled function, traced with it unless this entry's programs synchronize parameters."""
        return apart(*args, **kwargs) if entry.has_taken_over else module()._call_impl(*args, **kwargs)

    call = entry.entrance(traced)
    if engine is None:
        return call
    hooked: Any = engine.around(call, lambda: _belongs_to(module(), entry))
    hooked._dcompile_entry = entry
    return hooked  # type: ignore[no-any-return]


def compile_module(module: Module, settings: Settings, services: Services, optimizer: Any = None) -> None:
    """Compile `module` in place; of a DDP module, compile the wrapped one, and leave DDP's own forward as it is."""
    root = compiled_part(module)
    # Module.__call__ prefers this attribute; copies and pickles of the module leave it out. __setattr__ is avoided:
    # that of a traced TorchScript module sets attributes of another object, which is never called.
    vars(root)["_compiled_call_impl"] = module_call(root, settings, services, in_place=True, optimizer=optimizer)


def promote_root(whole: Module) -> None:
    """Compile a module that FSDP2 shards as one program if modules inside were compiled each by itself.

    Trainers compile each block, then shard the blocks and the model around them. As programs of their own, blocks start
    no gather for the next one; the whole is one program that schedules all gathers.
    """
    if newest_entry(compiled_part(whole)) is not None:
        return
    inner = (newest_entry(module) for module in whole.modules())
    part = next((entry for entry in inner if entry is not None and not entry.parts), None)
    if part is not None and part.may_be_promoted:
        part.promote(whole)


def newest_entry(module: Module) -> Entry | None:
    """Return the entry that was installed last for a module, if it is still there."""
    found = _NEWEST.get(module)
    return found() if found is not None else None


@contextlib.contextmanager
def uncompiled(module: Module | None) -> Iterator[None]:
    """Leave out, in this context, what compiles a module and its parts in place; afterwards they have it again."""
    parts = [] if module is None else [*module.modules()]
    held = [(part, vars(part).pop("_compiled_call_impl", None), _NEWEST.pop(part, None)) for part in parts]
    try:
        yield
    finally:
        for part, call, entry in held:
            vars(part).pop("_compiled_call_impl", None)
            _NEWEST.pop(part, None)
            if call is not None:
                vars(part)["_compiled_call_impl"] = call
            if entry is not None:
                _NEWEST[part] = entry


def compile_method(module: Module, name: str, settings: Settings, services: Services) -> Callable[..., Any]:
    """Return a compiled replacement for a method that does a part of `module`'s forward; the caller installs it.

    DDP and FSDP around the module, or inside it, are taken over as for its forward. The replacement has a weak
    reference to the module.
    """
    bound: Any = getattr(module, name)
    entry = Entry(bound, module, settings, services, in_place=True, method=bound.__func__)
    owner: Callable[[], Any] = weakref.ref(module)
    apart = compat.dynamo.no_dynamo(entry.__call__, "a module whose parameters dcompile keeps in step")

    def traced(*args: Any, **kwargs: Any) -> Any:
        return apart(*args, **kwargs) if entry.has_taken_over else bound.__func__(owner(), *args, **kwargs)

    return functools.update_wrapper(entry.entrance(traced), bound, updated=())


def compiled_call(module: Module, settings: Settings, services: Services) -> Callable[..., Any]:
    """Return the callable that torch.compile calls for `module`; of a DDP module, compile the wrapped one in place."""
    if isinstance(module, DistributedDataParallel):
        compile_module(module, settings, services)

        eager: Callable[..., Any] = module._call_impl

        def call_ddp(*args: Any, **kwargs: Any) -> Any:
            return eager(*args, **kwargs)

        return call_ddp
    return module_call(module, settings, services)


def compile_function(function: Callable[..., Any], settings: Settings, services: Services) -> Any:
    """Return a compiled replacement for a function; the function itself does not change."""
    function = original_function(function)
    inner = Entry(function, None, settings, services).entrance(function)
    # another object than the one that `__func__` calls: a reference cycle would live until garbage collection
    call: Any = twin_of(inner)
    # torch.compile and torch._dynamo.disable find the function itself through these two
    call._torchdynamo_orig_callable = function
    call._torchdynamo_wrapper_id = id(call)
    if isinstance(function, types.MethodType):
        # a learning rate scheduler calls an optimizer's `step.__func__`, also of a compiled one put in its place
        call.__self__, call.__func__ = function.__self__, with_owner(inner)
    compiled: Callable[..., Any] = call
    return compiled


def give_optimizer(thing: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the updates of an optimizer run in a compiled model's programs, as `dcompile.compile(model, optimizer=...)`.

    For trainers, which make the optimizer later than the model. Raises DcompileError if there is no one model that is
    compiled as a whole, or if it has run.
    """
    model = find_model(thing)
    if model is None:
        raise DcompileError("dcompile: no model to give the optimizer to: compile it as a whole first, by dcompile")
    if model.graphs:
        raise DcompileError("dcompile: the model has run without its optimizer; give that before the first step")
    if model.step is None or model.step.optimizer is not optimizer:
        model.step = OptimizerStep(optimizer)


def find_model(thing: Any) -> CompiledModel | None:
    """Return the state of a result of compile or torch.compile, of the module inside it, or of a wrapper (DDP, Fabric).

    A wrapper is a module with exactly one compiled part. None if there is no such state.
    """
    models = find_models(thing)
    return models[0] if len(models) == 1 else None


def find_models(thing: Any) -> list[CompiledModel]:
    """Return the states of all parts of a module that are compiled by themselves, such as its layers.

    One state if the module is compiled as a whole, or for another callable. Empty if nothing was compiled.
    """
    if not isinstance(thing, Module):
        entry = getattr(thing, "_dcompile_entry", None)
        return [] if entry is None else [entry.model_run]
    root = compiled_part(thing)
    entry = newest_entry(root)
    parts = [entry] if entry is not None else [newest_entry(part) for part in root.modules()]
    return [*dict.fromkeys(part.model_run for part in parts if part is not None)]
