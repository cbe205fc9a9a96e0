"""Sampling options over HTTP: what they change, what is neutral, and the defaults of generation_config.json."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from retrieval_attn.errors import ConfigError
from retrieval_attn.model.bundled import model_path
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.server.protocol import CompletionBody
from retrieval_attn.server.settings import EngineSpec
from tests.server.process import Served, serving
from tests.tiny_models import build_model

TEXT = "The grass is green. The sky is blue. The sun is yellow. The grass is green. The sky is"


@pytest.fixture
def http(served: Served) -> Any:
    with served.client() as client:
        yield client


def complete(http: httpx.Client, **options: Any) -> dict[str, Any]:
    body = {"model": "bundled", "prompt": TEXT, "max_tokens": 12, "temperature": 0, **options}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def text_of(http: httpx.Client, **options: Any) -> str:
    return str(complete(http, **options)["choices"][0]["text"])


def tokens_of(http: httpx.Client, prompt: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"model": "bundled", "prompt": prompt}).json()["tokens"]
    return found


def test_penalties_change_an_answer(http: httpx.Client) -> None:
    """And no other one."""
    plain = text_of(http, max_tokens=40)
    for options in (
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"frequency_penalty": -2},
    ):
        assert text_of(http, max_tokens=40, **options) != plain, options
    assert text_of(http, max_tokens=40) == plain


def test_a_bias_brings_a_token_or_rules_it_out(http: httpx.Client) -> None:
    """In chats as well; log-probabilities stay those of the model."""
    (first,) = complete(http, max_tokens=1, logprobs=1)["choices"]
    wanted = tokens_of(http, "number")[-1]
    (biased,) = complete(http, max_tokens=1, logprobs=1, logit_bias={str(wanted): 100})["choices"]
    assert biased["text"] != first["text"]
    assert biased["logprobs"]["top_logprobs"][0].items() >= first["logprobs"]["top_logprobs"][0].items()
    assert biased["logprobs"]["token_logprobs"][0] < first["logprobs"]["token_logprobs"][0]
    body = {"model": "bundled", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3, "temperature": 0}
    reply = http.post("/v1/chat/completions", json={**body, "logit_bias": {str(wanted): 100}}).json()
    assert reply["choices"][0]["message"]["content"] == biased["text"] * 3


def test_an_answer_goes_on_to_its_least_tokens(http: httpx.Client) -> None:
    """Beyond a token that ends it, and beyond a stop string; with ignore_eos beyond all end tokens."""
    ends = {"logit_bias": {"1": 100}}  # the bundled model's end token
    assert complete(http, **ends)["usage"]["completion_tokens"] == 0
    assert complete(http, min_tokens=5, **ends)["usage"]["completion_tokens"] == 5
    found = complete(http, ignore_eos=True, **ends)
    assert found["choices"][0]["finish_reason"] == "length" and found["usage"]["completion_tokens"] == 12
    whole = text_of(http)
    stop = whole[1:3]
    assert text_of(http, stop=stop) == whole[:1]
    late = complete(http, stop=stop, min_tokens=12)
    assert late["choices"][0]["text"] == whole and late["choices"][0]["finish_reason"] == "length"


def test_no_share_of_the_probability_is_greedy(http: httpx.Client) -> None:
    greedy = text_of(http)
    assert {text_of(http, temperature=2, top_p=0, seed=seed) for seed in range(3)} == {greedy}


NEUTRAL: dict[str, list[Any]] = {
    "repetition_penalty": [1, 1.0, None],
    "presence_penalty": [0, 0.0, None],
    "frequency_penalty": [0, 0.0, None],
    "logit_bias": [{}, None],
    "min_tokens": [0, None],
    "ignore_eos": [False, None],
    "top_k": [-1, 0, None],
    "use_beam_search": [False, None],
    "early_stopping": [False, None],
    "include_stop_str_in_output": [False, None],
    "skip_special_tokens": [True, None],
    "spaces_between_special_tokens": [True, None],
    "length_penalty": [1, 1.0, None],
    "typical_p": [1.0, None],
    "no_repeat_ngram_size": [0, None],
    "stop_token_ids": [[], None],
    "bad_words": [[], None],
}


def test_neutral_values_are_accepted_and_change_nothing(http: httpx.Client) -> None:
    plain = text_of(http)
    for number in range(3):
        assert text_of(http, **{name: values[number % len(values)] for name, values in NEUTRAL.items()}) == plain


@pytest.mark.parametrize(
    "options",
    [
        {"use_beam_search": True},
        {"length_penalty": 1.1},
        {"skip_special_tokens": False},
        {"stop_token_ids": [5]},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.5},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"5": True}},
        {"logit_bias": {"9999999999": 1}},
        {"logit_bias": {"4000000": 1}},
        {"min_tokens": 13},
        {"min_tokens": -1},
        {"min_tokens": True},
        {"ignore_eos": 1},
        {"stop": "\ud800"},
    ],
    ids=str,
)
def test_other_values_are_refused(http: httpx.Client, options: dict[str, Any]) -> None:
    body = json.dumps({"model": "bundled", "prompt": "a", "max_tokens": 12, **options})
    reply = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", reply.text


fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(-1, 2**31 - 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=4),
    },
)


@given(fields, fields)
@settings(max_examples=200, deadline=None)
def test_a_body_says_what_the_defaults_do_not(said: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Over the whole range of every field: said, else the default, else neutral."""
    usual = {name: max(value, 0) if name == "top_k" else value for name, value in defaults.items()}
    draw = CompletionBody.model_validate({"model": "m", "prompt": "p", **said}).draw(3, 2, usual)
    expected = {"temperature": 1.0, **usual, **said}
    expected["top_k"] = max(expected.get("top_k", 0), 0)
    assert draw == SamplingParams(**expected, seed=3, logprobs=2)


