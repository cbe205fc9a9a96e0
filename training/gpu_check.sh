#!/usr/bin/env bash
# On a GPU machine: CUDA tests, accuracy with full attention, and the same samples through retrieval.
# Usage: OUT=folder bash training/gpu_check.sh MODEL_FOLDER
set -u
model=$1
out=${OUT:-results/gpu}
mkdir -p "$out"
filler=()
[ -d .filler/held ] && filler=(--filler .filler/held)
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
RETRIEVAL_ATTN_TEST_MODEL=$model timeout 150 python3 -m pytest -q -p no:cacheprovider -m cuda tests 2>&1 | tail -40 | tee "$out/cuda_tests.txt"
timeout 130 python3 training/evaluate.py --model "$model" --lengths 4096 16384 32768 131072 --n 100 100 60 24 \
  --seed 50000 "${filler[@]}" --out "$out/full.json" 2>&1 | tee "$out/full.txt"
timeout 130 python3 training/evaluate_retrieval.py --model "$model" --lengths 16384 131072 --n 8 8 --workers 14 \
  --device cuda --max-seconds 110 "${filler[@]}" --out "$out/retrieval.json" 2>&1 | tee "$out/retrieval.txt"
