"""What a capped process takes of a card, as the card's own tool counts it, while it reads and answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

ALONE = "needs the card for itself: run this file without other tests beside it"
SLACK_MIB = 1536
"""A cap that is not nearly used proves nothing."""
# A model of Llama-3-8B's widths, and beside it as much ballast as leaves the room that the plan asks for.
SCRIPT = """
import pathlib, sys, torch, retrieval_attn as ra
from transformers import AutoTokenizer
from retrieval_attn_eval.bench.random_model import random_model
from retrieval_attn.gpu.memory import cap
limit, tokens = int(float(sys.argv[1]) * 2**30), 65536
device = torch.device("cuda", 0)
cap(device, limit)
model = random_model("llama3-8b-slice", torch.bfloat16, 0, "cuda")
tokenizer = AutoTokenizer.from_pretrained(pathlib.Path(ra.__file__).parent / "model" / "bundled")
config = ra.Config(index="device")
plan = ra.plan(model, context=tokens, gpu_memory=limit, config=config)
assert plan.fits, plan
ballast = torch.empty(limit - plan.device_bytes, dtype=torch.uint8, device=device)
ids = torch.randint(3, 4096, (tokens - 4096,), generator=torch.Generator().manual_seed(1)).tolist()
context = ra.Context(model, tokenizer, config).read(ids, progress=False)
for question in (ids[:32], ids[:1024]):
    context.continue_with(question, max_new_tokens=8, question_attention="exact")
    context.continue_with(question[:64], max_new_tokens=8, question_attention="retrieval")
context.extend(ids[:2048])
print("done")
"""


def used_mib() -> int:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


@pytest.mark.cuda
@pytest.mark.parametrize("limit", [20, 22.5, 24])
def test_a_capped_process_stays_below_its_cap(limit: float) -> None:
    import torch

    before = used_mib() - (torch.cuda.memory_reserved() >> 20)
    if before > 1024 or "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip(ALONE)
    before = used_mib()
    most = 0
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(limit)], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, used_mib() - before)
            time.sleep(0.05)
        said, _ = process.communicate()
    assert said.strip().endswith("done") and process.returncode == 0
    assert limit * 1024 - SLACK_MIB <= most <= limit * 1024
