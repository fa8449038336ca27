"""The dump directory: rank 0 says once where it is, and a disk that cannot be written to is reported once."""

import io
import sys
from collections import Counter

import pytest

from dcompile import artifacts
from dcompile.config import Config


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


@pytest.mark.parametrize("value", [True, "here"])
def test_rank_0_says_once_where_a_dump_is(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(artifacts, "report", lambda level, text: told.append(text))
    monkeypatch.setattr(artifacts, "_DUMPS", Counter())
    config = Config.make(options={"dump": value})
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("RANK", "1")
        artifacts.own_dump(config)
    artifacts._DUMPS.clear()
    own, second = artifacts.own_dump(config), artifacts.own_dump(config)
    assert told == [f"programs and kernels are dumped to {tmp_path / own.dump}"]
    assert own.dump == ("dcompile_dump" if value is True else value) and second.dump == f"{own.dump}/model2"
    assert artifacts.own_dump(Config.make()).dump == ""


def test_a_pass_that_changed_nothing_leaves_no_file(tmp_path):
    config = Config(dump=str(tmp_path))
    artifacts.dump_change(config, "forward0/01_idle", "a\n", "a\n")
    artifacts.dump_change(config, "forward0/02_fuse", "a\n", "b\n")
    written = {path.name: path.read_text() for path in (tmp_path / "rank0/forward0").iterdir()}
    assert written.keys() == {"02_fuse.txt", "02_fuse.diff"} and "-a\n+b" in written["02_fuse.diff"]
