"""Every logger is used, levels and handlers are the user's, and reporting never breaks what is reported on."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import io
import logging
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import dcompile
from dcompile import logs
from dcompile.compiler.driver import RANDOM
from dcompile.config import CHANNELS, Config, LogSetting, parse_log
from dcompile.errors import OptionError
from dcompile.runtime.communication import work
from dcompile.runtime.coordination import heartbeat
from tests.subject import ROOT

pytestmark = pytest.mark.usefixtures("compiled_anew")

SOURCES = Path(logs.__file__).parent
MAY_PRINT = {
    "logs.py",
    "bisect/__main__.py",
    "calibrate.py",
    "compat/__main__.py",
    "doctor.py",
    "precompile/__main__.py",
    "codegen/emit/triton/worker.py",
}
"""The one safe place; five commands, whose output is what they are for; a script that runs without the package."""
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


class Collector(logging.Handler):
    """Keeps records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@contextlib.contextmanager
def collected(name):
    """The records that arrive at a logger's handlers."""
    handler, logger = Collector(), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield handler.records
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def level():
    """Sets levels of loggers for one test."""
    before = {}

    def set_level(name, value):
        logger = logging.getLogger(name)
        before.setdefault(logger, logger.level)
        logger.setLevel(value)

    yield set_level
    for logger, value in before.items():
        logger.setLevel(value)


def step(model=None, **options):
    """One training step of a small model."""
    model = model or nn.Sequential(nn.Linear(16, 8), nn.GELU())
    dcompile.compile(model, options={"receipt": False, **options})
    model(torch.ones(32, 16)).square().mean().backward()


def lines(records, level=None):
    return [record.getMessage() for record in records if level is None or record.levelno == level]


# --- channels ---------------------------------------------------------------------------------------------------------


def test_passes_are_logged_with_time_and_steps():
    with collected("dcompile.passes") as records:
        step(log="passes")
    for name in ("forward0", "backward0"):
        found = [line for line in lines(records, logging.DEBUG) if line.startswith(f"{name} ")]
        assert any(re.fullmatch(rf"{name} insert_all_gathers: [0-9.]+ ms, (\d+) -> \1", line) for line in found)
        assert not any("plan_memory_for_peak" in line for line in found), "it changed something"
        assert any(re.fullmatch(rf"{name} (build|emit): [0-9.]+ ms", line) for line in found)
        news = [line for line in lines(records, logging.INFO) if line.startswith(name)]
        assert any(re.fullmatch(rf"{name} plan_memory_for_peak: [0-9.]+ ms, \d+ -> \d+", line) for line in news)
        (whole,) = [line for line in news if line.startswith(f"{name}: ")]
        assert re.fullmatch(rf"{name}: planned in [0-9.]+ ms, \d+ -> \d+ steps", whole)


def test_kernels_are_logged_as_built_and_then_as_cached(tmp_path):
    with collected("dcompile.kernels") as records:
        step(log="kernels", cache_dir=str(tmp_path))
        first = lines(records)
        records.clear()
        step(log="kernels", cache_dir=str(tmp_path))
        again = lines(records)
    (built,) = [line for line in first if "backward0: built" in line]
    names = set(built.rpartition(": ")[2].split(", "))
    assert names and re.search(r"backward0: built \d+ kernels, waited [0-9.]+ s for compilers: ", built)
    (cached,) = [line for line in again if line.startswith("backward0: ") and "in the cache: " in line]
    assert set(cached.rpartition(": ")[2].split(", ")) >= names and not any("built" in line for line in again)


def test_memory_is_logged_with_its_peak_and_who_holds_it():
    with collected("dcompile.memory") as records:
        step(log="memory")
    (whole,) = [line for line in lines(records, logging.INFO) if line.startswith("backward0: ")]
    assert re.search(r"arena [0-9.]+ K?i?B with \d+ buffers, peak [0-9.]+ KiB at step \d+ \(", whole)
    found = [line.removeprefix("backward0: ") for line in lines(records, logging.DEBUG) if "backward0: " in line]
    assert any(line.startswith("at the peak: ") and line.endswith("(donated input)") for line in found)
    assert any(line.startswith("donated inputs: ") for line in found)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_overlap_is_logged_for_each_collective():
    with collected("dcompile.overlap") as records:
        step(DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))), log="overlap")
    assert lines(records, logging.INFO)[0].startswith("backward0: 1 collectives, ")
    (line,) = [line for line in lines(records, logging.DEBUG) if "all_reduce" in line]
    for part in ("may start", ", starts ", "is waited for", "is needed", " us exposed, hidden behind "):
        assert part in line
    assert "forward0: no collectives" in lines(records)


