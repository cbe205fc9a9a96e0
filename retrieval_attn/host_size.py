"""Bytes of the host's keys, values and indexes, from the shape of a model and the options. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_attn.config import Config
from retrieval_attn.model_shape import ModelShape


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

    def index_size(self) -> tuple[int, int | None, str]:
        """Bytes per key of one head that the index holds at most, how many keys at most (None: all), and of what."""
        from retrieval_attn.index.codes import code_width
        from retrieval_attn.index.graph_options import GraphOptions

        options, dim = self.options, self.shape.key_dim
        if options.index == "flat":
            # a scan searches the stored keys themselves, unless it codes them; int8 keys are codes already
            coded = options.index_options.get("codes", "none") != "none" and options.host_dtype != "int8"
            return (code_width(dim), None, "a code per key") if coded else (0, None, "no bytes beyond the keys")
        own = options.index_options if options.index == "roargraph" else {}
        graph = GraphOptions(**{name: value for name, value in own.items() if name != "lists"})
        links = graph.degree_for(dim)
        # an id and a term of the distance, 4 bytes each, lie beside code and links
        each = code_width(dim) + 4 * links + 8
        if options.index not in ("auto", "roargraph") or not graph.listed_only:
            return each, None, f"code and {links} links per key at most"
        listed = options.train_queries * (self.shape.q_heads // self.shape.kv_heads) * graph.list_k
        return each, listed, f"code, {links} links for {listed:,} keys a head at most"

    def index_bytes(self, tokens: int) -> int:
        """Bytes of the indexes over so many tokens of each sequence, at most."""
        each, most, _ = self.index_size()
        return self.heads * each * (tokens if most is None else min(tokens, most))

    def most_tokens(self, room: int) -> int | None:
        """Tokens of each sequence that fit `room` bytes with their indexes; None: any number, nothing is held."""
        if not self.token_bytes:
            return None
        each, most, _ = self.index_size()
        tokens = room // (self.token_bytes + self.heads * each)
        if most is not None and tokens > most:
            tokens = (room - self.index_bytes(most)) // self.token_bytes
        return max(tokens, 0)
