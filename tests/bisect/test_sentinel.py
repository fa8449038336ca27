"""The sentinel finds planted faults while a model trains, within two periods, and raises no false alarm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcompile
from dcompile.bisect.sentinel import REPLACED, Sentinel
from dcompile.collectives.contract import ProgramReport
from dcompile.config import Config
from dcompile.errors import OptionError, WrongResultError
from tests.distributed.harness import Ranks
from tests.faults.fault_models import FEW, make
from tests.faults.planted import FAULTS, Fault

PERIOD = 3
CASE = "tests.bisect.rank_cases:watched"


def watched(module: torch.nn.Module, folder: Path, **options: Any) -> Any:
    torch.compiler.reset()
    own = {"sentinel": PERIOD, "receipt": False, "cache_dir": str(folder), "dump": str(folder / "dump")}
    return dcompile.compile(module, options=own | options)


def step(call: Any, x: torch.Tensor, module: torch.nn.Module) -> list[torch.Tensor]:
    x.grad = None
    module.zero_grad()
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", FEW)
def test_a_correct_model_raises_no_alarm(model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module, x = make(model)
    module, x = module.to(dtype), x.detach().to(dtype).requires_grad_()
    compiled = watched(module, tmp_path, sentinel=1)
    for seed in range(20):
        torch.manual_seed(seed)
        step(compiled, torch.randn_like(x).requires_grad_(), module)
    receipt = dcompile.receipt(module)
    assert REPLACED not in receipt.fallbacks and not [note for note in receipt.notes if "sentinel" in note]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_found_within_two_periods(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")
    module, x = make(fault.model)
    stock, _ = make(fault.model)
    with fault.plant():
        compiled = watched(module, tmp_path)
        for _ in range(2 * PERIOD):
            step(compiled, x, module)
            stock(x.detach())  # statistics change in each call
    receipt = dcompile.receipt(module)
    if fault.kind == "pass" and fault.place == "keep_rows_contiguous":
        assert REPLACED not in receipt.fallbacks, (
            "ATen runs the graph that the pass has made: bisect compares with eager"
        )
        return
    assert receipt.fallbacks[REPLACED]
    (note, *_) = (note for note in receipt.notes if note.startswith("sentinel: "))
    assert fault.place in note or "repro.py has its inputs" in note
    assert note in capsys.readouterr().err


def test_from_the_miss_on_results_are_atens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")
    fault = next(fault for fault in FAULTS if fault.name == "sub is printed the other way")
    (module, x), (stock, _) = make(fault.model), make(fault.model)
    with fault.plant():
        compiled = watched(module, tmp_path)
        for _ in range(2 * PERIOD):
            step(compiled, x, module)
        ours = step(compiled, x, module)
    for got, wanted in zip(ours, step(stock, x, stock), strict=True):
        torch.testing.assert_close(got, wanted)
    assert list((tmp_path / "dump").rglob("repro.py"))


def test_the_job_stops_if_it_is_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")
    module, x = make(FAULTS[0].model)
    with FAULTS[0].plant(), pytest.raises(WrongResultError, match=r"sentinel: forward0 in call \d: .*on_miss='stop'"):
        compiled = watched(module, tmp_path, on_miss="stop")
        for _ in range(2 * PERIOD):
            step(compiled, x, module)


def test_every_period_has_one_check_of_each_program_and_ranks_agree_on_it() -> None:
    first, second = (Sentinel(Config(sentinel=5)) for _ in range(2))
    names = ("forward0", "backward0", "inference1")
    checks = {name: [first.due(name, True) for _ in range(100)] for name in names}
    assert checks == {name: [second.due(name, True) for _ in range(100)] for name in names}
    assert all(sum(due[at : at + 5]) == 1 for due in checks.values() for at in range(0, 100, 5))
    assert len({tuple(due) for due in checks.values()}) == 3, "not all in one step"


def test_a_period_is_a_number_of_calls() -> None:
    with pytest.raises(OptionError, match="sentinel=-1 should be a number of calls"):
        Config.make(options={"sentinel": -1})


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop()


def test_two_ranks_raise_no_false_alarm(pair: Ranks) -> None:
    for ours, stock, found, error in pair.run(CASE, 200, fault="", steps=6):
        assert ours == pytest.approx(stock, rel=1e-5) and not found and not error


def test_a_fault_of_one_rank_is_known_to_the_other(pair: Ranks) -> None:
    """The rank without the fault is right but for its average, so that it names the collective; both change kernels."""
    (ours, stock, found, error), (_, _, here, failed) = pair.run(CASE, 200, fault="one rank", steps=6)
    assert ours[0] == pytest.approx(stock[0]), "forwards are right"
    assert not error and not failed and any(REPLACED in note for note in found + here)
    assert any("backward0" in note and "collective" in note for note in found)
    assert any("backward0" in note and "pass plan_memory" in note for note in here)


def test_a_wrong_collective_ends_the_job_on_both_ranks(pair: Ranks) -> None:
    for _, _, _, error in pair.run(CASE, 200, fault="divisor", steps=8):
        assert "no kernel is at fault" in error


@pytest.mark.parametrize("accumulate", (False, True))
def test_sharded_ranks_raise_no_false_alarm(pair: Ranks, accumulate: bool) -> None:
    for ours, stock, found, error in pair.run(CASE, 200, fault="", steps=8, wrapper="fsdp2", accumulate=accumulate):
        assert ours == pytest.approx(stock, rel=1e-5) and not found and not error


def test_a_wrong_kernel_is_found_where_parameters_are_sharded(pair: Ranks) -> None:
    for _, _, found, error in pair.run(CASE, 200, fault="mul is printed as add", steps=6, wrapper="fsdp2"):
        assert any("forward0" in note and "kernel" in note for note in found) and not error


def test_a_wrong_reduce_scatter_ends_the_job_on_both_ranks(pair: Ranks) -> None:
    for _, _, _, error in pair.run(CASE, 200, fault="scatter", steps=8, wrapper="fsdp2"):
        assert "no kernel is at fault" in error


def test_what_is_not_checked_is_a_note_of_the_receipt() -> None:
    sentinel, report = Sentinel(Config(sentinel=1)), ProgramReport()
    sentinel.leave("forward0", "ATen does not evaluate it", report)
    assert report.notes == ["sentinel: forward0 is not checked: ATen does not evaluate it"]
    assert "forward0" in sentinel.unchecked


def test_steps_with_the_update_in_the_backward_are_checked(tmp_path: Path) -> None:
    module, x = make("perceptron")
    stock, _ = make("perceptron")
    torch.compiler.reset()
    options = {"sentinel": 1, "receipt": False, "cache_dir": str(tmp_path)}
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, stock))
    dcompile.compile(module, optimizer=optimizer, options=options)
    for _ in range(4):
        for model, its in ((module, optimizer), (stock, other)):
            model(x.detach()).square().sum().backward()
            its.step()
            its.zero_grad()
    for got, wanted in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)
    receipt = dcompile.receipt(module)
    assert REPLACED not in receipt.fallbacks and not [note for note in receipt.notes if "sentinel" in note]
    assert "the updates of 3 steps ran in the backward's program" in str(receipt)
