"""Exposed, queued, skewed and wire time, and what is said about them, on steps made by hand."""

import json
import xml.etree.ElementTree as ET

import pytest

from dcompile.explain.export import save_timeline, timeline_lines, trace
from dcompile.explain.svg import MEANING, draw_comparison, draw_timeline, ticks
from dcompile.explain.timeline import Timeline, bars, caption, covered_seconds, duration, label, steps_of
from dcompile.runtime.measure.instrumentation import CollectiveTiming, InstrumentedStatement, ProgramCallTiming

MS = 1e-3


def statement(module, *buckets):
    return InstrumentedStatement("k1", (f"{module}: aten.mm.default (m.py:1)",), frozenset(buckets))


def call(program, begin, end, spans, exchanges=(), statements=()):
    return ProgramCallTiming(program, tuple(statements), begin, end, list(spans), list(exchanges))


def one_step(at=0.0):
    """Forward 10 ms, backward 20 ms with two buckets, of which the second is waited for, optimizer 5 ms."""
    head, body, tail = statement("head", "bucket0"), statement("body"), statement("tail", "bucket1")
    first = CollectiveTiming("all_reduce", "bucket0", 4 << 20, 0, at + 16 * MS, at + 16 * MS, at + 28 * MS, before=2)
    second = CollectiveTiming("all_reduce", "bucket1", 2 << 20, 2, at + 26 * MS, at + 26 * MS, at + 40 * MS, before=2)
    first.wait_begin = first.wait_end = second.wait_begin = at + 30 * MS
    second.wait_end = at + 40 * MS
    spans = [(0, at + 10 * MS, at + 16 * MS), (1, at + 16 * MS, at + 20 * MS), (2, at + 20 * MS, at + 26 * MS)]
    return [
        call("forward0", at, at + 10 * MS, [(0, at, at + 10 * MS)], (), [statement("embed")]),
        call("backward0", at + 10 * MS, at + 40 * MS, spans, [first, second], [head, body, tail]),
    ], ("AdamW", at + 40 * MS, at + 45 * MS)


GROUPS = {("backward0", "bucket0"): "ddp", ("backward0", "bucket1"): "ddp"}


def timeline(latest=None, steps=1, device="cpu", **more):
    calls, updates = [], []
    for number in range(steps):
        made, update = one_step(number * 45 * MS)
        calls += made
        updates.append(update)
    found = steps_of(calls, updates, 0.0, steps * 45 * MS, latest, GROUPS)
    return Timeline("Net", 0, 2, device, found, **more)


def test_what_a_step_was_spent_on():
    step = timeline().typical
    assert step.seconds == pytest.approx(45 * MS)
    assert step.compute == pytest.approx((10 + 16 + 5) * MS)
    assert step.communication == pytest.approx((40 - 16) * MS)
    assert step.exposed == pytest.approx(10 * MS)
    assert step.overlapped == pytest.approx((26 - 16) * MS)
    assert "exposed 10 ms (22.2% of the step)" in caption(step)
    assert covered_seconds([(0, 2), (1, 3), (5, 6)]) == 4


def test_a_collective_waits_for_the_link_and_for_other_ranks():
    first, second = timeline(latest=[(20 * MS, 1), (26 * MS, 0)]).collectives
    assert first.skew == pytest.approx(4 * MS) and first.latest_rank == 1
    assert first.seconds == pytest.approx(8 * MS) and first.exposed == 0 and first.queued == 0
    assert second.queued == pytest.approx(2 * MS) and second.skew == 0  # behind the first, which ends at 28
    assert second.seconds == pytest.approx(12 * MS) and second.exposed == pytest.approx(10 * MS)
    assert (first.producer, second.producer, second.consumer) == ("head", "tail", "the end of the program")
    assert timeline().collectives[0].skew is None, "nobody said when the others came"
    made, update = one_step()
    aside = Timeline("Net", 0, 2, "cpu", steps_of(made, [update], 0, 45 * MS, None, GROUPS, serial=False)).collectives[
        1
    ]
    assert aside.queued == 0 and aside.seconds == pytest.approx(14 * MS), "Gloo exchanges both at once"


def test_what_would_change_it():
    def advice(latest=None, **changes):
        made, update = one_step()
        for name, value in changes.items():
            setattr(made[1].exchanges[1], name, value)
        return Timeline("Net", 0, 2, "cpu", steps_of(made, [update], 0, 45 * MS, latest, GROUPS)).collectives

    first, second = advice()
    assert "hidden" in first.advice and "smaller bucket_cap_mb" in second.advice
    assert "larger bucket_cap_mb" in advice(nbytes=4096)[1].advice
    scatter, gather = (advice(kind=kind)[1].advice for kind in ("reduce_scatter", "all_gather"))
    assert "set_requires_gradient_sync" in scatter and "reshard_after_forward=False" in gather
    late = advice(latest=[(16 * MS, 0), (38 * MS, 1)])[1]
    assert late.exposed_skew == pytest.approx(8 * MS) and "rank 1 comes later" in late.advice
    made, update = one_step()
    made[1].exchanges[0].ended = 36 * MS
    queued = Timeline("Net", 0, 2, "cpu", steps_of(made, [update], 0, 45 * MS, None, GROUPS)).collectives[1]
    assert queued.queued == pytest.approx(10 * MS) and "waits for others" in queued.advice


