"""The 13 RULER tasks: their prompts, parameters, answer budgets and scoring rules (RULER paper, appendices B and C).

Prompt = instruction + haystack + question + answer prefix.  The wording and the numbers are the benchmark's; nothing
here draws or counts anything.
"""

from __future__ import annotations

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.suite.fitted import TaskSpec

__all__ = ["HOTPOTQA", "SQUAD", "WORDS", "LENGTHS", "QA_SYNTHETIC", "SPECS", "TASKS", "spec_of"]

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SHORT = 4096  # below this length cwe repeats its words less often

NIAH_INSTRUCTION = (
    "{some} special magic {noun} {verb} hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {noun} afterwards.\n"
)
NIAH_QUESTION = "\n{what} the special magic {noun} for {query} mentioned in the provided text?"
NIAH_PREFIX = " The special magic {noun} for {query} mentioned in the provided text {verb}"
NEEDLE = "One of the special magic {values} for {key} is: {value}."

VT_INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned"
    " the value {query}, they are: "
)

CWE_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others."
    " Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

FWE_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word."
    " Find the three most frequently appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'."
    " What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

_QA_ORDER = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
QA_INSTRUCTION = _QA_ORDER + "The following are given documents.\n\n"
QA_QUESTION = "\n\n" + _QA_ORDER + "Question: {query}"
QA_PREFIX = " Answer:"
QA_HEADER = "Document {i}:\n"


SQUAD, HOTPOTQA, WORDS = "dev-v2.0.json", "hotpot_dev_distractor_v1.json", "words.txt"
"""Files of `--data-dir`, by the names under which they are published."""


def _niah(
    name: str,
    title: str,
    haystack: str,
    key: str = "words",
    value: str = "numbers",
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> TaskSpec:
    options: dict[str, str | int] = {
        "haystack": haystack,
        "key": key,
        "value": value,
        "keys": max(keys, queries),
        "values": values,
        "queries": queries,
    }
    return TaskSpec(name, title, "niah", 128, options=options)


_ALL = (
    _niah("niah_single_1", "S1", "noise"),
    _niah("niah_single_2", "S2", "essay"),
    _niah("niah_single_3", "S3", "essay", value="uuids"),
    _niah("niah_multikey_1", "M1", "essay", keys=4),
    _niah("niah_multikey_2", "M2", "needle"),
    _niah("niah_multikey_3", "M3", "needle", key="uuids", value="uuids"),
    _niah("niah_multivalue", "MV", "essay", values=4),
    _niah("niah_multiquery", "MQ", "essay", queries=4),
    TaskSpec("vt", "VT", "vt", 30, options={"chains": 1, "hops": 4}),
    TaskSpec("cwe", "CWE", "cwe", 120, options={"common": 10}),
    TaskSpec("fwe", "FWE", "fwe", 50, options={"letters": 6}),
    TaskSpec("qa_1", "QA1", "qa", 32, part=True, needs=SQUAD),
    TaskSpec("qa_2", "QA2", "qa", 32, part=True, needs=HOTPOTQA),
)
# stand-ins for the two tasks that need files; never reported under their names
QA_SYNTHETIC = {"qa_1": "qa_synth_1", "qa_2": "qa_synth_2"}
_STAND_INS = (
    TaskSpec("qa_synth_1", "QA1-synth", "qa", 32, part=True, options={"hops": 1}),
    TaskSpec("qa_synth_2", "QA2-synth", "qa", 32, part=True, options={"hops": 2}),
)
TASKS: tuple[str, ...] = tuple(spec.name for spec in _ALL)
SPECS: dict[str, TaskSpec] = {spec.name: spec for spec in _ALL + _STAND_INS}


def spec_of(task: str) -> TaskSpec:
    """The task's spec.  Raises ConfigError, with the known names, for an unknown one."""
    if task not in SPECS:
        raise ConfigError(f"task {task!r} is unknown; choose from {', '.join(SPECS)}")
    return SPECS[task]
