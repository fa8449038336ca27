"""The docs agree with the code: generated pages are current, links and names lead somewhere, commands exist."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dcompile.config import CHANNELS
from dcompile.explain.receipt import Receipt
from tests.job import ROOT, run
from tests.nursery import python
from tools import backends, passes, settings

DOCS = ROOT / "docs"
LOGGERS = [f"dcompile.{channel}" for channel in CHANNELS]
GENERATED = {DOCS / f"guide/{name}.md" for name in ("settings", "backends")}
GENERATED |= {DOCS / f"internals/{name}.md" for name in ("passes", "one-program", "path")}
GENERATED |= {DOCS / "lab" / name for name in ("figures.md", "peer-suites.md", "public-scripts.md")}
FRONT = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [*FRONT, *sorted(DOCS.rglob("*.md"))]
WRITTEN = [page for page in PAGES if page not in GENERATED]
MAX_PAGE_LINES = 200
MAX_PATH_LINES = 150
MAX_PATH_FILES = 55
MAX_SENTENCE_WORDS = 35
PINNED_TORCH = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_written_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page.read_text()))


def check_generated(page: Path, text: str, update: bool) -> None:
    if update:
        page.write_text(text)
    assert page.read_text() == text, "run: pytest tests/test_docs.py --update-golden"


@pytest.mark.parametrize(
    ("name", "module"),
    [("guide/settings.md", settings), ("guide/backends.md", backends), ("internals/passes.md", passes)],
)
def test_generated_page_is_current(name: str, module: ModuleType, update_golden: bool) -> None:
    check_generated(DOCS / name, module.page(), update_golden)


@pytest.mark.timeout(200)
def test_one_program_is_current(tmp_path: Path, update_golden: bool) -> None:
    """Texts of TorchDynamo and AOTAutograd are those of the pinned torch; others make the same sections."""
    status, text = run([python(), "-m", "tools.one_program"], tmp_path)
    assert status == 0, text
    page = DOCS / "internals/one-program.md"
    if torch.__version__.split("+")[0] == PINNED_TORCH:
        check_generated(page, text, update_golden)
    else:
        assert headings(text) == headings(page.read_text())


@pytest.mark.timeout(200)
def test_path_of_one_call_is_current(tmp_path: Path, update_golden: bool) -> None:
    """A training step enters these files in this order. Other versions of torch reach the same stages."""
    status, text = run([python(), "-m", "tools.call_path"], tmp_path)
    assert status == 0, text
    page = DOCS / "internals/path.md"
    if torch.__version__.split("+")[0] == PINNED_TORCH:
        check_generated(page, text, update_golden)
    else:
        assert set(headings(text)) == set(headings(page.read_text()))
    files = re.findall(r"^\d+\. `(dcompile/[\w/]+\.py)`", text, re.MULTILINE)
    assert len(set(files)) == len(files) <= MAX_PATH_FILES


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)


def test_every_field_of_the_receipt_is_explained() -> None:
    text = (DOCS / "guide/receipt.md").read_text()
    lines = {"reasons", "fallbacks", "traces_uncacheable", "notes", "variants"}
    fields = [field.name for field in dataclasses.fields(Receipt) if field.name not in lines]
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == fields
    assert all(f"`{name}`" in text for name in lines)


def test_newcomers_path_is_short() -> None:
    path = (DOCS / "README.md").read_text().split("\n## ")[1]
    pages = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", path, re.MULTILINE)
    assert 0 < len(pages) <= 8
    written = [(DOCS / page).resolve() for page in pages]
    assert all(page in GENERATED or len(page.read_text().splitlines()) <= MAX_PATH_LINES for page in written)


def test_every_page_is_in_the_index() -> None:
    listed = {(DOCS / link).resolve() for link in links_of(DOCS / "README.md")}
    listed |= {(DOCS / "decisions" / link).resolve() for link in links_of(DOCS / "decisions/README.md")}
    missing = [str(page.relative_to(ROOT)) for page in PAGES if page not in listed and page.name != "peer-suites.md"]
    assert missing == ["docs/README.md"]


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+)[^)]*\)", without_code(page.read_text()))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links_of(page) if "://" not in link and not (page.parent / link).exists()]
    for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", without_code(page.read_text())):
        titles = headings((page.parent / link).read_text() if link else page.read_text())
        if anchor not in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}:
            missing.append(f"{link}#{anchor}")
    assert not missing


@each_written_page
def test_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MAX_PAGE_LINES


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs and list items; tables and code have their own form."""
    text = re.sub(r"^\|.*$|^#.*$|^!\[.*$", "", without_code(text), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*(?:- |\d+\. )", text):
        yield from re.split(r"(?<=[.;:?])\s", " ".join(block.split()))


@each_written_page
def test_sentences_are_short(page: Path) -> None:
    """Enumerations of five commas and more, names or figures, may be longer."""
    lengths = {sentence: len(sentence.split()) for sentence in sentences(page.read_text())}
    assert not [text for text, words in lengths.items() if words > MAX_SENTENCE_WORDS and text.count(",") < 5]


@each_page
def test_paths_exist(page: Path) -> None:
    folders = "dcompile|launch|tests|tools|docs|benchmarks"
    named = [name for name in in_backticks(page) if re.fullmatch(rf"(?:{folders})/[\w/.*-]*", name)]
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


@functools.cache
def words_of_the_tree() -> frozenset[str]:
    """Every word of the sources: names that are defined or used in them."""
    files = [path for folder in ("dcompile", "launch", "benchmarks", "tests", "tools") for path in sources(folder)]
    own = Path(__file__)
    texts = [path.read_text() for path in (*files, ROOT / "Makefile", ROOT / "pyproject.toml") if path != own]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def sources(folder: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".sh"))


