"""What users get wrong: each a specific error that says what was needed, what was given and what to do."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BloomConfig
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.errors import (
    CacheMismatchError,
    ConfigError,
    ContextLengthError,
    InputDataError,
    MemoryPlanError,
    UnsupportedModelError,
)
from tests.small_windows import PRODUCT_SPILL
from tests.tiny_models import VOCABULARY, build_model, config_of, handed_out, random_ids, tiny_model

CONFIG = ra.Config(sink=4, window=16, retrieve=10)


@pytest.fixture
def model() -> Iterator[Any]:
    yield from handed_out(tiny_model("llama"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ra.Config, {"window": -1}, "window must be an integer >= 0, got -1"),
        (ra.Config, {"sink": 1.5}, "sink must be an integer"),
        (ra.Config, {"retrieve": 0}, "retrieve=0 retrieves nothing"),
        (ra.Config, {"retrieve": 1.0}, "retrieve=1.0"),
        (ra.Config, {"retrieve": True}, "retrieve=True"),
        (ra.Config, {"prefill_chunk": 0}, "prefill_chunk must be"),
        (ra.Config, {"host_dtype": "int3"}, "host_dtype must be one of"),
        (ra.Config, {"threads": 0}, "threads must be"),
        (ra.Config, {"question_attention": True}, 'question_attention must be "exact" or "retrieval"'),
        (ra.Config, {"full_attention": True}, "full_attention must be one of auto, always, never, exact; got True"),
        (ra.Config, {"retrieve": 0.5}, "retrieve=0.5"),
        (ra.Config, {"host_dtype": "float16"}, "host_dtype must be one of auto, int8"),
        (ra.Config, {"index": ""}, "index must be the name"),
        (ra.Sampling, {"max_new_tokens": 0}, "max_new_tokens"),
        (ra.Sampling, {"max_new_tokens": 2.0}, "max_new_tokens"),
        (ra.Sampling, {"temperature": -1.0}, "temperature"),
        (ra.Sampling, {"temperature": "1"}, "temperature must be a number"),
        (ra.Sampling, {"temperature": float("nan")}, "temperature"),
        (ra.Sampling, {"temperature": float("inf")}, "temperature"),
        (ra.Sampling, {"top_p": -0.5}, "top_p"),
        (ra.Sampling, {"stop": ("\ud800",)}, "stop must have valid Unicode"),
        (ra.Sampling, {"min_tokens": 129}, "min_tokens must be an integer in"),
        (ra.Sampling, {"ignore_eos": 1}, "ignore_eos must be True or False"),
        (ra.Sampling, {"top_p": "1"}, "top_p"),
        (ra.Sampling, {"top_k": -1}, "top_k"),
        (ra.Sampling, {"top_k": 1.5}, "top_k"),
        (ra.Sampling, {"seed": "a"}, "seed must be an integer of 64 bits"),
        (ra.Sampling, {"seed": 2**70}, "seed"),
        (ra.Sampling, {"seed": True}, "seed"),
        (ra.Sampling, {"stop": "x"}, "tuple of strings"),
        (ra.Sampling, {"stop": ("",)}, "non-empty strings"),
        (ra.Sampling, {"stop": (5,)}, "non-empty strings"),
        (ra.Sampling, {"stop": None}, "non-empty strings"),
    ],
)
def test_values_of_options(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


@pytest.mark.parametrize(("window", "spill"), [(0, 512), (1, 1), (100, 100), (512, 512), (4096, 512)])
def test_blocks_are_as_large_as_the_window_at_most(window: int, spill: int) -> None:
    """Tests replace the property for small windows: this is the one that users have."""
    assert PRODUCT_SPILL.fget(ra.Config(window=window)) == spill


def test_unknown_options_are_refused_everywhere(model: Any) -> None:
    """A typo must never be an ignored option."""
    with pytest.raises(TypeError):
        ra.Config(windw=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Unknown option windw; the options are sink"):
        ra.enable(model, windw=1)
    with pytest.raises(ConfigError, match="Unknown option windw"):
        ra.RetrievalCache(model, windw=1)
    for name in ("auto", "flat", "roargraph"):
        with pytest.raises(ConfigError, match=f"index '{name}' has no option wrong"):
            ra.RetrievalCache(model, CONFIG, index=name, index_options={"wrong": 1})
    with pytest.raises(ConfigError, match="rorgraph"):
        ra.RetrievalCache(model, CONFIG, index="rorgraph")
    assert model.config._attn_implementation == "eager"


def run(model: Any, cache: Any, ids: torch.Tensor | None = None, **options: Any) -> None:
    """One forward with retrieval attention."""
    ra.enable(model, CONFIG)
    try:
        with torch.no_grad():
            model(input_ids=random_ids(1, 60) if ids is None else ids, past_key_values=cache, **options)
    finally:
        ra.disable(model)


def test_a_cache_belongs_to_one_model(model: Any) -> None:
    cache = ra.RetrievalCache(model, CONFIG)
    run(model, cache)
    with pytest.raises(CacheMismatchError, match="filled by another model"):
        run(tiny_model("llama31"), cache)
    with pytest.raises(CacheMismatchError, match="made for a llama model"):
        run(tiny_model("llama"), ra.RetrievalCache(build_model("llama", num_hidden_layers=1), CONFIG))


def test_a_cache_keeps_its_batch(model: Any) -> None:
    cache = ra.RetrievalCache(model, CONFIG)
    run(model, cache)
    with pytest.raises(CacheMismatchError, match="holds 1 sequences, the forward has 2"):
        run(model, cache, random_ids(2, 3))


def test_a_forward_that_failed_leaves_a_cache_that_says_so(model: Any) -> None:
    cache = ra.RetrievalCache(model, CONFIG)
    with pytest.raises(UnsupportedModelError, match="dense mask"):
        run(model, cache, attention_mask=torch.zeros(1, 1, 60, 60))
    with pytest.raises(CacheMismatchError, match="never attended"):
        run(model, cache)


def test_tokens_that_disagree_with_the_cache(model: Any) -> None:
    ids = random_ids(1, 60)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, custom_generate=ra.generate, retrieval=CONFIG, return_dict_in_generate=True, **options
    )
    changed = torch.cat([out.sequences, random_ids(1, 5, seed=3)], dim=1)
    changed[0, 17] = (changed[0, 17] + 1) % VOCABULARY
    with pytest.raises(CacheMismatchError, match="differ from the prompt at token 17"):
        model.generate(
            changed,
            attention_mask=torch.ones_like(changed),
            custom_generate=ra.generate,
            past_key_values=out.past_key_values,
            **options,
        )


def test_a_mask_that_disagrees_with_the_cache(model: Any) -> None:
    cache = ra.RetrievalCache(model, CONFIG)
    run(model, cache)
    wrong = torch.ones(1, 65, dtype=torch.long)
    wrong[0, :5] = 0
    with pytest.raises(CacheMismatchError, match="other padding in the first 60 tokens"):
        run(model, cache, random_ids(1, 5), attention_mask=wrong)
    cache = ra.RetrievalCache(model, CONFIG)
    run(model, cache)
    with pytest.raises(CacheMismatchError, match="attention_mask covers 5 tokens"):
        run(model, cache, random_ids(1, 5), attention_mask=torch.ones(1, 5, dtype=torch.long))


def test_our_cache_needs_our_attention(model: Any) -> None:
    """sdpa or eager with this cache must not give wrong text."""
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.raises(UnsupportedModelError, match='attn_implementation is not "retrieval"'), torch.no_grad():
            model(input_ids=random_ids(1, 60), past_key_values=ra.RetrievalCache(model, CONFIG))


def test_our_attention_needs_our_cache(model: Any) -> None:
    """Another cache that already holds tokens: not a silent fall back to full attention."""
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=random_ids(1, 20), past_key_values=cache)
        model.set_attn_implementation("retrieval")
        with pytest.raises(CacheMismatchError, match="another cache that already holds 20 tokens"):
            model(input_ids=random_ids(1, 5), past_key_values=cache)


def test_more_tokens_than_positions(model: Any) -> None:
    limit = model.config.max_position_embeddings
    with pytest.raises(ContextLengthError, match=f"more than the model's {limit} positions"):
        run(model, ra.RetrievalCache(model, CONFIG), random_ids(1, limit + 1))


def test_models_that_cannot_run_say_why() -> None:
    """Latent attention, bidirectional models, models whose attention is written in, encoder-decoders."""
    bidirectional = AutoModelForCausalLM.from_config(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        ra.enable(bidirectional)
    legacy = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        ra.enable(legacy)
    latent = AutoModelForCausalLM.from_config(
        config_of(
            "deepseek_v3",
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        )
    )
    with pytest.raises(UnsupportedModelError, match="deepseek_v3 is not supported: its cache holds latents"):
        ra.RetrievalCache(latent)
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel is needed"):
        ra.enable(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_an_untested_model_type_is_verified_once() -> None:
    """OLMo-2 is not on the tested list: the first use compares it with eager attention, later ones do not."""
    config = config_of(
        "olmo2",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    ra.RetrievalCache(model)
    assert len(calls) > 0
    first = len(calls)
    ra.RetrievalCache(model)
    assert len(calls) == first
    handle.remove()


def test_beam_search_is_sent_to_plain_generate(model: Any) -> None:
    ids = random_ids(1, 30)
    with pytest.raises(ConfigError, match="num_beams=2 is not supported by this loop"):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=2,
            custom_generate=ra.generate,
            max_new_tokens=2,
            pad_token_id=0,
        )


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    """Nothing of it runs, and the message says that there is no option for it, and what else can be done."""
    tiny_model("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "model_type": "thing", "auto_map": code}))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(InputDataError, match=r"never run here: there is no option.*Context\(model, tokenizer\)"):
        ra.LLM(tmp_path)


def test_llm_arguments(tmp_path: Any) -> None:
    with pytest.raises(InputDataError, match="No model could be loaded from"):
        ra.LLM(tmp_path / "nothing-here")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            ra.LLM(tmp_path, device="cuda")
    with pytest.raises(ConfigError, match="not a torch device"):
        ra.LLM(tmp_path, device="gpu0")
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "tiny")
    with pytest.raises(MemoryPlanError, match="gpu_memory='24GiB' was given"):
        ra.LLM(tmp_path / "tiny", device="cpu", gpu_memory="24GiB")
    with pytest.raises(ContextLengthError, match="beyond the model's 4096 positions"):
        ra.LLM(tmp_path / "tiny", device="cpu", max_context=9999)


def test_threads_that_cannot_be_had(tmp_path: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is loaded or read."""
    with pytest.raises(ConfigError, match="threads=4096 must be None or a whole number from 1 to"):
        ra.LLM(tmp_path, device="cpu", threads=4096)
    with pytest.raises(ConfigError, match="threads=4096"):
        ra.RetrievalCache(model, CONFIG, threads=4096)
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set; unset it"):
        ra.RetrievalCache(model, CONFIG)


