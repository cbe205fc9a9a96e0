"""Token ids of a text that begins as a recent one: those of the whole text, with only the rest tokenized."""

from __future__ import annotations

import random
import threading
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    NormalizedString,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from retrieval_attn.prompt import encode
from retrieval_attn.prompt.encode import LONG_TEXT, NAMESPACE, PromptEncoder, common_prefix, is_local
from retrieval_attn.server.access import ApiKey, Caller, Keys
from retrieval_attn.server.permissions import Permission, authorize
from retrieval_attn.server.prompts import Prompts
from tests.prompt.test_encode import BUNDLED, bytelevel, sentencepiece

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "he'll",
    "It's",
    "don't",
    "Café",
    "café",
    "Straße",
    "ΑΣ",
    "naïve",
    "12",
    "1234567",
    "3.14",
    "x=1;",
    "foo()",
    "--",
    "[a]",
    "New",
    "York",
    "hi",
    "hihi",
    "ﬁn",
    "①",
    "東京",
    "こんにちは",
    "🙂",
    "éé",
    "internationalization</s>",
]
GAPS = [" "] * 30 + ["  ", "\n", "\n\n", " \n ", "\t", "\u00a0", "\u3000 ", ".", ", ", " " * 40]
GROUPED = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\s?\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"
"""Digits in threes from the end of a number."""
GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def text_of(rng: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += rng.choice(WORDS) + rng.choice(GAPS)
    return text


def trained(trainer: Any, model: Any, **steps: Any) -> Any:
    """A tokenizer with a vocabulary of random texts."""
    backend = Tokenizer(model)
    for name, step in steps.items():
        setattr(backend, name, step)
    rng = random.Random(0)
    backend.train_from_iterator([text_of(rng, 300) for _ in range(100)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_bpe(pattern: str, normalizer: Any = None) -> Any:
    tokenizer = trained(
        trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=pre.ByteLevel.alphabet(), special_tokens=["<unk>", "<s>", "</s>"]
        ),
        models.BPE(),
        pre_tokenizer=pre.Sequence([pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(False, use_regex=False)]),
        decoder=decoders.ByteLevel(),
        **({} if normalizer is None else {"normalizer": normalizer}),
    )
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
        ]
    )
    return tokenizer


def unigram() -> Any:
    return trained(
        trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>"),
        models.Unigram(),
        normalizer=normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase()]
        ),
        pre_tokenizer=pre.Metaspace(),
        decoder=decoders.Metaspace(),
    )


def word_level() -> Any:
    tokenizer = trained(
        trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]),
        models.WordLevel(unk_token="<unk>"),
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        pre_tokenizer=pre.Whitespace(),
    )
    tokenizer.add_tokens([AddedToken("New York"), AddedToken("hihi", lstrip=True, rstrip=True)])
    return tokenizer


def word_piece() -> Any:
    return trained(
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"]),
        models.WordPiece(unk_token="<unk>"),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre.BertPreTokenizer(),
    )


def spm_bpe() -> Any:
    """As Llama 2's: the whole text is one word, a blank is put before it, and merges join letters of words."""
    return trained(
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=200),
        models.BPE(unk_token="<unk>", fuse_unk=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        pre_tokenizer=pre.Split("▁", "merged_with_next"),
    )


def unsplit_bpe() -> Any:
    tokenizer = spm_bpe()
    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence([])
    return tokenizer


