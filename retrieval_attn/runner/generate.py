"""`model.generate(ids, custom_generate=retrieval_attn.generate)`: transformers prepares, our loop decodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from retrieval_attn.attention.cache import RetrievalCache, is_empty, require_same_weights
from retrieval_attn.config import Config, resolve
from retrieval_attn.errors import CacheMismatchError, ConfigError
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import Generated, PromptState, TokenChoice, forward, positions, run
from retrieval_attn.runner.switch import enabled_config

# What processors return for images, videos and sounds: pixel_values, image_grid_thw, image_sizes, ...
_IMAGES = ("pixel_", "image_", "video_", "input_features", "audio_")


class ProcessedTokens:
    """Choose tokens as transformers' generate does, by its processors and `torch.multinomial`. See `ChooseTokens`.

    scores, logits: of each token, after and before the processors, if they are kept.
    """

    def __init__(
        self, processors: LogitsProcessorList, *, do_sample: bool, keep_scores: bool = False, keep_logits: bool = False
    ) -> None:
        """do_sample: draw instead of taking the likeliest token."""
        self._processors, self._do_sample = processors, do_sample
        self._keep_scores, self._keep_logits = keep_scores, keep_logits
        self._copies = bool(processors) or keep_scores or keep_logits
        self.scores, self.logits = list[Tensor](), list[Tensor]()

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token of the logits is chosen, and nothing is kept."""
        return not (self._copies or self._do_sample)

    def __call__(self, sequences: Tensor, logits: Tensor, position: Tensor) -> Tensor:
        """Return the next tokens. Processors get a copy of the logits: they may return it, or write to it."""
        own = logits.clone() if self._copies else logits
        scores: Tensor = self._processors(sequences, own)  # type: ignore[arg-type]  # declared LongTensor, FloatTensor
        if self._keep_scores:
            self.scores.append(scores)
        if self._keep_logits:
            self.logits.append(logits.clone() if self._processors else own)
        if not self._do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(torch.softmax(scores, dim=-1), 1).squeeze(1)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    retrieval: Config | dict[str, Any] | None = None,
    on_token: Callable[[list[int]], None] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop for `custom_generate=`. Greedy and sampling, with all of transformers' processors and criteria.

    retrieval: options for the cache made here; not together with a RetrievalCache in past_key_values.
    on_token: called with the new token id of every row (transformers 5.17 does not hand `streamer` to custom
    loops, so this is the streaming hook). Several samples (num_return_sequences) share one prefill.
    Raises ConfigError for beam search: use plain model.generate with past_key_values=RetrievalCache(model); and for
    output_attentions and output_hidden_states, which this loop does not collect, and for images.
    """
    if generation_config.num_beams != 1:
        raise ConfigError(
            f"num_beams={generation_config.num_beams} is not supported by this loop; call model.generate without "
            "custom_generate and with past_key_values=retrieval_attn.RetrievalCache(model)."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise ConfigError(f"{name}=True was asked for, but this loop does not collect it; leave it out.")
    images = [name for name, given in model_kwargs.items() if name.startswith(_IMAGES) and given is not None]
    if images:
        raise ConfigError(
            f"{', '.join(images)} were given, but this loop reads text; call model.generate without custom_generate "
            "and with past_key_values=retrieval_attn.RetrievalCache(model), which reads images as the model does."
        )
    cache = _cache(model, model_kwargs.get("past_key_values"), retrieval)
    samples = generation_config.num_return_sequences or 1
    mask = model_kwargs.get("attention_mask")
    embeds = model_kwargs.get("inputs_embeds")
    fresh = cache.get_seq_length() == 0
    step = samples if fresh else 1  # transformers repeated each prompt `samples` times; read it once
    prompt = input_ids[::step]
    started = time.perf_counter()
    with using_retrieval(model, cache.config.prefill_chunk):
        logits, mask, last = _prefill(
            model, cache, prompt, None if mask is None else mask[::step], None if embeds is None else embeds[::step]
        )
        if step > 1:
            cache.batch_repeat_interleave(step)
            logits, last = logits.repeat_interleave(step, dim=0), last.repeat_interleave(step)
            mask = None if mask is None else mask.repeat_interleave(step, dim=0)
        prefill_seconds = time.perf_counter() - started
        pad = generation_config._pad_token_tensor
        returned = bool(generation_config.return_dict_in_generate)
        choose = ProcessedTokens(
            logits_processor,
            do_sample=bool(generation_config.do_sample),
            keep_scores=returned and bool(generation_config.output_scores),
            keep_logits=returned and bool(generation_config.output_logits),
        )
        choice = TokenChoice(
            stopping_criteria, None if choose.is_plain else choose, pad_id=0 if pad is None else int(pad)
        )
        result = run(model, cache, PromptState(input_ids, logits, last, mask), choice, on_token=on_token)
    result.prefill_seconds = prefill_seconds
    if embeds is None:
        cache.batch.note_ids(result.sequences)
    return _output(result, choose, cache, generation_config)


def _cache(model: PreTrainedModel, given: Any, retrieval: Config | dict[str, Any] | None) -> RetrievalCache:
    if isinstance(given, RetrievalCache):
        if retrieval is not None and resolve(retrieval, {}) != given.config:
            raise ConfigError("Options were given twice and differ: in retrieval= and in past_key_values; drop one.")
        return given
    if not is_empty(given):
        raise CacheMismatchError(
            f"past_key_values is a {type(given).__name__} that already holds tokens; pass a RetrievalCache, or none."
        )
    return RetrievalCache(model, resolve(retrieval if retrieval is not None else enabled_config(model), {}))


def _prefill(
    model: PreTrainedModel, cache: RetrievalCache, prompt: Tensor, mask: Tensor | None, embeds: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Read what the cache has not seen. Returns logits, the mask (None without padding), last positions."""
    source = prompt if embeds is None else embeds
    past = cache.get_seq_length()
    if mask is not None and bool(mask.bool().all()):
        columns = mask.shape[1]
        mask = None
    else:
        columns = source.shape[1] if mask is None else mask.shape[1]
    if embeds is None:
        new_ids = new_tokens(cache, prompt, columns)
        past = cache.get_seq_length()
        count = new_ids.shape[1]
    else:
        new_ids, count = None, source.shape[1] - past
        embeds = embeds[:, past:]
    cache.require_room(count)
    require_same_weights(cache)
    valid = torch.ones(source.shape[0], past + count, dtype=torch.bool, device=source.device)
    if mask is not None:
        valid = mask.bool()
    place = positions(valid)
    logits = forward(
        model, cache, new_ids, mask=None if mask is None else valid, position_ids=place[:, past:], inputs_embeds=embeds
    )
    return logits, None if mask is None else valid, place[:, -1]


