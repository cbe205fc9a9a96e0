"""Long sessions of agents over HTTP: what a turn prefills if its history is kept, rewritten, trimmed or compacted."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from retrieval_attn.engine.prefix_handle import CROP_TOKENS
from retrieval_attn.server.protocol import SESSION_HEADERS, ChatBody, CompletionBody, session_of
from tests.preloaded import ROOT
from tests.server.chat_templates import BUNDLED
from tests.server.process import WORDS, Served, serving

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the form of Qwen3's: it drops the thinking of answers before the user's last message."""
PROPERTIES = {"path": {"type": "string"}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": WORDS * 3, "parameters": {"type": "object", "properties": PROPERTIES}},
}
SYSTEM = {"role": "system", "content": WORDS * 30}
ARGUMENTS = "--warm-up", "0", "--engine", "here", "--window", "128"

Message = dict[str, Any]


class Turn(NamedTuple):
    """cached, prompt: tokens by the server's count. best: longest common prefix with an earlier prompt's ids."""

    prompt: int
    cached: int
    best: int
    answer: Message
    tokens: tuple[bytes, ...]

    @property
    def is_reused(self) -> bool:
        """Whether all tokens before the first new one were cached, but for those that a crop is not worth."""
        return self.best - CROP_TOKENS < self.cached <= self.best


