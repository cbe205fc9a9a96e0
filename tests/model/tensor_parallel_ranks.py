"""What every rank does in test_tensor_parallel.py: run the cases of a folder, write down what came out.

`torchrun --nproc-per-node 2 tests/model/tensor_parallel_ranks.py FOLDER` runs it as users do. Without torchrun it
becomes two ranks by itself, after one import for both: starting Python twice is most of the time of a CPU test.

FOLDER holds cases.json, a list of one of these: {"model": folder, "config": {...}} with "ids", "prompt" (how many of
them), "chunks" and "indexes", or with "text" and "question"; or {"command": words of the command line}. Each rank
writes FOLDER/rank<r>.pt, or FOLDER/rank<r>.error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

RANKS = 2


def main(folder: Path) -> int:
    if "RANK" in os.environ:
        return run_rank(folder)
    import_everything()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            code = 1
            try:
                code = run_rank(folder)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def import_everything() -> None:
    """All that ranks import, and no thread started yet: threads do not survive a fork."""
    import torch.distributed.tensor  # noqa: F401
    import transformers.models.gemma2.modeling_gemma2
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import retrieval_attn as ra
    import retrieval_attn.context  # noqa: F401

    assert ra.RetrievalCache is not None


def run_rank(folder: Path) -> int:
    """All cases on this rank. Returns 0; 1 after an error, which is written down."""
    import torch

    from tests.small_windows import spill_early

    rank = int(os.environ["RANK"])
    spill_early()
    try:
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = False
        cases = json.loads((folder / "cases.json").read_text())
        torch.save([run_case(case) for case in cases], folder / f"rank{rank}.pt")
        return 0
    except BaseException:
        # the other rank waits in a collective: this one's end must reach it, and its own error is the one to read
        (folder / f"rank{rank}.error").write_text(traceback.format_exc())
        return 1
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import retrieval_attn as ra
    from retrieval_attn.cpu.pool import default_pool
    from retrieval_attn.model.placement import input_device, tensor_ranks

    if "command" in case:
        from retrieval_attn.cli import main as command

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = command(case["command"])
        return {"status": status, "printed": printed.getvalue()}
    model: Any = AutoModelForCausalLM.from_pretrained(
        case["model"],
        distributed_config=DistributedConfig(tp_plan="auto"),
        dtype=torch.float32,
        attn_implementation="sdpa",
    ).eval()
    found: dict[str, Any] = {"ranks": tensor_ranks(model), "device": str(input_device(model))}
    if "question" in case:
        return {**found, **ask(model, case)}
    found.update(answers_of(model, case))
    pool = default_pool()
    found.update(threads=pool.threads, cpus=pool.cpus)
    ra.disable(model)
    return found


def answers_of(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Logits over all keys, greedy tokens with each index, and the heads that this process holds."""
    import torch

    import retrieval_attn as ra
    from retrieval_attn.attention.retrieval import RetrievalLayer
    from retrieval_attn.model.placement import input_device

    ids = torch.tensor([case["ids"]], device=input_device(model))
    prompt = ids[:, : case["prompt"]]
    found: dict[str, Any] = {"logits": {}, "tokens": {}}
    for chunk in case["chunks"]:
        config = ra.Config(**{**case["config"], "retrieve": "all", "prefill_chunk": chunk})
        ra.enable(model, config)
        cache = ra.RetrievalCache(model, config)
        pieces = [prompt, *ids[:, case["prompt"] :].split(1, dim=1)]
        with torch.no_grad():
            steps = [model(input_ids=piece, past_key_values=cache).logits for piece in pieces]
        found["logits"][chunk] = torch.cat(steps, dim=1).cpu()
    retrieving = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    found["host_heads"] = [layer.hosts[0].read(0, 1)[0].shape[0] for layer in retrieving]
    found["host_bytes"] = cache.host_nbytes
    found["layer_devices"] = [str(layer.window._key.device) for layer in retrieving]  # type: ignore[union-attr]
    for index in case["indexes"]:
        config = ra.Config(**{**case["config"], "index": index})
        ra.enable(model, config)
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "do_sample": False}
        out = model.generate(prompt, custom_generate=ra.generate, **options)
        found["tokens"][index] = out[0, prompt.shape[1] :].tolist()
    ra.disable(model)
    return found


def ask(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """A context read and asked: greedily, and by chance without a seed."""
    import torch
    from transformers import AutoTokenizer

    import retrieval_attn as ra

    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    context = ra.Context(model, tokenizer, ra.Config(**case["config"])).read(case["text"], progress=False)
    answer = context.ask(case["question"], max_new_tokens=12, question_attention="retrieval")
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # ranks that choose for themselves would part ways
    sampled = context.ask(case["question"], max_new_tokens=12, temperature=3.0)
    return {"text": answer.text, "host_bytes": answer.stats.host_bytes, "sampled": sampled.tokens}


if __name__ == "__main__":
    # the folder above this file holds the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(Path(sys.argv[1])))
