"""Generator of code_run: a module of functions that call each other in layers, and the value of one call.

Its functions are sorted by number and call into the next layer, so a sample of n functions is no beginning of a larger
one: it is drawn anew for every n.
"""

from __future__ import annotations

import random

from retrieval_attn_eval.infinitebench.record import Record

__all__ = ["LAYERS", "OPENING", "functions_of"]

LAYERS = (2, 4, 6, 8, 10)
OPENING = "\nHere is the content of functions_module.py:\n\n"
_ADD = (-12, 17)
_ARGUMENT = (-10, 10)


def functions_of(seed: int, i: int, count: int) -> tuple[list[tuple[str, str, str]], Record]:
    """Sample i with `count` functions: its functions in three pieces, and the record.

    The pieces of one function join to its text: head with its number, the call, the addend.  Layers differ by at most
    one function.  count: at least one function per layer.
    """
    depth = LAYERS[i % len(LAYERS)]
    assert count >= depth, (count, depth)
    rng = random.Random(f"infinitebench/code_run/{seed}/{i}")
    names = rng.sample(range(1, 2 * count + 1), count)
    layers = [names[layer::depth] for layer in range(depth)]
    calls: dict[int, int | None] = {}
    adds: dict[int, int] = {}
    for layer, following in zip(layers, [*layers[1:], []], strict=True):
        for name in layer:
            calls[name] = rng.choice(following) if following else None
            adds[name] = rng.randint(*_ADD)
    start, argument = rng.choice(layers[0]), rng.randint(*_ARGUMENT)
    value, name = argument, start
    while True:
        value += adds[name]
        called = calls[name]
        if called is None:
            break
        name = called
    pieces = [(f"def func_{n}(x):\n", _call(calls[n]), _addend(adds[n])) for n in sorted(names)]
    question = (
        f"Please give me the exact number of the return value of func_{start}({argument})."
        " Your response should end with the sentence 'The return value is:'."
    )
    context = OPENING + "".join(piece for function in pieces for piece in function)
    meta = {"layers": depth, "functions": count}
    return pieces, Record("code_run", context, question, (str(value),), (), f"generated code_run {i}", meta)


def _call(following: int | None) -> str:
    return "    return x" if following is None else f"    return func_{following}(x)"


def _addend(add: int) -> str:
    return "\n\n" if add == 0 else f" {'+' if add > 0 else '-'} {abs(add)}\n\n"
