"""Options of retrieval attention, in one frozen dataclass. A leaf module: it imports only `errors`.

Every field is checked when the object is made, and unknown names are refused, so that a typo is an error
and not an ignored option.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from retrieval_attn.errors import ConfigError

QUANTIZATIONS = ("int8", "int4")
YARN_FLAG: dict[str, Any] = {
    "type": float,
    "metavar": "FACTOR",
    "help": "YaRN factor for texts longer than the model's positions (default: none)",
}
"""Of `--yarn`, as argparse takes it: of every command that loads a model for texts."""
HOST_DTYPES = ("auto", "int8")

Retrieve = int | Literal["all", "auto"]
Quantization = Literal["int8", "int4"]
GraphMode = bool | Literal["auto"]
DraftMode = bool | Literal["auto"]
QuestionAttention = Literal["exact", "retrieval"]
FullAttention = Literal["auto", "always", "never", "exact"]
FULL_ATTENTION: tuple[FullAttention, ...] = get_args(FullAttention)
TailMode = bool | Literal["auto"]
Place = Literal["auto", "device", "host"]
SPILL_TOKENS = 512
"""Generated tokens that a window gathers beyond its size before the oldest of them move to the host as one block."""
MEAN_RETRIEVE = 100
"""Keys per head that `retrieve="auto"` shares out, and what each head gets where nothing was measured."""


@dataclass(frozen=True)
class Config:
    """How one model's attention is split between the device and the host (RetrievalAttention, section 3).

    sink: tokens at the start of a sequence that stay on the device and are always attended.
    window: most recent tokens that stay on the device and are always attended.
    retrieve: keys retrieved per query head from everything between sink and window. An int >= 1, or "all" (exact
        attention over the host's keys; the reference mode). "auto": 100 on average. Indexes on the host share them out
        among the heads of each layer, 25 to 400 for one, by what more keys take off the error of its outputs for
        sampled queries of the prompt. Codes on a GPU, and answers without a tail, retrieve 100 for every head.
    tail: whether the keys between sink and window that a query does not retrieve are estimated from clusters of them,
        instead of left out. "auto" and True: yes; False: as the paper does it.
    index: name of the index over the host's keys ("auto" chooses; see `retrieval_attn.index.available()`). "device"
        keeps a few bytes of every key on the GPU, which then searches; "auto" does so where the GPU has room. "full":
        all keys stay on the device, and every token attends to all; `window` and `retrieve` change nothing then. A
        context takes its keys' bytes on the GPU, and while it answers twice as much again for each question.
    index_options: keyword arguments of that index; unknown ones are refused by the index.
    prefill_chunk: tokens of a prompt that go through a decoder layer at once (layer-major prefill). index="auto" takes
        fewer for a prompt where that makes room for codes on the device. A CPU takes at most 2048.
    question_attention: "exact": the tokens of a follow-up turn attend to the whole context exactly (the context's keys
        visit the device block by block), unless they are 8 or fewer. "retrieval": they go through retrieval like
        generated tokens.
    full_attention: "auto": with index="auto" and a tail, an answer on one GPU attends to all keys of a shorter text,
        which come there for it, if they fit and a token is sooner so (`runner/full_attention.py`); if only int8 fits,
        in int8.
        "always": wherever they fit. "never": every answer retrieves. "exact": the text, and the question, are those of
        full attention. Keys beyond the GPU's memory, and those of a CPU, stay on the host: retrieval drafts blocks of
        tokens, and one pass over all keys verifies each (`runner/exact_steps.py`). Engines always retrieve, and refuse
        "exact".
    host_dtype: storage of the host's keys and values; "auto" is the model's own dtype. "int8": whole steps of the
        largest number of each key and value of each head, with the step as float32 behind them: 132 bytes instead
        of 256 for head_dim 128 in bfloat16; so are those in an engine's pages.
    graph: whether a generated token is a replay of one CUDA graph, the host's search inside it. "auto": on a GPU where
        the model's step can be captured, with a log line where it cannot; True: an error instead; False: never.
    drafts: whether decode steps verify several tokens at once that the text may quote from earlier ones (prompt
        lookup), 2 to 5 times as fast where it does. "auto": steps of one sequence in an engine on a GPU, as far as its
        warm-up captured them; True: also those of a `Context`, whose first read on a GPU takes 5 s more, and of a CPU.
        Steps of several sequences on a GPU take one token of each. The text is the same but where two tokens are
        equally likely: logits are sums in an order that depends on measured times.
    threads: CPU threads of search and host attention; None uses all that numba sees.
    """

    sink: int = 128
    window: int = 512
    retrieve: Retrieve = "auto"
    tail: TailMode = "auto"
    index: str = "auto"
    index_options: Mapping[str, Any] = field(default_factory=dict)
    prefill_chunk: int = 8192
    question_attention: QuestionAttention = "exact"
    full_attention: FullAttention = "auto"
    host_dtype: str = "auto"
    graph: GraphMode = "auto"
    drafts: DraftMode = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _require_int("sink", self.sink, 0, "use 0 to keep no sink tokens")
        _require_int("window", self.window, 0, "use 0 to keep only the spill block on the device")
        _require_int("prefill_chunk", self.prefill_chunk, 1, "8192 is a good start")
        _check_retrieve(self.retrieve)
        require_question_attention(self.question_attention)
        require_full_attention(self.full_attention)
        if not isinstance(self.index, str) or not self.index:
            raise ConfigError(
                f"index must be the name of an index, got {self.index!r}; "
                "list them with retrieval_attn.index.available()."
            )
        if self.host_dtype not in HOST_DTYPES:
            raise ConfigError(f"host_dtype must be one of {', '.join(HOST_DTYPES)}; got {self.host_dtype!r}.")
        if not isinstance(self.graph, bool) and self.graph != "auto":
            raise ConfigError(f'graph must be "auto", True or False, got {self.graph!r}.')
        if not isinstance(self.tail, bool) and self.tail != "auto":
            raise ConfigError(f'tail must be "auto", True or False, got {self.tail!r}.')
        if not isinstance(self.drafts, bool) and self.drafts != "auto":
            raise ConfigError(f'drafts must be "auto", True or False, got {self.drafts!r}.')
        if self.threads is not None:
            _require_int("threads", self.threads, 1, "use None for all threads")
        object.__setattr__(self, "index_options", MappingProxyType(dict(self.index_options)))

    def replace(self, **changes: Any) -> Config:
        """A copy with `changes` applied. Unknown names raise ConfigError."""
        return Config.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON-ready values."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**fields, "index_options": dict(self.index_options)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles by value: a model that is enabled may be copied, with its options."""
        return Config.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Config:
        """Build from a mapping. Unknown names raise ConfigError with the list of known ones."""
        known = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"Unknown option {', '.join(unknown)}; the options are {', '.join(known)}.")
        return cls(**options)

    @property
    def keeps_all(self) -> bool:
        """Whether all keys stay on the device, see index "full"."""
        return self.index == "full"

    @property
    def spill(self) -> int:
        """Tokens that gather beyond the window before a block moves to the host: at most as many as the window has."""
        return min(SPILL_TOKENS, self.window) or SPILL_TOKENS

    @property
    def estimates(self) -> bool:
        """Whether keys that are not retrieved are estimated; where all are retrieved there are none."""
        return bool(self.tail) and self.retrieve != "all"

    @property
    def shares_keys(self) -> bool:
        """Whether each head gets its own number of keys from an index on the host, see `cpu/budgets.py`."""
        return self.retrieve == "auto" and self.estimates

    def retrieve_count(self, num_keys: int) -> int | None:
        """Keys to retrieve out of `num_keys`; None means all of them. Of "auto", the mean over heads at most."""
        if self.retrieve == "all":
            return None
        if self.retrieve == "auto":
            return MEAN_RETRIEVE
        assert isinstance(self.retrieve, int)
        return self.retrieve


