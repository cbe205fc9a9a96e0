"""Tool calls and reasoning through a real server: openai's and Anthropic's clients, whole and streamed.

The model answers with scripts: a thought and two calls first, and a text after their results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.chat_templates import FAMILIES, TOOLS
from tests.server.process import Served, serving
from tests.server.scripted_model import save_scripted_model

openai = pytest.importorskip("openai", reason="tests of the server need openai")
anthropic = pytest.importorskip("anthropic", reason="tests of the server need anthropic")

CITIES = ({"city": "Oslo", "days": 3}, {"city": "Rome", "days": 12})
CALLS = [("get_weather", arguments) for arguments in CITIES]
SCRIPTS = {
    "1": 'Both, I think.\n</think>\n\nLet me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Oslo", "days": 3}}\n</tool_call> \n<tool_call>{"name": "get_weather", "arguments": {"city": '
    '"Rome", "days": 12}}</tool_call>',
    "4": "Done</think>It rains in Oslo.",
    "3": "All the results.</think>Both are wet.",
    "plain": "Plain words in thought",
}
BEHIND = {
    '{"name": "get_weather", "arguments":': ' {"city": "Bonn", "days": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "': 'write_file", "arguments": {"path": "x"}}</tool_call>',
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scripted")
    save_scripted_model(folder, FAMILIES["qwen3-thinking"], SCRIPTS, BEHIND)
    options = "--name", "tiny", "--store", str(folder / "store"), "--warm-up", "0"
    with serving(str(folder), *options, preloaded=True) as served:
        yield served


@pytest.fixture
def client(qwen: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client: Any, messages: list[Any] | None = None, script: str = "", **options: Any) -> Any:
    extra = {"chat_template_kwargs": {"script": script}} if script else {}
    return client.chat.completions.create(
        model="tiny",
        messages=messages or [{"role": "user", "content": "Weather?"}],
        tools=TOOLS,
        extra_body=extra,
        **options,
    )


def joined(stream: Any) -> tuple[dict[str, Any], str]:
    """The message of a stream, and its finish_reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta.model_dump(exclude_none=True)
        reason = choice.finish_reason or reason
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def calls_of(calls: Any) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_turn_with_calls_and_their_results(client: Any) -> None:
    """Whole: the message as the client returned it goes back with the results, unchanged."""
    first = chat(client)
    choice = first.choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls" and message.content == "Let me see."
    assert message.reasoning_content == "Both, I think."
    assert calls_of(message.model_dump()["tool_calls"]) == CALLS
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    second = chat(client, [{"role": "user", "content": "Weather?"}, message, *results]).choices[0]
    assert second.finish_reason == "stop" and second.message.content == "It rains in Oslo."
    assert second.message.tool_calls is None and second.message.reasoning_content == "Done"


def test_a_stream_has_the_calls_in_pieces(client: Any) -> None:
    chunks = list(chat(client, stream=True))
    message, reason = joined(iter(chunks))
    assert reason == "tool_calls" and calls_of(message["tool_calls"]) == CALLS
    assert message["content"] == "Let me see." and message["reasoning_content"] == "Both, I think."
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in pieces if call.id] == ["get_weather"] * 2
    assert sum(1 for call in pieces if not call.id) > 5
    whole = chat(client).choices[0].message
    assert whole.tool_calls[0].id != whole.tool_calls[1].id


def test_openais_accumulator_takes_the_stream(client: Any) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=TOOLS
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [json.loads(one.arguments) for one in done] == list(CITIES) and final.finish_reason == "tool_calls"


