"""Skip AOTAutograd's wrappers around programs where a graph does not need them.

They serve every kind of graph: mutated inputs, results that are views of one another, subclasses, generator states,
saved sizes. Around a plain program, they take a fifth of a millisecond after a kernel that has evicted the caches
(docs/lab/runtime.md, R5).

torch's class of autograd nodes stays. Unusual calls (a second derivative, a gradient of another kind) use torch's path.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import increment_version
from torch.fx.experimental._backward_state import BackwardState

from dcompile.compat.autograd import quick_grad_mode, without_autocast
from dcompile.errors import DcompileError

Boxed = Callable[[list[Any]], Any]
# torch's words first: programs compare with them
SECOND_DERIVATIVE = (
    "dcompile: torch.compile with aot_autograd does not currently support double backward: the gradient of a compiled "
    "forward is differentiated again, and compiled code has no second derivatives. Run this forward, such as a "
    "gradient penalty's, inside torch.compiler.set_stance('force_eager'); other forwards stay compiled."
)


@contextlib.contextmanager
def lean_runtime(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Make AOTAutograd run plain graphs on the shortest path."""
    from torch._functorch._aot_autograd import runtime_wrappers

    if any(isinstance(value, BackwardState) for value in example_inputs):
        yield
        return
    own = runtime_wrappers.RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled: Any, config: Any, *, runtime_metadata: Any) -> Any:
        usual: Any = own(self, compiled, config, runtime_metadata=runtime_metadata)
        if self.trace_joint and isinstance(cls := getattr(compiled, "__self__", None), type):
            _explain_second_derivatives(cls)
        try:
            plain, amp = _is_plain(runtime_metadata), self.disable_amp
            # saved-tensor hooks in the graph must not be applied again
            hooked = self.trace_joint and runtime_wrappers._should_disable_saved_tensors_hooks()
            if not plain or hooked:
                return usual
            if not self.trace_joint:
                sized = _of_symbolic_sizes(runtime_metadata)
                mark = runtime_wrappers.mark_dynamo_propagated_dynamic_indices if sized else None
                changed = _changed(runtime_metadata, config.keep_inference_input_mutations)
                return _inference(_without_autocast(compiled) if amp else compiled, usual, changed, sized, mark)
            cls = getattr(compiled, "__self__", None)
            if cls is None or runtime_metadata.dynamic_outputs or not saves_plain(cls.metadata):
                return usual
            if cls.maybe_subclass_metadata is not None:
                return usual
        except AttributeError:  # a torch with other names
            return usual
        _shorten(cls, runtime_wrappers, amp)
        changed = _changed(runtime_metadata, config.keep_inference_input_mutations)
        return _training(cls, usual, self.indices_of_inps_to_detach, changed)

    with unittest.mock.patch.object(runtime_wrappers.RuntimeWrapper, "post_compile", post_compile):
        yield


def _is_plain(metadata: Any) -> bool:
    """Whether results are the program's, and the program applies all of its mutations itself."""
    return not (
        metadata.num_mutated_inp_runtime_indices
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.tokens
        or metadata.is_rng_op_functionalized
        or metadata.grad_enabled_mutation is not None
    )


def saves_plain(metadata: Any) -> bool:
    """Whether a forward saves only tensors whose versions autograd checks."""
    return _is_plain(metadata) and not (
        metadata.num_symints_saved_for_bw
        or metadata.num_unsafe_view_outputs
        or metadata.num_tensors_saved_with_no_vc_check
        or metadata.num_opaque_objects_saved_for_bw
        or metadata.dynamic_saved_tensors_idxs
        or metadata.num_backward_tokens
        or metadata.num_graphsafe_rng_states
        or metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
    )


def _changed(metadata: Any, in_graph: bool) -> tuple[int, ...]:
    """Positions of the inputs that a program mutates, whose version counters must increase."""
    return tuple(metadata.mutated_graph_handled_indices_seen_by_autograd) if in_graph else ()


