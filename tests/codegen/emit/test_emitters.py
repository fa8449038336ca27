"""Every target spells every op: whoever adds an op or a target is told what is missing."""

import importlib
import pkgutil

import pytest

from dcompile.codegen import emit
from dcompile.codegen.emit.target import Emitter
from dcompile.ir.ops import OPS

MODULES = [importlib.import_module(found.name) for found in pkgutil.walk_packages(emit.__path__, f"{emit.__name__}.")]
EMITTERS = {
    value.language: value for module in MODULES for value in vars(module).values() if isinstance(value, Emitter)
}


def test_the_targets_that_there_are_were_found():
    assert "c++" in {language.lower() for language in EMITTERS}


@pytest.mark.parametrize("language", EMITTERS)
def test_every_op_has_a_spelling_with_its_arguments(language):
    spelling = EMITTERS[language].spelling
    assert spelling.keys() == OPS.keys()
    for name, op in OPS.items():
        words = [f"<{number}>" for number in range(op.arity)]
        text = spelling[name].format(*words, dtype="DTYPE")
        assert all(word in text for word in words), f"{name}: {text}"
