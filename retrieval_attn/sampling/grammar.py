"""Grammars of structured output: specification, compilation by llguidance, and token masks of one row.

Imports no torch. llguidance is the extra `grammar`; it is imported when the first grammar is compiled.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError, InputDataError

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "calls"]
Mask = NDArray[np.int32]
COMPILED_GRAMMARS = 64
"""Compiled grammars that are kept for later requests."""
WHITESPACE = r" |\n[ \t]{0,32}"
"""Between tokens of JSON: a space, or a line break with an indentation. Bounded: a model that repeats line breaks would
never end its answer."""
TEXT = r"/(.|\n)*/"
BLANK = r"/[ \n]{0,4}/"


@dataclass(frozen=True)
class GrammarSpec:
    """Grammar of an answer.

    Raises ConfigError for an unknown kind or an empty text.

    Attributes:
        kind: meaning of `text`: "json_schema", "regex" (of Rust's syntax), "choice" (a JSON list of strings), "grammar"
            (Lark or GBNF), or "calls" (a JSON object of `CallGrammar`).
        text: the grammar.
        after: marker that ends the model's thinking; the grammar constrains the text after it. "": the whole answer.
        opens: marker that begins thinking, if the answer may begin with it; "": the prompt has begun the thinking.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    opens: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(GrammarKind))}; got {self.kind!r}.")
        if not isinstance(self.text, str) or not self.text:
            raise ConfigError(f"the text of a grammar must be a non-empty string, got {self.text!r}.")


@dataclass(frozen=True)
class CallGrammar:
    """Tool calls with JSON arguments.

    Attributes:
        names: names of the functions.
        schemas: schema of the arguments of each.
        firsts: text before the arguments of a first call of each, after `trigger`, or after the prompt.
        nexts: text before the arguments of a later call; (): an answer has one call.
        close: text after the arguments of a call.
        end: text after the last call.
        trigger: text that begins calls after other text. "": the answer is calls or a text that does not begin with a
            brace. None: the prompt has begun a call.
        markers: special tokens that the other text may have.
    """

    names: Sequence[str]
    schemas: Sequence[Mapping[str, Any]]
    firsts: Sequence[str]
    nexts: Sequence[str]
    close: str
    end: str
    trigger: str | None
    markers: Sequence[str] = ()

    @property
    def spec(self) -> GrammarSpec:
        """The grammar of an answer."""
        return GrammarSpec("calls", json.dumps(asdict(self)))


