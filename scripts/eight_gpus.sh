#!/usr/bin/env bash
# What a machine with eight GPUs shows in an hour: scripts/eight_gpus.sh [--dry-run] [--only PART ...]
#   OUT     folder for the results                     default: outputs/eight_gpus
#   WORK    folder for runs and checkpoints, 250 GB    default: that of temporary files
#   RANKS   number of GPUs                             default: 8
#   WHEELS  folder that scripts/make_wheels.sh wrote   default: wheels; installed for this command if it is there
#   PYTHON  Python interpreter                         default: python3
# See scripts/eight_gpus.py.
set -euo pipefail

cd "$(dirname "$0")/.."
. scripts/gpu_environment.sh
"$PYTHON" scripts/eight_gpus.py "$@"
