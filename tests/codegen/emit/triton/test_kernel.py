"""Triton kernels without a GPU: their values in Triton's interpreter, their machine code from the offline compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Built, KernelSource
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.emit.triton import worker
from dcompile.codegen.emit.triton.ops import SPELLING
from dcompile.codegen.schedule.fusion.split_reductions import split_column_reductions
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.ir.index import var
from dcompile.ir.nodes import Load, Loop, Program, Store
from dcompile.ir.ops import OPS
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.cuda_launch import read_archive
from dcompile.toolchain import triton_version
from tests import nursery
from tests.codegen.emit import cases, groups, loops, one_row, products, skinny
from tests.codegen.emit.all_kernels import of_loops
from tests.codegen.emit.harness import store

pytestmark = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")


def source(program: Program) -> KernelSource:
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    return triton_kernel.emit(loop, program.table)


def test_random_operations_share_their_kernel():
    first, second = (source(loops.random_words(64, (4 * draw, 4 * draw + 1))) for draw in (3, 40))
    assert (first.name, first.text) == (second.name, second.text)
    assert (first.numbers, second.numbers) == ((3,), (40,))
    assert first.launches[0].types[-1] == "i64"
    assert source(loops.random_words(64, (4, 9))).name != first.name


@pytest.mark.parametrize(("a", "b", "meet"), [("in:h", "in:h", True), ("out", "in:x", True), ("in:h", "in:g", False)])
def test_threads_wait_before_they_write_what_others_read(a, b, meet):
    """A result in place of an argument, in whatever memory that is: a tile is read as a whole before it is written."""
    program = loops.rms_norm(8, 512)
    storage = {"x": a, "y": b}
    buffers = tuple(replace(buffer, storage=storage.get(buffer.name, "input")) for buffer in program.buffers)
    assert ("debug_barrier" in source(replace(program, buffers=buffers)).text) == meet


def test_every_op_has_a_spelling():
    assert SPELLING.keys() == OPS.keys()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each case, from a process in which Triton interprets."""
    command = [nursery.python(), "-m", "tests.codegen.emit.interpreted_cases"]
    command += ["--full"] if request.config.getoption("--full") else []
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=_root())
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _root() -> Path:
    return Path(__file__).parents[4]


@pytest.mark.parametrize("name", cases.HAND)
def test_hand_built_loops_agree_with_the_interpreter(name, interpreted):
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", ["optimizer", "optimizer of sizes", "side by side"])
def test_loops_that_share_a_launch_agree_with_the_interpreter(name, interpreted):
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", cases.SYMBOLIC)
def test_loops_with_symbolic_sizes_agree_with_the_interpreter(name, interpreted):
    assert interpreted[f"symbolic {name}"] == ""


@pytest.mark.parametrize("kind", ["exact", "random", "spread", "symbolic", "products"])
def test_random_programs_agree_with_the_interpreter(kind, interpreted):
    found = {name: wrong for name, wrong in interpreted.items() if name.split()[0] == kind}
    assert len(found) >= 10
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("name", one_row.CASES)
def test_products_of_one_row_agree_with_the_interpreter(name, interpreted):
    assert interpreted[f"one row {name}"] == ""


@pytest.mark.parametrize("name", groups.CASES)
def test_rows_are_summed_by_group(name, interpreted):
    assert interpreted[f"groups {name}"] == ""


@pytest.mark.parametrize("name", products.CASES)
def test_products_end_in_loops(name, interpreted):
    assert interpreted[f"product {name}"] == ""


@pytest.mark.parametrize("name", skinny.CASES)
def test_few_rows_times_a_matrix(name, interpreted):
    assert interpreted[f"skinny {name}"] == ""


def test_operations_and_casts_agree_with_their_meaning(interpreted):
    names = [*cases.operations(), *(f"cast {a} {b}" for a, b in cases.CASTS)]
    assert not {name: interpreted[name] for name in names if interpreted[name]}


def test_operations_at_the_ends_of_each_dtype_are_eagers(interpreted):
    found = {name: wrong for name, wrong in interpreted.items() if name.startswith("extreme ")}
    assert len(found) > 200
    assert not {name: wrong for name, wrong in found.items() if wrong}