class TokenMatcher:
    """State of a grammar after the tokens of one answer. For one thread at a time.

    error: message of llguidance if the grammar failed in this answer, such as for exceeded limits; "": it did not.
    """

    def __init__(self, matcher: Any, vocabulary: int, model_ends: Collection[int], ends: Collection[int]) -> None:
        """vocabulary: ids in the mask. model_ends: tokens that the compiled grammar allows at its end. ends: tokens
        that end this answer.
        """
        self._matcher, self.error = matcher, ""
        self._words = np.zeros(mask_words(vocabulary), np.int32)
        self._address = self._words.ctypes.data
        self._is_current = False
        both = set(model_ends) == set(ends)
        self._dropped = () if both else tuple(token for token in model_ends if token not in ends)
        self._added = () if both else tuple(token for token in ends if token < vocabulary)

    @property
    def mask(self) -> Mask:
        """Bits of the tokens that may come next, int32 words, lowest bit first; no bits after an error."""
        if not self._is_current:
            self._compute()
            self._is_current = True
        return self._words

    def accept(self, token: int) -> bool:
        """Append a token to the answer. Return True if the answer is complete and cannot continue."""
        self._is_current = False
        if self._matcher is None or not self._matcher.consume_token(token):
            self._fail()
            return False
        return bool(self._matcher.is_stopped())

    def close(self) -> None:
        """Free the state. The mask has no bits afterwards."""
        self._matcher, self._is_current = None, False

    def _compute(self) -> None:
        if self._matcher is None or self._matcher.is_error():
            self._fail()
            return
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        if self._matcher.is_error():
            self._fail()
            return
        if self._dropped or self._added:
            self._replace_ends(accepts=self._matcher.is_accepting())

    def _replace_ends(self, *, accepts: bool) -> None:
        """Allow the end tokens of this answer in place of the model's. One of the model's stays if nothing else is
        left: it completes a grammar that only the end can continue.
        """
        kept = self._words.copy()
        words = self._words.view(np.uint32)
        for token in self._dropped:
            words[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
        for token in self._added if accepts else ():
            words[token >> 5] |= np.uint32(1 << (token & 31))
        if not self._words.any():
            self._words[:] = kept

    def _fail(self) -> None:
        self._words[:] = 0
        if self._matcher is not None and not self.error:
            self.error = _first_words(str(self._matcher.get_error())) or "a token outside the grammar was appended"


def mask_words(vocabulary: int) -> int:
    """Return the int32 words of a mask."""
    return (vocabulary + 31) // 32


class GrammarCompiler:
    """Compile grammars for one tokenizer, in the calling thread. Any thread.

    llguidance releases the interpreter lock while it compiles: sequences decode meanwhile.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        """tokenizer: of transformers. vocabulary: ids that the model has embeddings for. ends: its end tokens."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, frozenset(ends)
        self._lock = threading.Lock()
        self._made: Any = None  # llguidance's tokenizer
        self._compiled: OrderedDict[GrammarSpec, Any] = OrderedDict()  # the last used one last

    def matcher(self, spec: GrammarSpec, ends: Collection[int] | None = None) -> TokenMatcher:
        """Return the state of a grammar before the first token.

        ends: tokens that end the answer; None: the model's.

        Raises ConfigError without llguidance, and InputDataError for a grammar that it cannot enforce.
        """
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is not None:
                self._compiled.move_to_end(spec)
        if compiled is None:
            compiled = self._compile(spec)
            with self._lock:
                self._compiled[spec] = compiled
                while len(self._compiled) > COMPILED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return TokenMatcher(compiled.deep_copy(), self._width, self._ends, self._ends if ends is None else ends)

    @property
    def _width(self) -> int:
        return max(self._vocabulary, len(self._tokenizer))

    def _compile(self, spec: GrammarSpec) -> Any:
        llguidance = _library()
        tokenizer = self._tokens(llguidance)
        try:
            text = _written(llguidance, spec, _Markers(self._tokenizer, tokenizer))
        except ValueError as error:  # of GBNF
            raise InputDataError(f"The {_NAMES[spec.kind]} cannot be enforced: {error}") from error
        found = llguidance.LLMatcher(tokenizer, text, log_level=0)
        if found.is_error():
            raise InputDataError(f"The {_NAMES[spec.kind]} cannot be enforced: {_first_words(found.get_error())}")
        first = TokenMatcher(found.deep_copy(), self._width, (), ())
        if not first.mask.any():
            raise InputDataError(f"The {_NAMES[spec.kind]} cannot be enforced: no text satisfies it.")
        return found

    def _tokens(self, llguidance: Any) -> Any:
        """Return llguidance's tokenizer. Made once: it takes a second for a vocabulary of 128K."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                if not self._ends:
                    raise InputDataError("Structured output needs an end token, and this model has none.")
                try:
                    self._made = from_tokenizer(self._tokenizer, n_vocab=self._width, eos_token=sorted(self._ends))
                except ValueError as error:
                    raise InputDataError(
                        f"Structured output is not possible with this model's tokenizer: {error}"
                    ) from error
            return self._made


_NAMES: Mapping[GrammarKind, str] = {
    "json_schema": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar",
    "calls": "schema of the strict tools",
}  # fmt: skip
MAX_ERROR = 400


def _first_words(error: str) -> str:
    """Return llguidance's message without the position in a generated grammar."""
    return error.split("\n<state>")[0].strip()[:MAX_ERROR]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "Structured output needs llguidance, which is not installed: pip install 'retrieval-attn[grammar]'."
        ) from error
    return llguidance


