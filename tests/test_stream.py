"""Context.stream: an answer in pieces, and what happens when nobody wants the rest of it."""

from __future__ import annotations

import gc
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from tests.preloaded import run_preloaded
from tests.tiny_models import QUESTION, build_model
from tests.waiting import WAIT_SECONDS

CONFIG = ra.Config(sink=8, window=64, retrieve=50)
LONG: dict[str, Any] = {"max_new_tokens": 400, "temperature": 9.0, "seed": 1}
"""An answer that does not end by itself for a long time: random tokens."""


@pytest.fixture(scope="module")
def context(loaded: tuple[Any, Any]) -> ra.Context:
    filler = "The grass is green. The sky is blue. The sun is yellow. " * 20
    text = f"{filler}The special magic Bergen number is: 7391846. {filler}"
    return ra.Context(*loaded, CONFIG).read(text, progress=False)


@pytest.fixture(params=["plain", "enabled", "graphs"])
def model(request: pytest.FixtureRequest, context: ra.Context) -> Iterator[Any]:
    """The context's model, with transformers' own attention or switched over for good, and with emulated graphs."""
    if request.param != "plain":
        ra.enable(context.model, CONFIG)
    if request.param == "graphs":
        request.getfixturevalue("emulated_graphs")
    before = context.model.config._attn_implementation
    yield context.model
    assert context.model.config._attn_implementation == before
    ra.disable(context.model)


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "retrieval_attn-stream"]


def test_the_pieces_join_to_the_answer(context: ra.Context) -> None:
    stream = context.stream(QUESTION, max_new_tokens=16)
    assert stream.answer is None
    pieces = list(stream)
    expected = context.ask(QUESTION, max_new_tokens=16)
    assert len(pieces) > 1 and "".join(pieces) == expected.text
    assert stream.answer is not None and stream.answer.tokens == expected.tokens
    assert stream.answer.stats.new_tokens == expected.stats.new_tokens
    assert list(stream) == [] and not workers()


@pytest.mark.parametrize("stop", [("39",), ("3918",), ("9184", "91"), ("no such string",)])
def test_a_stop_string_is_not_streamed(context: ra.Context, stop: tuple[str, ...]) -> None:
    """Nor the beginning of one that later tokens complete."""
    stream = context.stream(QUESTION, max_new_tokens=16, stop=stop)
    assert "".join(stream) == context.ask(QUESTION, max_new_tokens=16, stop=stop).text
    assert stream.answer is not None and stream.answer.text.strip().startswith("7")


def test_a_loop_left_by_break_leaves_nothing_running(context: ra.Context, model: Any) -> None:
    """And the next question is answered, on a model that goes back to its own attention too."""
    expected = context.ask(QUESTION, max_new_tokens=8).tokens
    for number, _ in enumerate(context.stream("Tell me more.", **LONG)):
        if number == 1:
            break
    assert not workers()
    assert context.ask(QUESTION, max_new_tokens=8).tokens == expected


def test_a_question_beside_an_open_stream(context: ra.Context, model: Any) -> None:
    """The model is given back when the last of both has ended, in either order."""
    expected = context.ask(QUESTION, max_new_tokens=8).tokens
    stream = context.stream("Tell me more.", **LONG)
    next(stream)
    assert context.ask(QUESTION, max_new_tokens=8).tokens == expected
    assert workers()
    assert model.config._attn_implementation == "retrieval"
    stream.close()
    stream.close()
    assert not workers() and next(stream, None) is None and stream.answer is None


def test_every_way_out_ends_the_worker(context: ra.Context) -> None:
    with context.stream("Tell me more.", **LONG) as stream:
        next(stream)
    assert not workers()
    stream = context.stream("Tell me more.", **LONG)
    next(stream)
    loop = [stream]
    loop.append(loop)  # type: ignore[arg-type]  # only the collector of cycles can find this one
    del stream, loop
    gc.collect()
    assert not workers()
    with pytest.raises(ZeroDivisionError):
        for _ in context.stream("Tell me more.", **LONG):
            raise ZeroDivisionError
    assert not workers()