class Talk:
    """Conversations with one server, whose prompts are compared with all earlier ones."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self.seen = http, list[np.ndarray]()

    def ids(self, messages: list[Message]) -> np.ndarray:
        """Token ids of a prompt."""
        body = {"messages": messages, "tools": [TOOL], "add_generation_prompt": True}
        return np.array(self._http.post("/tokenize", json=body).raise_for_status().json()["tokens"])

    def ask(self, messages: list[Message], tokens: int = 2, **options: Any) -> Turn:
        """Send a turn."""
        body = {"model": "bundled", "messages": messages, "tools": [TOOL], "max_tokens": tokens, "temperature": 0}
        reply = self._http.post("/v1/chat/completions", json=body | {"logprobs": True} | options)
        assert reply.status_code == 200, reply.text
        found, usage, ids = reply.json()["choices"][0], reply.json()["usage"], self.ids(messages)
        best = max((common(ids, one) for one in self.seen), default=0)
        self.seen.append(ids)
        assert usage["prompt_tokens"] == len(ids)
        said = tuple(bytes(one["bytes"]) for one in found["logprobs"]["content"])
        return Turn(len(ids), usage["prompt_tokens_details"]["cached_tokens"], best, found["message"], said)


def common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def step(number: int, result_words: int = 60) -> list[Message]:
    """An answer with thinking and a call, and the call's result."""
    call = {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": "read", "arguments": json.dumps({"path": f"{number}.py"})},
    }
    result = " ".join(str((number * 7919 + place * 31) % 997) for place in range(result_words))
    return [
        {"role": "assistant", "content": f"Step {number}.", "reasoning_content": WORDS * 4, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with TEMPLATE."""
    made = tmp_path_factory.mktemp("models") / "bundled"
    shutil.copytree(BUNDLED, made, ignore=shutil.ignore_patterns("__*"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with serving(*ARGUMENTS, str(folder), preloaded=True) as served, served.client() as client:
        yield client


def test_a_template_that_drops_thinking_costs_the_last_users_turn(http: httpx.Client) -> None:
    """Within a turn of tool calls all is continued; the next turn of the user reads what lost its thinking, and no
    turn before it again.
    """
    talk, said = Talk(http), [SYSTEM, user(f"Fix a. {WORDS}")]
    began = talk.ask(said).prompt
    for number in range(4):
        said += step(number)
        turn = talk.ask(said)
        assert turn.is_reused and turn.best == talk.seen[-2].size, "all but the new answer and its result"
    said += [{"role": "assistant", "content": "Done.", "reasoning_content": WORDS}, user(f"Fix b. {WORDS}")]
    turn = talk.ask(said)
    assert turn.is_reused and began - 32 < turn.best <= began, "up to the first answer, inside a cached prompt"
    second = turn.prompt
    for number in range(4, 7):
        said += step(number)
        assert talk.ask(said).is_reused
    said += [{"role": "assistant", "content": "Done.", "reasoning_content": WORDS}, user("Fix c.")]
    turn = talk.ask(said)
    assert turn.is_reused and second - 32 < turn.best <= second, "the first user's turn is as it was"


def test_a_trimmed_result_costs_what_follows_it(http: httpx.Client) -> None:
    talk, said = Talk(http), [SYSTEM, user(f"Trim. {WORDS}")]
    for number in range(6):
        said += step(number, 200)
    whole = talk.ask(said)
    place = 7  # of the third result
    text = said[place]["content"]
    trimmed = [*said[:place], {**said[place], "content": f"{text[:400]} [...] {text[-40:]}"}, *said[place + 1 :]]
    turn = talk.ask(trimmed)
    before, through = (talk.ids(said[:count]).size for count in (place, place + 1))
    assert turn.is_reused and before + 100 < turn.best < through, "inside the result"
    assert turn.prompt < whole.prompt
    following = talk.ask([*trimmed, *step(6)])
    assert following.is_reused and following.best == turn.prompt
    back = talk.ask([*said, *step(6)])
    assert back.is_reused and back.best == whole.prompt, "the untrimmed history is still cached"


def test_a_compaction_keeps_tools_and_system_prompt(http: httpx.Client) -> None:
    talk, said = Talk(http), [SYSTEM, user(f"Compact. {WORDS}")]
    for number in range(4):
        said += step(number)
    talk.ask(said)
    summary = [SYSTEM, user(f"Summary of the work so far: {WORDS * 4}")]
    system = talk.ids([SYSTEM]).size
    turn = talk.ask(summary)
    assert turn.is_reused and system - 32 < turn.best < system + 32
    following = talk.ask([*summary, *step(9)])
    assert following.is_reused and following.best == turn.prompt


@pytest.mark.parametrize("kind", ["kept", "edited", "encoded otherwise"])
def test_an_answer_is_continued_up_to_its_first_other_token(http: httpx.Client, kind: str) -> None:
    """All of it, up to a client's edit, or up to the first token that its text has not when it is encoded again."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary = AutoTokenizer.from_pretrained(BUNDLED).get_vocab()
    numbers = {
        bytes(letters[one] for one in word): number for word, number in vocabulary.items() if letters.keys() >= {*word}
    }
    talk, said = Talk(http), [SYSTEM, user(f"Answer kept. {WORDS}")]
    hot = {"temperature": 2.0, "seed": 1} if kind == "encoded otherwise" else {}
    first = talk.ask(said, 140, min_tokens=140, **hot)
    assert len(first.tokens) == 140
    # the last token was not fed to the model
    known = np.concatenate((talk.seen[0], [numbers.get(one, -1) for one in first.tokens[:-1]]))
    talk.seen.append(known)
    text = first.answer["content"]
    place = len(text) * 2 // 3
    text = text[:place] + "#" + text[place:] if kind == "edited" else text
    turn = talk.ask([*said, {"role": "assistant", "content": text}, user("On.")])
    assert turn.is_reused
    if kind == "kept":
        assert turn.best >= known.size - 1 and turn.cached > first.prompt
    elif kind == "edited":
        assert first.prompt + CROP_TOKENS < turn.best < known.size - 20 and turn.cached > first.prompt
    else:
        assert first.prompt - 1 <= turn.best < known.size - 1, "the test has no such token"


def test_a_session_outlasts_single_questions(folder: Path) -> None:
    """Which the server evicts first, although they were asked later; without pins it is the session."""
    cached = {}
    for minutes in ("30", "0"):
        arguments = ("--keep-session", minutes, "--prefix-cache-memory", "12MiB", "--prefix-cache-disk", "0")
        with serving(*ARGUMENTS, *arguments, str(folder), preloaded=True) as served, served.client() as client:
            talk, said = Talk(client), [SYSTEM, user(f"Fix a. {WORDS * 9}")]
            talk.ask(said, session_id="agent")
            for number in range(10):
                question = {"model": "bundled", "prompt": f"{number} {WORDS * 50}", "max_tokens": 1}
                client.post("/v1/completions", json=question).raise_for_status()
            cached[minutes] = talk.ask([*said, *step(0)], session_id="agent")
    assert cached["30"].is_reused and cached["0"].cached < 200 < cached["30"].best


@pytest.mark.parametrize("templated", [True, False])
def test_the_example_of_an_agent(
    http: httpx.Client, served: Served, templated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few turns with tools of the template, and described in a message. Cached is what an unlimited cache has, but
    for tokens that a crop is not worth.
    """
    pytest.importorskip("openai", reason="the example needs openai")
    url = str(http.base_url) if templated else served.url
    runpy.run_path(str(ROOT / "examples" / "agent_session.py"))["main"](
        [url.rstrip("/"), "--turns", "6", "--length", "2k", "--answer", "4"]
    )
    printed = capsys.readouterr().out
    turns = re.findall(r"^ +\d+ +(\d+) +(\d+) +[\d.]+ s ", printed, re.MULTILINE)
    last = re.search(r"(\d+) turns, ([\d,]+) prompt tokens: ([\d.]+)% cached, ([\d.]+)% with an unlimited", printed)
    assert last is not None, printed
    prompts, cached = (sum(int(turn[place]) for turn in turns) for place in (0, 1))
    assert int(last[1]) == len(turns) > 3 and int(last[2].replace(",", "")) == prompts
    reused, ceiling = float(last[3]), float(last[4])
    assert reused == pytest.approx(100 * cached / prompts, abs=0.1)
    assert ceiling - 100 * CROP_TOKENS * len(turns) / prompts < reused <= ceiling + 8
    assert ("the server refuses them" in printed) != templated


def session(headers: dict[str, str] | None = None, messages: list[Message] | None = None, **fields: Any) -> str:
    body = {"model": "m", "messages": messages or [SYSTEM, user("Fix a.")], **fields}
    return session_of(ChatBody.model_validate(body), httpx.Headers(headers or {}))


def test_names_of_sessions() -> None:
    assert session() == session(user="one") == "", "a single question"
    answered = [SYSTEM, user("Fix a."), {"role": "assistant", "content": "Done."}, user("And b.")]
    assert session(messages=answered) == session(messages=[*answered, *step(1)]) != ""
    assert session(messages=answered) != session(messages=[answered[0], user("Fix c."), *answered[2:]])
    assert session(messages=answered, user="one") != session(messages=answered, user="two")
    names = [session({header: "one"}) for header in SESSION_HEADERS]
    assert {*names, session(session_id="one"), session(prompt_cache_key="one")} == {names[0]} != {""}
    assert session({"X-Session-Id": "one"}, prompt_cache_key="two") == names[0] != session(prompt_cache_key="two")
    title = [{"role": "system", "content": "Write a title."}, user("Fix a.")]
    assert session(session_id="one", messages=title) != names[0], "a side request does not end a session"
    text = CompletionBody.model_validate({"model": "m", "prompt": "a", "session_id": "one"})
    assert session_of(text, {}) != "" == session_of(CompletionBody.model_validate({"model": "m", "prompt": "a"}), {})