KINDS = {
    "bundled": bytelevel,
    "byte-level BPE": lambda: byte_bpe(GPT4),
    "byte-level BPE, NFC": lambda: byte_bpe(GROUPED, normalizers.NFC()),
    "Unigram": unigram,
    "WordLevel": word_level,
    "WordPiece": word_piece,
    "SentencePiece BPE": spm_bpe,
    "SentencePiece BPE, unsplit": unsplit_bpe,
    "bytes and blanks first": lambda: sentencepiece("first"),
}  # fmt: skip


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def edited(rng: random.Random, text: str) -> str:
    """The text with another end, or with a change anywhere."""
    kind, place = rng.randrange(6), rng.randrange(len(text))
    more = text_of(rng, rng.choice([1, 30, 600]))
    near = max(0, len(text) - rng.randrange(1, 1500))
    if kind == 0:
        return text + rng.choice(["\u0301", " ", "", "s", "7", "\n"]) + more
    if kind == 1:
        return text[:near] + rng.choice(["\u0301", "", " ", "9"]) + text[near + rng.randrange(3) :]
    if kind == 2:
        return text[:place] + more + text[place:]
    if kind == 3:
        return text[: max(LONG_TEXT, near)] + more
    return text[:place] + text[place + 5 :] if kind == 4 else text[:near] + more + text[near:] + more


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_ids_are_those_of_the_whole_text(kind: str, seed: int) -> None:
    """After any edits, with the special tokens around a text and without; places of tokens, too."""
    rng, tokenizer = random.Random(seed), tokenizer_of(kind)
    assert is_local(tokenizer)
    encoder = PromptEncoder(tokenizer)
    text = text_of(rng, 7000)
    for _ in range(8):
        begins = rng.random() < 0.5
        found = encoder.tokenize(text, begins=begins, offsets=True)
        whole = tokenizer(text, add_special_tokens=begins, return_offsets_mapping=True)
        assert found.ids == whole["input_ids"]
        assert found.starts is not None and found.starts.tolist() == [start for start, _ in whole["offset_mapping"]]
        text = edited(rng, text)


@pytest.mark.parametrize("kind", list(KINDS))
def test_only_the_rest_is_tokenized(kind: str) -> None:
    """Another question, a turn more, the same again: some known text is tokenized again, and nothing else."""
    encoder, document = PromptEncoder(tokenizer_of(kind)), text_of(random.Random(1), 60_000)
    recent = encoder._recent
    assert recent is not None
    encoder.tokenize(document + " What is it?")
    assert recent.tokenized == len(document) + 12
    talk = document
    for number in range(5):
        talk += f" And the number {number} of them?"
        before = recent.tokenized
        encoder.tokenize(talk)
        assert 0 < recent.tokenized - before < 3000
        encoder.tokenize(talk)
        encoder.tokenize(f"{document} How is {number}?")
        assert recent.tokenized - before < 6000
    assert len(recent._kept) == 1, "texts with the same document take each other's place"


def test_cut_words_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that is wrongly said to be local: tokens around the cut differ, and all is tokenized."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre.FixedLength(5)
    backend.train_from_iterator([text_of(random.Random(2), 9000)], trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert not is_local(tokenizer)
    monkeypatch.setattr(encode, "is_local", lambda tokenizer: True)
    encoder, text = PromptEncoder(tokenizer), text_of(random.Random(3), 9000)
    for end in ("", "a", "b c", " d"):
        assert encoder.tokenize(text + end).ids == tokenizer(text + end)["input_ids"]


class Shouted:
    """A normalizer written in Python."""

    def normalize(self, text: NormalizedString) -> None:
        text.uppercase()


def test_others_tokenize_all() -> None:
    """Tokens that cross a space, steps that may look far, steps in Python, dropout."""
    crossing = bytelevel()
    vocabulary = {"a": 0, "Ġ": 1, "b": 2, "aĠ": 3}
    crossing.backend_tokenizer.model = models.BPE(vocabulary, [("a", "Ġ")])
    assert not is_local(crossing)
    crossing.backend_tokenizer.model = models.BPE({**vocabulary, "ĊĠ": 4} | {"Ġb": 3}, [("Ġ", "b")])
    del vocabulary["aĠ"]
    crossing.backend_tokenizer.model = models.BPE({**vocabulary, "Ġb": 3}, [("Ġ", "b")])
    assert is_local(crossing)
    crossing.backend_tokenizer.model = models.BPE({**vocabulary, "Ġb": 3}, [("Ġ", "b")], dropout=0.5)
    assert not is_local(crossing)
    shouted = bytelevel()
    shouted.backend_tokenizer.normalizer = normalizers.Normalizer.custom(Shouted())
    assert not is_local(shouted)
    replaced = bytelevel()
    replaced.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"^\s+"), "")
    assert not is_local(replaced)
    whole = unigram()
    whole.backend_tokenizer.pre_tokenizer = pre.Metaspace(split=False)
    assert not is_local(whole)
    text = text_of(random.Random(4), 9000)
    for tokenizer in (crossing, replaced, whole):
        encoder = PromptEncoder(tokenizer)
        for end in (" one", " two"):
            assert encoder.tokenize(text + end).ids == tokenizer(text + end)["input_ids"]


