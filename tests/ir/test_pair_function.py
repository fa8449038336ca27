"""Functions of pairs as texts: what they read, and what they return."""

from __future__ import annotations

import pytest

from dcompile.errors import ParseError
from dcompile.ir.index import as_index
from dcompile.ir.nodes import Load
from dcompile.ir.pair_function import parse_pair_function

CAPPED = """\
v1 = cast(h[0]:int32, int64)
v2 = c0[v1]:bfloat16
v3 = cast(v2, float32)
v5 = mul(score[0]:float32, v3)
result[0] = tanh(v5)"""


def test_a_text_is_what_it_was_made_of():
    function = parse_pair_function(CAPPED)
    again = parse_pair_function(str(function))
    assert str(again) == str(function) and again == function
    assert function.reads == {"h", "c0", "score"} and not function.is_argument("score") and not function.is_true


def test_tensors_get_the_programs_buffers():
    function = parse_pair_function(CAPPED).with_buffers({"c0": ("slopes", 8)})
    (load,) = [value for value in function.body if isinstance(value, Load) and value.buffer == "slopes"]
    assert load.index.constant is None and (load.index - as_index(8)).variables == {"v1"}
    assert function.reads == {"h", "slopes", "score"}


@pytest.mark.parametrize(("text", "argument"), [("result[0] = score[0]:float32", "score"), ("result[0] = True", "")])
def test_trivial_functions_are_recognised(text, argument):
    function = parse_pair_function(text)
    assert function.is_true == (not argument) and function.is_argument("score") == bool(argument)


def test_a_broken_text_is_refused():
    with pytest.raises(ParseError):
        parse_pair_function("result[0] = unknown(score[0]:float32)")


def test_a_conversion_to_the_same_dtype_is_none():
    """The graph of a bias's gradient has one where scores were traced in 16 bits."""
    assert parse_pair_function("v0 = grad[0]:float32\nresult[0] = cast(v0, float32)").is_argument("grad")
    assert not parse_pair_function("v0 = grad[0]:float32\nresult[0] = cast(v0, int32)").is_argument("grad")
