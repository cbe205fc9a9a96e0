"""lm-evaluation-harness drives this package: its own requests, its cache, its command line."""

from __future__ import annotations

import argparse
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError, ContextLengthError
from retrieval_attn_eval.lm_eval import command as lm_eval_command
from retrieval_attn_eval.models import BUNDLED_MODEL

MISSING = find_spec("lm_eval") is None
needs_lm_eval = pytest.mark.skipif(MISSING, reason='lm_eval is not installed; pip install "lm_eval[ruler]"')

TEXT = "The special magic Berlin number is: 5839201. The grass is green. The sky is blue.\n\n"
QUESTION = "Question: What is the special magic Berlin number?\nAnswer:"


# ---- the launcher ------------------------------------------------------------------------------------------


def test_command_line_is_completed_and_passed_on() -> None:
    """Model, device and the bundled weights where nothing was said; whatever was said stays as it is."""
    bundled = f"pretrained={BUNDLED_MODEL}"
    assert lm_eval_command.command_line(["--tasks", "t"]) == [
        "run", "--tasks", "t", "--model", "retrieval_attn", "--device", "auto", "--model_args", bundled,
    ]  # fmt: skip
    given = ["run", "--model=hf", "--device", "cpu", "--model_args", "pretrained=x", "--limit", "2"]
    assert lm_eval_command.command_line(given) == given
    more = lm_eval_command.command_line(["--model_args", "retrieve=50", "--tasks", "t"])
    assert more[:4] == ["run", "--model_args", bundled, "retrieve=50"]
    assert lm_eval_command.command_line([]) == ["--help"]
    assert lm_eval_command.command_line(["ls", "tasks"]) == ["ls", "tasks"]


def test_every_word_reaches_lm_eval() -> None:
    """Options, --help included, are not looked at by our parser, wherever they stand."""
    parser = argparse.ArgumentParser()
    sub = parser.add_subparsers(dest="command").add_parser("lm-eval")
    lm_eval_command.add_arguments(sub)
    words = ["--tasks", "a", "--help", "run", "--model_args", "x=1", "y=2", "--", "-h"]
    assert [w for w in parser.parse_args(["lm-eval", *words]).arguments if w != "--"] == [w for w in words if w != "--"]


@pytest.mark.skipif(not MISSING, reason="lm_eval is installed")
def test_without_lm_eval_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r'pip install "lm_eval\[ruler\]"'):
        lm_eval_command.run(argparse.Namespace(arguments=["--help"]))


# ---- the model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm() -> Any:
    """The bundled model as lm_eval makes it: by name, from an argument string."""
    importlib.import_module("retrieval_attn_eval.lm_eval.model")
    registry = importlib.import_module("lm_eval.api.registry")
    made = registry.get_model("retrieval_attn").create_from_arg_string(
        f"pretrained={BUNDLED_MODEL},dtype=float32,retrieve=all", {"batch_size": 1, "device": "cpu"}
    )
    return made


