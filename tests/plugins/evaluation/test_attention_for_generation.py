"""Generation has masks, and so allows attention backends that support them, whatever the run has chosen."""

import torch

from torchtrain.parallelisms.attention_backend import choose_attention_backend
from torchtrain.plugins.evaluation.generation import attention_for_generation


def test_generation_allows_kernels_with_masks_beside_the_chosen_one() -> None:
    try:
        choose_attention_backend("flash")  # does not support masks on GPUs
        with attention_for_generation():
            assert torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        choose_attention_backend("auto")
