"""transformers' own `generate` with retrieval attention: `python examples/plain_transformers.py [MODEL]`.

The model is an unmodified transformers model. `enable` switches its attention and gives `generate` a retrieval cache;
`disable` switches back. Full attention generates the same tokens.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrieval_attn as ra
from retrieval_attn.model.bundled import model_path

FACT = "The special magic Lisbon number is: 4815162.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def main(model_name: str = "bundled") -> None:
    name = model_path(model_name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    question = "What is the special magic Lisbon number? The special magic Lisbon number is:"
    prompt = FILLER * 40 + FACT + FILLER * 40 + question
    inputs = tokenizer(prompt, return_tensors="pt")

    ra.enable(model, window=256, retrieve=100)
    found = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    ra.disable(model)
    full = model.generate(**inputs, max_new_tokens=12, do_sample=False)

    prompt_tokens = inputs["input_ids"].shape[1]
    print(f"{prompt_tokens:,} tokens of prompt")
    for way, tokens in (("retrieval", found), ("full attention", full)):
        print(f"{way}: {tokenizer.decode(tokens[0, prompt_tokens:].tolist(), skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
