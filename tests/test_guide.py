"""Every command and every example of the guide runs as it stands there; so do the examples of internals and how-tos."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.job import ROOT, one_layer, run
from tests.nursery import python

DOCS = ROOT / "docs"
DOORS = ("lightning", "trl")
"""Pages whose examples need packages that the test extra leaves out: `make test-doors` runs them."""


def example(page: Path, *more: object) -> object:
    """A case of a page."""
    marks = (pytest.mark.doors,) if page.stem in DOORS else ()
    return pytest.param(page, *more, marks=(pytest.mark.deepspeed,) if page.stem == "deepspeed" else marks)


def seconds_for(code: str) -> float:
    """How long a block may take. DeepSpeed compiles C++ the first time."""
    return 580 if "deepspeed" in code else 120


EXAMPLES = [
    example(page, number, text)
    for page in sorted([*(DOCS / "guide").glob("*.md"), DOCS / "internals/ir.md", *(DOCS / "howto").glob("*.md")])
    for number, text in enumerate(re.findall(r"^```python\n(.*?^```\n(?:\n```text\n.*?^```)?)", page.read_text(),
                                             re.MULTILINE | re.DOTALL))
]  # fmt: skip


@pytest.mark.timeout(590)
@pytest.mark.parametrize(("page", "number", "text"), EXAMPLES, ids=lambda value: getattr(value, "stem", None))
def test_example_runs(page: Path, number: int, text: str, tmp_path: Path) -> None:
    """Each Python block of guide and how-tos runs as a script; a block of text behind it is what it prints."""
    code, _, shown = text.partition("```\n")
    script = tmp_path / f"{page.stem}{number}.py"
    script.write_text(code)
    status, output = run([python(), str(script)], tmp_path, seconds_for(code))
    assert status == 0, output
    if shown:
        assert shown.strip().removeprefix("```text\n").removesuffix("```") == output


COMMANDS = [
    example(page, line)
    for page in sorted((DOCS / "guide").glob("*.md"))
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.timeout(590)
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: getattr(value, "stem", value))
def test_command_runs(page: Path, command: str, tmp_path: Path) -> None:
    """Each command of the guide, with a tiny model, few steps, and its output elsewhere."""
    script = tmp_path / "your_script.py"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    script.write_text(next((block for block in blocks if "dcompile.compile(" in block), blocks[0] if blocks else ""))
    config = one_layer(tmp_path)
    short = command.replace("your_script.py", str(script)).replace("DUMP=1 ", f"DUMP={tmp_path / 'dump'} ")
    short = re.sub(r"--config \S+", f"--config {config}", short)
    short = short.replace("dcompile-launch", "python -m dcompile.integrations.launch")
    if "launch/train" in short:
        short = re.sub(r"--steps \d+", "--steps 2", short)
        short += f" --config {config} --seq-len 32 --data LICENSE --output-dir {tmp_path} --backend eager"
    short = short.replace("launch/generate.py", "launch/generate.py --max-new-tokens 3 --device cpu")
    short = re.sub(r"\bpython\b", python(), short)
    short = re.sub(r"\btorchrun\b", f"{python()} -m torch.distributed.run", short)
    variables = {"PYTHON_EXEC": python(), "DCOMPILE_CACHE_DIR": str(tmp_path / "cache")}
    status, output = run(["bash", "-ec", short], tmp_path, seconds_for(command), **variables)
    assert status == 0, output
    if "DCOMPILE_DUMP" in command:
        written = {str(path.relative_to(tmp_path / "dump/rank0")) for path in (tmp_path / "dump/rank0").rglob("*")}
        named = re.findall(r"^\| `((?:forward0|backward0|receipt)[\w./]*)`", page.read_text(), re.MULTILINE)
        assert named and {name.rstrip("/") for name in named} <= written
    if "DCOMPILE_LOG" in command:
        (screen,) = re.findall(r"^```text\n(dcompile: \[.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        shown, found = ({re.sub(r"[\d.]+", "N", line) for line in text.splitlines()} for text in (screen, output))
        assert shown <= found, shown - found
