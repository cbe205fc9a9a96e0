"""What stands around a context and a question, for tokenizers and templates of every habit."""

from __future__ import annotations

from typing import Any

import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.models import BUNDLED_MODEL
from retrieval_attn_eval.prompts import PromptFormat, Prompts
from retrieval_attn_eval.suite import Row


class TestPromptFormat:
    """Special tokens: exactly one BOS if the tokenizer uses one, wherever the template leaves it."""

    @staticmethod
    def tokenizer(*, adds_bos: bool, template: str | None) -> Any:
        from tokenizers import processors
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
        if adds_bos:
            made.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", made.bos_token_id), ("</s>", made.eos_token_id)]
            )
        made.chat_template = template
        return made

    @pytest.mark.parametrize("adds_bos", [False, True])
    @pytest.mark.parametrize(
        "template",
        [None, "<s>[{% for m in messages %}{{ m.content | trim }}{% endfor %}]", "[{{ messages[0].content }}]"],
    )
    def test_one_bos_and_no_eos(self, adds_bos: bool, template: str | None) -> None:
        made = self.tokenizer(adds_bos=adds_bos, template=template)
        form = PromptFormat.of(made)
        body = made("Some text.", add_special_tokens=False)["input_ids"]
        row = Row("id", "t", "", form.asked("Why?"), "", (), 4, None, context_ids=body)
        prompt = Prompts(form).of(row)
        ids = prompt.ids.tolist()
        wanted = adds_bos or (template or "").startswith("<s>")
        assert ids.count(made.bos_token_id) == wanted and made.eos_token_id not in ids
        assert not wanted or ids[0] == made.bos_token_id
        text = made.decode(ids).removeprefix("<s>").strip()
        assert text == ("Some text.\n\nQuestion: Why?\nAnswer:" if template is None else "[Some text.\n\nWhy?]")
        assert prompt.question_ids.tolist() == made(prompt.question_text, add_special_tokens=False)["input_ids"]

    def test_template_can_be_left_out(self) -> None:
        made = self.tokenizer(adds_bos=False, template="[{{ messages[0].content }}]")
        assert not PromptFormat.of(made, "never").chat

    def test_template_without_the_text_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="shows it 0 times"):
            PromptFormat.of(self.tokenizer(adds_bos=False, template="hello"))
