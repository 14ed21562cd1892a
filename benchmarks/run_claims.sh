#!/usr/bin/env bash
# The claims of docs/claims.md on the bundled model, on a CPU: train, probe snapshots, pool, copy the numbers.
# Usage: benchmarks/run_claims.sh [learning rate] [run folder] [steps to probe ...]
set -euo pipefail
cd "$(dirname "$0")/.."
lr="${1:-1e-4}"
run="${2:-runs/claims-$lr}"
shift $(($# < 2 ? $# : 2))
steps=("${@:-10}")
results="benchmarks/results/claims_bundled/lr_$lr"
last=${steps[-1]}

if [ ! -f "$run/manifest.json" ]; then
  counterpoise train recipes/demo.yaml --set run_dir="$run" --set seed=0 --set optimizer.lr="$lr" --set optimizer.warmup=40 \
    --set optimizer.steps_per_batch=4 --set rollouts.prompts=32 --set rollouts.group_size=8 --set num_steps=31 --set keep_every=10 \
    --set ledger.every=5 --set ledger.bank=32 --set eval.every=31 --set eval.prompts=400
fi

mkdir -p "$results"
counterpoise probe "$run" --probe flips
for step in "${steps[@]}"; do
  for probe in counterfactual coupling value; do
    counterpoise probe "$run" --step "$step" --probe "$probe"
  done
done
counterpoise probe "$run" --step "$last" --probe exchangeability
counterpoise probe "$run" --step "$last" --probe tax
counterpoise probe "$run" --step "$last" --probe drift

for probe in counterfactual coupling value exchangeability tax; do
  counterpoise probe "$run" --probe "$probe" --pool
  cp "$run/probes/$probe/pooled/summary.json" "$results/$probe.json"
done
for table in "$run"/probes/{coupling,value}/step_*/{causal,head,values_positive,values_negative}.parquet; do
  if [ -f "$table" ]; then
    step=$(basename "$(dirname "$table")")
    cp "$table" "$results/$(basename "$(dirname "$(dirname "$table")")")_${step}_$(basename "$table")"
  fi
done
cp "$(ls -d "$run"/probes/flips/step_* | tail -1)/summary.json" "$results/flips.json"
cp "$(ls -d "$run"/probes/drift/step_* | tail -1)/summary.json" "$results/drift.json"
cp "$run/config.yaml" "$run/manifest.json" "$results/"
if [ -f "$run/evals.jsonl" ]; then cp "$run/evals.jsonl" "$results/"; fi
