"""RULER's rows: filled to the target, unambiguous, and each a function of its task, length, seed and index."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eval.tests.shared import bundled_tokenizer, parsed
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.plans import NOISE_LINE
from retrieval_attn_eval.prompts import PromptFormat, Prompts
from retrieval_attn_eval.ruler import RulerSuite, command
from retrieval_attn_eval.ruler.lexicon import Lexicon, pseudo_words
from retrieval_attn_eval.ruler.specs import SPECS, TASKS
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.text.haystack import shipped_prose
from retrieval_attn_eval.text.tokens import TokenCounter

ESSAY = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


@cache
def trained(kind: str) -> Any:
    """A small tokenizer with a BOS: "bytes" splits as Llama 3's does, "metaspace" merges without splitting."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    text = [shipped_prose(40_000, 3), NOISE_LINE, "One of the special magic numbers for x is: 1234567.\n" * 3]
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;-'=()?!\n▁")
        text = [line for block in text for line in block.replace(" ", "▁").split(".")]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<s>", "<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def rows(task: str, length: int, indices: Any, seed: int = 42, tokenizer: Any = None, **options: Any) -> list[Row]:
    return list(RulerSuite(**options).rows(task, length, indices, tokenizer or bundled_tokenizer(), seed))


ALL = RulerSuite().tasks()


KINDS = [("bundled", task) for task in ALL] + [
    (kind, task)
    for kind in ("bytes", "metaspace")
    for task in ("niah_multikey_1", "niah_multikey_3", "vt", "cwe", "fwe", "qa_synth_1")
]


@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_contexts_are_filled_from_below(kind: str, task: str) -> None:
    tokenizer = bundled_tokenizer() if kind == "bundled" else trained(kind)
    suite = RulerSuite()
    # the fewest common words take 303 entries: more than 4,096 tokens of a small vocabulary hold
    for length, seed in ((2048, 1), (5003 if task != "cwe" else 9001, 7)):
        for row in suite.rows(task, length, range(2), tokenizer, seed):
            # counted with the tokenizer's own call: its BOS once, context, then question and prefix
            used = len(tokenizer(row.context, verbose=False)["input_ids"])
            used += count(tokenizer, row.question + row.answer_prefix)
            assert used == row.meta["prompt_tokens"]
            assert 0.99 * length <= used + row.max_new_tokens <= length, (length, seed, row.id, used)
            assert row.meta["fill"] == pytest.approx((used + row.max_new_tokens) / length, abs=1e-5)


@pytest.mark.parametrize("task", ["niah_multikey_2", "fwe"])
def test_long_contexts_are_filled(task: str) -> None:
    (row,) = rows(task, 65536, [3])
    used = (
        count(bundled_tokenizer(), row.context)
        + count(bundled_tokenizer(), row.question + row.answer_prefix)
        + row.max_new_tokens
    )
    assert 0.995 * 65536 <= used <= 65536


@pytest.mark.parametrize("task", ALL)
def test_a_row_depends_on_its_own_numbers_alone(task: str) -> None:
    suite = RulerSuite()
    together = list(suite.rows(task, 2048, range(5), bundled_tokenizer(), 42))
    list(suite.rows(task, 4096, [0], bundled_tokenizer(), 42))
    assert [row for i in (3, 1) for row in suite.rows(task, 2048, [i], bundled_tokenizer(), 42)] == [
        together[3],
        together[1],
    ]
    assert rows(task, 2048, [4]) == together[4:]
    assert [row.id for row in together] == [f"ruler/{task}/2048/42/{i}" for i in range(5)]
    assert len({row.context for row in together}) == 5 and len({row.answers for row in together}) == 5
    assert rows(task, 2048, [0], seed=43)[0].answers != together[0].answers


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_are_there_once_and_nothing_contradicts_them(task: str) -> None:
    options = SPECS[task].options
    for row in rows(task, 4096, range(4)):
        needle = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
        found = needle.findall(row.context)
        asked = re.split(r", and |, ", row.question.split(" for ")[1].split(" mentioned")[0])
        values = [value for kind, key, value in found if key in asked]
        assert sorted(values) == sorted(row.answers) and len(set(values)) == len(values)
        assert len(asked) == options["queries"] and len(values) == int(options["queries"]) * int(options["values"])
        assert {kind for kind, _, _ in found} == {options["value"]}
        assert list(row.answers) == [
            value for key in asked for value in row.answers if f"for {key} is: {value}." in row.context
        ]
        wanted = int(options["keys"]) * int(options["values"])
        assert len(found) == wanted if options["haystack"] != "needle" else len(found) > 50
        assert len(row.meta["depths"]) == len(row.answers) and all(0 <= d <= 100 for d in row.meta["depths"])
        shape = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"}
        assert all(re.fullmatch(shape[str(options["value"])], value) for value in values)


