"""LLM: load a model once and use it from a script, within a stated amount of GPU memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.answer import Answer
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import Config, Quantization, resolve
from retrieval_attn.context import Context
from retrieval_attn.errors import ContextLengthError, InputDataError, MemoryPlanError, UnsupportedModelError
from retrieval_attn.gpu.memory import cap, device_memory
from retrieval_attn.index.threads import check_threads, say_if_threads_spin
from retrieval_attn.memory.arithmetic import HOST_RESERVE
from retrieval_attn.memory.device import DEVICE_RESERVE
from retrieval_attn.memory.device_room import free_device_bytes
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.plan import DEFAULT_CONTEXT, Plan, WeightOptions, plan, plan_fitting
from retrieval_attn.memory.shape import embedding_place, model_shape
from retrieval_attn.memory.units import parse_bytes, show_bytes, show_tokens
from retrieval_attn.model.bundled import model_path
from retrieval_attn.model.gguf.checkpoint import settled
from retrieval_attn.model.grouped_loading import kernel_format
from retrieval_attn.model.loading import (
    checkpoint_config,
    choose_device,
    launched_processes,
    load,
    load_model,
    loaded_dtype,
)
from retrieval_attn.model.placement import cuda_devices, input_device, offloads
from retrieval_attn.model.quantization import chosen_dtype
from retrieval_attn.model.rope import ContextLimit, length_rope, limit_context, max_positions
from retrieval_attn.offload.managed import move_table
from retrieval_attn.runner.exact_steps import attends_to_all
from retrieval_attn.runner.ready import compiling_early
from retrieval_attn.runner.switch import enable
from retrieval_attn.sampling.sampling_params import Sampling
from retrieval_attn.store import ContextStore
from retrieval_attn.template import prompt_ids

log = logging.getLogger(__name__)
MORE_MEMORY = 'give more memory, store keys with host_dtype="int8", or load 4-bit weights with quantization="int4"'
"""How more of a model's positions fit."""


