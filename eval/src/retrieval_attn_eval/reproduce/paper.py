"""Numbers of "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval", as data.

Facts of its tables with their place in the paper; accuracies in percent, times in seconds per token.  Where the
printed average is not the average of its row, SLIPS says what it would be; the printed number stays in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CLAIMS", "MODELS", "SLIPS", "TABLES", "Cell", "PaperTable"]

MODELS = ("Llama-3-8B", "Yi-9B", "Yi-6B")

# A number, a pair for two budgets (top-100, top-2000), or a word such as OOM; None where the paper has no number.
Cell = float | tuple[float, float] | str | None


@dataclass(frozen=True)
class PaperTable:
    """rows: model -> method (our names; others as the paper has them) -> one cell per column.

    tokens: the paper's "Act. Tokens" per method.  where: its place in the paper.
    """

    title: str
    where: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, tuple[Cell, ...]]]
    tokens: dict[str, str] = field(default_factory=dict)


_TOKENS = {
    "full": "128K", "streaming_llm": "2K", "snapkv": "2K", "infllm": "640+2K", "infinigen": "2K", "quest": "2K",
    "flat": "640+100", "ivf": "640+100", "retrieval": "640+100",
}  # fmt: skip
_LENGTHS = ("4K", "8K", "16K", "32K", "64K", "128K")

TABLES: dict[str, PaperTable] = {
    "table2": PaperTable(
        "InfiniteBench, percent", "section 4.2, Table 2",
        ("Retr.N", "Retr.P", "Retr.KV", "Code.D", "Math.F", "En.QA", "En.MC", "Avg."),
        {
            "Llama-3-8B": {
                "full": (100.0, 100.0, 17.5, 19.0, 39.5, 9.1, 68.0, 50.4),
                "streaming_llm": (5.0, 5.0, 1.0, 18.5, 40.0, 6.0, 66.0, 20.2),
                "snapkv": (100.0, 100.0, 0.5, 18.0, 40.0, 11.8, 67.0, 48.2),
                "infllm": (100.0, 100.0, 0.5, 20.5, 48.0, 7.0, 37.0, 44.7),
                "infinigen": (99.5, 100.0, 0.0, 17.5, 39.0, 7.3, 57.5, 45.8),
                "quest": (100.0, 100.0, 0.0, 18.0, 40.0, 8.2, 67.0, 47.6),
                "flat": (100.0, 100.0, (8.5, 14.5), 19.0, 40.0, 7.5, 67.0, (48.9, 49.7)),
                "ivf": (94.0, 100.0, (9.5, 14.0), 19.0, 40.0, 7.8, 67.0, (48.2, 48.8)),
                "retrieval": (100.0, 100.0, (9.0, 14.0), 19.0, 40.0, 7.5, 67.0, (48.9, 49.6)),
            },
            "Yi-9B": {
                "full": (100.0, 100.0, 30.5, 25.5, 36.5, 9.8, 67.0, 52.8),
                "streaming_llm": (5.0, 5.0, 0.5, 24.0, 33.5, 6.4, 72.0, 20.9),
                "snapkv": (63.0, 100.0, 0.5, 23.0, 33.0, 10.3, 68.5, 42.6),
                "infllm": (100.0, 100.0, 0.5, 20.5, 43.0, 9.4, 44.0, 45.3),
                "quest": (99.0, 100.0, 0.0, 22.5, 34.5, 10.4, 68.5, 47.8),
                "flat": (100.0, 100.0, (21.0, 30.0), 23.0, 35.0, 10.8, 68.5, (51.2, 52.5)),
                "ivf": (99.0, 100.0, (19.5, 29.5), 23.0, 35.0, 10.7, 69.0, (50.9, 52.3)),
                "retrieval": (99.5, 100.0, (20.0, 30.0), 23.0, 35.0, 9.5, 68.5, (50.8, 52.2)),
            },
            "Yi-6B": {
                "full": (98.0, 100.0, 3.5, 31.0, 11.0, 19.2, 55.5, 45.5),
                "streaming_llm": (5.0, 5.0, 0.5, 27.5, 11.0, 12.2, 54.0, 16.5),
                "snapkv": (39.0, 100.0, 0.0, 30.5, 8.5, 17.1, 55.0, 35.7),
                "infllm": (99.0, 100.0, 0.5, 27.5, 18.0, 12.7, 40.5, 42.6),
                "quest": (98.5, 100.0, 0.0, 30.5, 8.5, 17.3, 54.5, 44.2),
                "flat": (98.5, 100.0, (2.5, 3.0), 30.5, 16.0, 17.7, 54.5, (45.7, 45.7)),
                "ivf": (98.0, 100.0, (2.5, 3.5), 29.5, 16.0, 17.5, 54.5, (45.4, 45.6)),
                "retrieval": (95.0, 99.0, (3.0, 3.0), 30.0, 16.0, 17.6, 54.5, (45.0, 45.0)),
            },
        },
        {**_TOKENS, "flat": "640+100/2K", "ivf": "640+100/2K", "retrieval": "640+100/2K"},
    ),
    "table3": PaperTable(
        "RULER, mean over 13 tasks, percent", "section 4.2, Table 3", (*_LENGTHS, "Avg."),
        {
            "Llama-3-8B": {
                "full": (93.13, 90.49, 89.27, 85.11, 82.51, 78.74, 86.54),
                "streaming_llm": (60.10, 28.77, 20.99, 16.36, 12.52, 11.34, 25.01),
                "snapkv": (91.51, 80.70, 75.53, 70.84, 65.44, 58.68, 73.78),
                "infllm": (85.20, 52.86, 38.29, 32.44, 27.94, 25.71, 43.74),
                "flat": (92.71, 87.93, 87.01, 84.97, 80.99, 74.34, 84.66),
                "ivf": (92.73, 87.86, 87.22, 84.74, 78.46, 68.21, 83.20),
                "retrieval": (92.64, 88.46, 86.80, 84.78, 80.50, 74.70, 84.70),
            },
            "Yi-9B": {
                "full": (91.02, 86.62, 82.85, 73.17, 67.08, 60.51, 76.87),
                "streaming_llm": (57.53, 28.30, 19.08, 13.48, 12.53, 12.81, 23.95),
                "snapkv": (90.39, 75.59, 64.48, 48.70, 39.28, 32.97, 58.57),
                "infllm": (82.66, 50.36, 36.17, 28.20, 22.65, 20.94, 40.16),
                "flat": (91.09, 87.71, 84.42, 74.58, 66.16, 59.50, 77.24),
                "ivf": (91.03, 91.04, 83.85, 72.19, 65.13, 58.04, 76.29),
                "retrieval": (90.78, 86.32, 82.95, 73.73, 65.67, 59.15, 76.43),
            },
            "Yi-6B": {
                "full": (84.52, 77.77, 69.12, 61.64, 58.36, 55.77, 67.86),
                "streaming_llm": (51.66, 24.57, 15.82, 9.70, 9.77, 11.54, 20.51),
                "snapkv": (80.94, 59.55, 45.36, 36.11, 33.43, 29.53, 47.49),
                "infllm": (76.42, 44.38, 34.11, 27.11, 25.28, 25.33, 38.77),
                "flat": (83.69, 77.26, 67.28, 60.58, 57.27, 50.63, 66.12),
                "ivf": (83.25, 76.90, 67.00, 58.94, 55.99, 50.31, 63.33),
                "retrieval": (83.01, 76.56, 67.49, 59.46, 57.20, 51.44, 65.86),
            },
        },
        _TOKENS,
    ),
    "table4": PaperTable(
        "decode, seconds per token, RTX 4090 and i9-10900X", "section 4.3, Table 4", _LENGTHS,
        {
            "Llama-3-8B": {
                "full, no cache": (0.527, 1.167, 2.672, 6.214, 15.263, 43.927),
                "full": ("OOM",) * 6,
                "streaming_llm": (0.029, 0.030, 0.029, 0.030, 0.030, 0.029),
                "snapkv": (0.029, 0.028, 0.028, 0.029, 0.029, 0.028),
                "infllm": (0.058, 0.063, 0.063, 0.065, 0.067, 0.069),
                "flat": (0.140, 0.178, 0.226, 0.328, 0.522, 0.922),
                "ivf": (0.128, 0.140, 0.162, 0.201, 0.253, 0.373),
                "retrieval": (0.137, 0.144, 0.156, 0.162, 0.169, 0.188),
            }
        },
    ),
    "table5": PaperTable(
        "parts of one decoded token at 128K, seconds", "section 4.3, Table 5",
        ("Retrieval", "Attention", "Others", "Total"),
        {
            "Llama-3-8B": {
                "flat": (0.798, 0.083, 0.041, 0.922),
                "ivf": (0.250, 0.084, 0.039, 0.373),
                "retrieval": (0.064, 0.081, 0.043, 0.188),
            }
        },
    ),
    "table8a": PaperTable(
        "decode at 128K, seconds per token, A100 80GB", "appendix A.4, Table 8 (first)",
        ("Yi-6B", "Yi-9B", "Llama-3-8B"),
        {
            "": {
                "full, no cache": (31.61, 47.51, 33.38),
                "full": (0.030, 0.044, 0.033),
                "streaming_llm": (0.032, 0.047, 0.031),
                "snapkv": (0.033, 0.05, 0.033),
                "infllm": (0.069, 0.11, 0.068),
                "flat": (0.541, 0.802, 0.564),
                "ivf": (0.309, 0.468, 0.345),
                "retrieval": (0.150, 0.227, 0.155),
            }
        },
    ),
    "table8b": PaperTable(
        "decode of Llama-3-8B, seconds per token, A100 80GB", "appendix A.4, Table 8 (second)",
        ("100K", "200K", "500K", "1M"),
        {
            "Llama-3-8B": {
                "full, no cache": (25.47, 83.03, 457.0, 1740.0),
                "full": (0.029, 0.046, "OOM", "OOM"),
                "streaming_llm": (0.034, 0.035, 0.032, 0.035),
                "snapkv": (0.035, 0.035, 0.034, 0.034),
                "infllm": (0.082, 0.079, 0.082, 0.084),
                "flat": (0.489, 0.871, 1.92, 3.69),
                "ivf": (0.308, 0.476, 1.032, 1.889),
                "retrieval": (0.159, 0.167, 0.170, 0.172),
            }
        },
    ),
    "table9": PaperTable(
        "RULER at 128K by task, percent", "appendix E, Table 9",
        ("S1", "S2", "S3", "M1", "M2", "M3", "MQ", "MV", "VT", "CW", "FW", "Q1", "Q2", "Avg."),
        {
            "Llama-3-8B": {
                "full": (100.0, 100.0, 100.0, 98.0, 98.0, 73.0, 94.5, 97.0, 87.0, 1.0, 72.2, 58.5, 44.5, 78.7),
                "infinigen": (99.0, 91.5, 24.5, 82.5, 25.0, 0.0, 30.3, 27.8, 67.3, 1.2, 45.5, 33.0, 32.5, 43.1),
                "quest": (100.0, 100.0, 98.5, 98.5, 36.5, 0.0, 48.9, 64.3, 89.4, 1.0, 64.5, 45.0, 39.5, 60.5),
                "retrieval": (100.0, 100.0, 100.0, 99.0, 98.0, 45.0, 92.8, 93.0, 88.0, 1.1, 49.3, 60.5, 44.5, 74.7),
            }
        },
        _TOKENS,
    ),
    "table10": PaperTable(
        "InfiniteBench with a budget per layer, mean 2,000 tokens, percent", "appendix F, Table 10",
        ("Retr.N", "Retr.P", "Retr.KV", "Code.D", "Math.F", "En.QA", "En.MC", "Avg."),
        {
            "Llama-3-8B": {
                "full": (100.0, 100.0, 17.5, 19.0, 39.5, 9.1, 68.0, 50.4),
                "retrieval": (100.0, 100.0, 14.5, 18.5, 40.0, 8.7, 67.5, 49.9),
                "retrieval, budget per layer": (100.0, 100.0, 16.0, 18.5, 40.0, 8.5, 67.5, 50.1),
            }
        },
    ),
    "table11": PaperTable(
        "key-value retrieval with Llama-3-70B-262k on eight A100 40GB: percent, seconds per token",
        "appendix G, Table 11", ("Accuracy", "Decoding latency"),
        {
            "Llama-3-70B": {
                "full": (35.0, 248.0),
                "streaming_llm": (0.0, 0.14),
                "quest": (13.0, 1.36),
                "flat": (24.0, 5.68),
                "retrieval": (23.5, 1.62),
            }
        },
    ),
}  # fmt: skip

# (table, model, method, column): what the printed number would be if it were the mean of its row.
SLIPS: dict[tuple[str, str, str, str], float] = {
    ("table3", "Llama-3-8B", "retrieval", "Avg."): 84.65,
    ("table3", "Yi-9B", "ivf", "Avg."): 76.88,
    ("table3", "Yi-6B", "ivf", "Avg."): 65.40,
}

# What the text and the figures say, where there is no table.
CLAIMS: dict[str, tuple[str, str]] = {
    "figure2": (
        "section 2.3, Figure 2",
        "top-1000 keys hold 89 % of attention when chosen for every token, 71 % when kept from the first one",
    ),
    "figure3": (
        "section 2.4, Figure 3",
        "recall@100 of 0.95 takes IVF 30-50 % of the keys for queries and 1-5 % for keys as queries; HNSW stops in a"
        " local optimum; queries lie more than 10 times as far from the keys as keys do",
    ),
    "figure5": ("section 4.2, Figure 5", "RetrievalAttention finds the needle at every depth from 4K to 128K"),
    "figure6": (
        "section 4.4, Figure 6",
        "recall above 0.95 after 1-3 % of the keys with RetrievalAttention; IVF, HNSW and RobustVamana need far more",
    ),
    "figure7": (
        "appendix A.2, Figure 7",
        "StreamingLLM finds the needle only within its static pattern, InfLLM less as the length grows; SnapKV, Flat"
        " and IVF do well",
    ),
    "figure8": ("appendix A.3, Figure 8", "Llama-3-8B-1048K finds every needle from 250K to 1M"),
}
