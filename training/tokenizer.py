"""Train the byte-level BPE tokenizer of the bundled model.

Three rules make retrieval easy for a tiny model: a digit is always one token, so is a line break,
and a UUID is cut into aligned pairs of hexadecimal digits (8 bits each), with its dashes as single tokens.
All rules look only at the text around one word, so texts that start with a space or a line break can be
joined without changing a token.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from retrieval_attn_eval.plans import TASKS, make_plan, uuid4
from retrieval_attn_eval.text.prose import prose
from retrieval_attn_eval.text.words import ADJECTIVES, CITIES, NOUNS

HEX = "[0-9a-f]"
UUID = f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}"
_GROUPS = (4, 2, 2, 2, 6)  # pairs per dash-separated group


def pair_rule() -> str:
    """Regex for one aligned pair inside a complete UUID (fixed-length look-around on both sides)."""
    marks = [f"{HEX}{{2}}" if mark == "x" else "-" for mark in "-".join("x" * size for size in _GROUPS)]
    sides = [
        f"(?<={''.join(marks[: i + 1])})(?={''.join(marks[i + 1 :])})"
        if i + 1 < len(marks)
        else f"(?<={''.join(marks)})"
        for i, mark in enumerate(marks)
        if mark != "-"
    ]
    return f"{HEX}{{2}}(?:{'|'.join(sides)})"


def pattern() -> str:
    """The whole pre-tokenizer: UUID pairs, single digits, line breaks, words, punctuation, spaces."""
    return "|".join(
        [
            pair_rule(),
            f" (?={UUID})",
            r"\n",
            r"[0-9]",
            r" ?[^\s\p{P}\p{S}0-9]+",
            r" ?[^\s\p{L}\p{N}]+?(?=" + UUID + ")",
            r" ?[^\s\p{L}\p{N}]+",
            r"[^\S\n]+(?!\S)",
            r"[^\S\n]+",
        ]
    )


def corpus(filler: list[str], seed: int = 0) -> Iterator[str]:
    """Training text of the tokenizer: filler, own prose, prompts of every task, many UUIDs."""
    rng = random.Random(seed)
    yield from filler
    yield prose(3_000_000, seed)
    for _ in range(40):
        yield " ".join(CITIES)
        yield " ".join(NOUNS) + " " + " ".join(f"{a}-{n}" for a, n in zip(ADJECTIVES, NOUNS, strict=False))
    for _ in range(300):
        for task in TASKS:
            plan = make_plan(task, rng)
            question = plan.questions[0]
            yield plan.instruction + "\n".join(plan.needles) + question.text + question.completion
    for _ in range(8000):
        yield uuid4(rng) + " " + uuid4(rng)


def train(filler: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(filler), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--filler", type=Path, help="folder of .txt files with ordinary English")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary size")
    args = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    texts = [path.read_text(errors="replace") for path in sorted(args.filler.glob("*.txt"))] if args.filler else []
    pieces = [part for text in texts for part in text.split("\n\n")]
    tokenizer = train(pieces, args.vocab)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=131072,
    )
    fast.save_pretrained(args.out)


if __name__ == "__main__":
    main()
