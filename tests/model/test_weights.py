"""Whose weights made these keys: adapters that are switched, and weights written in place, never meet earlier keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.store import ContextStore
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.audit import check_engine
from tests.tiny_models import VOCABULARY, random_ids, tiny_model

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.usefixtures("compiled", "one_thread")

CONFIG = ra.Config(sink=4, window=16, retrieve="all", prefill_chunk=64, threads=1)
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
TEXT = tuple(random_ids(1, 120, seed=3)[0].tolist())
QUESTION = (5, 6, 7)


@pytest.fixture
def adapted() -> Iterator[Any]:
    """A PeftModel with two LoRA adapters; "default" acts."""
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    yield model.eval()


def llm_of(model: Any) -> Any:
    return SimpleNamespace(model=model, tokenizer=number_tokenizer(VOCABULARY), config=CONFIG)


def context_of(model: Any) -> ra.Context:
    return ra.Context(model, number_tokenizer(VOCABULARY), CONFIG).read(TEXT, progress=False)


def asked(engine: Engine, **options: Any) -> Finished:
    return engine.submit(Request((TEXT, QUESTION), 8, stop_ids=frozenset(), **options)).result()


def first_matrix(model: Any) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.get_base_model().model.layers[0].self_attn.k_proj.base_layer.weight
    return found


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 3


@torch.no_grad()
def write(model: Any) -> None:
    first_matrix(model).mul_(1.5)


@torch.no_grad()
def write_adapter(model: Any) -> None:
    next(weight for name, weight in model.named_parameters() if "lora_B.default" in name).add_(0.1)


@torch.no_grad()
def load(model: Any) -> None:
    model.load_state_dict({name: one.clone() * 1.01 for name, one in model.state_dict().items()})


def replace(model: Any) -> None:
    first_matrix(model).data = first_matrix(model).data * 1.5


CHANGES: list[Callable[[Any], None]] = [
    lambda model: model.set_adapter("other"),
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.merge_adapter(),
    scale,
    write,
    write_adapter,
    load,
    replace,
]
NAMES = ["switched", "disabled", "merged", "scaled", "written", "adapter written", "loaded", "replaced"]


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_context_is_refused_after_a_change(adapted: Any, change: Callable[[Any], None], tmp_path: Path) -> None:
    """ask, extend, fork, save, stream and generate on its cache: by name, with what changed."""
    context = context_of(adapted)
    cache = context.fork().cache
    change(adapted)
    uses: list[Callable[[], object]] = [
        lambda: context.continue_with(QUESTION, max_new_tokens=4),
        lambda: context.ask_many(["5 6", "7"], max_new_tokens=4),
        lambda: context.stream("5 6", max_new_tokens=4),
        lambda: context.extend([5, 6]),
        context.fork,
        lambda: context.save("it", store=tmp_path),
        lambda: adapted.generate(
            input_ids=torch.tensor([[*TEXT, *QUESTION]]),
            custom_generate=ra.generate,
            past_key_values=cache,
            max_new_tokens=4,
        ),
    ]
    for use in uses:
        with pytest.raises(ra.CacheMismatchError, match=r"(adapters that act|weights) changed .*read the text again"):
            use()


def test_a_context_goes_on_when_its_adapter_acts_again(adapted: Any) -> None:
    """Adapters that only were loaded do not count."""
    context = context_of(adapted)
    before = context.continue_with(QUESTION, max_new_tokens=6).tokens
    adapted.set_adapter("other")
    with pytest.raises(ra.CacheMismatchError, match="from 'default' to 'other'"):
        context.continue_with(QUESTION, max_new_tokens=6)
    other = context_of(adapted).continue_with(QUESTION, max_new_tokens=6).tokens
    adapted.set_adapter("default")
    adapted.add_adapter("third", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    assert context.continue_with(QUESTION, max_new_tokens=6).tokens == before != other


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_an_engine_reuses_keys_of_the_same_weights_alone(adapted: Any, change: Callable[[Any], None]) -> None:
    with Engine(llm_of(adapted)) as engine:
        first = asked(engine)
        assert asked(engine).cached_tokens == len(TEXT)
        change(adapted)
        second, again = asked(engine), asked(engine)
        check_engine(engine)
    with Engine(llm_of(adapted), prefix_cache_bytes=0) as fresh:
        expected = asked(fresh)
    assert second.error is None and second.cached_tokens == 0 and again.cached_tokens == len(TEXT)
    assert second.tokens == again.tokens == expected.tokens
    assert first.error is None


def test_an_engine_finds_keys_again_when_their_adapter_acts_again(adapted: Any) -> None:
    with Engine(llm_of(adapted)) as engine:
        found = []
        for name in ("default", "other", "default"):
            adapted.set_adapter(name)
            found.append(asked(engine))
    assert [one.cached_tokens for one in found] == [0, 0, len(TEXT)]
    assert found[0].tokens == found[2].tokens != found[1].tokens


def test_a_request_under_way_ends_with_an_error(adapted: Any) -> None:
    """Its first tokens are of other weights than its last; nothing of it stays in the prefix cache."""
    with Engine(llm_of(adapted), cache_generated=True) as engine:
        ticket = engine.submit(Request((TEXT, QUESTION), 300, stop_ids=frozenset()))
        events = iter(ticket)
        next(events)
        adapted.set_adapter("other")
        found = ticket.result()
        assert found.reason == "error" and isinstance(found.error, ra.CacheMismatchError)
        assert "submit" in str(found.error) and "'other'" in str(found.error)
        later = asked(engine)
    with Engine(llm_of(adapted), prefix_cache_bytes=0) as fresh:
        assert later.tokens == asked(fresh).tokens


def test_an_engine_opens_saved_contexts_of_the_acting_adapter_alone(adapted: Any, tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    context_of(adapted).save("it", store=store)
    request = Request((QUESTION,), 4, context="it", stop_ids=frozenset())
    with Engine(llm_of(adapted), store=store) as engine:
        before = engine.submit(request).result()
        assert before.error is None and before.cached_tokens == len(TEXT)
        adapted.set_adapter("other")
        with pytest.raises(ra.StoreMismatchError, match="adapters"):
            engine.submit(request)
        adapted.set_adapter("default")
        assert engine.submit(request).result().tokens == before.tokens


def test_a_raw_forward_after_a_switch_is_refused(adapted: Any) -> None:
    ra.enable(adapted, CONFIG)
    cache, ids = ra.RetrievalCache(adapted, CONFIG), torch.tensor([TEXT])
    with torch.no_grad():
        adapted(input_ids=ids, past_key_values=cache)
        adapted.set_adapter("other")
        with pytest.raises(ra.CacheMismatchError, match="adapters that act changed"):
            adapted(input_ids=ids[:, :5], past_key_values=cache)
        cache.reset()
        adapted(input_ids=ids, past_key_values=cache)


def test_weights_that_accelerate_brings_for_each_forward() -> None:
    """Within a forward they have another address than outside: questions about a context go on."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    before = context_of(copy.deepcopy(tiny_model("llama"))).continue_with(QUESTION, max_new_tokens=4).tokens
    model = copy.deepcopy(tiny_model("llama"))
    hook = hooks.AlignDevicesHook(execution_device=torch.device("cpu"), offload=True, place_submodules=True)
    hooks.add_hook_to_module(model.model.layers[0], hook)
    context = context_of(model)
    assert context.fork().continue_with(QUESTION, max_new_tokens=4).tokens == before
    assert context.extend([8, 9], progress=False).continue_with(QUESTION, max_new_tokens=4).tokens
