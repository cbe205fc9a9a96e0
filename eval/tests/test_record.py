"""What is recorded is what the model's attention used, checked against transformers' own eager attention and cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from eval.tests.shared import parsed
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError, UnsupportedModelError
from retrieval_attn.index.formats import to_float32
from retrieval_attn.model.rotation import Rotation
from retrieval_attn_eval.recording import command as record_command
from retrieval_attn_eval.recording.files import Recording
from retrieval_attn_eval.recording.options import RecordOptions
from retrieval_attn_eval.recording.record import record
from tests.tiny_models import config_of, random_ids, tiny_model

CONTEXT, AFTER = 70, 9


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in random_ids(1, CONTEXT + AFTER)[0]]


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2"])
def test_recorded_queries_and_keys_make_the_models_attention(name: str, ids: list[int]) -> None:
    """softmax(scale q.k) over the recorded keys equals eager attention over them; keys and values equal its cache's."""
    model: Any = tiny_model(name)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        eager = model(torch.tensor([ids]), output_attentions=True, past_key_values=cache, use_cache=True)
    found = record(model, ids[:CONTEXT], ids[CONTEXT:], RecordOptions(train=30, storage="float32", chunk=16))
    assert model.config._attn_implementation == "eager"
    full = [i for i, kind in enumerate(_layer_types(model)) if kind == "full_attention"]
    assert [(head.layer, head.kv_head) for head in found.heads] == [(layer, h) for layer in full for h in (0, 1)]
    for head in found.heads:
        layer: Any = cache.layers[head.layer]
        for recorded, cached in ((head.keys, layer.keys), (head.values, layer.values)):
            np.testing.assert_allclose(recorded, cached[0, head.kv_head, :CONTEXT].numpy(), atol=2e-5)
        for g in range(3):
            wanted = eager.attentions[head.layer][0, 3 * head.kv_head + g, :, :CONTEXT].double().numpy()
            for queries, places in ((head.decode, head.decode_positions), (head.train, head.train_positions)):
                logits = head.scale * queries[g].astype(np.float64) @ head.keys.T.astype(np.float64)
                cap = getattr(model.config, "attn_logit_softcapping", None)
                logits = np.tanh(logits / cap) * cap if cap else logits
                logits[places[:, None] < np.arange(CONTEXT)] = -np.inf
                weights = np.exp(logits - logits.max(1, keepdims=True))
                seen = wanted[places]
                np.testing.assert_allclose(
                    weights / weights.sum(1, keepdims=True), seen / seen.sum(1, keepdims=True), atol=2e-5
                )
    assert found.heads[0].decode_positions.tolist() == list(range(CONTEXT, CONTEXT + AFTER))
    assert found.meta["tokens"] == CONTEXT and found.meta["after"] == AFTER


def _layer_types(model: Any) -> list[str]:
    return list(getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers)


