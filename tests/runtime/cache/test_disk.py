"""Every way a kernel cache can be damaged, forbidden, full, or shared, and every way a compiler can fail."""

from __future__ import annotations

import json
import mmap
import os
import stat
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch  # noqa: F401  loads the OpenMP run time that kernels are linked with

from dcompile.codegen.emit.cpp.compile import build, find_compiler
from dcompile.codegen.emit.target import Built, KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.runtime.cache import disk as cache_module
from dcompile.runtime.cache.disk import KernelCache, cache_directory
from dcompile.runtime.program.argument_table import kernel
from tests import nursery

ROOT = Path(__file__).parents[3]


def source(number: int) -> KernelSource:
    text = f'extern "C" int64 number{number}() {{ return {number}; }}\n'
    return KernelSource(f"number{number}", text, (), 1, False)


@pytest.fixture
def config(tmp_path):
    return Config(cache_dir=str(tmp_path / "cache"), compile_timeout_s=60)


@pytest.fixture(autouse=True)
def nothing_refused_before(monkeypatch):
    monkeypatch.setattr(cache_module, "_refused", {})


def make(config: Config, *numbers: int) -> Built:
    built = build([source(n) for n in numbers], config, KernelCache.open(config))
    for n in numbers:
        assert kernel(built.libraries[f"number{n}"], f"number{n}")() == n
    return built


def files(config: Config, pattern: str = "*") -> list[Path]:
    return sorted(cache_directory(config).glob(pattern))


