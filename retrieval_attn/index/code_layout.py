"""Options of an index whose codes a device reads: those of a user, and the layout that `auto` chooses."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.flat import check_rescore
from retrieval_attn.index.sketch.index import RESCORE, check_key_bytes

PLANNED = "device-auto"
"""Kind of index that `auto` chooses if codes are read by a device."""
KEY_SHARE = 0.25
"""Share of the named keys whose int8 rows a device reads, if the user asks for such rows or codes have the usual size.
KL to full attention then equals that with all of them read: 3.90e-4 and 3.68e-4 nats (prose), 5.16e-3 and 5.12e-3
(code), of the bundled model. Codes of five eighths of that size are more than twice as noisy, 6.3e-4 and 3.8e-4
(docs/archive/log.md, 2026-11-27): with those, `auto` reads all keys. Several long texts on one GPU need the share."""
MIN_DEFAULT_BYTES = 16
"""Bytes per key that small heads get if nothing is said."""


@dataclass(frozen=True)
class CodeLayout:
    """Where codes of a head's keys are stored and how many keys they name. `auto` chooses it by the free memory.

    key_bytes, rescore, int8_rows: see `DeviceOptions`. finer_bytes: bytes per key of finer codes in host memory, by
    which fewer keys are named; 0: none. key_share: of the int8 rows that the device reads, the share whose keys are
    read too, the best by their codes; of the others it reads values, and codes give their weight. codes_on_host: codes
    are stored in host memory as well, and the bus brings all of them to the device for every token, those of the next
    layer during the computation of one.

    Raises ConfigError for other values.
    """

    key_bytes: int | None = None
    rescore: int = RESCORE
    finer_bytes: int = 0
    int8_rows: bool = False
    key_share: float = 1.0
    codes_on_host: bool = False

    def __post_init__(self) -> None:
        check_key_bytes(self.key_bytes)
        check_rescore(self.rescore)
        if self.finer_bytes:
            check_key_bytes(self.finer_bytes)
            if self.key_bytes is None or self.finer_bytes <= self.key_bytes:
                raise ConfigError(f"finer_bytes={self.finer_bytes} must be more than key_bytes={self.key_bytes}")
        for name in ("int8_rows", "codes_on_host"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        share = self.key_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"key_share must be more than 0 and at most 1, got {share!r}")

    @property
    def layout(self) -> CodeLayout:
        """The layout itself: options of a layout and of a user are read in one way."""
        return self

    def bytes_for(self, head_dim: int) -> int:
        """Bytes per key, at most one per number."""
        value = max(MIN_DEFAULT_BYTES, head_dim // 2) if self.key_bytes is None else int(self.key_bytes)
        return min(value, head_dim)

    def finer_for(self, head_dim: int) -> int:
        """Bytes per key of finer codes; 0: there are none, or others tell as much."""
        value = min(int(self.finer_bytes), head_dim)
        return value if value > self.bytes_for(head_dim) else 0


@dataclass(frozen=True)
class DeviceOptions:
    """key_bytes: bytes of codes per key, at least 8; None: head_dim / 2, at least 16. rescore: keys named by codes per
    key wanted. int8_rows: the host stores keys and values once more, as int8 rows, which the device reads in captured
    steps instead of the host attending; with estimates alone (`Config.tail`). It reads the keys of a KEY_SHARE of them.

    Raises ConfigError for other values.
    """

    key_bytes: int | None = None
    rescore: int = RESCORE
    int8_rows: bool = False

    def __post_init__(self) -> None:
        assert self.layout is not None  # it checks the values

    @property
    def layout(self) -> CodeLayout:
        """Codes on the device."""
        return CodeLayout(self.key_bytes, self.rescore, int8_rows=self.int8_rows, key_share=KEY_SHARE)


Laid = DeviceOptions | CodeLayout
"""Options of the two kinds below."""
