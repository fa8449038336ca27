"""launch/answer.py: text is shown as soon as it is certain, and ends before a stop string."""

import pytest
from answer import Answer
from hf_folder import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def answered(tokenizer, data: bytes, **how):
    shown = []
    answer = Answer(tokenizer, show=shown.append, **how)
    ended = [answer.add(token) for token in data]
    return answer, shown, ended


def test_characters_of_several_bytes_are_shown_whole(tokenizer):
    answer, shown, _ = answered(tokenizer, "aé€😀b".encode())
    assert shown == ["a", "é", "€", "😀", "b"] and answer.finish() == "aé€😀b"


def test_bytes_that_are_no_text_are_shown_when_nothing_can_complete_them(tokenizer):
    answer, shown, _ = answered(tokenizer, b"a\xe2\x82")
    assert shown == ["a"]
    assert answer.finish() == "a\ufffd" == "".join(shown)


def test_a_stop_string_ends_it_and_is_never_shown(tokenizer):
    answer, shown, ended = answered(tokenizer, b"one, en two end", stop_strings=["end", "\n\n"])
    assert ended == [False] * 14 + [True]
    assert answer.finish() == "one, en two " == "".join(shown) and answer.stopped == "string 'end'"
    assert "e" not in shown, "it might have begun one"


def test_what_only_began_a_stop_string_is_shown_at_the_end(tokenizer):
    answer, shown, _ = answered(tokenizer, b"the en", stop_strings=["end"])
    assert "".join(shown) == "the "
    assert answer.finish() == "the en" == "".join(shown)


def test_a_stop_token_ends_it(tokenizer):
    answer = Answer(tokenizer, stop_tokens={256})
    assert not answer.add(ord("a")) and answer.add(256)
    assert answer.text == "a" and answer.tokens == [ord("a")] and answer.stopped == "token 256"


def test_the_byte_tokenizer_is_that_of_the_training_data(tokenizer):
    text = "def f(x):\n\treturn 'é€😀'\n\x00"
    assert tokenizer(text)["input_ids"] == [256, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)
