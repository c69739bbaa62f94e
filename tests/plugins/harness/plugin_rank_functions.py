"""Functions of tests of plugins that run on several ranks, which import this module instead of transformers."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import STEPS, Curve, build, full_weights, gradients_of_a_step, train

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import load_weights
from torchtrain.config.registry import import_modules
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh, ParallelDims, resolve_parallel_dims
from torchtrain.metrics.hooks import Hook, Hooks
from torchtrain.models.initialization import layout_independent_init
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.parameters import full_name
from torchtrain.parallelisms import tensor_parallel
from torchtrain.parallelisms.options import ActivationCheckpointConfig, ParallelismConfig
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.huggingface.config import read_hf_config
from torchtrain.plugins.huggingface.safetensors_folder import save_hf
from torchtrain.trainer import TrainStep


def export(model: Transformer, folder: Path, dtype: str = "float32") -> None:
    save_hf(ModelState([model], model.config.tied_embeddings).state_dict(), folder, model.config, dtype, "")


def shard(shape: TransformerConfig, parallelism: ParallelismConfig) -> Transformer:
    mesh = Mesh(torch.device("cpu"), resolve_parallel_dims(parallelism, dist.get_world_size()))
    with torch.device("meta"):
        model = Transformer(shape)
    parallelize_llama(
        model,
        mesh,
        JobConfig(
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        ),
    )
    model.to_empty(device="cpu")
    model.init_buffers()
    return model


def load_and_export_sharded(
    source: Path, target: Path, shape: TransformerConfig, parallelism: ParallelismConfig
) -> int:
    model = shard(shape, parallelism)
    load_weights([model], source, shape)
    export(model, target)
    return max(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]


def generate_greedily(shape: TransformerConfig, ranks: int) -> list[int | None]:
    """Tokens that a randomly initialized model generates on ``ranks`` tensor-parallel ranks."""
    mesh = Mesh(torch.device("cpu"), ParallelDims(tensor=ranks))
    with torch.device("meta"):
        model = Transformer(shape)
    if ranks > 1:
        tensor_parallel.apply_tensor_parallel(model, mesh.tensor, sequence_parallel=False)
    model.to_empty(device="cpu")
    with layout_independent_init([model], 3), torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    return [token for (token,) in generate(model.requires_grad_(False), [[1, 2, 3]], Sampling(), max_new_tokens=12)]


def train_example_family(config: JobConfig, shape: TransformerConfig) -> Curve:
    """``train`` a model of the package in ``scripts/families`` with documents that begin with token 7."""
    import_modules(["torchtrain_families"])
    return train(config, shape, document_start=7)


def gradients_of_example_family(config: JobConfig, shape: TransformerConfig) -> dict[str, torch.Tensor]:
    """``gradients_of_a_step`` of a model of the package in ``scripts/families``."""
    import_modules(["torchtrain_families"])
    return gradients_of_a_step(config, shape)


def train_mixture(config: JobConfig, shape: TransformerConfig, steps: int = STEPS) -> Curve:
    """``train`` a model of the package in ``scripts/moe``."""
    import_modules(["torchtrain_moe"])
    return train(config, shape, steps)


def train_mixture_with_first_step(
    config: JobConfig, shape: TransformerConfig, steps: int
) -> tuple[Curve, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """``train_mixture``; returns the gradients of the first step, and the weights after it, too."""
    import_modules(["torchtrain_moe"])
    gradients: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}

    class FirstStep(Hook):
        def after_gradients(self) -> None:
            if not gradients:
                named = [of for part in parts for of in part.named_parameters()]
                gradients.update({full_name(name): p.grad.full_tensor().clone() for name, p in named})

        def after_update(self) -> None:
            if not weights:
                weights.update(full_weights(parts))

    def attach(train_step: TrainStep) -> None:
        parts.extend(train_step.model.model_parts)
        train_step.hooks = Hooks(FirstStep())

    parts: list[Any] = []
    curve = train(config, shape, steps, attach=attach)
    return curve, gradients, weights


def count_routers(config: JobConfig, shape: TransformerConfig, number: int = STEPS) -> torch.Tensor:
    """Train a mixture of experts; returns what its routers have counted in the last step, one row per layer."""
    import_modules(["torchtrain_moe"])
    from torchtrain_moe.model import routers

    steps: list[TrainStep] = []
    train(config, shape, number, attach=steps.append)
    return torch.stack([router.last for router in routers(steps[0].model.model_parts)])


def router_states(config: JobConfig, shape: TransformerConfig, bad_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a mixture of experts with a gradient that is not finite in ``bad_step``.

    Returns the loads and the biases of its routers after each step, of shape (steps, layers, experts).
    """
    import_modules(["torchtrain_moe"])
    from torchtrain_moe.model import routers

    own: list[Any] = []
    loads: list[torch.Tensor] = []
    biases: list[torch.Tensor] = []

    class States(Hook):
        def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
            self.step = step
            self.record()

        def record(self) -> None:
            loads.append(torch.stack([router.load.clone() for router in own]))
            biases.append(torch.stack([router.bias.clone() for router in own]))

        def after_gradients(self) -> None:
            if self.step == bad_step:
                own[0].weight.grad.to_local().fill_(float("nan"))

    def attach(train_step: TrainStep) -> None:
        own.extend(routers(train_step.model.model_parts))
        train_step.hooks = Hooks(hook)

    hook = States()
    train(config, shape, attach=attach)
    hook.record()
    return torch.stack(loads[1:]), torch.stack(biases[1:])


def copy_mixture(config: JobConfig, source: Path, target: Path) -> None:
    """Load a mixture of experts from a Hugging Face folder on a layout, and export it from there."""
    import_modules(["torchtrain_moe"])
    shape = read_hf_config(source)
    parts = build(config, shape).model_parts  # type: ignore[arg-type]
    load_weights(parts, source, shape)
    save_hf(ModelState(parts).state_dict(), target, shape, "float32", "")
