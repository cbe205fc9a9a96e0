"""Requests that name saved contexts: opened once, answered as the context alone is, refused and failed one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.attention.cache import own_tensors
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.engine import saved_text
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.engine.stepper import Stepper
from retrieval_attn.errors import (
    AdmissionError,
    ContextLengthError,
    InputDataError,
    StoreDamagedError,
    StoreMismatchError,
    UnknownContextError,
)
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.saving import save as late_check
from retrieval_attn.saving.layers import mapped_bytes
from retrieval_attn.server.settings import open_newest
from retrieval_attn.store import ContextStore
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.audit import check_engine
from tests.fuzz.engine_schedules import CONFIG
from tests.model.test_hybrid import CONFIGS as HYBRIDS
from tests.model.test_hybrid import new_model
from tests.tiny_models import QUESTION, Loaded, build_model, needle_text, random_ids, tiny_model
from tests.waiting import WAIT_SECONDS

NEVER: frozenset[int] = frozenset()


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def llm_of(model: Any = None, config: ra.Config = CONFIG) -> Any:
    model = tiny_model("llama") if model is None else model
    return SimpleNamespace(
        model=model, tokenizer=number_tokenizer(model.get_input_embeddings().weight.shape[0]), config=config
    )


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def read(llm: Any, count: int, seed: int) -> ra.Context:
    return ra.Context(llm.model, llm.tokenizer, llm.config).read(ids(count, seed), progress=False)


def test_the_newest_context_is_opened_ahead(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question on it then opens nothing."""
    llm = llm_of()
    saved = read(llm, 300, 1)
    for name, context in (("old", read(llm, 200, 2)), ("new", saved)):
        context.save(name, store=store)
    alone = saved.ask(QUESTION, max_new_tokens=8).tokens
    with Engine(llm, store=store) as engine:
        assert open_newest(engine, store) == "new"
        monkeypatch.setattr(saved_text.SavedText, "open", lambda self: pytest.fail("it is open"))
        found = engine.ask_saved("new", QUESTION, max_tokens=8).result()
        assert found.tokens == tuple(alone) and found.cached_tokens == saved.num_tokens
        check_engine(engine)


