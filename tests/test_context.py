"""Context and LLM: read once, ask many times, extend, fork; plain transformers around them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import TextIteratorStreamer

import retrieval_attn as ra
from retrieval_attn.cache.host_part import HostPart
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.engine import decode
from retrieval_attn.engine.prefill import finish_prefill
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.attention.merge import Partial, empty_partial
from retrieval_attn.template import PromptTemplate
from tests.tiny_models import build_model, random_ids, tiny_model

CONFIG = ra.Config(sink=8, window=64, spill=16, retrieve=50, prefill_chunk=512)
NEEDLE = "The special magic Bergen number is: 7391846."
QUESTION = "What is the special magic Bergen number?"


@pytest.fixture(scope="module")
def text() -> str:
    """About 2,500 tokens of prose with the needle in the middle."""
    from retrieval_attn.eval.text.prose import prose

    filler = prose(10_000, seed=5)
    middle = filler.index(". ", len(filler) // 2) + 2
    return filler[:middle] + NEEDLE + " " + filler[middle:]


@pytest.fixture(scope="module")
def context(loaded: tuple[Any, PreTrainedTokenizerBase], text: str) -> ra.Context:
    return ra.Context(*loaded, CONFIG).read(text)


def full_attention(loaded: tuple[Any, PreTrainedTokenizerBase], ids: list[int], new: int) -> list[int]:
    """Greedy continuation by transformers alone."""
    model, _ = loaded
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_a_question_after_reading_is_answered_by_retrieval(context: ra.Context, append: Any) -> None:
    """The answer stands 1,200 tokens back, behind the index; the question was not known when it was built."""
    answer = context.ask(QUESTION, max_new_tokens=24, append=append)
    assert "7391846" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.stats.keys_scanned > 0
    assert answer.stats.context_tokens == context.num_tokens


def test_without_the_middle_the_answer_is_gone(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: with an empty retrieved part the number cannot be found."""

    def nothing(part: HostPart, config: ra.Config, value_dim: int, *rest: Any) -> Partial:
        return empty_partial(torch.empty(*part._shape, 1), value_dim)

    monkeypatch.setattr(HostPart, "attend", nothing)
    assert "7391846" not in context.ask(QUESTION, max_new_tokens=24, append="retrieval").text


def test_captured_mass_is_the_share_of_exact_attention(loaded: tuple[Any, PreTrainedTokenizerBase], text: str) -> None:
    """All keys have the whole weight, one key has less than fifty; unasked it is not measured."""
    shares = []
    for retrieve in ("all", 50, 1):
        context = ra.Context(*loaded, CONFIG.replace(retrieve=retrieve)).read(text[:6000], progress=False)
        context.cache.measure_mass(8)
        answer = context.ask(QUESTION, max_new_tokens=6)
        assert answer.stats.captured_mass is not None
        shares.append(answer.stats.captured_mass)
    assert shares[0] == pytest.approx(1, abs=1e-4)
    assert 0 < shares[2] < shares[1] < 0.9999
    plain = ra.Context(*loaded, CONFIG).read(text[:6000], progress=False).ask(QUESTION, max_new_tokens=2)
    assert plain.stats.captured_mass is None


def test_ask_equals_full_attention_and_leaves_the_context(
    context: ra.Context, loaded: tuple[Any, PreTrainedTokenizerBase]
) -> None:
    """Same tokens as transformers on context + question, twice in a row."""
    ids = [*context.cache.batch.sequences[0].token_ids, *context.template.question_ids(QUESTION)]
    expected = full_attention(loaded, ids, 16)
    for _ in range(2):
        got = context.ask(QUESTION, max_new_tokens=16).tokens
        assert got == expected[: len(got)] and got
    assert context.cache.get_seq_length() == context.num_tokens


def test_ask_many_equals_asking_one_by_one(context: ra.Context) -> None:
    """Questions of different lengths in one batch: padding lies between the context and the shorter ones."""
    questions = [
        QUESTION,
        "What is the special magic Bergen number mentioned in the text above?",
        "Which number?",
    ]
    together = context.ask_many(questions, max_new_tokens=12)
    alone = [context.ask(question, max_new_tokens=12) for question in questions]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert "7391846" in together[0].text
    # the context's keys are held once for the three rows
    assert together[0].stats.host_bytes < 1.2 * alone[0].stats.host_bytes