def test_steps_end_with_the_optimizer_or_where_a_forward_follows_a_backward():
    assert [round(step.seconds / MS) for step in timeline(steps=3).steps] == [45, 45, 45]
    (one, _), (two, _) = one_step(), one_step(50 * MS)
    assert [round(s.seconds / MS) for s in steps_of([*one, *two], [], 0, 100 * MS, None, GROUPS)] == [50, 50]
    twice = [("SGD", 40 * MS, 41 * MS), ("AdamW", 41 * MS, 45 * MS)]  # two optimizers, one step
    assert [round(step.seconds / MS) for step in steps_of(one, twice, 0, 45 * MS, None, GROUPS)] == [45]


def test_labels():
    assert label("k1", ("a.b: aten.mm.default (m.py:1)", "a.b: aten.t.default (m.py:1)")) == "a.b"
    assert label("k1", ("a: x (m)", "b: y (m)", "c: z (m)")) == "a, b, ..."
    assert label("k1", ("aten.add.Tensor (m.py:3)",)) == "aten.add.Tensor" and label("k1", ()) == "k1"


def test_a_picture_has_the_same_lengths(tmp_path):
    found = timeline(latest=[(20 * MS, 1), (26 * MS, 0)])
    tree = ET.fromstring(draw_timeline(found))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [(r.find(f"{space}title").text, float(r.get("width"))) for r in tree.iter(f"{space}rect") if len(r)]
    scale = 860 / (45 * MS)
    assert dict(drawn)["waits for bucket1: 10 ms"] == pytest.approx(10 * MS * scale, abs=0.01)
    assert dict(drawn)["all_reduce bucket1, 2.0 MiB: 12 ms, 10 ms exposed"] == pytest.approx(12 * MS * scale, abs=0.01)
    assert [bar.kind for bar in bars(found.typical) if bar.lane == "communication"] == [
        "other rank late", "on the wire", "behind another", "on the wire",
    ]  # fmt: skip
    assert len(bars(found.typical, finest=8 * MS)) < len(bars(found.typical))
    assert ticks(0.045) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert save_timeline(found, tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_two_steps_on_one_axis():
    """The difference is marked where the shorter step ends, and a picture that is opaque reads on any page."""
    space = "{http://www.w3.org/2000/svg}"
    long, calls = timeline(notes=("said",)), one_step()
    short = Timeline("Net", 0, 2, "cpu", steps_of(*calls[:1], [("AdamW", 40 * MS, 41 * MS)], 0, 41 * MS, None, GROUPS))
    for names, word, colour in ((("a", "b"), "saved", "#117733"), (("b", "a"), "longer", "#aa2233")):
        made = {"a": long, "b": short}
        tree = ET.fromstring(draw_comparison({name: made[name] for name in names}))
        texts = [found.text for found in tree.iter(f"{space}text")]
        share = "9%" if word == "saved" else "10%"
        assert {f"4 ms ({share}) {word}", "a: 45 ms", "b: 41 ms", "said", MEANING} <= set(texts)
        assert any(text.startswith("a: on the wire 24 ms, of which 42% while") for text in texts)
        rectangles = [found.attrib for found in tree.iter(f"{space}rect")]
        assert (rectangles[0]["width"], rectangles[0]["fill"]) == (tree.get("width"), "#ffffff")
        (marked,) = [found for found in rectangles if found.get("stroke") == colour]
        assert float(marked["width"]) == pytest.approx(4 * 860 / 45, abs=0.01)
        assert float(marked["x"]) == pytest.approx(120 + 41 * 860 / 45, abs=0.01)
        assert {found.get("font-size") for found in tree.iter(f"{space}text")} == {"14"}
    assert [duration(seconds) for seconds in (1.424, 0.0123, 85e-6)] == ["1.42 s", "12.3 ms", "85 us"]


def test_a_trace_for_perfetto():
    events = json.loads(trace(timeline(steps=2)))["traceEvents"]
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(named) == {"compute", "communication", "steps"}
    steps = [e for e in events if e["tid" if "tid" in e else "pid"] == named["steps"] and e["ph"] == "X"]
    assert [(e["name"], round(e["dur"])) for e in steps] == [("step 0", 45000), ("step 1", 45000)]
    assert all(e["dur"] >= 0 and e["pid"] == 0 for e in events if e["ph"] == "X")


def test_the_table(tmp_path):
    predicted = {("backward0", "bucket0"): 9 * MS}
    found = timeline(notes=("said",), predicted=predicted, device="a GPU")
    text = "\n".join(timeline_lines(found))
    assert "all_reduce bucket0" in text and "4.0 MiB" in text and "9 ms" in text and "unknown" in text
    assert "  backward0 bucket1: starts after tail; the end of the program waits 10 ms" in text
    assert "note: said" in text
    page = save_timeline(found, tmp_path / "x.html").read_text()
    on_cpu = "\n".join(timeline_lines(timeline(predicted=predicted, steps=2, left_out=1)))
    assert "predicted" in text and "predicted" not in on_cpu and "unknown" in on_cpu
    assert "a GPU; 1 step:" in text and "cpu; medians of 2 steps, without the first, which prepares calls:" in on_cpu
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_timeline(found, tmp_path / "none" / "x.html")
    assert "<svg" in page and "://" not in page.replace("http://www.w3.org/2000/svg", "")
