"""The tail: what a query does not retrieve is estimated, in whole models, against float64 from the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.device_codes import CodedRange, DeviceGather, HostGather
from retrieval_attn.attention.source import TokenRange
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.codes.candidates import LateClusters, StoredRows, attend_late
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.clusters import ClusterBuild
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.offload.page_lock import lock_pages
from tests.attention.tail_reference import Watch, watched
from tests.attention.test_question_uploads import uploads_of
from tests.runner.graph_cases import CONFIG, DEVICE_CASES, Decoded, padded_mask
from tests.tiny_models import QUESTION, Loaded, build_model, needle_text, random_ids

SMALL = ra.Config(sink=4, window=24, retrieve=6, graph=False, tail=True)
PROMPT = 330
INDEXES: dict[str, dict[str, Any]] = {
    "flat": {"index": "flat"},
    # every leaf is looked at, by a byte per number: what it retrieves are the best
    "sketch": {"index": "sketch", "index_options": {"key_bytes": 256}},
    # a byte per number: a code's score is nearly the key's own
    "device": {"index": "device", "index_options": {"key_bytes": 256}},
}
EXACT, CODED, CLIPPED, ROUNDED = 2e-5, 0.004, 0.03, 0.004
"""Largest difference where the host estimates (rounding); where codes and mean values in halves do; where codes hold
keys of a later turn, beyond the range of those they were made for; and where clusters were made of keys and values
before these became int8.
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with watched(monkeypatch) as found:
        yield found


def model_of(family: str, group: int = 3, dim: int = 16) -> Any:
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": dim, "hidden_size": 2 * group * 8}
    model = build_model(family, **heads)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # logits with a deviation above 1, values of about 1: what is wrong shows
            if any(f"{part}_proj.weight" in name for part in "qkv"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (1.5 / parameter.shape[1]) ** 0.5)
    return model


class Session:
    """A cache that is fed tokens, the same ones whatever it holds."""

    def __init__(self, model: Any, config: ra.Config, batch: int = 1, prompt: int = PROMPT, padded: int = 0) -> None:
        self.model, self.fed = model, 0
        ra.enable(model, config)
        self.cache = ra.RetrievalCache(model, config)
        self.mask = padded_mask(batch, prompt, padded).long() if padded else None
        self.batch = batch
        self.feed(prompt)

    def feed(self, tokens: int, times: int = 1) -> Tensor:
        """So many tokens in one forward, `times` times; the last logits."""
        for _ in range(times):
            ids = random_ids(self.batch, tokens, seed=self.fed)
            if self.mask is not None and self.fed:
                self.mask = torch.cat([self.mask, self.mask.new_ones(self.batch, tokens)], dim=1)
            self.fed += 1
            with torch.no_grad():
                logits = self.model(input_ids=ids, past_key_values=self.cache, attention_mask=self.mask).logits
        return logits

    def fork(self) -> Session:
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.cache = self.cache.fork()
        return other


def config_of(index: str, **changes: Any) -> ra.Config:
    return SMALL.replace(**INDEXES[index], **changes)


def tolerance(index: str) -> float:
    return CODED if index == "device" else EXACT


@pytest.mark.parametrize("index", list(INDEXES))
@pytest.mark.parametrize("group,dim", [(1, 64), (4, 128), (8, 256)])
def test_tokens_attend_as_defined(index: str, group: int, dim: int, watch: Watch) -> None:
    session = Session(model_of("llama", group, dim), config_of(index))
    session.feed(1, 2)
    watch.check(tolerance(index))
    assert (watch.named > 0) == (index == "device")


@pytest.mark.parametrize("index", list(INDEXES))
@pytest.mark.parametrize("family,changes", [("gemma2", {}), ("gpt_oss", {}), ("llama", {"host_dtype": "int8"})])
def test_what_leaves_the_window_is_estimated_too(
    family: str, changes: dict[str, Any], index: str, watch: Watch
) -> None:
    """Soft-capped scores, learned sinks, int8 rows; a block of 8 moves to the host twice, and has no codes there."""
    session = Session(model_of(family), config_of(index, **changes))
    session.feed(1, 18)
    assert watch.late >= 8
    watch.check(max(tolerance(index), ROUNDED if "host_dtype" in changes else 0))


