#!/usr/bin/env bash
# What one GPU shows, most valuable first: scripts/first_hour.sh [--dry-run] [--only PART ...]
#   OUT     folder for the results                     default: outputs/first_hour
#   WORK    folder for runs                            default: that of temporary files
#   WHEELS  folder that scripts/make_wheels.sh wrote   default: wheels; installed for this command if it is there
#   PYTHON  Python interpreter                         default: python3
# See scripts/first_hour.py.
set -euo pipefail

cd "$(dirname "$0")/.."
. scripts/gpu_environment.sh
"$PYTHON" scripts/first_hour.py "$@"
