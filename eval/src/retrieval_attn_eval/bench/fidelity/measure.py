"""What is measured, checked before anything is read, and what every method does on a text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, ContextLengthError
from retrieval_attn_eval.baselines.registry import POLICIES
from retrieval_attn_eval.bench.fidelity.feed import Budget, feed_full, feed_index, feed_policies
from retrieval_attn_eval.bench.fidelity.row import Measured, judged
from retrieval_attn_eval.bench.fidelity.scores import log_probabilities
from retrieval_attn_eval.bench.fidelity.texts import FedText, parse_texts
from retrieval_attn_eval.bench.methods import parse
from retrieval_attn_eval.bench.random_model import model_config
from retrieval_attn_eval.flags import parse_lengths, parse_retrieve

__all__ = ["TAIL", "TAILS", "Plan", "measure", "plan_of", "with_room"]

TAIL = " + tail"
"""Behind the name of a kind of index, for rows with an estimate of what was not retrieved."""
TAILS = {"both": (False, True), "with": (True,), "without": (False,)}
"""The values of `--tail`."""
MASS_HEADS = 1
"""Heads per layer and token whose captured attention weight is measured."""


@dataclass(frozen=True)
class Plan:
    """What is measured. kinds: options by label, one for every kind of index; policies: names of published methods.
    samples: texts of each kind and length. tails: every kind once with each of these. captured: they decode by captured
    steps.
    """

    config: Config
    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    budgets: tuple[Budget, ...]
    kinds: dict[str, Config]
    policies: tuple[str, ...]
    tails: tuple[bool, ...]
    tokens: int
    mass_heads: int
    head_error: bool
    captured: bool
    samples: int
    seed: int

    @property
    def measurements(self) -> int:
        """Methods with a budget on a text that `measure` gives for all texts."""
        everything = "all" in self.budgets  # where nothing is estimated
        per_kind = len(self.tails) * (len(self.budgets) - everything) + everything
        own = per_kind * len(self.kinds) + len(self.budgets) * len(self.policies)
        floor = bool(self.kinds) and not everything
        return len(self.texts) * len(self.lengths) * self.samples * (own + floor)


def plan_of(args: argparse.Namespace) -> Plan:
    """The checked flags. Raises ConfigError, ContextLengthError, or InputDataError for a model that is not there."""
    config = Config(sink=args.sink, window=args.window, host_dtype=args.host_dtype, threads=args.threads or None)
    specs = parse(args.methods, POLICIES)
    lengths = sorted(parse_lengths(args.lengths))
    limit = model_config(args.model, None, yarn=args.yarn).get_text_config(decoder=True).max_position_embeddings
    lengths = with_room(lengths, limit, args.tokens)
    least = args.sink + args.window
    if lengths[0] <= least:
        raise ConfigError(
            f"--lengths {lengths[0]}: sink and window hold {least} tokens, nothing is left to retrieve; give a length "
            "above that or a smaller --window"
        )
    budgets = tuple(dict.fromkeys(parse_retrieve(part.strip()) for part in args.retrieve.split(",") if part.strip()))
    if not budgets:
        raise ConfigError("--retrieve names no number of keys; write 20,100,400")
    kinds: dict[str, Config] = {}
    for spec in specs:
        if spec.name not in POLICIES:
            kinds[spec.label] = config.replace(index=spec.name, index_options=spec.options)
    for budget in budgets:
        config.replace(retrieve=budget)
    return Plan(
        config=config,
        texts=parse_texts(args.texts),
        lengths=tuple(lengths),
        budgets=budgets,
        kinds=kinds,
        policies=tuple(dict.fromkeys(spec.name for spec in specs if spec.name in POLICIES)),
        tails=TAILS[args.tail],
        tokens=args.tokens,
        mass_heads=0 if args.captured else MASS_HEADS,
        head_error=not args.captured,
        captured=args.captured,
        samples=args.n,
        seed=args.seed,
    )


def with_room(lengths: list[int], limit: int, tokens: int) -> list[int]:
    """Return the lengths; shorten those at the end of the model's positions so that decoding has room.

    Args:
        lengths: Tokens of context, ascending.
        limit: Positions of the model.
        tokens: Tokens decoded after the context.

    Raises ContextLengthError for a length over `limit`.
    """
    most = limit - min(4 * (tokens + 16), limit // 8)
    long = [length for length in lengths if length > limit]
    if long:
        raise ContextLengthError(
            f"--lengths {','.join(map(str, long))}: needed as many positions, the model has {limit};"
            " give shorter lengths or another model"
        )
    return sorted({min(length, most) for length in lengths})


def measure(model: Any, tokenizer: Any, text: FedText, plan: Plan) -> Iterator[Measured]:
    """Every method with every budget on a text. The first kind of index has one more, with everything retrieved."""
    reference = log_probabilities(feed_full(model, text).logits)
    for number, (label, config) in enumerate(plan.kinds.items()):
        budgets = plan.budgets if number or "all" in plan.budgets else (*plan.budgets, "all")
        fed = feed_index(
            model, config, text, budgets, plan.mass_heads,
            head_error=plan.head_error, tails=plan.tails, captured=plan.captured,
        )  # fmt: skip
        for one in fed:
            yield judged(text, label + TAIL if one.tail else label, one, reference)
    policies = feed_policies(model, tokenizer, plan.policies, plan.config, text, plan.budgets, plan.head_error)
    for name, one in policies:
        yield judged(text, name, one, reference)