def test_no_context_is_opened_ahead_where_none_can_be(store: ContextStore, caplog: pytest.LogCaptureFixture) -> None:
    llm, other = llm_of(), llm_of(build_model("llama", seed=3))
    with caplog.at_level("INFO", "retrieval_attn"), Engine(llm, store=store) as engine:
        assert open_newest(engine, store) is None
        read(other, 100, 3).save("others", store=store)
        assert open_newest(engine, store) is None
        assert "'others'" in caplog.text and engine.stats["rows"] == 0


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the contexts that were opened."""
    found: list[str] = []
    open_chain = saved_text.open_chain

    def counting(chain: Any, *given: Any, **options: Any) -> Any:
        found.append(chain.name)
        return open_chain(chain, *given, **options)

    monkeypatch.setattr(saved_text, "open_chain", counting)
    return found


def forwards(llm: Any, run: Callable[[], object]) -> list[int]:
    """Tokens of each forward of the model meanwhile."""
    found: list[int] = []
    hook = llm.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        run()
    finally:
        hook.remove()
    return found


def test_answers_are_those_of_the_opened_context(loaded: Loaded, store: ContextStore, openings: list[str]) -> None:
    """Token for token, of several requests that lease one node, and nothing of the context is read again."""
    text, questions = needle_text(12_000), [QUESTION, "What is the sky?", QUESTION, "Who walks?"]
    ra.Context(*loaded, ra.Config()).read(text, progress=False).save("book", store=store)
    llm = SimpleNamespace(model=loaded[0], tokenizer=loaded[1], config=ra.Config())
    found: list[Finished] = []

    def ask() -> None:
        with Engine(llm, store=store) as engine:
            tickets = [engine.ask_saved("book", one, max_tokens=16) for one in questions]
            found.extend(ticket.result() for ticket in tickets)
            assert engine.stats["shared"].prefix_entries_resident == 1
            check_engine(engine)

    longest = max(forwards(llm, ask))
    assert openings == ["book"] and longest < 100
    context = ra.Context(*loaded, ra.Config()).open("book", store=store, progress=False)
    expected = [context.ask(one, max_new_tokens=16) for one in questions]
    assert [list(one.tokens) for one in found] == [one.tokens for one in expected] and "7391846" in found[0].text
    assert {one.cached_tokens for one in found} == {context.num_tokens}
    assert all(one.prompt_tokens > context.num_tokens and one.error is None for one in found)


@pytest.mark.parametrize("index", ["flat", "device"])
@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 26])
def test_other_kinds_of_index_and_nothing_shared(index: str, prefix_cache_bytes: int, store: ContextStore) -> None:
    """What continues a context is shared, too, within a namespace; without a tree each request opens for itself."""
    llm = llm_of(config=CONFIG.replace(index=index))
    context = read(llm, 700, 1)
    context.save("book", store=store)
    turn, tails = ids(150, 2), [ids(7, 10 + number) for number in range(4)]
    with Engine(llm, store=store, prefix_cache_bytes=prefix_cache_bytes) as engine:
        asked = [Request((turn, tail), 9, context="book", stop_ids=NEVER) for tail in tails]
        found = [ticket.result() for ticket in [engine.submit(one) for one in asked]]
        other = engine.submit(Request((turn, tails[0]), 9, context="book", stop_ids=NEVER, namespace="x")).result()
        check_engine(engine)
    context.extend(turn, progress=False)
    expected = [context.continue_with(tail, max_new_tokens=9) for tail in tails]
    assert [list(one.tokens)[: len(two.tokens)] for one, two in zip(found, expected, strict=True)] == [
        one.tokens for one in expected
    ]
    assert other.tokens == found[0].tokens
    cached = [850 if prefix_cache_bytes else 700] * 3
    assert sorted(one.cached_tokens for one in found) == [700, *cached] and other.cached_tokens == 700


def test_other_options_need_the_name(store: ContextStore, openings: list[str]) -> None:
    """A text with the same ids is read if the context was read with other options."""
    llm = llm_of()
    read(llm_of(config=CONFIG.replace(window=CONFIG.window + 16)), 500, 3).save("book", store=store)
    with Engine(llm, store=store) as engine:
        named = engine.submit(Request((ids(5, 4),), 4, context="book", namespace="a", stop_ids=NEVER)).result()
        again = engine.submit(Request((ids(5, 4),), 4, context="book", namespace="b", stop_ids=NEVER)).result()
        plain = engine.submit(Request((ids(500, 3), ids(5, 4)), 4, namespace="a", stop_ids=NEVER)).result()
    assert openings == ["book"] and (named.cached_tokens, again.cached_tokens) == (500, 500)
    assert plain.cached_tokens == 0 and named.tokens == again.tokens


def test_given_up_and_opened_again(store: ContextStore, openings: list[str]) -> None:
    """Of three contexts memory holds one; a name that was given to another text leads to that one."""
    llm = llm_of()
    for number in range(3):
        read(llm, 400, number).save(f"book{number}", store=store)
    request = Request((ids(5, 9),), 6, context="book0", stop_ids=NEVER)
    with Engine(llm, store=store, prefix_cache_bytes=100_000) as engine:
        first = engine.submit(request).result()
        for number in (1, 2):
            engine.submit(Request((ids(5, 9),), 6, context=f"book{number}")).result()
            check_engine(engine)
        second = engine.submit(request).result()
        shared = engine.stats["shared"]
        assert shared.prefix_entries_resident == 1 and shared.evicted == 3
        read(llm, 420, 7).save("book0", store=store)
        third = engine.submit(request).result()
    assert first.tokens == second.tokens and openings == ["book0", "book1", "book2", "book0", "book0"]
    assert (second.cached_tokens, third.cached_tokens) == (400, 420)


@pytest.mark.skipif(os.name == "nt", reason="files are mapped by NumPy there")
def test_mapped_files_take_no_memory_of_the_prefix_cache(store: ContextStore) -> None:
    """Only windows, indexes and clusters of an opened context count, and pages that are locked; text behind it does."""
    llm = llm_of()
    read(llm, 900, 1).save("book", store=store)
    with Engine(llm, store=store) as engine:
        tree = engine._tree
        assert tree is not None
        engine.submit(Request((ids(5, 9),), 2, context="book", stop_ids=NEVER)).result()
        (text,) = tree.latest(None, 9)
        entry: Any = text.held
        mapped = mapped_bytes(entry._cache)
        assert mapped.nbytes > 0.7 * entry._cache.host_nbytes and mapped.locked == 0
        opened = text.sizes.host
        windows = sum(one.nbytes for one in own_tensors(entry._cache))
        assert opened == entry._cache.host_nbytes - mapped.nbytes + windows
        engine.submit(Request((ids(600, 2), ids(5, 9)), 2, context="book", stop_ids=NEVER)).result()
        later = next(one for one in tree.latest(None, 9) if one.end > text.end)
        assert later.sizes.host > 600 * engine._limits.token_bytes
        segment = next(iter(entry._cache.layers[0].hosts[0].segments))
        segment.locked_rows = segment.keys, segment.values
        for one in tree._residents:
            tree.recount(one)
        assert tree.sizes.host == opened + segment.nbytes + later.sizes.host
        check_engine(engine)


def test_a_text_that_was_asked_about_is_saved(store: ContextStore) -> None:
    """What opens it has the answers of the engine that read it."""
    llm, document = llm_of(), ids(600, 8)
    with Engine(llm, store=store) as engine:
        asked = engine.submit(Request((document, ids(6, 9)), 8, stop_ids=NEVER)).result()
        for other in ((*document, 5), (*document[:-1], 5), ids(600, 9), ()):
            with pytest.raises(InputDataError, match="does not hold"):
                engine.save("no", other)
        with pytest.raises(InputDataError, match="does not hold"):
            engine.save("no", document, namespace="other")
        assert engine.save("book", document).new_tokens == 600
        assert engine.save("beginning", document[:500]).tokens == 500
        beginning = engine.submit(Request((ids(6, 9),), 8, context="beginning", stop_ids=NEVER)).result()
        assert beginning.cached_tokens == 500
        check_engine(engine)
        named = engine.submit(Request((ids(6, 9),), 8, context="book", stop_ids=NEVER)).result()
    assert asked.tokens == named.tokens and named.cached_tokens == 600
    opened = ra.Context(llm.model, llm.tokenizer, CONFIG).open("book", store=store, progress=False)
    assert opened.num_tokens == 600 and opened.continue_with(ids(6, 9), max_new_tokens=8).tokens == list(asked.tokens)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen3_next"])
def test_a_save_copies_no_window(family: str, store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that rows fill has no memory for a copy of all windows and states; the text answers meanwhile as before."""
    llm = llm_of(new_model(family) if family in HYBRIDS else build_model(family))
    document, request = ids(600, 8), Request((ids(600, 8), ids(6, 9)), 8, stop_ids=NEVER)
    with Engine(llm, store=store) as engine:
        first = engine.submit(request).result()
        copied: list[str] = []
        clone, fork = WindowCache.clone, StateLayer._copied

        def cloned(self: WindowCache, *given: int) -> WindowCache:
            copied.append("window")
            return clone(self, *given)

        def copied_state(self: StateLayer, *, states: bool = True) -> dict[str, Any]:
            copied.extend(["state"] * states)
            return fork(self, states=states)

        monkeypatch.setattr(WindowCache, "clone", cloned)
        monkeypatch.setattr(StateLayer, "_copied", copied_state)
        engine.save("book", document)
        assert not copied
        monkeypatch.undo()
        assert engine.submit(request).result().tokens == first.tokens
        check_engine(engine)
    opened = ra.Context(llm.model, llm.tokenizer, CONFIG).open("book", store=store, progress=False)
    assert opened.continue_with(ids(6, 9), max_new_tokens=8).tokens == list(first.tokens)


