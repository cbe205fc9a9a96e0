"""Measure drafts by lookup: `python -m tools.measure_drafts MODEL TOKENS NEW ROUNDS`, on idle cores.

Answers of NEW tokens behind a text of TOKENS tokens, each with drafts and without, in turn: a file with one token in
ten changed, prose that quotes nothing, both forced token by token, and the model's own greedy answers.

On a card: `python -m tools.measure_drafts llama-3-8b TOKENS NEW ROUNDS --weights bf16`, a shape with random weights. An
answer is replayed as drafts, of which 6 of 7 are right (`--accepted`), none is, or none is proposed. With --engine the
answers are those of a single request of an engine, as a server has them.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

import retrieval_attn as ra
from retrieval_attn import answer_loop
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import FullAttention
from retrieval_attn.engine import stepper
from retrieval_attn.engine.request import Request
from retrieval_attn.gpu.memory import cap
from retrieval_attn.memory.units import parse_bytes
from retrieval_attn.model.loading import choose_device
from retrieval_attn.runner import drafted_steps as steps_module
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import TokenChoice, run
from retrieval_attn.runner.drafted_steps import drafted_steps
from retrieval_attn.runner.drafts import Draft, Drafter, DraftLength
from retrieval_attn.runner.rows import step, tokens_before_spill
from retrieval_attn_eval.bench.random_model import random_model
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from retrieval_attn_eval.flags import as_tokens
from retrieval_attn_eval.text.haystack import PROSE_SEED, shipped_prose
from tests.emulation.emulated import emulated
from tools.card.four_bits import made, scale_residual
from tools.card.near import add_read_window, near_reads

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


QUESTION = 16
DECISIVE = 1e-3
"""Of the weights behind attention and MLP."""
CERTAIN = 32
"""Certainty of replayed drafts."""


class Replayed(Drafter):
    """Propose the tokens of an answer, of `count` at a time the first `right` as they are and the others wrong."""

    def __init__(self, answer: Sequence[int], right: int, count: int) -> None:
        self._answer, self._right, self._count, self._place = answer, right, count, 0

    def extend(self, ids: Any) -> None:
        """Append tokens to the sequence."""
        self._place += len(ids)

    def propose(self, most: int) -> Draft:
        """Return up to `most` tokens."""
        tokens = [int(one) for one in self._answer[self._place : self._place + min(most, self._count)]]
        return Draft([one if place < self._right else one ^ 1 for place, one in enumerate(tokens)], CERTAIN)


class Round(NamedTuple):
    """An answer. seconds: per token. drafts: verified and accepted ones. how: see `Stats.decoded`."""

    seconds: float
    tokens: Sequence[int]
    drafts: tuple[int, int]
    how: str


class ContextAnswers:
    """Answers of a context after one question, `Context.ask` without a prompt's text."""

    def __init__(self, model: Any, config: ra.Config, tokenizer: Any, ids: list[int], new: int, window: int | None):
        """ids: of the text, which is read. window: see `near_reads`."""
        self._context, self._question, self._new = ra.Context(model, tokenizer, config), ids[:QUESTION], new
        with near_reads(window):
            self._context.read(ids, progress=False)

    def alone(self) -> Round:
        """Answer as `Config(drafts=False)` does."""
        with mock.patch.object(answer_loop, "drafted_steps", lambda *_: None):
            return self._answer()

    def drafted(self, drafter: Drafter) -> Round:
        """Answer with drafts of `drafter`."""
        with mock.patch.object(steps_module, "LookupDrafter", lambda _: drafter):
            return self._answer()

    def close(self) -> None:
        """Do nothing."""

    def _answer(self) -> Round:
        found = self._context.continue_with(
            self._question, max_new_tokens=self._new, ignore_eos=True, question_attention="retrieval"
        )
        stats = found.stats
        drafts = stats.drafted_tokens, stats.accepted_tokens
        return Round(stats.decode_seconds / stats.new_tokens, found.tokens, drafts, stats.decoded)