@pytest.mark.parametrize("index", ["flat", "device"])
@pytest.mark.parametrize("padded", [5, 310])
def test_padded_rows(index: str, padded: int, watch: Watch) -> None:
    """Rows begin at different columns; with 310 of 330 padded the second has nothing between sinks and window."""
    session = Session(model_of("llama"), config_of(index), batch=2, padded=padded)
    session.feed(1, 10)
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
def test_rows_over_one_context_then_apart(index: str, watch: Watch) -> None:
    session = Session(model_of("llama"), config_of(index))
    session.cache.batch_repeat_interleave(3)
    session.batch = 3
    session.feed(1, 12)
    assert watch.late
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
def test_forks_have_tokens_of_their_own(index: str, watch: Watch) -> None:
    session = Session(model_of("llama"), config_of(index))
    session.feed(1, 9)
    forks = [session.fork(), session.fork()]
    for number, one in enumerate([*forks, session, *forks]):
        one.fed += 100 * number  # tokens that no other has
        one.feed(1, 9)
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
def test_after_a_crop_other_tokens_come(index: str, watch: Watch) -> None:
    """Within the window; past what had left it; into the text. Enough tokens that the new ones leave it in turn."""
    session = Session(model_of("llama"), config_of(index))
    session.feed(1, 20)
    for count in (3, 45, 110):
        session.cache.crop(-count)
        session.feed(1, 42)
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
@pytest.mark.parametrize("exact", [True, False])
def test_follow_up_turns(index: str, exact: bool, watch: Watch) -> None:
    """A short turn joins the index and the clusters, a long one makes them anew; or all its tokens retrieve."""
    session = Session(model_of("llama"), config_of(index, question_attention="exact" if exact else "retrieval"))
    for tokens in (40, 25, *([400] if exact else [])):
        session.feed(tokens)
        session.feed(1, 3)
    watch.check(CLIPPED if index == "device" else EXACT)


@pytest.mark.parametrize("index", list(INDEXES))
def test_everything_retrieved_is_exact(index: str) -> None:
    """Logits as with full attention; with six keys they are not."""
    model = model_of("llama")
    exact, every, few = (Session(model, config_of(index).replace(retrieve=k)).feed(1, 12) for k in ("all", 9_999, 6))
    assert (every - exact).abs().max() < 1e-5 < 1e-3 < (few - exact).abs().max()


@pytest.mark.parametrize("index", list(INDEXES))
def test_nothing_between_sinks_and_window_gives_nothing(index: str, watch: Watch) -> None:
    """Logits are those of full attention while all tokens are sinks or in the window; then the estimate begins."""
    model, logits = model_of("llama"), []
    for config in (config_of(index, retrieve="all"), config_of(index)):
        session = Session(model, config, prompt=20)
        logits.append(session.feed(1, 8))
        assert not watch.steps
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    session.feed(300)
    session.feed(1, 10)
    watch.check(tolerance(index))


@pytest.mark.parametrize("index", ["flat", "device"])
def test_a_context_asked_forked_and_extended(index: str, loaded: Loaded, watch: Watch) -> None:
    """The bundled model; questions through the index."""
    config = ra.Config(sink=8, window=64, retrieve=20, prefill_chunk=512, **INDEXES[index])
    context = ra.Context(*loaded, config).read(needle_text(1_500), progress=False)
    context.ask(QUESTION, max_new_tokens=2, question_attention="retrieval")
    watch.check(tolerance(index))
    fork = context.fork().extend(" The special magic Turin number is: 1112223. ")
    for one in (fork, context):
        one.ask(QUESTION, max_new_tokens=2)
    watch.check(CLIPPED if index == "device" else EXACT)


# -- captured steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["flat", "device", "device padded"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_captured_steps_equal_eager_ones(family: str, case: str, emulated_graphs: None) -> None:
    """Across two spills, two rows; and without the tail logits are others."""
    options = {"prompt": 200, "new": 20, "batch": 2, **DEVICE_CASES.get(case, {})}
    config = options.pop("config", CONFIG)
    model = ra.enable(model_of(family), config)
    eager = Decoded(model, False, config=config.replace(tail=True), **options)
    graphed = Decoded(model, True, config=config.replace(tail=True), **options)
    assert graphed.difference(eager) <= 2e-5 and graphed.steps.replays == options["new"]
    without = Decoded(model, False, config=config.replace(tail=False), **{**options, "new": 1})
    assert (without.logits[1] - eager.logits[1]).abs().max() > 1e-3


# -- the device's estimate, from keys that a test chooses -----------------------------------------------------------