def test_a_part_that_was_forgotten(store: ContextStore) -> None:
    """Positions go on behind what was read, and the room is that of what is left."""
    llm = llm_of()
    context = read(llm, 3_900, 5).forget(4, 3_000)
    context.save("book", store=store)
    with Engine(llm, store=store) as engine:
        found = engine.submit(Request((ids(300, 6),), 8, context="book", stop_ids=NEVER)).result()
        with pytest.raises(ContextLengthError):
            engine.submit(Request((ids(3_300, 6),), 8, context="book"))
    assert list(found.tokens) == context.continue_with(ids(300, 6), max_new_tokens=8).tokens


def test_what_is_refused_at_once(store: ContextStore) -> None:
    """Unknown names, contexts of another model, and those that never fit; the engine goes on."""
    llm = llm_of()
    read(llm, 500, 3).save("book", store=store)
    other = llm_of(build_model("llama", rms_norm_eps=1e-3))
    read(other, 100, 3).save("other", store=store)
    limits = default_limits(llm.model, llm.config)
    small = type(limits)(**{**vars(limits), "host_bytes": limits.token_bytes * 400})
    with Engine(llm, store=store, limits=small) as engine:
        with pytest.raises(UnknownContextError, match="bok"):
            engine.submit(Request((1, 2), 4, context="bok"))  # type: ignore[arg-type]
        with pytest.raises(StoreMismatchError):
            engine.submit(Request((1, 2), 4, context="other"))  # type: ignore[arg-type]
        with pytest.raises(AdmissionError, match="503 prompt"):
            engine.submit(Request((1, 2), 4, context="book"))  # type: ignore[arg-type]
        assert engine.submit(Request((5,), 2)).result().error is None  # type: ignore[arg-type]
        assert engine.stats["waiting"] == engine.stats["rows"] == 0


