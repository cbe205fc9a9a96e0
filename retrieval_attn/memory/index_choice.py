"""Choice of index="auto" for given free memory: code size, int8 rows and prefill chunk. Arithmetic only.

`chosen_index` serves a prefill (`memory/device_room.py`), `fitting_index` also `memory/plan.py`. Options are compared
by `search_seconds`, whose rates are those of one H100, its host of 16 cores and PCIe 5: they rank options on other
devices too (docs/archive/log.md, 2026-11-27).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.gpu.codes.host_row_gather import RowShape
from retrieval_attn.index.auto import SKETCH_FROM
from retrieval_attn.index.device import KEY_SHARE, MIN_DEFAULT_BYTES, PLANNED, CodeLayout, named_count
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.device import DEVICE_RESERVE, DeviceSize, state_bytes
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.shape import ModelShape, model_shape
from retrieval_attn.memory.units import show_bytes

SMALLER_CODES = ((6, 3), (5, 4), (4, 6), (3, 12), (2, 16))
"""Codes below the usual size: sixteenths of a byte per dimension, and rescored candidates per retrieved key. Recall of
the best 100 of 131,072 synthetic keys of head_dim 128: .991, .985, .981, .984 and .953 (usual: .994), of a hard head
.97, .96, .93, .92 and .83 (.98)."""
BROUGHT_CODES = 2, 32
"""The same for codes in host memory, which cross the bus for every token: 128K of Llama-3-8B's shape take 15.0 ms with
16 bytes and 1,600 candidates, 18.6 with 24 bytes and 600 (H100, PCIe 5). The 157 keys that finer codes then select hold
.961 and .951 of the best 100."""
FINER_FROM = 6
"""Candidates per retrieved key from which on finer codes are worth their bytes."""
MAX_CANDIDATES = 2048
"""Maximum of candidates per query with finer codes: the GPU's selection fits one program."""


def code_sizes(head_dim: int, wanted: int | None, *, finer: bool = True) -> list[dict[str, int]]:
    """Return options of `CodeLayout` by falling bytes per key, the usual ones (no options) first.

    wanted: keys to retrieve; None: all. finer: add finer codes of the usual size in host memory to layouts with many
    candidates.
    """
    usual = CodeLayout().bytes_for(head_dim)
    smaller = ((_bytes_of(part, head_dim), rescore) for part, rescore in SMALLER_CODES)
    sizes = {
        size: rescore
        for size, rescore in smaller
        if size < usual and wanted is not None and wanted * rescore <= MAX_CANDIDATES
    }
    found: list[dict[str, int]] = [{}]
    for size, rescore in sizes.items():
        found.append({"key_bytes": size, "rescore": rescore})
        if finer and rescore >= FINER_FROM:
            found[-1]["finer_bytes"] = usual
    return found


def brought_size(head_dim: int, wanted: int | None) -> dict[str, int | bool] | None:
    """Return options of a `CodeLayout` with codes in host memory; None: they would need too many candidates.

    wanted: keys to retrieve, with estimates: without them twice as many candidates would be needed.
    """
    part, rescore = BROUGHT_CODES
    if wanted is None or named_count(rescore, wanted, estimated=True) > MAX_CANDIDATES:
        return None
    usual = CodeLayout().bytes_for(head_dim)
    size = min(usual, _bytes_of(part, head_dim))
    finer: dict[str, int | bool] = {"finer_bytes": usual} if size < usual else {}
    return {"key_bytes": size, "rescore": rescore, "codes_on_host": True, **finer}


