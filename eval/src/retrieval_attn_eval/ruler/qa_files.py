"""Question answering data in the published formats: SQuAD 2.0 (dev-v2.0.json) and HotpotQA (dev distractor)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.parsed import parsed

__all__ = ["Question", "QuestionSource", "read_hotpotqa", "read_squad"]


@dataclass(frozen=True)
class Question:
    """A question; gold and related are indices of documents.  gold: always shown; related: preferred beside them."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


class QuestionSource(Protocol):
    """Documents and questions about them.  count: None without end."""

    label: str
    digest: str

    @property
    def count(self) -> int | None: ...

    def question(self, i: int) -> Question: ...

    def document(self, j: int) -> str: ...

    def pool(self, length: int) -> int:
        """Documents 0..pool-1 may be shown in a context of `length` tokens."""
        ...


class FileSource:
    """Documents and questions of a file."""

    def __init__(self, label: str, digest: str, documents: Sequence[str], questions: Sequence[Question]) -> None:
        self.label, self.digest = label, digest
        self._documents, self._questions = documents, questions

    @property
    def count(self) -> int:
        return len(self._questions)

    def question(self, i: int) -> Question:
        if not 0 <= i < len(self._questions):
            raise InputDataError(
                f"{self.label}: needed question {i}, the file has {len(self._questions)}; ask for fewer samples"
            )
        return self._questions[i]

    def document(self, j: int) -> str:
        return self._documents[j]

    def pool(self, length: int) -> int:
        return len(self._documents)


def read_squad(path: Path) -> FileSource:
    """Answerable questions of a SQuAD file (1.1 or 2.0); paragraphs of the same article are related.

    Raises InputDataError, with the place in the file, for anything that is not as published.
    """
    tree, digest = _load(path)
    # paragraphs first: the documents are the sorted different ones
    articles = []
    for a, article in enumerate(_list(tree, "data", str(path))):
        where = f"{path}, data[{a}]"
        articles.append([(p, f"{where}.paragraphs[{i}]") for i, p in enumerate(_list(article, "paragraphs", where))])
    texts = [[_text(p, "context", where) for p, where in article] for article in articles]
    documents = sorted({text for article in texts for text in article})
    index = {text: j for j, text in enumerate(documents)}
    questions = []
    for article, contexts in zip(articles, texts, strict=True):
        here = list(dict.fromkeys(index[text] for text in contexts))
        for (paragraph, where), text in zip(article, contexts, strict=True):
            gold = index[text]
            related = tuple(j for j in here if j != gold)
            for asked, answers in _squad_questions(paragraph, where):
                questions.append(Question(asked, answers, (gold,), related))
    return _source("SQuAD", path, digest, documents, questions)


def _squad_questions(paragraph: Any, where: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for i, qa in enumerate(_list(paragraph, "qas", where)):
        place = f"{where}.qas[{i}]"
        asked = _text(qa, "question", place)
        if qa.get("is_impossible", False):
            continue
        found = _list(qa, "answers", place)
        answers = tuple(dict.fromkeys(_text(a, "text", f"{place}.answers[{k}]") for k, a in enumerate(found)))
        if not answers:
            raise InputDataError(f"{place}: needed an answer for an answerable question, found none; correct the file")
        yield asked, answers


def read_hotpotqa(path: Path) -> FileSource:
    """Questions of a HotpotQA file; the paragraphs given with a question are always shown.

    Raises InputDataError, with the place in the file, for anything that is not as published.
    """
    tree, digest = _load(path)
    if not isinstance(tree, list):
        raise InputDataError(f"{path}: needed a list of questions, found {_kind(tree)}; give the published file")
    parsed = []
    for i, item in enumerate(tree):
        where = f"{path}, [{i}]"
        asked, answer = _text(item, "question", where), _text(item, "answer", where)
        paragraphs = []
        for k, paragraph in enumerate(_list(item, "context", where)):
            good = isinstance(paragraph, list) and len(paragraph) == 2 and isinstance(paragraph[0], str)
            if not (good and isinstance(paragraph[1], list) and all(isinstance(s, str) for s in paragraph[1])):
                raise InputDataError(
                    f"{where}.context[{k}]: needed [title, [sentence, ...]], found {_kind(paragraph)}; correct the file"
                )
            paragraphs.append(f"{paragraph[0]}\n{''.join(paragraph[1])}")
        if not paragraphs:
            raise InputDataError(f"{where}.context: needed at least one paragraph, found none; correct the file")
        parsed.append((asked, answer, paragraphs))
    documents = sorted({text for _, _, paragraphs in parsed for text in paragraphs})
    index = {text: j for j, text in enumerate(documents)}
    questions = [
        Question(asked, (answer,), tuple(dict.fromkeys(index[text] for text in paragraphs)))
        for asked, answer, paragraphs in parsed
    ]
    return _source("HotpotQA", path, digest, documents, questions)


def _source(label: str, path: Path, digest: str, documents: Sequence[str], questions: Sequence[Question]) -> FileSource:
    if not questions:
        raise InputDataError(f"{path}: needed at least one answerable question, found none; give the published file")
    return FileSource(label, digest, documents, questions)


def _load(path: Path) -> tuple[Any, str]:
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise InputDataError(f"{path}: needed a JSON file ({error.strerror}); check the path") from None
    try:
        return parsed(data), hashlib.sha256(data).hexdigest()
    except ValueError as error:
        raise InputDataError(f"{path}: needed JSON ({error}); give the published file") from None


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object with " + (", ".join(map(str, list(value)[:5])) or "no fields")
    return f"{type(value).__name__} {str(value)[:30]!r}"


def _field(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise InputDataError(f"{where}: needed an object with {name!r}, found {_kind(value)}; correct the file")
    return value[name]


def _list(value: Any, name: str, where: str) -> list[Any]:
    found = _field(value, name, where)
    if not isinstance(found, list):
        raise InputDataError(f"{where}.{name}: needed a list, found {_kind(found)}; correct the file")
    return found


def _text(value: Any, name: str, where: str) -> str:
    found = _field(value, name, where)
    if not isinstance(found, str) or not found.strip():
        raise InputDataError(f"{where}.{name}: needed text, found {_kind(found)}; correct the file")
    return found
