"""A coding agent's session against a server: `python examples/agent_session.py [URL] --turns 60 --length 16k`.

Needs `pip install openai ./eval` and a server, for instance `retrieval-attn serve bundled`. The files are real, in a
temporary folder, and so are the results of the tools, which list, read, search, edit and run them. The tools and their
arguments are chosen by a script with a seed, because a tiny model cannot choose them; the text of each answer is the
model's, and stays in the history as it is. Number and length of the messages, and which old results are cleared when
the prompt gets too long, are those of `bench serve --workload agent` (`agent_lines`).

Prints a line per turn, and at the end the share of prompt tokens that were cached, the same for a cache that never
evicts anything, and the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai

from retrieval_attn_eval.bench.serve.simulated import PromptTree, unlimited_hits
from retrieval_attn_eval.flags import as_tokens
from retrieval_attn_eval.load.long_prompts import AgentProfile, agent_lines

MODULES, FUNCTIONS = 12, 40
ROLE = "You are a coding agent. Work in small steps. Use one tool at a time and say shortly what you do."
CLEARED = "[old result cleared]"
CHARACTERS = 8
"""Maximum of a token, on average, in a text that is counted."""
TOOLS: dict[str, Sequence[str]] = {
    "list": ("folder",),
    "read": ("path", "line"),
    "grep": ("pattern",),
    "edit": ("path", "old", "new"),
    "run": ("code",),
}
"""Names of the tools, with their arguments."""


class Call(NamedTuple):
    """A call of a tool. arguments: all of them, as strings."""

    tool: str
    arguments: dict[str, str]

    def __str__(self) -> str:
        return f"{self.tool}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


class Workspace:
    """A folder with a package of a dozen modules, and the tools that work on it."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Write the files. seed: of their content and of the calls."""
        self._folder, self._draw = folder, random.Random(seed)
        (folder / "shop").mkdir()
        for module in range(MODULES):
            functions = [
                f"def price_{module}_{number}(count: int) -> int:\n"
                '    """Return the price of `count` items, in cents."""\n'
                f"    return count * {self._draw.randint(2, 999)} + {self._draw.randint(1, 99)}\n"
                for number in range(FUNCTIONS)
            ]
            (folder / "shop" / f"part_{module}.py").write_text("\n\n".join(functions))

    @property
    def overview(self) -> str:
        """A line per function, as repository maps have them."""
        paths = sorted((self._folder / "shop").glob("*.py"))
        lines = [(path, line) for path in paths for line in path.read_text().splitlines()]
        return "\n".join(f"shop/{path.name}: {line}" for path, line in lines if line.startswith("def "))

    def choose(self) -> Call:
        """Return the next call."""
        module, number = self._draw.randrange(MODULES), self._draw.randrange(FUNCTIONS)
        path, name = f"shop/part_{module}.py", f"price_{module}_{number}"
        tool = self._draw.choices(list(TOOLS), (1, 6, 3, 2, 3))[0]
        if tool == "read":
            return Call(tool, {"path": path, "line": str(self._draw.randrange(1, 3 * FUNCTIONS))})
        if tool == "grep":
            return Call(tool, {"pattern": f"{name[:-1]}|\\* {self._draw.randint(1, 9)}"})
        if tool == "edit":
            old = re.findall(r"return .*", (self._folder / path).read_text())[number]
            return Call(tool, {"path": path, "old": old, "new": f"{old} + 0"})
        if tool == "run":
            code = f"from shop.part_{module} import {name}; print([{name}(count) for count in range(200)])"
            return Call(tool, {"code": code})
        return Call(tool, {"folder": "shop"})

    def call(self, call: Call) -> str:
        """Return the result of a call."""
        given, files = call.arguments, sorted((self._folder / "shop").glob("*.py"))
        if call.tool == "list":
            return "\n".join(f"shop/{path.name} {path.stat().st_size} bytes" for path in files)
        if call.tool == "grep":
            found = [
                f"shop/{path.name}:{number}: {line}"
                for path in files
                for number, line in enumerate(path.read_text().splitlines(), start=1)
                if re.search(given["pattern"], line)
            ]
            return "\n".join(found) or "no match"
        if call.tool == "run":
            command = [sys.executable, "-B", "-c", given["code"]]
            done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=60)
            return done.stdout + done.stderr
        path = self._folder / given["path"]
        text = path.read_text()
        if call.tool == "edit":
            path.write_text(text.replace(given["old"], given["new"], 1))
            place = max(0, text.find(given["old"]))
            return f"edited {given['path']}, where it is now:\n{path.read_text()[place:]}"
        return "\n".join(text.splitlines()[int(given["line"]) - 1 :])


class Turn(NamedTuple):
    """Counts of a turn. first_seconds: time to the first token. text: the answer."""

    prompt_tokens: int
    cached_tokens: int
    first_seconds: float
    text: str


