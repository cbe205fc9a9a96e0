"""Rows that each have a cache of their own, in one forward: every row is as it would be alone."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention import decode_batch as together
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError, CacheMismatchError, ShapeError
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import forward
from retrieval_attn.runner.rows import RowsFailedError, step
from tests.model.test_hybrid import CONFIGS as HYBRIDS
from tests.model.test_hybrid import new_model
from tests.preloaded import run_preloaded
from tests.tiny_models import CONFIGS, LAYERS, build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled")

BASE: dict[str, Any] = {"sink": 4, "window": 24, "retrieve": 16, "prefill_chunk": 512}
TOLERANCE = 1e-5
GPU_TOLERANCE = 1e-4


def read(model: Any, tokens: int, seed: int, **options: Any) -> RetrievalCache:
    cache = RetrievalCache(model, ra.Config(**{**BASE, **options}))
    feed(model, cache, random_ids(1, tokens, seed).to(model.device))
    return cache


def feed(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits (vocabulary,) after ids (1, n), by this cache alone."""
    start = cache.get_seq_length()
    places = torch.arange(start, start + ids.shape[1])[None].to(ids.device)
    with torch.no_grad(), using_retrieval(model, cache.config.prefill_chunk):
        return forward(model, cache, ids, mask=None, position_ids=places)[0]


class Pair:
    """A row, and the same alone: they get the same tokens."""

    def __init__(self, model: Any, cache: RetrievalCache) -> None:
        self.model, self.row, self.alone = model, cache, cache.fork()
        self.token = 5
        self.offs: list[float] = []
        self.worst, self.tolerance = 0.0, TOLERANCE if model.device.type == "cpu" else GPU_TOLERANCE
        self.seldom: int | None = None
        """Steps that may be off by more than `usual`, within the tolerance; None: any."""
        self.usual = GPU_TOLERANCE
        self.share_off = 0.0
        """What such steps may add to the sum of estimated shares."""

    def allow(self, tolerance: float, seldom: int, usual: float = GPU_TOLERANCE) -> None:
        """From now on, so many steps may be off by more than is usual, within a tolerance: those that name another
        key.
        """
        self.tolerance, self.seldom, self.share_off, self.usual = tolerance, seldom, seldom * tolerance, usual

    def expect(self, logits: torch.Tensor) -> None:
        """After a step of the row that gave `logits`: as alone, and go on with the likeliest token."""
        device = logits.device
        wanted = feed(self.model, self.alone, torch.tensor([[self.token]], device=device))
        off = float((logits - wanted).abs().max() / wanted.abs().max())
        self.worst = max(self.worst, off)
        self.offs.append(off)
        assert self.worst < self.tolerance, self.offs
        if self.seldom is not None and off > self.usual:
            self.seldom -= 1
            assert self.seldom >= 0, self.offs
        assert int(logits.argmax()) == int(wanted.argmax())
        self.token = int(wanted.argmax())

    def crop(self, count: int) -> None:
        self.row.crop(-count)
        self.alone.crop(-count)

    def same_books(self, bytes_off: int = 0) -> None:
        """Lengths, and what the layers have counted, are as alone; bytes_off: of the bytes read, at most."""
        one, other = self.row, self.alone
        assert one.get_seq_length() == other.get_seq_length()
        mine, wanted = one.stats(), other.stats()
        assert mine.keys_scanned == wanted.keys_scanned
        assert abs(mine.bytes_read - wanted.bytes_read) <= bytes_off
        layers: Any = zip(one.layers, other.layers, strict=True)
        for left, right in layers:
            if not hasattr(left, "tail"):
                continue
            assert left.tail.count == right.tail.count
            assert left.tail.means() == pytest.approx(right.tail.means(), abs=1e-5)
            if left.window is not None:
                assert left.window.tail_len == right.window.tail_len


def steps(model: Any, pairs: list[Pair], count: int) -> None:
    for _ in range(count):
        caches = [pair.row for pair in pairs]
        tokens, places = [pair.token for pair in pairs], [cache.get_seq_length() for cache in caches]
        logits = step(model, caches, tokens, places)
        for pair, row in zip(pairs, logits, strict=True):
            pair.expect(row)


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build_model(request.param)


def test_rows_of_every_model_are_as_alone(model: Any) -> None:
    """Lengths below a window and on both sides of long RoPE's boundary; sliding layers, soft cap, learned sinks."""
    pairs = [Pair(model, read(model, tokens, seed)) for seed, tokens in enumerate([20, 60, 150, 700])]
    steps(model, pairs, 12)
    for pair in pairs:
        pair.same_books()


MHA, GQA4, GQA8 = (2, 2, 64), (8, 2, 128), (8, 1, 64)
"""Query heads, key-value heads, head_dim."""


