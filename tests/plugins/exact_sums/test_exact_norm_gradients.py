"""Gradients of norms with exact sums and tensor parallelism."""

import pytest
import torch
from gloo_pool import GlooPool
from test_data_parallel import assert_norm_gradients_are_reduced, norm_gradients

from torchtrain.config.schema import JobConfig
from torchtrain.models.llama import TransformerConfig
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.exact_sums.exact_sums import ExactGradientReducer, ExactSums


def sums_of(model: ParallelModel) -> ExactSums:
    assert isinstance(model.reducer, ExactGradientReducer)
    return model.reducer.sums


def _know_the_exponent(model: ParallelModel) -> None:
    sums_of(model).exponent = 0  # as if determined by an earlier step


def _norm_gradients(config: JobConfig, shape: TransformerConfig, reduced: bool) -> dict[str, torch.Tensor]:
    return norm_gradients(config, shape, reduced, _know_the_exponent, lambda model: 2.0 ** sums_of(model).spacing)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_norm_gradients_are_reduced_over_tensor_parallel_ranks_in_float32(gloo: GlooPool, sequence: bool) -> None:
    assert_norm_gradients_are_reduced(gloo, sequence, "exact", _norm_gradients)
