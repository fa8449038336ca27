"""Compile one region with another compiler, and call it, with checks of its results.

ONNX Runtime and OpenVINO take no FX graph but torch.export's program. torch removed its own backend `onnxrt` with its
old exporter. OpenVINO's own one silently runs operations without a conversion in torch; here they are a refusal.
Sessions run on the CPU; they read inputs, and write results, in torch's memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.kernel_backends.names import KernelBackend

Compiled = Callable[[list[Any]], Any]
"""A region as a function of a list of its inputs, which it empties. Returns a tensor or a sequence of tensors."""
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""(shape, strides, dtype) of a result."""


def refusal(backend: KernelBackend, gm: Any, trains: bool) -> str | None:
    """Reason, from the table of compilers, not to give this region to a compiler; None to try it."""
    row = backend.row
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op != "output"]
    if trains and not row.trains:
        return "training graph"
    if not row.symbolic and compat.sizes.symbols_of(values):
        return "symbolic sizes"
    tensors = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,)) if isinstance(t, torch.Tensor)]
    others = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} - set(row.dtypes)
    if row.dtypes and others:
        return f"dtype {', '.join(sorted(others))}"
    if not all(isinstance(tensor, torch.Tensor) for tensor in _inputs(gm)) and not row.symbolic:
        return "a number as input"
    return None


def compile_region(backend: KernelBackend, gm: Any, trains: bool) -> Compiled | str:
    """Compile a region with a compiler that gets `gm` and fake tensors.

    Returns a function, or the reason for a refusal. Any exception of the compiler is a refusal: other kernels can run
    the region, and the receipt repeats the reason.
    """
    found = refusal(backend, gm, trains)
    if found is not None:
        return found
    try:
        with compat.inductor.outside_tracing(), compat.tensors.real_tensors():
            with compat.sizes.adding_no_guards(gm):
                inputs = compat.tensors.in_memory_of_their_own(_inputs(gm))
            return _boxed(_contract(backend)(gm, inputs))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return text if len(text) <= 200 else f"{text[:200]}..."


def _inputs(gm: Any) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _contract(backend: KernelBackend) -> Callable[[Any, Sequence[Any]], Any]:
    """Compiler with the signature of torch's backends."""
    if backend.function is not None:
        return backend.function
    if backend.name == "inductor":
        return compat.inductor.compile_region
    if backend.name in SESSIONS:
        return functools.partial(compile_session, SESSIONS[backend.name])
    for module in backend.row.modules:
        importlib.import_module(module)
    return compat.dynamo.registered_backend(backend.name)


def _boxed(compiled: Any) -> Compiled:
    """Wrap a compiled function as a function of one list, which it empties."""
    if not callable(compiled):
        raise TypeError(f"the compiler returned a {type(compiled).__name__}, not a callable")
    several = getattr(getattr(compiled, "__code__", None), "co_flags", 0) & inspect.CO_VARARGS
    if getattr(compiled, "_boxed_call", False) and not several:  # AOTAutograd's function of several has the mark, too
        return compiled  # type: ignore[no-any-return]

    def call(values: list[Any]) -> Any:
        found = compiled(*values)
        values.clear()
        return found

    return call


def region_name(number: int) -> str:
    """Name of a region's call in graphs and programs."""
    return f"dcompile_region{number}"


class RegionCall:
    """One region, called with a list of its inputs (tensors and numbers). Returns a tensor, or a tuple of several.

    Results have memory of their own, with the strides from tracing. The first call raises DcompileError if the other
    compiler returns another shape or dtype.
    """

    def __init__(
        self,
        number: int,
        backend: str,
        function: Callable[[list[Any]], Any],
        layouts: Sequence[Layout | None],
        what: str,
        cost_us: float = 0.0,
    ) -> None:
        self.number, self.backend, self.function, self.what = number, backend, function, what
        self.layouts = layouts
        """Layout of each result; None where sizes are symbols."""
        self.cost_us = cost_us
        """Estimated time of a call, in microseconds."""
        self._checked = False
        self.__name__ = region_name(number)

    def __call__(self, values: list[Any]) -> Any:
        """Run. `values` is emptied, so that inputs without other holders are freed on the way."""
        if not self._checked:
            return self._first(values)
        return self._returned([*self.function(values)])

    def _first(self, values: list[Any]) -> Any:
        """Run the first call: check results, and find those that must be copied because they share memory."""
        inputs = {_memory(value) for value in values if isinstance(value, torch.Tensor)}
        found = self.function(values)
        if isinstance(found, torch.Tensor):
            self.function, found = _in_list(self.function), [found]
        results = [*found]
        self._check(results)
        self._separate(results, inputs)
        self._checked = True
        return self._returned(results)

    def _returned(self, results: list[Any]) -> Any:
        for place, layout in enumerate(self.layouts):
            if layout is not None and results[place].stride() != layout[1]:
                results[place] = _laid_out(results[place], layout)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, results: Sequence[Any]) -> None:
        if len(results) != len(self.layouts):
            self._refuse(f"{len(results)} results", f"{len(self.layouts)}")
        for place, (result, layout) in enumerate(zip(results, self.layouts, strict=True)):
            if layout is None:
                continue
            shape, _, dtype = layout
            if not isinstance(result, torch.Tensor) or (tuple(result.shape), result.dtype) != (shape, dtype):
                found = f"{tuple(result.shape)}, {result.dtype}" if isinstance(result, torch.Tensor) else type(result)
                self._refuse(f"{found} as result {place}", f"{shape}, {dtype}")

    def _refuse(self, found: str, wanted: str) -> None:
        raise DcompileError(
            f"dcompile: {self.backend} returned {found}, where the graph says {wanted}, for {self.what}; "
            'options={"kernels": "auto"} runs it on kernels of dcompile'
        )

    def _separate(self, results: list[Any], inputs: set[int]) -> None:
        """Copy results that share memory with an input or with each other, in this call and in later ones."""
        seen = inputs - {0}
        shared: list[int] = []
        for place, result in enumerate(results):
            if _memory(result) in seen:
                shared.append(place)
                results[place] = result.clone()
            seen |= {_memory(result)} - {0}
        if shared:
            self.function = _copying(self.function, shared)