def test_a_namespace_reuses_its_own_texts_only() -> None:
    """The caller of a request is its namespace."""
    encoder, text = PromptEncoder(tokenizer_of("bundled")), text_of(random.Random(5), 20_000)
    recent = encoder._recent
    assert recent is not None

    def read_as(namespace: str) -> int:
        before = recent.tokenized

        def run() -> None:
            NAMESPACE.set(namespace)
            encoder.tokenize(text)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return recent.tokenized - before

    assert [read_as(name) for name in ("one", "two", "one", "two")] == [len(text), len(text), 0, 0]
    keys = Keys([ApiKey("a-key-of-eight", Caller("ann", "of ann", False))])
    scope = {"headers": [(b"authorization", b"Bearer a-key-of-eight")]}
    told: list[str] = []

    def asked() -> None:
        authorize(keys, scope, next(one for one in Permission if one not in (Permission.OPEN, Permission.ADMIN)))
        told.append(NAMESPACE.get())

    thread = threading.Thread(target=asked)
    thread.start()
    thread.join()
    assert told == ["of ann"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that was used longest ago goes first."""
    encoder = PromptEncoder(tokenizer_of("bundled"))
    recent = encoder._recent
    assert recent is not None
    texts = [text_of(random.Random(seed), 10_000) for seed in range(4)]
    encoder.tokenize(texts[0])
    monkeypatch.setattr(encode, "KEPT_BYTES", 3 * recent._kept[0].nbytes)
    for number in (1, 0, 2, 3):
        encoder.tokenize(texts[number])
    assert sum(one.nbytes for one in recent._kept) <= encode.KEPT_BYTES
    assert texts[1] not in [one.text for one in recent._kept] and recent._kept[-1].text == texts[3]
    before = recent.tokenized
    encoder.tokenize(texts[3])
    encoder.tokenize("short")
    assert recent.tokenized == before


def test_common_prefix() -> None:
    """Of texts that are longer than a block, too."""
    text = "ab" * 100_000
    for length in (0, 1, 65_535, 65_536, 65_537, 131_072, 199_999, 200_000):
        assert common_prefix(text, text[:length] + "x" + text[length + 1 :]) == min(length, len(text))
        assert common_prefix(text, text[:length]) == common_prefix(text[:length], text) == length


@pytest.mark.parametrize("parse_special", [False, True])
def test_prompts_of_a_server_reuse_a_document(parse_special: bool) -> None:
    """Raw prompts and conversations have the parts that they had alone."""
    tokenizer = bytelevel()
    document = text_of(random.Random(6), 30_000).replace("</s>", "s")
    encoder = PromptEncoder(tokenizer)

    def prompts() -> Prompts:
        encode._encoder.cache_clear()
        return Prompts(tokenizer, len(tokenizer), 1 << 20, parse_special=parse_special)

    warm = prompts()
    encoder = warm._template.encoder
    for number in range(3):
        raw = f"{document}\n\nWhat is number {number}?"
        said = [{"role": "system", "content": document}, {"role": "user", "content": f"What is number {number}?"}]
        before = 0 if encoder._recent is None else encoder._recent.tokenized
        found = warm.of_text(raw), warm.of_messages(said)
        assert encoder._recent is not None
        assert number == 0 or encoder._recent.tokenized - before < 4000
        alone = prompts()
        assert found == (alone.of_text(raw), prompts().of_messages(said))


def test_the_bundled_tokenizer_is_local() -> None:
    assert is_local(AutoTokenizer.from_pretrained(BUNDLED))
