"""What HTTP takes from the throughput of an engine: many streams over a server, and the same requests in this process.

python -m tools.card.over_http --shape llama-3-8b --streams 32 --tokens 128 --out FOLDER

A model with random weights is saved with the bundled tokenizer, its vocabulary cut to the tokenizer's; a server is
started on it as users start it, and an engine of the same options here. They run one after the other. The threads
of the clients take what comes and look at nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer

import retrieval_attn as ra
from retrieval_attn.cli.serve import NEEDED
from retrieval_attn.model.bundled import BUNDLED
from retrieval_attn.model.loading import choose_device
from retrieval_attn.server.settings import EngineSpec
from retrieval_attn_eval.bench.random_model import layers_text, random_model
from tests.server.process import serving
from tools.card.subject import save_found
from tools.server_costs import body_of, document, in_process, over_http, requests_of

POSITIONS = 8192
"""Of a prompt with its answer: what memory is planned for."""
WARM_TOKENS = 1024
START_SECONDS = 300.0
"""For weights to be loaded, kernels compiled and graphs captured on a new machine."""
NAME = "bundled"
"""Of the model in requests, as `body_of` has it."""


def save_model(args: argparse.Namespace, folder: str) -> None:
    """Random weights that `serve` can load."""
    device = choose_device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED))
    model = random_model(args.shape, dtype, 0, device, args.layers)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def drained(http: httpx.Client, body: dict[str, Any]) -> str:
    """Take an answer in and look at nothing; the request's id."""
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"the server answered {reply.status_code}: {reply.read()!r}")
        for _ in reply.iter_raw():
            pass
        return str(reply.headers["x-request-id"])


def main() -> int:
    """Measure, and write found.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", metavar="NAME")
    parser.add_argument("--layers", type=int, metavar="N")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"a server needs {', '.join(missing)}: pip install 'retrieval-attn[serve]'")
    bodies = [body_of(document(1000 + number, 100), args.tokens) for number in range(args.streams)]
    with tempfile.TemporaryDirectory(prefix="card-model-") as folder:
        save_model(args, folder)
        flags = [
            "--name",
            NAME,
            "--device",
            args.device,
            "--max-num-seqs",
            str(args.streams),
            "--max-context",
            str(POSITIONS),
        ]
        flags += ["--warm-up", str(WARM_TOKENS), "--store", f"{folder}/store"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
        with serving(folder, *flags, environment=threads, start_seconds=START_SECONDS) as served:
            found = {"http": [over_http(served, bodies, drained) for _ in range(args.repeats + 1)]}
        # not beside the server: threads of two engines would share the cores
        loading = {"device": args.device, "max_context": POSITIONS}
        spec = EngineSpec(
            folder, loading, ra.Config().to_dict(), rows=args.streams, warm_tokens=WARM_TOKENS, store=f"{folder}/other"
        )
        llm, engine = spec.load()
        gc.freeze()  # as the server does
        prompts = requests_of(llm, bodies, args.tokens)
        with engine:
            found["engine"] = [in_process(engine, prompts) for _ in range(args.repeats + 1)]
    found = {name: values[1:] for name, values in found.items()}  # the first ones compile
    rates = {name: statistics.median(values) for name, values in found.items()}
    said = [f"random weights of the shape {args.shape}, {layers_text(args.shape, args.layers)}"]
    said.append("vocabulary cut to that of the bundled tokenizer; no text of a language")
    report = {"streams": args.streams, "tokens": args.tokens, "tokens_per_second": rates, "all": found}
    report |= {
        "ratio": rates["http"] / rates["engine"],
        "prompts": [one.prompt_tokens for one in prompts],
        "simplifications": said,
    }
    save_found(args, None, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