SINKS, K, SCALE, KV_HEADS = 4, 20, 0.125, 2


class Keys(NamedTuple):
    """keys (KV_HEADS, n, dim) and values (KV_HEADS, n, value_dim), float32; queries (q_heads, m, dim) to learn from."""

    keys: Tensor
    values: Tensor
    queries: Tensor


def near_centers(tokens: int, dim: int = 64, group: int = 4, value_dim: int | None = None) -> Keys:
    """Keys about some centers, as a text has them; values go with keys in part."""
    rng = torch.Generator().manual_seed(dim + group)
    value_dim = dim if value_dim is None else value_dim
    centers = torch.randn(KV_HEADS, 40, dim, generator=rng)
    own = torch.randint(40, (KV_HEADS, tokens), generator=rng)
    keys = centers.gather(1, own[:, :, None].expand(-1, -1, dim)) + 0.5 * torch.randn(
        KV_HEADS, tokens, dim, generator=rng
    )
    values = keys @ torch.randn(dim, value_dim, generator=rng) / dim**0.5
    values += torch.randn(KV_HEADS, tokens, value_dim, generator=rng)
    return Keys(keys, values, torch.randn(KV_HEADS * group, 128, dim, generator=rng) * 8 / dim**0.5)


def coded_path(
    given: Keys, tail: int = 100, fmt: Format = Format.FLOAT32, device: str = "cpu", more: int = 0, **options: Any
) -> SequenceKV:
    """A path of these keys with codes and clusters of all but the last `tail`; the last `more` in their own segment."""
    heads, tokens, dim = given.keys.shape
    spec, where = IndexSpec.of("device", options), torch.device(device)
    path = SequenceKV(heads, dim, given.values.shape[2], fmt, index=spec, layer=3).reserve(tokens)
    keys, values = (from_float32(one.numpy(), fmt) for one in given[:2])
    path.append(keys[:, : tokens - more], values[:, : tokens - more])
    if device != "cpu":
        lock_pages(path.segments[0])
    stop = tokens - more - tail
    path.build_index(SINKS, stop, given.queries.numpy(), coder=DeviceCoder(where, heads))
    build = ClusterBuild(where)
    kv = [torch.from_numpy(to_float32(one[:, SINKS:stop], fmt)).to(where) for one in (keys, values)]
    build.add(path, (SINKS, stop), (kv[0], kv[1]), given.queries.to(where))
    if device != "cpu":
        torch.cuda.synchronize()
    build.fetch(None)
    build.place()
    if more:
        path = path.fork()
        path.append(keys[:, -more:], values[:, -more:])
    return path


def coded(path: SequenceKV, k: int = K) -> CodedRange:
    found = CodedRange.of(TokenRange(path, [0], SINKS, len(path)), k, path.spec, True)
    assert found is not None and found.parts.entries is not None
    return found


def on_host(path: SequenceKV, queries: Tensor, softcap: float | None = None) -> Partial:
    """The device names and estimates, the host attends."""
    return HostGather(coded(path), queries, Scoring(SCALE, softcap)).finish()[0]


def by_upload(path: SequenceKV, queries: Tensor, softcap: float | None = None) -> Partial:
    """Keys and values come to the device."""
    uploads = uploads_of(path, device=queries.device.type)
    return DeviceGather(coded(path), queries, uploads, Scoring(SCALE, softcap)).finish()[0]


def full(given: Keys, queries: Tensor, fmt: Format = Format.FLOAT32) -> Partial:
    """Attention to all tokens but the sinks, float64."""
    group = len(queries) // KV_HEADS
    keys, values = (torch.from_numpy(to_float32(from_float32(one.numpy(), fmt), fmt)).double() for one in given[:2])
    keys, values = (one[:, SINKS:].repeat_interleave(group, 0) for one in (keys, values))
    logits = queries.cpu().double() @ keys.transpose(1, 2) * SCALE
    return Partial(logits.softmax(-1) @ values, logits.logsumexp(-1))


def asked(given: Keys, n: int, device: str = "cpu") -> Tensor:
    rng = torch.Generator().manual_seed(n)
    heads, _, dim = given.queries.shape
    return (torch.randn(heads, n, dim, generator=rng) * 8 / dim**0.5).to(device)


def relative(found: Tensor, right: Tensor) -> float:
    """Mean relative error of a head's output."""
    return float(((found.cpu() - right).norm(dim=2) / right.norm(dim=2)).mean())


