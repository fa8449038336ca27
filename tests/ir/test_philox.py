"""Philox against the known answers of its authors' library (Random123, kat_vectors), and its words one by one."""

import numpy as np
import pytest

from dcompile.ir.philox import philox, rounds

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values):
    return [np.uint64(value) for value in values]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    assert rounds(words(*counter), words(*key)) == words(*answer)


def test_a_word_of_the_block_at_a_position():
    key, position, draw = 0x1234567890ABCDEF, 0x0000000500000007, 0x21
    block = rounds(words(7, 5, 0x21, 0), words(0x90ABCDEF, 0x12345678))
    got = [philox(key, position, 4 * draw + word) for word in range(4)]
    assert [int(value) & ONES for value in got] == block
    assert all(value.dtype == np.int32 for value in got)


def test_arrays_give_what_each_element_gives():
    positions = np.arange(50).reshape(5, 10)
    whole = philox(np.asarray([[-5]]), positions, np.asarray(8))
    assert whole.shape == (5, 10) and whole[3, 4] == philox(-5, 34, 8) and len(np.unique(whole)) == 50
