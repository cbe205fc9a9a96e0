"""Chat templates that do not end are stopped, in any thread, and what is rendered is cut at a stand-in."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from transformers import AutoTokenizer

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt import render as rendering
from retrieval_attn.prompt.render import cut_at, render, within_limit
from retrieval_attn.template import PromptTemplate
from tests.prompt.test_encode import BUNDLED

MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = {
    "loops": "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for x in range(99999) %}{% for y in range(99999) %}{{ y }}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 1.0)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_an_end_is_stopped(tokenizer: Any, kind: str) -> None:
    """At the load of a tokenizer, and for messages that make a working template endless; in this and other threads."""
    tokenizer.chat_template = ENDLESS[kind] + MESSAGES
    began = time.monotonic()
    with pytest.raises(InputDataError, match="took more than 1 s"):
        PromptTemplate.of(tokenizer)
    assert time.monotonic() - began < 30
    tokenizer.chat_template = f"{{% if messages | length > 1 %}}{ENDLESS[kind]}{{% endif %}}{MESSAGES}"
    template = PromptTemplate.of(tokenizer)
    turns = [{"role": role, "content": "Who?"} for role in ("user", "assistant", "user")]
    found: list[BaseException] = []

    def ask() -> None:
        try:
            template.question_ids(turns)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    ask()
    thread.join()
    assert [type(error) for error in found] == [InputDataError] * 2
    assert template.question_ids("Who?"), "the thread goes on"


@pytest.mark.usefixtures("short")
def test_work_that_ends_in_time_is_not_stopped(tokenizer: Any) -> None:
    """Nothing is raised later on, either: for what ends near the limit, for errors, and for a limit inside another."""
    for seconds in (0.0, 0.99, 1.0, 1.01):
        with_error = 0

        def work(seconds: float = seconds) -> str:
            stop = time.monotonic() + seconds
            while time.monotonic() < stop:
                pass
            return within_limit(lambda: "done")

        try:
            assert within_limit(work) == "done"
        except InputDataError:
            with_error = 1
        assert not with_error or seconds
        with pytest.raises(ZeroDivisionError):
            within_limit(lambda: 1 / 0)
    stop = time.monotonic() + 1.2
    while time.monotonic() < stop:
        pass


def test_what_a_template_gets(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ tools }} {{ thinking }} {{ add_generation_prompt }} {{ messages[0].content }}"
    said = [{"role": "user", "content": "x"}]
    assert render(tokenizer, said, [{"a": 1}], options={"thinking": 5}) == "[{'a': 1}] 5 True x"
    assert render(tokenizer, said, answering=False) == "None  False x"
    tokenizer.chat_template = "{{ nothing.at.all }}"
    with pytest.raises(InputDataError, match=r"these 1 messages \(UndefinedError"):
        render(tokenizer, said)


def test_a_text_is_cut_where_its_stand_in_is() -> None:
    assert cut_at("before THIS behind", "THIS") == ("before ", " behind")
    for text in ("nothing", "THIS and THIS"):
        with pytest.raises(InputDataError, match="exactly once"):
            cut_at(text, "THIS")


def test_words_of_former_stand_ins_are_text(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template = PromptTemplate.of(copy.deepcopy(tokenizer))
    for word in ("CONTEXT-GOES-HERE", "QUESTION-GOES-HERE", "NEXT-WORDS-GO-HERE"):
        turns = [{"role": "user", "content": f"{word} a"}, {"role": "assistant", "content": word}]
        text = template.question_text([*turns, {"role": "user", "content": f"b {word}"}])
        assert text == f"\n\n{word} a\n[assistant] {word}\n[user] b {word}\n"


TRACED = """
import sys
import time
from retrieval_attn.prompt import render
from retrieval_attn.errors import InputDataError
assert render.within_limit(lambda: 1) == 1
render.RENDER_SECONDS = 0.01
def late():
    for _ in range(10**9):
        pass
def just_late():
    try:
        time.sleep(0.1)
    finally:
        return 2
for work in (late, just_late):
    try:
        render.within_limit(work)
    except InputDataError:
        pass
def traced():
    return 3
seen = []
sys.settrace(lambda frame, event, argument: seen.append(event))
traced()
sys.settrace(None)
assert "call" in seen
"""


def test_the_interpreter_has_no_exception_pending_afterwards() -> None:
    """A flag that stays set slows all bytecode, and in Python 3.11 a traced function then never starts."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