def _bytes_of(part: int, head_dim: int) -> int:
    """Return the bytes of a code of `part` sixteenths of a byte per dimension, a multiple of 8."""
    return max(MIN_DEFAULT_BYTES, -(-head_dim * part // 128) * 8)


log = logging.getLogger(__name__)
KERNELS_SECONDS = 55e-6
"""Seconds per layer of a captured step, independent of the search."""
SCAN_BYTES = 2.5e12
"""Bytes of codes scanned per second."""
FINER_REQUESTS = 330e6
"""Finer codes of about 64 bytes read over the bus per second."""
ROW_BYTES = 45e9
"""Bytes of int8 rows read over the bus per second."""
HOST_KEYS = 77e6
"""Keys attended per second on the host, without int8 rows."""


def search_seconds(shape: ModelShape, config: Config, tokens: int, batch: int = 1) -> float:
    """Return the seconds of one layer's retrieval from `tokens` tokens of each of `batch` sequences.

    config: options with codes on the device and a number of keys to retrieve.
    """
    spec = IndexSpec.of(config.index, config.index_options)
    sizes = spec.code_shape(shape.key_dim, config.retrieve_count(tokens) or tokens, config.estimates)
    assert sizes is not None
    scanned = shape.kv_heads * tokens * sizes.key_bytes / SCAN_BYTES
    finer = shape.q_heads * sizes.k / FINER_REQUESTS if sizes.kept else 0.0
    named = shape.q_heads * (sizes.kept or sizes.k)
    attended = named * (shape.key_dim + shape.value_dim) / ROW_BYTES if spec.host_reads.rows else named / HOST_KEYS
    return KERNELS_SECONDS + batch * (scanned + finer + attended)


LEAST_CHUNK = 512
"""Tokens of a chunk that `auto` takes: below, reading slows down."""
CHUNKS_FOR_ROWS, WORTH_CHUNKS = 4, 0.8
"""How many chunks may take the place of one for int8 rows, where codes would need finer ones or the host to attend, and
what share of a search's seconds may be left for it: in 24 GiB 128K tokens of Qwen3-32B's shape take 19.4 ms per token
by 40 bytes and such rows in chunks of 2,048, which read them in 53 to 69 s, and 25.4 to 30.4 by 24 bytes, finer ones
and no rows in chunks of 4,096, which take 43 to 53 (H100; docs/archive/log.md, 2026-11-27)."""


def chosen_index(
    model_config: Any,
    config: Config,
    tokens: int,
    free: int | None,
    batch: int = 1,
    *,
    hidden_movable: bool = True,
    finer: bool = True,
    host_free: int = 0,
) -> Config:
    """Return the choice of `fitting_index` for a model of this config, and log it with the reason.

    free: free bytes of device memory; None: unknown, and `config` is returned. hidden_movable: whether the loaded model
    may keep hidden states in host memory during prefill.
    """
    if free is None or not _is_open(config, tokens):
        return config
    try:
        shape = model_shape(model_config, None)
        shape = replace(shape, hidden_movable=shape.hidden_movable and hidden_movable)
    except RetrievalAttentionError as error:
        log.warning("index 'auto' stays on the host: what codes on the device need is not known (%s)", error)
        return config
    coded, needed = fitting_index(shape, config, tokens, free, batch, finer=finer, host_free=host_free)
    if coded is config:
        log.info(
            "index 'auto' for %d tokens: codes of all keys do not fit on the device (reading takes %s with the "
            "smallest codes and chunks, %s is free)",
            tokens,
            show_bytes(needed),
            show_bytes(free),
        )
        return config
    taken = f"; prefill_chunk={coded.prefill_chunk} makes room for them and is taken for this read"
    log.info(
        "index 'auto' for %d tokens: codes of all keys %s, %d bytes each%s (reading takes %s, %s is free)%s",
        tokens,
        "come from the host" if coded.index_options.get("codes_on_host") else "lie on the device",
        CodeLayout(**coded.index_options).bytes_for(shape.key_dim),
        ", which reads int8 rows on the host" if coded.index_options.get("int8_rows") else "",
        show_bytes(needed),
        show_bytes(free),
        "" if coded.prefill_chunk == config.prefill_chunk else taken,
    )
    return coded


def fitting_index(
    shape: ModelShape, config: Config, tokens: int, free: int, batch: int = 1, *, finer: bool = True, host_free: int = 0
) -> tuple[Config, int]:
    """Return `config` with codes for a device if it fits `free` bytes, and the bytes that prefill takes by it.

    If nothing fits, or `config` is not open to a choice, `config` itself is returned, with the bytes of the smallest
    attempt (0: none was tried). Codes of the usual size come first, then smaller ones of which more candidates are
    rescored (`SMALLER_CODES`), with finer codes in host memory if the device reads it (finer). If none fits with
    config.prefill_chunk, the chunk is halved until one does. Int8 rows of all keys and values are added if `host_free`
    bytes of host memory have room for them, which may justify smaller chunks (`CHUNKS_FOR_ROWS`). If no codes fit the
    device, they are stored on the host and cross the bus for every token (`BROUGHT_CODES`).
    """
    if not _is_open(config, tokens):
        return config, 0
    wanted = config.retrieve_count(tokens)
    there = [
        config.replace(index=PLANNED, index_options=size) for size in code_sizes(shape.key_dim, wanted, finer=finer)
    ]
    brought = brought_size(shape.key_dim, wanted) if finer and config.estimates else None
    on_host = [] if brought is None else [config.replace(index=PLANNED, index_options=brought)]
    on_host = [one for one in on_host if _host_bytes(shape, one, tokens, batch) <= host_free]
    has_room = functools.partial(has_room_for_rows, shape, tokens=tokens, host_free=host_free, batch=batch)
    sizes, brought_sizes = (
        [way for one in plain for way in ([with_rows(one), one] if has_room(one) else [one])]
        for plain in (there, on_host)
    )
    takes = functools.partial(_needed, shape, tokens=tokens, batch=batch, free=free)
    found, needed = _first_fitting(_coded_configs(sizes, tokens), takes, free)
    if found is None:
        found, least = _first_fitting(_coded_configs(brought_sizes, tokens), takes, free)
        return found or config, least or needed
    if "int8_rows" in found.index_options and "finer_bytes" not in found.index_options:
        return found, needed
    seconds = functools.partial(search_seconds, shape, tokens=tokens, batch=batch)
    worth = [one for one in sizes if "int8_rows" in one.index_options and seconds(one) <= WORTH_CHUNKS * seconds(found)]
    least_chunk = config.prefill_chunk // CHUNKS_FOR_ROWS
    for by_finer in (False, True):
        some = [one for one in worth if ("finer_bytes" in one.index_options) == by_finer]
        quicker, least = _first_fitting(_coded_configs(some, tokens, least_chunk), takes, free)
        if quicker is not None:
            return quicker, least
    return found, needed


def layout_like(
    shape: ModelShape, config: Config, layout: Config, tokens: int, free: int, batch: int = 1
) -> Config | None:
    """Return `config` with the index of `layout` if a prefill by it fits `free` bytes, else None.

    config.prefill_chunk is halved down to LEAST_CHUNK until it fits.
    """
    coded = config.replace(index=layout.index, index_options=layout.index_options)
    takes = functools.partial(_needed, shape, tokens=tokens, batch=batch, free=free)
    return _first_fitting(_coded_configs([coded], tokens), takes, free)[0]


def reading_bytes(
    shape: ModelShape, config: Config, tokens: int, free: int, batch: int = 1, *, finer: bool = True, host_free: int = 0
) -> int:
    """Return the bytes of GPU memory that a prefill takes by what `fitting_index` chooses for `free` bytes."""
    _, needed = fitting_index(shape, config, tokens, free, batch, finer=finer, host_free=host_free)
    return needed or _needed(shape, config, tokens, batch, free)


def opened_bytes(shape: ModelShape, config: Config, tokens: int) -> int:
    """Return the bytes of GPU memory that a saved context of `tokens` tokens takes once it is opened."""
    return DeviceSize(shape, config, tokens).decode_bytes - _there(shape)


def _first_fitting(configs: Iterable[Config], takes: Callable[[Config], int], free: int) -> tuple[Config | None, int]:
    """Return the first config that fits `free` bytes (None: none does), and the bytes of the last attempt (0: none)."""
    needed = 0
    for coded in configs:
        needed = takes(coded)
        if needed <= free:
            return coded, needed
    return None, needed


def describe_bytes(config: Config, key_dim: int, asked_chunk: int) -> str:
    """Describe the choice of index="auto". asked_chunk: the user's prefill chunk; a different one is mentioned."""
    options = CodeLayout(**config.index_options)
    codes = f"codes of {options.bytes_for(key_dim)} bytes per key"
    parts = [
        f"{codes} on the host, which the bus brings for each token" if options.codes_on_host else f"{codes} on the GPU"
    ]
    if options.finer_bytes:
        parts.append(f"finer codes of {options.finer_bytes} bytes on the host")
    if options.int8_rows:
        parts.append("int8 rows on the host")
    if config.prefill_chunk != asked_chunk:
        parts.append(f"prefill_chunk={config.prefill_chunk}")
    return f'index "auto" takes: {", ".join(parts)}'


def _is_open(config: Config, tokens: int) -> bool:
    """Whether the index of `tokens` tokens is to be chosen."""
    return config.index == "auto" and not config.index_options and tokens >= SKETCH_FROM


def has_room_for_rows(shape: ModelShape, config: Config, tokens: int, host_free: int, batch: int = 1) -> bool:
    """Return True if int8 rows take at most half of the host memory that keys and values leave.

    config: options without int8 rows. Without estimates the host attends, and no rows are kept.
    """
    held, coded = (_host_bytes(shape, one, tokens, batch) for one in (config, with_rows(config)))
    rows = coded - held
    return RowShape(shape.key_dim, shape.value_dim).readable and config.estimates and held + 2 * rows <= host_free


def _host_bytes(shape: ModelShape, config: Config, tokens: int, batch: int) -> int:
    """Return bytes of keys, values and index on the host."""
    size = HostSize(shape, config, batch)
    return size.token_bytes * tokens + size.index_bytes(tokens)


def with_rows(config: Config) -> Config:
    """Return `config` with int8 rows that the device reads."""
    options = {**config.index_options, "int8_rows": True}
    if "key_bytes" not in options or "finer_bytes" in options:
        options["key_share"] = KEY_SHARE
    return config.replace(index_options=options)


def without_rows(config: Config) -> Config:
    """Return `config` without the options that `with_rows` adds."""
    kept = {name: value for name, value in config.index_options.items() if name not in ("int8_rows", "key_share")}
    return config.replace(index_options=kept)


def _coded_configs(sizes: Sequence[Config], tokens: int, least: int = LEAST_CHUNK) -> Iterator[Config]:
    """Yield all `sizes` in order, then again with half of the chunk, down to `least` tokens."""
    yield from sizes
    chunk = min(sizes[0].prefill_chunk, tokens) if sizes else 0
    while (chunk := chunk // 2) >= max(LEAST_CHUNK, least):
        yield from (one.replace(prefill_chunk=chunk) for one in sizes)


def _needed(shape: ModelShape, config: Config, tokens: int, batch: int, free: int) -> int:
    """Return bytes of prefill and decode on top of a loaded model, in the layout that fits `free` best."""
    size = sized(shape, config, tokens, batch, free)
    return max(size.reading_bytes - state_bytes(size)[1], size.decode_bytes) - _there(shape)


def known_shape(model_config: Any) -> ModelShape | None:
    """Return the sizes of a model of this config; None if they are unknown."""
    try:
        return model_shape(model_config, None)
    except RetrievalAttentionError:
        return None


def sized(shape: ModelShape, config: Config, tokens: int, batch: int, free: int) -> DeviceSize:
    """Return sizes in the layout that fits `free` best. States of a captured step do not count during prefill."""
    size = DeviceSize(shape, config, tokens, batch)
    return size.fitting(free + _there(shape) + state_bytes(size)[1])


def _there(shape: ModelShape) -> int:
    """Return bytes that a loaded model has taken already."""
    return shape.weight_bytes + DEVICE_RESERVE
