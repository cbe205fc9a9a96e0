"""Where a context ends and a question begins in a model's prompt."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

# Stand-ins that are put through the chat template once, to learn the text around context and question.
_CONTEXT, _QUESTION = "CONTEXT-GOES-HERE", "QUESTION-GOES-HERE"


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt is opening + context + middle + question + closing, each part tokenized on its own.

    Chat models: one user turn "context, blank line, question", then the assistant's header, split from the
    tokenizer's own chat template. Models without one: "Question: ... Answer:" after the context.
    """

    tokenizer: PreTrainedTokenizerBase
    opening: str
    middle: str
    closing: str
    opening_has_specials: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> PromptTemplate:
        """The template of a tokenizer: its chat template if it has one."""
        if not tokenizer.chat_template:
            return cls(tokenizer, "", "\n\nQuestion: ", "\nAnswer:", False)
        turn = [{"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        opening, rest = str(text).split(_CONTEXT, 1)
        middle, closing = rest.split(_QUESTION, 1)
        return cls(tokenizer, opening, middle, closing, True)

    def context_ids(self, text: str) -> list[int]:
        """Ids of opening and context, with exactly the special tokens the model expects at a start."""
        add_specials = not self.opening_has_specials  # a chat template writes its own begin-of-sequence token
        ids: list[int] = self.tokenizer(self.opening + text, add_special_tokens=add_specials)["input_ids"]
        bos = self.tokenizer.bos_token_id
        eos = self.tokenizer.eos_token_id
        if add_specials and eos is not None and ids and ids[-1] == eos and eos != bos:
            ids = ids[:-1]  # some tokenizers close every text; a context goes on
        return ids

    def question_ids(self, question: str) -> list[int]:
        """Ids of everything from the end of the context to where the answer starts."""
        return self.plain_ids(f"{self.middle}{question}{self.closing}") if question.strip() else []

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text that continues another: no special tokens are added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