# --- machine code -----------------------------------------------------------------------------------------------------

LARGE = {
    "rms_norm": loops.rms_norm(8192, 4096, "bfloat16"),
    "rms_norm of 16384": loops.rms_norm(8192, 16384, "bfloat16"),
    "rms_norm_backward": loops.rms_norm_backward(8192, 4096, "bfloat16"),
    "softmax of 128256": loops.softmax(8192, 128256, "bfloat16"),
    "cross_entropy": loops.cross_entropy(8192, 32000),
    "bias_gelu": loops.bias_gelu(8192, 16384, "bfloat16"),
    "transpose": loops.transpose(4096, 4096, "bfloat16"),
    "column sum": loops.column_reduce(8192, 4096),
    "rms_norm of symbols": loops.rms_norm(cases.S0 * cases.S1, 768, "bfloat16"),
    "bias_gelu of symbols": loops.bias_gelu(cases.S0 * cases.S1, 3072, "bfloat16"),
    "more than 2**31 elements": loops.unary("neg", 2**31 + 4096, "bfloat16"),
}


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory) -> dict[str, tuple[str, str, bytes]]:
    """Of each large kernel, for compute capability 9.0: its PTX, its target, its cubin."""
    return {name: compiled(source(program), 90, tmp_path_factory.mktemp("k")) for name, program in LARGE.items()}


