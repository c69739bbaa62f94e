# Sourced by first_hour.sh and eight_gpus.sh, in the folder of the repository: packages and environment of all parts.
export PYTHON=${PYTHON:-python3}
wheels=${WHEELS-wheels}
export PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-2} # several processes compile at the same time
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # as run_llama_train.sh does
if [ -n "$wheels" ] && [ -d "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# Scripts that torchrun starts do not find the package in the current folder.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
