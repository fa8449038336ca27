"""`python -m dcompile`: what it finds, what it misses, and the cache that it clears."""

import re
from importlib.util import find_spec

import pytest
import torch

from dcompile import doctor
from dcompile.doctor import main


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.so").write_bytes(bytes(2_000_000))
    return tmp_path


def test_a_report_names_versions_compiler_and_cache(cache, capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in printed and "C++ compiler: " in printed
    assert f"cache: {cache}, 2.0 MB of at most 20 GiB, 1 kernels, 0 graphs" in printed
    assert "trial: a line of C++ was compiled, written to the cache and called" in printed
    assert printed.endswith("\nready\n") and {file.name for file in cache.iterdir()} == {"a.json", "b.so"}


def test_a_missing_compiler_is_a_problem(cache, capsys, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "problem: no C++ compiler; install g++ or clang++, or set CXX" in printed.splitlines()[-1]
    assert printed.count("problem: ") == 1 and "ready" not in printed


def test_a_compiler_that_fails_is_a_problem(cache, capsys, monkeypatch):
    broken = cache / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo broken 1.0 || exit 3\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    assert main([]) == 1
    assert re.search(r"\nproblem: \S+/broken .*3\) on 1 kernels", capsys.readouterr().out)


def test_a_cache_that_cannot_be_written_is_a_problem(cache, capsys, monkeypatch):
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(cache / "a.json"))
    assert main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"problem: the cache {cache / 'a.json'} cannot be used: it is not a directory; set DCOMPILE")


def test_help_lists_the_other_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    others = re.findall(r"python -m dcompile\.(\w+)", printed)
    assert others == ["calibrate", "precompile"] and all(find_spec(f"dcompile.{module}") for module in others)


def test_the_cache_is_cleared(cache, capsys):
    assert main(["--clear-cache"]) == 0
    assert f"2.0 MB removed from {cache}" in capsys.readouterr().out
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path / "none" / "yet"))
    assert main([]) == 0 and "0.0 MB of at most" in capsys.readouterr().out
    assert main(["--clear-cache"]) == 0
