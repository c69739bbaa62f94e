"""Pretraining Llama models in native PyTorch."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and not all(map(find_spec, ("tomli", "tyro", "xxhash"))):  # python -m torchtrain.train
    sys.stderr.write("error: the packages that torchtrain needs are not installed: pip install -e . (README.md)\n")
    sys.exit(2)