def _memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Copy a tensor to the given strides, which may repeat elements. Raises if sizes differ."""
    shape, strides, dtype = layout
    once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True))
    made = torch.empty_strided(once, strides, dtype=dtype, device=tensor.device)
    made.copy_(tensor[tuple(slice(0, size) for size in once)])
    return made.expand(shape) if once != shape else made


def _in_list(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], list[Any]]:
    """Wrap a function with one result, so that it returns a list."""

    def call(values: list[Any]) -> list[Any]:
        return [function(values)]

    return call


def _copying(function: Callable[[list[Any]], Any], places: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """Wrap a function so that these results are copied."""

    def call(values: list[Any]) -> list[Any]:
        results = [*function(values)]
        for place in places:
            results[place] = results[place].clone()
        return results

    return call


# --- exported graphs --------------------------------------------------------------------------------------------------


Session: TypeAlias = "tuple[int, int, Callable[[list[torch.Tensor], list[torch.Tensor]], None]]"
"""Number of inputs, number of results, and a function that reads the ones and writes the others."""


def compile_session(
    start: Callable[[Any], Session], gm: Any, example_inputs: Sequence[Any]
) -> Callable[..., list[torch.Tensor]]:
    """Compile a region into a function that runs one session. Raises if an operation has no translation."""
    devices = sorted({value.device.type for value in example_inputs} - {"cpu"})
    if devices:
        raise RuntimeError(f"tensors are on {', '.join(devices)}, and dcompile runs its sessions on the CPU")
    program = _export(gm, example_inputs)
    with _converting():
        inputs, outputs, run_session = start(program)
    fakes = [node.meta["val"] for node in gm.graph.output_node().args[0]]
    if inputs != len(example_inputs) or outputs != len(fakes):
        raise RuntimeError(f"the converter kept {inputs} of {len(example_inputs)} inputs, {outputs} outputs")
    layouts = [(tuple(fake.shape), fake.dtype) for fake in fakes]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        held = [value.detach().contiguous() for value in values]
        results = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
        run_session(held, results)
        return results

    with compat.tensors.real_tensors(), torch.no_grad():  # an error in a run time's first call is a refusal, too
        run(*_zeros(example_inputs))
    return run


def _start_onnxruntime(program: Any) -> Session:
    """Start a session of ONNX Runtime, through torch.onnx's exporter."""
    import onnxruntime as ort  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with contextlib.redirect_stdout(io.StringIO()):
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None, "torch.onnx returns a program where it is given no file"
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    model = exported.model_proto.SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names, outs = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]

    def place(tensor: torch.Tensor) -> tuple[str, int, Any, list[int], int]:
        return "cpu", 0, tensor.numpy().dtype.type, list(tensor.shape), tensor.data_ptr()

    def run(held: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        binding = session.io_binding()
        for name, value in zip(names, held, strict=True):
            binding.bind_input(name, *place(value))
        for name, result in zip(outs, results, strict=True):
            binding.bind_output(name, *place(result))
        session.run_with_iobinding(binding)

    return len(names), len(outs), run


def _start_openvino(program: Any) -> Session:
    """Compile a model of OpenVINO. Keeps float32: by default, processors with bfloat16 units compute in that."""
    import openvino as ov  # type: ignore[import-not-found, import-untyped, unused-ignore]

    model = ov.convert_model(program)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(model, "CPU", hints)

    def run(held: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        request = compiled.create_infer_request()
        for place, value in enumerate(held):
            request.set_input_tensor(place, ov.Tensor(value.numpy(), shared_memory=True))
        for place, result in enumerate(results):
            request.set_output_tensor(place, ov.Tensor(result.numpy(), shared_memory=True))
        request.infer()

    return len(model.inputs), len(model.outputs), run


SESSIONS: Mapping[str, Callable[[Any], Session]] = {"onnxruntime": _start_onnxruntime, "openvino": _start_openvino}
"""What starts a session of an exported program, by the run time's name in option `kernels`."""


class _Positional(torch.nn.Module):
    """Module that takes any number of inputs, in order."""

    def __init__(self, gm: Any) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *values: Any) -> Any:
        return self.gm(*values)


def _export(gm: Any, example_inputs: Sequence[Any]) -> Any:
    """Export a graph of ATen operations as an ExportedProgram. Its inputs and outputs keep their order.

    Views become reshapes, which may copy: converters decompose operations, and the parts have other strides.
    """
    aten = torch.ops.aten
    for node in gm.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    gm.recompile()
    with compat.tensors.real_tensors(), torch.no_grad(), _converting():
        return torch.export.export(_Positional(gm), tuple(_zeros(example_inputs)), strict=False)


def _zeros(example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Inputs with memory and with their strides, on which the meaning of views depends."""
    layouts = [(tuple(x.shape), tuple(x.stride()), x.dtype, x.device) for x in example_inputs]
    return [torch.empty_strided(s, t, dtype=dtype, device=device).zero_() for s, t, dtype, device in layouts]


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Suppress warnings of a converter, which do not concern the user's program."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
