#!/usr/bin/env bash
# Train on this machine: ./run_llama_train.sh [--section.key value ...]
#   CONFIG_FILE  TOML file of the run     default: train_configs/debug_model.toml
#   NGPU         ranks to start           default: all GPUs that CUDA may use, or 1 rank on the CPU
#   LOG_RANK     ranks that log, 0,1,...  default: 0 (errors of all ranks are shown)
#   NUMA_BINDING bind ranks to the cores near their GPU: node, socket, exclusive or core-complex (needs numactl)
#   PYTHON       Python interpreter       default: python
# Relative paths in these variables, in the TOML file and in options start at the folder of this script.
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

# Divide the cores among the ranks; torchrun would set one thread per rank. On an Apple chip, only fast cores count.
cores=$(nproc 2>/dev/null || sysctl -n hw.perflevel0.physicalcpu 2>/dev/null || sysctl -n hw.ncpu)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
if [ "$gpus" -eq 0 ]; then
  # By default glibc returns large blocks to the system when they are freed, so that each step has page faults again.
  export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
fi
if ! grep -qi microsoft /proc/version 2>/dev/null; then # not supported on WSL (pytorch/pytorch issue 192330)
  # Segments that can grow reduce fragmentation of GPU memory.
  export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi

train=(-m torchtrain.train)
[[ " $* " == *" --job.config"[_-]"file"[=\ ]* ]] || train+=(--job.config_file "$CONFIG_FILE")
train+=("$@")
if [ "$NGPU" -eq 1 ]; then
  exec "$PYTHON" "${train[@]}"
fi
if [ "$(uname)" = Darwin ]; then
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo0} # otherwise gloo resolves the host name, which a Mac may not know
fi
# Port 0 selects a free port, so that several jobs can run at once. localhost, because a laptop's host name may not
# resolve to an address.
exec "$PYTHON" -m torchtrain.launch --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
  --local-addr localhost ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} "${train[@]}"
