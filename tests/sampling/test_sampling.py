"""Sampling options and ends of answers of `LLM` and `Context`; prompts with the special tokens of a start, once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

import retrieval_attn as ra
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.model.bundled import model_path
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.server.prompts import Prompts
from retrieval_attn.template import PromptTemplate

TEXT = "The grass is green. The sky is blue. The sun is yellow. The grass is green. The sky is"
OPTIONS: dict[str, Any] = {"window": 64, "sink": 4, "retrieve": "all", "device": "cpu"}
END = 1
"""The bundled model's end token."""


@pytest.fixture(scope="module")
def llm() -> ra.LLM:
    return ra.LLM("bundled", **OPTIONS)


@pytest.fixture
def changed(llm: ra.LLM) -> Any:
    """The same with a tokenizer and a generation config that a test may change."""
    found = copy.copy(llm)
    found.tokenizer = copy.deepcopy(llm.tokenizer)
    before = llm.model.generation_config
    llm.model.generation_config = copy.deepcopy(before)
    yield found
    llm.model.generation_config = before


def texts(llm: ra.LLM, *prompts: str, **options: Any) -> list[str]:
    return [answer.text for answer in llm.generate(prompts, progress=False, **{"max_new_tokens": 14, **options})]


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 2.5},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": {"16": -100, "40": 14.5}},
    {"temperature": 4.0, "seed": 5},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("options", ADJUSTED, ids=str)
def test_the_options_give_what_an_engine_gives(llm: ra.LLM, options: dict[str, Any]) -> None:
    """Greedy and seeded, alone, in a batch of prompts of other lengths, and in an engine: one sampler serves all."""
    prompts = [TEXT, "The sky is blue. The sky is blue. The sky is"]
    found = texts(llm, *prompts, max_new_tokens=40, **options)
    assert found == [texts(llm, prompt, max_new_tokens=40, **options)[0] for prompt in prompts]
    assert found != texts(llm, *prompts, max_new_tokens=40)
    with Engine(llm) as engine:
        asked = [
            Request(tuple(llm.tokenizer(prompt)["input_ids"]), 40, SamplingParams(**options)) for prompt in prompts
        ]
        assert [ticket.result().text for ticket in [engine.submit(request) for request in asked]] == found


def test_min_p_leaves_unlikely_tokens_out(llm: ra.LLM) -> None:
    hot: dict[str, Any] = {"temperature": 8.0, "seed": 3}
    greedy = texts(llm, TEXT)
    assert texts(llm, TEXT, **hot) != greedy == texts(llm, TEXT, **hot, min_p=1.0)


@pytest.mark.parametrize("options", [{"temperature": 1e-320}, {"temperature": 5.0, "top_p": 0}], ids=str)
def test_what_is_greedy(llm: ra.LLM, options: dict[str, Any]) -> None:
    assert texts(llm, TEXT, **options) == texts(llm, TEXT)


def test_an_answer_goes_on_to_its_least_tokens(llm: ra.LLM) -> None:
    bias = {END: 100.0}
    context = llm.read(TEXT, progress=False)

    def ask(**options: Any) -> ra.Answer:
        return context.ask("Why?", **{"max_new_tokens": 9, **options})

    assert ask(logit_bias=bias).tokens == []
    assert len(ask(logit_bias=bias, min_tokens=4).tokens) == 4
    endless = ask(logit_bias=bias, ignore_eos=True)
    assert endless.tokens == [END] * 9 and endless.finish_reason == "length"
    whole = ask(min_tokens=9).text
    stop = (whole[1:3],)
    assert ask(stop=stop).text == whole[:1]
    late = ask(stop=stop, min_tokens=9)
    assert (late.text, late.finish_reason) == (whole, "length")
    with context.stream("Why?", max_new_tokens=9, stop=stop, min_tokens=9) as stream:
        assert "".join(stream) == whole
    early = ask(stop=(whole[-2:],), min_tokens=2)
    assert early.finish_reason == "stop" and early.text == whole.split(whole[-2:])[0]
    several = context.ask_many(["Why?", "Who is it?"], max_new_tokens=9, stop=stop, min_tokens=9)
    assert several[0].text == whole and len(several[1].tokens) == 9


@pytest.mark.parametrize("configured", [None, 5, [5, 6]], ids=str)
def test_every_end_token_ends_an_answer(changed: ra.LLM, configured: Any) -> None:
    """Those of the generation config and the tokenizer's: of a context, of prompts, and of an engine."""
    changed.model.generation_config.eos_token_id = configured
    changed.tokenizer.eos_token = changed.tokenizer.convert_ids_to_tokens(77)
    ids = tuple(changed.tokenizer(TEXT)["input_ids"])
    ends = {77, *([] if configured is None else configured if isinstance(configured, list) else [configured])}
    with Engine(changed) as engine:
        for end in ends:
            bias: dict[int, float] = {end: 100.0}
            answers = [
                *changed.generate(TEXT, max_new_tokens=4, logit_bias=bias, progress=False),
                changed.read(TEXT, progress=False).ask("Why?", max_new_tokens=4, logit_bias=bias),
            ]
            assert [(answer.tokens, answer.finish_reason) for answer in answers] == [([], "stop")] * 2, end
            found = engine.submit(Request(ids, 4, SamplingParams(logit_bias=bias))).result()
            assert (found.tokens, found.reason) == ((), "stop"), end


