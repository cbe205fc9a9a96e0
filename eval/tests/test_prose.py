"""The generated prose: deterministic, prefix-stable, readable by the sentence splitter, fast."""

from __future__ import annotations

import time

import pytest

from retrieval_attn_eval.tasks import split_sentences
from retrieval_attn_eval.text.prose import prose, sentences
from retrieval_attn_eval.text.words import ADJECTIVES, CITIES, NOUNS, PLACES


@pytest.mark.parametrize("size", [0, 1, 63, 1000, 50_000])
def test_prose_has_the_asked_length_and_is_a_prefix_of_more(size: int) -> None:
    """A haystack that grows to fill a context must not change its beginning."""
    text = prose(size, 7)
    assert len(text) == size
    assert prose(size + 3000, 7)[:size] == text


def test_prose_depends_on_the_seed_only() -> None:
    assert prose(5000, 1) == prose(5000, 1)
    assert prose(5000, 1) != prose(5000, 2)


def test_negative_length_is_empty() -> None:
    assert prose(-5, 1) == ""


def test_sentences_are_varied_and_complete() -> None:
    """Repeated sentences make a poor haystack; holes left open would be unreadable."""
    made = sentences(1000, 3)
    assert len(set(made)) > 970
    assert all(s.endswith(".") and s[0].isupper() and "{" not in s and "%" not in s for s in made)


def test_paragraphs_and_sentences_split_where_expected() -> None:
    text = prose(20_000, 4)
    pieces = split_sentences(text)
    assert "".join(pieces) == text
    assert text.count("\n\n") > 20
    assert all(p.startswith((" ", "\n\n")) for p in pieces[1:])
    assert all(p.endswith(".") for p in pieces[:-1])


def test_word_lists_are_clean() -> None:
    for words in (ADJECTIVES, NOUNS, CITIES, PLACES):
        assert len(words) == len(set(words)) > 50
        assert not [w for w in words if w != " ".join(w.split()) or not w.isascii()]


def test_prose_is_fast_enough_for_a_haystack_of_128k_tokens() -> None:
    """650,000 characters, about 131,072 tokens; a tenth of the measured speed is still under this bound."""
    start = time.process_time()
    prose(650_000, 11)
    assert time.process_time() - start < 2.0
