"""The price list: what lines of a log count, how rows add up, and what a phrase says of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dcompile import pipeline
from tools import price_list


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("dcompile.passes", logging.INFO, "", 0, text, None, None)


def test_changes_of_a_pass_over_a_graph_are_counted_by_model() -> None:
    counter = price_list.HitCounter()
    for model, lines in (("a", ["f joint pad_matmuls: 0.1 ms, 3 changes", "f: planned in 2.0 ms"]), ("b", ["x: 1 ms"])):
        with counter.counting(model, "cpu"):
            for text in lines:
                counter.emit(line(text))
    assert counter.rows() == {"pad_matmuls": {"cpu": [1, "a (3)"]}} and counter.planned == {"cpu": ["a", "b"]}


def test_a_later_run_adds_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_list, "PRICES", tmp_path / "prices.json")
    for model in ("a", "b"):
        counter = price_list.HitCounter()
        with counter.counting(model, "gpu"):
            counter.add("fuse", 2)
        price_list.keep_hits(counter, price_list.read())
    prices = price_list.read()
    assert prices["fuse"] == {"hits": {"gpu": [2, "a (2)", "b (2)"]}} and prices["pad_matmuls"] == {"hits": {}}
    assert prices[price_list.ALL] == {"hits": {"gpu": [2]}} and {*prices} == {price_list.ALL, *price_list.row_names()}
    assert price_list.describe("fuse", prices) == "GPU: a (2), b (2)"


def test_a_phrase_says_hits_and_gains() -> None:
    hits, gain = {"cpu": [7, "a (1)", "b (1)"], "gpu": [1, "c (4)"]}, {"cpu_models/llama": 0.123, "x": -0.02}
    text = price_list.describe("p", {"p": {"hits": hits, "gain": gain}})
    assert text == "CPU: 7 models; GPU: c (4); cpu_models/llama: +12%; x: -2%"
    assert price_list.describe("none", {}) == "" and price_list.describe("p", {"p": {"hits": {}}}) == "no model"


def test_a_step_is_timed_against_the_first() -> None:
    (found,) = price_list.alternate([lambda: sum(range(40_000)), lambda: sum(range(80_000))])
    assert 0.2 < found[0] < 0.8, found[1]


def test_the_committed_list_knows_every_pass() -> None:
    lists = (pipeline.DYNAMO_PASSES, pipeline.JOINT_PASSES, pipeline.loop_passes(), pipeline.nest_passes())
    names = {row.name for rows in lists for row in rows}
    counted = {name for name, row in price_list.read().items() if "hits" in row} - {price_list.ALL}
    assert counted == names, "run: python -m tools.price_list count"