def compiled(kernel: KernelSource, arch: int, folder: Path) -> tuple[str, str, bytes]:
    launch = kernel.launches[-1]
    module = worker.load(kernel.name, kernel.text, arch, folder)
    function = getattr(module, launch.function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        made = worker.compile_function(function, list(launch.types), launch.warps, arch, dict(triton_compile.OPTIONS))
    return made.asm["ptx"], made.metadata.name, made.asm["cubin"]


def dumped(what: str, cubin: bytes, folder: Path) -> str:
    """What CUDA's tool shows of machine code."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    (folder / "k.cubin").write_bytes(cubin)
    return subprocess.run([tool, what, folder / "k.cubin"], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory that a kernel needs."""
    text = dumped("-res-usage", cubin, folder)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def assert_wide(ptx: str) -> None:
    """Memory is read and written 16 bytes at a time, but for a few places."""
    widths = re.findall(r"(?:ld|st)\.global[.\w]*?(v\d)?\.(?:b|u|f)(\d+)", ptx)
    wide = sum(int(many[1:]) * int(bits) == 128 for many, bits in widths if many)
    assert wide >= 2
    assert all(int((many or "v1")[1:]) * int(bits) in (128, 32, 64) for many, bits in widths)
    assert wide >= sum(not many for many, _ in widths), "more single than wide accesses"


def assert_nothing_spilled(cubin: bytes, folder: Path) -> None:
    used = resources(cubin, folder)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128


@pytest.mark.parametrize("name", LARGE)
def test_rows_are_read_and_written_16_bytes_at_a_time(name, machine_code):
    assert_wide(machine_code[name][0])


@pytest.mark.parametrize("name", LARGE)
def test_nothing_is_spilled(name, machine_code, tmp_path):
    assert_nothing_spilled(machine_code[name][2], tmp_path)


SIGNATURES = Path(__file__).with_name("signatures.json")
"""Version of Triton -> kernel -> widths of the parameters that it takes."""
PASSED = {"*": "u64", "i64": "u64", "i32": "u32"}


def passed(name: str) -> list[str]:
    """What the launch table passes: the buffers and sizes, and two pointers for scratch memory."""
    types = source(LARGE[name]).launches[-1].types
    return [*(PASSED["*" if kind[0] == "*" else kind] for kind in types), "u64", "u64"]


@pytest.mark.parametrize("name", ["rms_norm_backward", "transpose", "rms_norm of symbols"])
def test_a_kernel_takes_its_buffers_and_two_pointers_for_scratch(name, machine_code, update_golden):
    ptx, entry, _ = machine_code[name]
    head = ptx[ptx.index(f".entry {entry}") :].split("{")[0]
    taken = re.findall(r"\.param \.(\w+)", head)
    known = json.loads(SIGNATURES.read_text())
    if update_golden:
        known.setdefault(triton_version(), {})[name] = taken
        SIGNATURES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert taken == passed(name)
    minors = {version.rpartition(".")[0]: kernels for version, kernels in known.items()}
    assert {"3.6", "3.7"} <= minors.keys() and all(kernels[name] == taken for kernels in minors.values())


# each kernel for one of them; 9.0 is above, and what depends on the GPU is Triton's
@pytest.mark.parametrize(("arch", "name"), [((80, 100)[number % 2], name) for number, name in enumerate(LARGE)])
def test_other_gpus(arch, name, tmp_path):
    ptx, _, cubin = compiled(source(LARGE[name]), arch, tmp_path)
    assert f".target sm_{arch}" in ptx
    assert_wide(ptx)
    assert_nothing_spilled(cubin, tmp_path)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("op", ["pow int64", "gcd int64"])
def test_operations_with_loops_take_a_single_number(op, place, tmp_path):
    """Which is not as large as what becomes of it in the loop."""
    name, dtype = op.split()
    body = loops.Body()
    args = [body.put(Load(f"x{k}", loops.I0 * (k != place), dtype)) for k in range(2)]
    inputs = {f"x{k}": (dtype, (96,)) for k in range(2)}
    stores = [Store("y", loops.I0, body.op(name, *args, dtype=dtype))]
    assert compiled(source(loops.program(body, (96,), (), stores, **inputs, y=(dtype, (96,)))), 90, tmp_path)


def test_a_scan_is_over_a_whole_tile():
    """Triton 3.6 fails on one of a single row that all rows of an aligned tile share."""
    kernel = source(loops.scan_of_ones(64, 8))
    assert re.search(r"cumsum\(tl.broadcast_to\(t\d+, \[(16|32|64), 8\]\), 1\)", kernel.text)


def test_places_are_not_worked_out_in_8_bits(tmp_path):
    """What ptxas made of LLVM's pairs of 16 bits read other places (Triton 3.6, Swin v2 on an H200)."""
    kernel = source(loops.shifted_windows(2, 16))
    ptx, _, _ = compiled(kernel, 90, tmp_path)
    assert "remainder_(" in kernel.text and "quotient_(" in kernel.text
    assert not re.findall(r"16x2|\.s8\b|\.s16\b", ptx)
    assert "v4" in ptx or "0x10" in ptx  # rows are still read 16 bytes at a time


@pytest.mark.parametrize(("count", "stages"), [(3, 3), (8, 2), (20, 1)])
def test_loads_of_later_rows_fit_into_shared_memory(count, stages, tmp_path):
    kernel = source(loops.columns_of_many(cases.S0 * cases.S1, 32, count))
    assert f"num_stages={stages}" in kernel.text
    functions = [{"name": x.function, "warps": x.warps, "types": list(x.types)} for x in kernel.launches]
    job = {"name": kernel.name, "text": kernel.text, "functions": functions}
    archive = worker.compile_kernel(job, 90, dict(triton_compile.OPTIONS), tmp_path)
    (head,) = json.loads(archive.partition(b"\n")[0])
    assert head["shared"] <= 99 << 10


def test_no_multiplication_is_contracted_with_an_addition(machine_code):
    assert "fma.rn.f32" not in machine_code["rms_norm_backward"][0]


# --- text and builds --------------------------------------------------------------------------------------------------


def test_a_kernel_of_symbolic_size_serves_all_sizes_and_names():
    kernels = [source(loops.softmax(var(a), var(b))) for a, b in (("s0", "s1"), ("s7", "s3"))]
    assert kernels[0].name == kernels[1].name and kernels[0].text == kernels[1].text
    assert [kernel.sizes for kernel in kernels] == [("s1",), ("s3",)]
    assert [kernel.launches[0].grid for kernel in kernels] == [var("s0"), var("s7")]


class Prepares:
    """What a host program asks for while it prepares itself, written down."""

    def __init__(self) -> None:
        self.kernels: list[tuple[int, tuple[object, ...]]] = []

    def launches(self, count, kernels):
        self.kernels += [(grid, arguments) for _, _, grid, arguments in kernels]

    def number(self, value):
        return f"number {value}"

    def at(self, offset):
        return f"byte {offset}"


def test_grids_and_places_are_worked_out_when_a_call_is_prepared():
    program = loops.rms_norm_backward(cases.S0, 40)
    there = replace(program, buffers=tuple(replace(b, device="cuda:0") for b in program.buffers))
    planned = plan_memory(split_column_reductions(there))
    names: dict[str, object] = {}
    exec(host_program.emit(planned, of_loops(planned)), names)
    assert names["sizes"]([torch.empty(150, 40), *[None] * 3]) == (150,)
    for rows, parts in ((150, 3), (64, 1)):
        run = Prepares()
        names["make"](run, rows)
        (columns, first), (_, second) = run.kernels
        assert columns == parts and f"number {rows}" in first and "byte 0" in first and "byte 0" in second
        assert names["arena_bytes"](rows) >= parts * 40 * 4


def test_kernels_that_differ_in_names_are_one():
    program = loops.softmax(300, 200)
    names = {"x": "logits", "y": "probabilities"}
    (loop,) = program.steps
    body = tuple(replace(v, buffer=names[v.buffer]) if hasattr(v, "buffer") else v for v in loop.body)
    stores = tuple(replace(s, buffer=names[s.buffer]) for s in loop.stores)
    buffers = {names[b.name]: replace(b, name=names[b.name]) for b in program.buffers}
    other = triton_kernel.emit(replace(loop, name="other", body=body, stores=stores), buffers)
    assert other == source(program) and other.name == source(program).name


def test_misaligned_buffers_are_not_promised_to_be_aligned():
    program = loops.softmax(300, 200)
    moved = {b.name: replace(b, offset=8 if b.name == "x" else 0) for b in program.buffers}
    (launch,) = triton_kernel.emit(program.steps[0], moved).launches
    assert sorted(launch.types) == ["*fp32", "*fp32:16"]


def build(kernels: list[KernelSource]) -> Built:
    """As a process of its own builds them."""
    cache = KernelCache(store().directory)
    crew = triton_compile.WorkerPool(90, cache.directory)
    try:
        return triton_compile.TritonBuild(kernels, 90, Config(), cache, crew).result()
    finally:
        crew.close()


def test_what_was_built_is_found_again(monkeypatch):
    monkeypatch.setattr(triton_compile, "workers", lambda: 3)
    kernels = [source(loops.softmax(300, n)) for n in (190, 200, 210)] + [source(loops.embedding_backward(40, 16, 8))]
    first, second = build(kernels), build(kernels)
    assert (first.built, second.built, second.cache_hits) == (4, 0, 4)
    assert second.libraries == first.libraries
    functions = read_archive(second.libraries[kernels[-1].name])
    assert [launch.function for launch in kernels[-1].launches] == list(functions)
    found = [(code.cubin, code.waits) for code in functions.values()]
    assert all(cubin[:4] == b"\x7fELF" and not waits for cubin, waits in found)


@pytest.mark.parametrize(("arch", "waits"), [(80, False), (90, True)])
def test_a_kernel_that_waits_says_so_where_it_can(arch, waits, tmp_path):
    """It would else be started before what it reads is written, or come in vain to an instruction that is not there."""
    program = loops.softmax(300, 200)
    kernel = triton_kernel.emit(program.steps[0], program.table, frozenset())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        record = triton_compile._record(kernel)
        (tmp_path / "k.gpu").write_bytes(worker.compile_kernel(record, arch, dict(triton_compile.OPTIONS), tmp_path))
    assert read_archive(tmp_path / "k.gpu")[kernel.launches[0].function].waits == waits


def test_a_place_known_at_run_time_is_checked(tmp_path):
    """By an assertion of the kernel, which Triton leaves out of what is not compiled for debugging."""
    kernel = source(loops.put_at(8, 70, 128))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        archive = worker.compile_kernel(triton_compile._record(kernel), 90, dict(triton_compile.OPTIONS), tmp_path)
    assert b"a position lies outside" in archive and b"__assertfail" in archive


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_a_kernel_that_does_not_compile_says_why(place, monkeypatch):
    monkeypatch.setattr(triton_compile, "workers", lambda: 2)
    kernels = [source(loops.arange(n)) for n in (50, 60)]
    broken = replace(
        kernels[place], name="kbroken", text="import triton\n@triton.jit\ndef kernel(a): a.no()\n", cost=1 - place * 99
    )
    with pytest.raises(BuildError, match="kbroken"):
        build([*kernels, broken])


@pytest.fixture
def crew(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_compile, "workers", lambda: 2)
    made = triton_compile.WorkerPool(90, tmp_path)
    yield made
    made.close()
    assert not list(tmp_path.glob("tmp-*"))


def begun(crew, tmp_path, *lengths, timeout_s=60) -> triton_compile.TritonBuild:
    kernels = [source(loops.arange(n)) for n in lengths]
    return triton_compile.TritonBuild(kernels, 90, Config(compile_timeout_s=timeout_s), KernelCache(tmp_path), crew)


def test_programs_of_a_model_share_their_workers(crew, tmp_path):
    """Also while the first one's kernels are still being compiled, of which the second needs one."""
    first, second = begun(crew, tmp_path, 50, 60), begun(crew, tmp_path, 60, 70)
    process = crew._team.process
    built = second.result(), first.result()
    assert [len(b.libraries) for b in built] == [2, 2] and crew._team.process is process
    assert all(path.exists() for b in built for path in b.libraries.values())
    assert begun(crew, tmp_path, 50, 70).result().cache_hits == 2


def test_workers_that_nobody_needs_end_and_others_follow(crew, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_compile.worker_module, "__file__", str(_brief(tmp_path)))
    begun(crew, tmp_path, 50).result()
    process = crew._team.process
    assert process.wait(30) == 0
    assert begun(crew, tmp_path, 60).result().built == 1 and crew._team.process is not process


def test_what_was_done_outlasts_the_workers(crew, tmp_path, monkeypatch):
    """A backward that was foreseen may come late, and another program before it."""
    monkeypatch.setattr(triton_compile.worker_module, "__file__", str(_brief(tmp_path)))
    foreseen = begun(crew, tmp_path, 50)
    process = crew._team.process
    assert process.wait(30) == 0
    assert begun(crew, tmp_path, 60).result().built == 1
    other = crew._team.process
    assert foreseen.result().built == 1 and other is not process and crew._team.process is other


def test_what_fails_takes_nothing_else_along(crew, tmp_path):
    broken = replace(source(loops.arange(60)), name="kbroken", text="import triton\na.no()\n")
    foreseen = begun(crew, tmp_path, 50)
    with pytest.raises(BuildError, match="kbroken"):
        triton_compile.TritonBuild([broken], 90, Config(), KernelCache(tmp_path), crew).result()
    assert foreseen.result().built == 1


def _brief(folder: Path) -> Path:
    """The workers' file, with little patience."""
    text, file = Path(worker.__file__).read_text(), folder / "worker.py"
    file.write_text(re.sub(r"^IDLE_S = .*$", "IDLE_S = 0.2", text, flags=re.MULTILINE))
    return file


def test_a_worker_that_is_killed_is_noticed(crew, tmp_path):
    building = begun(crew, tmp_path, *range(50, 60))
    os.killpg(crew._team.process.pid, signal.SIGKILL)
    with pytest.raises(BuildError, match="Triton was ended by signal 9"):
        building.result()
    assert begun(crew, tmp_path, 50).result().built == 1


def test_a_worker_that_crashes_is_noticed(crew, tmp_path):
    """Triton is C++ for the most part, and a kernel can be too much for it."""
    (kernel,) = [replace(source(loops.arange(50)), text="import os\nos.kill(os.getpid(), 11)\n")]
    building = triton_compile.TritonBuild([kernel], 90, Config(), KernelCache(tmp_path), crew)
    with pytest.raises(BuildError, match="Triton was ended by signal 11"):
        building.result()


def test_kernels_that_take_too_long_are_given_up(crew, tmp_path):
    with pytest.raises(BuildError, match=r"did not finish in 0 s \(compile_timeout_s\)"):
        begun(crew, tmp_path, *range(50, 60), timeout_s=0).result()