EXTERNAL = {
    "DTensor", "GradScaler", "OMP_STACKSIZE", "addmm", "expandable_segments", "no_grad", "save_model", "scan",
    "warp_specialize",
}  # fmt: skip
"""Names of PyTorch's, Triton's and Accelerate's that the sources do not use."""


def is_external(name: str) -> bool:
    return name in EXTERNAL or hasattr(torch, name) or hasattr(torch.nn.functional, name)


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or an attribute that can be imported."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            if count == len(parts) and _is_found(name):  # it needs a package that is not here
                return True
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@each_written_page
def test_symbols_exist(page: Path) -> None:
    """Each name in backticks is importable, a logger, or a word of the tree's sources or torch's."""
    missing = []
    for text in in_backticks(page):
        name = re.sub(r"\(.*\)$", "", text)
        if re.fullmatch(r"(?:dcompile|torch)(?:\.\w+)+", name):
            missing += [] if resolves(name) or name.endswith((".py", ".md")) or name in LOGGERS else [name]
        elif re.fullmatch(r"@?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", name) and re.search(r"[A-Z_.]", name):
            unknown = [word for word in re.findall(r"\w+", name) if word not in words_of_the_tree()]
            missing += [name] if unknown and not is_external(name) else []
    assert not missing


def commands_of(page: Path) -> list[str]:
    """Commands in backticks and in fenced blocks of shell lines."""
    blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [text for text in (*in_backticks(page), *lines) if re.search(r"(?:^|\s)(?:make|python|pytest) ", text)]


@functools.cache
def options_of_the_tree() -> frozenset[str]:
    """Options of commands that the sources have as strings."""
    folders = ("launch", "dcompile", "benchmarks", "tests", "tools")
    texts = (path.read_text() for folder in folders for path in sources(folder))
    return frozenset(option for text in texts for option in re.findall(r'"(--[\w-]+)"', text))


@each_page
def test_commands_exist(page: Path) -> None:
    """Targets of make, modules and options that commands in the docs name."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for command in commands_of(page):
        made = re.search(r"(?:^|\s)make ((?:[A-Z]+=\S+ )*)([\w-]+)", command)
        wrong += [command] if made and made[2] not in targets else []
        for module in re.findall(r"-m ((?:dcompile|benchmarks|tests|tools)[\w.]*)", command):
            wrong += [] if importlib.util.find_spec(module) else [command]
        if re.search(r"-m (?:dcompile|benchmarks|tests|tools)|launch/", command):
            own = set(re.findall(r"(?<=\s)--[\w-]+", command)) - {"--standalone", "--nproc-per-node"}
            wrong += sorted(own - options_of_the_tree())
    assert not wrong