def _of_symbolic_sizes(metadata: Any) -> list[tuple[int, Any]]:
    """(position, dimensions) of the results whose dynamic dimensions Dynamo must know."""
    dims = ((place, info.dynamic_dims) for place, info in enumerate(metadata.output_info))
    return [(place, some) for place, some in dims if some is not None] if metadata.dynamic_outputs else []


def _inference(
    compiled: Boxed, usual: Boxed, changed: Sequence[int], sized: Sequence[tuple[int, Any]], mark: Any
) -> Boxed:
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, quick_grad_mode()
    if not getattr(compiled, "_boxed_call", False):
        return usual
    checked = False

    def run(*given: Any) -> Any:
        nonlocal checked
        args = [*given]
        if not checked:  # torch checks custom operators in the first call
            checked = True
            return usual(args)
        if changed:
            increment_version([args[place] for place in changed])
        recording = is_grad_enabled()
        if recording:
            set_grad_enabled(False)
        try:
            results = compiled(args)
        finally:
            if recording:
                set_grad_enabled(True)
        for place, dims in sized:
            mark(results[place], dims)
        return results

    # for calls that follow one another directly
    run.repeated = None if changed or sized else _direct(compiled)  # type: ignore[attr-defined]
    return _Plain(run)


def marked_direct(compiled: Boxed, direct: Callable[..., Any] | None) -> Boxed:
    """Mark `compiled` with `direct`, which computes the same from unpacked arguments, without recording gradients."""
    compiled._dcompile_direct = compiled.__code__, direct  # type: ignore[attr-defined]
    return compiled


def _direct(compiled: Boxed) -> Callable[..., Any] | None:
    """Direct function of a marked `compiled`. torch's wrappers copy the mark's attributes, but do more."""
    code, direct = getattr(compiled, "_dcompile_direct", (None, None))
    return direct if code is getattr(compiled, "__code__", None) else None


def _training(cls: Any, usual: Boxed, detached: Sequence[int], changed: Sequence[int]) -> Boxed:
    is_grad_enabled, transforms = torch.is_grad_enabled, torch._C._are_functorch_transforms_active
    apply = super(torch.autograd.Function, cls).apply  # skip the Python part, which handles transforms
    checked = False

    def run(*given: Any) -> Any:
        nonlocal checked
        args = [*given]
        if not checked or not is_grad_enabled() or transforms():
            checked = True
            return usual(args)
        if changed:
            increment_version([args[place] for place in changed])
        for place in detached:
            if isinstance(args[place], torch.Tensor):
                args[place] = args[place].detach()
        return apply(*args)

    return _Plain(run)


class _Plain:
    """Call `run` with torch's convention. As a class, it keeps `functools.wraps` from copying attributes to wrappers.

    torch's wrappers for inputs that are passed twice or are views of one another would copy them.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, args: list[Any]) -> Any:
        return self.run(*args)


def unpack_arguments(forward: Callable[..., Any], gm: Any) -> Callable[..., Any]:
    """Unpack the arguments of a compiled graph: returns this module's function inside torch's wrapper, if any."""
    plain = getattr(forward, "__wrapped__", None)
    own = next(gm.parameters(), None) is not None or next(gm.buffers(), None) is not None  # torch adds them
    return plain.run if isinstance(plain, _Plain) and not own else forward


def _without_autocast(program: Boxed) -> Boxed:
    """Return a program that calls operators as they were traced, below autocast, wherever it is called."""
    disabled = without_autocast()

    def run(args: list[Any]) -> Any:
        with disabled():
            return program(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _shorten(cls: Any, runtime_wrappers: Any, amp: bool) -> None:
    """Replace forward and backward of a graph's autograd class by the few steps that the graph needs."""
    from torch._dynamo.eval_frame import skip_code

    metadata = cls.metadata
    results = metadata.num_forward_returns
    constant = [place for place, info in enumerate(metadata.output_info) if not info.requires_grad]
    program = _without_autocast(cls.compiled_fw) if amp else cls.compiled_fw

    def forward(ctx: Any, *args: Any) -> Any:
        found = program([*args])
        saved = found[results:]
        for place, x in enumerate(saved):
            if x._is_view():
                saved[place] = x.detach()
        ctx.to_save = tuple(saved)  # like save_for_backward
        if constant:
            ctx.mark_non_differentiable(*[found[n] for n in constant if isinstance(found[n], torch.Tensor)])
        ctx._materialize_non_diff_grads = False
        return tuple(found[:results])

    backward = _backward(cls, runtime_wrappers, amp)
    skip_code(backward.__code__)  # it may run inside a frame that Dynamo continues; torch's own is skipped, too
    node = cls._backward_cls
    node.symints, node.opaque_objects, node._tensors_no_vc_check = [], [], []  # torch's path and hooks read these
    cls.forward, cls.backward = staticmethod(forward), staticmethod(backward)