class LLM:
    """A causal language model that runs retrieval attention. `model` and `tokenizer` are transformers' own."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: Config

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: Quantization | None = None,
        gpu_memory: str | int | None = None,
        max_context: int | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        config: Config | None = None,
        **overrides: Any,
    ) -> None:
        """Load `name_or_path`: a folder, a GGUF file, a hub name, or "bundled", the small test model of this package.

        device: "auto" is CUDA when there is one, else the CPU. dtype: "auto" is the checkpoint's own on a GPU
        and float32 on the CPU, where 16-bit arithmetic is slower. quantization: of the linear layers' weights when they
        are loaded: "int8" or "int4" (torchao), which quantizes experts too; None: as the checkpoint has
        them, which may be quantised by any method that transformers loads. gpu_memory: a hard cap, e.g. "24GiB", CUDA
        context included; what the plan for `max_context` tokens needs beyond it, or beyond what is free on the device,
        is refused before anything is loaded. max_context: None: the model's positions, or as many as fit the memory of
        GPU and host, which a log line says; longer texts are then refused. With tensor_parallel and weights that a
        device_map offloads: the model's positions.
        device_map: layers on several GPUs, as transformers takes it ("auto"). tensor_parallel: heads shared by the
        processes of a torchrun, one GPU each. With either, gpu_memory holds for each GPU; weights that a device_map
        keeps on "cpu" or "disk" are not planned for. yarn: factor of the checkpoint's positions by YaRN,
        for longer texts (Qwen3-8B has 40,960). embedding: where the input embedding lies, "device" or "host", of which
        a token reads one row; "auto" is the host where weights take more than half of one GPU's memory, unless the
        output has the same table. Further keywords (threads, window, ...) are fields of Config.
        Raises InputDataError (no such model), MemoryPlanError, UnsupportedModelError, ConfigError.
        """
        began = time.perf_counter()
        tensor_parallel, yarn = bool(overrides.pop("tensor_parallel", False)), overrides.pop("yarn", None)
        alone = device_map is None and not tensor_parallel
        place = embedding_place(overrides.pop("embedding", "auto"), alone=alone)
        self.config, name_or_path = resolve(config, overrides), model_path(name_or_path)
        check_threads(self.config.threads)
        self.device = choose_device(device)
        if self.device.type == "cpu":
            say_if_threads_spin()
        if tensor_parallel and self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        model_config = settled(checkpoint_config(name_or_path, yarn), self.device, dtype, quantization, alone=alone)
        text = model_config.get_text_config(decoder=True)
        limit = max_positions(text)
        if max_context is not None and limit is not None and max_context > limit:
            raise ContextLengthError(
                f"max_context={max_context} is beyond the model's {limit} positions; lower it, or stretch them by yarn."
            )
        known = limit or getattr(text, "max_position_embeddings", None)
        self.max_context: int = max_context or known or DEFAULT_CONTEXT
        kind = chosen_dtype(kernel_format(model_config, quantization), dtype, self.device)
        weights: WeightOptions = {"dtype": kind, "quantization": quantization, "embedding": place}
        chosen = max_context is None
        needed = self._require_memory(model_config, gpu_memory, weights, device_map, tensor_parallel, chosen=chosen)
        reason = ""
        if chosen and needed is None and self.device.type == "cpu" and alone:
            reason = self._fit_host(model_config, weights)
        elif needed is not None and needed.context < self.max_context:
            reason, self.max_context = needed.context_reason(self.max_context), needed.context
        if reason:
            log.warning("max_context %s: %s.", show_tokens(self.max_context), reason)
        planned = time.perf_counter()
        with compiling_early(self.config, loaded_dtype(model_config, weights["dtype"], self.device), self.device, text):
            self.tokenizer = load(AutoTokenizer, name_or_path)
            self.model = self._loaded(
                name_or_path,
                device=device,
                dtype=dtype,
                device_map=device_map,
                tensor_parallel=tensor_parallel,
                quantization=quantization,
                yarn=yarn,
                host_experts=0 if needed is None or needed.shape.routed is None else needed.shape.routed.on_host,
            )
            loaded = time.perf_counter()
        log.info(
            "model loaded in %.1f s: config and memory plan %.1f, weights and tokenizer %.1f, then kernels %.1f",
            time.perf_counter() - began, planned - began, loaded - planned, time.perf_counter() - loaded,
        )  # fmt: skip
        self.device = input_device(self.model)
        if needed is not None and needed.shape.host_table_bytes:
            move_table(self.model)
        if reason:
            limit_context(self.model, ContextLimit(self.max_context, reason, MORE_MEMORY))
        enable(self.model, self.config)

    def __repr__(self) -> str:
        """Return the model's name, its device and the tokens that memory was planned for."""
        return f"<LLM {self.model.config.name_or_path!r} on {self.device}, up to {self.max_context:,} tokens>"

    def _require_memory(
        self,
        model_config: Any,
        gpu_memory: str | int | None,
        weights: WeightOptions,
        device_map: str | Mapping[str, Any] | None,
        tensor_parallel: bool,
        *,
        chosen: bool,
    ) -> Plan | None:
        """The plan by which the model may be loaded; None: nothing is planned.

        chosen: the plan may be for fewer tokens than `max_context`.
        """
        needed = None
        if self.device.type != "cuda":
            if gpu_memory is not None:
                raise MemoryPlanError(
                    f"gpu_memory={gpu_memory!r} was given, but the model would run on {self.device}; drop it, or use "
                    'device="cuda" on a machine with a GPU.'
                )
            return None
        asked = None if gpu_memory is None else parse_bytes(gpu_memory, "gpu_memory")
        used = [self.device] if device_map is None else cuda_devices(device_map)
        memories = {place: device_memory(place) for place in used}
        if used and not offloads(device_map):
            place, memory = min(memories.items(), key=lambda item: item[1].available)
            sizes: dict[str, Any] = {
                "gpu_memory": memory.available if asked is None else min(asked, memory.available),
                "config": self.config,
                "gpus": (launched_processes(), "heads") if tensor_parallel else len(used),
                **weights,
            }
            if chosen and not tensor_parallel:  # each process would choose by what is free when it asks
                needed = plan_fitting(model_config, self.max_context, host_memory=available_host_bytes(), **sizes)
            else:
                needed = plan(model_config, context=self.max_context, **sizes)
            if not needed.fits and asked is not None and memory.available < asked:
                raise MemoryPlanError(
                    f"gpu_memory={gpu_memory!r} was given, but this process can have {show_bytes(memory.available)} of "
                    f"the {show_bytes(memory.total)} of {place}: {'; '.join(needed.reasons)}\n{needed}"
                )
            needed.require()
        for place in used:
            cap(place, asked)
        return needed

    def _fit_host(self, model_config: Any, weights: WeightOptions) -> str:
        """Lower `max_context` to the tokens that fit host memory with the weights; return the reason, "" if all fit."""
        kind = loaded_dtype(model_config, weights["dtype"], self.device)
        options: WeightOptions = {**weights, "dtype": kind, "embedding": "device"}
        free = available_host_bytes()
        try:
            shape = model_shape(model_config, kind, weights["quantization"])
            left = max(1, free - shape.weight_bytes + HOST_RESERVE)  # this process has most of the reserve already
            needed = plan_fitting(
                model_config, self.max_context, gpu_memory=1 << 60, host_memory=left, config=self.config,
                decide=False, **options,
            )  # fmt: skip
        except UnsupportedModelError as error:
            log.warning("memory of the host is not planned: %s", error)
            return ""
        if not needed.fits:
            log.warning(
                "the weights need %s of host memory and %s is free: max_context stays at the model's %s tokens.",
                show_bytes(shape.weight_bytes), show_bytes(free), show_tokens(self.max_context),
            )  # fmt: skip
            return ""
        if needed.context == self.max_context:
            return ""
        positions, self.max_context = self.max_context, needed.context
        given = f"{show_bytes(free)} host memory with the weights"
        return f"of the model's {show_tokens(positions)} positions, that is what fits in {given}"

    def _loaded(self, name_or_path: str | Path, **options: Any) -> PreTrainedModel:
        try:
            model: PreTrainedModel = load_model(name_or_path, **options)
        except torch.OutOfMemoryError as error:
            raise MemoryPlanError(
                f"The weights of {str(name_or_path)!r} did not fit the memory that the plan gave them on {self.device} "
                f"({error}). Raise gpu_memory, end other processes there, or quantise the weights."
            ) from error
        return model

    def read(
        self,
        text: str | Sequence[int],
        *,
        images: Sequence[bytes | str | Path] = (),
        progress: bool = True,
        save: str | None = None,
        store: ContextStore | str | Path | None = None,
        wait: bool = True,
    ) -> Context:
        """Read and index a long text; ask the returned context questions. All else: see `Context.read`."""
        context = Context(self.model, self.tokenizer, self.config)
        return context.read(text, images=images, progress=progress, save=save, store=store, wait=wait)

    def open(
        self, name: str, *, store: ContextStore | str | Path | None = None, progress: bool = True, **overrides: Any
    ) -> Context:
        """A context that was saved under `name`, ready to be asked; its files are mapped, nothing is computed again.

        store: as in `Context.save`. overrides: `retrieve`, and options that say how this machine works (threads, graph,
        prefill_chunk, question_attention, full_attention); all others are those of the read.
        Checksums of indexes and windows are compared before the first answer, those of keys and values in a thread:
        answers after a difference was found raise StoreDamagedError.
        Raises UnknownContextError, StoreMismatchError (another model, weights, positions, tokenizer, format),
        StoreDamagedError, ConfigError.
        """
        context = Context(self.model, self.tokenizer, self.config)
        return context.open(name, store=store, progress=progress, **overrides)

    def generate(
        self, prompts: str | Sequence[str], sampling: Sampling | None = None, *, progress: bool = True, **options: Any
    ) -> list[Answer]:
        """Continue each prompt; the prompt is taken as it is (apply a chat template yourself).

        Words of special tokens in a prompt become control tokens, as rendered chat templates need. `read` and `ask`
        encode such words as text.
        It begins with the special tokens that the tokenizer adds at a start, and a begin-of-sequence token that it has
        already, as chat templates write one, is not doubled.
        The prompt is read exactly; generated tokens retrieve. One answer per prompt, in order. Short prompts of like
        length are read and continued together, as many as `prefill_chunk` tokens. sampling: a Sampling, or its fields
        as keywords; with a seed, equal prompts get equal answers.
        Raises InputDataError, ConfigError, ContextLengthError, MemoryPlanError.
        """
        chosen = Sampling.of(sampling, options)
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not texts or not all(texts):
            raise InputDataError("generate needs non-empty prompts.")
        rows = [prompt_ids(self.tokenizer, text) for text in texts]
        answers: dict[int, Answer] = {}
        for group in self._groups([len(ids) for ids in rows], chosen.max_new_tokens):
            found = self._continue([rows[number] for number in group], chosen, progress)
            answers |= dict(zip(group, found, strict=True))
        return [answers[number] for number in range(len(rows))]

    def _continue(self, rows: list[list[int]], sampling: Sampling, progress: bool) -> list[Answer]:
        """Read all but the last token of each row; that one is the "question", whose logits are sampled first."""
        if len(rows) == 1 and len(rows[0]) > 1:
            return [self.read(rows[0][:-1], progress=progress).continue_with(rows[0][-1:], sampling)]
        loop, cache = AnswerLoop(self.model, self.tokenizer), RetrievalCache(self.model, self.config)
        batch = loop.batch(rows)
        columns = batch.ids.shape[1]
        total = columns + sampling.max_new_tokens
        cache.require_room(total)
        cache.batch.attends_to_all = attends_to_all(cache, sampling.full_attention, total)
        if columns > 1:
            loop.read_whole(cache, batch.first(columns - 1), progress)
        return loop.answer(cache, batch, sampling)

    def _groups(self, lengths: list[int], new_tokens: int = 0) -> list[list[int]]:
        """Numbers of the prompts that go together: no more tokens, or windows, than one chunk of a long prompt has.

        Padding is at most half of what is read. A text that may pass a switch of the model's rotary factors, with
        `new_tokens` more, goes alone: rows of one batch share factors.
        """
        rope = length_rope(self.model)
        config = self.config
        free = free_device_bytes(self.model)
        groups: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lengths.__getitem__):
            group = [*groups[-1], number] if groups else [number]
            longest, real = lengths[number], sum(lengths[one] for one in group)
            kept = max(longest, config.sink + config.window + config.spill)
            alone = rope is not None and rope.may_change(longest + new_tokens)
            small = not alone and len(group) * kept <= config.prefill_chunk and len(group) * longest <= 2 * real
            if len(group) > 1 and small and _fits(self.model, config, longest, len(group), free):
                groups[-1] = group
            else:
                groups.append([number])
        return groups


def _fits(model: PreTrainedModel, config: Config, tokens: int, batch: int, free: int | None) -> bool:
    """Whether the device has room for `batch` sequences next to the weights; True if its memory is unknown."""
    if free is None:
        return True
    needs = plan(model, context=tokens, batch=batch, host_memory=1, config=config, decide=False)
    return needs.device_bytes - needs.shape.weight_bytes - DEVICE_RESERVE <= free
