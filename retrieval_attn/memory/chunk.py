"""Bytes of a chunk of a prompt on its way through the layers, from the shape of a model. Arithmetic only."""

from __future__ import annotations

from typing import NamedTuple

from retrieval_attn.memory.shape import ModelShape

# Beside a chunk's activations, this part of them: blocks that the allocator keeps and that fit no other tensor. Up to
# 0.4 were measured while reading 16K to 128K tokens on an H100.
FRAGMENTED = 0.5
# Chunks of hidden states on the device at once where the rest lies on the host, beside the input and output that a
# chunk's activations count: the next one on its way up, and those on their way down.
CHUNKS_UNDER_WAY = 3


class ChunkSize(NamedTuple):
    """What a token of a chunk takes: activations in a layer with keys (attending) and in one with a state (mixing), and
    hidden states that are on their way between host and device (visiting).

    absent: bytes of keys and values that the device has in a layer with keys, and that have left it when one with a
    state begins (`runner/prefill.py`).
    """

    attending: int
    mixing: int
    visiting: int
    absent: int

    @classmethod
    def of(cls, shape: ModelShape, batch: int, *, hidden_on_host: bool, absent: int) -> ChunkSize:
        """For `batch` sequences.

        In a layer with keys the larger of MLP and attention. MLP: gate, up and their product, with the layer's input,
        its normalised copy and the output beside them. Attention: query and output in the model's dtype and two float32
        partials that are being merged. Of a layer with a state: `memory/activations.py`.
        """
        hidden = shape.hidden * shape.dtype_bytes
        mlp = 3 * shape.mlp_width * shape.dtype_bytes
        heads = shape.q_heads * (shape.key_dim + shape.value_dim) * shape.dtype_bytes
        partials = 2 * shape.q_heads * (shape.value_dim + 1) * 4
        mixing = shape.state_chunk_bytes if shape.state_layers else 0
        visiting = CHUNKS_UNDER_WAY * hidden if hidden_on_host else 0
        return cls(batch * (3 * hidden + max(mlp, heads + partials)), batch * mixing, batch * visiting, absent)

    def in_state(self, tokens: int) -> bool:
        """Whether the peak of a chunk of so many tokens is in a layer that keeps a state."""
        return (1 + FRAGMENTED) * tokens * (self.mixing - self.attending) > self.absent

    def token_bytes(self, tokens: int) -> int:
        """Activations per token of a chunk of so many in the layer where its peak is."""
        return self.mixing if self.in_state(tokens) else self.attending

    def unusable(self, tokens: int) -> int:
        """Bytes that the allocator cannot hand out while a chunk of so many tokens is read."""
        return int(FRAGMENTED * tokens * self.token_bytes(tokens))

    def bytes(self, tokens: int) -> int:
        """All bytes that a chunk of so many tokens costs beside what the context does, a layer's keys among it."""
        absent = self.absent if self.in_state(tokens) else 0
        return tokens * (self.token_bytes(tokens) + self.visiting) + self.unusable(tokens) - absent

    def most(self, free: int) -> int:
        """Tokens of the largest chunk that so many bytes are enough for; negative where `free` is."""
        attending = free / ((1 + FRAGMENTED) * self.attending + self.visiting)
        if not self.mixing:
            return int(attending)
        return int(min(attending, (free + self.absent) / ((1 + FRAGMENTED) * self.mixing + self.visiting)))
