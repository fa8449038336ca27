"""The docs agree with the code: the table of settings is printed from it, and links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcompile.config import MODES, describe
from dcompile.explain.receipt import Receipt

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def settings_page() -> str:
    rows = [f"| `{name}` | `{variable}` | `{default}` | {text} |" for name, variable, default, text in describe()]
    modes = [f"| `{mode}` | {_options(options)} |" for mode, options in MODES.items()]
    return "\n".join(
        [
            "# Settings",
            "",
            'Each is an option, `dcompile.compile(model, options={"name": value})` or the same in `torch.compile`,',
            "and an environment variable; options win. An unknown name raises `OptionError` (a `ValueError`, and a",
            "`RuntimeError` as in torch.compile), which names the nearest and all valid ones. Of options",
            "of torch.compile that change nothing here, those that its modes stand for and some others are accepted:",
            "the table says why, and so does the receipt where one was changed from its default. Others are errors.",
            "This page is printed from `dcompile/config.py`: `pytest tests/test_docs.py --update-golden`.",
            "",
            "| Option | Environment | Default | Meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Modes",
            "",
            "As in torch.compile, a mode stands for a set of options, so give one or the other.",
            "Where an option has no effect, a `note:` line of the receipt says so and why.",
            "`default` and `reduce-overhead` run the same program, without and with CUDA graphs. The two with",
            "`max-autotune` call cuBLASLt for large products that another of its algorithms multiplies faster,",
            "and a kernel of our own for products and the pointwise kernels behind them where that is faster;",
            "on a CPU they are `default`. `lite` leaves every kernel to ATen.",
            "",
            "| Mode | Options |",
            "|---|---|",
            *modes,
            "",
        ]
    )


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in options.items()) or "none"


def test_settings_page_is_what_the_code_says(update_golden: bool) -> None:
    page = ROOT / "docs" / "settings.md"
    if update_golden:
        page.write_text(settings_page())
    assert page.read_text() == settings_page(), "run: pytest tests/test_docs.py --update-golden"


def test_every_field_of_the_receipt_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "explain.md").read_text(), re.MULTILINE)
    lines = {"reasons", "fallbacks", "notes", "variants"}
    assert explained == [field.name for field in dataclasses.fields(Receipt) if field.name not in lines]
    assert all(f"`{name}`" in (ROOT / "docs" / "explain.md").read_text() for name in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_that_the_docs_name_exists(page: Path) -> None:
    named = re.findall(r"`((?:dcompile|launch|tests|tools|docs)/[\w/.]+?\.(?:py|md|sh|json))`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