def _explain_second_derivatives(cls: Any) -> None:
    """Make the error about second derivatives say what to do: torch raises one where gradients are differentiated."""
    from torch._dynamo.eval_frame import skip_code

    usual = cls.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        results = usual(ctx, *grads)
        if torch.is_grad_enabled():
            nodes = {x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None}
            for node in nodes:
                node.register_prehook(_refuse_second_derivative)
        return results

    skip_code(backward.__code__)
    cls.backward = staticmethod(backward)


def _refuse_second_derivative(_: Any) -> None:
    raise DcompileError(SECOND_DERIVATIVE)


def _backward(cls: Any, runtime_wrappers: Any, amp: bool) -> Callable[..., Any]:
    from torch._dynamo.eval_frame import innermost_fn

    usual, boxed = cls.backward, getattr(cls, "boxed_grads_call", False)
    metas = cls.metadata.subclass_tangent_meta
    places = _gradients(cls.metadata)
    expected = [(place, meta, meta.memory_format) for place, meta in zip(places, metas, strict=True)]
    process = runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent
    coerce = runtime_wrappers.coerce_to_expected_memory_format
    is_grad_enabled, frames = torch.is_grad_enabled, get_eval_frame_callback
    in_transform, is_strict = torch._C._functorch.peek_interpreter_stack, torch._C._get_deterministic_algorithms
    has, kept = torch._C._is_key_in_tls, torch._C._get_obj_in_tls
    tensor, free = torch.Tensor, cls.metadata.deterministic is False
    known: Any = None
    inner: Any = None

    def backward(ctx: Any, *grads: Any) -> Any:
        nonlocal known, inner
        program = cls.compiled_bw
        if program is None or is_grad_enabled() or in_transform() is not None or (free and is_strict()):
            return usual(ctx, *grads)
        given: Any = grads[0] if boxed else grads
        args = [*ctx.saved_tensors]
        for place, meta, layout in expected:
            x = given[place]
            if type(x) is tensor:
                fits = layout.size is not None and x.shape == layout.size and x.stride() == layout.stride
                args.append(x if fits else coerce(x, layout))
            else:
                args.append(x if x is None else process(x, meta)[0])
        if boxed:
            given.clear()
        x = None
        ctx.maybe_clear_saved_tensors()
        if program is not known:
            known, inner = program, innermost_fn(program)
        run = program if frames() is not None else inner
        if amp:
            run = _without_autocast(run)
        context = kept("context") if has("context") else None  # the caller's variables: this may be another thread
        return tuple(run(args) if context is None else context.run(run, args))

    return backward


def _gradients(metadata: Any) -> list[int]:
    """Positions of results whose gradients the backward takes."""
    kinds = ("non_alias", "unsafe_view_alias", "custom_function_view")
    return [
        place
        for place, info in enumerate(metadata.output_info)
        if info.output_type.name in kinds
        and issubclass(info.raw_type, torch.Tensor)
        and getattr(info, "requires_grad_for_backward", info.requires_grad)
    ]
