#!/usr/bin/env bash
# The claims of docs/claims.md on the bundled model, on a CPU: train, probe four snapshots, pool. Half an hour on two cores.
# Usage: benchmarks/run_claims.sh [work folder]
set -euo pipefail
cd "$(dirname "$0")/.."
run="${1:-runs/claims}"
results=benchmarks/results/claims_bundled

if [ ! -f "$run/checkpoints/step_000041/state.json" ]; then
  counterpoise train recipes/demo.yaml --fresh --set run_dir="$run" --set num_steps=41 --set keep_every=10 \
    --set ledger.every=10 --set ledger.bank=32 --set eval.every=41 --set eval.prompts=200
fi

for step in 10 20 30 40; do
  counterpoise probe "$run" --step "$step" --probe counterfactual
  counterpoise probe "$run" --step "$step" --probe coupling
  counterpoise probe "$run" --step "$step" --probe value
  counterpoise probe "$run" --step "$step" --probe exchangeability
  counterpoise probe "$run" --step "$step" --probe tax
done
counterpoise probe "$run" --step 40 --probe flips
counterpoise probe "$run" --step 40 --probe drift

mkdir -p "$results"
for probe in counterfactual coupling value exchangeability tax; do
  counterpoise probe "$run" --probe "$probe" --pool --json > "$results/$probe.json"
  for step in 10 20 30 40; do
    for table in "$run/probes/$probe/step_0000$step"/{causal,head,values_positive,values_negative}.parquet; do
      if [ -f "$table" ]; then cp "$table" "$results/${probe}_${step}_$(basename "$table")"; fi
    done
  done
done
cp "$run/probes/flips/step_000040/summary.json" "$results/flips.json"
cp "$run/probes/flips/step_000040/shares.parquet" "$results/flips_shares.parquet"
cp "$run/probes/drift/step_000040/summary.json" "$results/drift.json"
cp "$run/config.yaml" "$run/manifest.json" "$run/evals.jsonl" "$results/"
counterpoise audit "$run" --json > "$results/audit.json"