@pytest.mark.parametrize("name", ["llama", "llama31", "yi", "qwen3", "phi3"])
def test_moved_queries_are_what_the_model_asks_at_the_new_position(name: str, ids: list[int]) -> None:
    """In layer 0 a query depends on its token and position only: moved to the end, it equals the token's query there.

    The models cover plain, llama-3 and long RoPE (whose tables depend on the length) and query norms.
    """
    model: Any = tiny_model(name)
    token = ids[20]
    after = [token, 5, token]
    found = record(
        model, ids[:CONTEXT], after, RecordOptions(layers=[0], train=CONTEXT, storage="float32", chunk=32, span=3)
    )
    for head in found.heads:
        assert head.train_rotated is not None
        assert set(head.train_targets) == {CONTEXT, CONTEXT + 1, CONTEXT + 2}
        at = [i for i, place in enumerate(head.train_positions) if ids[place] == after[head.train_targets[i] - CONTEXT]]
        assert at
        for i in at:
            wanted = head.decode[:, head.train_targets[i] - CONTEXT]
            np.testing.assert_allclose(head.train_rotated[:, i], wanted, atol=1e-4 * np.abs(head.decode).max())
            assert np.abs(head.train[:, i] - wanted).max() > 0.01


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("cohere", {}),  # interleaved pairs
        ("glm", {"partial_rotary_factor": 0.5, "head_dim": 16}),  # interleaved, half of the elements
        ("stablelm", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ],
)
def test_other_pair_layouts(model_type: str, options: dict[str, Any]) -> None:
    """Moving 3 -> 50 -> 11 equals moving 3 -> 11, and inner products with keys moved alike stay as they were."""
    config = config_of(
        model_type, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, pad_token_id=0, **options,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    rotation = Rotation.of(model, model.model.layers[0].self_attn)
    vectors = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    start = torch.full((6,), 3)
    far = rotation.move(vectors, start, 50)
    assert not torch.allclose(far, vectors, atol=0.1)
    back = rotation.move(far, torch.full((6,), 50), 11)
    torch.testing.assert_close(back, rotation.move(vectors, start, 11), atol=1e-4, rtol=0)
    torch.testing.assert_close(far @ far.mT, vectors @ vectors.mT, atol=1e-3, rtol=0)
    assert rotation.move(vectors[:, :0], start[:0], 9).shape == (2, 0, 16)


def test_a_model_without_rotation_says_so() -> None:
    """Absolute positions cannot be moved: no guess is made."""
    config = config_of("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="rotary_emb"):
        Rotation.of(model, model.transformer.h[0].attn)


def test_what_is_kept_can_be_chosen(ids: list[int]) -> None:
    """Only the named layers and heads; wrong ones are named before anything runs."""
    model: Any = tiny_model("llama")
    found = record(model, ids[:CONTEXT], ids[CONTEXT:], RecordOptions(layers=[1], kv_heads=[1], train=0, chunk=512))
    assert [(head.layer, head.kv_head) for head in found.heads] == [(1, 1)]
    head = found.heads[0]
    assert head.train.shape == (3, 0, 16) and head.train_rotated is not None and head.train_rotated.shape == (3, 0, 16)
    assert head.keys.dtype == np.uint16
    mistakes: list[dict[str, Any]] = [
        {"layers": [2]},
        {"kv_heads": [2]},
        {"train": -1},
        {"layers": []},
        {"chunk": 0},
        {"span": 0},
    ]
    for wrong in mistakes:
        with pytest.raises(ConfigError):
            record(model, ids[:CONTEXT], ids[CONTEXT:], RecordOptions(**wrong))
    with pytest.raises(InputDataError):
        record(model, [], ids)
    with pytest.raises(ConfigError):
        record(tiny_model("gemma3"), ids[:CONTEXT], ids[CONTEXT:], RecordOptions(layers=[0]))


def test_a_recording_survives_the_disk(tmp_path: Path, ids: list[int]) -> None:
    """Keys, values and decode queries bit for bit, training queries rounded to the keys' format."""
    found = record(tiny_model("llama"), ids[:CONTEXT], ids[CONTEXT:], RecordOptions(layers=[0], train=20))
    found.save(tmp_path / "new")
    loaded = Recording.load(tmp_path / "new")
    assert loaded.meta == found.meta
    for one, other in zip(loaded.heads, found.heads, strict=True):
        for name in ("keys", "values", "decode", "train_positions", "train_targets", "decode_positions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.name, one.fmt, one.scale) == (other.name, other.fmt, other.scale)
        np.testing.assert_allclose(one.train, other.train, rtol=2**-8)
        assert one.train_rotated is not None and one.train_rotated.dtype == np.float32
    assert len(Recording.load(tmp_path / "new", limit=1).heads) == 1
    with pytest.raises(InputDataError, match="empty"):
        found.save(tmp_path / "new")


def test_damaged_recordings_are_named(tmp_path: Path, ids: list[int]) -> None:
    """No folder, no description, another version, a cut or missing file: never a traceback of numpy's."""
    record(tiny_model("llama"), ids[:CONTEXT], ids[CONTEXT:], RecordOptions(layers=[0], kv_heads=[0], train=3)).save(
        tmp_path
    )
    meta, head = tmp_path / "meta.json", tmp_path / "layer0_head0.npz"
    good_meta, good_head = meta.read_text(), head.read_bytes()
    for text in ("", "[]", "{}", json.dumps({**json.loads(good_meta), "version": 99})):
        meta.write_text(text)
        with pytest.raises(InputDataError, match="meta.json"):
            Recording.load(tmp_path)
    meta.write_text(good_meta)
    for data in (b"", good_head[:200], good_head[: len(good_head) // 2], b"\x00" * 500):
        head.write_bytes(data)
        with pytest.raises(InputDataError, match="layer0_head0"):
            Recording.load(tmp_path)
    np.savez(head, keys=np.zeros((1, 4), np.uint16))
    with pytest.raises(InputDataError, match="lacks"):
        Recording.load(tmp_path)
    with pytest.raises(InputDataError, match="record"):
        Recording.load(tmp_path / "nowhere")


def command(*flags: str) -> int:
    return record_command.run(parsed(record_command, *flags))


def test_the_command_records_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer of a short context, its question and answer as decode queries."""
    flags = ("--tokens", "700", "--layers", "0", "--output-dir", str(tmp_path / "out"))
    assert command(*flags, "--dry-run") == 0
    assert "1 layers x 2 key-value heads" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert command(*flags) == 0
    found = Recording.load(tmp_path / "out")
    assert [head.name for head in found.heads] == ["layer0_head0", "layer0_head1"]
    head = found.heads[0]
    assert 600 < len(head.keys) <= 700 and head.decode.shape[1] > 20 and head.decode.shape[0] == 4
    assert found.meta["model"] == "bundled" and found.meta["task"] == "niah_multikey_1"
    assert np.isfinite(to_float32(head.keys, head.fmt)).all()
    with pytest.raises(InputDataError, match="empty or new"):
        command(*flags)


def test_the_command_reads_a_text(tmp_path: Path) -> None:
    """The text's last 64 tokens are what comes after the context."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    where = ("--output-dir", str(tmp_path / "out"), "--layers", "1")
    assert command("--haystack", str(tmp_path / "text.txt"), "--tokens", "300", *where) == 0
    head, _ = Recording.load(tmp_path / "out").heads
    assert (head.layer, head.kv_head, len(head.keys), head.decode.shape[1]) == (1, 0, 300, 64)


@pytest.mark.parametrize("flags", ["--tokens 0", "--layers x", "--layers -1", "--tokens 5", "--model no/such/folder"])
def test_bad_flags_are_one_line(flags: str, tmp_path: Path) -> None:
    """Every mistake is an error of this package, which the command line prints in one line."""
    with pytest.raises(RetrievalAttentionError):
        command(*flags.split(), "--output-dir", str(tmp_path / "out"))