def damage(store: ContextStore, name: str, array: str, *, bits: int = 1, count: int = 1) -> None:
    """Change bytes of an array of the context's second layer, one in four. bits: that are turned in each of them."""
    node = store.get(store.resolve(name).digest)
    (path,) = [one for one in store.files(node.digest) if "001" in one.name]
    data = bytearray(path.read_bytes())
    at = data.find(node.bundle("layer-001", verify=False).arrays[array].tobytes()[:64])
    assert at > 0
    for place in range(at + 3, at + 3 + 4 * count, 4):
        data[place] ^= bits
    del node
    path.chmod(0o600)
    path.write_bytes(bytes(data))


LATER = ("host/0/keys", "host/0/values")


def compare_beside_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next check of files begin after ten steps of an engine, which then waits for the end of the check."""
    begun, ended, steps = threading.Event(), threading.Event(), 0
    run, decode = late_check._run, Stepper.decode

    def compared(*given: Any) -> None:
        assert begun.wait(WAIT_SECONDS)
        try:
            run(*given)
        finally:
            ended.set()

    def decoded(stepper: Stepper, rows: Any, *given: Any) -> Any:
        nonlocal steps
        steps += bool(rows) and any(row.request.context for row in rows.values())
        if steps == 10:
            begun.set()
            assert ended.wait(WAIT_SECONDS)
        return decode(stepper, rows, *given)

    monkeypatch.setattr(late_check, "_run", compared)
    monkeypatch.setattr(Stepper, "decode", decoded)


@pytest.mark.parametrize(
    ("array", "late"), [("tail/key", True), ("host/0/values", False), *((one, True) for one in LATER)]
)
def test_damage_is_a_miss(
    array: str, late: bool, store: ContextStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found while it is opened or beside the answer: its tokens are read again, once for all, with its own options, and
    the answers are those from before. Damage is counted and told once; a repair is taken up.
    """
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(saved_text, "WHOLE_BYTES", 0 if late else 1 << 30)
    llm, requests = llm_of(), [Request((ids(5, n),), 50, context="book", stop_ids=NEVER) for n in range(3)]
    read(llm_of(config=CONFIG.replace(retrieve=7)), 900, 3).save("book", store=store)
    with Engine(llm, store=store) as engine:
        expected = [ticket.result().tokens for ticket in [engine.submit(one) for one in requests]]
    damage(store, "book", array)
    if late and array in LATER:
        compare_beside_answers(monkeypatch)
    with Engine(llm, store=store) as engine:
        beside = engine.submit(Request((ids(40, 1),), 50, stop_ids=NEVER))
        tickets = [engine.submit(one) for one in requests]
        events = [[event.token for event in ticket] for ticket in tickets]
        found = [ticket.result() for ticket in tickets]
        assert [one.tokens for one in found] == expected and [tuple(one) for one in events] == expected
        assert sorted(one.cached_tokens for one in found) == [0, 900, 900] and beside.result().reason == "length"
        assert engine.submit(requests[0]).result().cached_tokens == 900
        check_engine(engine)
        assert engine.stats["damaged_blocks"] == 1
        assert len([one for one in caplog.records if "'book' is damaged" in one.getMessage()]) == 1
        read(llm, 900, 3).save("book", store=store)  # other options: the same context is not repaired by it
        read(llm_of(config=CONFIG.replace(retrieve=7)), 900, 3).save("book", store=store)
        assert not store.verify()
        repaired: list[Finished] = []
        assert max(forwards(llm, lambda: repaired.append(engine.submit(requests[1]).result()))) < 900
        assert repaired[0].tokens == expected[1] and repaired[0].cached_tokens == 900
    with Engine(llm, store=store) as engine:
        assert engine.submit(requests[0]).result().cached_tokens == 900


