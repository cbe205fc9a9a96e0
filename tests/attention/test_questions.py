"""Questions through the index: any number of tokens, each of which attends to its own best keys in every head.

On a CPU the codes of the index `device` lie on the CPU, too, and PyTorch scans them; the `cuda` twins run the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention import device_codes as coded_part
from retrieval_attn.attention.device_codes import CodedRange, HostGather, QuestionShape
from retrieval_attn.attention.source import TokenRange
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.codes import search as code_search
from retrieval_attn.gpu.codes.search import CodeShape, QueryGroup, SearchScratch
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.codes import DeviceCoder
from tests.cpu.reference import EPS, attention, best_ids
from tests.reference.attention import reference_attention
from tests.tiny_models import QUESTION, Loaded, build_model, needle_text, random_ids

SINKS, TAIL, TOKENS, SCALE, K = 4, 200, 1100, 0.09, 20
KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "sketch": {},
    "roargraph": {},
    "device": {"rescore": 8, "key_bytes": 256},
}
LENGTHS = [1, 7, 8, 33, 128, 200, 1100]


def path_of(
    kind: str, *, kv_heads: int = 2, dim: int = 32, device: str = "cpu", tokens: int = TOKENS, **options: Any
) -> SequenceKV:
    """A path of normal keys and values, indexed but for the last TAIL, which are scanned."""
    rng = np.random.default_rng(0)
    fmt, spec = Format.FLOAT32, IndexSpec.of(kind, KINDS[kind] | options)
    path = SequenceKV(kv_heads, dim, dim, fmt, index=spec, layer=3).reserve(2 * tokens)
    keys, values = (from_float32(rng.standard_normal((kv_heads, tokens, dim), np.float32), fmt) for _ in range(2))
    path.append(keys, values)
    queries = rng.standard_normal((kv_heads, 64, dim), np.float32)
    coder = DeviceCoder(torch.device(device), kv_heads) if kind == "device" else None
    path.build_index(SINKS, tokens - TAIL, queries, coder=coder)
    return path


def oracle(path: SequenceKV, queries: npt.NDArray[np.float32], k: int) -> tuple[Any, Any]:
    """Attention of queries (q_heads, n, dim) to their best k keys, in float64."""
    group = len(queries) // path.num_kv_heads
    keys, values = (to_float32(part, path.fmt) for part in path.read(0, len(path)))
    outs, lses = [], []
    for head, own in enumerate(queries):
        k_head, v_head = keys[head // group][SINKS:], values[head // group][SINKS:]
        taken = np.zeros((len(own), len(k_head)), bool)
        np.put_along_axis(taken, best_ids(own @ k_head.T, min(k, len(k_head))), True, axis=1)
        out, lse = attention(own, k_head, v_head, taken, SCALE)
        outs.append(out)
        lses.append(lse)
    return np.stack(outs), np.stack(lses)


def near_ties(path: SequenceKV, queries: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.bool_]:
    """(q_heads, n): whether the k-th and the next best score are so near that rounding decides which key is taken."""
    group = len(queries) // path.num_kv_heads
    keys = to_float32(path.read(0, len(path))[0], path.fmt)[:, SINKS:].astype(np.float64)
    scores = np.stack([own @ keys[head // group].T for head, own in enumerate(queries.astype(np.float64))])
    best = np.partition(scores, (-k - 1, -k), axis=-1)
    return best[..., -k] - best[..., -k - 1] < 4 * EPS * np.abs(best[..., -1]) * np.sqrt(queries.shape[-1])


def asked(n: int, q_heads: int = 4, dim: int = 32) -> npt.NDArray[np.float32]:
    return np.random.default_rng(n).standard_normal((q_heads, n, dim), np.float32)


def range_of(path: SequenceKV, k: int) -> CodedRange | None:
    """All tokens but the sinks, if codes serve."""
    return CodedRange.of(TokenRange(path, [0], SINKS, len(path)), k, path.spec)


def through_codes(path: SequenceKV, queries: torch.Tensor, k: int) -> tuple[Any, Any]:
    """What a layer does where the device has codes."""
    over = range_of(path, k)
    assert over is not None
    part, _ = HostGather(over, queries, Scoring(SCALE)).finish()
    return part.out.cpu().numpy(), part.lse.cpu().numpy()


def attended(path: SequenceKV, queries: npt.NDArray[np.float32], k: int) -> tuple[Any, Any]:
    """Through the codes where there are some and they serve, else as every kind on the host."""
    if range_of(path, k) is not None:
        return through_codes(path, torch.from_numpy(queries), k)
    found = attend_path(path, queries, SINKS, len(path), k, scale=SCALE)
    return found.out, found.lse


@pytest.fixture(scope="module", params=list(KINDS))
def path(request: pytest.FixtureRequest) -> SequenceKV:
    return path_of(request.param)


@pytest.mark.parametrize("n", LENGTHS)
def test_with_everything_retrieved_a_question_is_exact(path: SequenceKV, n: int) -> None:
    queries = asked(n)
    got, exact = attended(path, queries, TOKENS), oracle(path, queries, TOKENS)
    for mine, right in zip(got, exact, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_question_is_its_tokens_one_by_one(path: SequenceKV, n: int) -> None:
    """A token's keys are its own, whatever comes beside it; of kinds that find the best keys, those are the best."""
    queries = asked(n)
    got = attended(path, queries, K)
    for token in sorted({0, n // 2, n - 1}):
        alone = attended(path, np.ascontiguousarray(queries[:, token : token + 1]), K)
        for mine, other in zip(got, alone, strict=True):
            np.testing.assert_allclose(mine[:, token : token + 1], other, rtol=0, atol=2e-6)
    if path.spec.kind in ("flat", "device"):
        for mine, right in zip(got, oracle(path, queries, K), strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=2e-6)


def test_a_coded_question_goes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, with the last one shorter, and in turns where scores have no room: always the same answer."""
    path, queries = path_of("device"), torch.from_numpy(asked(50))
    expected = through_codes(path, queries, K)
    for most, room in ((8, 512 << 20), (26, 3 * 4 * 4096), (256, 1)):
        monkeypatch.setattr(coded_part, "MOST_QUERIES", most)
        monkeypatch.setattr(coded_part, "LEAST_QUERIES", 1)
        monkeypatch.setattr(code_search, "QUESTION_SCORES", room)
        for mine, other in zip(through_codes(path, queries, K), expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6)


def test_chunks_overlap_and_stay_bounded() -> None:
    """Two chunks where there is enough for two; never more than MOST_QUERIES of a head, one position at least."""
    sizes = [(32, 1, 1), (32, 32, 32), (32, 63, 63), (32, 65, 33), (32, 1024, 128), (8, 1100, 367), (4096, 9, 1)]
    for heads, positions, size in sizes:
        shape = QuestionShape(torch.device("cpu"), heads, 8, 128, 128, Format.BFLOAT16, CodeShape(12, 100))
        assert shape.chunk(positions) == size


def test_turns_cover_every_query_once() -> None:
    for rows, entries, members in ((6, 3, 2), (4, 3, 2), (5, 2, 7), (1, 2, 3), (100, 4, 5)):
        scratch = SearchScratch(rows, 4096, 32, torch.device("cpu"))
        seen = np.zeros((entries, members), int)
        for turn in scratch.turns(entries, members):
            assert isinstance(turn, QueryGroup) and turn.entries * turn.members <= rows
            seen[turn.first_entry : turn.first_entry + turn.entries, turn.first_member :][:, : turn.members] += 1
        assert (seen == 1).all()


def test_a_desk_lets_go_of_the_context() -> None:
    """What is kept for the next question holds no keys and no codes; two questions at once have two desks."""
    path, queries = path_of("device"), torch.from_numpy(asked(40))
    over = range_of(path, K)
    assert over is not None
    coded_part._ChunkBuffers._idle.clear()
    one, other = (HostGather(over, queries, Scoring(SCALE)) for _ in range(2))
    one.begin()
    other.begin()
    assert one._desk is not None and other._desk is not None and one._desk is not other._desk
    desks = one._desk, other._desk
    first, second = one.finish()[0], other.finish()[0]
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
    for desk in desks:
        assert not any(desk.search._search.entries) and not any(slot.step.rows for slot in desk.slots)


def test_an_index_that_names_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is in the error, and the next question finds everything in order."""
    path, queries = path_of("device"), torch.from_numpy(asked(40))
    expected = through_codes(path, queries, K)
    monkeypatch.setattr("retrieval_attn.cpu.step.plan.LayerStep.plan", lambda *given, **options: False)
    with pytest.raises(BackendError, match="layer 3"):
        through_codes(path, queries, K)
    monkeypatch.undo()
    assert np.array_equal(through_codes(path, queries, K)[0], expected[0])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_is_causal_in_the_question(padded: bool, softcap: float | None) -> None:
    """Query i of n sees sinks, the tail before the question and the question up to itself."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 2, 60, 16, generator=generator)
    query = torch.randn(2, 4, 20, 16, generator=generator)
    window = WindowCache(key, value, capacity=60, sinks=4)
    window.append(key[:, :, 4:], value[:, :, 4:], None)
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[0, :2] = not padded
    window.set_sinks(key[:, :, :4], value[:, :, :4], valid[:, :4] if padded else None)
    seen = torch.arange(60) <= torch.arange(40, 60)[:, None]
    mask = seen[None, None] & valid[:, None, None]
    got = window.attend(query, scale=0.3, softcap=softcap)
    exact = reference_attention(query, key, value, scale=0.3, mask=mask, softcap=softcap)
    for mine, right in zip(got, exact, strict=True):
        assert (mine - right).abs().max() < 2e-6


def test_a_long_question_leaves_the_window_as_large_as_it_was() -> None:
    """Breaks if the next decode step finds a window of another size: its graph would be captured anew."""
    model, ids = build_model("llama"), random_ids(1, 700)
    config = ra.Config(sink=4, window=32, retrieve=16, question_attention="retrieval", index="flat")
    ra.enable(model, config)
    cache = ra.RetrievalCache(model, config)
    layers: list[Any] = list(cache.layers)
    with torch.no_grad():
        model(input_ids=ids[:, :300], past_key_values=cache)
        slots = [layer.window.buffers[0].shape[2] for layer in layers]
        model(input_ids=ids[:, 300:], past_key_values=cache)
    ra.disable(model)
    assert [layer.window.buffers[0].shape[2] for layer in layers] == slots
    assert all(layer.window.tail_len == 32 and layer.held.columns == 700 for layer in layers)


@pytest.mark.parametrize("index", ["flat", "device"])
def test_rows_of_a_batch_answer_as_alone(index: str, loaded: Loaded) -> None:
    """Rows over one context, with padding in front of the shorter, longer than the window's tail and not."""
    config = ra.Config(sink=4, window=64, retrieve=24, index=index, question_attention="retrieval")
    config = config.replace(index_options=KINDS["device"] if index == "device" else {})
    context = ra.Context(*loaded, config).read(needle_text(8000), progress=False)
    questions = [QUESTION, needle_text(900)[-700:] + QUESTION, "And the number of the grass?" + QUESTION]
    together = context.ask_many(questions, raw=True, max_new_tokens=6)
    for question, answer in zip(questions, together, strict=True):
        assert answer.tokens == context.ask(question, raw=True, max_new_tokens=6).tokens


@pytest.mark.parametrize("n", [3, 100])
def test_a_model_answers_through_codes_as_through_a_scan(n: int) -> None:
    """The same best keys, so the same logits: of the question's last token, and of those after it."""
    model, ids = build_model("llama"), random_ids(2, 1500 + n)
    found = []
    sizes: dict[str, Any] = {"sink": 4, "window": 32, "retrieve": 16, "tail": False}
    for index, options in (("flat", {}), ("device", {"rescore": 8})):
        config = ra.Config(**sizes, question_attention="retrieval", index=index, index_options=options)
        ra.enable(model, config)
        cache = ra.RetrievalCache(model, config)
        with torch.no_grad():
            model(input_ids=ids[:, :1500], past_key_values=cache)
            parts = [ids[:, 1500:], random_ids(2, 1), random_ids(2, 1)]
            found.append(torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], dim=1))
        ra.disable(model)
    assert (found[0] - found[1]).abs().max() < 2e-4


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or loads, from now on."""
    triton: Any = pytest.importorskip("triton")
    names: list[str] = []

    def note(*, fn: Any, **rest: Any) -> None:
        names.append(str(fn.name))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    yield names


@pytest.mark.cuda
@pytest.mark.parametrize("key_bytes", [None, 256], ids=["few-bytes", "all-bytes"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernels_name_the_best_keys_of_any_question(
    dim: int, group: int, key_bytes: int | None, compiled: list[str]
) -> None:
    """And nothing is compiled after the first question, whatever the length. With few bytes keys are missed."""
    path = path_of("device", dim=dim, device="cuda", tokens=6000, key_bytes=key_bytes)
    device = torch.device("cuda", torch.cuda.current_device())
    through_codes(path, torch.from_numpy(asked(2, 2 * group, dim)).to(device), K)
    before, shares, same = len(compiled), [], []
    for n in (1, 7, 8, 33, 128, 200):
        queries = asked(n, 2 * group, dim)
        got, exact = through_codes(path, torch.from_numpy(queries).to(device), K), oracle(path, queries, K)
        shares.append(np.exp(got[1] - exact[1]).ravel())
        same.append(np.isclose(got[0], exact[0], rtol=0, atol=1e-5).all(axis=-1).ravel())
    captured = np.concatenate(shares)  # of the best keys' weight
    assert captured.max() < 1 + 1e-5 and captured.mean() > (1 - 1e-5 if key_bytes else 0.8)
    if key_bytes:  # 8 bits are not all of a number either: of two keys with nearly one score the other may be taken
        assert np.concatenate(same).mean() > 0.99
    assert compiled[before:] == []


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 256])
def test_a_long_question_on_a_gpu(dim: int) -> None:
    """More chunks than there are slots, and float16 queries: the same as the host alone. Of two keys with one score up
    to rounding either may be taken, and weighs the same.
    """
    path = path_of("device", kv_heads=4, dim=dim, device="cuda")
    queries = torch.from_numpy(asked(1500, 16, dim)).half()
    plain = queries.float().numpy()
    got, exact = through_codes(path, queries.cuda(), K), oracle(path, plain, K)
    tied = near_ties(path, plain, K)
    assert tied.mean() < 1e-3
    np.testing.assert_allclose(got[1], exact[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[0][~tied], exact[0][~tied], rtol=0, atol=1e-5)