class EngineAnswers:
    """Answers of an engine with one request at a time, whose text is in the prefix cache."""

    def __init__(self, model: Any, config: ra.Config, tokenizer: Any, ids: list[int], new: int, window: int | None):
        """See `ContextAnswers`."""
        self._request = Request((tuple(ids), tuple(ids[:QUESTION])), new, stop_ids=frozenset())
        with near_reads(window):
            self._engine = ra.Engine(SimpleNamespace(model=model, tokenizer=tokenizer, config=config))
            self._engine.warm_up(rows=1, tokens=len(ids) + new, progress=False)
            self._answer()

    def alone(self) -> Round:
        """See `ContextAnswers.alone`."""
        with mock.patch.object(stepper, "_drafts_of", lambda _: None):
            return self._answer()

    def drafted(self, drafter: Drafter) -> Round:
        """See `ContextAnswers.drafted`."""
        with mock.patch.object(stepper, "LookupDrafter", lambda _: drafter):
            return self._answer()

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _answer(self) -> Round:
        before = self._engine.stats
        found = self._engine.submit(self._request).result()
        if found.error is not None:
            raise found.error
        after, (first, end) = self._engine.stats, found.seconds
        drafted, accepted = (after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
        seconds = (end - first) / max(1, len(found.tokens) - 1)
        return Round(seconds, found.tokens, (drafted, accepted), f"{after['steps'] - before['steps']} steps")


def make_decisive(model: Any) -> None:
    """Let token i + 1 follow token i by a wide margin: the likeliest of random logits changes with rounding, and a
    replayed answer is no draft any more. Times stay. model: with residual weights scaled by DECISIVE.
    """
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data.roll(1, 0))


def measure_card(args: argparse.Namespace) -> None:
    """Print milliseconds per token of a model with random weights, with drafts and without."""
    device = choose_device(args.device)
    if args.weights == "int4":
        model = made(args.model, device, 0, args.layers, DECISIVE)
    else:
        model = random_model(args.model, torch.bfloat16, 0, device, args.layers)
        scale_residual(model, DECISIVE)
    make_decisive(model)
    gc.freeze()
    if device.type == "cuda" and args.gpu_memory:
        cap(device, parse_bytes(args.gpu_memory, "gpu_memory"))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (args.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    full: FullAttention = "auto" if args.engine else args.full_attention
    config = ra.Config(drafts=True, full_attention=full, host_dtype=args.host_dtype)
    ra.enable(model, config)
    made_of = EngineAnswers if args.engine else ContextAnswers
    answers = made_of(model, config, number_tokenizer(vocabulary), ids, args.new, args.read_window)
    answer = answers.alone().tokens
    block, cases = args.accepted + 1, dict[str, tuple[int, int]]()
    cases[f"{args.accepted} of {block} drafts right"] = args.accepted, block
    cases["no draft right"], cases["no proposals"] = (0, block), (0, 0)
    for name, (right, count) in cases.items():
        rounds = [  # the first one captures
            (answers.alone(), answers.drafted(Replayed(answer, right, count))) for _ in range(args.rounds + 1)
        ]
        alone_ms, drafted_ms = (1e3 * statistics.median(one[part].seconds for one in rounds[1:]) for part in (0, 1))
        alone, drafted = rounds[-1]
        both = zip(alone.tokens, drafted.tokens, strict=False)
        same = next((n for n, (one, other) in enumerate(both) if one != other), args.new)
        print(
            f"{args.model} {args.weights}, {args.tokens} tokens, {name}: {alone_ms:.2f} ms per token without, "
            f"{drafted_ms:.2f} with ({alone_ms / drafted_ms:.2f} x); drafts {drafted.drafts[0]}, accepted "
            f"{drafted.drafts[1]}; {drafted.how}; first {same} of {args.new} tokens the same",
            flush=True,
        )
    answers.close()


def main() -> None:
    """Measure the model of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model, or with --weights a shape of bench.random_model")
    parser.add_argument("tokens", type=as_tokens)
    parser.add_argument("new", type=as_tokens, help="tokens of an answer")
    parser.add_argument("rounds", type=int)
    parser.add_argument("--weights", choices=("bf16", "int4"), help="random weights, on a card")
    parser.add_argument("--accepted", type=int, default=6, choices=(0, 2, 6, 14), help="of a block (default: 6)")
    parser.add_argument("--engine", action="store_true", help="answers of an engine, which a server has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--full-attention", default="never", help="see Config (default: never, retrieval)")
    parser.add_argument("--host-dtype", default="auto")
    parser.add_argument("--emulate", action="store_true", help="graphs that are emulated, without a GPU")
    add_read_window(parser)
    args = parser.parse_args()
    if args.weights is None:
        measure_cpu(args.model, args.tokens, args.new, args.rounds)
        return
    with emulated() if args.emulate else nullcontext():
        measure_card(args)


def measure_cpu(name: str, tokens: int, new: int, count: int) -> None:
    """Print what `main` says of a model on a CPU."""
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
