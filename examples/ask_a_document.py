"""Prefill a document once, then ask: `python examples/ask_a_document.py [MODEL [FILE]]`.

MODEL is a hub id or a folder. Defaults to the bundled test model and a text with one fact in the middle.
"""

from __future__ import annotations

import sys
from pathlib import Path

import retrieval_attn as ra


def hidden_fact(words: int = 1500) -> str:
    """Filler with one sentence that matters."""
    line = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lines = [line] * (words // len(line.split()))
    lines.insert(len(lines) // 2, "The special magic Lisbon number is: 4815162.")
    return "\n".join(lines)


def main(model: str = "bundled", file: str | None = None) -> None:
    text = hidden_fact() if file is None else Path(file).read_text(encoding="utf-8")
    # keep the last 256 tokens of every layer on the device; each head retrieves 100 earlier keys per token
    llm = ra.LLM(model, window=256, retrieve=100)
    context = llm.read(text)
    print(f"prefilled {context.num_tokens:,} tokens in {context.read_seconds:.1f} s")

    question = "What is the special magic Lisbon number?"
    answer = context.ask(question, max_new_tokens=24)
    print(f"{question} {answer.text.strip()}")
    stats = answer.stats
    print(
        f"{stats.host_bytes / 2**20:.1f} MiB of KV cache on the host, {stats.device_bytes / 2**20:.1f} MiB in windows"
    )

    # questions do not change the context; extend() prefills only the new text
    context.extend("\nThe special magic Oslo number is: 2342108.")
    print(f"and in Oslo? {context.ask('What is the special magic Oslo number?', max_new_tokens=24).text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