def request(kind: str, *arguments: Any) -> Any:
    instance = importlib.import_module("lm_eval.api.instance").Instance
    return instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def plain_scores(lm: Any, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Log-probability by transformers alone: one forward with eager attention and no cache of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(BUNDLED_MODEL), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(after)
    return float(logits.gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


@needs_lm_eval
def test_generates_until_a_stop_string(lm: Any) -> None:
    """The needle comes back; a stop string ends the text before it; the budget is exact."""
    (text,) = lm.generate_until([request("generate_until", TEXT + QUESTION, {"until": [], "max_gen_toks": 12})], True)
    assert text.strip() == "5839201"
    cut = {"until": ["92"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    assert lm.generate_until([request("generate_until", TEXT + QUESTION, cut)], True)[0].strip() == "583"
    with pytest.raises(ConfigError, match="gen_kwargs beams unknown"):
        lm.generate_until([request("generate_until", TEXT, {"beams": 2})], True)


@needs_lm_eval
def test_loglikelihood_equals_plain_transformers(lm: Any) -> None:
    """Sums and greedy flags with every key attended; choices of one context share its reading; empty context too."""
    pairs = [(TEXT + QUESTION, " 5839201"), (TEXT + QUESTION, " 1111111"), ("", "The grass"), ("a b ", "c")]
    found = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs], True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        before, after = lm._encode_pair(context, continuation)
        assert lm.tokenizer.decode(after) == (" " if context.endswith(" ") else "") + continuation
        expected, expected_greedy = plain_scores(lm, before, after)
        assert score == pytest.approx(expected, abs=1e-3) and greedy == expected_greedy
    assert found[0][1] and not found[1][1] and found[0][0] > found[1][0]


@needs_lm_eval
def test_rolling_scores_every_token_once(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text in one window equals the plain score; in three windows, the sum over windows of plain scores."""
    text = TEXT * 3
    ids = lm._encode(text, specials=False)
    (whole,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)], True)
    assert whole == pytest.approx(plain_scores(lm, [lm._prefix], ids)[0], abs=2e-3)
    monkeypatch.setattr(lm, "max_length", len(ids) // 3 + 2)
    (parts,) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)], True)
    size = len(ids) // 3 + 1
    windows = importlib.import_module("lm_eval.utils").get_rolling_token_windows(ids, lm._prefix, size, 1)
    expected = sum(plain_scores(lm, before[: len(before) - len(after) + 1], after)[0] for before, after in windows)
    assert parts == pytest.approx(expected, abs=2e-3)


@needs_lm_eval
def test_long_continuations_are_scored_in_pieces(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 8 tokens, each appended to the cache through retrieval, add up to the plain score."""
    module = importlib.import_module("retrieval_attn_eval.lm_eval.model")
    monkeypatch.setattr(module, "_PIECE", 8)
    (found,) = lm.loglikelihood([request("loglikelihood", TEXT, TEXT + QUESTION)], True)
    before, after = lm._encode_pair(TEXT, TEXT + QUESTION)
    assert found[0] == pytest.approx(plain_scores(lm, before, after)[0], abs=2e-3)


@needs_lm_eval
def test_too_long_prompts_are_refused_or_cut_on_request(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never cut in silence; truncate=left keeps the end, where the question is."""
    monkeypatch.setattr(lm, "max_length", 40)
    asked = request("generate_until", TEXT * 4 + TEXT[:40] + QUESTION, {"max_gen_toks": 12, "until": []})
    with pytest.raises(ContextLengthError, match="truncate=left"):
        lm.generate_until([asked], True)
    monkeypatch.setattr(lm, "_truncate", "left")
    assert len(lm._fit(list(range(100)), 12)) == 28
    assert isinstance(lm.generate_until([asked], True)[0], str)


@needs_lm_eval
def test_one_begin_of_sequence_token(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template that writes BOS itself must not get a second one from the tokenizer."""
    from transformers import AutoTokenizer

    chat = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL), bos_token="<s>", add_bos_token=True)
    chat.chat_template = "<s>{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(lm, "tokenizer", chat)
    text = lm.apply_chat_template([{"role": "user", "content": "Hello"}])
    ids = lm._encode(text, specials=True)
    assert ids.count(chat.bos_token_id) == 1
    assert lm.chat_template(True) == chat.chat_template
    assert "/" not in lm.tokenizer_name


@needs_lm_eval
def test_an_interrupted_run_resumes_from_lm_evals_cache(lm: Any, tmp_path: Path) -> None:
    """Killed in the third request: the first two are in lm_eval's cache and are not generated again."""
    caching = importlib.import_module("lm_eval.api.model")
    requests = [request("generate_until", f"{n}. {TEXT}{QUESTION}", {"until": [], "max_gen_toks": 4}) for n in range(4)]
    made: list[str] = []
    generate = lm._generate

    def counting(text: str, given: dict[str, Any]) -> str:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(text)
        return str(generate(text, given))

    lm._generate = counting
    try:
        with pytest.raises(KeyboardInterrupt):
            caching.CachingLM(lm, str(tmp_path / "cache.db")).generate_until(requests)
        made = ["again"]
        first = caching.CachingLM(lm, str(tmp_path / "cache.db"))
        assert len(first.dbdict) == 2
        with pytest.raises(KeyboardInterrupt):
            first.generate_until(requests)
        assert made[1].startswith("2. ")
        lm._generate = generate
        assert len(caching.CachingLM(lm, str(tmp_path / "cache.db")).generate_until(requests)) == 4
    finally:
        lm._generate = generate
        lm.set_cache_hook(caching.CacheHook(None))


@needs_lm_eval
def test_unknown_options_are_refused() -> None:
    """A misspelt model argument must not be dropped."""
    module = importlib.import_module("retrieval_attn_eval.lm_eval.model")
    with pytest.raises(ConfigError, match="topk"):
        module.RetrievalAttentionLM(pretrained=str(BUNDLED_MODEL), topk=5)
    with pytest.raises(ConfigError, match="batch_size=8"):
        module.RetrievalAttentionLM(pretrained=str(BUNDLED_MODEL), batch_size=8)


@needs_lm_eval
def test_ruler_tasks_through_lm_evals_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own RULER tasks at 4096, offline; the bundled model finds the needle and follows the chain."""
    index = importlib.import_module("lm_eval.tasks._index").TaskIndex
    build = index.build
    # only RULER's of 13,000 tasks, and one sample of 500: all of either would take ten seconds
    monkeypatch.setattr(index, "build", staticmethod(lambda paths: build([path / "ruler" for path in paths])))
    for name in ("prepare_niah", "vt_utils"):
        module = importlib.import_module(f"lm_eval.tasks.ruler.{name}")
        monkeypatch.setattr(module, "tqdm", lambda samples, **_: samples[:1])
    monkeypatch.chdir(tmp_path)
    words = ["--tasks", "niah_multikey_2,ruler_vt", "--limit", "1", "--output_path", str(tmp_path)]
    words += ["--metadata", '{"max_seq_lengths":[4096]}', "--use_cache", str(tmp_path / "cache")]
    assert lm_eval_command.run(argparse.Namespace(arguments=words)) == 0
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["niah_multikey_2"]["4096,none"] == 1.0
    assert results["ruler_vt"]["4096,none"] >= 0.5


def test_help_without_lm_eval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The help never fails; a run says how to install what it needs."""
    monkeypatch.setattr("retrieval_attn_eval.lm_eval.command.find_spec", lambda name: None)
    assert main(["lm-eval", "--help"]) == 0
    assert "pip install './eval[lm-eval]'" in capsys.readouterr().out
    assert main(["lm-eval", "--tasks", "niah_single_1"]) == 2
    assert "pip install './eval[lm-eval]'" in capsys.readouterr().err
