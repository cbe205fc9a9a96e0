"""A `PeftModel` of the real library: its LoRA acts with retrieval, in a captured step too; other kinds are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from tests.model.test_models import ALL, PROMPT, STEPS, TOLERANCE, decode_pieces, eager_steps, steps, worst
from tests.runner.graph_cases import CONFIG, greedily
from tests.tiny_models import random_ids, tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}


@pytest.fixture
def adapted() -> Iterator[Any]:
    """A PeftModel with two LoRA adapters whose weights matter; "default" is active."""
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    yield model.eval()


def test_an_adapter_acts_as_with_eager_attention(adapted: Any) -> None:
    """Logits equal eager attention with the adapter, and differ from the model without it."""
    ids = random_ids(1, PROMPT + STEPS)
    pieces = decode_pieces(ids, PROMPT)
    expected = eager_steps(adapted, pieces)
    with adapted.disable_adapter():
        without = eager_steps(adapted.get_base_model(), pieces)
    assert ra.enable(adapted, ALL) is adapted
    assert ra.verify(adapted).ok
    got = steps(adapted, ra.RetrievalCache(adapted, ALL), pieces)
    assert worst(got, expected) <= TOLERANCE
    assert worst(got, without) > 0.01
    assert ra.plan(adapted, context=1000).shape.kv_heads == 2
    assert ra.disable(adapted) is adapted
    assert adapted.config._attn_implementation == "eager"


def test_generate_and_prefill_by_layer_take_a_peft_model(adapted: Any) -> None:
    """peft's generate, transformers' loop and ours: the same tokens as eager attention gave."""
    ids = random_ids(1, 60, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = adapted.generate(input_ids=ids, **options)
    ra.enable(adapted, ALL)
    assert torch.equal(adapted.generate(input_ids=ids, **options), expected)
    assert torch.equal(adapted.generate(input_ids=ids, custom_generate=ra.generate, **options), expected)
    same: Any
    with ra.prefill_by_layer(adapted, 16) as same:
        assert same is adapted
        assert torch.equal(adapted.generate(input_ids=ids, **options), expected)


def check_captured_steps(adapted: Any, device: str) -> None:
    """Switched, disabled and merged adapters: a graph captured with another one must not be replayed."""
    ids = random_ids(1, 60, seed=4).to(device)
    ra.enable(adapted.to(device), CONFIG)
    base = adapted.get_base_model()

    def both() -> torch.Tensor:
        replayed, eager = greedily(base, ids, True), greedily(base, ids, False)
        assert torch.equal(replayed, eager)
        return replayed

    first = both()
    adapted.set_adapter("other")
    second = both()
    with adapted.disable_adapter():
        third = both()
    adapted.merge_adapter(["other"])
    assert torch.equal(both(), second)
    assert len({tuple(found[0].tolist()) for found in (first, second, third)}) == 3
    adapted.unmerge_adapter()
    base = adapted.merge_and_unload(adapter_names=["other"])
    assert torch.equal(both(), second)  # plain modules again: on a GPU their layers run in few kernels


@pytest.mark.usefixtures("emulated_graphs")
def test_a_captured_step_follows_the_active_adapter(adapted: Any) -> None:
    check_captured_steps(adapted, "cpu")


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_decoders")
def test_a_captured_step_follows_the_active_adapter_on_a_gpu(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check_captured_steps(adapted, "cuda")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PROMPT_TUNING"),
        pytest.param(lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PREFIX_TUNING"),
        pytest.param(
            lambda: peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6], **LORA), "activated LORA"
        ),
    ],
    ids=["prompt tuning", "prefix tuning", "activated LoRA"],
)
def test_adapters_outside_the_layers_are_refused_by_name(config: Any, reason: str) -> None:
    """Unwrapping would lose them without a word."""
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config())
    for use in (ra.enable, ra.RetrievalCache, ra.verify):
        with pytest.raises(ra.UnsupportedModelError, match=reason):
            use(model)


def test_an_adapter_given_to_a_context_by_its_peft_model(needle_model_path: Any) -> None:
    """`Context(PeftModel, tokenizer)` answers with the adapter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA)).eval()
    context = ra.Context(wrapped, tokenizer, retrieve="all", threads=1).read("A line of text. " * 30, progress=False)
    answer = context.ask("What is this?", max_new_tokens=6)
    asked = context.template.question_ids("What is this?", False)
    ids = torch.tensor([[*context.cache.batch.sequences[0].token_ids, *asked]])
    expected = wrapped.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    with wrapped.disable_adapter():
        without = wrapped.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answer.tokens == expected[: len(answer.tokens)] != without[: len(answer.tokens)]