@pytest.mark.usefixtures("alone")
def test_a_graph_from_the_cache_is_logged_on_every_channel(monkeypatch, tmp_path):
    monkeypatch.delenv("DCOMPILE_VERIFY")
    torch.manual_seed(0)
    found = {}
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            found = {channel: stack.enter_context(collected(f"dcompile.{channel}")) for channel in CHANNELS}
            channels = "passes,overlap=INFO,kernels,memory=INFO"
            step(DistributedDataParallel(nn.Linear(16, 8)), log=channels, cache_dir=str(tmp_path))
    assert "backward0: from the cache" in lines(found["passes"])
    assert any("loaded from the cache" in line for line in lines(found["kernels"]))
    assert any(line.startswith("backward0: 1 collectives, ") for line in lines(found["overlap"]))
    assert any("backward0: arena " in line for line in lines(found["memory"]))


@pytest.mark.parametrize("channel", ["overlap", "memory"])
def test_decisions_are_planned_again_to_be_logged(channel, monkeypatch, tmp_path):
    monkeypatch.delenv("DCOMPILE_VERIFY")
    for _ in range(2):
        with collected(f"dcompile.{channel}") as records:
            step(log=channel, cache_dir=str(tmp_path))
    assert lines(records, logging.DEBUG) and not any("from the cache" in line for line in lines(records))


# --- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "levels", "every_rank"),
    [
        ("", {}, False),
        ("passes", {"passes": logging.DEBUG}, False),
        ("passes=DEBUG, overlap=info,kernels,all", {"passes": 10, "overlap": 20, "kernels": 10}, True),
        ("all", {}, True),
        ("memory=CRITICAL,", {"memory": logging.CRITICAL}, False),
    ],
)
def test_levels_are_parsed(text, levels, every_rank):
    assert parse_log(text) == LogSetting(levels, every_rank)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel", "unknown log channel 'kernel', did you mean 'kernels'?"),
        ("passes,all=INFO", "unknown log channel 'all=INFO'"),
        ("dcompile.passes", "unknown log channel"),
        ("loops", "unknown log channel 'loops'; channels: passes, overlap, kernels, memory, all"),
        ("passes=INF", "unknown log level 'INF' in 'passes=INF', did you mean 'INFO'?"),
        ("passes=LOUD", "unknown log level 'LOUD' in 'passes=LOUD'; levels: DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("passes=", "unknown log level ''"),
        ("passes=10", "unknown log level '10'"),
    ],
)
def test_a_bad_channel_or_level_is_an_error_that_lists_the_valid_ones(text, message, monkeypatch):
    with pytest.raises(OptionError, match=re.escape(message)):
        Config.make(options={"log": text})
    monkeypatch.setenv("DCOMPILE_LOG", text)
    with pytest.raises(OptionError, match=re.escape(message)):
        Config.make()


def test_a_level_leaves_out_what_is_below_it():
    with collected("dcompile") as records:
        step(log="passes=INFO,kernels=ERROR")
    assert {(record.name, record.levelno) for record in records} == {("dcompile.passes", logging.INFO)}


def test_a_level_of_the_logger_does_what_the_option_does(level):
    level("dcompile", logging.DEBUG)
    with collected("dcompile") as records:
        step()
    assert {record.name for record in records} == {f"dcompile.{channel}" for channel in CHANNELS}
    records.clear()
    level("dcompile.passes", logging.WARNING)
    with collected("dcompile") as records:
        step(receipt=True)
    assert {record.name for record in records} == {
        "dcompile",
        "dcompile.kernels",
        "dcompile.memory",
        "dcompile.overlap",
    }


