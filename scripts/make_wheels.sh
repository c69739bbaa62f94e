#!/usr/bin/env bash
# Download what torchtrain needs on a machine without a network that has torch, transformers, sentencepiece, tiktoken,
# tensorboard and pytest: scripts/make_wheels.sh [FOLDER]   (default: wheels)
#   PYTHON_VERSION  of that machine            default: 3.12
#   PROCESSOR       its processor              default: x86_64
# The wheels take less than 10 MB; scripts/first_hour.sh installs them. datasets, pyarrow and zstandard are not needed
# to train on text files and prepared data.
set -euo pipefail

cd "$(dirname "$0")/.."
folder=${1:-wheels}
processor=${PROCESSOR:-x86_64}
# torchft, with what of its requirements the machine lacks.
replicas=(torchft googleapis-common-protos opentelemetry-{api,sdk,proto,semantic-conventions}
  opentelemetry-exporter-{http-transport,otlp-common,otlp-proto-common,otlp-proto-http})
[ "$processor" = x86_64 ] || replicas=()
mkdir -p "$folder"
rm -f "$folder"/*.whl # pip would install none of two versions
pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" \
  --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
  --platform "manylinux_2_28_$processor" --platform "manylinux_2_17_$processor" --platform "manylinux2014_$processor" \
  --constraint constraints.txt \
  tomli tomli-w xxhash psutil pytest-timeout torchao "${replicas[@]}"
ls -l "$folder"
bytes=$(cat "$folder"/*.whl | wc -c)
echo "$bytes bytes"
[ "$bytes" -le 10000000 ] || { echo "error: more than 10 MB" >&2; exit 1; }
