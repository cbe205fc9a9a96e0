"""Tokenizer of a GGUF file's metadata: byte-level BPE from its merges, SentencePiece's BPE from its scores.

transformers' own conversion of the second kind builds a Unigram model of BPE's ranks for Gemma, which splits words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from retrieval_attn.errors import InputDataError, UnsupportedModelError
from retrieval_attn.model.gguf.file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
"""Types of tokens in llama.cpp."""
_SPACE = "▁"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_START = r"[^\r\n\p{L}\p{N}]?"
_WORD = _START + r"\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = "|".join([_SHORT, _WORD, r"\p{N}{1,3}", _MARKS, _REST])
_QWEN2 = "|".join([_SHORT, _WORD, r"\p{N}", _MARKS, _REST])
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = _START + _UPPER + "*" + _LOWER + "+", _START + _UPPER + "+" + _LOWER + "*"
_GPT4O = "|".join([*(f"{word}{_SHORT}?" for word in _CASED), r"\p{N}{1,3}", _PATHS, _REST])
_TEKKEN = "|".join([*_CASED, r"\p{N}", _PATHS, _REST])
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "smaug-bpe": _LLAMA3, "glm4": _LLAMA3, "chatglm-bpe": _LLAMA3,
    "dbrx": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O, "tekken": _TEKKEN, "gpt-2": _GPT2, "default": _GPT2,
}  # fmt: skip
"""Patterns that split text into words, by tokenizer.ggml.pre."""
_WHOLE_WORDS = "llama-bpe", "llama3", "smaug-bpe", "tekken"
"""Of these, words that are tokens are not merged, and texts begin with a special token unless the file denies it."""


def tokenizer_of(file: GgufFile) -> Any:
    """Return the transformers tokenizer of the metadata in `file`, with its chat template.

    Raises UnsupportedModelError for kinds of tokenizers that are not supported, InputDataError for a file without one.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = list(file.metadata.get("tokenizer.ggml.tokens", ()))
    if not tokens:
        raise InputDataError(f"{file.path} has no tokenizer; load the checkpoint that it was made of.")
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    types: Sequence[int] = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "llama":
        made, begins = _by_scores(file, tokens, types), True
    elif kind == "gpt2" and pre in _PATTERNS:
        made, begins = _by_merges(file, tokens, pre), pre in _WHOLE_WORDS
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {kind!r} with the pattern {pre!r}. Supported: llama, and gpt2 "
            f"with {', '.join(_PATTERNS)}. Load the checkpoint that the file was made of."
        )
    # phi-3's control tokens take the line break that follows, which no metadata says
    strips = "phi-3" in str(file.metadata.get("general.name", "")).lower()
    special = [
        AddedToken(
            token, special=True, normalized=False, rstrip=strips and token not in ("<s>", "<unk>", "<|endoftext|>")
        )
        for token, one in zip(tokens, types, strict=True)
        if one == _CONTROL
    ]
    made.add_special_tokens(special)
    made.add_tokens([
        AddedToken(token, normalized=False) for token, one in zip(tokens, types, strict=True) if one == _USER
    ])  # fmt: skip
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    named = {name: tokens[number] for name, number in ids.items() if number is not None}
    _add_ends(made, file, named, ids, begins)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(made), clean_up_tokenization_spaces=False,
        model_max_length=file.get("context_length"),
        chat_template=file.metadata.get("tokenizer.chat_template"), name_or_path=file.path, **named,
    )  # fmt: skip


class _Uncopied:
    """A tokenizer that `copy.deepcopy` returns as it is: transformers copies by way of JSON, three times the memory."""

    def __init__(self, made: Tokenizer) -> None:
        self._made = made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._made


def _by_merges(file: GgufFile, tokens: Sequence[str], pre: str) -> Tokenizer:
    """Return byte-level BPE (GPT-2's) by the file's merges."""
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", ())]
    model: Any = BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges, ignore_merges=pre in _WHOLE_WORDS)
    made = Tokenizer(model)
    if _PATTERNS[pre] is _QWEN2:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    return made


def _by_scores(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Return SentencePiece's BPE: the pair whose token has the highest score is merged first."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    scores: Sequence[float] = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    parts = {token for token, one in zip(tokens, types, strict=True) if one in (_NORMAL, _USER)}
    ranked = sorted((-scores[vocab[token]], vocab[token]) for token in parts)
    merges = [
        (token[:cut], token[cut:])
        for _, number in ranked
        for token in (tokens[number],)
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    unknown = next((token for token, one in zip(tokens, types, strict=True) if one == _UNKNOWN), None)
    number = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = unknown if number is None else tokens[number]
    made = Tokenizer(BPE(vocab, merges, byte_fallback=True, unk_token=unknown, fuse_unk=True))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", left=1))
    made.normalizer = normalizers.Sequence(spaces)
    made.pre_tokenizer = _words(parts)
    made.decoder = decoders.Sequence(decoding)
    return made


def _words(parts: set[str]) -> Any:
    """Return the splitting of a text in front of spaces, except after characters that a token joins with a space.

    No merge crosses such a place, so it changes no token; words are merged once and cached.
    """
    before = set(re.findall(f"([^{_SPACE}])(?={_SPACE})", "\0".join(parts)))
    inside = f"(?:(?<=[{re.escape(''.join(sorted(before)))}]){_SPACE}+[^{_SPACE}]*)*" if before else ""
    return pre_tokenizers.Split(Regex(f"{_SPACE}+[^{_SPACE}]*{inside}|[^{_SPACE}]+{inside}"), "isolated")


def _add_ends(made: Tokenizer, file: GgufFile, named: dict[str, str], ids: dict[str, Any], begins: bool) -> None:
    """Add the special tokens at both ends of a text, as the file says. begins: whether it says so by silence."""
    added = {
        "bos_token": file.metadata.get("tokenizer.ggml.add_bos_token", begins),
        "eos_token": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    before, after = ([named[name]] if one and name in named else [] for name, one in added.items())
    if before or after:
        single = [*before, "$A", *after]
        made.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{one}:1" for one in (*before, "$B", *after))],
            special_tokens=[(named[name], ids[name]) for name in added if name in named],
        )
