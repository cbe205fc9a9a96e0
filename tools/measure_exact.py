"""Measure exact answers: `python -m tools.measure_exact MODEL TOKENS NEW ANSWERS [RETRIEVE]`, on idle cores.

ANSWERS questions on each of four texts of TOKENS tokens, answered with NEW tokens by full attention, by
full_attention="exact" and by retrieval; half of them are greedy, the others sampled. RETRIEVE: keys per head, without
the tail; none: the defaults.
"""

from __future__ import annotations

import sys
from typing import Any

import retrieval_attn as ra
from retrieval_attn.answer import Answer
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn_eval.bench.fidelity.texts import make_text

TEXTS = ("prose", "code", "json", "extract")
ASKED = "Question {0}: what is said here about number {0}, and where?"


def full_context(context: ra.Context) -> ra.Context:
    """Return a fork that attends to all keys, one token at a time."""
    fork = context.fork()
    for layer in fork.cache.layers:
        if isinstance(layer, RetrievalLayer):
            layer.config = layer.config.replace(retrieve="all", tail=False)
    return fork


def milliseconds(answers: list[Answer]) -> float:
    """Return the median time per token."""
    times = sorted(one.stats.seconds_per_token for one in answers)
    return 1e3 * times[len(times) // 2]


def measure(name: str, context: ra.Context, new: int, count: int) -> None:
    """Print how many exact answers are those of full attention, and what each kind costs."""
    full, found = full_context(context), list[tuple[Answer, Answer, Answer]]()
    for number in range(count):
        sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {}
        sampling: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, **sampled}
        asked = ASKED.format(number)
        every = full.ask(asked, **sampling)
        found.append((every, context.ask(asked, full_attention="exact", **sampling), context.ask(asked, **sampling)))
    wrong = [number for number, (every, exact, _) in enumerate(found) if every.tokens != exact.tokens]
    plain = sum(every.tokens == one.tokens for every, _, one in found)
    stats = [exact.stats for _, exact, _ in found]
    hits, tries, passes = (sum(part) for part in zip(*map(_counts, stats), strict=True))
    times = [milliseconds([row[kind] for row in found]) for kind in range(3)]
    print(
        f"{name}, {context.num_tokens:,} tokens: {count - len(wrong)} of {count} exact answers are full attention's "
        f"(wrong: {wrong}), {plain} by retrieval alone; {times[0]:.1f} ms per token in full, {times[1]:.1f} exact, "
        f"{times[2]:.1f} by retrieval; drafts: {hits} of {tries} compared right, "
        f"{sum(one.drafted_tokens for one in stats)} drafted; {passes} passes of "
        f"{stats[0].pass_bytes / 1e6:.1f} MB for {count * new} tokens",
        flush=True,
    )


def _counts(stats: ra.Stats) -> tuple[int, int, int]:
    hits = stats.accepted_tokens
    tries = round(hits / stats.agreement) if stats.agreement else hits
    return hits, tries, stats.passes


def main() -> None:
    """Measure the model of the command line."""
    name, (tokens, new, count) = sys.argv[1], map(int, sys.argv[2:5])
    few: dict[str, Any] = {"retrieve": int(sys.argv[5]), "tail": False} if len(sys.argv) > 5 else {}
    llm = ra.LLM(name, device="cpu", **few)
    for kind in TEXTS:
        ids = make_text(kind, tokens, 16, llm.tokenizer, 3).ids[:tokens].tolist()
        measure(kind, llm.read(ids, progress=False), new, count)


if __name__ == "__main__":
    main()