def test_extend_continues_the_context(loaded: tuple[Any, PreTrainedTokenizerBase], text: str) -> None:
    """Tokens read in two pieces answer like the same tokens read at once, and text can be appended too."""
    whole = ra.Context(*loaded, CONFIG).read(text)
    ids = whole.template.context_ids(text)
    pieces = ra.Context(*loaded, CONFIG).read(ids[:900]).extend(ids[900:])
    assert pieces.num_tokens == whole.num_tokens
    assert pieces.ask(QUESTION, max_new_tokens=16).tokens == whole.ask(QUESTION, max_new_tokens=16).tokens


def test_forks_are_independent_and_share_memory(context: ra.Context) -> None:
    held = context.cache.host_nbytes
    fork = context.fork()
    fork.extend(" The special magic Turin number is: 1112223. ")
    assert fork.num_tokens > context.num_tokens
    assert context.cache.host_nbytes == held
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert "1112223" not in context.ask("What is the special magic Turin number?", max_new_tokens=16).text


def failing(model: Any, where: str, error: BaseException) -> Any:
    """Raises `error` inside the model's last layer, after its keys are stored; inside its first; or in neither."""
    layers = {"first layer": 0, "last layer": -1}
    if where not in layers:
        return contextlib.nullcontext()
    module = model.model.layers[layers[where]].self_attn.o_proj  # the layer's attention is over

    def fail(*_: Any) -> None:
        raise error

    return contextlib.closing(_Handle(module.register_forward_pre_hook(fail)))


class _Handle:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


WHERE = ["first layer", "last layer", "before the last index", "after the last index"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("index", "error"),
    [("auto", KeyboardInterrupt()), ("auto", RuntimeError("no")), ("roargraph", KeyboardInterrupt())],
    ids=["auto, Ctrl-C", "auto, error", "roargraph, Ctrl-C"],
)
def test_an_extension_that_failed_has_not_happened(
    loaded: tuple[Any, PreTrainedTokenizerBase],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    index: str,
    where: str,
    error: BaseException,
) -> None:
    """Wherever it ended: same keys, same answers, and the same text can be appended, to the same index."""
    options: dict[str, Any] = {"index_options": {"exact_below": 64}} if index == "roargraph" else {}
    context = ra.Context(*loaded, CONFIG, index=index, **options).read(text[:4000], progress=False)
    never = ra.Context(*loaded, CONFIG, index=index, **options).read(text[:4000], progress=False)
    added = text[4000:6000] + NEEDLE
    for _ in range(2):
        interrupt(context, added, where, error, monkeypatch)
        assert context.num_tokens == never.num_tokens == context.cache.get_seq_length()
        assert [one.token_ids for one in context.cache.batch.sequences] == [never._ids]
        for mine, other in zip(layers_of(context), layers_of(never), strict=True):
            assert mine.columns == other.columns and len(mine.hosts[0]) == len(other.hosts[0])
            for here, there in zip(*(layer.hosts[0].read(0, mine.columns) for layer in (mine, other)), strict=True):
                assert np.array_equal(here, there)
            assert torch.equal(mine.window.tail()[0], other.window.tail()[0])  # type: ignore[union-attr]
    assert context.extend(added, progress=False).num_tokens == never.extend(added, progress=False).num_tokens
    assert [len(layer.hosts[0].segments) for layer in layers_of(context)] == [1] * len(layers_of(context))
    for mine, other in zip(layers_of(context), layers_of(never), strict=True):
        assert mine.hosts[0].indexed_tokens == other.hosts[0].indexed_tokens
    asked = [one.ask(QUESTION, max_new_tokens=16) for one in (context, never)]
    assert asked[0].tokens == asked[1].tokens and "7391846" in asked[0].text


