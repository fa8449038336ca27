"""`python -m dcompile`: what it finds, what it misses, and the cache that it clears."""

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


def test_a_missing_compiler_is_a_problem(cache, capsys, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert main([]) == 1
    assert "problem: no C++ compiler; install g++ or clang++, or set CXX" in capsys.readouterr().out


def test_the_cache_is_cleared(cache, capsys):
    assert main(["--clear-cache"]) == 0
    assert f"2.0 MB removed from {cache}" in capsys.readouterr().out
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path / "none" / "yet"))
    assert main([]) == 0 and "0.0 MB of at most" in capsys.readouterr().out
    assert main(["--clear-cache"]) == 0
