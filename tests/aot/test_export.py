"""Exported models: equal to eager, loaded without a compiler, refused where they are damaged or do not fit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import dcompile
from dcompile.errors import ExportError
from dcompile.runtime.program import exported
from tests.job import ROOT, run


class Counting(nn.Module):
    """A buffer that each call changes, a constant argument, nested results, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, shift: torch.Tensor | None = None) -> dict:
        self.calls.add_(1)
        y = self.linear(x).relu() * scale
        return {"y": y, "twice": (y, y * 2), "calls": self.calls + 0, "shift": shift}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Counting` for up to 64 rows."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exports") / "counting"
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    model = Counting()
    given, shapes = {"scale": 2.0, "shift": None}, {"x": rows, "scale": None, "shift": None}
    options = {"matmul": "own"}  # no library calls: the C++ runner needs no libtorch
    dcompile.export(model, (torch.randn(4, 8),), given, dynamic_shapes=shapes, path=path, options=options)
    torch.save(model.state_dict(), path.parent / "state.pt")
    return path


def eager(folder: Path) -> Counting:
    model = Counting()
    model.load_state_dict(torch.load(folder.parent / "state.pt"))
    return model


def test_results_and_buffers_are_eagers(folder: Path) -> None:
    model, loaded = eager(folder), dcompile.load(folder)
    for rows in (4, 2, 64):
        x = torch.randn(rows, 8)
        expected, got = model(x, scale=2.0), loaded(x, shift=None, scale=2.0)
        torch.testing.assert_close(got, expected)
        assert got["shift"] is None and got["calls"] == expected["calls"]
    torch.testing.assert_close(loaded(x.t().contiguous().t(), scale=2.0, shift=None)["y"], expected["y"])
    assert dcompile.load(folder)(x, scale=2.0, shift=None)["calls"] == 1, "the file is not changed"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            (torch.randn(65, 8),),
            {"scale": 2.0, "shift": None},
            r"argument 0 is torch.float32 of shape \[65, 8\], not float32 of shape",
        ),
        ((torch.randn(4, 9),), {"scale": 2.0, "shift": None}, r"\(2 to 64\), 8\] on the CPU"),
        ((torch.randn(4, 8).double(),), {"scale": 2.0, "shift": None}, "argument 0 is torch.float64"),
        ((torch.randn(4, 8),), {"scale": 3.0, "shift": None}, "argument 1 is 3.0, but the model was exported with 2.0"),
        ((torch.randn(4, 8),), {}, "but exported with"),
        ((None,), {"scale": 2.0, "shift": None}, "but exported with|argument 0 should be"),
    ],
)
def test_other_arguments_are_refused(folder: Path, args, kwargs, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        dcompile.load(folder)(*args, **kwargs)


@pytest.mark.parametrize("name", ["program.py", "tensors.bin", "kernels0.so", "steps.json", "manifest.json"])
def test_damaged_file_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(ExportError, match=f"{name} is damaged"):
        dcompile.load(copy)
    (copy / name).unlink()
    with pytest.raises((ExportError, FileNotFoundError), match=name):
        dcompile.load(copy)


def test_an_archive_with_any_damaged_byte_of_its_structure_is_refused_by_an_export_error(tmp_path: Path) -> None:
    """Names, sizes, methods, flags and offsets: whatever Python's zip reader raises, the user sees an ExportError."""
    archive, content, target = tmp_path / "model.zip", b"[" + b"1, " * 100 + b"1]", tmp_path / "out"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("manifest.json", "program.py"):
            file.writestr(name, content)
    whole, refused = archive.read_bytes(), 0
    starts = whole.find(content), whole.rfind(content)
    inside = {place for start in starts for place in range(start + 1, start + len(content))}
    for place in {*range(len(whole))} - inside:
        for bits in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= bits
            archive.write_bytes(damaged)
            try:
                exported._extract(archive, target)
                exported._manifest(target)
            except ExportError:
                refused += 1
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportError, match="damaged"):
        exported._extract(archive, target)
    assert refused > 300


def manifest(folder: Path) -> dict:
    return json.loads(json.loads((folder / "manifest.json").read_text())["manifest"])


def changed(folder: Path, copy: Path, **values) -> Path:
    """The export with another manifest, and the checksum that belongs to it."""
    shutil.copytree(folder, copy)
    text = json.dumps(manifest(copy) | values)
    digest = exported.hashlib.sha256(text.encode()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": text}))
    return copy


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": 0}, "has format 0, this dcompile reads 2; export the model again"),
        ({"torch": "2.0"}, "was exported for torch 2.0, this is"),
        ({"machine": exported.machine() | {"machine": "riscv64"}}, "is for riscv64, this machine is"),
        (
            {"machine": exported.machine() | {"flags": ["avx1024"]}},
            "for a processor with avx1024, which this one lacks",
        ),
    ],
)
def test_other_formats_and_machines_are_refused(folder: Path, tmp_path: Path, values, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        dcompile.load(changed(folder, tmp_path / "copy", **values))


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    class Changes(nn.Module):
        def forward(self, x):
            x.add_(1)
            return x * 2

    with pytest.raises(ExportError, match="changes its argument x"):
        dcompile.export(Changes(), (torch.randn(3),), path=tmp_path / "changes")
    with pytest.raises(ExportError, match="kernels by inductor cannot be exported"):
        dcompile.export(nn.Linear(2, 2), (torch.randn(3, 2),), path=tmp_path, options={"kernels": "inductor"})
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="holds something else"):
        dcompile.export(nn.Linear(2, 2), (torch.randn(3, 2),), path=tmp_path / "else")
    assert (tmp_path / "else" / "thesis.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in C++, built by its CMakeLists.txt; where there is no CMake, by the compiler itself."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("no C++ compiler for the example")
    folder, source = tmp_path_factory.mktemp("build"), ROOT / "examples/cpp"
    built = folder / "run_exported"
    if shutil.which("cmake") and (shutil.which("make") or shutil.which("ninja")):
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        commands = [["cmake", *generator, "-S", str(source), "-B", str(folder)], ["cmake", "--build", str(folder)]]
    else:
        include = f"-I{ROOT}/dcompile/include"
        commands = [[compiler, "-std=c++17", include, str(source / "main.cpp"), "-o", str(built), "-ldl"]]
    for command in commands:
        status, text = run(command, folder, CXXFLAGS="-Wall -Wextra -Werror")
        assert status == 0, text
    return built


def run_cpp(runner: Path, folder: Path, *arguments: object, at: Path) -> tuple[int, str]:
    """The example in a folder of its own. Tensors are written to files for it."""
    words: list[str] = []
    for n, given in enumerate(arguments):
        if isinstance(given, torch.Tensor):
            given.numpy().tofile(at / f"argument{n}.bin")
            words += [str(at / f"argument{n}.bin"), ",".join(map(str, given.shape))]
        else:
            words.append(str(given))
    options = 2 if words[0].startswith("--") else 0
    done = subprocess.run(
        [str(runner), *words[:options], str(folder), *words[options:]],
        cwd=at, capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def result(at: Path, number: int, like: torch.Tensor) -> torch.Tensor:
    data = bytearray((at / f"result{number}.bin").read_bytes())
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape)


def test_cpp_runner_computes_what_python_does(folder: Path, runner: Path, tmp_path: Path) -> None:
    """Without libtorch and without Python: sizes that vary, a buffer that calls change, one result twice."""
    for rows in (4, 64):
        x, loaded = torch.randn(rows, 8), dcompile.load(folder)
        for _ in range(3):
            expected = loaded(x, scale=2.0, shift=None)
        status, text = run_cpp(runner, folder, "--calls", "3", x, at=tmp_path)
        assert status == 0, text
        assert text.splitlines()[:2] == [f"result0.bin: float32 {rows} 4", f"result1.bin: float32 {rows} 4"]
        for number, tensor in enumerate((expected["y"], *expected["twice"], expected["calls"])):
            assert torch.equal(result(tmp_path, number, tensor), tensor), number
        assert expected["calls"] == 3


def test_cpp_runner_refuses(folder: Path, runner: Path, tmp_path: Path) -> None:
    """Other arguments, damaged and missing files, other formats and machines, and what Python alone can do."""

    def refused(given: Path, x: torch.Tensor) -> str:
        status, text = run_cpp(runner, given, x, at=tmp_path)
        assert status == 1, text
        return text

    x = torch.randn(4, 8)
    shape = "not float32 of shape [{}, 8]"
    (name,) = (a["shape"][0][0] for a in manifest(folder)["arguments"] if "shape" in a)
    assert shape.format(f"{name} (2 to 64)") in refused(folder, torch.randn(65, 8))
    for file in ("tensors.bin", "kernels0.so", "steps.json", "manifest.json"):
        copy = tmp_path / file
        shutil.copytree(folder, copy)
        data = bytearray((copy / file).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / file).write_bytes(data)
        assert f"{file} is damaged" in refused(copy, x)
        (copy / file).unlink()
        assert f"{file} is missing" in refused(copy, x)
    here = exported.machine()
    for number, (values, wanted) in enumerate((
        ({"format": 1}, f"has format 1, this runner reads {exported.FORMAT}; export the model again"),
        ({"machine": here | {"machine": "riscv64"}}, "is for riscv64, this machine is"),
        ({"machine": here | {"flags": ["avx1024"]}}, "for a processor with avx1024, which this one lacks"),
    )):  # fmt: skip
        assert wanted in refused(changed(folder, tmp_path / str(number), **values), x)


def test_a_program_that_the_cpp_runner_cannot_run_says_why(runner: Path, tmp_path: Path) -> None:
    """Sizes that depend on values: Python runs it, C++ names what it cannot do. A call with an effect is exported."""

    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.return_types.topk]:
            return x.nonzero() * 2, torch.linalg.inv(x), torch.topk(x, 1)

    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    dcompile.export(Late(), (x,), path=tmp_path / "late")
    loaded = dcompile.load(tmp_path / "late")
    places, inverse, largest = loaded(x)
    torch.testing.assert_close((places, inverse), (torch.tensor([[0, 2], [2, 0]]), torch.linalg.inv(x)))
    assert isinstance(largest, torch.return_types.topk) and torch.equal(largest.values, x.amax(1, keepdim=True))
    with pytest.raises(RuntimeError, match="singular"):
        loaded(torch.ones(2, 2))
    status, text = run_cpp(runner, tmp_path / "late", x, at=tmp_path)
    assert status == 1 and "the C++ runner cannot run this program: sizes that depend on values" in text


BARE = """
import importlib.util, shutil, sys
sys.path.insert(0, {root!r})
import torch, dcompile
assert not any(map(shutil.which, ("g++", "c++", "clang++", "cc", "gcc"))), "there is a compiler"
assert not any(map(importlib.util.find_spec, ("triton", "transformers", "pip"))), "it is not bare"
tokens, expected = torch.load({values!r})
model = dcompile.load({path!r})
torch.testing.assert_close(model(tokens), expected)
heavy = ("triton", "transformers", "torch._inductor", "dcompile.codegen", "dcompile.compiler", "dcompile.capture")
assert not [name for name in heavy if name in sys.modules], "the compiler was loaded"
print("equal")
"""


@pytest.mark.full
def test_an_export_for_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubins and a manifest are written without a GPU; a machine without one, or with another one, is refused."""
    pytest.importorskip("triton")
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    dcompile.export(model, (torch.randn(4, 8),), path=tmp_path / "gpu", gpu="sm_90")
    assert model[0].weight.device.type == "cpu", "the model stays as it is"
    kernels = [path.read_bytes() for path in (tmp_path / "gpu").glob("*.gpu")]
    assert kernels and all(b"\x7fELF" in data for data in kernels)
    assert manifest(tmp_path / "gpu")["gpu"] == [9, 0] and "empty_cuda" in (tmp_path / "gpu/program.py").read_text()
    stored = torch.from_file(str(tmp_path / "gpu/tensors.bin"), size=8 * 16, dtype=torch.float32).view(16, 8)
    torch.testing.assert_close(stored, model[0].weight.detach())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExportError, match=r"for a GPU of compute capability 9.0, and torch finds no GPU here"):
        dcompile.load(tmp_path / "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ExportError, match=r"9.0, this machine's has 8.0; export it with gpu='sm_80'"):
        dcompile.load(tmp_path / "gpu")


def test_names_of_gpus_are_checked(tmp_path: Path) -> None:
    for name in ("sm_75", "h100"):
        with pytest.raises(ExportError, match="is no NVIDIA GPU from compute capability"):
            dcompile.export(nn.Linear(2, 2), (torch.randn(3, 2),), path=tmp_path / "none", gpu=name)


def bare_environment(folder: Path) -> Path:
    """The interpreter of a virtual environment that has torch, what torch needs, and NumPy."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (there,) = folder.glob("lib/python*/site-packages")
    wanted, tops = ["torch", "numpy"], set[Path]()
    for name in wanted:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another kind of machine
            continue
        needed = (re.match(r"[\w.-]+", line) for line in found.requires or () if "extra" not in line)
        wanted += [match[0] for match in needed if match and match[0] not in (*wanted, "triton")]
        tops |= {found.locate_file(file.parts[0]) for file in found.files or () if file.parts[0] != ".."}
    for top in tops:
        (there / top.name).symlink_to(top)
    return folder / "bin/python"


def gpt2(layers: int) -> nn.Module:
    """A tiny GPT-2 that returns logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
            self.gpt2 = GPT2LMHeadModel(config)

        def forward(self, tokens):
            return self.gpt2(tokens, use_cache=False).logits

    torch.manual_seed(0)
    return Logits().eval()


def test_gpt2_runs_where_there_is_no_compiler(runner: Path, tmp_path: Path) -> None:
    """In a bare environment, from a zip file, without the model's own code; and in C++, by libtorch."""
    model, tokens = gpt2(1), torch.randint(64, (2, 12))
    dcompile.export(model, (tokens,), path=tmp_path / "gpt2.zip")
    with torch.no_grad():
        torch.save((tokens, model(tokens)), tmp_path / "values.pt")
    values, path = tmp_path / "values.pt", tmp_path / "gpt2.zip"
    script = tmp_path / "bare.py"
    script.write_text(BARE.format(root=str(ROOT), values=str(values), path=str(path)))
    python = bare_environment(tmp_path / "bare")
    status, text = run([str(python), "-I", str(script)], tmp_path, PATH=str(tmp_path), CXX="")
    assert (status, text.strip().splitlines()[-1:]) == (0, ["equal"]), text

    folder = tmp_path / "gpt2"
    zipfile.ZipFile(path).extractall(folder)
    status, text = run_cpp(runner, folder, tokens, at=tmp_path)
    steps = json.loads((folder / "steps.json").read_text())["steps"]
    calls = [step["operator"] for step in steps if "operator" in step]  # of products only where they are the library's
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in calls
    assert status == 1 and f"the program calls {calls[0]}, and libtorch is not here" in text
    assert "is a file; unpack the archive" in run_cpp(runner, path, tokens, at=tmp_path)[1]
    library = f"{torch.__path__[0]}/lib/libtorch_cpu.so"
    status, text = run_cpp(runner, folder, "--torch", library, tokens, at=tmp_path)
    assert status == 0, text
    expected = dcompile.load(folder)(tokens)
    assert torch.equal(result(tmp_path, 0, expected), expected)


LOADING = """
import sys, time
sys.path.insert(0, {root!r})
import torch
began = time.process_time()
import dcompile
model = dcompile.load({path!r})
print(time.process_time() - began)
"""


@pytest.mark.full
def test_sixteen_layers_load_within_a_second(tmp_path: Path) -> None:
    """In seconds of one processor, behind `import torch`: checksums, mapping, and the import of dcompile."""
    path, script = tmp_path / "gpt2", tmp_path / "loading.py"
    dcompile.export(gpt2(16), (torch.randint(64, (2, 12)),), path=path)
    script.write_text(LOADING.format(root=str(ROOT), path=str(path)))
    status, text = run([sys.executable, str(script)], tmp_path)
    assert status == 0, text
    assert float(text) < 1, text
