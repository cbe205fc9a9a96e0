"""Chats with a base model without a chat template, which goes on with the words of the frame after its answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import retrieval_attn as ra
from retrieval_attn.cli import main
from retrieval_attn.cli.chat.local import LocalBackend
from retrieval_attn.sampling.sampling_params import Sampling
from retrieval_attn.store import ContextStore
from retrieval_attn.template import NO_TEMPLATE
from tests.server.inside import Inside
from tests.tiny_models import build_model

CONFIG = ra.Config(sink=4, window=24, retrieve=6, prefill_chunk=64)
LOOP = ": Par\nQuestion:"
"""What the model writes for ever, by single characters."""
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}A:"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Paris?"}], "max_tokens": 40, "temperature": 0}


@pytest.fixture
def base() -> tuple[Any, PreTrainedTokenizerFast]:
    """A llama whose next token depends on the last one alone, and a tokenizer of characters."""
    signs = ["<pad>", "<s>", "</s>", "\n", *map(chr, range(32, 125))]
    made = Tokenizer(models.WordLevel({sign: number for number, sign in enumerate(signs)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    named: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **named)
    model = build_model("llama", hidden_size=126, vocab_size=len(signs))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(signs), 126))
        model.lm_head.weight.zero_()
        for now, following in pairwise(LOOP):
            model.lm_head.weight[signs.index(following), signs.index(now)] = 1.0
    return model, tokenizer


@pytest.fixture
def inside(tmp_path: Path, base: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> Iterator[Inside]:
    with caplog.at_level(logging.WARNING):
        found = Inside(tmp_path, loaded=base)
        found.wait_until_it_serves()
    yield found
    found.end()


def chatted(inside: Inside, **options: Any) -> dict[str, Any]:
    with inside.client() as http:
        reply: httpx.Response = http.post("/v1/chat/completions", json=CHAT | options)
        assert reply.is_success, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        return {"text": choice["message"]["content"], "reason": choice["finish_reason"]}


def test_a_chat_answer_ends_before_the_next_question(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    assert chatted(inside) == {"text": " Par", "reason": "stop"}
    assert chatted(inside, stop="a") == {"text": " P", "reason": "stop"}, "a request's own strings hold, too"
    assert chatted(inside, ignore_eos=True)["reason"] == "length"
    with inside.client() as http:
        body = {"model": "tiny", "prompt": "Answer:", "max_tokens": 20, "temperature": 0}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == " Par\nQuestion: Par\nQ", "a completion is no chat"
    told = [record.getMessage() for record in (*caplog.get_records("setup"), *caplog.records)]
    assert told.count(NO_TEMPLATE) == 1


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_terminal_says_so_once(base: tuple[Any, Any], tmp_path: Path, template: str | None) -> None:
    model, tokenizer = base
    tokenizer.chat_template = template
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    llm = ra.LLM(tmp_path / "base", device="cpu", config=CONFIG)
    talk = LocalBackend(llm, "base", Sampling(max_new_tokens=40), ContextStore(tmp_path / "store"))
    first, second = "".join(talk.answer("Paris?")), "".join(talk.answer("Rome?"))
    assert (NO_TEMPLATE in talk.about) == (template is None)
    if template is None:
        assert first == second == " Par"
    else:
        assert first.startswith(" Par\nQuestion: Par"), "with a chat template an end token ends the answer"


def test_a_gguf_file_in_the_place_of_the_model_is_no_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    assert main(["chat", str(tmp_path / "cut.gguf")]) == 2
    told = capsys.readouterr().err
    assert "The header of" in told and "read as --document" not in told
