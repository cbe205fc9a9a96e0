"""A model with preloaded answers: each token of a script decides the next one, whatever stands before it.

Attention and MLP add nothing, embeddings are nearly orthogonal, and a row of the output matrix is the embedding of the
token before. The chat template ends a prompt with a token that names the script.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.chat_templates import Family

WIDTH = 256
SCALE = 40.0
"""Of the logits: temperature 1 samples the script, too."""
BLANK = "\N{EM SPACE}"
LENGTHS = (8, 7, 9, 6, 10, 5, 11, 12, 13, 14, 15, 16, 4, 3)
"""Characters of a token, tried in turn."""


def save_scripted_model(folder: Path, family: Family, scripts: Mapping[str, str], behind: Mapping[str, str]) -> None:
    """Save a model that answers with a script: with `scripts[N]` to a prompt of N messages, and with `behind[text]`
    behind a text at the end of a prompt.

    Scripts are cut into new tokens, so that each is unique. The template ends with blanks, one token for each script:
    they are no text to whoever looks for the end of the prompt.
    """
    tokenizer = copy.deepcopy(family.tokenizer)
    blanks = {name: BLANK * (2 + number) for number, name in enumerate(scripts)}
    named = "{{ " + repr(blanks) + "[script | default(messages | length | string)] if add_generation_prompt }}"
    tokenizer.chat_template = family.template + named
    tokenizer.add_tokens([AddedToken(blank, special=False, normalized=False) for blank in blanks.values()])
    chains: list[list[int]] = []
    for text in (*scripts.values(), *behind.values()):
        chains.append([])
        while text:
            known = tokenizer.get_vocab()
            marker = next((word for word in family.special if text.startswith(word)), "")
            end = min((place for word in family.special if (place := text.find(word)) > 0), default=len(text))
            lengths = [end] if end <= LENGTHS[0] + 4 else LENGTHS  # no rest before a marker
            piece = marker or next(text[: min(one, end)] for one in lengths if text[: min(one, end)] not in known)
            tokenizer.add_tokens([] if marker else [AddedToken(piece, special=False, normalized=False)])
            chains[-1].append(tokenizer.get_vocab()[piece])
            text = text[len(piece) :]
    following: dict[int, int] = {}
    for begin, chain in zip((*blanks.values(), *behind), chains, strict=True):
        last = tokenizer(begin, add_special_tokens=False)["input_ids"][-1]
        for token in (*chain, tokenizer.eos_token_id):
            assert last not in following, f"{tokenizer.decode([last])!r} has two successors"
            following[last], last = token, token
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(len(tokenizer), WIDTH), dim=-1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, after in following.items():
            model.lm_head.weight[after] += SCALE / WIDTH**0.5 * embeddings[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