def interrupt(context: ra.Context, added: Any, where: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """An extend() that ends with `error` at some place."""

    def end(*arguments: Any) -> None:
        if where == "after the last index":
            finish_prefill(*arguments)
        raise error

    with patch.context() as patched, failing(context.model, where, error), pytest.raises(type(error)):
        if where.endswith("index"):
            patched.setattr("retrieval_attn.answer_loop.finish_prefill", end)
        context.extend(added, progress=False)


def layers_of(context: ra.Context) -> list[RetrievalLayer]:
    return [layer for layer in context.cache.layers if isinstance(layer, RetrievalLayer)]


def test_an_extension_of_a_forked_context_that_failed(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are shared then, and the new text goes to one of its own."""
    expected = context.ask(QUESTION, max_new_tokens=16).tokens
    fork = context.fork()
    interrupt(
        fork, " The special magic Turin number is: 1112223. " * 40, "last layer", KeyboardInterrupt(), monkeypatch
    )
    assert fork.ask(QUESTION, max_new_tokens=16).tokens == expected
    fork.extend(" The special magic Turin number is: 1112223. ")
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert context.ask(QUESTION, max_new_tokens=16).tokens == expected


@pytest.mark.parametrize(("name", "options"), [("gemma2", {}), ("llama", {"host_dtype": "int8"})])
@pytest.mark.parametrize("where", WHERE)
def test_windows_are_put_back_as_they_were(
    loaded: tuple[Any, PreTrainedTokenizerBase],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    where: str,
) -> None:
    """A sliding layer has forgotten what was in its window, and an int8 host has rounded it."""
    config = ra.Config(sink=4, window=32, spill=8, retrieve=10, **options)
    ids = random_ids(1, 700)[0].tolist()
    context, never = (
        ra.Context(build_model(name), loaded[1], config).read(ids[:150], progress=False) for _ in range(2)
    )
    interrupt(context, ids[150:], where, KeyboardInterrupt(), monkeypatch)
    for mine, other in zip(context.cache.layers, never.cache.layers, strict=True):
        assert mine.window.span == other.window.span  # type: ignore[union-attr]
        assert torch.equal(mine.window.tail()[0], other.window.tail()[0])  # type: ignore[union-attr]
    asked = [one.continue_with(ids[:3], max_new_tokens=8).tokens for one in (context, never)]
    assert asked[0] == asked[1]
    again = [one.extend(ids[150:], progress=False).continue_with(ids[:3], max_new_tokens=8) for one in (context, never)]
    assert again[0].tokens == again[1].tokens


@pytest.mark.parametrize("where", WHERE)
def test_a_reading_that_failed_can_be_done_again(
    loaded: tuple[Any, PreTrainedTokenizerBase], text: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    context = ra.Context(*loaded, CONFIG)
    interrupt(context, text, where, KeyboardInterrupt(), monkeypatch)
    assert context.num_tokens == context.cache.get_seq_length() == 0
    assert "7391846" in context.read(text, progress=False).ask(QUESTION, max_new_tokens=16).text


def test_a_context_that_could_not_be_put_back_says_so(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, while the first is cleaned up after: never an answer from half a context."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    fork = context.fork()
    monkeypatch.setattr("retrieval_attn.cache.rollback.Rollback.undo", fail)
    interrupt(fork, "And so on.", "last layer", KeyboardInterrupt(), monkeypatch)
    for use in (lambda: fork.ask(QUESTION), fork.fork, lambda: fork.extend("More."), lambda: fork.stream(QUESTION)):
        with pytest.raises(ra.CacheMismatchError, match="in a new Context"):
            use()


def test_many_short_extensions_stay_in_one_index(loaded: tuple[Any, PreTrainedTokenizerBase], text: str) -> None:
    """A context that grows turn by turn is one segment per layer, however many turns it takes."""
    context = ra.Context(*loaded, CONFIG).read(text[:4000], progress=False)
    for start in range(4000, 8000, 200):
        context.extend(text[start : start + 200], progress=False)
    assert [len(layer.hosts[0].segments) for layer in layers_of(context)] == [1] * len(layers_of(context))


def test_sampling_is_seeded_and_stop_strings_stop(context: ra.Context) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 50.0, "top_k": 50, "top_p": 0.95}
    first = context.ask(QUESTION, seed=1, **options)
    assert first.tokens == context.ask(QUESTION, seed=1, **options).tokens
    assert any(context.ask(QUESTION, seed=seed, **options).tokens != first.tokens for seed in range(2, 8))
    stopped = context.ask(QUESTION, max_new_tokens=16, stop=("39",))
    assert stopped.finish_reason == "stop" and "39" not in stopped.text


def test_wrong_use_of_a_context(context: ra.Context, loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    empty = ra.Context(*loaded, CONFIG)
    with pytest.raises(InputDataError, match="The context is empty"):
        empty.ask(QUESTION)
    with pytest.raises(InputDataError, match="no tokens"):
        empty.read([])
    with pytest.raises(InputDataError, match="holds .* tokens already"):
        context.read("again")
    with pytest.raises(InputDataError, match="non-empty question"):
        context.ask("  ")
    with pytest.raises(InputDataError, match="non-empty list"):
        context.ask_many([])
    with pytest.raises(ConfigError, match="Unknown sampling option max_tokens"):
        context.ask(QUESTION, max_tokens=3)
    with pytest.raises(ConfigError, match='append must be "exact" or "retrieval"'):
        context.ask(QUESTION, append="fast")  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match="Token ids must be in"):
        empty.read([5, 10**6])


def test_llm_generates_and_reads(needle_model_path: Path, text: str) -> None:
    """The script interface on the bundled model, from its folder."""
    llm = ra.LLM(needle_model_path, device="cpu", config=CONFIG)
    prompt = f"{text}\n\nQuestion: {QUESTION}\nAnswer:"
    answers = llm.generate([prompt, prompt], ra.Sampling(max_new_tokens=16))
    assert ["7391846" in answer.text for answer in answers] == [True, True]
    assert "7391846" in llm.read(text).ask(QUESTION, max_new_tokens=16).text
    assert llm.generate("The sky is", max_new_tokens=3)[0].stats.new_tokens == 3
    with pytest.raises(ConfigError, match="A Sampling and the keyword"):
        llm.generate("The sky is", ra.Sampling(), max_new_tokens=3)
    wrong: dict[str, list[Any]] = {
        "non-empty prompts": ["", [], ["The sky", ""], None, b"The sky is"],
        "must be a string": [["The sky", 5], [b"The sky"]],
    }
    for message, given in wrong.items():
        for prompts in given:
            with pytest.raises(InputDataError, match=message):
                llm.generate(prompts)


def test_llm_generates_for_many_prompts_together(
    needle_model_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of like length are read and continued in one batch, with the texts that each gets alone, in order."""
    llm = ra.LLM(needle_model_path, device="cpu", config=CONFIG.replace(prefill_chunk=2048))
    sizes = [300, 60, 1100, 250, 40, 9000, 320, 900]  # characters
    prompts = [f"{text[:size]} {NEEDLE}\n\nQuestion: {QUESTION}\nAnswer:" for size in sizes]
    alone = [llm.generate(prompt, max_new_tokens=12)[0] for prompt in prompts]
    batches: list[int] = []
    inner = decode.run

    def counted(model: Any, cache: Any, prompt: Any, *rest: Any, **options: Any) -> Any:
        batches.append(len(prompt.sequences))
        return inner(model, cache, prompt, *rest, **options)

    monkeypatch.setattr("retrieval_attn.answer_loop.run", counted)
    together = llm.generate(prompts, max_new_tokens=12, progress=False)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.stats.context_tokens for answer in together] == [a.stats.context_tokens for a in alone]
    assert sum(batches) == len(prompts) and max(batches) >= 4 and batches[-1] == 1  # the long one goes alone


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([10, 10, 10], [[0, 1, 2]]),
        ([100, 2, 3, 90], [[1, 2], [3, 0]]),
        ([500, 500], [[0], [1]]),
        ([100] * 12, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]),
        ([2000], [[0]]),
    ],
)
def test_prompts_are_grouped_by_tokens(needle_model_path: Path, lengths: list[int], groups: list[list[int]]) -> None:
    """At most 800 tokens, or windows, in one batch, and no more padding than tokens."""
    llm = ra.LLM(needle_model_path, device="cpu", sink=10, window=70, spill=20, prefill_chunk=800)
    assert llm._groups(lengths) == groups


