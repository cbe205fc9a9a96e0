"""Haystack text: where it is read from, where sentences end, and that a needle goes in exactly there."""

from __future__ import annotations

import json
import re
import string
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.models import BUNDLED_MODEL
from retrieval_attn_eval.text.haystack import Haystack, encode_inside, read_haystack, sentence_ends, shipped_prose

NEEDLE = "The special magic Oslo number is: 1234567."


@cache
def tokenizer(kind: str) -> Any:
    """Tokenizers that differ in all that matters here: who owns the space, and what offsets say about it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if kind == "bundled":
        return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
    core = Tokenizer(models.BPE(unk_token=None))
    if kind == "metaspace":
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        core.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "metaspace" else []
    special = ["<unk>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    text = shipped_prose(40_000, 3)
    if kind == "metaspace":  # SentencePiece vocabularies keep line breaks apart from words
        text = text.replace("\n", " ")
    core.train_from_iterator([text, *string.printable], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


KINDS = ("bundled", "byte", "trimmed", "metaspace")


@cache
def haystack(kind: str) -> Haystack:
    return Haystack(shipped_prose(20_000, 1), tokenizer(kind), 3000)


def decoded(kind: str, ids: np.ndarray) -> str:
    return str(tokenizer(kind).decode(ids.tolist()))


# ---- reading ---------------------------------------------------------------------------------------


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    """The order a file system lists names in differs between machines; results must not."""
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a.jsonl").write_text('{"text": "First."}\n\n"And more."\n')
    (tmp_path / "c.json").write_text(json.dumps([{"content": "Third."}, "Fourth.", {"text": ["Fifth.", "Sixth."]}]))
    (tmp_path / "ignored.md").write_text("Not me.")
    (tmp_path / "empty.txt").write_text("  \n")
    expected = "First.|And more.|Second.|Third.|Fourth.|Fifth.|Sixth."
    assert read_haystack(tmp_path) == expected.replace("|", "\n\n")


def test_byte_order_mark_and_dos_line_ends_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n")
    assert read_haystack(tmp_path / "a.txt") == "One.\nTwo."


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: needed JSON"),
        ("a.jsonl", b'\n\n{"body": "x"}\n', r'line 3: needed an object with "text", found body'),
        ("a.jsonl", b"[1]\n", r"line 1: .*found list"),
        ("a.json", b'[{"text": "x"}, 4]', "item 2: .*found int"),
        ("a.json", b"{", "needed JSON"),
        ("a.json", b"[" * 100_000, "needed JSON .*nested too deeply"),
        ("a.jsonl", b'"fine"\n"a \\ud800 b"\n', "line 2: needed JSON .*surrogates"),
        ("a.txt", b"abc\xff", "byte 3 is not"),
        ("a.txt", b" \n ", "only empty documents"),
        ("a.jsonl", b"", "only empty documents"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputDataError, match=message):
        read_haystack(tmp_path / name)


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="found nothing there"):
        read_haystack(tmp_path / "none")
    with pytest.raises(InputDataError, match="found none"):
        read_haystack(tmp_path)


# ---- sentences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        (
            "Mr. Smith met Dr. J. Doe at 3.14 p.m. today. Done.",
            ["Mr. Smith met Dr. J. Doe at 3.14 p.m. today.", "Done."],
        ),
        ("Really?! Yes... and no. See No. 5 of it. End.", ["Really?!", "Yes... and no.", "See No. 5 of it.", "End."]),
        ("A heading\n\nA line that is\nwrapped here. End.", ["A heading", "A line that is\nwrapped here.", "End."]),
        ("第一句。第二句！「第三句。」末", ["第一句。", "第二句！", "「第三句。」"]),
        ("no end at all", []),
        ("", []),
    ],
)
def test_sentence_ends(text: str, sentences: list[str]) -> None:
    """Fails if abbreviations, decimals, quotes, headings, line wraps or CJK stops are cut wrongly."""
    ends = sentence_ends(text)
    starts = [0, *ends[:, 1].tolist()]
    assert [text[a:b] for a, b in zip(starts, ends[:, 0].tolist(), strict=False)] == sentences
    assert all(text[a:b].strip() == "" for a, b in ends.tolist())


# ---- placing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(depth=st.floats(0, 100), budget=st.integers(200, 2500), turn=st.integers(0, 3))
def test_needle_goes_to_the_nearest_sentence_end_before_the_depth(
    kind: str, depth: float, budget: int, turn: int
) -> None:
    """Reference: the decoded text.  Fails if a needle lands inside a sentence, behind its depth, or further before
    it than needed, or if one id of the haystack is lost."""
    hay = haystack(kind)
    start, stop = hay.excerpt(budget, max(budget // 100, 4), turn)
    assert stop - start <= budget
    placed = hay.place(NEEDLE, depth, (start, stop))
    a, b = placed.needle_start, placed.needle_stop
    without = np.concatenate([placed.ids[:a], placed.ids[b:]])
    np.testing.assert_array_equal(without, hay.ids[start:stop])
    assert decoded(kind, placed.ids[a:b]).strip() == NEEDLE
    assert b - a <= hay.needle_room(NEEDLE)
    assert placed.depth == pytest.approx(100 * a / (stop - start))
    target = int((stop - start) * depth / 100 + 0.5)
    assert a <= target
    before, after = decoded(kind, placed.ids[:a]).rstrip(), decoded(kind, without[a:]).lstrip()
    assert before == "" or before[-1] in ".!?" or '."' in before[-3:], before[-30:]
    assert after == "" or not after[0].islower() or before == "", after[:30]
    between = decoded(kind, without[a:target])
    assert not re.search(r"[.!?]\s+[A-Z]\w*\s", between), (
        between
    )  # a whole sentence end lies between here and the target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 40.0, 100.0])
def test_needle_is_separated_by_white_space(kind: str, depth: float) -> None:
    """A needle glued to its neighbours ("end.The special", "4567.The") is another needle."""
    hay = haystack(kind)
    text = decoded(kind, hay.place(NEEDLE, depth, hay.excerpt(900, 20)).ids)
    at = text.index(NEEDLE)
    assert (at == 0) == (depth == 0)
    assert at == 0 or (text[at - 1].isspace() and not text[at - 2 : at].isspace())
    assert text[at + len(NEEDLE) :][:1] == "" if depth == 100 else text[at + len(NEEDLE)].isspace()


def test_white_space_of_the_needle_is_kept() -> None:
    hay = haystack("bundled")
    text = decoded("bundled", hay.place(f"\n{NEEDLE}\n", 50, hay.excerpt(900, 20)).ids)
    assert f".\n{NEEDLE}\n" in text


@pytest.mark.parametrize("kind", KINDS)
def test_excerpt_fills_its_budget(kind: str) -> None:
    """Whole sentences where they fill the budget, a word start otherwise; never more than `slack` tokens unused."""
    hay = haystack(kind)
    for budget in range(300, 1200, 37):
        start, stop = hay.excerpt(budget, 6)
        assert budget - 6 <= stop - start <= budget
        assert stop in hay.cuts
        assert start == 0 or start in hay.cuts or decoded(kind, hay.ids[start - 1 : start + 1]).strip().count(" ") >= 0


def test_short_text_is_repeated_as_a_whole() -> None:
    """The joint between two passes must be a sentence end, and no pass may be cut before the last."""
    text = "The red fox sleeps. The owl is awake."
    hay = Haystack(text, tokenizer("bundled"), 400)
    whole = decoded("bundled", hay.ids)
    assert hay.passes > 2 and len(hay.ids) >= 400
    assert whole == "\n\n".join([text] * hay.passes)


def test_special_tokens_written_in_a_haystack_stay_text() -> None:
    """ "</s>" in a web page must not become an end-of-sequence token in the middle of the context."""
    made = tokenizer("bundled")
    text = "The tag </s> ends a text. The tag <s> starts one. " * 30
    hay = Haystack(text, made, 200)
    assert made.eos_token_id not in hay.ids and made.bos_token_id not in hay.ids
    assert "</s>" in decoded("bundled", hay.ids)


def test_text_without_sentences_is_refused() -> None:
    with pytest.raises(InputDataError, match="at least two sentences, found 0"):
        Haystack("word " * 1000, tokenizer("bundled"), 100)


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="offset map"):
        Haystack("One. Two. Three.", Slow(), 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [" The end.", "\n\nQuestion: why?", "word", "9", "\n"])
def test_encode_inside_joins_to_the_same_text(kind: str, text: str) -> None:
    """Ids made for the middle of a text must decode to that text and nothing more (no extra leading space)."""
    made = tokenizer(kind)
    lead = made("x", add_special_tokens=False)["input_ids"]
    assert made.decode([*lead, *encode_inside(made, text)]) == "x" + text
