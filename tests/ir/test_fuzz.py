"""The fuzzer itself: valid, reproducible, and wide enough to be worth having."""

from collections import Counter

import numpy as np
import pytest

from dcompile.ir.interpret import execute
from dcompile.ir.nodes import Apply, Load, Reduce, Scan
from dcompile.ir.symbols import late_symbols, symbols_of
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_programs_are_valid_and_run(exact, symbolic):
    for seed in range(40):
        program, inputs = random_program(seed, exact=exact, symbolic=symbolic)
        verify(program)
        assert bool(symbols_of(program)) == symbolic and not late_symbols(program)
        outputs = execute(program, inputs).outputs
        assert len(outputs) == len(program.outputs) and outputs
        for output in outputs:
            if np.asarray(output).dtype.kind == "f":
                assert np.isfinite(output).all()
                assert not exact or (output == np.round(output)).all()


def test_the_seed_decides():
    assert repr(random_program(3)[0]) == repr(random_program(3)[0])
    assert repr(random_program(3)[0]) != repr(random_program(4)[0])


def test_every_kind_of_thing_turns_up():
    seen = Counter()
    for seed in range(150):
        program, _ = random_program(seed)
        mutated = set()
        for step in program.steps:
            mutated |= step.writes & set(program.inputs)
            for value in step.body:
                if isinstance(value, Load):
                    seen[f"load {value.dtype}"] += 1
                    seen["masked"] += value.mask is not None
                    seen["runtime"] += any(name[0] == "v" for name in value.index.variables)
                    seen["divided"] += not value.index.is_affine
                elif isinstance(value, Apply):
                    seen[value.op] += 1
                elif isinstance(value, Reduce):
                    seen[f"reduce {value.op}"] += 1
                elif isinstance(value, Scan):
                    seen[f"scan {value.op}"] += 1
            seen.update(f"store {store.mode}" for store in step.stores)
        seen["mutated"] += len(mutated)
    names = [f"load {d}" for d in ("bool", "int8", "int64", "uint8", "float16", "bfloat16", "float32", "float64")]
    names += ["masked", "runtime", "divided", "mutated", "where", "cast", "exp", "div", "store sum", "store max"]
    names += [f"reduce {op}" for op in ("sum", "max", "min", "argmax", "argmin", "any", "all")]
    names += [f"scan {op}" for op in ("sum", "prod", "max", "min", "logsumexp")]
    assert not [name for name in names if seen[name] < 3]
