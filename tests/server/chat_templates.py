"""Chat templates in the forms of model families, reduced to what an answer's format depends on, and their own answers.

Each writes tools, calls, results and thinking with the family's markers, which are special tokens where the family's
tokenizer says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

BUNDLED = Path(__file__).parents[2] / "retrieval_attn" / "model" / "bundled"

_CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} CALLS<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)


def chatml(call: str, thinking: str = "", described: str = "") -> str:
    """A template in ChatML. call: how it writes a call. thinking: end of the prompt. described: of the tools."""
    return _CHATML.replace("CALLS", described).replace("CALL", call).replace("THINK", thinking)


_HERMES = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
_THINKS = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
_XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
_LLAMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot_id|>'
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}CALL{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>THINK{% endif %}"
)
_HARMONY = (
    "{% if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% endif %}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>{% for m in messages %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
    "{{ c.function.name }} <|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_GEMMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}OPENcall:{{ c.function.name }}{ {%- for k, v in c.function.arguments | items -%}"
    "{{ k }}:{{ QUOTE + v + QUOTE if v is string else v | tojson }}{{ '' if loop.last else ',' }}{%- endfor -%} }CLOSE"
    "{% endfor %}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}THOUGHT"
)


def gemma(opening: str, closing: str, quote: str, thought: str) -> str:
    """A template of Gemma with these markers."""
    found = _GEMMA.replace("OPEN", opening).replace("CLOSE", closing).replace("QUOTE", f"'{quote}'")
    return found.replace("THOUGHT", f"{{# {thought} #}}")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, description, properties in (
        ("get_weather", "Weather.", {"city": {"type": "string"}, "days": {"type": "integer"}}),
        ("write_file", "Write.", {"path": {"type": "string"}, "text": {"type": "string"}}),
        ("now", "The time.", {}),
    )
]
CODE = "if a < 1:\n\tprint(\"{ü}\", '\\n')  # </p>\n"
"""Text of an argument with what formats could stumble over."""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models.

    format: name in the registry. thinks: opening and closing of its thinking. special: markers that are special tokens
    of its tokenizer. before, between, behind: around the calls of an answer. write: a call as the model writes it.
    """

    format: str
    template: str
    write: Any
    thinks: tuple[str, str] | None = None
    special: tuple[str, ...] = ()
    before: str = ""
    between: str = ""
    behind: str = ""
    prompted: bool = False

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The bundled tokenizer with the family's template and special tokens."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED)
        added = [AddedToken(word, normalized=False, special=True) for word in self.special]
        tokenizer.add_special_tokens({"additional_special_tokens": added})
        tokenizer.chat_template = self.template
        return tokenizer

    def answer(self, thought: str, said: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
        """An answer as the model writes it, behind the prompt."""
        text = ""
        if self.thinks is not None and (thought or self.prompted):
            begin, end = self.thinks
            text += (thought if self.prompted else begin + thought) + end
        if self.format == "harmony":
            text += f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant" if said and calls else ""
            text += "" if calls else f"<|channel|>final<|message|>{said}"
        else:
            text += said
        return text + (
            self.before + self.between.join(self.write(*call) for call in calls) + self.behind if calls else ""
        )


def _json(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _values(arguments: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]


def _xml(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _values(arguments))
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _values(arguments))
    return f"<tool_call>{name}\n{values}</tool_call>"


def _gemma(opening: str, closing: str, quote: str) -> Any:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = (
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{json.dumps(value)}"
            for key, value in arguments.items()
        )
        return f"{opening}call:{name}{{{','.join(values)}}}{closing}"

    return write


_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_WORDS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    _SEP,
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_BLOCK = f"{{{{ c.type }}}}{_SEP}{{{{ c.function.name }}}}\n```json\n{{{{ c.function.arguments | tojson }}}}\n```<"
_MISTRAL_ARGS = "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
_MISTRAL_LIST = '[TOOL_CALLS][{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]'

FAMILIES = {
    "qwen2.5": Family(
        "hermes", chatml(_HERMES), lambda *call: f"<tool_call>\n{_json(*call)}\n</tool_call>", between="\n",
        special=("<|im_start|>", "<|im_end|>"),
    ),
    "qwen3": Family(
        "hermes",
        chatml(_HERMES, _THINKS.replace("{% else %}<think>\n", "")),
        lambda *call: f"<tool_call>\n{_json(*call)}\n</tool_call>",
        ("<think>\n", "\n</think>\n\n"),
        ("<|im_start|>", "<|im_end|>"),
        between="\n",
    ),
    "qwen3-thinking": Family(
        "hermes",
        chatml(_HERMES, _THINKS),
        lambda *call: f"<tool_call>\n{_json(*call)}\n</tool_call>",
        ("<think>\n", "\n</think>\n\n"),
        ("<|im_start|>", "<|im_end|>"),
        between="\n",
        prompted=True,
    ),
    "qwen3.5": Family(
        "qwen-xml", chatml(_XML, _THINKS, "<function=f> <parameter=p>"), _xml, ("<think>\n", "\n</think>\n\n"),
        ("<|im_start|>", "<|im_end|>"), between="\n", prompted=True,
    ),
    "glm4.5": Family(
        "glm", chatml(_GLM, "{{ '/nothink' if enable_thinking is false }}{# <think></think> #}"), _glm,
        ("<think>", "</think>\n"), ("<|im_start|>", "<|im_end|>"), between="\n",
    ),
    "llama3.1": Family(
        "llama3-json",
        _LLAMA,
        lambda name, arguments: json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False),
        between="; ",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    "mistral-v3": Family(
        "mistral", _MISTRAL.replace("CALL{%", f"{_MISTRAL_LIST}{{%"), _json, special=("[TOOL_CALLS]", "[INST]"),
        before="[TOOL_CALLS][", between=", ", behind="]",
    ),
    "mistral-v13": Family(
        "mistral-args",
        _MISTRAL.replace("CALL{%", f"{_MISTRAL_ARGS}{{%") + "{# [THINK] [/THINK] #}",
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}",
        ("[THINK]", "[/THINK]"),
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]"),
    ),
    "deepseek-v3": Family(
        "deepseek-v3",
        _DEEPSEEK.replace("CALL<", _BLOCK).replace("THINK", "{# <think></think> #}<think>\n"),
        lambda name, arguments: (
            f"<｜tool▁call▁begin｜>function{_SEP}{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```"
            "<｜tool▁call▁end｜>"
        ),
        ("<think>\n", "\n</think>\n\n"),
        _DEEPSEEK_WORDS,
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        behind="<｜tool▁calls▁end｜>",
        prompted=True,
    ),
    "deepseek-v3.1": Family(
        "deepseek-v3.1",
        _DEEPSEEK.replace("CALL<", f"{{{{ c.function.name }}}}{_SEP}{{{{ c.function.arguments | tojson }}}}<").replace(
            "THINK", "{{ '<think>' if thinking else '</think>' }}"
        ),
        lambda name, arguments: (
            f"<｜tool▁call▁begin｜>{name}{_SEP}{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"
        ),
        before="<｜tool▁calls▁begin｜>",
        behind="<｜tool▁calls▁end｜>",
    ),
    "gpt-oss": Family(
        "harmony",
        _HARMONY,
        lambda name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(arguments, ensure_ascii=False)}"
        ),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        between="<|call|><|start|>assistant",
    ),
    "gemma4": Family(
        "gemma4",
        gemma("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>thought <channel|>"),
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|channel>thought\n", "<channel|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
    ),
    "functiongemma": Family(
        "functiongemma",
        gemma("<start_function_call>", "<end_function_call>", "<escape>", ""),
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
}  # fmt: skip
