"""Predicates of attention: their text, their reach, and what they are called."""

import pytest

from dcompile.errors import ParseError
from dcompile.ir.index import var
from dcompile.ir.piecewise import Test as Condition
from dcompile.ir.predicate import Predicate, allowed_pairs, parse_predicate

Q, K, B, Z0, Z1, S0 = map(var, ("q", "k", "b", "z0", "z1", "s0"))


def both(*conditions):
    """True where all conditions are at least 0."""
    tree = True
    for condition in reversed(conditions):
        tree = Condition(condition, tree, False)
    return tree


CAUSAL = Predicate(both(Q - K))
WINDOW = Predicate(both(Q - K, K - Q + 7))
DOCUMENTS = Predicate(both(Q - K, Z0 - Z1, Z1 - Z0), ((B, Q), (B, K)))
PADDING = Predicate(both(Q - K, Z0 - 1), ((B, K),))
PREFIX = Predicate(Condition(Z0 - K - 1, True, both(Q - K)), ((B,),))
ENDS = Predicate(both(Q + S0 - K), sizes=("s0",))
BESIDE = Predicate(both(Q - K + 3, K - Q + 3))
AFTER = Predicate(Condition(Q - K, False, True))


@pytest.mark.parametrize("predicate", [CAUSAL, WINDOW, DOCUMENTS, PADDING, PREFIX, ENDS, BESIDE])
def test_text_is_read_back(predicate):
    assert parse_predicate(str(predicate)) == predicate


def test_a_wrong_text_says_where():
    with pytest.raises(ParseError, match="yes"):
        parse_predicate("{q ? maybe : no}")


@pytest.mark.parametrize(
    ("predicate", "back", "ahead"),
    [
        (CAUSAL, None, 1), (WINDOW, 8, 1), (DOCUMENTS, None, 1), (PADDING, None, 1), (PREFIX, None, None),
        (ENDS, None, S0 + 1), (BESIDE, 4, 4), (AFTER, 0, None),
    ],
)  # fmt: skip
def test_reach(predicate, back, ahead):
    assert (predicate.back, predicate.ahead) == (back, ahead)


@pytest.mark.parametrize(
    ("predicate", "kinds"),
    [
        (WINDOW, ("causal", "window")), (DOCUMENTS, ("causal", "documents")), (PADDING, ("causal", "padding")),
        (PREFIX, ("prefix",)),
    ],
)  # fmt: skip
def test_kinds(predicate, kinds):
    assert predicate.kinds == kinds
    assert predicate.by_batch == (predicate is not WINDOW)


def test_keys_of_a_block_are_those_that_some_query_allows():
    for predicate in (CAUSAL, WINDOW, ENDS, BESIDE):
        back, ahead = predicate.back, predicate.ahead
        sizes = {"s0": 5}
        for begin, end, keys in ((0, 4, 20), (8, 12, 20), (16, 20, 20), (16, 20, 10)):
            first, last = predicate.key_range(begin, end, keys, sizes)
            reach = 6 if predicate is ENDS else ahead
            some = [
                k
                for k in range(keys)
                if any(k - q < reach and (back is None or q - k < back) for q in range(begin, end))
            ]
            assert [*range(first, last)] == some


def test_pairs_of_a_window_grow_with_the_length_alone():
    window = Predicate(both(Q - K, K - Q + 1023))
    assert allowed_pairs(window, 16384, 16384, 128, {}) < 16384 * (1024 + 256)
    assert allowed_pairs(CAUSAL, 1024, 1024, 128, {}) == 128 * 128 * 36


def test_rows_that_have_a_key():
    assert CAUSAL.has_key_in_each_row(8, 8) and WINDOW.has_key_in_each_row(S0, S0) and WINDOW.has_key_in_each_row(4, 8)
    assert not PADDING.has_key_in_each_row(8, 8) and not AFTER.has_key_in_each_row(8, 8)
    assert not WINDOW.has_key_in_each_row(8, 4)
