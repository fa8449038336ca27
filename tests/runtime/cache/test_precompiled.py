"""A folder that was filled before: read beside the cache, never written to, and why it lacks something."""

import json
import os
from dataclasses import replace

import pytest

from dcompile.collectives.contract import ProgramReport
from dcompile.config import Config
from dcompile.runtime.cache import disk, precompiled
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.cache.precompiled import MANIFEST, PrecompiledJob, reason_for_miss, write_manifest
from dcompile.runtime.program.artifact import CompiledGraph

JOB = PrecompiledJob("Net", 1, (("dp", 1),), Config().key())


@pytest.fixture
def folder(tmp_path):
    """A folder with a kernel `k` and a graph `g` that has it."""
    folder = tmp_path / "folder"
    cache = KernelCache.open(Config(cache_dir=str(folder)))
    built = folder / "tmp-built.so"
    built.write_bytes(b"code")
    cache.put(["k"], built)
    cache.put_graph("g", CompiledGraph("source", (), (), 0, {"kernel": "k"}, ProgramReport()))
    write_manifest(folder, [JOB])
    return folder


def settings(tmp_path, folder):
    return Config(cache_dir=str(tmp_path / "cache"), precompiled=str(folder))


def test_what_the_cache_lacks_is_read_from_the_folder_which_stays_as_it_is(tmp_path, folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    cache = KernelCache.open(settings(tmp_path, folder))
    graph, libraries = cache.find_graph("g")
    assert graph.source == "source" and libraries["kernel"].parent == folder == cache.find("k").parent
    assert cache.find("another") is None and cache.find_graph("another") is None
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not list((tmp_path / "cache").iterdir())


def test_a_damaged_library_of_the_folder_is_a_miss_and_stays(tmp_path, folder, capsys):
    (library,) = folder.glob("*.so")
    library.write_bytes(b"other code")
    assert KernelCache.open(settings(tmp_path, folder)).find_graph("g") is None
    assert library.exists() and "does not match its checksum" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["others may write to it", "No such file", "not a directory", "belongs to user"])
def test_a_folder_that_others_could_plant_code_in_is_not_read(tmp_path, folder, capsys, monkeypatch, why):
    if why == "others may write to it":
        folder.chmod(0o777)
    elif why == "belongs to user":
        if os.getuid() == 0:  # whose own folders everybody may use
            os.chown(folder, 4711, -1)
        monkeypatch.setattr(disk.os, "getuid", lambda: 4712)
    else:
        folder = folder / ("k.json" if why == "not a directory" else "nowhere")
    cache = KernelCache(tmp_path, KernelCache._readable(settings(tmp_path, folder)))
    assert cache.find("k") is None and cache.find_graph("g") is None
    assert why in capsys.readouterr().err


def test_why_something_is_not_there(tmp_path, folder, monkeypatch):
    config = settings(tmp_path, folder)
    assert reason_for_miss(config).startswith("the folder has no such graph")
    assert reason_for_miss(replace(config, matmul="aten")) == "the folder is for other options"
    here = precompiled.environment()
    write_manifest(folder, [replace(JOB, world_size=8)])
    record = json.loads((folder / MANIFEST).read_text())
    assert [job["world_size"] for job in record["jobs"]] == [1, 8]
    record["jobs"] = record["jobs"][1:]
    (folder / MANIFEST).write_text(json.dumps(record))
    assert reason_for_miss(config) == "the folder is for 8 ranks, this job has 1"
    monkeypatch.setattr(precompiled, "environment", lambda: here | {"torch": "2.99.0"})
    assert reason_for_miss(config) == f"the folder is for another torch: {here['torch']}, here 2.99.0"
    processor = " ".join(f"flag{n}" for n in range(30))
    monkeypatch.setattr(precompiled, "environment", lambda: here | {"processor": processor + " amx"})
    assert "the folder is for another processor: it has " in reason_for_miss(config)
    write_manifest(folder, [JOB])
    assert [job["world_size"] for job in json.loads((folder / MANIFEST).read_text())["jobs"]] == [1], "anew"
    (folder / MANIFEST).write_text("{}")
    assert "no manifest" in reason_for_miss(config)