class _Markers:
    """Write texts with special tokens as Lark expressions."""

    def __init__(self, tokenizer: Any, tokens: Any) -> None:
        """tokens: llguidance's tokenizer, which keeps special tokens apart from text."""
        added = {str(one.content): token for token, one in tokenizer.added_tokens_decoder.items()}
        self._special = {word: token for word, token in added.items() if tokens.is_special_token(token)}

    def is_special(self, text: str) -> bool:
        """Return whether a text is one special token."""
        return text in self._special

    def written(self, text: str) -> str:
        """Return an expression that matches a text, "" for an empty one."""
        found = []
        while text:
            place, _, word = min(((text.find(one), -len(one), one) for one in self._special if one in text), default=
                                 (len(text), 0, ""))  # fmt: skip
            if place:
                found.append(json.dumps(text[:place], ensure_ascii=False))
            if word:
                found.append(f"<[{self._special[word]}]>")
            text = text[place + len(word) :]
        return " ".join(found)

    def until(self, name: str, marker: str) -> str:
        """Return rules for `name`: any text, and a marker that ends it."""
        if marker in self._special:
            return f"{name}: {TEXT} {self.written(marker)}\n"
        return f"{name}[lazy]: {TEXT} {self.written(marker)}\n"


def _written(llguidance: Any, spec: GrammarSpec, markers: _Markers) -> str:
    """Return a grammar in llguidance's form. Raises ValueError for a text that is no grammar of its kind."""
    matcher = llguidance.LLMatcher
    if spec.kind == "json_schema":
        found = matcher.grammar_from_json_schema(spec.text, None, {"whitespace_pattern": WHITESPACE, "lenient": False})
    elif spec.kind == "regex":
        found = matcher.grammar_from_regex(spec.text)
    elif spec.kind == "choice":
        found = matcher.grammar_from_lark("start: " + " | ".join(map(_quoted, json.loads(spec.text))))
    elif spec.kind == "calls":
        found = matcher.grammar_from_lark(_calls(CallGrammar(**json.loads(spec.text)), markers))
    else:
        found = llguidance.grammar_from("grammar", spec.text)
    if not spec.after:
        return str(found)
    thinking = f"({markers.written(spec.opens)} thinking)?" if spec.opens else "thinking"
    lark = f"start: {thinking} blank @answer\n{markers.until('thinking', spec.after)}blank: {BLANK}\n"
    # grammars in Lark's form are returned as they are
    is_json = str(found).lstrip().startswith("{")
    parts = json.loads(found)["grammars"] if is_json else [{"lark_grammar": found}]
    parts[0]["name"] = "answer"
    return json.dumps({"grammars": [{"name": "thinking", "lark_grammar": lark}, *parts]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _calls(calls: CallGrammar, markers: _Markers) -> str:
    """Return a Lark grammar of tool calls."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": False}
    count = range(len(calls.names))
    rules = [f"arguments_{n}: %json {json.dumps({**calls.schemas[n], 'x-guidance': options})}" for n in count]
    for kind, texts in (("first", calls.firsts), ("next", calls.nexts)):
        rules += [
            f'{kind}_{n}: {markers.written(text)} " "? arguments_{n} {markers.written(calls.close)}'
            for n, text in enumerate(texts)
        ]
    first, later = (" | ".join(f"{kind}_{n}" for n in count) for kind in ("first", "next"))
    more = f"({later})*" if calls.nexts else ""
    rules.append(f"calls: ({first}) {more} {markers.written(calls.end)}")
    if calls.trigger is None:
        start = "calls"
    elif not calls.trigger:
        start = "calls | other"
        rules.append(r"other: /([^{](.|\n)*)?/")
    else:
        start = "(marked head calls)* marked text" if calls.nexts else "marked text | marked head calls"
        special = " | ".join(markers.written(one) for one in calls.markers if markers.is_special(one))
        rules += [markers.until("head", calls.trigger), f"text: {TEXT}"]
        rules.append(f"marked: (text ({special}))*" if special else 'marked: ""')
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])
