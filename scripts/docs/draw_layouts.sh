#!/usr/bin/env bash
# Draw docs/curves.png: one run whose layout changes four times, once after a kill, beside the same run on one rank.
#   usage: scripts/docs/draw_layouts.sh [FOLDER [PICTURE]]   default: outputs/layouts docs/curves.png
# It takes about five minutes on two CPU cores, and needs matplotlib. It fails if any of the losses has other bits.
set -euo pipefail

cd "$(dirname "$0")/../.."
folder=${1:-outputs/layouts}
picture=${2:-docs/curves.png}
PYTHON=${PYTHON:-python}

# Microbatches of 4 rows on each layout, which local_batch_size and pipeline_parallel_microbatches say.
train() { # ranks, name, last step, options
  NGPU=$1 ./run_llama_train.sh --job.dump_folder "$folder/$2" --training.steps "$3" --lr_scheduler.total_steps 60 \
    --training.sums exact --grains.tensor 2 --grains.context 4 --training.global_batch_size 8 \
    --training.local_batch_size 4 --training.seq_len 128 --checkpoint.interval 12 --metrics.log_freq 1 \
    --validation.interval 12 "${@:4}"
}

train 1 one_rank 60

train 1 changed 12
train 2 changed 24 --parallelism.tensor_parallel_degree 2
train 2 changed 60 --parallelism.context_parallel_degree 2 &
until grep -q '"step": 40,' "$folder/changed/metrics.jsonl" 2>/dev/null; do
  kill -0 $! || exit 1 # it has ended by an error
  sleep 0.2
done
# The launcher is the child of the function, and the ranks are children of the launcher, which then ends, too.
kill -KILL $(pgrep --parent "$(pgrep --parent $!)")
wait $! || true
train 2 changed 48 --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatches 2 \
  --training.local_batch_size 8
train 2 changed 60 # data parallelism

"$PYTHON" scripts/docs/plot_layouts.py "$picture" "$folder/one_rank" "$folder/changed"