def test_choices_of_tools(client: Any) -> None:
    assert chat(client, tool_choice="none").choices[0].message.tool_calls is None
    assert len(chat(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    text = chat(client, script="plain").choices[0].message
    assert text.tool_calls is None and "Plain words" in text.reasoning_content
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice, wanted in (
        (named, ("get_weather", {"city": "Bonn", "days": 4})),
        ("required", ("write_file", {"path": "x"})),
    ):
        forced = chat(client, tool_choice=choice).choices[0]
        assert calls_of(forced.message.model_dump()["tool_calls"]) == [wanted] and forced.finish_reason == "tool_calls"
        assert forced.message.content is None
        message, _ = joined(chat(client, tool_choice=choice, stream=True))
        assert calls_of(message["tool_calls"]) == [wanted]
    for wrong in ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, {"tool_choice": "all"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            chat(client, **wrong)


def test_a_length_that_cuts_a_call_off(client: Any) -> None:
    whole = chat(client, logprobs=True)
    tokens = [one.token for one in whole.choices[0].logprobs.content]
    count = next(number for number, text in enumerate(tokens) if "Oslo" in text) + 1
    cut = chat(client, max_tokens=count).choices[0]
    assert cut.finish_reason == "length" and "Oslo" in cut.message.tool_calls[0].function.arguments
    assert "days" not in cut.message.tool_calls[0].function.arguments
    assert "".join(tokens).startswith("Both, I think.\n</think>")  # of the text as the model wrote it


def test_reasoning_without_tools(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Weather?"}])
    message = answer.choices[0].message
    assert message.reasoning_content == "Both, I think." and message.content.startswith("Let me see.\n\n<tool_call>")
    assert message.tool_calls is None


# -- Anthropic -------------------------------------------------------------------------------------

TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": TOOLS[0]["function"]["parameters"]}


@pytest.fixture
def claude(qwen: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=qwen.url, api_key="none", max_retries=0) as found:
        yield found


def ask(claude: Any, messages: list[Any] | None = None, **options: Any) -> Any:
    given = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": messages or [{"role": "user", "content": "Weather?"}],
        **options,
    }
    return claude.messages.create(**{"tools": [TOOL], **given})


def blocks(message: Any) -> list[Any]:
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, names[block.type])) for block in message.content]


WANTED = [("thinking", "Both, I think."), ("text", "Let me see."), *(("tool_use", city) for city in CITIES)]


def test_a_message_of_anthropics_form(claude: Any) -> None:
    first = ask(claude)
    assert blocks(first) == WANTED and first.stop_reason == "tool_use" and first.stop_sequence is None
    assert first.role == "assistant" and first.model == "tiny" and first.id.startswith("msg_")
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}],
         "cache_control": {"type": "ephemeral"}}
        for block in first.content if block.type == "tool_use"
    ]  # fmt: skip
    said = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": first.content}]
    second = ask(claude, [*said, {"role": "user", "content": results}])
    assert blocks(second) == [("thinking", "Done"), ("text", "It rains in Oslo.")] and second.stop_reason == "end_turn"


def test_a_stream_of_anthropics_form(claude: Any) -> None:
    given = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL]}
    with claude.messages.stream(**given) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks(final) == WANTED and final.stop_reason == "tool_use"
    whole = ask(claude)
    assert final.usage.output_tokens == whole.usage.output_tokens > 20
    assert events[0] == "message_start" and events[-1] == "message_stop"
    raw = list(claude.messages.create(stream=True, **given))
    starts = [event.index for event in raw if event.type == "content_block_start"]
    stops = [event.index for event in raw if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3] and raw[-2].type == "message_delta"
    pieces = [event.delta.partial_json for event in raw if event.type == "content_block_delta" and event.index == 2]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == CITIES[0]


