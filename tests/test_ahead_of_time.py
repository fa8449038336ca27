"""Exported models: equal to eager, loaded without a compiler, refused where they are damaged or do not fit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dcompile
from dcompile.errors import ExportError
from dcompile.runtime.program import exported
from tests.job import run


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
    dcompile.export(model, (torch.randn(4, 8),), given, dynamic_shapes=shapes, path=path)
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


@pytest.mark.parametrize("name", ["program.py", "tensors.bin", "kernels0.so", "manifest.json"])
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


def changed(folder: Path, copy: Path, **values) -> Path:
    """The export with another manifest, and the checksum that belongs to it."""
    shutil.copytree(folder, copy)
    outer = json.loads((copy / "manifest.json").read_text())
    text = json.dumps(json.loads(outer["manifest"]) | values)
    digest = exported.hashlib.sha256(text.encode()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": text}))
    return copy


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": 0}, "has format 0, this dcompile reads 1; export the model again"),
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


BARE = """
import sys, shutil
sys.path.insert(0, {root!r})
import torch, dcompile
assert not any(map(shutil.which, ("g++", "c++", "clang++", "cc", "gcc"))), "there is a compiler"
tokens, expected = torch.load({values!r})
model = dcompile.load({path!r})
torch.testing.assert_close(model(tokens), expected)
heavy = ("triton", "transformers", "torch._inductor", "dcompile.codegen", "dcompile.driver", "dcompile.capture")
assert not [name for name in heavy if name in sys.modules], "the compiler was loaded"
print("equal")
"""


def test_gpt2_runs_where_there_is_no_compiler(tmp_path: Path) -> None:
    """In a process that finds no compiler, from a zip file, without the model's own code."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32))

        def forward(self, tokens):
            return self.gpt2(tokens, use_cache=False).logits

    torch.manual_seed(0)
    model, tokens = Logits().eval(), torch.randint(64, (2, 12))
    dcompile.export(model, (tokens,), path=tmp_path / "gpt2.zip")
    with torch.no_grad():
        torch.save((tokens, model(tokens)), tmp_path / "values.pt")
    root, values, path = Path(__file__).parent.parent, tmp_path / "values.pt", tmp_path / "gpt2.zip"
    script = tmp_path / "bare.py"
    script.write_text(BARE.format(root=str(root), values=str(values), path=str(path)))
    status, text = run([sys.executable, str(script)], tmp_path, PATH=str(tmp_path), CXX="")
    assert (status, text.strip().splitlines()[-1:]) == (0, ["equal"]), text