@pytest.mark.parametrize("index", ["auto", "flat"])
def test_a_model_that_computes_nan(loaded: tuple[Any, Any], index: str) -> None:
    """One key among 5,600: an error of the model's, with its layer or at its first token, not of an array's shape."""
    model = build_model("llama", max_position_embeddings=8192)

    read = 0

    def spoil(module: Any, given: Any, keys: torch.Tensor) -> torch.Tensor | None:
        nonlocal read
        start, read = read, read + keys.shape[1]
        if not start <= 3000 < read:
            return None
        return keys.index_fill(1, torch.tensor([3000 - start]), torch.nan)

    model.model.layers[0].self_attn.k_proj.register_forward_hook(spoil)
    context = ra.Context(model, loaded[1], CONFIG, index=index)
    with pytest.raises(UnsupportedModelError, match="Layer 0: the model computed keys|next token are NaN"):
        context.read(random_ids(1, 5600)[0].tolist(), progress=False).continue_with([5, 6], max_new_tokens=2)


def test_sampling_is_given_once_and_anywhere(context: ra.Context) -> None:
    """An object or keywords, wherever tokens are generated; both at once is an error, and so is another object."""
    sampling = ra.Sampling(max_new_tokens=3)
    by_keyword = context.ask("Who?", max_new_tokens=3).tokens
    assert context.ask("Who?", sampling).tokens == by_keyword
    assert [answer.tokens for answer in context.ask_many(["Who?"], sampling)] == [by_keyword]
    ids = context.template.question_ids("Who?")
    assert context.continue_with(ids, sampling).tokens == context.continue_with(ids, max_new_tokens=3).tokens
    stream = context.stream("Who?", sampling)
    assert list(stream) and stream.answer is not None and stream.answer.tokens == by_keyword
    assert ra.Sampling(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]  # a list is as good
    for wrong in (lambda: context.ask("Who?", sampling, seed=1), lambda: context.stream("Who?", sampling, seed=1)):
        with pytest.raises(ConfigError, match="A Sampling and the keyword seed were given"):
            wrong()
    with pytest.raises(ConfigError, match="must be a retrieval_attn.Sampling"):
        context.ask("Who?", {"max_new_tokens": 3})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def context(loaded: tuple[Any, Any]) -> ra.Context:
    return ra.Context(*loaded, ra.Config(sink=8, window=64, retrieve=20)).read("The sky is blue. " * 40, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"hello", "got bytes"),
        ([5.7], r"got \[5.7\]"),
        (["5"], "list of integers"),
        ([-5], "-5 to -5"),
        ([10**6], "1000000"),
        (None, "got None"),
        (7, "got 7"),
        ({"role": "user"}, "got dict"),
        ("a \ud800 b", "lone surrogate .* at position 2"),
    ],
)
def test_texts_and_ids_that_are_none(context: ra.Context, loaded: tuple[Any, Any], given: Any, message: str) -> None:
    empty = ra.Context(*loaded)
    with pytest.raises(InputDataError, match=message):
        empty.read(given)
    with pytest.raises(InputDataError, match=message):
        context.extend(given)
    if not isinstance(given, str):
        with pytest.raises(InputDataError, match=message):
            context.continue_with(given)
    assert empty.read([3, torch.tensor(4), np.int32(5)]).num_tokens == 3  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (None, "got None"),
        (5, "got 5"),
        (b"Who?", "got b'Who"),
        ({"role": "user", "content": "Who?"}, "string or a list of chat messages"),
        ("a \udfff", "lone surrogate"),
        ([], "must not be empty"),
        (["Who?"], "Message 0 must be from the user, got 'Who\\?'"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}], "Message 0 must be"),
        ([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}], "last message must be from"),
        ([{"role": "user", "content": "Who?"}, {"role": "user", "content": "I?"}], "Message 1 must be from the assist"),
        ([{"role": "user", "content": None}], "Message 0 must have a string"),
        ([{"role": "user"}], "Message 0 must have"),
    ],
)
def test_questions_that_are_none(context: ra.Context, question: Any, message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        context.ask(question)
    with pytest.raises(InputDataError, match=message):
        context.ask_many([question])
    with pytest.raises(InputDataError, match=message):
        context.stream(question)


def test_messages_are_no_raw_text(context: ra.Context) -> None:
    with pytest.raises(InputDataError, match="raw=True needs the text"):
        context.ask([{"role": "user", "content": "Who?"}], raw=True)


def test_contexts_are_forked_not_copied(context: ra.Context) -> None:
    """A copy would share the keys and change with the original."""
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InputDataError, match=r"context.fork\(\)"):
            copied(context)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing.at.all }}", "does not take these 1 messages .*UndefinedError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("Hello!", "must write out what the user says, exactly once; it turned a message into 'Hello!'"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "exactly once"),
    ],
)
def test_a_chat_template_that_does_not_work(loaded: tuple[Any, Any], template: str, message: str) -> None:
    model, tokenizer = loaded
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = template
    with pytest.raises(InputDataError, match=message):
        ra.Context(model, broken)
