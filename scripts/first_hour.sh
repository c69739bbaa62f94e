#!/usr/bin/env bash
# What one GPU can prove, in less than twenty minutes: scripts/first_hour.sh [--dry-run] [--only PART ...]
#   OUT     folder for the results                     default: outputs/first_hour
#   WHEELS  folder that scripts/make_wheels.sh wrote   default: wheels; installed for this command if it is there
#   PYTHON  Python interpreter                         default: python3
# See scripts/first_hour.py.
set -euo pipefail

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
wheels=${WHEELS-wheels}
export PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-2} # several tests compile at the same time
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # as run_llama_train.sh does
if [ -n "$wheels" ] && [ -d "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
"$PYTHON" scripts/first_hour.py "$@"
