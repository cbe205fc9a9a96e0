"""What users do with saved contexts: save, open in another process, go on, and what is refused."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn import answer_loop, cli
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import segments_of
from retrieval_attn.errors import (
    ConfigError,
    InputDataError,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
    UnknownContextError,
)
from retrieval_attn.gpu.attention.window import TensorCopies
from retrieval_attn.saving import save, save_reading
from retrieval_attn.saving.layers import MappedBytes, mapped_bytes
from retrieval_attn.store import OS_DISK, ContextStore
from retrieval_attn.store.disk import Disk
from tests.preloaded import run_preloaded
from tests.tiny_models import NEEDLE, QUESTION, Loaded, needle_text, tiny_model
from tests.waiting import WAIT_SECONDS

TEXT = 12_000
"""Characters."""


@pytest.fixture(scope="module")
def read(loaded: Loaded) -> ra.Context:
    """A context with a needle, read once for all tests, which fork it."""
    text = needle_text(TEXT)
    return ra.Context(*loaded, ra.Config()).read(text, progress=False)


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def opened(loaded: Loaded, store: ContextStore, name: str, **options: Any) -> ra.Context:
    return ra.Context(*loaded, ra.Config()).open(name, store=store, progress=False, **options)


def answers(context: ra.Context) -> list[Any]:
    found = [context.ask(QUESTION, max_new_tokens=12, question_attention=append) for append in ("exact", "retrieval")]
    return [(one.text, one.stats.context_tokens, one.stats.tail_share) for one in found]


def test_saved_and_opened(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """The same answers, without a forward over what was saved."""
    saved = read.save("bergen", store=store)
    assert saved.done and saved.tokens == saved.new_tokens == read.num_tokens and saved.nbytes > 0
    forwards = []
    hook = loaded[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        context = opened(loaded, store, "bergen")
    finally:
        hook.remove()
    assert not forwards and context.num_tokens == read.num_tokens
    assert answers(context) == answers(read) and NEEDLE.split()[-1].strip(".") in answers(read)[0][0]
    context.kept.wait()
    assert store.verify() == []


@pytest.mark.skipif(os.name == "nt", reason="files are mapped by NumPy there")
def test_mapped_bytes_of_an_opened_context(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """Keys and values of the files, not those of a later turn; a context that was read has none."""
    read.save("book", store=store)
    opened = ra.Context(*loaded, ra.Config()).open("book", store=store, progress=False)
    assert mapped_bytes(read.cache) == MappedBytes(0, 0)
    layers: list[Any] = opened.cache.layers
    kept = segments_of(host for layer in layers for host in layer.hosts)
    before = sum(segment.nbytes for segment in kept)
    assert mapped_bytes(opened.cache) == MappedBytes(before, 0) and before > 0.8 * opened.cache.host_nbytes
    opened.extend(needle_text(4000), progress=False)
    assert opened.cache.host_nbytes > before and mapped_bytes(opened.cache) == MappedBytes(before, 0)
    next(iter(kept)).locked_rows = (np.zeros(1), np.zeros(1))
    assert mapped_bytes(opened.cache.fork()) == MappedBytes(before, next(iter(kept)).nbytes)
    opened.kept.wait()


def test_a_conversation_is_saved_turn_by_turn(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """Each save writes its own turn; names lead to the state that they were given; forks part ways."""
    first = read.save("book", store=store)
    talk = read.fork().extend(" It was a long walk through the rain." * 20, progress=False)
    second = talk.save("talk", store=store)
    assert second.new_tokens == talk.num_tokens - read.num_tokens and second.nbytes < first.nbytes / 3
    assert talk.save("same", store=store).new_tokens == 0
    context = opened(loaded, store, "talk")
    other = opened(loaded, store, "book").extend(" And then the sun came out.", progress=False)
    for one in (context, talk):
        one.extend(" Nobody had seen it coming.", progress=False)
    assert answers(context) == answers(talk)
    other.save("other", store=store)
    assert talk.save("sequel", store=store).new_tokens < 20
    for name in ("talk", "same", "sequel"):  # somebody removes what the next save would continue
        store.remove(name)
    store.gc()
    assert talk.save("talk", store=store).new_tokens == talk.num_tokens - read.num_tokens
    assert len(store.chain(store.resolve("other").digest)) == 2
    assert answers(opened(loaded, store, "other")) == answers(other)
    assert {one.name for one in store.list()} == {"book", "talk", "other"} and store.verify() == []


def test_saved_while_it_is_read_or_asked(loaded: Loaded, store: ContextStore) -> None:
    text = needle_text(6_000)
    context = ra.Context(*loaded).read(text, progress=False, save="reading", store=store)
    assert answers(opened(loaded, store, "reading")) == answers(context)
    assert context.save("again", store=store).new_tokens == 0
    context.extend(" The end.", progress=False)
    saving = context.save("beside", store=store, wait=False)
    expected = answers(context)
    assert saving.wait().done and 0 < saving.new_tokens < 20
    assert answers(opened(loaded, store, "beside")) == expected


def test_a_read_need_not_wait_for_the_disk(
    loaded: Loaded, store: ContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked and grows while a slow disk takes it; what was read is saved, and the next save continues it."""
    write, slow = OS_DISK.write, threading.Event()

    def held(handle: int, data: memoryview) -> None:
        slow.wait(20)
        write(handle, data)

    monkeypatch.setattr(OS_DISK, "write", held)
    text = needle_text(6_000)
    context = ra.Context(*loaded).read(text, progress=False, save="later", store=store, wait=False)
    saving = context.kept.saving
    assert saving is not None and not saving.done and store.list() == []
    fork, expected = context.fork(), answers(context)
    context.extend(" The end.", progress=False)
    slow.set()
    assert saving.wait().digest == store.resolve("later").digest and saving.new_tokens == fork.num_tokens
    assert answers(opened(loaded, store, "later")) == expected == answers(fork)
    assert 0 < context.save("longer", store=store).new_tokens < 20