@given(st.sampled_from(sorted(NEUTRAL)), st.one_of(st.floats(), st.integers(), st.booleans(), st.text(), st.none()))
@settings(max_examples=200, deadline=None)
def test_any_value_is_served_or_refused(name: str, value: Any) -> None:
    with contextlib.suppress(ValidationError, ConfigError):  # any other error would be the server's, status 500
        CompletionBody.model_validate({"model": "m", "prompt": "p", name: value}).draw(0, 0, {})


def facts_of(generation_config: str, **values: Any) -> dict[str, Any]:
    llm: Any = SimpleNamespace(model=build_model("llama"), tokenizer=SimpleNamespace(), max_context=100)
    for name, value in values.items():
        setattr(llm.model.generation_config, name, value)
    return dict(EngineSpec("tiny", {}, {}, generation_config=generation_config).facts(llm).sampling)


def test_the_sampling_values_of_a_generation_config() -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    expected = {name: value for name, value in values.items() if name != "do_sample"}
    assert facts_of("auto", **values) == expected and facts_of("auto") == {}
    assert facts_of("none", **values) == facts_of("vllm", **values) == {}
    with pytest.raises(ConfigError, match=r"generation_config.json.*repetition_penalty.*--generation-config none"):
        facts_of("auto", repetition_penalty=0.0)
    with pytest.raises(ConfigError, match="generation_config must be one of auto, none, vllm"):
        EngineSpec("tiny", {}, {}, generation_config="neutral")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "none"])
def test_requests_get_the_models_sampling_values(way: str, tmp_path: Path) -> None:
    """A file that says top_k=1: without a word about it every answer is greedy, as none is without the file."""
    model = tmp_path / "model"
    shutil.copytree(model_path("bundled"), model)
    given = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**given, "do_sample": True, "top_k": 1}))
    options = ("--name", "bundled", "--warm-up", "0", "--engine", "process", "--store", str(tmp_path / "store"))
    arguments = (str(model), *options, "--generation-config", way)
    with serving(*arguments, preloaded=True) as served, served.client() as http:
        greedy = text_of(http)
        found = [text_of(http, temperature=None, seed=seed) for seed in range(4)]
        assert all(text == greedy for text in found) == (way == "auto")
        assert text_of(http, temperature=1.5, top_k=-1, seed=1) != greedy
