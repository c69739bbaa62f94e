"""Peak memory and products of the loss, as the planner's recorder counts them."""

import pytest
import torch
from test_loss import DIM, VOCAB, loss_and_gradients
from torch import nn

from torchtrain.models.loss.output_loss import OutputLoss
from torchtrain.plugins.planner.instrument import instrument
from torchtrain.plugins.planner.recorder import StepRecorder


@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_z_loss_does_not_increase_peak_memory(tokens: int, dtype: torch.dtype) -> None:
    output = nn.Linear(DIM, VOCAB, bias=False, dtype=dtype)
    hidden = torch.randn(4, 200, DIM, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (4, 200))
    peaks = []
    for z_weight in (0.0, 1e-4):
        with instrument(StepRecorder("cpu")) as recorder:
            loss_and_gradients(OutputLoss(tokens, z_weight=z_weight), hidden, output, labels)
            recorder.end_step()
        peaks.append(sum(recorder.steps[0].peak))
    assert peaks[0] > 0
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize(
    ("split_backward", "dim", "kept"), [(False, 128, True), (False, 63, False), (True, 128, False)]
)
def test_gradient_of_the_output_matrix_is_added_in_float32_or_one_product(
    split_backward: bool, dim: int, kept: bool
) -> None:
    """One product of all chunks, where the gradients of the logits do not need more memory than that matrix."""
    output = nn.Linear(dim, VOCAB, bias=False).bfloat16()
    hidden = torch.randn(2, 64, dim).bfloat16().requires_grad_()
    with instrument(StepRecorder("cpu")) as recorder:
        loss = OutputLoss(16, split_backward=split_backward)(hidden, output, torch.randint(VOCAB, (2, 64)))
        torch.autograd.grad(loss.sum(), (hidden, output.weight))
        recorder.end_step()
    products = [operation.flops for operation in recorder.steps[0].operations if operation.flops]
    whole = 2 * 128 * VOCAB * dim
    assert products == [whole // 8] * 16 + [whole] if kept else [whole // 8] * 24