def test_streamer_of_plain_generate() -> None:
    """transformers' own streamers see the tokens of a generate() with a retrieval cache."""

    class Recorder(TextIteratorStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            pass

    model = tiny_model("llama")
    ids = random_ids(1, 50)
    ra.enable(model, sink=4, window=16, spill=8, retrieve="all")
    try:
        recorder = Recorder()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            streamer=recorder,
            pad_token_id=0,
        )
    finally:
        ra.disable(model)
    assert recorder.seen == out[0].tolist()


def test_enable_and_disable_restore_the_model() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    before = (model.config._attn_implementation, layer.forward, model._prepare_cache_for_generation)
    ra.enable(model, window=8)
    ra.enable(model, window=16)
    assert layer.forward != before[1]
    ra.disable(model)
    ra.disable(model)
    assert (model.config._attn_implementation, layer.forward, model._prepare_cache_for_generation) == before


def test_layer_major_prefill_leaves_embeddings_and_hidden_states_alone() -> None:
    """Layers write over their input only when nobody else holds it: the caller's embeddings stay as they
    were, and recorded hidden states are those of an ordinary forward."""
    model = tiny_model("llama")
    ids = random_ids(1, 70)
    embeddings = model.get_input_embeddings()(ids).detach()
    before = embeddings.clone()
    with torch.no_grad():
        expected = model(inputs_embeds=embeddings, output_hidden_states=True, use_cache=False).hidden_states
        ra.enable(model, sink=4, window=16, spill=8, retrieve="all", prefill_chunk=16)
        for record in (False, True):
            cache = ra.RetrievalCache(model, sink=4, window=16, spill=8, retrieve="all")
            got = model(inputs_embeds=embeddings, past_key_values=cache, output_hidden_states=record).hidden_states
    assert torch.equal(embeddings, before)
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5


