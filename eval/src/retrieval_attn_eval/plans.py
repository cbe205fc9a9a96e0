"""What a retrieval task hides in its haystack and what it asks: needles, questions, answers.

A `Plan` is text without a length: `retrieval_attn_eval.tasks` puts it into a context of a given token length,
the training data generator does the same on token level with many questions after one context.  The prompts
follow the published shapes of RULER, InfiniteBench and the needle-in-a-haystack test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from retrieval_attn_eval.text.words import ACTIVITIES, ADJECTIVES, CITIES, NOUNS, PLACES

__all__ = ["PLANNERS", "TASKS", "Plan", "Question", "make_plan", "plan_city", "plan_niah", "plan_vt"]

NOISE_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Question:
    """One question: `text` follows the context, ends before the answer; `completion` is the full answer."""

    text: str
    answers: tuple[str, ...]
    completion: str
    task: str = ""


@dataclass
class Plan:
    """Needles and questions of one context.

    haystack: "prose", "noise", "needles" or "kv".  distractor: draws one more unit for the last two.
    ordered: needles keep their order in the text.  needle_style: the text put before and after every needle.
    """

    instruction: str
    needles: list[str]
    questions: list[Question]
    haystack: str = "prose"
    distractor: Callable[[], str] | None = None
    ordered: bool = False
    needle_style: tuple[str, str] = (" ", "")
    closing: str = ""
    answer_tokens: int = 32
    extra: dict[str, str] = field(default_factory=dict)


def uuid4(rng: random.Random) -> str:
    """Random version-4 UUID text, 36 characters."""
    digits = f"{rng.getrandbits(128):032x}"
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def word_key(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


DRAW: dict[str, Callable[[random.Random], str]] = {"words": word_key, "numbers": number, "uuids": uuid4}
"""How a key or value of a kind is drawn."""


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """`count` different draws, in order of drawing."""
    seen: dict[str, None] = {}
    while len(seen) < count:
        seen[draw()] = None
    return list(seen)


def listing(items: list[str]) -> str:
    """ "a", or "a, b, c, and d", as RULER does; of two, "a, and b"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def plan_niah(
    rng: random.Random,
    asks: int,
    *,
    haystack: str,
    key: str | Callable[[random.Random], str] = "words",
    value: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Plan:
    """RULER needle task; with asks > 1 every question has its own keys among the same needles.

    key: "words", "numbers", "uuids", or what draws one.
    """
    pick_key = DRAW[key] if isinstance(key, str) else key
    names = distinct(lambda: pick_key(rng), max(keys, queries * asks))
    table = {name: [DRAW[value](rng) for _ in range(values)] for name in names}
    needles = [f"One of the special magic {value} for {name} is: {item}." for name in names for item in table[name]]
    plural = queries * values > 1
    noun = value if plural else value[:-1]
    some, verb = ("Some", "are") if plural else ("A", "is")
    instruction = (
        f"{some} special magic {noun} {verb} hidden within the following text. Make sure to memorize it."
        f" I will quiz you about the {noun} afterwards.\n"
    )
    rng.shuffle(needles)
    questions = []
    for ask in range(asks):
        chosen = names[ask * queries : (ask + 1) * queries]
        found: list[str] = []
        for name in chosen:  # values of a key in the order of the text
            lines = {f"One of the special magic {value} for {name} is: {item}.": item for item in table[name]}
            found += [lines[line] for line in needles if line in lines]
        who = listing(chosen)
        start = "What are all" if plural else "What is"
        text = (
            f"\n{start} the special magic {noun} for {who} mentioned in the provided text?"
            f" The special magic {noun} for {who} mentioned in the provided text {verb}"
        )
        questions.append(Question(text, tuple(found), " " + ", ".join(found)))

    def distractor() -> str:
        name = pick_key(rng)
        while name in table:  # a second value for an asked key would make the answer ambiguous
            name = pick_key(rng)
        return f"One of the special magic {value} for {name} is: {DRAW[value](rng)}."

    tokens_per_value = 24 if value == "uuids" else 10
    return Plan(
        instruction,
        needles,
        questions,
        haystack,
        ordered=True,
        distractor=distractor,
        answer_tokens=tokens_per_value * queries * values + 8,
    )


def plan_vt(rng: random.Random, asks: int, *, chains: int = 1, hops: int = 4, example: bool = True) -> Plan:
    """RULER variable tracking; the statements of a chain keep their order in the text."""
    chains = max(chains, asks)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    names = distinct(lambda: "".join(rng.choices(letters, k=5)), chains * (hops + 1))
    values = distinct(lambda: number(rng, 5), chains)

    def statements(chain_names: list[str], value: str) -> list[str]:
        return [f"VAR {chain_names[0]} = {value}"] + [
            f"VAR {b} = VAR {a}" for a, b in zip(chain_names, chain_names[1:], strict=False)
        ]

    groups = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    queues = [statements(group, value) for group, value in zip(groups, values, strict=True)]
    turns = [i for i, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    cursors = [iter(queue) for queue in queues]
    needles = [next(cursors[i]) for i in turns]

    def ask_for(value: str, found: list[str]) -> Question:
        text = (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
            f" Answer: According to the chain(s) of variable assignment in the text above, {len(found)}"
            f" variables are assigned the value {value}, they are: "
        ).rstrip(" ")
        return Question(text, tuple(found), " " + ", ".join(found))

    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    instruction = head
    if example:
        shown = distinct(lambda: "".join(rng.choices(letters, k=5)), hops + 1)
        value = number(rng, 5)
        lines: list[str] = []
        for line in statements(shown, value):
            lines += [NOISE_LINE, line]
        question = ask_for(value, shown)
        instruction = head + "\n".join([*lines, NOISE_LINE]) + question.text + question.completion + "\n\n" + head
    questions = [ask_for(values[i], groups[i]) for i in range(asks)]
    style = rng.choice([("\n", ""), ("\n", ""), ("\n ", ""), ("\n", ".")])
    return Plan(
        instruction, needles, questions, "noise", ordered=True, needle_style=style, answer_tokens=8 * (hops + 1) + 8
    )


_HIDDEN_INFO = (
    "There is important information hidden inside a lot of irrelevant text. Find it and memorize it."
    " I will quiz you about the important information there.\n\n"
)


def plan_passkey(rng: random.Random, asks: int, *, name: str = "pass key") -> Plan:
    """InfiniteBench pass key and number string; one needle, so never more than one question."""
    key = number(rng, 5)
    if name != "pass key":
        for _ in range(5):
            at = rng.randrange(len(key))
            key = key[:at] + key[at] + key[at:]
    needle = f"The {name} is {key}. Remember it. {key} is the {name}."
    question = Question(f"\n\nWhat is the {name}? The {name} is", (key,), " " + key)
    return Plan(_HIDDEN_INFO, [needle], [question], "noise", needle_style=("\n", ""), answer_tokens=16)


_ASK_SHAPES = (
    "\n\nQuestion: {q}\nAnswer:",
    "\n\nQuestion: {q}\nAnswer:",
    "\n\nQuestion: {q} Answer:",
    "\nQuestion: {q}\nAnswer:",
    "\n\n{q}\nAnswer:",
    "\n\n{q}",
    "\n{q}",
    "\n\nQ: {q}\nA:",
)
_LEAD_INS = (
    "",
    "",
    "",
    "Read the following text and answer the question after it.\n\n",
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct.\n\n",
    "Answer the question from the text below.\n\n",
    "This is a test of long-text understanding. Read the text, then answer the question at its end.\n\n",
    "Context:\n",
)


def plan_city(
    rng: random.Random,
    asks: int,
    *,
    what: str,
    keys: int = 1,
    varied: bool = False,
    draw_key: Callable[[random.Random], str] | None = None,
) -> Plan:
    """Needle sentences about cities; varied=False uses the one prompt shape of the needle command."""
    pick = draw_key or (lambda r: r.choice(CITIES))
    names = distinct(lambda: pick(rng), max(keys, asks))
    shape = rng.choice(_ASK_SHAPES) if varied else _ASK_SHAPES[0]
    needles, questions = [], []
    stop = rng.choice([".", ""]) if varied else "."
    for place, name in enumerate(names):
        if what == "number":
            answer = number(rng)
            needles.append(f"The special magic {name} number is: {answer}{stop}")
            ask, full = f"What is the special magic {name} number?", f" The special magic {name} number is:"
        else:
            answer = rng.choice(ACTIVITIES).format(a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS), p=rng.choice(PLACES))
            needles.append(f"The best thing to do in {name} is {answer}.")
            ask, full = f"What is the best thing to do in {name}?", f" The best thing to do in {name} is"
        text = shape.format(q=ask)
        if varied and rng.random() < 0.15:
            text += full
        if place < asks:
            end = "." if what != "number" else ""
            questions.append(Question(text, (answer,), f" {answer}{end}"))
    style = rng.choice([(" ", ""), ("\n", ""), ("\n", "\n"), (" ", "\n")]) if varied else (" ", "")
    lead = rng.choice(_LEAD_INS) if varied else ""
    return Plan(lead, needles, questions, needle_style=style, answer_tokens=32 if what != "number" else 12)


def plan_kv_uuid(rng: random.Random, asks: int) -> Plan:
    """InfiniteBench key-value retrieval: the whole context is one JSON object of UUID pairs."""
    pairs = [(uuid4(rng), uuid4(rng)) for _ in range(asks)]
    needles = [f'"{key}": "{value}"' for key, value in pairs]
    questions = [
        Question(f'\nKey: "{key}"\nThe value associated with the specified key is:', (value,), f" {value}")
        for key, value in pairs
    ]
    instruction = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
    return Plan(
        instruction,
        needles,
        questions,
        "kv",
        closing="}",
        needle_style=(", ", ""),
        answer_tokens=28,
        distractor=lambda: f'"{uuid4(rng)}": "{uuid4(rng)}"',
    )


Planner = Callable[[random.Random, int], Plan]
PLANNERS: dict[str, Planner] = {
    "niah_single_1": lambda r, n: plan_niah(r, n, haystack="noise"),
    "niah_single_2": lambda r, n: plan_niah(r, n, haystack="prose"),
    "niah_single_3": lambda r, n: plan_niah(r, n, haystack="prose", value="uuids"),
    "niah_multikey_1": lambda r, n: plan_niah(r, n, haystack="prose", keys=4),
    "niah_multikey_2": lambda r, n: plan_niah(r, n, haystack="needles"),
    "niah_multikey_3": lambda r, n: plan_niah(r, n, haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": lambda r, n: plan_niah(r, n, haystack="prose", values=4),
    "niah_multiquery": lambda r, n: plan_niah(r, n, haystack="prose", queries=4),
    "vt": lambda r, n: plan_vt(r, n),
    "passkey": lambda r, n: plan_passkey(r, n),
    "number_string": lambda r, n: plan_passkey(r, n, name="sequence of digits"),
    "city_number": lambda r, n: plan_city(r, n, what="number"),
    "city_activity": lambda r, n: plan_city(r, n, what="activity"),
    "kv_uuid": lambda r, n: plan_kv_uuid(r, n),
}
TASKS: tuple[str, ...] = tuple(PLANNERS)


def make_plan(task: str, rng: random.Random, questions: int = 1) -> Plan:
    """Plan of `task` with `questions` questions about one context (pass key tasks always have one).

    Raises ValueError for an unknown task.
    """
    if task not in PLANNERS:
        raise ValueError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    return PLANNERS[task](rng, questions)
