"""Subject: the model of a session, its contexts, its prompts and its questions, as a user would make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import retrieval_attn as ra
import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.bench.random_model import layers_text
from retrieval_attn_eval.models import BUNDLED_MODEL, model_path
from retrieval_attn_eval.text.haystack import shipped_prose

__all__ = ["Settings", "Subject", "number_tokenizer"]

CHARS_PER_TOKEN = 8
"""More than any tokenizer needs for English."""
TRIES = 64
QUESTION = 32
"""Tokens of a question whose length is not measured."""


@dataclass(frozen=True)
class Settings:
    """Measures of one session process, as plain values.

    Attributes:
        shape: Shape of random weights in place of `model`.
        length: Tokens of a context.
        questions: Tokens of each timed question.
        extensions: Tokens appended to a fork.
        tokens: Tokens of a timed answer.
        repeats: Repeats after the first time.
        skip: Stages that do not run.
        no_second: Reason for reading no second context; empty if one is read.
        layers: Number of layers of `shape`. Defaults to all.
        grown: Tokens by which the saving stage extends the context.
    """

    model: str
    shape: str | None
    device: str
    dtype: str
    length: int
    gpu_memory: int | None
    options: dict[str, Any]
    questions: tuple[int, ...]
    extensions: tuple[int, ...]
    tokens: int
    repeats: int
    random_ids: bool
    seed: int
    skip: tuple[str, ...]
    no_second: str
    layers: int | None = None
    grown: int = 0

    @property
    def config(self) -> ra.Config:
        """Options of retrieval attention. Raises ConfigError."""
        return ra.Config.from_dict(self.options)

    @property
    def name(self) -> str:
        """Of the model, for reports."""
        if self.shape is None:
            return self.model
        return f"random:{self.shape}" + (f", {layers_text(self.shape, self.layers)}" if self.layers else "")

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a sequence of the session."""
        asked = max((*self.questions, QUESTION))
        return self.length + max((*self.extensions, self.grown)) + asked + self.tokens + 16

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Settings:
        """What `to_dict` gave, read back from JSON."""
        lists = {name: tuple(fields[name]) for name in ("questions", "extensions", "skip")}
        return cls(**{**fields, **lists})


class Subject:
    """A loaded model with the ways in which a user gives it texts."""

    def __init__(self, settings: Settings) -> None:
        """Load or make the model. Raises RetrievalAttentionError for what cannot be had."""
        self._settings = settings
        self._texts = 0
        self.model: Any
        self.tokenizer: PreTrainedTokenizerBase
        self.simplifications: list[str] = []
        if settings.shape is None:
            self._load()
            self._prose_tokenizer = self.tokenizer
        else:
            self._make(settings.shape)
        if settings.shape is not None or settings.random_ids:
            self._prose_tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
            vocabulary = self.model.get_input_embeddings().weight.shape[0]
            self.tokenizer = number_tokenizer(vocabulary)
            self.simplifications.append("texts are token ids written as numbers")
        if settings.random_ids:
            self.simplifications.append("random token ids in place of a text")
        # an answer of a known number of tokens, whatever the model would say
        self.model.generation_config.eos_token_id = []
        self.simplifications.append("answers do not end by themselves")

    def _load(self) -> None:
        settings = self._settings
        llm = ra.LLM(
            model_path(settings.model),
            device=settings.device,
            dtype=settings.dtype,
            gpu_memory=settings.gpu_memory,
            max_context=settings.max_tokens,
            config=settings.config,
        )
        self.model = llm.model
        self.tokenizer = llm.tokenizer
        if settings.model == "bundled":
            self.simplifications.append("the bundled model of 5.64 M parameters")

    def _make(self, shape: str) -> None:
        """Random weights cannot be loaded by name: the rest is what `LLM` does."""
        from retrieval_attn.model.loading import choose_device
        from retrieval_attn.testing import cap
        from retrieval_attn_eval.bench.random_model import random_model

        settings = self._settings
        device = choose_device(settings.device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        if settings.dtype != "auto":
            dtype = getattr(torch, settings.dtype)
        if device.type == "cuda":
            cap(device, settings.gpu_memory)
        self.model = random_model(shape, dtype, settings.seed, device, settings.layers).to(device)
        ra.enable(self.model, settings.config)
        self.simplifications.append(f"random weights of the shape {shape}, {layers_text(shape, settings.layers)}")

    def about(self) -> dict[str, Any]:
        """What the report says of the model, as JSON values."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.model.device) if self.model.device.type == "cuda" else "cpu",
            "torch_threads": torch.get_num_threads(),
            "weight_bytes": sum(weight.nbytes for weight in self.model.parameters()),
            "layers": self.model.config.get_text_config(decoder=True).num_hidden_layers,
        }

    def context(self) -> ra.Context:
        """A new, empty context."""
        return ra.Context(self.model, self.tokenizer, self._settings.config)

    def read(self, ids: Sequence[int], **where: Any) -> ra.Context:
        """A new context that holds the ids. where: `save`, `store` and `wait` of `Context.read`."""
        return self.context().read(ids, progress=False, **where)

    def ids(self, tokens: int) -> list[int]:
        """Token ids of a new text."""
        seed = self._settings.seed + self._texts
        self._texts += 1
        if self._settings.random_ids:
            vocabulary = self.model.get_input_embeddings().weight.shape[0]
            drawn: list[int] = torch.randint(
                vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)
            ).tolist()
            return drawn
        text = shipped_prose((tokens + 16) * CHARS_PER_TOKEN, seed)
        ids: list[int] = self._prose_tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
        if len(ids) < tokens:
            raise InputDataError(f"the prose gave {len(ids)} tokens, {tokens} were needed")
        return ids

    def question(self, tokens: int) -> str:
        """A new text that has exactly so many tokens when it continues a context.

        Raises InputDataError where the tokenizer takes no cut of the prose back as it gave it.
        """
        ids = self.ids(tokens + TRIES)
        for start in range(TRIES):
            text = str(self.tokenizer.decode(ids[start : start + tokens]))
            if len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) == tokens:
                return text
        raise InputDataError(f"no text of {tokens} tokens was found that the tokenizer reads as so many; --random-ids")

    def questions(self, count: int, tokens: int) -> Sequence[str]:
        """Different questions."""
        return [self.question(tokens) for _ in range(count)]


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """A tokenizer whose text of an id is the id in digits, with blanks between: every list of ids is some text's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
