"""TextStream: what is shown piece by piece equals what is decoded at once, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_python import PreTrainedTokenizer

from retrieval_attn.prompt.text_stream import MAX_TOKENS, TextStream

TEXT = "the quick brown fox 😀 jumps — über 日本語 don't do 's . , ' n't ok it's 👩‍👩 \N{REPLACEMENT CHARACTER} end"
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """As Llama 2: words with a mark for the space, a token for each byte, and one space less at the begin."""
    words = ["▁", "▁the", "▁fox", "x", "quick", "é", "▁▁", "."]
    names = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + words
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


class Characters(PreTrainedTokenizer):
    """A tokenizer in Python, without the tokenizers library: a token per character."""

    def __init__(self, **options: Any) -> None:
        self._names = SPECIAL + sorted(set(TEXT))
        super().__init__(unk_token="<unk>", eos_token="</s>", bos_token="<s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._names)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 2)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else "<unk>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def fast(make: Callable[[], Tokenizer], **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="</s>", unk_token="<unk>", **options)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": lambda: fast(byte_level),
    "metaspace": lambda: fast(metaspace),
    "word-level": lambda: fast(word_level),
    "word-piece": lambda: fast(word_piece),
    "byte-fallback": lambda: fast(byte_fallback),
    "word-piece cleaned": lambda: fast(word_piece, clean_up_tokenization_spaces=True),
    "word-level cleaned": lambda: fast(word_level, clean_up_tokenization_spaces=True),
    "python": Characters,
    "python cleaned": lambda: Characters(clean_up_tokenization_spaces=True),
}


@pytest.fixture(scope="module", params=["bundled", *KINDS])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "bundled":
        return request.getfixturevalue("loaded")[1]
    return KINDS[request.param]()


def streamed(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], int]:
    """Every piece, the one at the end included, and how many ids were taken until a stop string was complete."""
    stream = TextStream(tokenizer, stop)
    pieces: list[str] = []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.end()], len(pieces)


def samples(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Half of them ids of text, from anywhere to anywhere, half random ids, special and unknown ones too."""
    draw = random.Random(seed)
    text = tokenizer.encode(TEXT * 3, add_special_tokens=False)
    made = []
    for number in range(count):
        start, length = draw.randrange(len(text)), draw.randrange(70)
        noise = [draw.randrange(len(tokenizer)) for _ in range(length)]
        made.append(text[start : start + length] if number % 2 else noise)
    return made


def test_pieces_join_to_what_is_decoded_at_once(tokenizer: Any) -> None:
    for ids in samples(tokenizer, 300, 1):
        pieces, _ = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_nothing_is_shown_that_later_tokens_change(tokenizer: Any) -> None:
    """At every token, what was shown begins what all tokens so far read."""
    for ids in samples(tokenizer, 40, 2):
        stream, shown = TextStream(tokenizer), ""
        for number, token in enumerate(ids):
            shown += stream.add(token)
            assert tokenizer.decode(ids[: number + 1], skip_special_tokens=True).startswith(shown)


def test_a_stop_string_ends_the_text_and_is_never_shown(tokenizer: Any) -> None:
    """Of random strings out of the text, over any tokens: the text ends with the token that completes the first."""
    draw = random.Random(3)
    found = 0
    for ids in samples(tokenizer, 200, 4):
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        start = draw.randrange(max(len(whole), 1))
        picked = (whole[start : start + draw.randrange(1, 9)], "never", whole[start + 3 : start + 5])
        stop = tuple(one for one in picked if one and "\N{REPLACEMENT CHARACTER}" not in one)
        pieces, taken = streamed(tokenizer, ids, stop)
        so_far = tokenizer.decode(ids[:taken], skip_special_tokens=True)
        assert "".join(pieces) == before(so_far, stop), (ids, stop)
        earlier = tokenizer.decode(ids[: max(taken - 1, 0)], skip_special_tokens=True)
        if "\N{REPLACEMENT CHARACTER}" not in earlier:  # such text may change, and is no match until it cannot
            assert not any(one in earlier for one in stop)
        found += any(one in so_far for one in stop)
    assert found > 50


