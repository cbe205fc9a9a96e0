"""`echo` of /v1/completions: the prompt before the answer, and log-probabilities of the prompt's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrieval_attn.engine import running_request as row
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import ConfigError
from retrieval_attn.model.bundled import model_path
from tests.engine.test_engine import ids, llm_of
from tests.server.process import Served, document

TEXTS = ["The grass is green. The sky is blue. The sun is", "There and back again. Here we"]


@pytest.fixture
def http(served: Served) -> Any:
    with served.client() as client:
        yield client


def complete(http: Any, **options: Any) -> dict[str, Any]:
    body = {"model": "bundled", "prompt": TEXTS[0], "max_tokens": 3, "temperature": 0, **options}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def tokens_of(http: Any, prompt: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"model": "bundled", "prompt": prompt}).json()["tokens"]
    return found


def test_a_prompt_is_before_its_answer(http: Any) -> None:
    """Of texts and of token ids, for each of several answers, whole and as a stream; alone without any token."""
    given: list[Any] = [TEXTS, [tokens_of(http, text) for text in TEXTS]]
    for prompt in given:
        plain = complete(http, prompt=prompt, n=2)
        echoed = complete(http, prompt=prompt, n=2, echo=True)
        assert [one["text"] for one in echoed["choices"]] == [
            text + one["text"] for text, one in zip([TEXTS[0]] * 2 + [TEXTS[1]] * 2, plain["choices"], strict=True)
        ]
        assert echoed["usage"] == {**plain["usage"], "prompt_tokens_details": echoed["usage"]["prompt_tokens_details"]}
    alone = complete(http, echo=True, max_tokens=0)
    assert alone["choices"][0]["text"] == TEXTS[0] and alone["usage"]["completion_tokens"] == 0
    body = {"model": "bundled", "prompt": TEXTS[0], "max_tokens": 3, "temperature": 0, "echo": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert pieces[0] == TEXTS[0] and "".join(pieces) == complete(http, echo=True)["choices"][0]["text"]


def reference(prompt: list[int]) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) of the bundled model with attention of transformers' own."""
    model = AutoModelForCausalLM.from_pretrained(model_path("bundled"), dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt])).logits[0].double().log_softmax(1)
    return found


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_tokens_of_a_prompt_have_their_log_probabilities(http: Any, max_tokens: int) -> None:
    """As an evaluation reads them: one value for each token of the prompt, and behind them those of the answer."""
    prompts = [tokens_of(http, document(12)), tokens_of(http, TEXTS[1])]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 2, "echo": True}
    found = complete(http, **asked)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = complete(http, **asked)["choices"]  # now that the prompt was read before
    assert [one["text"] for one in again] == [one["text"] for one in found["choices"]]
    for prompt, one, other in zip(prompts, again, found["choices"], strict=True):
        # behind the prompt, steps of one row and of two may differ in low bits
        for name, values in one["logprobs"].items():
            assert values[: len(prompt)] == other["logprobs"][name][: len(prompt)]
    assert found["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        expected, told = reference(prompt), choice["logprobs"]
        assert [len(values) for values in told.values()] == [len(prompt) + max_tokens] * 4
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(own.tolist(), abs=2e-3)
        best = [max(top.values()) for top in told["top_logprobs"][1 : len(prompt)]]
        assert best == pytest.approx(expected[:-1].amax(dim=1).tolist(), abs=2e-3)
        greedy = [value == most for value, most in zip(told["token_logprobs"][1 : len(prompt)], best, strict=True)]
        assert greedy == (expected[:-1].argmax(dim=1) == torch.tensor(prompt[1:])).tolist() and True in greedy


def test_more_log_probabilities_than_an_answer_should_have(http: Any) -> None:
    body = {"model": "bundled", "prompt": [[5] * 50_001], "max_tokens": 0, "echo": True, "logprobs": 20}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and "1,050,021 log-probabilities" in reply.json()["error"]["message"]


def test_a_token_that_would_end_the_answer_has_its_place(http: Any) -> None:
    """With max_tokens=1, as evaluations ask: they take the last token off, whichever it is."""
    prompt = tokens_of(http, TEXTS[0])
    found = complete(http, prompt=prompt, max_tokens=1, logprobs=1, echo=True, logit_bias={"1": 100})
    assert len(found["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1
    assert found["choices"][0]["text"] == TEXTS[0]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True, "stream": True},
        {"echo": True, "logprobs": 1, "stream": True},
        {"echo": True, "logprobs": 1, "context": "book"},
        {"echo": True, "logprobs": 1, "model": "bundled@book"},
    ],
    ids=str,
)
def test_what_is_not_served(http: Any, options: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={"model": "bundled", "prompt": "a", **options})
    assert reply.status_code == 400 and "echo" in reply.json()["error"]["message"], reply.text


def scored(llm: Any, requests: list[Request]) -> list[Finished]:
    with Engine(llm) as engine:
        return [ticket.result() for ticket in [engine.submit(request) for request in requests]]


def test_pieces_of_a_prompt_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens the logits of a part have room for, and beside other requests over the same prompt."""
    llm = llm_of()
    asked = Request((ids(300, 1), ids(31, 2)), 4, prompt_logprobs=3)
    (whole,) = scored(llm, [asked])
    assert len(whole.prompt) == 330 and all(len(score.top) == 3 for score in whole.prompt)
    monkeypatch.setattr(row, "SCORED_BYTES", 4 * 97 * 40)
    others = [Request((ids(300, 1), ids(9, number)), 6) for number in range(3)]
    for found in scored(llm, [others[0], asked, *others[1:], asked])[1::3]:
        assert found.cached_tokens == 0 and found.tokens == whole.tokens
        assert [score.logprob for score in found.prompt] == pytest.approx(
            [score.logprob for score in whole.prompt], abs=1e-4
        )
    (one,) = scored(llm, [Request(((5,),), 2, prompt_logprobs=0)])
    assert one.prompt == () and one.reason == "length"


def test_scores_are_asked_for_as_numbers() -> None:
    for wrong in (-1, 21, True, 1.0):
        with pytest.raises(ConfigError, match="prompt_logprobs must be None or an integer from 0 to 20"):
            Request(((5,),), prompt_logprobs=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without a saved context"):
        Request(((5,),), prompt_logprobs=1, context="book")


def test_an_evaluation_scores_texts(served: Served) -> None:
    """lm-eval's own client: the log-likelihood of continuations, and whether they are what greedy decoding writes."""
    why = 'needs lm-eval with its client: pip install "lm_eval[api]"'
    models = pytest.importorskip("lm_eval.models.openai_completions", reason=why, exc_type=ImportError)
    instance = pytest.importorskip("lm_eval.api.instance")
    pytest.importorskip("tenacity", reason=why)
    client = models.LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions", model="bundled", tokenizer=model_path("bundled"), batch_size=2
    )
    pairs = [(TEXTS[0], " yellow. Here we go."), (TEXTS[0], " purple and cold"), (TEXTS[1], " go.")]
    asked = [instance.Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found = client.loglikelihood(asked)
    for (before, behind), (total, greedy) in zip(pairs, found, strict=True):
        start = client.tok_encode(before)
        whole = client.tok_encode(before + behind)
        expected = reference(whole)[len(start) - 1 : -1]
        own = torch.tensor(whole[len(start) :])
        assert total == pytest.approx(float(expected.gather(1, own[:, None]).sum()), abs=0.02)
        assert greedy == bool((expected.argmax(dim=1) == own).all())
    assert [greedy for _, greedy in found][:2] == [True, False]
