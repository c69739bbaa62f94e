"""Verify a plain PyTorch model that torchtrain does not train, with a function of its own that parallelizes it.

The model maps tokens to logits, and is written for any training loop. See docs/verify-layouts.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.errors import ConfigError
from torchtrain.models.parameters import local_block
from torchtrain.models.spec import ModelSpec
from torchtrain.trainer import TrainStep


def register(
    name: str, build: Callable[[], nn.Module], parallelize: Callable[[nn.Module, Mesh], object], vocab_size: int
) -> None:
    """Register a plain model as ``model.name``, for ``torchtrain.verify_layouts`` alone.

    Args:
        build: builds the model with initialized weights, small: called with tokens, int64 of shape (8, 64), it returns
            logits (8, 64, vocab_size). It is also called on the meta device.
        parallelize: parallelizes the model in place, on the meta device. ``mesh.tensor`` is the 1-D device mesh of
            tensor parallelism, and ``mesh.fsdp`` that of ``fully_shard``, both perhaps of one rank.
    """

    def build_decoder(config: PlainConfig) -> nn.Module:
        return PlainDecoder(config, build)

    def parallelize_decoder(model: PlainDecoder, mesh: Mesh, config: JobConfig, reducer: GradientReducer) -> None:
        for axis in ("context", "pipeline"):
            if getattr(mesh.degrees, axis) > 1:
                raise ConfigError(f"a plain model has no {axis} parallelism")
        if mesh.degrees.tensor > 1 and not config.parallelism.enable_sequence_parallel:
            raise ConfigError("sequence_parallel=false is no option of a plain model")
        parallelize(model.model, mesh)
        # The trainer needs an FSDP module; this one has no parameters of its own.
        fully_shard(model, mesh=reducer.mesh, ignored_params=set(model.parameters()))
        for module in model.modules():
            if isinstance(module, FSDPModule) and reducer.mesh.size() > 1:
                # The loss is divided by the tokens of the global batch: gradients are sums over ranks.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    MODELS.register(name)(
        ModelSpec(
            config_class=PlainConfig,
            model_class=build_decoder,
            flavors={"debugmodel": PlainConfig(vocab_size=vocab_size)},
            linear_layers={},
            parallelize=parallelize_decoder,
        )
    )


@dataclass(frozen=True)
class PlainConfig:
    """Config of a ``PlainDecoder``. The sizes of the model are its own matter: these allow any degree."""

    vocab_size: int
    max_seq_len: int = 2048
    family: str = ""
    dim = n_layers = n_heads = n_kv_heads = head_size = ffn_dim = 64
    tied_embeddings = False


class PlainDecoder(nn.Module):
    """A plain model with the interface of ``Decoder``."""

    def __init__(self, config: PlainConfig, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = self.norm = self.output = None
        self.layers = nn.ModuleDict()
        self.model = build()
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            initial = build()
        # Not a child: its parameters are not trained.
        self.initial = {name: t.detach() for name, t in (*initial.named_parameters(), *initial.named_buffers())}
        names: dict[int, list[str]] = {}
        for name, parameter in initial.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.shared = [group for group in names.values() if len(group) > 1]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize all parameters with those of the model as it builds itself, on any layout."""
        for name, parameter in self.model.named_parameters():
            block, spans = local_block(parameter)
            local(block).copy_(self.initial[name][spans])
        self.init_buffers()

    def init_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            if not buffer.is_meta:
                buffer.copy_(self.initial[name])

    def tie_weights(self) -> None:
        """Share again what the model shares: ``to_empty`` makes two parameters of one."""
        for first, *others in self.shared:
            for name in others:
                module, _, child = name.rpartition(".")
                setattr(self.model.get_submodule(module), child, self.model.get_parameter(first))

    def replace_inner_attention(self, make: Callable[[nn.Module], nn.Module]) -> None:
        """A plain model has no context parallelism."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,  # noqa: ARG002
        mask: Any = None,  # noqa: ARG002
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        logits: Tensor = self.model(tokens)
        if isinstance(logits, DTensor) and logits.placements != (Shard(logits.ndim - 1),):
            logits = logits.redistribute(placements=[Replicate()] * logits.device_mesh.ndim).to_local()
        return logits if head is None else head(logits, LogitsAsTheyAre(self.config.vocab_size))


class LogitsAsTheyAre(nn.Module):
    """In place of an output layer, for a loss without chunks."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, 1, device="meta"), requires_grad=False)

    def forward(self, logits: Tensor) -> Tensor:
        return logits


class PlainTrainStep(TrainStep):
    """A train step without clipping, which needs parameters that are DTensors on all dimensions of the mesh."""

    def clip_and_update(self, step: int, loss: Any) -> Tensor:  # noqa: ARG002
        for part in self.model.model_parts:
            for parameter in part.parameters():
                gradient = parameter.grad
                # Without FSDP, that of a replicated weight may be a sum which is not completed. PyTorch's optimizers
                # complete it; the ones here update local shards.
                if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                    parameter.grad = gradient.redistribute(placements=parameter.placements)
        self.hooks.after_gradients()
        self.schedule.apply(self.optimizer, step)
        self.optimizer.step()
        self.hooks.after_update()
        self.optimizer.zero_grad()
        return torch.zeros(())