def check_near_full(dim: int, group: int, fmt: Format, device: str) -> None:
    given = near_centers(2000, dim, group)
    queries = asked(given, 40, device)
    found, right = on_host(coded_path(given, fmt=fmt, device=device), queries), full(given, queries, fmt)
    assert (found.lse.cpu() - right.lse).abs().max() < 0.05
    path = coded_path(given, fmt=fmt, device=device)
    path.clusters = None
    over = CodedRange.of(TokenRange(path, [0], SINKS, len(path)), K, path.spec)
    assert over is not None
    without = HostGather(over, queries, Scoring(SCALE)).finish()[0]
    assert (without.lse.cpu() - right.lse).abs().max() > 0.5
    assert relative(found.out, right.out) < 0.5 * relative(without.out, right.out)


@pytest.mark.parametrize("dim,group", [(64, 8), (128, 4), (256, 1)])
def test_the_mass_is_near_full_attentions(dim: int, group: int) -> None:
    """lse within .05, with half a byte per number."""
    check_near_full(dim, group, Format.FLOAT32, "cpu")


def check_dominating_key(device: str) -> None:
    given = near_centers(1500)
    queries = asked(given, 1, device)
    for query in range(0, len(queries), 4):
        queries[query : query + 4] = queries[query : query + 1]
    best = 700
    for head in range(KV_HEADS):
        direction = queries[4 * head, 0].cpu()
        given.keys[head, best] = 400 * direction / direction.norm()
    found, right = on_host(coded_path(given, device=device), queries), full(given, queries)
    values = given.values[:, best].repeat_interleave(4, 0)[:, None]
    torch.testing.assert_close(found.out.cpu(), values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.lse.cpu().double(), right.lse, rtol=1e-6, atol=1e-5)


def test_one_dominating_key_is_unchanged() -> None:
    check_dominating_key("cpu")


def check_equal_keys(device: str) -> None:
    """A cluster's mean value is that of all its keys, also of those that were named: with m of n keys named, the result
    is off by m / n of the difference of the two means, and by the rounding of a mean value to 8 bits. Where a key's
    place tells nothing of its value, five deviations of a mean of m are enough; the mass is exact.
    """
    given = near_centers(1500)
    given.keys[:] = given.keys[:, :1].clone()
    path, queries = coded_path(given, device=device), asked(given, 3, device)
    found, mean = on_host(path, queries), given.values[:, SINKS:].mean(1).repeat_interleave(4, 0)[:, None].double()
    named = coded(path).shape.room
    difference = 5 * float(given.values.std()) / named**0.5
    off = float((found.out.cpu() - mean).abs().max())
    assert off <= named / (1500 - SINKS) * difference + 2**-8 * float(mean.abs().max())
    logits = queries.cpu().double() @ given.keys[:, :1].double().repeat_interleave(4, 0).transpose(1, 2) * SCALE
    right = logits[:, :, 0] + math.log(1500 - SINKS)
    torch.testing.assert_close(found.lse.cpu().double(), right, rtol=0, atol=1e-4)


def test_equal_keys_give_nearly_the_mean_of_all_values() -> None:
    check_equal_keys("cpu")


def check_upload(group: int, dim: int, fmt: Format, device: str, atol: float, tied: float = 0.0) -> None:
    """Chunks on the host against keys on the device: the same named keys, late ones in two segments."""
    given = near_centers(1200, dim, group, value_dim=dim + 8 if device == "cpu" else dim)
    for more, softcap in ((0, None), (60, 3.0)):
        path = coded_path(given, fmt=fmt, device=device, more=more)
        queries = asked(given, 30 if device == "cpu" else 150, device)
        mine, right = by_upload(path, queries, softcap), on_host(path, queries, softcap)
        torch.testing.assert_close(mine.lse, right.lse, rtol=0, atol=atol)
        apart = ~torch.isclose(mine.out, right.out, rtol=0, atol=atol).all(dim=-1)
        assert float(apart.float().mean()) <= tied


@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16, Format.INT8])
@pytest.mark.parametrize("group,dim", [(1, 64), (4, 64), (8, 128)])
def test_a_question_whose_keys_come_is_answered_the_same(group: int, dim: int, fmt: Format) -> None:
    check_upload(group, dim, fmt, "cpu", 1e-5)


