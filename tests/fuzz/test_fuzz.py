"""Programs that once failed pass now; the search finds a planted fault and shrinks it to what it is about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from dcompile.ir.buffers import Buffer
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Program, View
from tests.fuzz import host_copies
from tests.fuzz import keep as keeping
from tests.fuzz.__main__ import failure, search, smallest
from tests.fuzz.checks import Check, checks, first_difference
from tests.fuzz.keep import KEPT, keep, kept_case
from tests.fuzz.torch_checks import TorchCheck, torch_checks
from tests.fuzz.torch_session import TorchProgram

LOOPS = {check.name: check for check in checks()}
CHECKS = LOOPS | {check.name: check for check in torch_checks()}


OF_ONE_PROCESS = sorted(set(KEPT.glob("*.json")) - set(KEPT.glob("training_*.json")))


@pytest.mark.parametrize("path", OF_ONE_PROCESS, ids=lambda path: path.stem)
def test_what_once_failed(path):
    name, case = kept_case(path)
    assert failure(CHECKS[name], case) is None


@pytest.mark.parametrize("name", LOOPS)
def test_every_check_passes_on_a_few_programs(name):
    assert search(CHECKS[name], range(3)) == []


@pytest.mark.usefixtures("compiled_anew")
def test_torch_programs_do_as_in_eager_mode():
    assert search(CHECKS["torch programs on ATen"], range(2)) == []


class Planted(TorchCheck):
    """What has two dimensions comes back with one."""

    def compiled(self, module):
        return lambda *args: [x.flatten() if x.dim() == 2 else x for x in tree_leaves(module(*args))]

    def by_aot(self, module):
        return module


def test_a_planted_fault_in_a_module_is_found_and_its_program_shrunk(tmp_path, monkeypatch):
    check = Planted("planted", size=4)
    (seed, text), *_ = search(check, range(4))
    program = smallest(check, seed, text)
    assert len(program.forward) <= 1 and len(program.results) == len(program.steps) == 1
    monkeypatch.setattr(keeping, "KEPT", tmp_path)
    assert kept_case(keep("planted", seed, program)) == ("planted", program) and failure(check, program)


@pytest.mark.parametrize("theirs", [KeyError, ValueError])
def test_an_error_is_known_where_aot_eager_ends_with_one_of_the_same_type(theirs):
    def ending(error):
        def compiled(*args):
            raise error("as planted")

        return lambda module: torch.compile(module, backend=lambda gm, inputs: compiled())

    class Ending(TorchCheck):
        compiled, by_aot = staticmethod(ending(KeyError)), staticmethod(ending(theirs))

    program = TorchProgram(
        ("a = leaf(1, (2,), torch.float32)", "b = c = a"), (), ("a + 1",), ("r0 = call(model, a, b, c)",)
    )
    found = Ending("planted").difference(program)
    assert found is None if theirs is KeyError else found.startswith("error: step 3: error: KeyError:")


def test_what_fails_once_alone_is_kept_whole(monkeypatch):
    check = TorchCheck("planted")
    monkeypatch.setattr(TorchCheck, "run", lambda check, cases: [None for _ in cases])
    assert smallest(check, 3, "failed: out of time") == check.case(3)


def with_tanh_for_exp(program: Program) -> Program:
    """A pass that is wrong."""
    steps = []
    for step in program.steps:
        wrong = [replace(v, op="tanh") if isinstance(v, Apply) and v.op == "exp" else v for v in step.body]
        steps.append(replace(step, body=tuple(wrong)))
    return replace(program, steps=tuple(steps))


def raising(program: Program) -> Program:
    if any(isinstance(v, Apply) and v.op == "exp" for step in program.steps for v in step.body):
        raise KeyError("exp")
    return program


@pytest.mark.parametrize("wrong", [with_tanh_for_exp, raising])
def test_a_planted_fault_is_found_and_shrunk_to_one_loop(wrong, tmp_path, monkeypatch):
    def run(cases):
        return [first_difference(p, interpret(p, inputs), interpret(wrong(p), inputs)) for p, inputs in cases]

    check = Check("planted", False, 8, run)
    (seed, text), *_ = search(check, range(40))
    program, inputs = smallest(check, seed, text)
    assert len(program.steps) == len(program.outputs) == 1
    assert len(program.steps[0].body) <= 4 and any(
        isinstance(v, Apply) and v.op == "exp" for v in program.steps[0].body
    )
    monkeypatch.setattr(keeping, "KEPT", tmp_path)
    name, (again, arrays) = kept_case(keep("planted", seed, (program, inputs)))
    assert (name, again) == ("planted", program) and arrays.keys() == inputs.keys()
    assert all(np.array_equal(arrays[n], inputs[n]) and arrays[n].dtype == inputs[n].dtype for n in inputs)
    assert failure(check, (again, arrays)) is not None


def test_differences_are_said_and_nan_is_equal_to_nan():
    program = Program("p", (), (View("y", (2, 3), (3, 1)),), (Buffer("y", "float64", (2, 3), (3, 1)),), ())
    one, two = np.zeros((2, 3)), np.zeros((2, 3))
    one[1, 2] = two[1, 2] = np.nan
    assert first_difference(program, [one], [two]) is None
    two[1, 1] = 0.5
    text = "y[1, 1] is np.float64(0.5), not np.float64(0.0) (1 of 6 differ)"
    assert first_difference(program, [one], [two]) == text
    assert first_difference(program, [one], [two], rtol=1, atol=1) is None


def test_a_race_of_copies_is_found_where_the_verifier_accepts_it(monkeypatch):
    monkeypatch.setattr(host_copies, "verify", lambda program: None)
    found = search(LOOPS["host copies"], range(6))
    assert found and all("late" in text or "IndexError" in text for _, text in found)