def test_the_models_own_embeddings_are_written_over() -> None:
    """A long prompt holds its hidden states once; recorded ones are those of an ordinary forward all the same."""
    model = copy.deepcopy(tiny_model("qwen3"))
    ids = random_ids(1, 70)
    options: dict[str, Any] = {"sink": 4, "window": 16, "spill": 8, "retrieve": "all"}
    made: list[torch.Tensor] = []
    with torch.no_grad():
        other = copy.deepcopy(model)  # recording leaves hooks behind
        expected = other(ids, output_hidden_states=True, use_cache=False).hidden_states
        ra.enable(model, **options, prefill_chunk=16)
        embedding = model.get_input_embeddings()
        inner = embedding.forward

        def noted(given: torch.Tensor) -> torch.Tensor:
            made.append(inner(given))
            return made[-1]

        embedding.forward = noted
        for record in (False, True):
            got = model(
                ids, past_key_values=ra.RetrievalCache(model, **options), output_hidden_states=record
            ).hidden_states
            assert torch.equal(made[-1], expected[0]) == record
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5


def test_prefill_by_layer_restores_what_was_there() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    plain = layer.forward
    with ra.prefill_by_layer(model, chunk=16):
        assert layer.forward.chunk == 16
    assert layer.forward == plain


def test_a_long_prompt_that_is_read_at_once_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Plain generate() with our cache, but without layer-major prefill, runs out of memory at some length."""
    model = build_model("llama")
    ids = random_ids(1, 300)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "pad_token_id": 0}
    config = ra.Config(sink=4, window=16, spill=8, retrieve="all", prefill_chunk=64)

    def told() -> list[str]:
        caplog.clear()
        model.generate(ids, past_key_values=ra.RetrievalCache(model, config), do_sample=False, **options)
        return [one.message for one in caplog.records if one.name.startswith("retrieval_attn")]

    with caplog.at_level("WARNING"):
        ra.enable(model, config)
        assert not told()
        ra.disable(model)
        model.set_attn_implementation("retrieval")
        with ra.prefill_by_layer(model, chunk=512):
            assert not told()
        first, second = told(), told()
    assert len(first) == 1 and not second
    assert "LlamaForCausalLM reads 300 tokens at once" in first[0]
    assert "retrieval_attn.enable(model)" in first[0] and "prefill_by_layer(model)" in first[0]


def test_plain_forward_without_a_cache_equals_eager() -> None:
    """attn_implementation="retrieval" without any cache: transformers' own attention, padding included."""
    for name in ("llama", "gemma2", "gpt_oss"):
        model = tiny_model(name)
        ids = random_ids(2, 40)
        mask = torch.ones_like(ids)
        mask[1, :11] = 0
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            model.set_attn_implementation("retrieval")
            got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            model.set_attn_implementation("eager")
        assert (got - expected)[mask.bool()].abs().max() <= 1e-5


