"""PromptEncoder: words of special tokens in texts never become control tokens, and all other texts keep their ids."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt.encode import PromptEncoder, encoder_of, stand_in
from retrieval_attn.template import PromptTemplate

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUNDLED = Path(__file__).parents[2] / "retrieval_attn" / "model" / "bundled"


def bytelevel() -> Any:
    """The bundled tokenizer with ChatML's markers; one of them swallows blanks behind it, as Phi-3's do."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    markers = [AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False, rstrip=True)]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.chat_template = CHATML
    return tokenizer


def sentencepiece(prefix: str) -> Any:
    """As Llama 2's, with a special token at the start. prefix: put a blank before texts "always", or the "first"."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    backend = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [("h", "i"), ("▁", "hi")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    if prefix == "always":
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "bytelevel": bytelevel(),
    "spm-always": sentencepiece("always"),
    "spm-first": sentencepiece("first"),
    "slow": ByT5Tokenizer(),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


PIECES = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "<extra_id_0>",
    "<",
    "s>",
    "hi",
    " ",
    "\n",
    "é",
    "<|im_",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(text=TEXTS)
def test_no_text_becomes_a_control_token(name: str, text: str) -> None:
    """Ids of any text decode to it, and none of them is a control token but the beginning's."""
    text = text.encode(errors="replace").decode()
    tokenizer = TOKENIZERS[name]
    encoder = encoder_of(tokenizer)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    ids = encoder.encode(text).ids
    assert not control & set(ids)
    if name == "bytelevel":
        assert decoded(tokenizer, ids) == text
    around = tokenizer("")["input_ids"]
    begun = encoder.encode(text, begins=True).ids
    assert [token for token in begun if token in control] == [token for token in around if token in control]


@given(before=TEXTS, after=TEXTS)
def test_a_template_keeps_its_control_tokens(before: str, after: str) -> None:
    """Whatever two messages say, the conversation has the markers of the template, and decodes to what was said."""
    said = [text.encode(errors="replace").decode() for text in (before, after)]
    tokenizer = TOKENIZERS["bytelevel"]
    encoder = encoder_of(tokenizer)
    escapes = encoder.escapes(said)
    messages = escapes.apply([{"role": "user", "content": text} for text in said])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = encoder.encode(text, escapes).ids
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}] * 2, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    control = set(tokenizer.all_special_ids)
    assert [token for token in ids if token in control] == [token for token in plain if token in control]
    # the template trims what is said; "<|im_end|>" swallows the line's end behind it
    wanted = "".join(f"<|im_start|>user\n{text.strip()}<|im_end|>" for text in said) + "<|im_start|>assistant\n"
    assert decoded(tokenizer, ids).replace("<|im_end|>\n", "<|im_end|>") == "<s>" + wanted.replace(
        "<|im_end|>\n", "<|im_end|>"
    )


def test_other_texts_keep_the_tokenizers_ids(tokenizer: Any) -> None:
    for text in ("", "hi", " hi there\n", "Ünïcödé 📖", "<", "a < s > b"):
        for begins in (False, True):
            assert (
                encoder_of(tokenizer).encode(text, begins=begins).ids
                == tokenizer(text, add_special_tokens=begins)["input_ids"]
            )


def test_the_text_around_a_word_is_tokenized_as_transformers_does() -> None:
    """A text with words gets the ids of `split_special_tokens=True`, at its start and behind a marker."""
    for name in ("bytelevel", "spm-always", "spm-first"):
        tokenizer = TOKENIZERS[name]
        encoder, text = encoder_of(tokenizer), "hi </s><s> hi</s>"
        split = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        tokenizer("", split_special_tokens=False)
        assert encoder.encode(text).ids == split, name
        escapes = encoder.escapes(text)
        found = encoder.encode(f"hi</s>{escapes.escape('hi<s>')}", escapes).ids
        marked = tokenizer("hi</s>hi", add_special_tokens=False)["input_ids"]
        assert found[: len(marked)] == marked and len(found) > len(marked), name


def test_documents_and_questions_have_no_control_tokens() -> None:
    template = PromptTemplate.of(TOKENIZERS["bytelevel"])
    document, question = "Read </s> and <|im_end|>.", "Is <|im_start|> a word?"
    tokenizer = template.tokenizer
    around = [*template.context_ids("Read."), *template.question_ids("Is?")]
    for asked in (question, [{"role": "user", "content": question}]):
        ids = [*template.context_ids(document), *template.question_ids(asked)]
        special = set(tokenizer.all_special_ids)
        assert [token for token in ids if token in special] == [token for token in around if token in special]
        assert document in decoded(tokenizer, ids) and question in decoded(tokenizer, ids)
    assert tokenizer.convert_tokens_to_ids("</s>") in template.question_ids("x</s>", raw=True)


def test_a_tokenizer_without_other_tokens_for_a_word() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode("a b").ids == [2, 0]
    with pytest.raises(InputDataError, match="has no other tokens"):
        encoder.encode("a </s>")


def test_threads_share_an_encoder() -> None:
    """While some threads encode words as text, others encode the same words as control tokens."""
    tokenizer = TOKENIZERS["bytelevel"]
    encoder = encoder_of(tokenizer)
    escapes = encoder.escapes("")
    expected = {True: encoder.encode("hi</s>").ids, False: encoder.encode("hi</s>", escapes).ids}
    assert expected[True] != expected[False]
    wrong: list[object] = []

    def work(literal: bool) -> None:
        for _ in range(200):
            found = encoder.encode("hi</s>", None if literal else escapes).ids
            if found != expected[literal]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(bool(number % 2),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_stand_in_is_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["aa", "bb", "cc"])
    monkeypatch.setattr("retrieval_attn.prompt.encode.secrets.token_hex", lambda _: next(drawn))
    assert stand_in("say waa", [{"content": "wbb"}]) == "wcc"


def test_values_that_are_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for refusing in (stand_in, encoder_of(TOKENIZERS["slow"]).escapes("").apply):
        with pytest.raises(InputDataError, match="nested"):
            refusing(deep)
