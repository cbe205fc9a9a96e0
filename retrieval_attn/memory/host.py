"""Bytes of the host's keys, values and indexes, from the shape of a model and the options. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from retrieval_attn.config import Config
from retrieval_attn.memory.shape import ModelShape


class _Held(NamedTuple):
    """Bytes per key of one head, of how many keys at most (None: of all), what they are, and bytes of all others."""

    each: int
    most: int | None
    text: str
    other: int = 0

    def bytes(self, tokens: int) -> int:
        """Bytes for one head of so many tokens."""
        held = tokens if self.most is None else min(tokens, self.most)
        return self.each * held + self.other * (tokens - held)


@dataclass(frozen=True)
class HostSize:
    """Bytes that sequences of one length take on the host: of `batch` sequences that share nothing."""

    shape: ModelShape
    options: Config
    batch: int = 1

    @property
    def rows(self) -> tuple[int, int]:
        """Bytes of one key and of one value of one head, as the host stores them."""
        from retrieval_attn.index.formats import Format

        shape, name = self.shape, self.options.host_dtype
        if name == "auto":
            return shape.key_dim * shape.dtype_bytes, shape.value_dim * shape.dtype_bytes
        fmt = Format.from_name(name)
        return fmt.row_bytes(shape.key_dim), fmt.row_bytes(shape.value_dim)

    @property
    def heads(self) -> int:
        """Key-value heads of all sequences and layers that the host stores."""
        return self.batch * self.shape.full_layers * self.shape.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token of context."""
        return self.heads * sum(self.rows)

    def index_size(self) -> tuple[_Held, ...]:
        """What the index may hold at most, one for each kind that it may turn out to be."""
        from retrieval_attn.index.base import MAX_KEYS, check_kind
        from retrieval_attn.index.kernels.codes import code_width
        from retrieval_attn.index.roargraph.options import GraphOptions
        from retrieval_attn.index.sketch.leaves import PLACE_BYTES

        kind, given, dim = self.options.index, self.options.index_options, self.shape.key_dim
        # a scan searches the stored keys themselves, unless it codes them; int8 keys are codes already
        scan = _Held(0, None, "no bytes beyond the keys")
        codes = scan if self.options.host_dtype == "int8" else _Held(code_width(dim), None, "a code per key")
        if kind == "flat":
            return (scan if given.get("codes", "none") == "none" else codes,)
        if kind == "device":
            return (_Held(0, None, "no bytes on the host: codes lie on the GPU"),)
        half = max(8, dim // 2)
        numbers = given.get("key_bytes", half) if kind == "sketch" else half
        sketch = _Held(numbers + PLACE_BYTES, None, "a sketch of every key, its id and share of a leaf")
        if kind == "sketch":
            return (sketch,)
        own = given if kind == "roargraph" else {}
        options = GraphOptions(**{name: value for name, value in own.items() if name != "lists"})
        links = options.degree_for(dim)
        # an id and a term of the distance, 4 bytes each, lie beside code and links
        each = code_width(dim) + 4 * links + 8
        if kind not in ("auto", "roargraph") or not options.listed_only:
            return (_Held(each, None, f"code and {links} links per key at most"),)
        queries = check_kind(kind, dict(given)).training_queries(MAX_KEYS, self.options.train_queries)
        listed = queries * (self.shape.q_heads // self.shape.kv_heads) * options.list_k
        nodes = listed + options.landmarks
        graph = _Held(each, nodes, f"code, {links} links of {nodes:,} keys a head, ids", 4)
        return (graph, codes, sketch) if kind == "auto" else (graph,)

    def index_bytes(self, tokens: int) -> int:
        """Bytes of the indexes over so many tokens of each sequence, at most."""
        return self.heads * max(held.bytes(tokens) for held in self.index_size())

    def index_text(self, tokens: int) -> str:
        """What the most of `index_bytes` is."""
        return max(self.index_size(), key=lambda held: held.bytes(tokens)).text

    def most_tokens(self, room: int) -> int | None:
        """Tokens of each sequence that fit `room` bytes with their indexes; None: any number, nothing is held."""
        if not self.token_bytes:
            return None
        fitting = []
        for each, most, _, other in self.index_size():
            tokens = room // (self.token_bytes + self.heads * each)
            if most is not None and tokens > most:
                tokens = (room - self.heads * (each - other) * most) // (self.token_bytes + self.heads * other)
            fitting.append(tokens)
        return max(0, min(fitting))
