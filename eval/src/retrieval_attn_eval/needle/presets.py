"""The needle grids of the RetrievalAttention paper: lengths, depths, methods and budgets by the figure's name."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_attn.errors import ConfigError

__all__ = ["PRESETS", "Preset", "preset_of"]

_DEPTHS = "0,11,22,33,44,56,67,78,89,100"


@dataclass(frozen=True)
class Preset:
    """A grid as the flags would have it; method_options: METHOD.KEY=VALUE, as of --method-option."""

    title: str
    lengths: str
    depths: str
    methods: str
    rounds: int
    method_options: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {
    "figure5": Preset(
        "section 4.2, Figure 5: retrieval from 4K to 128K", "4k,8k,16k,32k,64k,128k", _DEPTHS, "full,retrieval", 3
    ),
    # "2K" for streaming_llm and snapkv, 640 + 2K for infllm, 640 + top-100 for the indexes (their defaults)
    "figure7": Preset(
        "appendix A.2, Figure 7: the other methods from 4K to 128K",
        "4k,8k,16k,32k,64k,128k",
        _DEPTHS,
        "streaming_llm,snapkv,infllm,flat,ivf",
        3,
        ("streaming_llm.budget=2048", "snapkv.budget=2048", "infllm.budget=2688"),
    ),
    "figure8": Preset(
        "appendix A.3, Figure 8: retrieval from 250K to 1M", "256000,512000,768000,1024000", _DEPTHS, "retrieval", 1
    ),
}


def preset_of(name: str) -> Preset:
    """The preset called "figure5", "5", "Figure 5", ...  Raises ConfigError, with the known ones."""
    folded = name.strip().lower().replace(" ", "").replace("-", "").replace("_", "")
    found = PRESETS.get(folded) or PRESETS.get(f"figure{folded}")
    if found is None:
        raise ConfigError(f"--preset {name!r} is unknown; choose from {', '.join(PRESETS)}")
    return found