def test_reasons_to_stop(claude: Any) -> None:
    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"
    found = ask(claude, stop_sequences=["never", "me se"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "me se")
    assert blocks(found) == [WANTED[0], ("text", "Let ")]
    forced = ask(claude, tool_choice={"type": "tool", "name": "get_weather"})
    assert blocks(forced) == [("tool_use", {"city": "Bonn", "days": 4})] and forced.stop_reason == "tool_use"
    assert len(ask(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).content) == 3
    assert [block.type for block in ask(claude, tool_choice={"type": "none"}).content] == ["thinking", "text"]


def test_cached_tokens_and_counts(claude: Any) -> None:
    said = [{"role": "user", "content": "The sea is wide. " * 100 + "\n\nWeather?"}]
    ask(claude, said)
    second = ask(claude, said).usage
    counted = claude.messages.count_tokens(model="tiny", messages=said, tools=[TOOL]).input_tokens
    assert second.cache_read_input_tokens > 400 and second.cache_creation_input_tokens == 0
    assert second.input_tokens + second.cache_read_input_tokens == counted


def test_claude_codes_billing_header_is_left_out(claude: Any) -> None:
    """It is another one in each request, at the very start."""
    count = claude.messages.count_tokens
    said = [{"role": "user", "content": "Hi."}]
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"}
    kind = {"type": "text", "text": "Be kind."}
    assert (
        count(model="tiny", messages=said, system=[line, kind]).input_tokens
        == count(model="tiny", messages=said, system="Be kind.").input_tokens
        > count(model="tiny", messages=said).input_tokens
    )


def test_errors_have_anthropics_form(claude: Any, qwen: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as found:
        ask(claude, model="other")
    assert found.value.body["type"] == "error" and found.value.body["error"]["type"] == "not_found_error"
    assert found.value.request_id == found.value.body["request_id"]
    user = {"role": "user", "content": "Hi."}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    wrongs: list[tuple[str, dict[str, Any]]] = [
        ("image", {"messages": [{"role": "user", "content": [image]}]}),
        ("beginning of the answer", {"messages": [user, {"role": "assistant", "content": "It"}]}),
        ("web_search", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("none of the tools", {"tool_choice": {"type": "tool", "name": "other"}}),
        ("prompt is too long", {"messages": [{"role": "user", "content": "a b " * 9000}]}),
        ("format", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ]
    for words, wrong in wrongs:
        with pytest.raises(anthropic.BadRequestError, match=words) as refused:
            ask(claude, **wrong)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
    with qwen.client() as http:
        reply = http.get("/v1/messages")
        assert reply.status_code == 405 and reply.json()["type"] == "error"
        reply = http.get("/v1/models", headers={"host": "evil.example"})
        assert reply.json()["error"]["code"] == "host_not_allowed"
        reply = http.post("/v1/messages", headers={"host": "evil.example"}, json={})
        assert reply.status_code == 403 and reply.json()["error"]["type"] == "permission_error"


def test_markers_that_are_special_tokens_come_from_the_engines_process(tmp_path: Path) -> None:
    """Mistral's, which the text of an answer would not have; a result goes back with an id of another server."""
    scripts = {
        "1": '[THINK]Rain?[/THINK]See.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 2}',
        "3": "It rains.",
    }
    save_scripted_model(tmp_path, FAMILIES["mistral-v13"], scripts, {})
    options = "--name", "tiny", "--store", str(tmp_path / "store"), "--warm-up", "0", "--engine", "process"
    with (
        serving(str(tmp_path), *options, preloaded=True) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        message = chat(client).choices[0].message
        assert (message.reasoning_content, message.content) == ("Rain?", "See.")
        assert calls_of(message.model_dump()["tool_calls"]) == [("get_weather", {"city": "Oslo", "days": 2})]
        assert joined(chat(client, stream=True))[1] == "tool_calls"
        tokens = chat(client, logprobs=True).choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == scripts["1"]
        call = {**message.tool_calls[0].model_dump(), "id": "toolu_1"}
        said = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        again = chat(client, [*said, {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"}])
        assert again.choices[0].message.content == "It rains."
        raw = client.completions.create(model="tiny", prompt="[TOOL_CALLS] a", max_tokens=2)
        assert "[" not in raw.choices[0].text
        assert any("mistral-args" in line["message"] for line in served.log)
