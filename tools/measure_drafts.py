"""Measure drafts by lookup: `python -m tools.measure_drafts MODEL TOKENS NEW ROUNDS`, on idle cores.

Answers of NEW tokens behind a text of TOKENS tokens, each with drafts and without, in turn: a file with one token in
ten changed, prose that quotes nothing, both forced token by token, and the model's own greedy answers.
"""

from __future__ import annotations

import random
import sys
import time
from typing import NamedTuple

import torch
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import TokenChoice, run
from retrieval_attn.runner.drafted_steps import drafted_steps
from retrieval_attn.runner.drafts import DraftLength
from retrieval_attn.runner.rows import step, tokens_before_spill
from retrieval_attn_eval.text.haystack import PROSE_SEED, shipped_prose

NAMES = ("width", "height", "color", "table", "index", "count", "first", "second", "left", "right", "value", "total")


def source_code(seed: int, functions: int) -> str:
    """Return functions of a made-up Python file."""
    chance, parts = random.Random(seed), list[str]()
    for number in range(functions):
        one, two, three = chance.sample(NAMES, 3)
        parts.append(
            f"def {one}_of_{two}_{number}({one}, {two}={chance.randrange(90)}):\n"
            f'    """Return the {three} of a {one} by its {two}."""\n'
            f"    if {one} > {two}:\n        return {one} * {chance.randrange(9)} + {two}\n"
            f"    {three} = {two} - {chance.randrange(99)}\n    return {three} + {one}\n"
        )
    return "\n".join(parts)


def edited(ids: list[int], seed: int, changed: int) -> list[int]:
    """Return ids with one in ten changed, in places of `changed` tokens."""
    chance, found = random.Random(seed), list[int]()
    while len(found) < len(ids):
        kept = chance.randrange(6 * changed, 12 * changed)
        found += ids[len(found) : len(found) + kept]
        found += [chance.choice(ids) for _ in range(changed)]
    return found[: len(ids)]


class Measured(NamedTuple):
    """An answer. seconds: of wall clock and of CPUs, per token. length: counts of drafts, None without."""

    seconds: tuple[float, float]
    tokens: list[int]
    length: DraftLength | None


class Case:
    """Answers behind one text. script: tokens that are forced; None: the model's greedy ones."""

    def __init__(self, loop: AnswerLoop, config: ra.Config, ids: list[int], script: list[int] | None, new: int) -> None:
        self._loop, self._config, self._script, self._new = loop, config, script, new
        self._batch, self._cache = loop.batch([ids]), RetrievalCache(loop.model, config)
        self._state = loop.read_whole(self._cache, self._batch)

    def answer(self, drafts: bool) -> Measured:
        """Answer once."""
        cache, taken = self._cache.fork(), 0

        def forced(sequences: torch.Tensor, logits: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            assert self._script is not None
            taken += 1
            return torch.tensor([self._script[taken - 1]])

        steps = drafted_steps(self._loop.model, cache, self._batch.ids, self._new) if drafts else None
        criteria = StoppingCriteriaList([MaxLengthCriteria(self._batch.ids.shape[1] + self._new)])
        choice = TokenChoice(criteria, None if self._script is None else forced)
        began, cpu = time.perf_counter(), time.process_time()
        with using_retrieval(self._loop.model, self._config.prefill_chunk):
            found = run(self._loop.model, cache, self._state, choice, steps=steps)
        seconds = (time.perf_counter() - began) / self._new, (time.process_time() - cpu) / self._new
        tokens = found.sequences[0, self._batch.ids.shape[1] :].tolist()
        return Measured(seconds, tokens, None if steps is None else steps.drafts.length)


def measure(name: str, case: Case, count: int) -> None:
    """Print the best of some rounds, with drafts and without."""
    rounds = [(case.answer(False), case.answer(True)) for _ in range(count)]

    def best(which: int, part: int) -> float:
        return min(one[which].seconds[part] for one in rounds) * 1e3

    length, same = rounds[-1][1].length, all(one[0].tokens == one[1].tokens for one in rounds)
    assert length is not None, "the sequence has no drafts"
    print(
        f"{name}: {best(0, 0):.1f} ms per token without, {best(1, 0):.1f} with ({best(0, 0) / best(1, 0):.2f} x); CPU "
        f"{best(0, 1):.1f}, {best(1, 1):.1f} ms ({best(0, 1) / best(1, 1):.2f} x); drafts {length.drafted}, accepted "
        f"{length.accepted}; same text: {same}",
        flush=True,
    )


def measure_sums(loop: AnswerLoop, config: ra.Config, ids: list[int], tokens: int) -> None:
    """Print how near the logits of blocks of 16 tokens are to those of single tokens."""
    cache, model, start = RetrievalCache(loop.model, config), loop.model, len(ids) - tokens
    loop.read_whole(cache, loop.batch([ids[:start]]))
    blocks, singles, off, gaps = cache.fork(), cache.fork(), 0.0, list[float]()
    while start < len(ids):
        count = max(1, min(16, tokens_before_spill(blocks), len(ids) - start))
        places = list(range(start, start + count))
        together = step(model, [blocks], [ids[place] for place in places], places, counts=[count])
        alone = torch.cat([step(model, [singles], [ids[place]], [place]) for place in places])
        off = max(off, float((together - alone).abs().max() / alone.abs().max()))
        top = alone.topk(2).values
        gaps += (top[:, 0] - top[:, 1])[together.argmax(1) != alone.argmax(1)].tolist()
        start += count
    print(
        f"blocks of 16: logits within {off:.1e}; {len(gaps)} of {tokens} likeliest tokens differ, by {gaps}", flush=True
    )


def main() -> None:
    """Measure the model of the command line."""
    name, (tokens, new, count) = sys.argv[1], map(int, sys.argv[2:5])
    llm = ra.LLM(name, device="cpu", drafts=True)
    loop, encode = AnswerLoop(llm.model, llm.tokenizer), llm.tokenizer.encode
    code = encode(source_code(1, tokens // 50), add_special_tokens=False)[:tokens]
    prose = encode(shipped_prose(8 * (tokens + new), PROSE_SEED), add_special_tokens=False)
    measure_sums(loop, llm.config, prose[: tokens + new], new)
    for changed in (20, 4):
        quoted = Case(loop, llm.config, [*code, *code[200:210]], edited(code[210 : 210 + new], 3, changed), new)
        measure(f"a file, one token in ten changed, in places of {changed}", quoted, count)
    measure("prose", Case(loop, llm.config, prose[:tokens], prose[tokens : tokens + new], new), count)
    measure("greedy, a file again", Case(loop, llm.config, [*code, *code[200:260]], None, new), count)
    measure("greedy, prose goes on", Case(loop, llm.config, prose[:tokens], None, new), count)


if __name__ == "__main__":
    main()