def test_prompt_of_a_single_needle() -> None:
    row = rows("niah_single_1", 2048, [0])[0]
    key = row.question.split(" for ")[1].split(" mentioned")[0]
    head = (
        "A special magic number is hidden within the following text. Make sure to memorize it."
        " I will quiz you about the number afterwards.\n"
    )
    assert row.context.startswith(head + NOISE_LINE + "\n")
    assert row.question == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert row.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    lines = row.context[len(head) :].split("\n")
    assert Counter(lines).most_common(1)[0][0] == NOISE_LINE and lines[-1] != row.answers[0]
    assert len(set(lines)) - row.meta["cut_unit"] == 2


@pytest.mark.parametrize("task", ESSAY)
def test_the_essay_is_the_first_words_with_needles_between_sentences(task: str, tmp_path: Path) -> None:
    text = shipped_prose(30_000, 9).replace("  ", " ")
    (tmp_path / "essay.txt").write_text(text, encoding="utf-8")
    for row in rows(task, 2048, range(3), haystack=tmp_path):
        body = row.context.split("\n", 1)[1]
        pieces = re.split(r" ?One of the special magic \w+ for \S+ is: \S+\. ?", body)
        assert " ".join(piece for piece in pieces if piece) == " ".join(text.split()[: row.meta["units"]])
        assert all(piece.endswith((".", "!", "?")) for piece in [piece for piece in pieces if piece][:-1])


def test_a_short_essay_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It rained in the morning. It was dry in the evening. " * 3, encoding="utf-8")
    row = rows("niah_single_2", 2048, [0], haystack=tmp_path / "a.txt")[0]
    assert row.context.count("It rained in the morning.") > 50 and row.meta["fill"] > 0.99


def test_variable_tracking() -> None:
    for row in rows("vt", 2048, range(3)):
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        before, example, task = row.context.split(head)
        assert before == "" and example.endswith("\n\n")
        value = row.question.split("value ")[1].split(" in")[0]
        assert row.question == f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        asked = (
            " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are"
            f" assigned the value {value}, they are: "
        )
        assert row.answer_prefix == asked
        statements = [line.strip() for line in task.split("\n") if line.startswith("VAR")]
        a, b, c, d, e = row.answers
        chain = [f"VAR {a} = {value}", *[f"VAR {y} = VAR {x}" for x, y in pairwise((a, b, c, d, e))]]
        assert statements == chain
        shown, answer = re.sub(r"[\s.]*$", "", example).split("they are:  ")
        names = answer.split(" ")
        assert len(names) == 5 and all(re.fullmatch("[A-Z]{3}", name) for name in names)
        number = re.findall(rf"VAR {names[0]} = (\d+)", shown)[0]
        assert number != value and f"are assigned the value {number}, " in shown


