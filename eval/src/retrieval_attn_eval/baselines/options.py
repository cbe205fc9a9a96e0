"""Options of every method, with the parameters its paper published as defaults, and what a budget makes of them.

No torch here.  Every field is checked when the object is made; unknown names are refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from retrieval_attn.errors import ConfigError

__all__ = ["InfiniGen", "InfLLM", "MagicPIG", "Options", "PyramidKV", "Quest", "SnapKV", "StreamingLLM", "pyramid"]

SINK, WINDOW = 128, 512
"""The static part of RetrievalAttention (section 3.3), for the methods that have one."""


@dataclass(frozen=True)
class Options:
    """Base: `of` builds from keywords, `for_budget` names the values that make a query attend to `budget` tokens."""

    method: ClassVar[str]

    @property
    def reads(self) -> bool:
        """Whether the method has its own way of reading the context, which nothing else can share."""
        return False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Any:
        """Options from keywords.  Raises ConfigError for an unknown name, with the known ones."""
        known = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(
                f"method {cls.method} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}"
            )
        return cls(**given)

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        """Options for `budget` tokens per step, where `given` ones are kept."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class StreamingLLM(Options):
    """Efficient Streaming Language Models with Attention Sinks, section 3.2.

    sink: first tokens that are always attended; window: most recent tokens, the query's own included.
    The paper's 4 sinks are `sink=4`; 128 + 1920 is what RetrievalAttention compares with (its 2K budget).
    prefill: "full" reads the context with full attention; "window" already reads it through sinks and window.
    """

    method: ClassVar[str] = "streaming_llm"
    sink: int = SINK
    window: int = 1920
    prefill: str = "full"

    def __post_init__(self) -> None:
        _at_least(self, sink=0, window=1)
        _one_of(self, "prefill", ("full", "window"))

    @property
    def reads(self) -> bool:
        return self.prefill == "window"

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        sink = given.get("sink", min(SINK, budget // 4))
        return {"sink": sink, "window": budget - sink}


@dataclass(frozen=True)
class SnapKV(Options):
    """SnapKV: LLM Knows What You are Looking for Before Generation, section 4.

    capacity: tokens each key-value head keeps of the prompt, the observation window included.
    observe: last tokens of the prompt that vote, and stay.  kernel, pooling ("avg" or "max"): votes are pooled over
    neighbours, so that a chosen token keeps its surroundings.
    """

    method: ClassVar[str] = "snapkv"
    capacity: int = 2048
    observe: int = 64
    kernel: int = 5
    pooling: str = "avg"

    def __post_init__(self) -> None:
        _at_least(self, capacity=1, observe=1, kernel=1)
        _one_of(self, "pooling", ("avg", "max"))
        if self.kernel % 2 == 0:
            raise ConfigError(f"{self.method}: kernel must be odd, got {self.kernel}; 5 is the published value")
        if self.capacity <= self.observe:
            raise ConfigError(
                f"{self.method}: capacity={self.capacity} must exceed observe={self.observe}, or no token of the "
                "context is kept; raise capacity or lower observe"
            )

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        return {"capacity": budget, "observe": given.get("observe", min(64, max(1, budget // 4)))}


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, section 4.

    SnapKV's choice with a budget per layer that falls linearly; capacity is the mean over layers.
    beta: the last layer keeps (capacity - observe) / beta tokens beyond the observation window.
    """

    method: ClassVar[str] = "pyramidkv"
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, beta=1)

    def layer_capacity(self, layer: int, layers: int, tokens: int) -> int:
        """Tokens that layer `layer` of `layers` keeps of a prompt of `tokens`, observation window included.

        From max = 2 (capacity - observe) - min down to min = (capacity - observe) // beta in equal whole steps;
        where a layer cannot give max, the others get more.  A prompt below twice the mean is cut evenly.
        """
        mean = self.capacity - self.observe
        if layers == 1 or tokens - self.observe < mean or tokens < 2 * mean:
            return min(self.capacity, tokens)
        return self.observe + pyramid(mean, self.beta, layer, layers, tokens - self.observe)


def pyramid(mean: int, beta: int, layer: int, layers: int, tokens: int | None = None) -> int:
    """What layer `layer` of `layers` gets of a budget that falls in equal whole steps and is `mean` on average.

    From 2 mean - mean // beta down to mean // beta; a layer cannot have more than `tokens`, the others get the rest.
    (PyramidKV, section 4)
    """
    if layers == 1:
        return mean
    least = mean // beta
    most = 2 * mean - least
    if tokens is not None and most >= tokens:
        most = tokens
        least = 2 * mean - most
    return most - layer * ((most - least) // (layers - 1))


@dataclass(frozen=True)
class Quest(Options):
    """Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, section 3.

    budget: tokens a query head attends to, in whole pages of `page` tokens, at least `least_pages` of them.
    dense_layers: first layers that attend to everything (they are outside of the budget, as in the paper).
    """

    method: ClassVar[str] = "quest"
    budget: int = 2048
    page: int = 16
    dense_layers: int = 2
    least_pages: int = 3

    def __post_init__(self) -> None:
        _at_least(self, budget=1, page=1, dense_layers=0, least_pages=1)

    @property
    def pages(self) -> int:
        """Pages a query head attends to."""
        return max(self.least_pages, self.budget // self.page)

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        page = given.get("page", 16)
        if budget < page:
            raise ConfigError(f"quest attends to whole pages: budget={budget} must be at least page={page}")
        return {"budget": budget, "least_pages": 1}


@dataclass(frozen=True)
class InfLLM(Options):
    """InfLLM: Training-Free Long-Context Extrapolation with an Efficient Context Memory, section 3.

    sink, window: first tokens and the local window (n_init, n_local).  block: tokens per memory block; blocks: how
    many a chunk of queries looks up; representatives: tokens that stand for a block.  chunk: queries that are read,
    and look up blocks, together.
    positions: "unified" gives all tokens beyond the window one distance, the window's length (the paper's way to go
    beyond the trained length); "true" leaves them where they are.
    prefill: "blocks" reads the context by the method itself, as the paper does; "full" with full attention.
    """

    method: ClassVar[str] = "infllm"
    sink: int = SINK
    window: int = 4096
    block: int = 128
    blocks: int = 16
    representatives: int = 4
    chunk: int = 512
    positions: str = "unified"
    prefill: str = "blocks"

    def __post_init__(self) -> None:
        _at_least(self, sink=0, window=1, block=1, blocks=0, representatives=1, chunk=1)
        _one_of(self, "positions", ("unified", "true"))
        _one_of(self, "prefill", ("blocks", "full"))
        if self.representatives > self.block:
            raise ConfigError(f"infllm: representatives={self.representatives} must not exceed block={self.block}")

    @property
    def reads(self) -> bool:
        return self.prefill == "blocks"

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        """Whole blocks from what sinks and the default static window leave, at least one; the window takes the rest.

        Until the next block is complete its tokens are attended beside the window: half a block is set aside for them.
        """
        block = given.get("block", 128)
        sink = given.get("sink", min(SINK, budget // 8))
        blocks = given.get("blocks", max(1, (budget - sink - given.get("window", WINDOW)) // block))
        window = budget - sink - blocks * block - block // 2
        if window < 1:
            raise ConfigError(
                f"infllm: budget={budget} has no room for {sink} sinks, {blocks} blocks of {block} and a window; "
                "give a larger budget or a smaller block"
            )
        return {"sink": sink, "window": window, "block": block, "blocks": blocks}


@dataclass(frozen=True)
class InfiniGen(Options):
    """InfiniGen: Efficient Generative Inference of LLMs with Dynamic KV Cache Management, section 4.

    partial: share of the skewed query and key columns that speculation uses.  alpha: tokens whose speculated score
    is within alpha of the best are fetched.  most: at most this share of the cache.  tokens: fetch exactly this many
    instead (what "2K" means in RetrievalAttention's tables), None for alpha's rule.
    dense_layers: first layers without speculation; the very first has no layer before it.
    """

    method: ClassVar[str] = "infinigen"
    partial: float = 0.2
    alpha: float = 4.0
    most: float = 0.2
    tokens: int | None = None
    dense_layers: int = 1

    def __post_init__(self) -> None:
        _at_least(self, dense_layers=1)
        if self.tokens is not None:
            _at_least(self, tokens=1)
        for name in ("partial", "most"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"infinigen: {name} must be a share in (0, 1], got {value!r}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise ConfigError(f"infinigen: alpha must be a number > 0, got {self.alpha!r}; 4 is the published value")

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": budget}


@dataclass(frozen=True)
class MagicPIG(Options):
    """MagicPIG: LSH Sampling for Efficient LLM Generation, sections 4 and 5.

    bits, tables: of the hash codes, at least 2 tables (K and L in the paper; 10 and 150 are its usual ones). sink,
    window: first and last tokens that are attended exactly. tokens: a query attends to about that many, sink and window
    included, with at most so many bits and tables; None: `bits` and `tables` are taken as they are. dense_layers: first
    layers that attend to everything. seed: of the random projections.
    """

    method: ClassVar[str] = "magicpig"
    bits: int = 10
    tables: int = 150
    sink: int = 4
    window: int = 64
    tokens: int | None = None
    dense_layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, bits=1, tables=2, sink=0, window=1, dense_layers=0, seed=0)
        if self.bits > 15:
            raise ConfigError(f"magicpig: bits must be at most 15, got {self.bits}; the paper's are 8 to 11")
        if self.tokens is not None:
            _at_least(self, tokens=self.sink + self.window + 1)

    @classmethod
    def for_budget(cls, budget: int, given: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": budget, "sink": min(cls.sink, budget // 8), "window": min(cls.window, budget // 4)}


def _at_least(options: Options, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise ConfigError(f"{options.method}: {name} must be a whole number >= {bound}, got {value!r}")


def _one_of(options: Options, name: str, known: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in known:
        raise ConfigError(f"{options.method}: {name} must be one of {', '.join(known)}; got {value!r}")