@pytest.mark.parametrize(
    ("index", "heads"),
    [("flat", GQA4), ("auto", GQA8), ("sketch", MHA), ("device", GQA8), ("roargraph", GQA4)],
    ids=lambda one: one if isinstance(one, str) else "x".join(map(str, one)),
)
def test_indexes_and_heads(index: str, heads: tuple[int, int, int]) -> None:
    """Sixty steps of rows of 50 to 6,000 tokens that join, leave and lose tokens at random."""
    q_heads, kv_heads, head_dim = heads
    model = build_model(
        "llama",
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
    )
    lengths = [50, 900, 6000] if index == "flat" else [50, 600, 1500]
    options: dict[str, Any] = {"index": index, "retrieve": 40}
    pairs = [Pair(model, read(model, tokens, seed, **options)) for seed, tokens in enumerate(lengths)]
    pairs.append(Pair(model, pairs[1].row.fork()))  # of one context
    pairs[-1].token = 7
    if index in ("flat", "auto"):  # two of many keys may be as good: see `test_rows_on_a_gpu_are_as_alone`
        for pair in pairs:
            pair.allow(1e-2, 1, usual=TOLERANCE)
    chance = random.Random(f"{index} {heads}")
    for _ in range(60):
        present = [pair for pair in pairs if chance.random() < 0.8] or pairs
        chance.shuffle(present)
        steps(model, present, 1)
        if chance.random() < 0.1:
            chance.choice(pairs).crop(chance.randint(1, 5))
    for pair in pairs:
        # the rest of a code is read if its first part may be among the best: rounding decides for one of 60 steps
        pair.same_books(bytes_off=64 if index == "sketch" else 0)


def test_options_of_each_row() -> None:
    """Rows differ in kind of index, in how many keys they take (some by head), in threads, windows and formats."""
    model = build_model("llama")
    changes: list[dict[str, Any]] = [
        {},
        {"retrieve": "auto"},
        {"retrieve": "auto", "index": "roargraph"},
        {"retrieve": 40},
        {"retrieve": 40, "threads": 1},
        {"retrieve": "all"},
        {"tail": False},
        {"host_dtype": "int8"},
        {"host_dtype": "int8", "index": "sketch"},
        {"sink": 0, "window": 40},
    ]
    pairs = [Pair(model, read(model, 700 + 40 * seed, seed, **options)) for seed, options in enumerate(changes)]
    steps(model, pairs, 12)
    for pair in pairs:
        pair.same_books()


def test_an_error_in_one_row_is_told_of_that_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' logits are right; the broken row's cache is refused, and so are its forks."""
    model = build_model("llama")
    pairs = [Pair(model, read(model, 400 + seed, seed)) for seed in range(4)]
    steps(model, pairs, 2)
    bad = pairs[2]
    (host,) = bad.row.layers[1].hosts  # type: ignore[union-attr]
    real = SequenceKV.parts

    def parts(path: SequenceKV, start: int, stop: int) -> Any:
        if path is host:
            raise BackendError("an injected error")
        return real(path, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceKV, "parts", parts)
        patch.setattr(host, "_changes", host._changes + 1)  # else nobody asks where its tokens lie
        caches = [pair.row for pair in pairs]
        with pytest.raises(RowsFailedError, match="row 2: BackendError: an injected error") as caught:
            step(model, caches, [pair.token for pair in pairs], [cache.get_seq_length() for cache in caches])
    assert list(caught.value.errors) == [2]
    good = [pair for pair in pairs if pair is not bad]
    for pair in good:
        pair.expect(caught.value.logits[pairs.index(pair)])
    with pytest.raises(CacheMismatchError, match="Row 2 failed before"):
        step(model, caches, [5] * 4, [cache.get_seq_length() for cache in caches])
    for cache in (bad.row, bad.row.fork()):
        with pytest.raises(CacheMismatchError, match="cannot be used any more"):
            feed(model, cache, torch.tensor([[5]]))
    steps(model, good, 5)


def test_what_cannot_be_a_row_is_refused_before_anything_happens() -> None:
    model = build_model("llama")
    good, empty = Pair(model, read(model, 100, 0)), RetrievalCache(model, ra.Config(**BASE))
    other = read(build_model("gpt_oss"), 100, 0)
    two = read(model, 100, 0)
    two.batch_repeat_interleave(2)
    for bad, said in ((empty, "0 tokens"), (other, "belong to one model"), (two, "2 sequences"), (good.row, "twice")):
        with pytest.raises(CacheMismatchError, match=f"Row 1 .*{said}"):
            step(model, [good.row, bad], [5, 5], [100, 100])
    with pytest.raises(ShapeError, match="one token and one position"):
        step(model, [good.row], [5, 5], [100])
    assert step(model, [], [], []).shape == (0, 97)
    steps(model, [good], 2)


def test_a_row_past_the_positions_fails_alone() -> None:
    model = build_model("llama", max_position_embeddings=300)
    pairs = [Pair(model, read(model, tokens, 0)) for tokens in (100, 300)]
    with pytest.raises(RowsFailedError, match="row 1: ContextLengthError") as caught:
        step(model, [pair.row for pair in pairs], [5, 5], [100, 300])
    pairs[0].expect(caught.value.logits[0])


def test_a_forward_that_fails_breaks_all_rows() -> None:
    model = build_model("llama")
    caches = [read(model, 100, seed) for seed in range(2)]

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(model, caches, [5, 5], [100, 100])
    handle.remove()
    with pytest.raises(CacheMismatchError, match="Row 0 failed before"):
        step(model, caches, [5, 5], [100, 100])


def test_rows_that_are_left_at_the_end_of_python_say_nothing() -> None:
    """Paths that go when modules are torn down already tell the kept steps of it."""
    code = (
        "from tests.tiny_models import random_ids, tiny_model\n"
        "import torch, retrieval_attn as ra\n"
        "from retrieval_attn.runner.rows import step\n"
        "model = tiny_model('llama')\n"
        "ra.enable(model)\n"
        "caches = [ra.RetrievalCache(model, ra.Config(sink=4, window=24, retrieve=6)) for _ in range(2)]\n"
        "torch.set_grad_enabled(False)\n"
        "for cache in caches:\n"
        "    model(random_ids(1, 100), past_key_values=cache)\n"
        "print(len(step(model, caches, [5, 6], [100, 100])))\n"
    )
    done = run_preloaded(["-c", code], finalizes=True)
    assert done.stdout.strip() == "2" and "Exception" not in done.stderr, done.stderr


def test_a_row_that_is_gone_leaves_no_memory() -> None:
    """The plans of the last step let go of a row's keys with the row."""
    model = build_model("llama")
    pairs = [Pair(model, read(model, 500, seed)) for seed in range(3)]
    steps(model, pairs, 3)
    keys = [weakref.ref(pair.row.layers[0].hosts[0].segments[0].keys.base) for pair in pairs]  # type: ignore[union-attr]
    assert all(key() is not None for key in keys)
    del pairs[0]
    gc.collect()
    assert keys[0]() is None and keys[1]() is not None
    steps(model, pairs, 2)


