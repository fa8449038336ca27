"""The tool itself: what it makes of records, the page, and a checkout of three tests."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.peers.__main__ import main
from tests.peers.kept import load, save
from tests.peers.report import VERDICTS, Outcome, Run, general, page, share, table
from tests.peers.session import Found, last_error, results
from tests.peers.suites import SUITES, files_of, sampled, selected

PASSED, FAILED = Run("passed"), Run("failed", "ValueError: no")
TAKEN = {"eligible": True, "graphs": 1, "reasons": []}
LEFT = {"eligible": False, "graphs": 1, "reasons": ["an all-reduce hook is set"]}


@pytest.mark.parametrize(
    ("runs", "receipts", "watches", "verdict"),
    [
        ({"dcompile": PASSED}, (LEFT, TAKEN), (), "taken over"),
        ({"dcompile": PASSED}, (LEFT,), (), "stays stock"),
        ({"dcompile": PASSED}, (), (), "nothing compiled"),
        ({"dcompile": Run("skipped", "needs 4 ranks")}, (), (), "skipped"),
        ({"dcompile": FAILED, "stock": FAILED}, (), (), "fails with stock as well"),
        ({"dcompile": FAILED, "stock": PASSED, "aot_eager": FAILED}, (), (), "fails with aot_eager as well"),
        ({"dcompile": FAILED, "stock": PASSED, "aot_eager": Run("failed", "TypeError: other")}, (), (), "own"),
        ({"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED}, (TAKEN,), (), "own"),
        ({"dcompile": Run("deadline"), "stock": PASSED, "aot_eager": PASSED}, (), (), "not done in time"),
        (
            {"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED, "inductor": FAILED},
            (TAKEN,),
            (),
            "fails with inductor as well",
        ),
        (
            {"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED, "inductor": PASSED, "aten_kernels": PASSED},
            (TAKEN,),
            (),
            "rounds otherwise",
        ),
        (
            {"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED, "left_to_torch": PASSED},
            (),
            ("unshard",),
            "watches the wrapper",
        ),
        (
            {"dcompile": Run("deadline"), "stock": PASSED, "aot_eager": PASSED, "left_to_torch": PASSED},
            (),
            ("unshard",),
            "not done in time",
        ),
        (
            {"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED, "left_to_torch": FAILED},
            (),
            ("unshard",),
            "own",
        ),
    ],
)
def test_verdicts(runs, receipts, watches, verdict):
    assert Outcome("m.C.test", runs, receipts, watches).verdict == verdict
    assert verdict in dict(VERDICTS)


def test_the_page_counts_verdicts_and_reasons_and_names_failures():
    outcomes = [
        Outcome("m.C.test_a", {"dcompile": PASSED}, (TAKEN,)),
        Outcome("m.C.test_b", {"dcompile": PASSED}, (LEFT,)),
        Outcome("m.C.test_c", {"dcompile": FAILED, "stock": PASSED, "aot_eager": PASSED}),
        Outcome("m.C.test_d", {"dcompile": Run("deadline"), "stock": FAILED}),
        Outcome("m.C.test_e", {"dcompile": Run("skipped", "needs 4 ranks")}),
        Outcome("m.C.test_f", {"dcompile": Run("skipped", "needs 8 ranks")}),
    ]
    assert table({"ddp": outcomes})[-1] == "| ddp | 6 | 1 of 3 (33%) | 1 | 1 | 0 | 0 | 1 | 0 | 1 | 0 | 0 | 0 | 2 |"
    text = page({"ddp": outcomes}, "torch 2.13.0 on x86_64")
    assert "- 1 x an all-reduce hook is set" in text and "- 2 x needs N ranks" in text
    assert "Own:\n\n- `m.C.test_c`: ValueError: no" in text
    assert "- `m.C.test_d`: not done within the deadline" in text
    assert "\n\n\n" not in text and text.endswith("\n") and not text.endswith("\n\n")


def test_the_newest_outcome_of_a_test_is_kept(tmp_path):
    file = tmp_path / "results.jsonl"
    assert load(file) == {}
    first = Outcome("m.C.test_a", {"dcompile": FAILED, "stock": PASSED}, (LEFT, LEFT), ("unshard",))
    other, again = Outcome("m.C.test_b", {"dcompile": PASSED}), Outcome("m.C.test_a", {"dcompile": PASSED}, (TAKEN,))
    save(file, "ddp", first)
    assert load(file) == {"ddp": [replace(first, receipts=(LEFT,))]}
    save(file, "ddp", other)
    save(file, "ddp", again)
    assert load(file) == {"ddp": [again, other]}


def test_reasons_lose_what_is_one_models_own():
    assert general("parameter layers.0.weight has a hook") == general("parameter head.bias has a hook")
    assert general("needs 4 ranks") == "needs N ranks"
    assert general("a break, at /home/me/lib/site-packages/torch/a.py:7") == "a break, at torch/a.py:N"


def test_records_of_a_child_that_ended_early():
    records = [
        {"kind": "begin", "test": "m.C.a"},
        {"kind": "receipt", "test": "__mp_main__.C.a", **TAKEN},
        {"kind": "watches", "test": "m.C.a", "what": "unshard"},
        {"kind": "watches", "test": "m.C.a", "what": "unshard"},
        {"kind": "end", "test": "m.C.a", "status": "passed", "text": ""},
        {"kind": "begin", "test": "m.C.b"},
    ]
    found = results(records, ["m.C.a", "m.C.b", "m.C.c"], late=True)
    assert found["m.C.a"] == Found(PASSED, (records[1],), ("unshard",))
    assert found["m.C.b"].run == Run("deadline") and "m.C.c" not in found
    assert results(records, ["m.C.b"], late=False)["m.C.b"].run == Run("failed", "the process ended")
    assert results([], ["m.C.b"], late=False)["m.C.b"].run.text == "the file could not be imported"


def test_the_error_inside_a_rank_is_told():
    text = """Traceback (most recent call last):
      File "x.py", line 3, in join
    RuntimeError: Process 0 exited with error code 10 and exception:
    Traceback (most recent call last):
    AssertionError: Tensor-likes are not close!
    """
    assert last_error(text) == "AssertionError: Tensor-likes are not close!"
    far = "Greatest absolute difference: 2.0 at index (1,) (up to 1e-05 allowed)"
    assert last_error(f"{text}\n\n{far}\n") == f"AssertionError: Tensor-likes are not close! {far}"
    assert last_error("RuntimeError: it was\n#5 c10::Error::Error(c10::SourceLocation) from ??:0") == (
        "RuntimeError: it was"
    )


def test_what_cannot_be_taken_over_is_not_counted_as_left():
    threads = {**LEFT, "reasons": ["ranks are threads of one process (torch.testing's threaded process group)"]}
    watched = {**LEFT, "reasons": ["nothing of it was compiled: a mode that observes operations is on"]}
    receipts = [(TAKEN,), ({**LEFT, "reasons": ["a module asks for sparse gradients"]},), (threads,), (watched,), ()]
    assert share([Outcome("m.C.test", {"dcompile": PASSED}, given) for given in receipts]) == "1 of 2 (50%)"
    assert share([]) == "0 of 0"
    assert last_error("needs 4 ranks") == "needs 4 ranks"


def test_files_and_tests_of_a_suite(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkout of PyTorch"):
        files_of(SUITES["fsdp2"], tmp_path)
    folder = tmp_path / "test/dynamo"
    folder.mkdir(parents=True)
    for name in ("test_misc.py", "test_repros.py"):
        (folder / name).touch()
    assert [path.name for path in files_of(SUITES["dynamo"], tmp_path, ["misc"])] == ["test_misc.py"]
    tests = ["m.Reducer.test_one", "m.DistributedDataParallelTest.test_two", "m.Gloo.test_ddp_three"]
    assert selected(tests, SUITES["ddp"], []) == tests[1:]
    assert selected(tests, SUITES["ddp"], ["three", "one"]) == tests[2:]
    assert selected(tests, SUITES["fsdp2"], ["test_*o*e"]) == [tests[0]]


def test_a_sample_is_spread_over_all_files():
    first, second = Path("a.py"), Path("b.py")
    tests = {first: ["1", "2", "3", "4"], second: ["5", "6"]}
    assert sampled(tests, 0) == sampled(tests, 9) == tests
    assert sampled(tests, 3) == {first: ["1", "3"], second: ["5"]}


@pytest.mark.full
def test_a_checkout_is_run_each_test_under_a_deadline(tmp_path, monkeypatch):
    """One test passes compiled, one fails eagerly as well, one waits for ever; the rest goes on behind it."""
    folder = tmp_path / "checkout/test/dynamo"
    folder.mkdir(parents=True)
    code = """
        import time
        import unittest
        import torch

        class T(unittest.TestCase):
            def test_compiled(self):
                self.assertEqual(torch.compile(lambda x: x + 1)(torch.ones(2)).sum(), 4)

            def test_fails(self):
                self.assertEqual(torch.compile(lambda x: x + 1)(torch.ones(2)).sum(), 5)

            def test_never_ends(self):
                time.sleep(600)

            def test_skipped(self):
                self.skipTest("not here")
    """
    (folder / "test_small.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    output = tmp_path / "page.md"
    arguments = ["--pytorch", str(tmp_path / "checkout"), "--suite", "dynamo", "--output", str(output)]
    assert main([*arguments, "--deadline", "30"]) == 0
    assert "| dynamo | 4 | 1 of 1 (100%) | 1 | 0 | 0 | 0 | 0 | 0 | 2 | 0 | 0 | 0 | 1 |" in output.read_text()
    assert "`test_small.T.test_never_ends`: not done within the deadline" in output.read_text()


@pytest.mark.full
def test_two_ranks_of_a_checkout_are_taken_over_and_say_so(tmp_path, monkeypatch):
    """Ranks are forked, and four asked for are two; what they record is read."""
    folder = tmp_path / "checkout/test/distributed"
    folder.mkdir(parents=True)
    code = """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.testing._internal.common_distributed import MultiProcessTestCase

        class DdpTest(MultiProcessTestCase):
            @property
            def world_size(self):
                return 4

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def test_ddp_step(self):
                store = dist.FileStore(self.file_name, self.world_size)
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
                model = DistributedDataParallel(torch.nn.Linear(2, 2))
                for _ in range(2):
                    model(torch.ones(1, 2) * self.rank).sum().backward()
                self.assertEqual(model.module.weight.grad, torch.full((2, 2), 1.0))
                dist.destroy_process_group()
    """
    (folder / "test_c10d_gloo.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("DCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    output, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    arguments = ["--pytorch", str(tmp_path / "checkout"), "--suite", "ddp", "--output", str(output)]
    arguments += ["--results", str(results), "--note", "files of this test", "--deadline", "60"]
    assert main(arguments) == 0
    assert "| ddp | 1 | 1 of 1 (100%) | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in output.read_text()
    assert "files of this test" in output.read_text()
    (outcome,) = load(results)["ddp"]
    assert outcome.verdict == "taken over"
    assert main([*arguments, "--new"]) == 0 and len(results.read_text().splitlines()) == 1
