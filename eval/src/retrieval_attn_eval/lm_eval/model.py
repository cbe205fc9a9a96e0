"""The model "retrieval_attn" of lm-evaluation-harness: any of its tasks, answered with retrieval attention.

Import it after installing lm_eval; `retrieval-attn lm-eval` does so and hands everything else to lm_eval's own
command line.  The prompt of a request is read exactly, what follows it attends through retrieval.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from retrieval_attn.errors import ConfigError, ContextLengthError, UnsupportedModelError

__all__ = ["NAME", "RetrievalAttentionLM"]

NAME = "retrieval_attn"
_PIECE = 512  # tokens scored in one forward: logits of a whole long text would not fit
_IGNORED = ("until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "seed")

# Loaded by name: type checkers need not have lm_eval.
_model: Any = importlib.import_module("lm_eval.api.model")
_registry: Any = importlib.import_module("lm_eval.api.registry")
_utils: Any = importlib.import_module("lm_eval.utils")


@dataclass(frozen=True)
class _Asking:
    """The model arguments that are neither the model's nor Config's; see RetrievalAttentionLM."""

    max_length: int | None = None
    max_gen_toks: int = 256
    truncate: str = "never"
    append: str = "retrieval"

    def __post_init__(self) -> None:
        for name, known in (("truncate", ("never", "left")), ("append", ("retrieval", "exact"))):
            if getattr(self, name) not in known:
                raise ConfigError(f'{name}={getattr(self, name)!r} is unknown; choose "{known[0]}" or "{known[1]}"')


_ASKING = tuple(item.name for item in fields(_Asking))


@_registry.register_model(NAME)
class RetrievalAttentionLM(_model.LM):
    """One request at a time; every finished request goes to lm_eval's cache (--use_cache), so a killed run resumes.

    pretrained: model folder or hub id.  device, dtype: as in retrieval_attn.LLM.  max_length: longest prompt plus
    answer, at most the model's positions.  truncate: "never" refuses longer prompts, "left" cuts their beginning.
    append: "retrieval" or "exact", how tokens after the prompt attend to it when they are scored.
    Further keywords are fields of retrieval_attn.Config (retrieve, sink, window, index, ...).
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = "auto",
        dtype: str = "auto",
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        import retrieval_attn as ra
        import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)

        if str(batch_size) not in ("1", "auto", "None"):
            raise ConfigError(f"batch_size={batch_size!r}: requests are answered one by one; leave it out or give 1")
        asking = _Asking(**{name: options.pop(name) for name in _ASKING if name in options})
        config = ra.Config.from_dict({"question_attention": asking.append, "full_attention": "never", **options})
        self._llm = ra.LLM(pretrained, device=device or "auto", dtype=dtype, config=config)
        self._name, self._truncate, self._max_gen_toks = str(pretrained), asking.truncate, int(asking.max_gen_toks)
        self._device = self._llm.device
        self.max_length = min(int(asking.max_length or self._llm.max_context), self._llm.max_context)
        self.tokenizer: Any = self._llm.tokenizer

    # -- what lm_eval asks ------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm_eval's cache of requests."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's template, for lm_eval's record of the run; "" for none."""
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as one text; the last one stays open when it is the beginning of an answer."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self._name} has no chat template; leave --apply_chat_template out")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results beside the model's name."""
        return {
            "retrieval": self._llm.config.to_dict(),
            "dtype": str(self._llm.model.dtype),
            "device": str(self.device),
        }

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of each request's text up to a stop string, the end of sequence or the budget."""
        texts = []
        for request in _bar(requests, disable_tqdm):
            text, given = request.args
            texts.append(self._generate(text, dict(given)))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation and whether greedy decoding would give it.

        Requests about the same context that follow one another (choices) share one reading of it.
        """
        found = []
        bar = _bar(requests, disable_tqdm)
        for context, group in itertools.groupby(bar, key=lambda request: request.args[0]):
            same = list(group)
            pairs = [self._encode_pair(context, request.args[1]) for request in same]
            for request, score in zip(same, self._score_all(pairs), strict=True):
                found.append(score)
                self.cache_hook.add_partial("loglikelihood", request.args, score)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of max_length; tokens beyond the first piece retrieve."""
        found = []
        for request in _bar(requests, disable_tqdm):
            (text,) = request.args
            windows = _utils.get_rolling_token_windows(
                token_list=self._encode(text, specials=False),
                prefix_token=self._prefix,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            total = 0.0
            for before, after in windows:  # `before` ends where `after` begins: they overlap in all but one token
                ids = [*before, after[-1]]
                first = len(ids) - len(after)
                total += self._score(self._new_cache(), ids[:first], ids[first:], read=False)[0]
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    # -- inside -----------------------------------------------------------------------------------

    def _generate(self, text: str, given: dict[str, Any]) -> str:
        unknown = sorted(set(given) - set(_IGNORED))
        if unknown:
            raise ConfigError(f"gen_kwargs {', '.join(unknown)} unknown; known are {', '.join(_IGNORED)}")
        until = given.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        room = int(given.get("max_gen_toks") or given.get("max_new_tokens") or self._max_gen_toks)
        ids = self._fit(self._encode(text, specials=True), room)
        answer = self._llm.read(ids[:-1], progress=False).continue_with(
            ids[-1:], max_new_tokens=room, stop=stops, **_sampling(given)
        )
        return str(answer.text)

    def _encode(self, text: str, *, specials: bool) -> list[int]:
        """Ids of a text; its begin-of-sequence token exactly once, no end-of-sequence token."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        dressed = specials and not (bos and text.startswith(bos))
        ids = [int(i) for i in self.tokenizer(text, add_special_tokens=dressed, verbose=False)["input_ids"]]
        if dressed and len(ids) > 1 and ids[-1] == eos != self.tokenizer.bos_token_id:
            ids.pop()
        return ids

    @property
    def _prefix(self) -> int:
        """Id that stands before a text without context."""
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((i for i in known if i is not None), None)
        if found is None:
            raise ConfigError(f"{self._name} has neither a begin- nor an end-of-sequence token to score a text after")
        return int(found)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of context and continuation, cut from one tokenization; spaces between them go to the continuation."""
        if not context:
            return [self._prefix], self._encode(continuation, specials=False)
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
        before = self._encode(context, specials=True)
        return before, self._encode(context + continuation, specials=True)[len(before) :]

    def _fit(self, ids: list[int], room: int) -> list[int]:
        if len(ids) < 2:
            ids = [self._prefix, *ids]
        over = len(ids) + room - self.max_length
        if over > 0 and self._truncate == "never":
            raise ContextLengthError(
                f"a prompt of {len(ids)} tokens and {room} for the answer need {len(ids) + room} positions, there are"
                f" {self.max_length}; give shorter tasks, a larger max_length or truncate=left"
            )
        return ids[over:] if over > 0 else ids

    def _new_cache(self) -> Any:
        import retrieval_attn as ra

        return ra.RetrievalCache(self._llm.model, self._llm.config, check=False)

    def _score_all(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """Scores of continuations, the context read once where the continuations' tokens leave it the same."""
        read: list[int] | None = None
        cache: Any = None
        for at, (before, after) in enumerate(pairs):
            fitted = self._fit([*before, *after], 0)
            before = fitted[: len(fitted) - len(after)]
            if before != read:
                cache, read = self._new_cache(), before
                self._forward(cache, before[:-1])
            own = cache
            if at + 1 < len(pairs):
                try:
                    own = cache.fork()
                except UnsupportedModelError:  # a recurrent state: this continuation takes the reading with it
                    read = None
            yield self._score(own, before, after, read=True)

    def _score(self, cache: Any, before: Sequence[int], after: Sequence[int], *, read: bool) -> tuple[float, bool]:
        """Log-probability of `after` and whether it is greedy.  read: the cache holds all of `before` but its end."""
        import torch

        fed = [*(before[-1:] if read else before), *after][:-1]
        skip = len(fed) - len(after)
        total, greedy = 0.0, True
        for start in range(0, len(fed), _PIECE):
            logits = self._forward(cache, fed[start : start + _PIECE])
            targets = [after[i - skip] for i in range(start, start + len(logits)) if i >= skip]
            if not targets:
                continue
            rows = logits[-len(targets) :].float()
            wanted = torch.tensor(targets, device=rows.device)
            total += float(torch.log_softmax(rows, dim=-1).gather(1, wanted[:, None]).sum())
            greedy = greedy and bool((rows.argmax(dim=-1) == wanted).all())
        return total, greedy

    def _forward(self, cache: Any, ids: Sequence[int]) -> Any:
        """Logits (tokens, vocabulary) of ids appended to the cache; of the last one only where all is prefill."""
        import torch

        if not ids:
            return torch.zeros(0, 0)
        model = self._llm.model
        start = cache.get_seq_length()
        place = torch.arange(start, start + len(ids), device=model.device)[None]
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([list(ids)], device=model.device),
                position_ids=place,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if len(ids) > _PIECE else 0,
            )
        return out.logits[0]


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """lm_eval's sampling arguments as ours; greedy unless it samples."""
    temperature = float(given.get("temperature") or 0.0)
    if not given.get("do_sample", temperature > 0):
        return {}
    options = {"temperature": temperature or 1.0, "top_p": given.get("top_p"), "top_k": given.get("top_k")}
    return {k: v for k, v in {**options, "seed": given.get("seed")}.items() if v is not None}


def _bar(requests: Sequence[Any], disable: bool) -> Any:
    from retrieval_attn.testing import ProgressBar

    return ProgressBar(iterable=requests, desc="Running retrieval_attn", disable=disable or not requests)