@pytest.mark.parametrize(
    ("log", "rank", "logged"),
    [
        ("passes", 0, ["line"]),
        ("passes", 1, []),
        ("passes,all", 1, ["rank 1: line"]),
        ("passes,all", 0, ["rank 0: line"]),
    ],
)
def test_ranks_beside_the_first_log_if_all_is_asked_for(log, rank, logged, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    with collected("dcompile.passes") as records:
        logs.log(Config(log=log), "passes", logging.DEBUG, "line")
    assert lines(records) == logged


# --- the user's own logging -------------------------------------------------------------------------------------------


def test_without_handlers_plain_lines_go_to_the_stderr_of_the_moment(monkeypatch):
    for number in range(2):
        now = io.StringIO()
        monkeypatch.setattr(sys, "stderr", now)
        logs.log(Config(log="passes"), "passes", logging.DEBUG, f"line {number}, 100 %s")
        logs.report(logging.WARNING, "careful")
        assert now.getvalue() == f"dcompile: [passes] line {number}, 100 %s\ndcompile: careful\n"


def test_records_reach_the_root_loggers_handlers_and_only_those(capsys):
    with collected("") as records:
        step(log="passes,memory=INFO", receipt=True)
    ours = [record for record in records if record.name.startswith("dcompile")]
    assert {record.name for record in ours} == {"dcompile", "dcompile.passes", "dcompile.memory"}
    receipt = [record for record in ours if record.name == "dcompile"]
    assert {record.levelno for record in receipt} == {logging.INFO}
    assert receipt[0].getMessage() == "Sequential: 1 graph, no graph break"
    assert Path(receipt[0].pathname).name == "api.py", "the caller, not the function that logs"
    assert capsys.readouterr().err == ""


def test_a_level_of_the_root_logger_is_for_the_scripts_own_lines(level):
    """As `logging.basicConfig(level=...)` sets it. A level of our loggers counts, and the receipt is printed anyway."""
    level("", logging.DEBUG)
    with collected("") as records:
        step(receipt=True)
    assert {record.name for record in records if record.name.startswith("dcompile")} == {"dcompile"}
    level("dcompile", logging.INFO)
    with collected("") as records:
        step()
    assert "dcompile.passes" in {record.name for record in records}


class Block(nn.Module):
    """A part of a model that is compiled by itself."""

    def __init__(self, width=16):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.linear(x))


def printed(function):
    """What a person sees of a function's receipts."""
    with collected("dcompile") as records:
        function()
    return [record.getMessage() for record in records if record.name == "dcompile" and record.levelno == logging.INFO]


def test_a_second_receipt_of_a_model_is_one_line_without_what_is_known():
    model = dcompile.compile(Block(), options={"receipt": True})
    training = printed(lambda: model(torch.ones(2, 16)).sum().backward())
    assert [line.partition(" ")[0] for line in training] == ["Block:", "no", training[2].partition(" ")[0], "note:"]
    assert RANDOM in training[3]
    with torch.no_grad():
        (evaluation,) = printed(lambda: model(torch.ones(2, 16)))
    assert evaluation.startswith("Block, inference: 1 graph, no graph break; no collectives; ")


def test_equal_blocks_are_told_once_as_long_as_they_live():
    def blocks():
        parts = [dcompile.compile(Block(), options={"receipt": True}) for _ in range(4)]
        other = dcompile.compile(Block(8), options={"receipt": True, "fallback_random": True})
        return parts, other

    def run(made):
        for part in made[0]:
            part(torch.ones(2, 16, requires_grad=True)).sum().backward()
        with torch.no_grad():
            for part in made[0]:
                part(torch.ones(2, 16))
        made[1](torch.ones(2, 8)).sum().backward()

    first = printed(lambda: run(made := blocks()))  # noqa: F841
    assert len(first) <= 8 and first[3].startswith("note: random numbers") and first[4].startswith("Block: as the one")
    assert first[5].startswith("Block, inference: 1 graph") and first[6].startswith(
        "Block: 1 graph, no graph break; no"
    )
    assert printed(lambda: run(blocks()))[:2] == first[:2]


def test_functions_have_a_line_each():
    functions = [dcompile.compile(f, options={"receipt": True}) for f in (double, half, dropped, dropped_too)]
    lines = printed(lambda: [function(torch.ones(3)) for function in functions])
    assert [line.partition(": ")[0] for line in lines] == ["double", "half", "dropped", "note", "dropped_too"]


def double(x):
    return x * 2


def half(x):
    return x / 2 - 1


def dropped(x):
    return nn.functional.dropout(x, 0.1)


def dropped_too(x):
    return nn.functional.dropout(x, 0.2) + 1


def test_the_loggers_level_silences_the_receipt_and_not_warnings(level):
    level("dcompile", logging.WARNING)
    with collected("dcompile") as records:
        step(receipt=True)
        logs.report(logging.WARNING, "careful")
    assert lines(records) == ["careful"]


