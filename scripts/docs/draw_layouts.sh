#!/usr/bin/env bash
# Draw docs/curves.png: one seed on five layouts, one of which is killed after step 24 and resumed from step 20.
#   usage: scripts/docs/draw_layouts.sh [FOLDER [PICTURE]]   default: outputs/layouts docs/curves.png
# It takes about five minutes on two CPU cores, and needs matplotlib. In bfloat16, layouts would differ by its rounding.
set -euo pipefail

cd "$(dirname "$0")/../.."
folder=${1:-outputs/layouts}
picture=${2:-docs/curves.png}
PYTHON=${PYTHON:-python}

# A rate of 5e-4 and rows of 128 tokens: with the debug model's rate of 2e-3 on few documents in a step, gradients are so
# large that the rounding of the first step grows to a percent.
train() { # ranks, name, options
  NGPU=$1 ./run_llama_train.sh --job.dump_folder "$folder/$2" --training.steps 60 --lr_scheduler.total_steps 60 \
    --optimizer.lr 5e-4 --training.seq_len 128 --training.mixed_precision_param float32 --checkpoint.interval 20 \
    --metrics.log_freq 1 --validation.interval 6 "${@:3}"
}

train 1 one_rank
train 2 tensor_2 --parallelism.tensor_parallel_degree 2
train 2 context_2 --parallelism.context_parallel_degree 2
train 4 pipeline_2_shard_2 --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4

killed=(2 shard_2_killed --training.local_batch_size 4)
train "${killed[@]}" &
until grep -q '"step": 24,' "$folder/shard_2_killed/metrics.jsonl" 2>/dev/null; do
  kill -0 $! || exit 1 # it has ended by an error
  sleep 0.2
done
# The launcher is the child of the function, and the ranks are children of the launcher, which then ends, too.
kill -KILL $(pgrep --parent "$(pgrep --parent $!)")
wait $! || true
train "${killed[@]}"

"$PYTHON" scripts/docs/plot_layouts.py "$picture" "$folder"/{one_rank,tensor_2,context_2,pipeline_2_shard_2,shard_2_killed}
