"""Pretraining Llama models in native PyTorch."""

import signal
import sys
from importlib.util import find_spec

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # python -m torchtrain.train
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the command runs: no traceback of imports
    if not all(map(find_spec, ("tomli", "tomli_w", "xxhash"))):
        sys.stderr.write("error: the packages that torchtrain needs are not installed: pip install -e . (README.md)\n")
        sys.exit(2)
