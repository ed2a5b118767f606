#!/usr/bin/env bash
# The study on world G (docs/study.md), from its models to its tables and pictures; started again, it goes on.
#
#   bash examples/studies/gsm.sh runs/gsm 0,1 32        # folder, cards, runs side by side
set -euo pipefail
output=$1 gpus=${2:-0} jobs=${3:-16}

# A card can compute for several processes at once under NVIDIA's MPS: `nvidia-cuda-mps-control -d` before.
study() { crop-trl study "$@" --output "$output" --gpus "$gpus" --jobs "$jobs" --sample_together --discard_models; }

[ -f worlds/gsm/world.json ] ||
    python examples/gsm_symbolic/make_world.py --output worlds/gsm
study examples/studies/gsm_rates.yaml examples/studies/gsm_rates_counterfactuals.yaml
python examples/studies/gsm_grids.py "$output/runs.parquet" --output "$output/grids"
study "$output"/grids/main_*.yaml
study "$output"/grids/budgets_*.yaml

for against in random opd; do
    crop-trl study "$output"/grids/main_*.yaml --output "$output" --table --against $against | tee "$output/$against.md"
done
python examples/studies/draw_gsm.py "$output/runs.parquet" --output "$output"
crop-trl selectors --config examples/gsm_symbolic/train.yaml --dataset_name worlds/gsm/validation.jsonl \
    --bank_prompts 250 --bench_dir "$output/selectors"
crop-trl analyze "$output/selectors/bank.safetensors" --output "$output/selectors" \
    --methods crop random entropy tip ta-opd