def test_importing_the_package_is_enough_to_load_a_model_with_it(tmp_path: Any) -> None:
    """`import retrieval_attn` first, transformers later: from_pretrained knows the implementation."""
    import subprocess

    tiny_model("llama").save_pretrained(tmp_path)
    code = (
        "import retrieval_attn, sys; assert 'torch' not in sys.modules\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, attn_implementation='retrieval')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_chat_templates_are_split_around_context_and_question(
    loaded: tuple[Any, PreTrainedTokenizerBase],
) -> None:
    """Opening, middle and closing join to what apply_chat_template gives; one begin-of-sequence token."""
    import copy

    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = PromptTemplate.of(tokenizer)
    turn = [{"role": "user", "content": "A story.\n\nWho?"}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert template.opening + "A story." + template.middle + "Who?" + template.closing == whole
    assert template.context_ids("A story.").count(tokenizer.bos_token_id) == 1


TURNS = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "She."},
    {"role": "user", "content": "Why?"},
]


def test_messages_are_put_through_the_chat_template(loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    """Context and continuation join to the conversation as the template writes it; one message is like a string."""
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = PromptTemplate.of(tokenizer)
    whole = tokenizer.apply_chat_template(
        [{**TURNS[0], "content": "A story.\n\nWho?"}, *TURNS[1:]], tokenize=False, add_generation_prompt=True
    )
    rest = str(whole).removeprefix(template.opening + "A story.")
    assert rest == "\n\nWho?\n[assistant] She.\n[user] Why?\n[assistant]"
    assert template.question_ids(TURNS) == template.plain_ids(rest)
    assert template.question_ids(TURNS[:1]) == template.question_ids("Who?")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputDataError, match="begin every conversation alike"):
        PromptTemplate.of(tokenizer).question_ids(TURNS)


def test_messages_without_a_chat_template(context: ra.Context) -> None:
    """ "Question: ... Answer:" turns; asked, asked together and streamed they get the same answer."""
    asked = context.template.question_ids(TURNS)
    text = "\n\nQuestion: Who?\nAnswer: She.\n\nQuestion: Why?\nAnswer:"
    assert asked == context.template.plain_ids(text)
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    turns.append({"role": "user", "content": QUESTION})
    answer = context.ask(turns, max_new_tokens=16)
    assert "7391846" in answer.text
    assert [one.tokens for one in context.ask_many([turns, QUESTION], max_new_tokens=16)] == [
        answer.tokens,
        context.ask(QUESTION, max_new_tokens=16).tokens,
    ]
    assert "".join(context.stream(turns, max_new_tokens=16)) == answer.text


def test_a_context_says_why_it_has_its_indexes(context: ra.Context) -> None:
    assert context.index_notes() == context.cache.index_notes()


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """Shared tiny models go back to eager attention whatever a test did."""
    yield
    for name in ("llama", "gemma2", "gpt_oss"):
        ra.disable(tiny_model(name))
        tiny_model(name).set_attn_implementation("eager")


def test_options_are_copied_and_pickled() -> None:
    """So a model that is enabled can be copied."""
    config = ra.Config(index="roargraph", index_options={"beam": 50})
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    model = ra.enable(build_model("llama"), config)
    copy.deepcopy(model)