def test_who_interrupts_the_wait_for_the_worker_leaves_it_to_the_end(
    context: ra.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C stops an answer, and a second one what waits for its thread: who ends the program still waits for that."""
    stream = context.stream("Tell me more.", **LONG)
    next(stream)
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    at_the_end = stream._collected
    assert at_the_end.alive and at_the_end.atexit
    at_the_end()
    assert not workers()


def test_a_stream_that_nobody_reads_starts_nothing(context: ra.Context) -> None:
    stream = context.stream(QUESTION, max_new_tokens=4)
    assert not workers()
    stream.close()
    assert list(stream) == []
    with pytest.raises(ra.InputDataError, match="non-empty question"):
        context.stream("  ")
    with pytest.raises(ra.ConfigError, match="max_tokens"):
        context.stream(QUESTION, max_tokens=3)


def test_closing_while_the_question_is_read(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long question, or an exact one about a long context, takes seconds: it ends after a layer."""
    layers = context.model.model.layers
    reached, go_on = threading.Event(), threading.Event()
    visited: list[int] = []

    def watch(number: int) -> Any:
        def hook(*_: Any) -> None:
            visited.append(number)
            reached.set()
            assert go_on.wait(WAIT_SECONDS)

        return hook

    hooks = [layer.self_attn.register_forward_pre_hook(watch(number)) for number, layer in enumerate(layers)]
    try:
        stream = context.stream(QUESTION, max_new_tokens=4)
        taken = threading.Thread(target=lambda: next(stream, None))
        taken.start()
        assert reached.wait(WAIT_SECONDS)
        closing = threading.Thread(target=stream.close)
        closing.start()
        while not stream._worker._cancelled.is_set():
            pass
        go_on.set()
        closing.join(WAIT_SECONDS)
        taken.join(WAIT_SECONDS)
        assert not closing.is_alive() and not taken.is_alive() and not workers()
        assert visited == [0]
    finally:
        for handle in hooks:
            handle.remove()


def test_an_error_of_the_worker_is_raised_in_the_loop(context: ra.Context) -> None:
    steps: list[int] = []

    def fail_at_the_third(module: Any, args: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("the model broke")

    handle = context.model.register_forward_pre_hook(fail_at_the_third)
    seen = []
    try:
        with pytest.raises(RuntimeError, match="the model broke"):
            for piece in context.stream(QUESTION, max_new_tokens=16):
                seen.append(piece)
    finally:
        handle.remove()
    assert seen and not workers()
    assert "7391846" in context.ask(QUESTION, max_new_tokens=16).text


@pytest.mark.parametrize("leave", ["break", "pass", "raise SystemExit(0)"])
def test_a_program_that_leaves_a_stream_ends_normally(needle_model_path: Path, leave: str) -> None:
    """Not with SIGABRT from a thread that was inside compiled code when the interpreter ended."""
    code = f"""
        import retrieval_attn as ra
        llm = ra.LLM({str(needle_model_path)!r}, device="cpu", window=64, retrieve=50)
        context = llm.read("The sky is blue. " * 60)
        stream = context.stream("Tell me more.", max_new_tokens=400, temperature=9.0, seed=1)
        for number, piece in enumerate(stream):
            if number == 2:
                {leave if leave != "pass" else "break"}
        {"other = context.stream('And?', max_new_tokens=400, temperature=9.0); next(other)" if leave == "pass" else ""}
        print("left")
    """
    done = run_preloaded(["-c", textwrap.dedent(code)], finalizes=True)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr


def test_threads_share_a_model_that_is_not_enabled() -> None:
    """Each switches it over for a while; it goes back when the last one is done, and every answer is the same."""
    model = build_model("llama")
    cache = ra.RetrievalCache(model, sink=4, window=16, retrieve=10)
    ids = torch.arange(3, 63)[None]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(ids, custom_generate=ra.generate, retrieval=cache.config, do_sample=False, **options)
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(
                model.generate(ids, custom_generate=ra.generate, retrieval=cache.config, do_sample=False, **options)
            )
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(out, expected) for out in found if isinstance(out, torch.Tensor)] == [True] * 4, found
    assert model.config._attn_implementation == "eager"
    assert all("forward" not in vars(layer) for layer in model.model.layers)