def test_a_bias_of_a_token_that_is_not_there(llm: ra.LLM) -> None:
    width: int = llm.model.config.vocab_size
    for ask in (lambda: texts(llm, TEXT, logit_bias={width: 1}), lambda: texts(llm, TEXT, logit_bias={width: 0})):
        with pytest.raises(InputDataError, match=f"logit_bias names the token {width}; .* in \\[0, {width}\\)"):
            ask()
    with Engine(llm) as engine, pytest.raises(InputDataError, match="logit_bias names"):
        engine.submit(Request(((5, 6),), 4, SamplingParams(logit_bias={width: 1})))
    with pytest.raises(ConfigError, match="min_tokens must be an integer in \\[0, 4\\]"):
        Request(((5, 6),), 4, min_tokens=5)
    with pytest.raises(ConfigError, match="lone surrogate"):
        Request(((5, 6),), 4, stop=("\ud800",))


# -- what a prompt begins and ends with --------------------------------------------------------------


def closing(llm: Any, form: str = "<s> $A </s>") -> Any:
    """The model with a tokenizer that adds special tokens to every text."""
    tokenizer = llm.tokenizer
    specials = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=specials)
    return llm


def test_a_prompt_does_not_end_with_the_end_token(changed: ra.LLM) -> None:
    ids = [changed.tokenizer.bos_token_id, *changed.tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    expected = changed.read(ids[:-1], progress=False).continue_with(ids[-1:], max_new_tokens=14).text
    closing(changed)
    assert changed.tokenizer(TEXT)["input_ids"][-1] == END
    assert texts(changed, TEXT) == [expected]
    assert texts(changed, f"{TEXT}</s>") != [expected]  # one that the text has itself stays


def prompts_of(llm: Any) -> Prompts:
    """Of a server that makes control tokens of the words of special tokens in raw prompts."""
    return Prompts(llm.tokenizer, 5000, 10**5, parse_special=True)


def starts(llm: Any, place: str, text: str) -> list[int]:
    """The ids of a text as it is read there."""
    if place == "completions":
        return [token for part in prompts_of(llm).of_text(text) for token in part]
    seen: list[int] = []
    embedding: Any = llm.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _, given: seen.extend(given[0].flatten().tolist()))
    try:
        texts(llm, text, max_new_tokens=1)
    finally:
        hook.remove()
    return seen


@pytest.mark.parametrize("place", ["generate", "completions"])
def test_a_text_begins_with_one_bos(changed: ra.LLM, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """With one line of the log, of a tokenizer that adds one; what the tokenizer does not add is the text's own."""
    changed.tokenizer.chat_template = None
    plain = starts(changed, place, f"<s>{TEXT}")
    assert plain[0] == changed.tokenizer.bos_token_id != plain[1]
    doubled = starts(changed, place, f"<s><s>{TEXT}")
    assert doubled[:2] == [plain[0]] * 2
    closing(changed)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert [starts(changed, place, f"<s>{TEXT}") for _ in range(2)] == [plain, plain]
        assert starts(changed, place, TEXT) == plain
    assert ["begins with '<s>'" in record.getMessage() for record in caplog.records] == [True]


def test_a_context_begins_with_one_bos(changed: ra.LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The words of special tokens in a text that is read are text, those of the start token too."""
    changed.tokenizer.chat_template = None
    found = PromptTemplate.of(closing(changed).tokenizer).context_ids(f"<s>{TEXT}")
    assert found[0] == changed.tokenizer.bos_token_id not in found[1:] and changed.tokenizer.decode(found[1:]) == (
        f"<s>{TEXT}"
    )
    assert not caplog.records


def test_a_long_text_is_cut_before_its_last_paragraph_behind_one_bos(changed: ra.LLM) -> None:
    """Dropped ids do not move the cut."""
    paragraphs = f"{TEXT * 8}\n\nWhy is the sky blue?"
    expected = prompts_of(closing(changed)).of_text(paragraphs)
    found = prompts_of(changed).of_text(f"<s>{paragraphs}")
    assert len(expected) == 2 and found == expected


def test_a_prompt_of_one_token(llm: ra.LLM) -> None:
    """As transformers' own attention continues it, alone and among others."""
    token = llm.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert len(token) == 1
    with Engine(llm) as engine:
        expected = engine.submit(Request(tuple(token), 14)).result().text
    assert expected and texts(llm, "a") == [expected]
    assert texts(llm, "a", TEXT, "a")[::2] == [expected] * 2
    plain: Any = AutoModelForCausalLM.from_pretrained(model_path("bundled"), dtype=torch.float32)
    ids = torch.tensor([token])
    full = plain.generate(ids, max_new_tokens=14, do_sample=False, attention_mask=torch.ones_like(ids))
    assert llm.tokenizer.decode(full[0, 1:], skip_special_tokens=True) == expected