def test_example_of_variable_tracking_has_at_most_500_tokens() -> None:
    row = rows("vt", 2048, [0])[0]
    example = row.context.split("they are:  ")[0] + "they are: "
    assert 400 <= count(bundled_tokenizer(), example) <= 510  # three-letter names differ in tokens


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words(length: int, often: int, seldom: int) -> None:
    for row in rows("cwe", length, range(3)):
        example, listing = row.context.split("Below is a numbered list of words.")[1:]
        entries = re.findall(r"(\d+)\. (\S+)", listing)
        assert [int(i) for i, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert {word for word, n in counts.items() if n == often} == set(row.answers) and len(row.answers) == 10
        assert {n for word, n in counts.items() if word not in row.answers} == {seldom}
        shown = re.findall(r"\d+\. (\S+)", example)
        assert len(shown) == (40 if length < 4096 else 190) + 10
        assert set(shown[-10:]) == {word for word, _ in Counter(shown[:-10]).most_common(10)}
        assert row.question.endswith("\nQuestion: What are the 10 most common words in the above list?")


def test_coded_text() -> None:
    for row in rows("fwe", 4096, range(3)):
        words = row.context.split("coded words. ")[1].split(" ")
        counts = Counter(words)
        ranked = counts.most_common()
        assert ranked[0][0] == "..." and {word for word, _ in ranked[1:4]} == set(row.answers)
        n = row.meta["units"]
        expected = [int(n * r**-2 / 1.6449340668482264) for r in range(1, 81)]
        assert [times for _, times in ranked] == [times for times in expected if times]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert row.question.startswith("\nQuestion: Do not provide any explanation. Please ignore the dots '....'.")


@pytest.mark.parametrize("task", ["qa_synth_1", "qa_synth_2"])
def test_made_up_questions_can_be_answered_from_their_documents(task: str) -> None:
    for row in rows(task, 2048, range(6)):
        numbers = [int(i) for i in re.findall(r"^Document (\d+):$", row.context, re.M)]
        assert numbers == list(range(1, row.meta["documents"] + 1))
        assert any(answer in row.context for answer in row.answers)
        building = re.search(r"the ([A-Z]\w+ [A-Z]\w+)", row.question.split("Question: ")[1])
        assert building and row.context.count(f":\n{building[1]}\n") == 1
        assert row.question.count("Only give me the answer and do not output any other words.") == 1
        assert len(row.meta["depths"]) == (1 if task == "qa_synth_1" else 2)


def test_format_of_the_prompt_is_counted() -> None:
    """What the runner feeds is what was counted: template, BOS once, answer prefix behind the template's end."""
    tokenizer = trained("bytes")
    tokenizer.chat_template = "<s>{% for m in messages %}USER {{ m['content'] }}\n{% endfor %}ASSISTANT"
    try:
        form = PromptFormat.of(tokenizer)
        suite = RulerSuite()
        suite.form = form
        for task in ("niah_multiquery", "vt", "qa_synth_1"):
            (row,) = suite.rows(task, 2048, [1], tokenizer, 42)
            prompt = Prompts(form).of(row)
            assert prompt.ids.tolist().count(tokenizer.bos_token_id) == 1
            assert len(prompt) == row.meta["prompt_tokens"] <= 2048 - row.max_new_tokens
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize("kind", ["bundled", "bytes", "metaspace"])
def test_counting_in_pieces_is_exact(kind: str) -> None:
    tokenizer = bundled_tokenizer() if kind == "bundled" else trained(kind)
    counter = TokenCounter(tokenizer)
    texts = [shipped_prose(90_000, 5), "\n".join([NOISE_LINE] * 900), "x y " * 9 + "\n\n3 4. 5\n" * 8000]
    assert counter._local
    assert counter.counts(texts) == [count(tokenizer, text) for text in texts]


def test_a_tokenizer_that_looks_far_is_counted_whole() -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{7}"), "isolated")  # where a token ends depends on all
    counter = TokenCounter(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"))
    text = "a bc " * 40_000
    assert not counter._local and counter.counts([text]) == [-(-len(text) // 7)]
    assert counter._in_pieces([text]) != counter._whole([text])


def test_words_do_not_run_out() -> None:
    words = Lexicon().first(60_000)
    assert len(words) == len(set(words)) == 60_000 and set(Lexicon().real) <= set(words)
    assert Lexicon().first(5_000) == words[:5_000] and pseudo_words(100) == pseudo_words(400)[:100]
    assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_words_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"w{i}q" for i in range(500)), encoding="utf-8")
    row = rows("cwe", 8192, [0], words=path)[0]
    assert all(re.fullmatch(r"w\d+q", answer) for answer in row.answers)
    path.write_text("one\ntwo words\n", encoding="utf-8")
    with pytest.raises(InputDataError, match="words.txt, line 2: needed one word, found 'two words'"):
        Lexicon.read(path)
    path.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(InputDataError, match="at least 100 different words, found 2"):
        Lexicon.read(path)
    with pytest.raises(InputDataError, match="check the path"):
        Lexicon.read(tmp_path / "none.txt")


@pytest.mark.parametrize("task", ALL)
def test_too_short_a_length_says_what_is_needed(task: str) -> None:
    with pytest.raises(ConfigError, match=rf"length 100 is too short for {task}: .* need (\d+) tokens") as error:
        rows(task, 100, [0])
    needed = int(re.findall(r"need (\d+) tokens", str(error.value))[0])
    assert 100 < needed < 1500


def test_lengths_and_names_are_checked() -> None:
    for length in (0, None):
        with pytest.raises(ConfigError, match="needs a length in tokens"):
            list(RulerSuite().rows("vt", length, [0], bundled_tokenizer(), 42))
    with pytest.raises(ConfigError, match="'qa' is unknown; choose from niah_single_1"):
        rows("qa", 4096, [0])
    with pytest.raises(ConfigError, match="qa_2 needs hotpot_dev_distractor_v1.json.* use qa_synth_2"):
        rows("qa_2", 4096, [0])


def test_stand_ins_are_named() -> None:
    suite = RulerSuite()
    assert suite.tasks()[-2:] == ("qa_synth_1", "qa_synth_2") and len(suite.tasks()) == 13
    assert any("built-in prose" in note for note in suite.notes) and sum("stands in" in n for n in suite.notes) == 2
    assert suite.notes_for(["niah_single_1"]) == []
    assert suite.titles["qa_synth_1"] != suite.titles["qa_1"]


def _run(*flags: str) -> int:
    return command.run(parsed(command, *flags))


def test_command_runs_and_scores_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = ("--tasks", "niah_single_1,qa_synth_1", "--lengths", "512", "--n", "1", "--methods", "full", "--no-plot")
    assert _run(*flags, "--question-position", "inside", "--output-dir", str(out)) == 0
    saved = [json.loads(line) for line in (out / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(saved) == 2 and next(r for r in saved if "niah" in r["id"])["score"] == 1.0
    capsys.readouterr()
    assert _run("--score-only", str(out), "--no-plot") == 0
    text = capsys.readouterr().out + (out / "summary.md").read_text(encoding="utf-8")
    assert "QA1-synth" in text and "stands in for qa_1" in text


def test_command_checks_its_tasks() -> None:
    with pytest.raises(ConfigError, match="'vvt' is unknown; choose from"):
        _run("--tasks", "vvt", "--dry-run")
    with pytest.raises(ConfigError, match="qa_1 needs dev-v2.0.json"):
        _run("--tasks", "vt,qa_1", "--dry-run")


def test_files_of_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is found by its published name; a folder without any is refused."""
    with pytest.raises(InputDataError, match="needed dev-v2.0.json, hotpot_dev_distractor_v1.json or words.txt"):
        _run("--data-dir", str(tmp_path), "--dry-run")
    given: dict[str, Path | None] = {}

    def suite(**files: Path | None) -> RulerSuite:
        given.update(files)
        return RulerSuite()

    monkeypatch.setattr(command, "RulerSuite", suite)
    (tmp_path / "words.txt").write_text("one\n")
    assert _run("--data-dir", str(tmp_path), "--dry-run", "--tasks", "vt", "--lengths", "1k", "--n", "1") == 0
    assert given == {"haystack": None, "squad": None, "hotpotqa": None, "words": tmp_path / "words.txt"}