class Model:
    """The server, asked by OpenAI's client. has_tools: whether its chat template takes tools."""

    def __init__(self, client: openai.OpenAI, url: str, answer_tokens: int) -> None:
        self._client, self._url, self._answer_tokens = client, url, answer_tokens
        self._name, self._session = client.models.list().data[0].id, str(uuid.uuid4())
        self.has_tools = True
        try:
            self.token_ids([{"role": "user", "content": "Hello"}])
        except openai.BadRequestError as error:
            print(f"tools are described in the system message, because the server refuses them: {error.message}")
            self.has_tools = False

    @property
    def _tools(self) -> dict[str, Any]:
        functions = [
            {"name": name, "description": f"{name} files", "parameters": {
                "type": "object", "properties": {argument: {"type": "string"} for argument in arguments},
            }}
            for name, arguments in TOOLS.items()
        ]  # fmt: skip
        return {"tools": [{"type": "function", "function": one} for one in functions]} if self.has_tools else {}

    def token_ids(self, messages: Sequence[Any]) -> list[int]:
        """Return the token ids of a prompt. Raises openai.APIError."""
        body = {"messages": messages, "add_generation_prompt": messages[-1]["role"] != "assistant", **self._tools}
        found: Any = self._client.post(f"{self._url}/tokenize", cast_to=object, body=body)
        return list(found["tokens"])

    def fit(self, text: str, tokens: int) -> str:
        """Return the beginning of a text, cut to about the given number of tokens."""
        text = text[: CHARACTERS * tokens]
        count = len(self.token_ids([{"role": "user", "content": text}]))
        return text[: max(1, len(text) * tokens // max(count, tokens))]

    def ask(self, messages: Sequence[Any]) -> Turn:
        """Send a turn and wait for its answer."""
        began, first, text, usage = time.perf_counter(), 0.0, "", None
        stream: Any = self._client.chat.completions.create(
            model=self._name, messages=list(messages), max_tokens=self._answer_tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_headers={"x-session-id": self._session}, **self._tools,
        )  # fmt: skip
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            first = first or (time.perf_counter() - began if piece else 0.0)
            text += piece or ""
            usage = chunk.usage or usage
        assert usage is not None, "the server sent no usage"
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        return Turn(usage.prompt_tokens, cached or 0, first or time.perf_counter() - began, text)

    def step(self, number: int, text: str, call: Call, result: str) -> list[Any]:
        """Return the messages of an answer, a call and its result."""
        if not self.has_tools:
            said = {"role": "assistant", "content": text} if text.strip() else {"role": "assistant", "content": "."}
            return [said, {"role": "user", "content": f"{call}:\n{result}"}]
        function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
        called = {"id": f"call{number:05d}", "type": "function", "function": function}
        return [
            {"role": "assistant", "content": text, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": result},
        ]


def run_session(model: Model, work: Workspace, turns: int, longest: int, answer_tokens: int, seed: int) -> None:
    """Run a session and print its lines. longest: tokens of the longest prompt."""
    lines = agent_lines(1, longest, answer_tokens, [0.0], seed, AgentProfile.of_turns(turns))
    results, steps = dict[int, str](), dict[int, tuple[str, Call]]()
    sequences: list[list[int]] = []
    done: list[Turn] = []
    print(f"{'turn':>4} {'prompt':>7} {'cached':>7} {'first token':>11}  call before it")
    for number, line in enumerate(lines):
        system, task, *blocks = line.blocks
        if number:
            call = work.choose()
            steps[blocks[-2].name] = done[-1].text, call
            result = model.fit(f"{call}:\n{work.call(call)}", blocks[-1].tokens)
            results[blocks[-1].name] = result.removeprefix(f"{call}:\n")
        else:
            role = model.fit(f"{ROLE} Tools: {json.dumps(TOOLS)}\n{work.overview}", system.tokens)
            said = model.fit(f"Make all prices round numbers.\n{work.overview}", task.tokens)
        messages: list[Any] = [{"role": "system", "content": role}, {"role": "user", "content": said}]
        for place in range(0, len(blocks), 2):
            text, called = steps[blocks[place].name]
            messages += model.step(place, text, called, results.get(blocks[place + 1].name, CLEARED))
        done.append(model.ask(messages))
        turn = done[-1]
        last = str(steps[blocks[-2].name][1])[:60] if number else ""
        print(
            f"{number:>4} {turn.prompt_tokens:>7} {turn.cached_tokens:>7} {turn.first_seconds:>9.2f} s  {last}",
            flush=True,
        )
        ids = model.token_ids(messages)
        answered = model.token_ids([*messages, {"role": "assistant", "content": turn.text or "."}])
        sequences += [ids, answered]
    tree = PromptTree(sequences)
    total = sum(turn.prompt_tokens for turn in done)
    reused, ceiling = sum(turn.cached_tokens for turn in done), sum(unlimited_hits(tree)[::2])
    half, most = np.percentile([turn.first_seconds for turn in done], (50, 95))
    print(
        f"{len(done)} turns, {total:,} prompt tokens: {reused / total:.1%} cached, {ceiling / total:.1%} with an "
        f"unlimited cache; first token p50 {half:.2f} s, p95 {most:.2f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run a coding agent's session against a server.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    parser.add_argument("--turns", type=int, default=60, help="of the session (%(default)s)")
    parser.add_argument("--length", type=as_tokens, default=16384, help="tokens of the longest prompt (16k)")
    parser.add_argument("--answer", type=as_tokens, default=32, help="tokens of an answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of files, calls and lengths (%(default)s)")
    args = parser.parse_args(arguments)
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none", timeout=600)
    with client, tempfile.TemporaryDirectory() as folder:
        work, model = Workspace(Path(folder), args.seed), Model(client, args.url, args.answer)
        run_session(model, work, args.turns, args.length, args.answer, args.seed)


if __name__ == "__main__":
    main()