def test_rows_are_searched_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the worker threads for each layer, also for rows with other budgets for their heads."""
    model = build_model("llama")
    runs: list[int] = []
    real = LayerStep.run

    def run(one: LayerStep) -> Any:
        runs.append(len(one.rows))
        return real(one)

    monkeypatch.setattr(LayerStep, "run", run)
    caches = [read(model, 300 + 50 * seed, seed) for seed in range(4)]
    runs.clear()
    step(model, caches, [5] * 4, [cache.get_seq_length() for cache in caches])
    assert runs == [4] * LAYERS


def test_steps_are_planned_anew_where_rows_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every token: after a spill of a row, a crop, a row more; and the answers are as alone."""
    model = build_model("llama")
    plans: list[int] = []
    real = together.plan_paths

    def plan_paths(one: LayerStep, paths: Any, *args: Any, **kwargs: Any) -> bool:
        plans.append(len(paths))
        return real(one, paths, *args, **kwargs)

    monkeypatch.setattr(together, "plan_paths", plan_paths)
    monkeypatch.setattr(ra.Config, "spill", 16)
    pairs = [Pair(model, read(model, 300 + 50 * seed, seed)) for seed in range(3)]

    def planned(count: int, own: list[Pair]) -> list[int]:
        plans.clear()
        steps(model, own, count)
        return plans

    assert planned(1, pairs) == [3] * LAYERS
    assert planned(14, pairs) == []
    assert planned(2, pairs) == [3] * LAYERS  # the windows were full
    pairs[1].crop(20)  # behind what the host has
    assert planned(1, pairs) == [3] * LAYERS
    assert planned(4, pairs) == []
    pairs[2].crop(2)  # of the window alone
    assert planned(1, pairs) == []
    assert planned(2, pairs[:2]) == [2] * LAYERS
    assert planned(2, pairs) == [3] * LAYERS
    for pair in pairs:
        pair.same_books()


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_rows_of_hybrids_are_as_alone(name: str) -> None:
    """Layers that keep a state: each row has its own, and they leave and join."""
    model = new_model(name)
    pairs = [Pair(model, read(model, tokens, seed)) for seed, tokens in enumerate([40, 150, 300])]
    for present in (pairs, pairs[::-1], pairs[:2], pairs[1:], pairs):
        steps(model, present, 3)
    for pair in pairs:
        pair.same_books()


ALL = 4000
"""More keys than the longest row has."""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("index", "retrieve"), [("flat", 16), ("device", ALL), ("device", 16), ("roargraph", 16), ("auto", 16)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_rows_on_a_gpu_are_as_alone(name: str, index: str, retrieve: int) -> None:
    """A product of matrices rounds rows together as it does not round them alone, by 1e-7. Codes are scored by rounded
    queries: once in some hundred tokens another key is the last that they name, and that token's logits move by 1e-3.
    Where all keys are named, no step may do that.
    """
    model = build_model(name, head_dim=64).cuda()
    lengths = [50, 700, 2500]
    options: dict[str, Any] = {"index": index, "retrieve": retrieve}
    pairs = [Pair(model, read(model, tokens, seed, **options)) for seed, tokens in enumerate(lengths)]
    pairs.append(Pair(model, pairs[1].row.fork()))
    if index == "device" and retrieve < ALL:
        for pair in pairs:
            pair.allow(1e-2, 3)
    for present in (pairs, pairs[:2], pairs[::-1]):
        steps(model, present, 8)
    pairs[1].crop(3)
    steps(model, pairs, 8)
