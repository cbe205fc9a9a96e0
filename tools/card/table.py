"""The measures that a card owes, in the order in which they are worth its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.card.measure import Goal, Measure, decode_rate, of_row, ratio, value

__all__ = ["measures"]

TINY = ("--shape", "tiny", "--random-ids", "--device", "cpu", "--threads", "1")
"""In place of a shape, with lengths divided by SMALLER: whether a command works, here and now."""
SMALLER = 64
TEST_SECONDS = 480
TESTS = {"that passed": "passed", "that were skipped": "skipped", "that were not reached": "not_reached"}


def measures(*, tiny: bool = False, tests: Sequence[str] = ()) -> list[Measure]:
    """tiny: the same commands for a processor, some seconds each. tests: of those marked cuda, these alone."""

    def length(tokens: int) -> str:
        return str(max(48, tokens // SMALLER) if tiny else tokens)

    def few(count: int, most: int = 4) -> str:
        return str(min(count, most) if tiny else count)

    def model(shape: str, *more: str) -> Sequence[str]:
        return TINY if tiny else ("--shape", shape, "--random-ids", *more)

    def serve(name: str, goals: Sequence[Goal], seconds: float, setting: str, *flags: str) -> Measure:
        arguments = ("bench", "serve", *flags, "--timeout", str(round(seconds)), "--no-plot")
        return Measure(
            name, "retrieval_attn.cli", arguments, "--output-dir", "serve.json", goals, seconds, setting + SIMPLE
        )  # fmt: skip

    def script(name: str, goals: Sequence[Goal], seconds: float, setting: str, *flags: str) -> Measure:
        return Measure(name, f"tools.card.{name}", flags, "--out", "found.json", goals, seconds, setting + SIMPLE)

    def four_bits(name: str, shape: str, bound: float, seconds: float) -> Measure:
        small = "tiny-hybrid" if "hybrid" in name else "tiny"
        flags = ("--shape", small, "--device", "cpu", "--threads", "1", "--emulate") if tiny else ("--shape", shape)
        return Measure(
            name, "tools.card.int4",
            (*flags, "--lengths", "256,512" if tiny else "4k,128k", "--tokens", few(64, 8)), "--out", "found.json",
            [
                Goal("a token of 128K, kernels", "ms", token_ms("kernels", -1), bound, least=False),
                Goal("a token of 128K, modules", "ms", token_ms("modules", -1)),
                Goal("a token of 4K without search, kernels", "ms", token_ms("kernels", 0)),
                Goal("a token of 4K without search, modules", "ms", token_ms("modules", 0)),
                Goal("the read of 128K", "s", read_seconds),
                *([] if tiny else [Goal("most of the card", "GiB", value("card_gib"), 24, least=False)]),
            ],
            seconds, f"weights in 4 bits by torchao, a cap of 24 GiB: the third answer of 64 tokens{SIMPLE}",
        )  # fmt: skip

    def relay(name: str, shape: str, bound: float) -> Measure:
        return serve(
            name, [over("tree-off", bound), *rates("engine", "tree-off")], 150,
            "2K in pages for 64 requests with 128 tokens of their own, answers of 128, 32 slots; reading "
            "counts",
            *model(shape), "--workload", "document", "--n", few(64, 6), "--max-num-seqs", few(32, 3),
            "--length", length(2048), "--question", few(128, 16), "--tokens", few(128), "--paged-prefix-tokens", "4k",
            "--systems", "engine,tree-off",
        )  # fmt: skip

    one_text: Sequence[str] = (
        "--workload",
        "document",
        "--n",
        few(16),
        "--max-num-seqs",
        few(16),
        "--length",
        length(131072),
    )
    one_text = (*one_text, "--question", few(32, 8), "--read-first", "--systems", "engine")
    while_all = "tokens a second while all decode"
    return [
        Measure(
            "cuda_tests", "tools.card.tests",
            ("--marker", "not cuda", "--processes", "1", "--seconds", "60", "tests/store/test_tiers.py") if tiny
            else ("--seconds", str(TEST_SECONDS), *tests),
            "--out", "found.json",
            [
                Goal("tests that failed", "", value("bad"), 0, least=False),
                *(Goal(f"tests {text}", "", value(name)) for text, name in TESTS.items()),
            ],
            TEST_SECONDS + 20, "tests marked cuda, side by side over one card, as many as time allows",
        ),
        serve(
            "document_exact",
            [Goal(while_all, "tokens/s", decode_rate("engine"), 700), *rates("engine"), *first("engine")], 90,
            "16 questions of 32 tokens on one text of 128K that was read before, in bfloat16 pages, answers of 256",
            *model("llama-3-8b"), *one_text, "--tokens", few(256, 48), "--paged-prefix-tokens", "132k",
        ),
        serve(
            "document_index",
            [Goal(while_all, "tokens/s", decode_rate("engine"), 400), *rates("engine"), *first("engine")], 100,
            "the same through the index, keys on the host in int8",
            *model("llama-3-8b"), *one_text, "--tokens", few(256, 48), "--host-dtype", "int8",
        ),
        script(
            "beside",
            [
                Goal("p99 from token to token", "ms", value("gap_ms", "p99"), 60, least=False),
                *(Goal(f"{name} from token to token", "ms", value("gap_ms", name)) for name in ("p50", "p90", "max")),
                Goal("p50 from token to token before", "ms", value("alone_ms", "p50")),
                Goal("the read", "s", value("read_seconds")),
            ], 100,
            "three rows of 16K that decode while 128K tokens are read, told 60 ms from token to token, int8",
            *model("llama-3-8b"), *(() if tiny else ("--host-dtype", "int8")),
            "--row-length", length(16384), "--length", length(131072), "--tokens", "900" if tiny else "6000",
        ),
        script(
            "steps",
            [
                Goal("p50 between two replays", "ms", value("gap_ms", "p50"), 1.0, least=False),
                Goal("p99 between two replays", "ms", value("gap_ms", "p99")),
                Goal("drawing, p50", "ms", value("draw_ms", "p50"), 0.3, least=False),
                Goal("drawing with top-k and top-p, p50", "ms", value("sampled_draw_ms", "p50"), 0.3, least=False),
                Goal("a step, p50", "ms", value("step_ms", "p50")),
            ], 110,
            "32 rows of 2K, from a replay's end to the next one's launch; drawing: its graph alone, launch included",
            *model("llama-3-8b"), *(("--emulate",) if tiny else ()), "--rows", few(32), "--length", length(2048),
            "--tokens", few(64, 24),
        ),
        relay("relay_8b", "llama-3-8b", 1.3),
        relay("relay_7b", "llama-2-7b", 2.0),
        serve(
            "short_prompts", [over("transformers", 1.0), *rates("engine", "transformers")], 90,
            "64 requests of 128 to 512 tokens, answers of 10 to 102, 32 slots; reading counts",
            *model("llama-3-8b"), "--workload", "mixed", "--n", few(64, 6), "--max-num-seqs", few(32, 3),
            "--length", few(512, 128), "--scale", "0.02" if tiny else "0.1", "--systems", "engine,transformers",
        ),
        serve(
            "static_batches",
            [
                over("static", 2.0), *rates("engine", "static"),
                Goal("slots filled, engine", "", of_row("engine", "filled"), 0.95),
                Goal("slots filled, static", "", of_row("static", "filled")),
            ], 150,
            "160 requests of 128 to 512 tokens, answers of 50 to 512 (uniform), 32 slots; reading counts",
            *model("llama-3-8b"), "--workload", "mixed", "--n", few(160, 9), "--max-num-seqs", few(32, 3),
            "--length", few(512, 128), "--scale", "0.02" if tiny else "0.5", "--systems", "engine,static",
        ),
        script(
            "over_http",
            [
                Goal("over HTTP beside in process", "", value("ratio"), 0.95),
                Goal("over HTTP", "tokens/s", value("tokens_per_second", "http")),
                Goal("in process", "tokens/s", value("tokens_per_second", "engine")),
            ], 150,
            "32 streams of short prompts, answers of 128; a saved model with random weights, vocabulary cut to that of "
            "the bundled tokenizer; the clients' work counts against HTTP",
            *(("--shape", "tiny", "--device", "cpu") if tiny else ("--shape", "llama-3-8b")),
            "--streams", few(32, 3), "--tokens", few(128, 16), "--repeats", few(3, 1),
        ),
        serve(
            "shared_16k", [over("tree-off", 5.0), *rates("engine", "tree-off")], 240,
            "16K in pages for 256 requests with 32 tokens of their own, answers of 128, 256 slots; 8 of 32 layers; "
            "reading counts",
            *model("llama-3-8b", "--layers", "8"), "--workload", "document", "--n", few(256, 6),
            "--max-num-seqs", few(256, 3), "--length", length(16384), "--question", few(32, 8), "--tokens", few(128),
            "--paged-prefix-tokens", "20k", "--systems", "engine,tree-off",
        ),
        serve(
            "eight_texts",
            [
                Goal(while_all, "tokens/s", decode_rate("engine"), 280), *rates("engine"),
                Goal("prompts' tokens that were not read again", "", of_row("engine", "cached")),
            ], 190,
            "eight texts of 128K in int8 that were read before, a question of 32 tokens each, answers of 128",
            *model("llama-3-8b"), *(() if tiny else ("--host-dtype", "int8")),
            "--workload", "clients", "--n", few(8), "--max-num-seqs", few(8), "--length", length(131072),
            "--question", few(32, 8), "--tokens", few(128, 12), "--read-first", "--systems", "engine",
        ),
        script(
            "full_keys",
            [
                Goal("a token of 128K, auto", "ms", token_ms("auto", -1), 9.5, least=False),
                Goal("a token of 128K, full", "ms", token_ms("full", -1)),
                *(Goal(f"a token of 16K, {way}", "ms", token_ms(way, 0)) for way in ("auto", "full")),
            ], 120,
            "a text's keys all beside the model (full) and what auto takes: the third answer of 64 tokens",
            *model("llama-3-8b"), "--lengths", "256,512" if tiny else "16k,128k", "--tokens", few(64, 8),
        ),
        Measure(
            "codes_on_host", "tools.card.full_keys",
            (
                *model("llama-3-8b"), "--lengths", length(131072), "--tokens", few(64, 8),
                "--read-window", length(4096), "--systems", f"{SCANNED}:codes_on_host=True,{SCANNED},sketch",
            ),
            "--out", "found.json",
            [
                Goal("a token by codes on the host, which are brought", "ms", row_ms(0), 18, least=False),
                Goal("a token by the same codes on the GPU", "ms", row_ms(1)),
                Goal("a token by the host's sketch", "ms", row_ms(2)),
            ], 150,
            "128K, codes of 16 bytes with finer ones and int8 rows, the keys of a quarter of the candidates are read; "
            f"chunks were read with the 4,096 tokens before them alone: the third answer of 64 tokens{SIMPLE}",
        ),
        Measure(
            "four_texts", "tools.card.steps",
            (
                *model("llama-3-8b"), *(("--emulate",) if tiny else ()), "--rows", few(4, 2),
                "--length", length(131072), "--tokens", few(160, 24), "--read-window", length(4096),
            ),
            "--out", "found.json",
            [
                Goal("a step of four texts, p50", "ms", value("step_ms", "p50"), 14.3, least=False),
                Goal("between two replays, p50", "ms", value("gap_ms", "p50")),
            ], 150,
            "four texts of 128K side by side, which takes 110 GiB of host memory; chunks were read with the 4,096 "
            f"tokens before them alone{SIMPLE}",
        ),
        four_bits("int4_8b", "llama-3-8b", 13.9, 150),
        four_bits("int4_32b", "qwen3-32b", 30, 240),
        four_bits("int4_27b_hybrid", "qwen3.5-27b", 30, 240),
    ]  # fmt: skip


SCANNED = "device-auto:key_bytes=16:rescore=32:finer_bytes=64:int8_rows=True:key_share=0.25"
"""Codes of the layout that `auto` chooses for codes in host memory, without `codes_on_host`."""
SIMPLE = "; random weights and token ids, and answers do not end by themselves"


def over(other: str, bound: float) -> Goal:
    return Goal(f"engine over {other}", "", ratio("engine", other), bound)


def token_ms(way: str, number: int) -> Callable[[object], float | None]:
    """Of a way's first length, or its last."""

    def find(report: object) -> float | None:
        assert isinstance(report, dict)
        found = [row.get("token_ms") for row in report["rows"] if row.get("way") == way]
        return found[number] if found else None

    return find


def row_ms(number: int) -> Callable[[object], float | None]:
    """Milliseconds of a token in a row."""

    def find(report: object) -> float | None:
        assert isinstance(report, dict)
        found: float | None = report["rows"][number].get("token_ms")
        return found

    return find


def read_seconds(report: object) -> float | None:
    """Of the last text."""
    assert isinstance(report, dict)
    found: float | None = report["rows"][-1].get("read_seconds")
    return found


def rates(*ways: str) -> list[Goal]:
    return [Goal(f"{way}, whole run", "tokens/s", of_row(way, "rate")) for way in ways]


def first(way: str) -> list[Goal]:
    """The last of the first tokens."""

    def find(report: object) -> float | None:
        assert isinstance(report, dict)
        row = next((row for row in report["rows"] if row["way"] == way and row["status"] == "ok"), None)
        return None if row is None else max(one["token_ms"][0] for one in row["answers"]) / 1000

    return [Goal("all first tokens after", "s", find)]