def test_disabled_logging_is_silent():
    logging.disable(logging.CRITICAL)
    try:
        with collected("dcompile") as records:
            logs.report(logging.ERROR, "line")
            logs.log(Config(log="passes"), "passes", logging.DEBUG, "line")
    finally:
        logging.disable(logging.NOTSET)
    assert records == []


def test_nothing_is_attached_to_our_loggers():
    step(log=",".join(CHANNELS), receipt=True)
    names = ["dcompile", *(f"dcompile.{channel}" for channel in CHANNELS)]
    assert not any(logging.getLogger(name).handlers or logging.getLogger(name).level for name in names)


@pytest.mark.parametrize("stream", ["closed", "full", "other"])
def test_a_handler_that_cannot_write_breaks_nothing(stream, monkeypatch):
    handler, root = logging.StreamHandler(STREAMS[stream]()), logging.getLogger()
    root.addHandler(handler)
    try:
        with unusable(stream, monkeypatch, ("stderr",)):
            step(log=",".join(CHANNELS), receipt=True)
    finally:
        root.removeHandler(handler)


# --- progress ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(monkeypatch):
    """Make stderr a terminal, and show progress at once; read what was written to it. No fixture, as `unusable`."""
    screen, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    monkeypatch.setattr(logs, "AFTER_S", 0.0)
    with os.fdopen(side, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)

        def written():
            found = b""
            while select.select([screen], [], [], 0.2)[0]:  # the kernel hands over what was written some time later
                found += os.read(screen, 1 << 16)
            return found.decode()

        yield written
    os.close(screen)


def test_progress_is_a_line_that_moves_and_goes_away(monkeypatch):
    counts, what = iter(range(100)), "building kernels"
    with terminal(monkeypatch) as written:
        with logs.doing(Config(), "tracing"), logs.doing(Config(), lambda: f"{what}, {next(counts)} of 9"):
            time.sleep(1.0)  # it moves five times a second, and begins when tqdm is imported
        text = written()
    assert re.findall(rf"dcompile: {what}, (\d) of 9 \[00:00\]", text)[:2] == ["0", "1"] and "\n" not in text
    assert re.search(r"\r *\r$", text), "blank at last"
    assert not [thread for thread in threading.enumerate() if thread.name == "dcompile-progress"]


@pytest.mark.parametrize("why", ["progress", "receipt", "rank", "tqdm", "file", "closed", "soon over"])
def test_nothing_moves_where_it_should_not(monkeypatch, why):
    monkeypatch.setitem(os.environ, "RANK", "1" if why == "rank" else "0")
    if why == "tqdm":
        monkeypatch.setitem(sys.modules, "tqdm.std", None)
    with terminal(monkeypatch) as written:
        if why in ("file", "closed"):
            monkeypatch.setattr(sys, "stderr", io.StringIO() if why == "file" else closed())
        if why == "soon over":
            monkeypatch.setattr(logs, "AFTER_S", 5.0)
        with logs.doing(Config(progress=why != "progress", receipt=why != "receipt"), "tracing"):
            time.sleep(0.05)
        assert written() == "" and (why != "file" or sys.stderr.getvalue() == "")


def test_errors_pass_through_progress(monkeypatch):
    with terminal(monkeypatch), pytest.raises(ZeroDivisionError), logs.doing(Config(), "tracing"):
        raise ZeroDivisionError
    assert not logs._PROGRESS._doing


def test_drivers_tell_what_they_do(monkeypatch):
    told, begin = [], logs._PROGRESS.begin
    monkeypatch.setattr(logs._PROGRESS, "begin", lambda what: (told.append(re.sub(r"\d+", "N", what())), begin(what)))
    with terminal(monkeypatch):
        step(receipt=True)
    kinds = ("planning forward", "planning backward", "building kernels, N of N done", "tracing Sequential")
    assert {*kinds} <= {*told}


# --- torch's settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("artifact", "host"), [("output_code", True), ("kernel_code", False)])
def test_torchs_artifacts_show_our_code(artifact, host):
    torch._logging.set_logs(**{artifact: True})
    try:
        with collected("dcompile.kernels") as records:
            step()
    finally:
        torch._logging.set_logs()
    found = lines(records, logging.DEBUG)
    assert any(line.startswith("backward0: kernel fused_") and 'extern "C"' in line for line in found)
    assert any(line.startswith("backward0: host program\n") and "def call(" in line for line in found) == host
    with collected("dcompile.kernels") as records:
        step()
    assert not records, "no longer"


