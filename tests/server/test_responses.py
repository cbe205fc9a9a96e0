"""OpenAI's Responses API with the real client: answers, events, tools, and conversations that continue by id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from retrieval_attn.server.answer_parts import AnswerReader
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.response_bodies import ResponsesBody, ResponsesForm, turns_of_output
from tests.server.chat_templates import FAMILIES, TOOLS
from tests.server.process import ANSWER, QUESTION, Served, document, serving
from tests.server.scripted_model import save_scripted_model
from tests.server.test_messages import MARKED
from tests.server.test_tool_calls import BEHIND, CALLS, SCRIPTS

openai = pytest.importorskip("openai", reason="tests of the server need openai")

FUNCTIONS = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
WEATHER = "Weather?"
SPACED = 'One.</think><tool_call>{"name": "get__weather", "arguments": {"city": "Bergen"}} </tool_call>\n \n'


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scripted")
    scripts = SCRIPTS | {"spaced": SPACED}
    save_scripted_model(folder, FAMILIES["qwen3-thinking"], scripts, BEHIND)
    options = ("--name", "tiny", "--store", str(folder / "store"), "--warm-up", "0")
    with serving(str(folder), *options, preloaded=True) as served:
        yield served


@pytest.fixture
def client(qwen: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def bundled(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: Any, given: Any = WEATHER, **options: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": given, "tools": FUNCTIONS, **options})


def items(response: Any) -> list[Any]:
    """Type and value of each output item."""
    found: list[Any] = []
    for item in response.output:
        assert item.status == "completed" and item.id
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            (part,) = item.content
            found.append((part.type, part.text))
    return found


WANTED = [("reasoning_text", "Both, I think."), ("output_text", "Let me see."), *CALLS]
SECOND = [("reasoning_text", "Done"), ("output_text", "It rains in Oslo.")]


def results(response: Any) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]


def test_a_turn_with_calls_and_their_results(client: Any) -> None:
    """The results go back by the id of the response, or with the whole conversation."""
    first = ask(client)
    assert items(first) == WANTED and first.status == "completed" and first.object == "response"
    assert first.id.startswith("resp_") and first.output_text == "Let me see." and first.model == "tiny"
    assert [tool.name for tool in first.tools] == [tool["name"] for tool in FUNCTIONS]
    usage = first.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    second = ask(client, results(first), previous_response_id=first.id)
    assert items(second) == SECOND and second.previous_response_id == first.id
    whole = ask(client, [{"role": "user", "content": WEATHER}, *first.output, *results(first)], store=False)
    assert items(whole) == SECOND and whole.usage.input_tokens == second.usage.input_tokens


def test_a_stream_is_the_response_in_events(client: Any) -> None:
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    final = events[-1].response
    assert events[-1].type == "response.completed" and items(final) == WANTED
    assert events[0].response.id == final.id and events[0].response.status == "in_progress"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert done == final.output and added == [item.id for item in done]
    texts = {item.id: "" for item in done}
    for event in events:
        if event.type.endswith(".delta"):
            assert final.output[event.output_index].id == event.item_id
            texts[event.item_id] += event.delta
    said = [item.arguments if item.type == "function_call" else item.content[0].text for item in done]
    assert list(texts.values()) == said
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        assert sum(event.type == f"response.{kind}.delta" for event in events) > 1
    assert [event.arguments for event in events if event.type == "response.function_call_arguments.done"] == said[2:]
    assert [event.part.text for event in events if event.type == "response.content_part.done"] == said[:2]
    again = ask(client, results(final), previous_response_id=final.id, stream=True)
    assert items(list(again)[-1].response) == SECOND


def test_openais_accumulator_takes_the_stream(client: Any) -> None:
    with client.responses.stream(model="tiny", input=WEATHER, tools=FUNCTIONS) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == "Let me see." and items(final) == WANTED
    assert client.responses.retrieve(final.id).output[0] == final.output[0]


def test_choices_of_tools(client: Any) -> None:
    assert "<tool_call>" in ask(client, tool_choice="none").output_text
    assert items(ask(client, parallel_tool_calls=False)) == WANTED[:3]
    named = {"type": "function", "name": "get_weather"}
    forced = ask(client, tool_choice=named)
    assert items(forced) == [("get_weather", {"city": "Bonn", "days": 4})] and forced.tool_choice.name == "get_weather"
    assert items(ask(client, tool_choice="required")) == [("write_file", {"path": "x"})]
    assert items(client.responses.create(model="tiny", input=WEATHER))[0] == WANTED[0]


def test_functions_of_a_namespace(client: Any) -> None:
    """The model reads them under a name with their namespace, and clients get and return the two apart."""
    space = {"type": "namespace", "name": "get", "description": "About.", "tools": [FUNCTIONS[0] | {"name": "weather"}]}
    body = ResponsesBody.model_validate({"model": "m", "input": "x", "tools": [space]})
    (read,) = body.chat(body.turns([])).read_tools
    assert read["function"]["name"] == "get__weather" and read["function"]["description"] == "About.\n\nWeather."
    options: dict[str, Any] = {"tools": [space], "extra_body": {"chat_template_kwargs": {"script": "spaced"}}}
    first = ask(client, **options)
    _, call = first.output
    assert (call.namespace, call.name, call.arguments) == ("get", "weather", '{"city": "Bergen"}')
    assert first.tools[0].type == "namespace"
    events = [event for event in ask(client, stream=True, **options) if event.type.startswith("response.output_item")]
    assert [(event.item.namespace, event.item.name) for event in events[2:]] == [("get", "weather")] * 2
    (kept,) = turns_of_output([call.to_dict()])
    assert kept["tool_calls"][0]["function"]["name"] == "get__weather"
    assert ask(client, results(first), previous_response_id=first.id, tools=[space]).output_text == "Both are wet."


def test_an_answer_that_is_cut_off(client: Any) -> None:
    """It is incomplete, whole and streamed, and the conversation can go on."""
    whole = ask(client, max_output_tokens=2)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[-1].type == "reasoning" and whole.output[-1].status == "incomplete"
    last = list(ask(client, max_output_tokens=2, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.usage.output_tokens == 2
    for count in range(3, 30):
        cut = ask(client, max_output_tokens=count)
        if cut.output[-1].type == "function_call" and cut.output[-1].arguments.startswith('{"city": "Os'):
            break
    else:
        pytest.fail("no call was cut off")
    assert cut.output[-1].status == "incomplete" and "days" not in cut.output[-1].arguments
    assert ask(client, results(cut), previous_response_id=cut.id).output
    with pytest.raises(openai.BadRequestError, match="JSON object"):
        ask(client, [{"role": "user", "content": WEATHER}, *cut.output, *results(cut)])


def test_reasoning_goes_back(client: Any) -> None:
    """As content, as the encrypted_content that clients return alone, and as a summary."""
    first = ask(client, include=["reasoning.encrypted_content"], store=False)
    thought = first.output[0].model_dump(exclude_none=True)
    assert ask(client).output[0].encrypted_content is None
    head = {"type": "reasoning", "summary": []}
    for more in (
        {"encrypted_content": thought["encrypted_content"]},
        {"content": thought["content"], "encrypted_content": ""},
        {"summary": [{"type": "summary_text", "text": "Both, I think."}]},
    ):
        (turn,) = turns([head | more])
        assert turn == {"role": "assistant", "content": "", "reasoning_content": "Both, I think."}
    wrong = head | {"encrypted_content": "gAAAAABo"}
    with pytest.raises(openai.BadRequestError, match="encrypted_content is not of this server"):
        ask(client, [{"role": "user", "content": WEATHER}, wrong])


def turns(items: list[Any], before: list[Any] | None = None) -> list[Any]:
    return ResponsesBody.model_validate({"model": "m", "input": items}).turns(before or [])


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": f"f_{name}", "arguments": arguments}


def called(*names: str) -> list[Any]:
    return [{"id": n, "type": "function", "function": {"name": f"f_{n}", "arguments": "{}"}} for n in names]


def test_items_become_messages() -> None:
    """Reasoning, a text and calls are one message of the assistant; a text behind calls belongs to them."""
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]}
    one = {"role": "assistant", "content": "a"}
    result = {"role": "tool", "tool_call_id": "1", "name": "f_1", "content": "r"}
    more = {"tool_calls": called("1", "2"), "reasoning_content": "t"}
    assert turns([thought, said, call("1"), call("2"), output, said]) == [one | more, result, one]
    assert turns([call("1"), said, call("2")]) == [one | {"tool_calls": called("1", "2")}]
    assert turns([said, said]) == [one, one]
    assert turns([said, thought, call("1")]) == [
        one, {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": called("1")},
    ]  # fmt: skip
    assert turns([output], [one | {"tool_calls": called("1")}]) == [result]
    with pytest.raises(ApiError, match="call_id '1'"):
        turns([output], [one | {"tool_calls": called("2")}])
    cut = call("1", '{"city": "Os') | {"status": "incomplete"}
    (kept,) = turns_of_output([cut])
    assert kept["tool_calls"][0]["function"]["arguments"] == '{"raw_arguments": "{\\"city\\": \\"Os"}'


def test_first_messages_of_the_system_are_one() -> None:
    body = ResponsesBody.model_validate({"model": "m", "instructions": "a", "input": "x"})
    first = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    rest = [{"role": "user", "content": "d"}, {"role": "developer", "content": "e"}, {"role": "user", "content": "f"}]
    found = [message.turn for message in body.chat([*first, *rest]).messages]
    assert found[0] == {"role": "system", "content": "a\n\nb\n\nc"}
    assert [turn["role"] for turn in found] == ["system", "user", "system", "user"]


def test_instructions_are_of_one_request(bundled: Any) -> None:
    """They and the first messages of the developer are one message; the next request has its own."""
    options = {"model": "bundled", "temperature": 0, "max_output_tokens": 4}
    count = bundled.responses.create(input="the sky", **options).usage.input_tokens
    first = bundled.responses.create(input="the sky", instructions="Be kind. " * 20, **options)
    assert first.usage.input_tokens > count + 40 and first.instructions.startswith("Be kind.")
    developer = [{"role": "developer", "content": "Be kind. " * 20}, {"role": "user", "content": "the sky"}]
    assert bundled.responses.create(input=developer, **options).usage.input_tokens == first.usage.input_tokens
    second = bundled.responses.create(input="more", previous_response_id=first.id, **options)
    assert second.usage.input_tokens < count + 40 and second.instructions is None


def test_a_conversation_reuses_the_tokens_of_its_last_response(bundled: Any) -> None:
    options = {"model": "bundled", "instructions": document(), "temperature": 0, "max_output_tokens": 16}
    asked = "Look at all the numbers that were told. " * 8 + QUESTION
    first = bundled.responses.create(input=asked, **options)
    assert ANSWER in first.output_text and first.usage.output_tokens_details.reasoning_tokens == 0
    for _ in range(3):
        second = bundled.responses.create(input=asked, previous_response_id=first.id, **options)
        assert second.usage.input_tokens > first.usage.input_tokens
        opening = 3  # tokens of "Answer:", which are read with the answer
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - opening
        first = second
    short = bundled.responses.create(input=QUESTION, previous_response_id=first.id, **options)
    assert ANSWER in short.output_text
    third = bundled.responses.create(input=QUESTION, previous_response_id=short.id, **options)
    assert third.usage.input_tokens_details.cached_tokens > short.usage.input_tokens - 64  # fewer are read again


def test_responses_are_kept_and_deleted(bundled: Any) -> None:
    """A response that continues a deleted one keeps its messages."""
    options = {"model": "bundled", "temperature": 0, "max_output_tokens": 4}
    first = bundled.responses.create(input="the sky", metadata={"a": "b"}, **options)
    assert bundled.responses.retrieve(first.id) == first and first.metadata == {"a": "b"} and first.store is True
    second = bundled.responses.create(input="more", previous_response_id=first.id, **options)
    bundled.responses.delete(first.id)
    for gone in (lambda: bundled.responses.retrieve(first.id), lambda: bundled.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError) as found:
            gone()
        assert found.value.code == "response_not_found"
    third = bundled.responses.create(input="more", previous_response_id=second.id, **options)
    assert third.usage.input_tokens > second.usage.input_tokens
    unkept = bundled.responses.create(input="the sky", store=False, **options)
    assert unkept.store is False
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="store: false") as found:
            bundled.responses.create(input="more", previous_response_id=unkept.id, stream=stream, **options)
        assert found.value.code == "previous_response_not_found" and found.value.param == "previous_response_id"


def test_a_saved_context_is_asked(bundled: Any, served: Served) -> None:
    with served.client() as http:
        assert http.post("/v1/contexts", json={"name": "answers", "text": document()}).status_code == 200
    options = {"model": "bundled@answers", "temperature": 0, "max_output_tokens": 16}
    first = bundled.responses.create(input=QUESTION, **options)
    assert ANSWER in first.output_text and first.usage.input_tokens_details.cached_tokens > 800
    again = bundled.responses.create(input=QUESTION, previous_response_id=first.id, **options)
    assert again.usage.input_tokens > first.usage.input_tokens


def test_a_stream_that_fails() -> None:
    """Its last event has the error and what was said before it, and nothing is stored."""
    kept: list[Any] = []
    form = ResponsesForm(
        {"id": "resp_1", "error": None}, AnswerReader, MARKED.tokenizer, kept.append, {}, packs_reasoning=False
    )
    events = [*form.opening(0).split(b"\n\n"), *form.chunk(0, "It ra", ()).split(b"\n\n")]
    last = form.failure(ApiError(504, "Too late.", code="deadline"))
    found = [json.loads(event.partition(b"data: ")[2]) for event in [*events, *last.split(b"\n\n")] if event]
    assert last.startswith(b"event: response.failed\n")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    response = found[-1]["response"]
    assert response["status"] == "failed" and response["error"] == {"code": "server_error", "message": "Too late."}
    assert [item["type"] for item in response["output"]] == ["message"] and kept == []


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        ask(client, model="other")
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "a b " * 9000)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
    wrongs: list[tuple[str, str, dict[str, Any]]] = [
        ("reads text only", "input", {"input": image}),
        ("item_reference", "input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("No tool call found", "input.0.call_id", {"input": [
            {"type": "function_call_output", "call_id": "call_1", "output": "x"}]}),
        ("web_search", "tools.0", {"tools": [{"type": "web_search"}]}),
        ("none of the tools", "", {"tool_choice": {"type": "function", "name": "other"}}),
        ("needs tools", "", {"tools": None, "tool_choice": "required"}),
        ("include", "include.0", {"include": ["message.output_text.logprobs"]}),
        ("background", "background", {"background": True}),
        ("truncation", "truncation", {"truncation": "auto"}),
        ("conversation", "conversation", {"conversation": "conv_1"}),
        ("at least 1 item", "input", {"input": []}),
        (r"input\.1\.function_call\.arguments: ", "input", {"input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}),
    ]  # fmt: skip
    for words, param, wrong in wrongs:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            ask(client, **wrong)
        assert str(refused.value.param or "").startswith(param), (wrong, refused.value.param)
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="not streamed again"):
        list(client.responses.retrieve("resp_1", stream=True))
