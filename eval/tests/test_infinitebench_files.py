"""InfiniteBench from files: fields, malformed lines, prompts of every profile, cuts inside the context only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.infinitebench import InfiniteBench
from retrieval_attn_eval.infinitebench.catalogue import TASKS
from retrieval_attn_eval.infinitebench.cutting import cut_context
from retrieval_attn_eval.infinitebench.profiles import PROFILES, get_profile
from retrieval_attn_eval.infinitebench.record import DataFile, Record, parse_record
from retrieval_attn_eval.plans import NOISE_LINE
from retrieval_attn_eval.prompts import Prompts

KEY, VALUE = "84fe443f-dcff-48dd-8b2e-ae4daff8b278", "c14cb8ba-002b-43be-bdc7-8a83f0fe1ac8"
KV_QUESTION = f'\nKey: "{KEY}"\nThe value associated with the specified key is: '
OPTIONS = ["Snowfield", "Hall Farm", "At the mill", "Stoniton"]
NOISE = (NOISE_LINE + "\n") * 30
# one hand-made sample of each task, with the fields and types of the published files
SAMPLES: dict[str, dict[str, Any]] = {
    "passkey": {"context": f"{NOISE}The pass key is 71432. Remember it. 71432 is the pass key.\n{NOISE}"}
    | {"input": "What is the pass key?", "answer": "71432"},
    "number_string": {"context": f"{NOISE}The sequence of digits is 2200012222. Remember it.\n{NOISE}"}
    | {"input": "What is the sequence of digits?", "answer": ["2200012222"]},
    "kv_retrieval": {
        "content": 'JSON data:\n{"a": "b", ' + f'"{KEY}": "{VALUE}"}}',
        "input": KV_QUESTION,
        "answer": VALUE,
    },
    "longbook_sum_eng": {"context": "A long book.", "input": "", "answer": ["A book.", "It is long."]},
    "longbook_qa_eng": {"context": "A long book.", "input": "How long?", "answer": ["very", "quite long"]},
    "longbook_choice_eng": {"context": "A book.", "input": "Where?", "answer": ["Hall Farm"], "options": OPTIONS},
    "longdialogue_qa_eng": {"context": "$$MASK$$: Hello", "input": "Who is it?", "answer": ["ACE", "ACE ROTHSTEIN"]},
    "longbook_qa_chn": {"context": "一本书。", "input": "谁？", "answer": ["福气龙"]},
    "code_debug": {"context": "def f(): pass", "input": "", "answer": "f", "options": ["e", "f", "g", "h"]},
    "code_run": {"context": "def func_1(x):\n    return x - 4\n", "input": "The value of func_1(-3).", "answer": -7},
    "math_calc": {"context": "2 + 3 + 4", "input": "The value is: ", "answer": [5, 9]},
    "math_find": {"context": "[3, 4]", "input": "One number. The largest number of the list is: ", "answer": 4},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for task, sample in SAMPLES.items():
        rows = [{"id": i, "options": [], **sample} for i in range(2)]
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("task", TASKS)
def test_every_task_makes_rows_and_scores_its_own_answer(task: str, profile: str, folder: Path, tokenizer: Any) -> None:
    if task == "longbook_sum_eng":
        pytest.importorskip("rouge_score")
    suite = InfiniteBench(folder, profile=profile)
    assert suite.count(task) == 2
    rows = list(suite.rows(task, None, [1, 0], tokenizer, 42))
    assert len({row.id for row in rows}) == 2
    row = rows[0]
    context = SAMPLES[task]["content" if task == "kv_retrieval" else "context"]
    assert row.context.count(context) == 1 and "{" + "context}" not in row.prompt
    assert row.max_new_tokens == suite.profile.max_new_tokens[task]
    assert suite.form is not None
    assert row.meta["prompt_tokens"] == len(Prompts(suite.form).of(row)) and not row.meta["truncated"]
    answer = {"math_calc": "[5, 9]", "longbook_choice_eng": "B", "code_debug": "B."}.get(task, row.answers[0])
    assert suite.scores(row, answer) == {"official": 1.0, "fixed": 1.0}
    assert suite.scores(row, "") == {"official": 0.0, "fixed": 0.0}


def test_the_words_of_the_prompts_are_the_published_ones(folder: Path, tokenizer: Any) -> None:
    """Pieces that tell the projects apart; a changed word would give other numbers."""

    def prompt(profile: str, task: str) -> tuple[str, str, str]:
        row = next(InfiniteBench(folder, profile=profile).rows(task, None, [0], tokenizer, 0))
        return row.context, row.question, row.answer_prefix

    context, question, prefix = prompt("minference", "passkey")
    assert context.startswith(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you"
        " about the important information.\n\nThe grass"
    )
    assert (question, prefix) == ("\n\nWhat is the pass key?\n\nThe pass key is", "")
    assert prompt("official-completion", "passkey") == (context, question, prefix)
    assert prompt("infllm", "kv_retrieval")[0].startswith(
        f'Extract the value corresponding to the specified key "{KEY}" in the JSON object below.\n\nJSON data:'
    )
    context, question, prefix = prompt("kvpress", "kv_retrieval")
    assert context.endswith("}\n\n") and question == f'\nKey: "{KEY}"\n '
    assert prefix == "The value associated with the specified key is"
    assert prompt("kvpress", "passkey")[2] == "The pass key is:"
    assert prompt("kvpress", "math_find")[0] == "What is the largest number in the following list?\n\n[3, 4]\n\n" + (
        "One number. The largest number of the list is: \n\n"
    )
    assert prompt("official-chat", "longbook_choice_eng")[1] == (
        "\n\nQuestion: Where?\n\nOnly one of the following options is correct, tell me the answer using one single"
        " letter (A, B, C, or D). Don't say anything else.\nA. Snowfield\nB. Hall Farm\nC. At the mill\nD. Stoniton"
    )
    assert prompt("minference", "math_find")[0].startswith("What is the largest number in the following list?\n\n[")
    assert prompt("minference", "math_calc")[1] == "\nValues:"
    assert prompt("minference", "code_run")[1].endswith("exact value of func_1(-3). The value of func_1(-3) is")
    assert prompt("minference", "longbook_qa_chn")[1] == "\n\n问题：谁？\n答案："


def test_room_for_answers_is_each_projects() -> None:
    tasks = ("passkey", "number_string", "kv_retrieval", "longbook_sum_eng", "longbook_qa_eng", "code_run", "math_find")
    rooms = {name: [get_profile(name).max_new_tokens[task] for task in tasks] for name in PROFILES}
    assert rooms["official-completion"] == [6, 12, 50, 1200, 40, 5, 3]
    assert rooms["minference"] == [15, 20, 80, 1200, 40, 5, 3]
    assert rooms["infllm"] == [32, 32, 100, 1536, 32, 32, 32]
    assert rooms["kvpress"] == [26, 32, 70, 1220, 60, 25, 23]


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_of_the_profiles(needle_model_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(needle_model_path, local_files_only=True)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])

    def around(profile: str) -> tuple[str, str]:
        form = InfiniteBench(profile=profile).frame(tokenizer)
        assert list(form.head).count(bos) == 1 and form.head[0] == bos  # exactly one, and at the front
        return str(tokenizer.decode(list(form.head[1:]))), form.tail

    for template in (CHAT, "{{ bos_token }}" + CHAT):
        tokenizer.chat_template = template
        assert around("minference") == ("<system>", "</system><assistant>")
        assert around("infllm") == around("kvpress") == ("<user>", "</user><assistant>")
        assert around("official-chat")[0] == "<system>You are a helpful assistant</system><user>"
        assert around("official-completion") == ("", "")
    form = InfiniteBench(profile="kvpress").frame(tokenizer, "never")
    assert form.head == (bos,) and form.tail == "\n"
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ConfigError, match=r"minference needs a chat template with system messages.*no system role"):
        InfiniteBench().frame(tokenizer)
    tokenizer.chat_template = "{{ bos_token }}nothing of the prompt"
    with pytest.raises(ConfigError, match="shows it 0 times"):
        InfiniteBench().frame(tokenizer)


def test_a_context_too_long_loses_its_middle_only(tmp_path: Path, tokenizer: Any) -> None:
    """Instruction and question stay, room for the longest question and the answer is kept, the loss is recorded."""
    sample = SAMPLES["passkey"]
    early = {"context": "71432 is the pass key.\n" + NOISE * 4, "input": sample["input"], "answer": "71432"}
    longer = {**early, "input": "Please tell me, in one word and no other: what is the pass key?"}
    middle = {"context": NOISE * 3 + "The pass key is 71432.\n" + NOISE * 3, "input": "Which?", "answer": "71432"}
    (tmp_path / "passkey.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (early, longer, middle)))
    suite = InfiniteBench(tmp_path)
    rows = list(suite.rows("passkey", 600, range(3), tokenizer, 0))
    assert suite.form is not None
    for row in rows:
        tokens = len(Prompts(suite.form).of(row))
        assert row.meta["truncated"] and row.meta["prompt_tokens"] == tokens
        assert tokens + row.max_new_tokens <= 600
        assert row.context.startswith("There is an important info") and row.context.endswith("back again.\n")
        assert row.context_ids is not None and row.meta["dropped_tokens"] > 1000
        whole = tokenizer(tokenizer.decode(row.context_ids), add_special_tokens=False)["input_ids"]
        assert abs(len(whole) - len(row.context_ids)) <= 2  # the same text, but for the seam
    assert [row.meta["answer_in_context"] for row in rows] == [True, True, False]
    assert rows[0].context == rows[1].context and rows[0].context_ids == rows[1].context_ids
    assert rows[1].meta["prompt_tokens"] + rows[1].max_new_tokens == 600
    suite.max_positions = 700  # rows without a length fit the model
    row = next(suite.rows("passkey", None, [1], tokenizer, 0))
    assert row.meta["prompt_tokens"] + row.max_new_tokens == 700 == suite.max_tokens
    with pytest.raises(ConfigError, match="leaves -?[0-9]+ tokens for the context"):
        next(suite.rows("passkey", 40, [0], tokenizer, 0))


def test_a_key_without_its_value_does_not_survive(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [f'"{i:08x}-0000-4000-8000-{i:012x}": "{i:08x}-1111-4000-8000-{i:012x}"' for i in range(60)]
    rows = []
    for i in (0, 30, 59):
        key, value = (part.strip('"') for part in pairs[i].split(": "))
        question = KV_QUESTION.replace(KEY, key)
        rows.append({"context": "JSON data:\n{" + ", ".join(pairs) + "}", "input": question, "answer": value})
    (tmp_path / "kv_retrieval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = list(InfiniteBench(tmp_path).rows("kv_retrieval", 1200, range(3), tokenizer, 0))
    assert [row.meta["answer_in_context"] for row in made] == [True, False, True]
    assert all(row.meta["truncated"] for row in made)


@settings(max_examples=60)
@given(
    st.text(min_size=1, max_size=200, alphabet="ab 12.,\n字é😀"),
    st.integers(min_value=0, max_value=150),
    st.sampled_from(["", "Read.\n\n"]),
    st.sampled_from(["", "\n\n"]),
)
def test_cuts_keep_both_ends(tokenizer: Any, context: str, room: int, before: str, after: str) -> None:
    try:
        cut = cut_context(tokenizer, before, context, after, room)
    except ConfigError:
        around = len(tokenizer(before + after, add_special_tokens=False)["input_ids"])
        assert room <= around + 2  # a token may reach over the border of the context on each side
        return
    whole = before + context + after
    assert len(cut.ids) <= room
    assert cut.text.startswith(before) and cut.text.endswith(after) and "".join(cut.parts) == cut.text
    assert whole.startswith(cut.parts[0]) and whole.endswith(cut.parts[-1])
    if cut.dropped == 0:
        assert cut.text == whole
    else:
        assert tokenizer.decode(cut.ids) == cut.text  # no character is cut in two
        assert len(cut.ids) >= room - 8  # and hardly more is lost than has to be


def test_a_question_without_what_its_task_asks_for_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "code_run.jsonl").write_text(json.dumps({"context": "x", "input": "Run it.", "answer": 3}) + "\n")
    with pytest.raises(InputDataError, match=r"code_run.jsonl, line 1: code_run needs a call such as func_12\(-3\)"):
        next(InfiniteBench(tmp_path).rows("code_run", None, [0], tokenizer, 0))


def test_malformed_lines_are_named_and_nothing_is_lost(tmp_path: Path) -> None:
    good = json.dumps({"id": 0, **SAMPLES["passkey"]})
    lines = [good, "", "{torn", "[1]", '{"context": "a", "answer": "b"}', good, good[: len(good) // 2]]
    path = tmp_path / "passkey.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(InputDataError) as error:
        InfiniteBench(tmp_path).count("passkey")
    text = str(error.value)
    for number, why in (
        (3, "not JSON"),
        (4, "needed a JSON object, found list"),
        (5, "needed the fields input"),
        (7, ""),
    ):
        assert f"passkey.jsonl, line {number}: {why}" in text
    assert "4 of 6 records are malformed, nothing was run" in text
    path.write_text("\n".join([good, "", good]))
    assert len(DataFile(tmp_path, "passkey")) == 2  # blank lines are no records; the last line needs no line break
    path.write_bytes(b"\xef\xbb\xbf" + good.encode() + b"\r\n\r\n" + good.encode() + b"\r\n")
    assert [DataFile(tmp_path, "passkey")[i].answers for i in (0, 1)] == [("71432",)] * 2
    path.write_bytes(good.encode() + b"\n" + b'{"context": "\xff"}\n')
    with pytest.raises(InputDataError, match="line 2: byte 13 is not UTF-8"):
        DataFile(tmp_path, "passkey")
    path.write_text("x\n" * 20)
    with pytest.raises(InputDataError, match=r"line 5: .*; 15 more: 20 of 20 records"):
        DataFile(tmp_path, "passkey")
    path.write_text("\n")
    with pytest.raises(InputDataError, match="needed at least one record"):
        DataFile(tmp_path, "passkey")


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("passkey", {"context": 3}, "needed the fields context"),
        ("passkey", {"answer": None}, "needed an answer"),
        ("passkey", {"answer": []}, "needed an answer"),
        ("passkey", {"answer": " "}, "found an empty one"),
        ("passkey", {"answer": {"a": 1}}, "needed an answer"),
        ("math_find", {"answer": "four"}, "needed a number as the answer"),
        ("math_calc", {"answer": []}, "needed an answer"),
        ("longbook_choice_eng", {"options": OPTIONS[:3]}, r"options \(4, found 3\)"),
        ("longbook_choice_eng", {"answer": "the moon"}, "one of the options"),
        ("code_debug", {"options": ["e", "f", "g", 7]}, "options that are text"),
        ("code_debug", {"options": 5}, "options that are text, in a list, found 5"),
        ("passkey", {"context": "a \ud800 b"}, "not JSON .*surrogates"),
    ],
)
def test_fields_that_cannot_be_used_are_named(task: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputDataError, match=f"file, line 9: .*{message}"):
        parse_record(task, json.dumps({**SAMPLES[task], **change}), "file, line 9")


@pytest.mark.parametrize("answer", ["Hall Farm", ["Hall Farm"], ["Hall Farm", "B"], "B", ["B"]])
def test_all_published_shapes_of_a_choice_are_read(answer: Any) -> None:
    sample = {**SAMPLES["longbook_choice_eng"], "answer": answer}
    assert parse_record("longbook_choice_eng", json.dumps(sample), "").answers == ("Hall Farm", "B")


@pytest.mark.parametrize("answer", [[4, 8], [[4, 8]], ["4", "8"]])
def test_all_published_shapes_of_values_are_read(answer: Any) -> None:
    assert parse_record("math_calc", json.dumps({**SAMPLES["math_calc"], "answer": answer}), "").answers == ("4", "8")


def test_missing_folders_and_files_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="check --data-dir"):
        InfiniteBench(tmp_path / "nowhere").count("passkey")
    (folder / "passkey.jsonl").unlink()
    (folder / "code_debug.jsonl").unlink()
    with pytest.raises(InputDataError, match=r"needed passkey.jsonl, found number_string.jsonl.*leave --data-dir out"):
        InfiniteBench(folder).count("passkey")
    with pytest.raises(InputDataError) as error:
        InfiniteBench(folder).count("code_debug")
    assert "xinrongzhang2022/InfiniteBench" in str(error.value) and "leave --data-dir" not in str(error.value)


def test_rows_of_another_file_have_other_ids(folder: Path, tokenizer: Any) -> None:
    first = next(InfiniteBench(folder).rows("passkey", 4096, [0], tokenizer, 0))
    assert first.id.startswith("infinitebench/passkey/4096/") and first.id.endswith("/0")
    assert next(InfiniteBench(folder).rows("passkey", 4096, [0], tokenizer, 1)).id == first.id  # no seed in a file
    file = folder / "passkey.jsonl"
    file.write_text(file.read_text().replace("71432", "71433"))
    assert next(InfiniteBench(folder).rows("passkey", 4096, [0], tokenizer, 0)).id != first.id


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="official-chat"):
        InfiniteBench(profile="gpt5")
    with pytest.raises(ConfigError, match="at least 1"):
        InfiniteBench(max_new_tokens={"passkey": 0})
    with pytest.raises(ConfigError, match="passkey"):
        InfiniteBench(max_new_tokens={"pass": 3})
    assert InfiniteBench().fingerprint() != InfiniteBench(profile="kvpress").fingerprint()
    assert get_profile("minference").pieces(Record("passkey", "", "Q?", ("1",))).question == "\n\nQ?\n\nThe pass key is"
