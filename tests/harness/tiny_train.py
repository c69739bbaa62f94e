"""Run ``torchtrain.train`` with the model of ``forked_run`` and slow steps; started by torchrun."""

import sys
from unittest.mock import patch

import torch
from forked_run import TINY, slow_steps

from torchtrain.models import model_config
from torchtrain.train import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    with patch.object(model_config, "flavor_config", lambda *_: TINY), slow_steps():
        code = main()
    sys.exit(code)
