"""Scores of free text: token F1 in English, character F1 in Chinese, rougeLsum of summaries.

The F1 follows SQuAD's evaluation ("SQuAD: 100,000+ Questions for Machine Comprehension of Text", section 6.1), as the
benchmark does; rougeLsum is the rouge-score package's, as Hugging Face Evaluate calls it (no stemming, sentences are
lines).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from retrieval_attn.errors import ConfigError

__all__ = ["characters", "f1", "need_rouge", "rouge_lsum", "words"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII = str.maketrans("", "", string.punctuation)
# what the benchmark removes from Chinese text beside ASCII punctuation
_CHINESE = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    + "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)


def words(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_ASCII)).split()


def characters(text: str) -> list[str]:
    """Lower-case characters without punctuation and white space."""
    return list("".join(text.lower().translate(_CHINESE).split()))


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the common items, with multiplicity; 0 if there are none."""
    common = (Counter(prediction) & Counter(reference)).total()
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def need_rouge() -> None:
    """Raise ConfigError, saying what to install, if summaries cannot be scored here."""
    if find_spec("rouge_score") is None:
        raise ConfigError(
            "longbook_sum_eng (En.Sum) is scored with rougeLsum and needs the package rouge-score, which is not"
            " installed; pip install rouge-score, or leave this task out"
        )


@cache
def _scorer() -> Any:
    return import_module("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)


def rouge_lsum(prediction: str, references: Sequence[str]) -> float:
    """F-measure of rougeLsum, the best over the references.  Raises ConfigError without rouge-score."""
    need_rouge()
    return float(_scorer().score_multi(list(references), prediction)["rougeLsum"].fmeasure)