def test_late_tokens_are_those_of_the_hosts_step() -> None:
    """The best of the tokens without codes and the others by their means, on a device as by the host's step."""
    given = near_centers(1200)
    path, queries = coded_path(given, tail=300), asked(given, 30)
    parts = coded(path).parts
    ended, table = 900, parts.table
    assert table is not None and path.clusters is not None and path.clusters.late is not None
    keys, values = (torch.from_numpy(one) for one in path.read(ended, len(path)))
    members = parts.pieces[-1].members
    assert members is not None
    clusters = LateClusters(
        torch.from_numpy(members[:, ended : len(path)].astype(np.int64)), torch.from_numpy(table.means)
    )
    grouped = queries.unflatten(0, (KV_HEADS, -1)).flatten(1, 2)
    found = attend_late(grouped, StoredRows(keys, values), K, clusters, Scoring(SCALE, 2.0))
    other = path.fork()
    other.clusters = path.clusters.late
    expected = attend_path(other, queries.numpy(), ended, len(path), K, scale=SCALE, softcap=2.0)
    torch.testing.assert_close(found.out.reshape(8, 30, -1), torch.from_numpy(expected.out), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.reshape(8, 30), torch.from_numpy(expected.lse), rtol=0, atol=1e-5)


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def whole_float32(fresh_decoders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.INT8])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_both_ways_on_a_gpu(dim: int, group: int, fmt: Format, whole_float32: None) -> None:
    """Near full attention, as on a CPU; a short question and one whose keys come to the device agree."""
    check_near_full(dim, group, fmt, "cuda")
    check_upload(group, dim, fmt, "cuda", 1e-4, tied=2e-3)


@pytest.mark.cuda
def test_chosen_keys_on_a_gpu(whole_float32: None) -> None:
    check_dominating_key("cuda")
    check_equal_keys("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("index", ["flat", "device"])
@pytest.mark.parametrize("group,dim", [(1, 64), (4, 128), (8, 256)])
def test_captured_steps_equal_eager_ones_on_a_gpu(
    group: int, dim: int, index: str, batch: int, whole_float32: None
) -> None:
    """One microbatch or two; blocks leave the window meanwhile.

    A key at the edge of what codes name is attended to or estimated by the last bit of a query: captured steps tip over
    no more than eager ones do whose queries are multiplied by 1 - 2^-22, on the same tokens. A second recording gives
    the same bits.
    """
    config = CONFIG.replace(**INDEXES[index], retrieve=4, tail=True)
    model, nudged = (ra.enable(model_of("llama", group, dim).cuda(), config) for _ in range(2))
    with torch.no_grad():
        for layer in nudged.model.layers:
            layer.self_attn.q_proj.weight.mul_(1 - 2.0**-22)
    options: dict[str, Any] = {"config": config, "prompt": 300, "new": 20, "batch": batch}
    eager, graphed, again = (Decoded(model, graph, **options) for graph in (False, True, True))
    apart = graphed.differences(eager)
    tips = Decoded(nudged, False, follows=eager, **options).differences(eager)
    assert int((apart > 1e-5).sum()) <= max(1, int((tips > 1e-5).sum()))
    assert float(apart.max()) <= max(2e-3, 2 * float(tips.max()))
    assert again.difference(graphed) == 0 and graphed.steps.replays == 20


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", ["auto", "int8"])
@pytest.mark.parametrize("batch", [1, 4])
def test_captured_halves_on_a_gpu(batch: int, fmt: str, whole_float32: None) -> None:
    """A bfloat16 model, rows in bfloat16 and int8: as near to its eager steps as rounding leaves them, or as steps are
    whose query weights are rounded the other way.
    """
    config = CONFIG.replace(**INDEXES["device"], retrieve=4, tail=True, host_dtype=fmt)
    model, nudged = (ra.enable(model_of("llama", 4, 128).to("cuda", torch.bfloat16), config) for _ in range(2))
    with torch.no_grad():
        for layer in nudged.model.layers:
            layer.self_attn.q_proj.weight.mul_(1 - 2.0**-8)
    options: dict[str, Any] = {"config": config, "prompt": 300, "new": 1, "batch": batch}
    eager, graphed, other = (
        Decoded(one, graph, **options) for one, graph in ((model, False), (model, True), (nudged, False))
    )
    apart, tips = ((one.logits[1] - eager.logits[1]).float().abs().max() for one in (graphed, other))
    assert float(apart) <= max(0.02 * float(eager.logits[1].float().abs().max()), float(tips))
