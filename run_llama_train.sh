#!/usr/bin/env bash
# Train on this machine: ./run_llama_train.sh [--section.key value ...]
#   CONFIG_FILE  TOML file of the run     default: train_configs/debug_model.toml
#   NGPU         ranks to start           default: all GPUs that CUDA may use, or 1 rank on the CPU
#   LOG_RANK     ranks that log, 0,1,...  default: 0 (errors are shown of all)
#   PYTHON       Python to run            default: python
# Paths in them, in the file and in options are relative to the folder of this script.
set -euo pipefail

cd "$(dirname "$0")"
CONFIG_FILE=${CONFIG_FILE:-train_configs/debug_model.toml}
export LOG_RANK=${LOG_RANK:-0}
PYTHON=${PYTHON:-python}

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
fi
NGPU=${NGPU:-$((gpus > 0 ? gpus : 1))}
[[ $NGPU =~ ^[1-9][0-9]*$ ]] || { echo "error: NGPU = '$NGPU' must be a number of ranks, 1 or more" >&2; exit 2; }

# torchrun would set 1 thread a rank: deal the cores out instead. Of an Apple chip the fast ones.
cores=$(nproc 2>/dev/null || sysctl -n hw.perflevel0.physicalcpu 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
if [ "$gpus" -eq 0 ]; then
  # glibc gives large blocks back to the system as soon as they are freed: each step would fetch all its pages again.
  export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
fi
if ! grep -qi microsoft /proc/version 2>/dev/null; then # WSL's drivers fail at it (pytorch/pytorch issue 192330)
  # Blocks of memory that grow, instead of many sizes that do not fit: less is lost to fragmentation.
  export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi

train=(-m torchtrain.train --job.config_file "$CONFIG_FILE" "$@")
if [ "$NGPU" -eq 1 ]; then
  exec "$PYTHON" "${train[@]}"
fi
if [ "$(uname)" = Darwin ]; then
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0} # gloo would ask for the address of the Mac's own name
fi
# Port 0: each of several jobs on the machine finds a free one. A laptop's own name may have no address.
exec "$PYTHON" -m torchtrain.launch --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
  --local-addr localhost "${train[@]}"
