"""What a user sees when the compiler, the disk or the cache misbehaves: a right result or one clear error, never else.

Each case is a process of its own that trains a small model and compares with eager. After each, whatever the outcome,
the cache must be whole: every entry points at a library of the right content, and nothing temporary is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import compiled_once, nursery
from tests.faults import victim

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cache(tmp_path):
    """Where the kernels of this test go; whole at the end, whatever happened."""
    directory = tmp_path / "cache"
    yield directory
    assert_whole(directory)


@dataclass
class Ended:
    """What became of a victim."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Victim:
    """One that is running, and the pipes that take its output."""

    process: Any
    pipes: tuple[Any, ...]


def start(cache: Path, largest_file: int | None = None, **environment: str) -> Victim:
    """A process that trains. `largest_file`: bytes, what it and its children may write at most."""
    inherited = {**os.environ, "CXX": compiled_once.compiler()}
    # products of ours take the compiler 0.7 s with AVX-512, twice what the other kernels take together
    variables = {**inherited, "DCOMPILE_MATMUL": "aten", "DCOMPILE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    variables |= environment
    context: Any = nursery.context()
    readers, writers = zip(*[context.Pipe(duplex=False) for _ in range(2)], strict=True)
    process = context.Process(target=_train, args=(variables, writers, largest_file))
    with nursery.starting():
        process.start()
    for writer in writers:
        writer.close()
    return Victim(process, readers)


def _train(environment: dict[str, str], output: Sequence[Any], largest_file: int | None) -> None:
    """In the process: leads a session of its own, so that it can be killed with its children."""
    os.setsid()
    nursery.born(environment)
    for number, pipe in enumerate(output, 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    victim.main()


def finish(victim: Victim, timeout: float = 90) -> Ended:
    victim.process.join(timeout)
    if victim.process.is_alive():
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.process.join()
    return Ended(victim.process.exitcode, *map(_read, victim.pipes))


def _read(pipe: Any) -> str:
    """What is there: as much as a pipe holds, 64 KiB, and no waiting for whoever else may write to it."""
    os.set_blocking(pipe.fileno(), False)
    with pipe, contextlib.suppress(BlockingIOError):
        return os.read(pipe.fileno(), 1 << 16).decode()
    return ""


def train(cache: Path, largest_file: int | None = None, **environment: str) -> Ended:
    return finish(start(cache, largest_file, **environment))


def result_of(process: Ended) -> dict:
    """The victim's result, which must be right."""
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["worst"] < 1e-5 and result["kernels"] > 0
    return result


def assert_clear_error(process: Ended, *words: str) -> None:
    """Ended by one exception of ours, at the end of the output, that says all of `words`."""
    assert process.returncode == 1, (process.returncode, process.stderr)
    assert "RESULT" not in process.stdout
    message = process.stderr[process.stderr.rindex("BuildError") :]
    for word in words:
        assert word in message, message


def assert_whole(directory: Path) -> None:
    """Every entry is valid and its library has the content it is named after; nothing temporary is left."""
    for path in directory.iterdir() if directory.is_dir() else ():
        assert not path.name.startswith("tmp"), path
        if path.suffix == ".json":
            record = json.loads(path.read_text())
            assert record["key"] == path.stem
            assert (directory / f"{record['sha256']}.so").exists()
        if path.suffix == ".so":
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def slow_compiler(path: Path, seconds: str) -> str:
    """Says its version at once, and takes its time to compile."""
    return script(path, f'case "$*" in *--version*) exec g++ --version;; esac\nsleep {seconds}\nexec g++ "$@"\n')


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails(cache):
    assert_clear_error(train(cache, CXX="false"), "false", "exit status 1", "set CXX")


def test_a_compiler_that_is_not_there(cache):
    assert_clear_error(train(cache, CXX="/nonexistent"), "/nonexistent not found (CXX is set to it)", 'kernels": "aten')


def test_no_compiler_on_the_path(cache, tmp_path):
    assert_clear_error(train(cache, CXX="", PATH=str(tmp_path)), "g++, c++, clang++ not found (CXX is not set)")


def test_a_compiler_that_writes_nothing(cache):
    assert_clear_error(train(cache, CXX="true"), "reports success but wrote no library")


def test_a_compiler_that_rejects_the_code(cache, tmp_path):
    refuses = 'case "$*" in *--version*) echo g++ 12;; *) echo "error: unknown type <here>" >&2; exit 3;; esac\n'
    process = train(cache, CXX=script(tmp_path / "refuses", refuses))
    assert_clear_error(process, "exit status 3", "error: unknown type <here>")


def test_a_compiler_that_hangs(cache, tmp_path):
    """Ended after the limit, with its children."""
    seconds = "86399"
    began = time.monotonic()
    process = train(cache, CXX=slow_compiler(tmp_path / "hangs", seconds), DCOMPILE_COMPILE_TIMEOUT_S="2")
    assert time.monotonic() - began < 45
    assert_clear_error(process, "did not finish in 2 s (compile_timeout_s)")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not [command for command in commands if seconds.encode() in command], "the compiler is still running"


def test_killed_while_compiling(cache, tmp_path):
    """The next start finds a usable cache. What the killed process left is swept when it is old."""
    process = start(cache, CXX=slow_compiler(tmp_path / "slow", "50"))
    deadline = time.monotonic() + 60
    while not list(cache.glob("tmp-*/*")) and not list(cache.glob("tmp-*")):
        assert time.monotonic() < deadline and process.process.is_alive(), "it never began to compile"
        time.sleep(0.1)
    os.killpg(process.process.pid, signal.SIGKILL)
    finish(process)
    left = list(cache.glob("tmp-*"))
    for path in left:
        os.utime(path, (0, 0))
    assert result_of(train(cache, DCOMPILE_MATMUL="auto"))["built"] > 0


# --- the cache directory ----------------------------------------------------------------------------------------------


def assert_goes_without(process: Ended, directory: Path, why: str) -> None:
    """Right, with one line that says which directory is not used, and why."""
    assert result_of(process)["built"] > 0
    lines = [line for line in process.stderr.splitlines() if f"kernel cache {directory} is not used" in line]
    assert len(lines) == 1 and why in lines[0], process.stderr


def test_a_cache_directory_that_cannot_be_made(tmp_path):
    """Below a regular file: refused to root as well."""
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "cache"
    assert_goes_without(train(directory), directory, "Not a directory")


def test_a_cache_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert_goes_without(train(tmp_path / "file"), tmp_path / "file", "not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cache_directory_that_others_may_write_to(cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert_goes_without(train(cache), cache, "others may write to it (mode 0777)")
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory away takes root")
def test_a_cache_directory_of_another_user(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, -1)
    assert_goes_without(train(cache), cache, "it belongs to user 12345")
    assert list(cache.iterdir()) == []


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more(cache):
    """A limit on file size, 4 KiB, stands in for a quota: it strikes the compiler and us alike."""
    process = train(cache, largest_file=4096, CXX="g++")
    assert_clear_error(process, f"cannot write compiled kernels to {cache}", "free", "DCOMPILE_CACHE_DIR")
    assert result_of(train(cache, CXX="g++"))["built"] > 0, "with space again, all is well"


def test_a_full_disk(tmp_path):
    """A file system of 256 KiB: kernels fit, the compiler's own files do not."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=700", "none", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        process = train(mount / "cache", CXX="g++")
        assert_clear_error(process, "cannot write compiled kernels to", "free", "DCOMPILE_CACHE_DIR")
        assert_whole(mount / "cache")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# --- what is in the cache ---------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _random(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".so", _truncate), (".so", _empty), (".so", _random), (".json", _truncate)],
)
def test_a_damaged_entry_is_built_again(cache, warm, suffix, damage):
    warm(cache)
    files = list(cache.glob(f"*{suffix}"))
    for path in files:
        damage(path)
    process = train(cache)
    assert result_of(process)["built"] > 0
    assert "is damaged" in process.stderr and "building it again" in process.stderr
    assert process.stderr.count("is damaged") <= len(files), "one line a file"


def test_swapped_entries_are_noticed(cache, warm):
    """The library of another kernel must not run, whatever the file is called."""
    warm(cache)
    entries = sorted(cache.glob("*.json"))
    assert len(entries) >= 2
    texts = [entry.read_text() for entry in entries]
    for entry, text in zip(entries, texts[1:] + texts[:1], strict=True):
        entry.write_text(text)
    process = train(cache)
    assert result_of(process)["built"] == len(entries)
    assert "it belongs to another kernel" in process.stderr


def test_a_lost_library_is_built_again(cache, warm):
    warm(cache)
    for path in cache.glob("*.so"):
        path.unlink()
    assert result_of(train(cache))["built"] > 0


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """One cache that a run has filled."""
    directory = tmp_path_factory.mktemp("filled") / "cache"
    assert result_of(train(directory))["built"] > 0
    return directory


@pytest.fixture
def warm(filled):
    """Copies the filled cache to where a test wants it."""

    def copy(target: Path) -> None:
        target.mkdir(mode=0o700)
        for path in filled.iterdir():
            (target / path.name).write_bytes(path.read_bytes())

    return copy


def test_a_second_start_builds_nothing(cache, warm):
    """Also shows that it is the damage that makes the tests above build."""
    warm(cache)
    second = result_of(train(cache))
    assert second["built"] == 0 and second["cache_hits"] > 0


def test_four_processes_on_one_cold_cache(cache):
    processes = [start(cache, CXX="g++") for _ in range(4)]
    for process in [finish(process) for process in processes]:
        result_of(process)
    assert result_of(train(cache, CXX="g++"))["built"] == 0