def test_no_layer_is_saved_while_its_window_moves(
    loaded: Loaded, tmp_path: Path, emulated_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read ends with a captured step, whose buffers hold a window before its keys are copied there: a thread that
    wrote the last layers then saved what had been in these buffers.
    """
    run, write_layer, moving = TensorCopies.run, save_reading.write_layer, threading.Event()

    def slow_copies(self: TensorCopies) -> None:
        moving.set()
        time.sleep(0.5)
        run(self)

    def late_layer(*args: Any) -> int:
        moving.wait(WAIT_SECONDS)  # the first layer is being written until then
        return write_layer(*args)

    monkeypatch.setattr(TensorCopies, "run", slow_copies)
    monkeypatch.setattr(save_reading, "write_layer", late_layer)
    config = ra.Config(sink=16, window=48, retrieve=20, index="flat", prefill_chunk=256)
    context = ra.Context(*loaded, config).read(needle_text(3_000), progress=False, save="moved", store=tmp_path)
    assert moving.is_set()
    opened = ra.Context(*loaded, config).open("moved", store=tmp_path, progress=False)
    for one, other in zip(opened.cache.layers, context.cache.layers, strict=True):
        if isinstance(one, RetrievalLayer) and isinstance(other, RetrievalLayer):
            assert one.held is not None and other.held is not None
            for found, wanted in zip(one.held.edge()[1], other.held.edge()[1], strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("where", ["finish_prefill", "make_ready"])
def test_a_read_that_fails_saves_nothing(
    where: str, loaded: Loaded, store: ContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, or when all layers are written: and the context may read again."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    context = ra.Context(*loaded)
    with monkeypatch.context() as patched:
        patched.setattr(answer_loop, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.read(needle_text(3_000), progress=False, save="half", store=store)
    assert store.list() == [] and not list(store.folder.glob("nodes/*/*"))
    context.read(needle_text(3_000), progress=False, save="whole", store=store)
    assert [one.name for one in store.list()] == ["whole"] and store.verify() == []


def test_another_process_opens_it(read: ra.Context, store: ContextStore, needle_model_path: Path) -> None:
    read.save("bergen", store=store)
    script = (
        "import sys, json, retrieval_attn as ra\n"
        "context = ra.LLM(sys.argv[1], device='cpu').open('bergen', store=sys.argv[2], progress=False)\n"
        "answer = context.ask(sys.argv[3], max_new_tokens=12, question_attention='retrieval')\n"
        "print(json.dumps([context.num_tokens, answer.text]))\n"
    )
    done = run_preloaded(["-c", script, str(needle_model_path), str(store.folder), QUESTION])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [read.num_tokens, answers(read)[1][0]]


def test_what_is_refused(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """Each by its own error, and everything goes on."""
    read.save("bergen", store=store)
    model, tokenizer = loaded
    with pytest.raises(UnknownContextError, match="bergen"):
        opened(loaded, store, "berge")
    for name in ("", "a/b", "..", "x" * 65, "naïve"):
        with pytest.raises(StoreError, match="name"):
            read.save(name, store=store)
    with pytest.raises(InputDataError, match="empty"):
        ra.Context(*loaded).save("nothing", store=store)
    with pytest.raises(ConfigError, match="window"):
        opened(loaded, store, "bergen", window=64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[-1, -1] += 1
        other.model.layers[2].mlp.up_proj.weight += 1e-3
    with pytest.raises(StoreMismatchError, match="weights"):
        opened((other, tokenizer), store, "bergen")
    other = copy.deepcopy(model)
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5e5}
    with pytest.raises(StoreMismatchError, match="positions"):
        opened((other, tokenizer), store, "bergen")
    talks = copy.deepcopy(tokenizer)
    talks.add_tokens(["<one more>"])
    with pytest.raises(StoreMismatchError, match="tokenizer"):
        opened((model, talks), store, "bergen")
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
    with pytest.raises(StoreMismatchError, match="chat template"):
        opened((model, chatty), store, "bergen")
    assert answers(opened(loaded, store, "bergen")) == answers(read)


def test_options_that_are_gone_are_named(
    read: ra.Context, loaded: Loaded, store: ContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases before had `Config.spill`."""
    plain = save.node_plain

    def earlier(cache: ra.RetrievalCache) -> dict[str, Any]:
        found = plain(cache)
        return {**found, "config": {**found["config"], "spill": 512}}

    monkeypatch.setattr(save, "node_plain", earlier)
    read.save("earlier", store=store)
    with pytest.raises(
        StoreMismatchError, match=r"does not have \(Unknown option spill;.*threads\); read the text again"
    ):
        opened(loaded, store, "earlier")


def test_damage_is_found(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """Of an index or a window before the first answer; of keys by the thread that compares them."""
    digest = read.save("bergen", store=store).digest
    file = next(store.folder.glob(f"nodes/*/{digest}/layer-002*"))
    whole = file.read_bytes()

    def damaged(place: int) -> None:
        changed = bytearray(whole)
        changed[place] ^= 4
        file.chmod(0o600)
        file.unlink()  # what is mapped stays
        file.write_bytes(changed)
        file.chmod(0o600)

    damaged(20)
    with pytest.raises(StoreDamagedError, match="layer-002"):
        opened(loaded, store, "bergen")
    damaged(len(whole) // 2)
    try:
        context = opened(loaded, store, "bergen")
        with pytest.raises(StoreDamagedError, match="layer-002"):
            context.kept.wait()
        with pytest.raises(StoreDamagedError, match="layer-002"):
            context.ask(QUESTION, max_new_tokens=1)
    except StoreDamagedError as error:  # it may lie in what is compared first
        assert "layer-002" in str(error)
    (found,) = store.verify()
    assert "bergen" in str(found) and "layer-002" in str(found)
    # nothing continues a node that is known to be damaged
    turn = read.fork().extend(" The end.", progress=False)
    assert turn.save("turn", store=store).new_tokens == turn.num_tokens
    store.remove("turn")
    store.gc()
    damaged(0)
    file.write_bytes(whole)
    assert store.verify() == [] and answers(opened(loaded, store, "bergen")) == answers(read)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVAL_ATTN_STORE", str(tmp_path / "contexts"))
    book = tmp_path / "book.txt"
    book.write_text(needle_text(4_000))
    usual = ["--device", "cpu"]
    assert cli.main(["read", str(book), "--save", "book", *usual]) == 0
    assert "as 'book'" in capsys.readouterr().err
    assert cli.main(["ask", "book", QUESTION, "--max-new-tokens", "12", *usual]) == 0
    from_name = capsys.readouterr()
    assert cli.main(["ask", str(book), QUESTION, "--max-new-tokens", "12", *usual]) == 0
    assert from_name.out == capsys.readouterr().out and "opened" in from_name.err
    assert cli.main(["ask", "book", QUESTION, "--window", "64", *usual]) == 2
    assert "--window" in capsys.readouterr().err
    assert cli.main(["ask", "boook", QUESTION, *usual]) == 2
    assert "did you mean book" in capsys.readouterr().err
    assert cli.main(["ask", "no/such.txt", QUESTION, *usual]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["contexts", "ls"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  bundled"), "no path of 60 characters"
    assert cli.main(["contexts", "ls"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split()[:3] == ["name", "tokens", "bytes"] and listed[1].startswith("book ")
    assert cli.main(["contexts", "verify"]) == 0
    node = next((tmp_path / "contexts").glob("nodes/*/*/layer-000*"))
    data = bytearray(node.read_bytes())
    data[len(data) // 2] ^= 1
    node.chmod(0o600)
    node.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["ask", "book", QUESTION, "--max-new-tokens", "2", *usual]) != 0, "found after the answer at last"
    assert "layer-000" in capsys.readouterr().err
    assert cli.main(["contexts", "verify", "book"]) == 1
    assert "book" in capsys.readouterr().out
    assert cli.main(["contexts", "rm", "book"]) == 0
    assert re.match(r"removed the context book\nfreed [\d.]+ MiB\n$", capsys.readouterr().err)
    assert cli.main(["contexts", "rm", "book"]) == 2


def test_a_disk_that_is_full(read: ra.Context, loaded: Loaded, tmp_path: Path) -> None:
    """What was saved before stays, the context answers on."""

    class FullDisk(Disk):
        def write(self, handle: int, data: memoryview) -> None:
            if os.fstat(handle).st_size + len(data) > 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(handle, data)

    store = ContextStore(tmp_path / "store", disk=FullDisk())
    with pytest.raises(StoreError, match="no room to write") as refused:
        read.save("bergen", store=store)
    assert refused.value.reason == "full"
    assert store.list() == [] and store.verify() == []
    assert answers(read.fork()) == answers(read)


def test_what_was_forgotten(read: ra.Context, loaded: Loaded, store: ContextStore) -> None:
    """A node of its own, though no token came."""
    read.save("whole", store=store)
    fork = read.fork().forget(fork_sinks := read.config.sink, read.num_tokens // 2)
    saved = fork.save("half", store=store)
    assert fork_sinks and saved.digest != store.resolve("whole").digest and saved.new_tokens == 0
    assert answers(opened(loaded, store, "half")) == answers(fork)
    assert answers(opened(loaded, store, "whole")) == answers(read)


def test_a_layer_is_not_ready_while_its_index_is_waited_for() -> None:
    """A save beside the read would take the layer without its index."""
    begun, done = threading.Event(), threading.Event()

    class Work:
        done = False

        def check(self) -> None:
            pass

        def finish(self) -> None:
            begun.set()
            assert done.wait(WAIT_SECONDS)

    layer: Any = ra.RetrievalCache(tiny_model("llama")).layers[0]
    layer._work = Work()
    waiting = threading.Thread(target=layer.finish_index)
    waiting.start()
    assert begun.wait(WAIT_SECONDS) and not layer.check_index()
    done.set()
    waiting.join()
    assert layer.check_index()


@pytest.mark.cuda
def test_opened_on_a_gpu(loaded: Loaded, store: ContextStore, fresh_decoders: None) -> None:
    """Codes on the device, captured steps: the same tokens; and on a CPU, which scans the codes there."""
    model = copy.deepcopy(loaded[0]).to("cuda", torch.bfloat16)
    context = ra.Context(model, loaded[1]).read(needle_text(80_000), progress=False, save="gpu", store=store)
    assert context.cache.index_kinds().keys() == {"device"}
    again = opened((model, loaded[1]), store, "gpu")
    assert again.cache.index_kinds() == context.cache.index_kinds()
    for append in ("exact", "retrieval"):
        one, other = (each.ask(QUESTION, max_new_tokens=24, question_attention=append) for each in (context, again))
        assert one.text == other.text and other.stats.decoded == one.stats.decoded == "graph"
    again.kept.wait()