def new_tokens(cache: RetrievalCache, prompt: Tensor, columns: int) -> Tensor:
    """The part of `prompt` (batch, tokens) that `cache` has not seen; at least its last token.

    columns: length of the attention mask; a prompt shorter than it holds only new tokens. A cache that holds
    the whole prompt and more is cropped to all but the prompt's last token, whose logits are needed.
    Raises CacheMismatchError when the cache holds other tokens than the prompt begins with.
    """
    past = cache.get_seq_length()
    if past == 0 or prompt.shape[1] < columns:
        return prompt
    first = cache.batch.first_difference(prompt)
    if first is not None:
        raise CacheMismatchError(
            f"The cache was filled with other tokens: they differ from the prompt at token {first} of {past} cached "
            "ones. Pass the same conversation with new tokens at its end, or a fresh RetrievalCache."
        )
    if past < prompt.shape[1]:
        return prompt[:, past:]
    if cache.batch.known_columns() < past:
        raise CacheMismatchError(
            f"The cache holds {past} tokens and the prompt only {prompt.shape[1]}: nothing is left to compute the next "
            "token from. Call cache.crop(-n) so that at least the prompt's last token is not cached."
        )
    cache.crop(prompt.shape[1] - 1 - past)
    return prompt[:, -1:]


def _output(
    result: Generated, choose: ProcessedTokens, cache: RetrievalCache, generation_config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    if not generation_config.return_dict_in_generate:
        return result.sequences
    fields: dict[str, Any] = {
        "sequences": result.sequences,
        "scores": tuple(choose.scores) or None,
        "logits": tuple(choose.logits) or None,
        "past_key_values": cache,
    }
    return GenerateDecoderOnlyOutput(**fields)