def before(text: str, stop: Sequence[str]) -> str:
    for one in stop:
        text = text[: text.index(one)] if one in text else text
    return text


def test_an_emoji_comes_whole() -> None:
    made = fast(byte_level)
    letters = {letter: number for letter, number in made.get_vocab().items() if len(letter) == 1}
    spelled = dict(zip(range(256), byte_letters(), strict=True))
    ids = [letters[spelled[byte]] for byte in "a😀b".encode()]
    assert streamed(made, ids)[0] == ["a", "", "", "", "😀", "b", ""]
    assert streamed(made, ids[:3])[0] == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    # what only looks like a replacement character so far is no stop string
    assert "".join(streamed(made, ids, ["\N{REPLACEMENT CHARACTER}"])[0]) == "a😀b"
    assert "".join(streamed(made, ids[:3], ["\N{REPLACEMENT CHARACTER}"])[0]) == "a"


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def test_what_begins_a_stop_string_is_held_back_and_sent_at_the_end() -> None:
    made = Characters()
    ids = made.encode("the fo", add_special_tokens=False)
    pieces, _ = streamed(made, ids, ["fox", "he quick"])
    assert pieces == ["t", "", "", "", "he ", "", "fo"][: len(pieces)]
    stream = TextStream(made, ["fox"])
    shown = [stream.add(token) for token in made.encode("the fox jumps", add_special_tokens=False)]
    assert "".join(shown) == "the " and stream.stopped and stream.end() == "" and stream.add(ids[0]) == ""


def test_a_stop_string_of_byte_tokens_stops_at_its_last_byte() -> None:
    """Text of byte tokens is held back while their run lasts; a stop string in it is not overlooked."""
    made = fast(byte_fallback)
    ids = made.encode("x", add_special_tokens=False) + [3 + byte for byte in "日本語".encode()]
    pieces, taken = streamed(made, ids, ["本"])
    assert "".join(pieces) == "x日" and taken == 1 + 6
    assert streamed(made, ids)[0][:-1] == ["x"] + [""] * 9 and streamed(made, ids)[0][-1] == "日本語"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_run_of_byte_tokens_waits_for_its_end(wrong: bool) -> None:
    """One byte that fits nowhere makes all of them replacement characters, in what is decoded at once as well."""
    made = fast(byte_fallback)
    run = [3 + byte for byte in ("日本語" * 40).encode()] + [3 + 0xFF] * wrong
    ids = [*run, *made.encode("x", add_special_tokens=False)]
    pieces, _ = streamed(made, ids)
    assert pieces[:-2] == [""] * len(run)
    assert pieces[-2] == made.decode(ids) == ("\N{REPLACEMENT CHARACTER}" * len(run) if wrong else "日本語" * 40) + "x"


def test_special_and_unknown_ids_show_nothing(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    special = sorted(tokenizer.all_special_ids)
    assert special and all(stream.add(token) == "" for token in special)
    if tokenizer.is_fast:
        assert stream.add(len(tokenizer) + 5) == ""
    assert stream.end() == ""
    assert TextStream(tokenizer).end() == ""


@pytest.mark.parametrize("garbage", [False, True])
def test_a_token_costs_the_same_after_ten_thousand(tokenizer: Any, garbage: bool) -> None:
    """It decodes some ids, not all so far: also where no byte fits to another, and in runs of byte tokens."""
    stream = TextStream(tokenizer, ["no such text"])
    decoded = 0
    decode = stream._decode

    def counting(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    stream._decode = counting
    draw = random.Random(9)
    ids = tokenizer.encode(TEXT * 300, add_special_tokens=False)[:10_000]
    if garbage:
        single = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
        ids = [draw.choice(single) for _ in range(10_000)] if single else ids
    shown = "".join(map(stream.add, ids)) + stream.end()
    assert decoded <= len(ids) * (MAX_TOKENS + 1)
    assert shown == tokenizer.decode(ids, skip_special_tokens=True)
