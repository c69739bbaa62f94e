#!/usr/bin/env bash
# Draw docs/curves.png: one seed on five layouts, one of which is killed after step 60 and resumed from its checkpoint.
#   usage: scripts/draw_layouts.sh [FOLDER [PICTURE]]   default: outputs/layouts docs/curves.png
# It takes about ten minutes on two CPU cores, and needs matplotlib.
set -euo pipefail

cd "$(dirname "$0")/.."
folder=${1:-outputs/layouts}
picture=${2:-docs/curves.png}
PYTHON=${PYTHON:-python}

train() { # ranks, name, options
  NGPU=$1 ./run_llama_train.sh --job.dump_folder "$folder/$2" --metrics.log_freq 2 "${@:3}"
}

train 1 one_rank
train 2 tensor_2 --parallelism.tensor_parallel_degree 2
train 2 context_2 --parallelism.context_parallel_degree 2
train 4 pipeline_2_shard_2 --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4

killed=(2 shard_2_killed --training.local_batch_size 4)
set -m # a process group of its own, which kill ends with all ranks
train "${killed[@]}" &
until grep -q '"step": 60,' "$folder/shard_2_killed/metrics.jsonl" 2>/dev/null; do
  kill -0 $! || exit 1 # it has ended by an error
  sleep 0.2
done
kill -KILL -- -$!
wait $! || true
train "${killed[@]}"

"$PYTHON" scripts/plot.py "$folder"/{one_rank,tensor_2,context_2,pipeline_2_shard_2,shard_2_killed} -o "$picture"