def test_torch_logs_names_our_loggers():
    """In a process of its own: torch reads TORCH_LOGS when it is imported."""
    script = (
        "import torch; from dcompile import logs; from dcompile.config import Config;"
        "logs.log(Config(), 'passes', 10, 'forward0 fuse: 1 ms'); logs.report(20, 'adapter=plain')"
    )
    environment = {**os.environ, "TORCH_LOGS": "+dcompile", "PYTHONPATH": str(ROOT), "DCOMPILE_RECEIPT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^V\S+ \S+ \d+ <string>:1\] forward0 fuse: 1 ms$", done.stderr, re.MULTILINE), "whoever logs it"
    assert re.search(r"^I\S+ \S+ \d+ <string>:1\] adapter=plain$", done.stderr, re.MULTILINE)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_steps_run_where_nobody_can_be_told(stream, monkeypatch):
    """Each door has two of the streams: it decides what is said, and `logs.write` alone meets the stream."""
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
        assert ended == [1, 1], "other ranks are told first, by what ends the process itself"
        heartbeat.end_at_exit()
    assert ended == [1, 1, 1]


def test_a_character_that_a_stream_cannot_encode_is_written_as_an_escape():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert logs.write(stream, "größer\n")
    assert raw.getvalue() == b"gr\\xf6\\xdfer\n"


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_write_says_whether_it_worked(stream):
    assert not logs.write(stream(), "line\n")
    usable = io.StringIO()
    assert logs.write(usable, "line\n") and usable.getvalue() == "line\n"


def test_streams_are_written_in_one_place():
    """Whoever writes to a stream by itself has to think of all that the tests above are about."""
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if path.relative_to(SOURCES).as_posix() in MAY_PRINT or not any(name in text for name in NAMES):
            continue
        for node in ast.walk(ast.parse(text)):
            stream = isinstance(node, ast.Attribute) and node.attr in NAMES
            own = stream and isinstance(node.value, ast.Name) and node.value.id == "sys"
            assert not own, f"{path}:{node.lineno}: report through dcompile.logs"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_does_not_end_up_in_a_progress_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=3, file=terminal, mininterval=0) as bar:
        bar.update()
        logs.report(logging.INFO, "1 graph")
        shown = terminal.getvalue()
    before, _, after = shown.partition("dcompile: 1 graph\n")
    assert before.endswith("\r") and "1/3" in after, "the bar is cleared before the line, and drawn again below it"


def test_a_dump_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    (tmp_path / "file").write_text("")
    config = Config(dump=str(tmp_path / "file"))
    for _ in range(2):
        logs.dump(config, "receipt.txt", "text")
    assert told.getvalue().count("cannot write") == 1
    logs.dump(Config(dump=str(tmp_path / "folder")), "receipt.txt", "\udc80")  # of a path that is no UTF-8
    assert (tmp_path / "folder/rank0/receipt.txt").read_text() == "\\udc80"


@pytest.mark.parametrize("value", [True, "here"])
def test_rank_0_says_once_where_a_dump_is(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(logs, "report", lambda level, text: told.append(text))
    monkeypatch.setattr(logs, "_DUMPS", Counter())
    config = Config.make(options={"dump": value})
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("RANK", "1")
        logs.own_dump(config)
    logs._DUMPS.clear()
    own, second = logs.own_dump(config), logs.own_dump(config)
    assert told == [f"programs and kernels are dumped to {tmp_path / own.dump}"]
    assert own.dump == ("dcompile_dump" if value is True else value) and second.dump == f"{own.dump}/model2"
    assert logs.own_dump(Config.make()).dump == ""


def test_a_pass_that_changed_nothing_leaves_no_file(tmp_path):
    config = Config(dump=str(tmp_path))
    logs.dump_change(config, "forward0/01_idle", "a\n", "a\n")
    logs.dump_change(config, "forward0/02_fuse", "a\n", "b\n")
    written = {path.name: path.read_text() for path in (tmp_path / "rank0/forward0").iterdir()}
    assert written.keys() == {"02_fuse.txt", "02_fuse.diff"} and "-a\n+b" in written["02_fuse.diff"]