def test_nothing_is_built_twice(config, capsys):
    first = make(config, 1, 2, 3)
    assert (first.built, first.cache_hits) == (3, 0)
    again = make(config, 1, 2, 3)
    assert (again.built, again.cache_hits) == (0, 3)
    other = make(config, 2, 3, 4)
    assert (other.built, other.cache_hits) == (1, 2), "graphs share what is possible"
    assert capsys.readouterr().err == ""
    assert stat.S_IMODE(cache_directory(config).stat().st_mode) == 0o700
    assert not files(config, "tmp-*")


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "random bytes": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("kind", ["*.so", "*.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_built_again_with_one_line(config, capsys, kind, damage):
    make(config, 5)
    (path,) = files(config, kind)
    before = path.read_bytes()
    path.unlink()  # the library may be mapped into this process: damage a copy, as another process would see it
    path.write_bytes(before)
    DAMAGES[damage](path)
    assert make(config, 5).built == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "damaged" in said and path.name in said
    assert make(config, 5).cache_hits == 1
    assert capsys.readouterr().err == "", "the next run is clean"


def test_entries_swapped_with_one_another_are_noticed(config, capsys):
    make(config, 6)
    make(config, 7)
    a, b = files(config, "*.json")
    texts = a.read_text(), b.read_text()
    a.write_text(texts[1]), b.write_text(texts[0])
    assert make(config, 6, 7).built == 2
    assert capsys.readouterr().err.count("belongs to another kernel") == 2


def test_an_entry_cannot_point_outside_the_cache(config, tmp_path):
    make(config, 8)
    (entry,) = files(config, "*.json")
    record = json.loads(entry.read_text())
    record["sha256"] = f"../{'a' * 61}"
    entry.write_text(json.dumps(record))
    assert make(config, 8).built == 1


def test_a_missing_library_is_a_miss(config, capsys):
    make(config, 9)
    files(config, "*.so")[0].unlink()
    assert make(config, 9).built == 1
    assert "No such file" in capsys.readouterr().err


def test_an_unfinished_entry_is_a_miss_and_is_swept_away(config):
    directory = cache_directory(config)
    make(config, 10)
    old, new = directory / "tmp-old", directory / "tmp-new"
    old.mkdir(), new.mkdir()
    (old / "kernels.so").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert make(config, 11).built == 1 and old.exists(), "looked for once in a process"
    cache_module._sweep.cache_clear()  # as another process
    assert make(config, 12).built == 1
    assert not old.exists() and new.exists(), "only what a killed process left long ago goes"


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_may_write_is_refused_once(config, capsys, mode):
    directory = cache_directory(config)
    directory.mkdir(parents=True)
    directory.chmod(mode)
    built = make(config, 12)
    make(config, 12)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "others may write" in said and str(directory) in said
    assert not files(config)
    assert not built.libraries["number12"].is_relative_to(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(config, capsys):
    cache_directory(config).mkdir(parents=True, mode=0o700)
    os.chown(cache_directory(config), 12345, 12345)
    make(config, 13)
    assert "belongs to user 12345" in capsys.readouterr().err
    assert not files(config)


@pytest.fixture
def noexec(monkeypatch):
    """Make the loader refuse files below some directories, as on file systems that are mounted noexec."""
    refusing, mapped = [], mmap.mmap

    def map_file(descriptor, *args, **kwargs):
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(refusing[0] if refusing else "/nowhere"):
            raise PermissionError(1, "Operation not permitted")
        return mapped(descriptor, *args, **kwargs)

    monkeypatch.setattr(cache_module.mmap, "mmap", map_file)
    return refusing


def test_a_directory_that_libraries_cannot_be_loaded_from_is_refused(config, capsys, noexec):
    noexec.append(Path(config.cache_dir))
    built = make(config, 19)
    assert "may be mounted noexec" in capsys.readouterr().err and not files(config)
    assert not built.libraries["number19"].is_relative_to(config.cache_dir)


def test_where_no_directory_can_be_used_the_error_says_why_and_what_to_set(config, noexec):
    noexec.append(Path("/"))
    with pytest.raises(BuildError, match=r"kernel cache .* noexec.*; nor can .* Set DCOMPILE_CACHE_DIR"):
        make(config, 20)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_below_one_that_others_may_write_is_refused(config, capsys, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(cache_module, "_is_private", lambda group: False)
    tmp_path.chmod(mode)
    make(config, 21)
    assert f"{tmp_path}: others may write to it" in capsys.readouterr().err and not files(config)
    tmp_path.chmod(0o1777)  # the sticky bit: others can replace only what is theirs
    cache_module._refused.clear()
    make(config, 21)
    assert capsys.readouterr().err == "" and files(config)


def test_a_parent_that_only_the_own_private_group_may_write_is_trusted(config, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_is_private", lambda group: group == tmp_path.stat().st_gid)
    tmp_path.chmod(0o775)
    make(config, 22)
    assert capsys.readouterr().err == "" and files(config)


def test_symbolic_links_are_followed_once_to_the_directory_itself(tmp_path, capsys):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute")
    (tmp_path / "circle").symlink_to("circle")
    cache = KernelCache.open(Config(cache_dir=str(tmp_path / "relative" / "cache")))
    assert cache.directory == tmp_path / "real" / "cache" and capsys.readouterr().err == ""
    KernelCache.open(Config(cache_dir=str(tmp_path / "circle")))
    assert "circle is not used" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a link away")
def test_a_link_of_another_user_is_refused(tmp_path, capsys):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    cache = KernelCache.open(Config(cache_dir=str(tmp_path / "link" / "cache")))
    assert f"{tmp_path / 'link'} is a link of user 12345" in capsys.readouterr().err
    assert not cache.directory.is_relative_to(tmp_path)


def test_a_file_in_place_of_the_directory(config, capsys):
    Path(config.cache_dir).write_text("not a directory")
    make(config, 14)
    assert "it is not a directory" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made(capsys):
    make(Config(cache_dir="/proc/dcompile"), 15)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "/proc/dcompile" in said


def test_long_paths_with_spaces_and_letters(tmp_path, capsys):
    config = Config(cache_dir=str(tmp_path / "größe 大 $HOME 'quoted'" / ("x" * 200) / ("y" * 200)))
    make(config, 16)
    assert make(config, 16).cache_hits == 1
    assert capsys.readouterr().err == ""


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory(Config()) == Path("/somewhere/dcompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(Config()) == Path.home() / ".cache/dcompile"
    assert cache_directory(Config(cache_dir="/else")) == Path("/else")


# --- compilers --------------------------------------------------------------------------------------------------------


def compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fake-cxx"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo fake 1.0; exit 0;; esac\n{script}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo internal compiler error: boom >&2; exit 4", "boom"),
        ("head -c 3000 /dev/urandom; exit 1", "exit status 1"),
        ("exit 0", "wrote no library"),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_a_failing_compiler_is_named_with_what_to_do(config, monkeypatch, tmp_path, script, expected):
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(BuildError) as caught:
        make(config, 20)
    message = str(caught.value)
    assert "fake-cxx" in message and "CXX" in message and '{"kernels": "aten"}' in message and expected in message
    assert not files(config), "nothing half-written"


def test_a_compiler_that_was_killed_is_started_again(config, monkeypatch, tmp_path):
    once = f'if [ ! -e {tmp_path}/killed ]; then touch {tmp_path}/killed; kill -9 $$; fi; exec g++ "$@"'
    monkeypatch.setenv("CXX", compiler(tmp_path, once))
    assert make(config, 25).built == 1
    assert (tmp_path / "killed").exists()


def test_a_hanging_compiler_is_ended(config, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 100"))
    config = Config(cache_dir=config.cache_dir, compile_timeout_s=1)
    with pytest.raises(BuildError, match=r"did not finish in 1 s \(compile_timeout_s\)"):
        make(config, 21)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not files(config)


def test_a_missing_compiler_is_named(config, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")
    with pytest.raises(BuildError, match=r"/nowhere/c\+\+ -O1 not found \(CXX is set to it\)"):
        make(config, 22)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError, match=r"g\+\+, c\+\+, clang\+\+ not found \(CXX is not set\).*kernels"):
        make(config, 22)


def test_a_library_that_cannot_be_loaded_is_a_build_error(config, monkeypatch, tmp_path):
    script = 'for out; do :; done; echo garbage > "$out"'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    built = build([source(23)], config, KernelCache.open(config))
    with pytest.raises(BuildError, match="cannot load"):
        kernel(built.libraries["number23"], "number23")


def test_another_compiler_or_flag_is_another_entry(config, monkeypatch):
    make(config, 24)
    monkeypatch.setenv("CXX", "g++ -O1")
    assert find_compiler(10).command == ("g++", "-O1")
    assert make(config, 24).built == 1


# --- other processes --------------------------------------------------------------------------------------------------

PROCESS = """
import resource
import sys
import torch
from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.target import KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.argument_table import kernel
if limit := int(sys.argv[2]):  # as `ulimit -f` before the process, which then could not be a fork
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
config = Config(cache_dir=sys.argv[1], compile_timeout_s=60)
texts = {f"number{n}": f'extern "C" int64 number{n}() {{ return {n}; }}' for n in range(30, 34)}
sources = [KernelSource(name, text, (), 1, False) for name, text in texts.items()]
try:
    built = build(sources, config, KernelCache.open(config))
except BuildError as error:
    print("BuildError:", error)
    sys.exit(3)
assert [kernel(built.libraries[s.name], s.name)() for s in sources] == [30, 31, 32, 33]
print("right", built.libraries["number30"])
"""


def start(config: Config, largest_file: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [nursery.python(), "-c", textwrap.dedent(PROCESS), config.cache_dir, str(largest_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_many_writers_at_once(config):
    processes = [start(config) for _ in range(8)]
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert out.startswith("right") and err == ""
    assert not files(config, "tmp-*")
    assert len(files(config, "*.json")) == 4
    again = start(config)
    out, err = again.communicate(timeout=60)
    assert out.startswith("right") and err == ""


def test_a_file_size_limit_is_an_error_about_space(config):
    out, _ = start(config, largest_file=4096).communicate(timeout=60)
    assert out.startswith("BuildError") and config.cache_dir in out and "free space" in out
    assert not files(config, "tmp-*") and not files(config, "*.json")
    out, err = start(config).communicate(timeout=60)
    assert out.startswith("right") and err == "", "and the cache is usable afterwards"


def test_a_temporary_directory_goes_with_its_process(config):
    directory = cache_directory(config)
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    out, err = start(config).communicate(timeout=60)
    assert out.startswith("right") and err.count("\n") == 1
    assert not Path(out.split(maxsplit=1)[1].strip()).parent.exists()
