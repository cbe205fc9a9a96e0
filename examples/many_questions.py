"""Several questions about one text in one batch: `python examples/many_questions.py [MODEL]`.

All questions share one KV cache and one index.
"""

from __future__ import annotations

import sys

import retrieval_attn as ra

NUMBERS = {"Lisbon": 4815162, "Cairo": 7391846, "Quito": 1208934}


def text_with(numbers: dict[str, int], lines: int = 100) -> str:
    """Return filler with one sentence per city, spread over the text."""
    text = ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * lines
    for place, (city, number) in enumerate(numbers.items(), start=1):
        text.insert(place * lines // (len(numbers) + 1), f"The special magic {city} number is: {number}.")
    return "\n".join(text)


def main(model: str = "bundled") -> None:
    context = ra.LLM(model, window=256, retrieve=100).read(text_with(NUMBERS))
    questions = [f"What is the special magic {city} number?" for city in NUMBERS]
    for question, answer in zip(questions, context.ask_many(questions, max_new_tokens=24), strict=True):
        print(f"{question} {answer.text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
