"""Reporting never breaks what is reported on: streams that are absent, closed, full or of another encoding; disks."""

import ast
import contextlib
import errno
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dcompile
from dcompile import artifacts
from dcompile.config import Config
from dcompile.runtime.communication import work
from dcompile.runtime.coordination import heartbeat

pytestmark = pytest.mark.usefixtures("compiled_anew")

SOURCES = Path(artifacts.__file__).parent
MAY_PRINT = {"artifacts.py", "calibrate.py", "simulate/__main__.py", "codegen/emit/triton/worker.py"}
"""The one safe place; two commands, whose output is what they are for; a script that runs without the package."""
NAMES = ("stdout", "stderr", "__stderr__")


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class NoFlush:
    """What some hosts put in the place of a stream."""

    def write(self, text):
        raise KeyError(text)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {"none": lambda: None, "closed": closed, "full": Full, "other": NoFlush}


@contextlib.contextmanager
def unusable(stream, monkeypatch, names=("stderr", "stdout")):
    """Both streams are of no use, and the receipt is on. No fixture: pytest sets them anew before the test itself."""
    monkeypatch.setenv("DCOMPILE_RECEIPT", "1")
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(sys, name, STREAMS[stream]())
        yield


@pytest.mark.parametrize("stream", STREAMS)
def test_steps_run_where_nobody_can_be_told(stream, monkeypatch):
    """Each door has two of the streams: it decides what is said, and `artifacts.write` alone meets the stream."""
    doors = dcompile.compile, lambda target: torch.compile(target, backend="dcompile")
    door = doors[list(STREAMS).index(stream) % 2]
    monkeypatch.setenv("DCOMPILE_LOG", "passes,overlap,kernels,memory")
    names = ("stderr",) if stream == "closed" else ("stderr", "stdout")  # of a closed stdout, torch itself raises
    with unusable(stream, monkeypatch, names):
        model = door(nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 2)))
        for rows in (2, 5):
            model(torch.ones(rows, 8)).sum().backward()
        score = door(lambda x: (x * 3).relu().sum())
        assert score(torch.ones(3)).item() == 9
        skipped = door(torch._dynamo.disable(lambda x: x + 1))
        assert skipped(torch.ones(1)).item() == 2


@pytest.mark.parametrize("stream", STREAMS)
def test_a_process_ends_where_streams_cannot_be_flushed(stream, monkeypatch):
    class Stuck:
        def is_completed(self):
            return False

    def differ(group):
        raise dcompile.errors.PlanMismatchError("dcompile: ranks differ")

    ended = []
    monkeypatch.setattr(work.os, "_exit", ended.append)
    monkeypatch.setattr(work, "_STUCK", [Stuck()])
    monkeypatch.setattr(heartbeat, "_end", differ)
    with unusable(stream, monkeypatch):
        work._leave()
        assert ended == [1]
        heartbeat._end_at_exit()
    assert ended[:2] == [1, 1]


def test_a_character_that_a_stream_cannot_encode_is_written_as_an_escape():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert artifacts.write(stream, "größer\n")
    assert raw.getvalue() == b"gr\\xf6\\xdfer\n"


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_write_says_whether_it_worked(stream):
    assert not artifacts.write(stream(), "line\n")
    usable = io.StringIO()
    assert artifacts.write(usable, "line\n") and usable.getvalue() == "line\n"


def test_a_dump_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    (tmp_path / "file").write_text("")
    config = Config(dump=str(tmp_path / "file"))
    for _ in range(2):
        artifacts.dump(config, "receipt.txt", "text")
    assert told.getvalue().count("cannot write") == 1
    artifacts.dump(Config(dump=str(tmp_path / "folder")), "receipt.txt", "\udc80")  # of a path that is no UTF-8
    assert (tmp_path / "folder/rank0/receipt.txt").read_text() == "\\udc80"


def test_streams_are_written_in_one_place():
    """Whoever writes to a stream by itself has to think of all that the tests above are about."""
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if path.relative_to(SOURCES).as_posix() in MAY_PRINT or not any(name in text for name in NAMES):
            continue
        for node in ast.walk(ast.parse(text)):
            stream = isinstance(node, ast.Attribute) and node.attr in NAMES
            own = stream and isinstance(node.value, ast.Name) and node.value.id == "sys"
            assert not own, f"{path}:{node.lineno}: report through dcompile.artifacts"
