"""The dump directory: a disk that cannot be written to is reported once."""

import io
import sys

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
