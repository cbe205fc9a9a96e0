"""A conversation with a server that caches its answers, as it does by default: the next turn reads what is new."""

from __future__ import annotations

from typing import Any

from tests.server.process import QUESTION, document, serving


def test_a_follow_up_turn_does_not_read_the_answer() -> None:
    """cached_tokens tells: with the option, the turn before but its answer; by default, that as well."""
    cached, answers = {}, {}
    for options in (("--no-cache-generated",), ()):
        arguments = ("--warm-up", "0", "--engine", "here", *options)
        with serving(*arguments, preloaded=True) as served, served.client() as client:

            def ask(said: list[dict[str, str]], tokens: int, client: Any = client) -> tuple[str, int]:
                body = {"model": "bundled", "messages": said, "max_tokens": tokens, "temperature": 0}
                found = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                details = found["usage"]["prompt_tokens_details"]
                return found["choices"][0]["message"]["content"], details["cached_tokens"]

            said = [{"role": "user", "content": f"{document()}\n\n{QUESTION}"}]
            answer, _ = ask(said, 60)
            # without a chat template the server puts a space of its own before an answer
            said += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": "And again?"}]
            answers[options], cached[options] = answer, ask(said, 8)[1]
    assert len(set(answers.values())) == 1
    off, on = cached.values()
    assert 0 < off < on, (cached, answers)
