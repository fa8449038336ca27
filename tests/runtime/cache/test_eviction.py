"""The cache keeps to its size: what was used longest ago goes, and what is in use stays."""

import json
import os
import time

import pytest

from dcompile.runtime.cache import disk
from dcompile.runtime.cache.disk import KernelCache

DAY = 24 * 3600


@pytest.fixture
def cache(tmp_path):
    """Five kernels of 1000 bytes, the first of them used longest ago, and a graph."""
    cache = KernelCache(tmp_path)
    for number in range(5):
        built = tmp_path / f"built{number}.so"
        built.write_bytes(bytes([number]) * 1000)
        aged(cache.put([f"kernel{number}"], built), days=10 - number)
    aged(tmp_path / "old.graph", days=20, text="x" * 100)
    return cache


def aged(path, days, text=None):
    if text is not None:
        path.write_text(text)
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def evict(cache, limit_bytes):
    return disk.evict(cache.directory, limit_bytes, disk.files_in(cache.directory))


def kernels(cache):
    return [number for number in range(5) if cache.find(f"kernel{number}") is not None]


def test_what_was_used_longest_ago_goes_first_with_its_entries(cache, capsys):
    removed = evict(cache, 4000)
    assert kernels(cache) == [3, 4] and not (cache.directory / "old.graph").exists()
    assert sum(file.size for file in disk.files_in(cache.directory)) <= 3200 and removed >= 3000
    assert not list(cache.directory.glob("kernel0.json"))
    assert "damaged" not in capsys.readouterr().err


def test_a_kernel_that_is_used_is_young_again(cache):
    assert KernelCache(cache.directory).find("kernel0") is not None
    evict(cache, 4000)
    assert 0 in kernels(cache)


def test_what_was_used_within_the_hour_stays_whatever_the_limit(cache):
    for file in disk.files_in(cache.directory):
        os.utime(file.path)
    assert evict(cache, 10) == 0 and kernels(cache) == [0, 1, 2, 3, 4]


def test_a_cache_below_its_limit_is_left_alone(cache):
    assert evict(cache, 10**6) == 0 and kernels(cache) == [0, 1, 2, 3, 4]


def test_the_size_is_looked_at_once_a_day(cache):
    disk.limit_size(cache.directory, 10**6)
    disk.limit_size(cache.directory, 4000)
    assert len(kernels(cache)) == 5
    aged(cache.directory / disk.MARKER, days=2)
    disk.limit_size(cache.directory, 4000)
    assert len(kernels(cache)) == 2


def test_no_limit(cache):
    disk.limit_size(cache.directory, 0)
    assert len(kernels(cache)) == 5 and not (cache.directory / disk.MARKER).exists()


def test_clearing_leaves_what_is_not_the_caches(cache):
    (cache.directory / "notes.txt").write_text("mine")
    (cache.directory / "kernel9.json").write_text(json.dumps({"key": "kernel9"}))
    assert disk.clear(cache.directory) > 5000
    assert [path.name for path in cache.directory.iterdir()] == ["notes.txt"]
