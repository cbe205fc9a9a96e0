"""Context and LLM: read once, ask many times, extend, fork; plain transformers around them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import TextIteratorStreamer

import retrieval_attn as ra
from retrieval_attn.attention.host_attention import HostSource
from retrieval_attn.attention.source import SourceResult
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.attention.merge import empty_partial
from retrieval_attn.runner import decode
from retrieval_attn.template import PromptTemplate
from tests.tiny_models import NEEDLE, QUESTION, Loaded, build_model, needle_text, random_ids, tiny_model

CONFIG = ra.Config(sink=8, window=64, retrieve=50, prefill_chunk=512)


@pytest.fixture(scope="module")
def text() -> str:
    return needle_text(10_000)  # about 2,500 tokens


@pytest.fixture(scope="module")
def context(loaded: Loaded, text: str) -> ra.Context:
    return ra.Context(*loaded, CONFIG).read(text)


def full_attention(loaded: Loaded, ids: list[int], new: int) -> list[int]:
    """Greedy continuation by transformers alone."""
    model, _ = loaded
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_a_question_after_reading_is_answered_by_retrieval(context: ra.Context, append: Any) -> None:
    """The answer stands 1,200 tokens back, behind the index; the question was not known when it was built."""
    answer = context.ask(QUESTION, max_new_tokens=24, question_attention=append)
    assert "7391846" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.stats.keys_scanned > 0
    assert answer.stats.context_tokens == context.num_tokens


def test_without_the_middle_the_answer_is_gone(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: with an empty retrieved part the number cannot be found."""

    def nothing(source: HostSource) -> SourceResult:
        return SourceResult(empty_partial(source.query, source.ranges[0].host.value_dim))

    monkeypatch.setattr(HostSource, "finish", nothing)
    assert "7391846" not in context.ask(QUESTION, max_new_tokens=24, question_attention="retrieval").text


def test_ask_equals_full_attention_and_leaves_the_context(context: ra.Context, loaded: Loaded) -> None:
    """Same tokens as transformers on context + question, twice in a row."""
    ids = [*context.cache.batch.sequences[0].token_ids, *context.template.question_ids(QUESTION)]
    expected = full_attention(loaded, ids, 16)
    for _ in range(2):
        got = context.ask(QUESTION, max_new_tokens=16).tokens
        assert got == expected[: len(got)] and got
    assert context.cache.get_seq_length() == context.num_tokens


def test_ask_many_equals_asking_one_by_one(context: ra.Context) -> None:
    """Questions of different lengths in one batch: padding lies between the context and the shorter ones."""
    questions = [QUESTION, "What is the special magic Bergen number mentioned in the text above?", "Which number?"]
    together = context.ask_many(questions, max_new_tokens=12)
    alone = [context.ask(question, max_new_tokens=12) for question in questions]
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert "7391846" in together[0].text
    # the context's keys are held once for the three rows
    assert together[0].stats.host_bytes < 1.2 * alone[0].stats.host_bytes


def test_extend_continues_the_context(loaded: Loaded, text: str) -> None:
    """Tokens read in two pieces answer like the same tokens read at once, and text can be appended too."""
    whole = ra.Context(*loaded, CONFIG).read(text)
    ids = whole.template.context_ids(text)
    pieces = ra.Context(*loaded, CONFIG).read(ids[:900]).extend(ids[900:])
    assert pieces.num_tokens == whole.num_tokens
    assert pieces.ask(QUESTION, max_new_tokens=16).tokens == whole.ask(QUESTION, max_new_tokens=16).tokens


def test_forks_are_independent_and_share_memory(context: ra.Context) -> None:
    more = " The special magic Turin number is: 1112223. "
    context.fork().extend(more)  # tokens that leave its window join clusters, once for all who have them
    held = context.cache.host_nbytes
    fork = context.fork()
    fork.extend(more)
    assert fork.num_tokens > context.num_tokens
    assert context.cache.host_nbytes == held
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert "1112223" not in context.ask("What is the special magic Turin number?", max_new_tokens=16).text


def test_sampling_is_seeded_and_stop_strings_stop(context: ra.Context) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 50.0, "top_k": 50, "top_p": 0.95}
    first = context.ask(QUESTION, seed=1, **options)
    assert first.tokens == context.ask(QUESTION, seed=1, **options).tokens
    assert any(context.ask(QUESTION, seed=seed, **options).tokens != first.tokens for seed in range(2, 8))
    stopped = context.ask(QUESTION, max_new_tokens=16, stop=("39",))
    assert stopped.finish_reason == "stop" and "39" not in stopped.text
    other = context.ask_many([QUESTION, "Tell me more."], max_new_tokens=16, stop=("39",))
    assert (other[0].text, other[0].tokens) == (stopped.text, stopped.tokens)
    assert len(other[1].tokens) > len(stopped.tokens)


def test_wrong_use_of_a_context(context: ra.Context, loaded: Loaded) -> None:
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
    with pytest.raises(ConfigError, match='question_attention must be "exact" or "retrieval"'):
        context.ask(QUESTION, question_attention="fast")  # type: ignore[arg-type]
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
    llm = ra.LLM(needle_model_path, device="cpu", sink=10, window=70, prefill_chunk=800)
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
    ra.enable(model, sink=4, window=16, retrieve="all")
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
        ra.enable(model, sink=4, window=16, retrieve="all", prefill_chunk=16)
        for record in (False, True):
            cache = ra.RetrievalCache(model, sink=4, window=16, retrieve="all")
            got = model(inputs_embeds=embeddings, past_key_values=cache, output_hidden_states=record).hidden_states
    assert torch.equal(embeddings, before)
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5


def test_the_models_own_embeddings_are_written_over() -> None:
    """A long prompt holds its hidden states once; recorded ones are those of an ordinary forward all the same."""
    model = copy.deepcopy(tiny_model("qwen3"))
    ids = random_ids(1, 70)
    options: dict[str, Any] = {"sink": 4, "window": 16, "retrieve": "all"}
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
    config = ra.Config(sink=4, window=16, retrieve="all", prefill_chunk=64)

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


TURNS = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "She."},
    {"role": "user", "content": "Why?"},
]


def test_messages_are_put_through_the_chat_template(loaded: Loaded) -> None:
    """Context and continuation join to the conversation as the template writes it; one message is like a string."""
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = PromptTemplate.of(tokenizer)
    turn = [{"role": "user", "content": "A story.\n\nWho?"}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert template.opening + "A story." + template.middle + "Who?" + template.closing == whole
    assert template.context_ids("A story.").count(tokenizer.bos_token_id) == 1
    whole = tokenizer.apply_chat_template([*turn, *TURNS[1:]], tokenize=False, add_generation_prompt=True)
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