def require_question_attention(value: object) -> None:
    """Raise ConfigError unless `value` is a `QuestionAttention`."""
    if value not in ("exact", "retrieval"):
        raise ConfigError(f'question_attention must be "exact" or "retrieval", got {value!r}.')


def require_full_attention(value: object) -> None:
    """Raise ConfigError unless `value` is a `FullAttention`."""
    if value not in FULL_ATTENTION:
        raise ConfigError(f"full_attention must be one of {', '.join(FULL_ATTENTION)}; got {value!r}.")


def resolve(config: Config | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Config:
    """`config` (default Config()) with keyword `overrides` on top; anything unknown raises ConfigError."""
    if config is None:
        base = Config()
    elif isinstance(config, Config):
        base = config
    elif isinstance(config, Mapping):
        base = Config.from_dict(config)
    else:
        raise ConfigError(f"config must be a retrieval_attn.Config or a mapping, got {type(config).__name__}.")
    return base.replace(**overrides) if overrides else base


def named_options(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of "NAME" or "NAME:OPTION=VALUE:OPTION=VALUE": `index` and `index_options` on a command line.

    Raises ConfigError.
    """
    name, *pairs = text.strip().split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"{text}: options are written name=value, got {pair!r}")
        options[key] = value_of(value)
    return name, options


def value_of(text: str) -> Any:
    """A number, True or False where the text is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_MOST = 2**31 - 1


def _require_int(name: str, value: object, least: int, advice: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}; {advice}.")
    if value > _MOST:
        raise ConfigError(f"{name} must be at most {_MOST}, got {value}; {advice}.")


def _check_retrieve(value: object) -> None:
    advice = 'give an integer >= 1, "all" or "auto"'
    if value in ("all", "auto") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return
    raise ConfigError(f"retrieve={value!r} retrieves nothing or is not a number; {advice}.")
