"""Tokenizers of GGUF files: SentencePiece's BPE against a plain implementation, byte-level BPE by examples."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from retrieval_attn.errors import InputDataError, UnsupportedModelError
from retrieval_attn.model.gguf import tokenizer as gguf_tokenizer
from retrieval_attn.model.gguf.file import GgufFile, StoredTexts
from retrieval_attn.model.gguf.tokenizer import tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def tokenizer(**metadata: Any) -> Any:
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if not key.startswith("general")}
    architecture = {"general.architecture": "llama", "llama.context_length": 4096}
    named |= {"general.name": metadata["general_name"]} if "general_name" in metadata else {}
    return tokenizer_of(GgufFile("tiny.gguf", {**architecture, **named}, {}))


def pieces(seed: int, *, prefix: bool) -> dict[str, Any]:
    """Metadata of a vocabulary of SentencePiece: characters, random joins of them, and of joins, bytes, user's."""
    rng = random.Random(seed)
    parts = ["▁", *"abcd"]
    while len(parts) < 60:
        # spaces are in front, but for one token in twenty
        left, right = rng.choice(parts), rng.choice([part for part in parts if "▁" not in part or rng.random() < 0.05])
        if left + right not in parts and len(left + right) < 6:
            parts.append(left + right)
    user = ["  ", "   ", "\n", "\n\n", "<b>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *parts, *user]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(parts), *[USER] * len(user)]
    scores = [0.0] * 259 + rng.sample([-float(rank) for rank in range(200)], len(parts)) + [-1000.0] * len(user)
    return {
        "model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix,
    }  # fmt: skip


def plainly(text: str, metadata: dict[str, Any]) -> list[int]:
    """Tokens of a text as llama.cpp finds them: of adjacent symbols the pair with the best score is joined first."""
    tokens: Sequence[str] = metadata["tokens"]
    kinds, scores = metadata["token_type"], metadata["scores"]
    known = {token: number for number, token in enumerate(tokens) if kinds[number] in (NORMAL, USER)}
    user = sorted((token for token in tokens if kinds[tokens.index(token)] == USER), key=len, reverse=True)
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, user))})", text):
        if part in user:
            found.append(known[part])
            continue
        if not part:
            continue
        symbols = list(("▁" if metadata["add_space_prefix"] else "") + part.replace(" ", "▁"))
        while True:
            pairs = [
                (-scores[known[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in known
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            of_bytes = [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
            found += [known[symbol]] if symbol in known else of_bytes
    return found


def test_texts_of_an_array_are_decoded_when_read() -> None:
    texts = ["a", "", "▁ß", "x" * 300]
    stored = StoredTexts(b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts), 4)
    assert list(stored) == texts
    assert (len(stored), stored[2], stored[1:3], bool(StoredTexts(b"", 0))) == (4, texts[2], texts[1:3], False)


def test_the_tokenizer_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would copy it by way of JSON, which for 262,144 tokens takes seconds and hundreds of MB."""
    made: list[Any] = []

    def noted(model: Any) -> Any:
        made.append(Tokenizer(model))
        return made[-1]

    monkeypatch.setattr(gguf_tokenizer, "Tokenizer", noted)
    assert tokenizer(**pieces(0, prefix=True)).backend_tokenizer is made[0]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_joined_by_score(seed: int, prefix: bool) -> None:
    metadata = pieces(seed, prefix=prefix)
    made = tokenizer(**metadata)
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choice([*"abcd", *"abcd", " ", " ", "  ", "\n", "é", "日", "<b>"]) for _ in range(30))
        assert made(text, add_special_tokens=False).input_ids == plainly(text, metadata), text
        if not prefix:  # with one, a space is put after each of the user's tokens, too
            assert made.decode(made(text).input_ids, skip_special_tokens=True) == text


def test_a_vocabulary_without_joins_across_spaces() -> None:
    metadata = pieces(0, prefix=False)
    kept = [number for number, token in enumerate(metadata["tokens"]) if not re.search("[^▁]▁", token)]
    assert len(kept) < len(metadata["tokens"]), "the others are joined across spaces"
    for name in ("tokens", "token_type", "scores"):
        metadata[name] = [metadata[name][number] for number in kept]
    text = "ab cd  a d ccc b" * 4
    assert tokenizer(**metadata)(text, add_special_tokens=False).input_ids == plainly(text, metadata)


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_ends_of_a_text(flags: dict[str, bool], before: list[int], after: list[int]) -> None:
    made = tokenizer(**pieces(0, prefix=False), **flags)
    inner = made("ab", add_special_tokens=False).input_ids
    assert made("ab").input_ids == [*before, *inner, *after]
    assert made("ab", "ab").input_ids == [*before, *inner, *after, *before, *inner, *after]


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "<call>", "Ġt", "he", "Ġthe", "Ġx"]
    kinds = [CONTROL, *[NORMAL] * 256, USER, *[NORMAL] * 4]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": ["Ġ t", "h e", "Ġt he"],
        "bos_token_id": 0, **more,
    }  # fmt: skip


WORDS = "I'LL say don't at 12345\n\n  xY/\n"
LLAMA = ["I", "'LL", "Ġsay", "Ġdon", "'t", "Ġat", "Ġ", "123", "45", "ĊĊ", "Ġ", "ĠxY", "/Ċ"]
QWEN = [*LLAMA[:7], *"12345", *LLAMA[9:]]
SPLIT = {
    "llama-bpe": LLAMA, "glm4": LLAMA, "dbrx": LLAMA, "qwen2": QWEN,
    "gpt-4o": ["I'LL", "Ġsay", "Ġdon't", "Ġat", "Ġ", "123", "45", "ĊĊ", "Ġ", "Ġx", "Y", "/Ċ"],
    "tekken": ["I", "'LL", "Ġsay", "Ġdon", "'t", "Ġat", "Ġ", *"12345", "ĊĊ", "Ġ", "Ġx", "Y", "/Ċ"],
    "default": ["I", "'", "LL", "Ġsay", "Ġdon", "'t", "Ġat", "Ġ12345", "ĊĊĠ", "ĠxY", "/", "Ċ"],
}  # fmt: skip


@pytest.mark.parametrize("pre", SPLIT)
def test_words_of_a_pattern(pre: str) -> None:
    made = tokenizer(**byte_level(pre)).backend_tokenizer
    assert [word for word, _ in made.pre_tokenizer.pre_tokenize_str(WORDS)] == SPLIT[pre]


def test_bytes_are_joined_by_the_merges() -> None:
    made = tokenizer(**byte_level("qwen2"))
    assert made.tokenize("<call> the x<s>é") == ["<call>", "Ġthe", "Ġ", "x", "<s>", "Ã", "©"]
    assert tokenizer(**byte_level("llama-bpe")).tokenize(" x") == ["Ġx"], "a word that is a token is not split"
    assert made("e\u0301").input_ids == made("é").input_ids, "as Qwen normalizes"
    for text in ("the é 日本 \U0001f600", "<s> the"):
        assert made.decode(made(text).input_ids) == text


def test_which_patterns_begin_with_a_special_token() -> None:
    assert tokenizer(**byte_level("llama-bpe"))("a").input_ids[0] == 0
    assert tokenizer(**byte_level("qwen2"))("a").input_ids[0] != 0
    assert tokenizer(**byte_level("qwen2", add_bos_token=True))("a").input_ids[0] == 0


def test_line_breaks_after_phi_3s_control_tokens() -> None:
    metadata = byte_level("qwen2")
    metadata["token_type"][257] = CONTROL
    for name, found in (("Qwen", [257, "Ċ", "a"]), ("Phi-3 Mini", [257, "a"])):
        made = tokenizer(**metadata, general_name=name)
        assert made("<call>\na").input_ids == [one if one == 257 else made.get_vocab()[one] for one in found]


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'gpt2' with the pattern 'viking'.*llama-bpe"):
        tokenizer(**byte_level("viking"))
    with pytest.raises(UnsupportedModelError, match="kind 'bert'"):
        tokenizer(**{**byte_level("default"), "model": "bert"})
    with pytest.raises(InputDataError, match="no tokenizer"):
        tokenizer()