def test_damage_that_was_marked_is_read_at_once(store: ContextStore, openings: list[str]) -> None:
    """A later engine does not open it; a file that is cut or gone is damage, too."""
    llm, request = llm_of(), Request((ids(5, 1),), 9, context="book", stop_ids=NEVER)
    read(llm, 900, 3).save("book", store=store)
    with Engine(llm, store=store) as engine:
        expected = engine.submit(request).result().tokens
    paths = store.files(store.resolve("book").digest)
    (path,) = [one for one in paths if "001" in one.name]
    for change in (lambda: path.chmod(0o600), lambda: path.write_bytes(path.read_bytes()[:-100]), path.unlink):
        change()
        openings.clear()
        with Engine(llm, store=store) as engine:
            found = [engine.submit(request).result() for _ in range(2)]
        assert [one.tokens for one in found] == [expected] * 2
    assert [one.cached_tokens for one in found] == [0, 900] and not openings


def test_an_answer_that_damage_changed_ends_with_an_error(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told of it cannot be taken back; who asks again is answered."""
    monkeypatch.setattr(late_check, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(saved_text, "WHOLE_BYTES", 0)
    llm, request = llm_of(), Request((ids(5, 1),), 20, context="book", stop_ids=NEVER)
    read(llm, 900, 3).save("book", store=store)
    with Engine(llm, store=store) as engine:
        expected = engine.submit(request).result().tokens
    damage(store, "book", "host/0/values", bits=0x82, count=4000)
    compare_beside_answers(monkeypatch)
    with Engine(llm, store=store) as engine:
        ticket = engine.submit(request)
        told = [next(iter(ticket)).token for _ in range(10)]
        assert told != list(expected[:10])
        found = ticket.result()
        assert isinstance(found.error, StoreDamagedError) and "Send the request again" in str(found.error)
        assert engine.submit(request).result().tokens == expected
        check_engine(engine)


def test_ids_that_are_damaged_are_an_error(store: ContextStore) -> None:
    """And so is a context that forgot a part: nobody knows what it held."""
    llm, request = llm_of(), Request((ids(5, 1),), 9, context="book", stop_ids=NEVER)
    read(llm, 900, 3).save("book", store=store)
    read(llm, 900, 4).forget(4, 400).save("cut", store=store)
    damage(store, "cut", "tail/key")
    (path,) = [one for one in store.files(store.resolve("book").digest) if one.stem == "ids"]
    data = bytearray(path.read_bytes())
    data[4096 + 40] ^= 1
    path.chmod(0o600)
    path.write_bytes(bytes(data))
    with Engine(llm, store=store) as engine:
        for _ in range(2):
            with pytest.raises(StoreDamagedError, match="ids"):
                engine.submit(request)
        cut = engine.submit(Request((ids(5, 1),), 9, context="cut", stop_ids=NEVER)).result()
        assert isinstance(cut.error, StoreDamagedError)
        with pytest.raises(StoreDamagedError, match="forgotten"):
            engine.submit(Request((ids(5, 1),), 9, context="cut", stop_ids=NEVER))
        assert engine.submit(Request((ids(40, 1),), 9, stop_ids=NEVER)).result().error is None
        check_engine(engine)


def test_rows_go_on_while_a_context_is_opened(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is held until another request, and one that is read meanwhile, are answered; or until it is left."""
    llm = llm_of()
    read(llm, 500, 3).save("book", store=store)
    hold, began = threading.Event(), threading.Event()
    open_chain = saved_text.open_chain

    def slow(*given: Any, on_layer: Callable[[], None], **options: Any) -> Any:
        began.set()
        while not hold.wait(0.001):
            on_layer()
        return open_chain(*given, on_layer=on_layer, **options)

    monkeypatch.setattr(saved_text, "open_chain", slow)
    request = Request((ids(5, 1),), 4, context="book", stop_ids=NEVER)
    with Engine(llm, store=store) as engine:
        left, waiting = engine.submit(request), engine.submit(request)
        began.wait()
        assert engine.submit(Request((ids(900, 1), ids(4, 2)), 30, stop_ids=NEVER)).result().reason == "length"
        began.clear()
        left.cancel()
        assert left.result().reason == "cancelled"
        began.wait()  # the one that waited opens it
        hold.set()
        assert waiting.result().error is None
        check_engine(engine)
    hold.clear()
    engine = Engine(llm, store=store)
    ticket = engine.submit(request)
    engine.close(drain=False)
    assert ticket.result().reason == "cancelled"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("retrieval_attn-open")]


def test_what_continues_a_context_is_saved_with_it(store: ContextStore) -> None:
    """Only the new tokens are written, and the context with them answers as one that was extended and saved."""
    llm = llm_of()
    context = read(llm, 700, 1)
    context.save("book", store=store)
    turn, tail = ids(150, 2), ids(7, 3)
    with Engine(llm, store=store) as engine:
        engine.submit(Request((turn, tail), 4, context="book")).result()
        with pytest.raises(InputDataError, match="does not hold"):
            engine.save("more", turn)
        saved = engine.save("more", turn, context="book")
        check_engine(engine)
        found = engine.submit(Request((tail,), 9, context="more", stop_ids=NEVER)).result()
    assert saved.new_tokens == 150 and saved.tokens == 850 and found.cached_tokens == 850
    context.extend(turn, progress=False)
    expected = context.continue_with(tail, max_new_tokens=9)
    assert list(found.tokens)[: len(expected.tokens)] == expected.tokens
    assert len(store.resolve("more").chain) == 2
