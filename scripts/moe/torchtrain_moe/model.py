"""The decoder of OLMoE and Qwen3-MoE: Llama's, with a mixture of experts in place of each feed-forward network."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtrain_families.norms import ProjectionNorm

from torchtrain.models.llama import Transformer
from torchtrain.models.llama.model import TransformerBlock
from torchtrain_moe.config import MoEConfig
from torchtrain_moe.experts import Experts
from torchtrain_moe.router import Router


class MixtureOfExperts(nn.Module):
    """The sum of the outputs of each token's experts, times their weights.

    With tensor parallelism (``shard``) the input and the output are this rank's part of the residual stream. Each rank
    routes its own tokens, and computes with its part of each expert for the tokens of all.
    """

    tensor: DeviceMesh | None = None
    residual: Placement = Replicate()

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.dim, config.ffn_dim, config.n_experts)

    def shard(self, mesh: DeviceMesh, residual: Placement) -> None:
        """Divide the layer over the 1-D ``mesh``; ``residual``: the placement of the residual stream. The experts'
        parameters are sharded by ``parallelize``."""
        self.tensor, self.residual = mesh, residual
        self.router.shard(mesh, sharded_input=residual.is_shard())

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result have the shape (bs, seq, dim)."""
        logits = self.router(x)
        probabilities, chosen, weights = self.router.choose(logits)
        # The experts' tokens are those of all tensor-parallel ranks: (tokens, dim) and (tokens, k).
        shape = (tokens := self.gathered(x)).shape
        outputs = self.experts(tokens.flatten(0, 1), self.gathered(chosen).flatten(0, 1))  # (tokens, k, dim)
        weights = self.router.with_losses(weights, logits, probabilities, chosen, self.experts.rows_computed)
        weights = self.gathered(weights).flatten(0, 1).type_as(outputs)
        summed = (outputs * weights[..., None]).sum(1).view(shape)
        if self.tensor is None:
            return summed
        # Each rank has a summand, of its part of each expert.
        partial = DTensor.from_local(summed, self.tensor, [Partial()], run_check=False)
        return partial.redistribute(placements=[self.residual]).to_local()

    def gathered(self, x: Tensor) -> Tensor:
        """``x`` (bs, seq, ...) of all tensor-parallel ranks. Each of them has a summand of its gradient."""
        if self.tensor is None:
            return x
        own = DTensor.from_local(x, self.tensor, [self.residual], run_check=False)
        return own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class MoEBlock(TransformerBlock):
    feed_forward_class = MixtureOfExperts

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        for name, heads in (("q_norm", config.n_heads), ("k_norm", config.n_kv_heads)):
            norm = nn.RMSNorm(config.head_size, config.norm_eps)
            if config.norm_all_heads:
                norm = ProjectionNorm(heads, config.head_size, config.norm_eps)
            setattr(self.attention, name, norm)


class MoETransformer(Transformer):
    """Initial weights are those of Llama, of which an expert's are those of a feed-forward network."""

    block_class = MoEBlock

    def init_weights(self) -> None:
        super().init_weights()
        for name, parameter in self.named_parameters():
            if name.endswith("experts.w2"):  # writes to the residual stream
                std = 0.02 / math.sqrt(2 * (int(name.split(".")[1]) + 1))
                nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)

    def init_buffers(self) -> None:
        super().init_buffers()
        if not self.rope_cos.is_meta:
            for router in routers([self]):
                router.init_buffers()


def routers(model_parts: Sequence[nn.Module]) -> list[Router]:
    """The routers of this rank's layers, in order."""
    return [module for part in model_parts for module in part.modules() if isinstance(module, Router)]


def flops(config: Any, seq_len: int) -> int:
    """``flops_per_token`` with the parameters that a token uses: ``top_k`` experts of each layer, and the router."""
    heads = config.n_heads * config.head_size
    attention = config.dim * (2 * heads + 2 * config.n_kv_heads * config.head_size)
    experts = config.dim * (3 * config.top_k * config.ffn_dim + config.n_experts)
    used = config.n_layers * (attention + experts) + config.dim * config.vocab_size
    return 6 * used + 12 * config.n_layers * heads * seq_len
