"""Parameter groups: the optimizer, weight decay and learning rate of each parameter, selected by its name."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchtrain.config.parse import did_you_mean
from torchtrain.config.registry import OPTIMIZERS
from torchtrain.distributed.mesh import Mesh
from torchtrain.errors import ConfigError
from torchtrain.models.parameters import full_name, module_in_block
from torchtrain.models.spec import DecoderConfig, mup_ratios, spec_of
from torchtrain.optimizers.base import ParameterGroup, ShardedOptimizer
from torchtrain.optimizers.container import OptimizerContainer
from torchtrain.optimizers.options import OptimizerConfig, ParameterGroupConfig

EMBEDDINGS = frozenset({"tok_embeddings.weight", "output.weight"})


class GroupSettings(NamedTuple):
    """Settings shared by the parameters of one group."""

    name: str
    optimizer: str
    lr_factor: float
    weight_decay: float


def group_of(name: str, parameter: Tensor) -> str:
    """The group of a parameter: "hidden" (matrices of blocks), "embedding" (also the output) or "no_decay"."""
    if parameter.ndim < 2:
        return "no_decay"
    return "embedding" if full_name(name) in EMBEDDINGS else "hidden"


def mup_lr_scale(name: str, group: str, optimizer: type[ShardedOptimizer], model: DecoderConfig) -> float:
    """Factor on a parameter's learning rate (muP); its weight decay is divided by the factor.

    ``width`` and ``depth`` are the ratios of the model's dim and n_layers to those of the base model. muP
    (https://arxiv.org/abs/2203.03466, table 3) divides AdamW's learning rates of the blocks' matrices by ``width``;
    those of another optimizer by its ``mup_divisor``.

    muP multiplies the logits by 1 / ``width``. Here the initial value and the learning rate of the last norm's weight
    include that factor. CompleteP (https://arxiv.org/abs/2505.01618) multiplies each residual branch by 1 / ``depth``,
    which the branch's last linear layer (wo and w2 of Llama) includes. Thus models with tied embeddings and exported
    models need no multipliers.
    """
    width, depth = mup_ratios(model)
    if name == "norm.weight":
        return 1 / width
    if group != "hidden":
        return 1.0
    linear_layers = spec_of(model).linear_layers
    writes_to_residual = linear_layers.get(module_in_block(name)) == "rowwise"
    return 1 / ((depth if writes_to_residual else 1.0) * optimizer.mup_divisor(width))


def settings_of(name: str, parameter: Tensor, config: OptimizerConfig, model: DecoderConfig | None) -> GroupSettings:
    """Settings of the parameter ``name``, its full name. ``model``: for ``mup_lr_scale``; None for no factors."""
    group = group_of(name, parameter)
    of_group: ParameterGroupConfig = getattr(config, group)
    optimizer = config.name if group == "hidden" else "adamw"
    decay, lr_factor = of_group.weight_decay, of_group.lr_factor
    if decay is None:
        decay = 0.0 if group == "no_decay" else config.weight_decay
    pattern = next((pattern for pattern in config.groups if fnmatchcase(name, pattern.params)), None)
    if pattern is not None:
        optimizer = optimizer if pattern.optimizer is None else pattern.optimizer
        decay = decay if pattern.weight_decay is None else pattern.weight_decay
        lr_factor = lr_factor if pattern.lr_factor is None else pattern.lr_factor
    scale = mup_lr_scale(name, group, OPTIMIZERS[optimizer], model) if model is not None else 1.0
    return GroupSettings(group if pattern is None else pattern.params, optimizer, lr_factor * scale, decay / scale)


def optimizers_of(config: OptimizerConfig) -> dict[str, type[ShardedOptimizer]]:
    """The classes of all optimizers that ``config`` names, by name."""
    names = (config.name, "adamw", *(pattern.optimizer for pattern in config.groups if pattern.optimizer))
    return {name: OPTIMIZERS[name] for name in names}


def own_options(name: str, config: OptimizerConfig) -> Any:
    """[optimizer.options.NAME] as the optimizer's dataclass. Raises ConfigError for unknown keys and wrong types."""
    return OPTIMIZERS[name].read_options(config.options.get(name, {}), f"optimizer.options.{name}")


def check_optimizer(
    config: OptimizerConfig, parameters: Mapping[str, Tensor], model: DecoderConfig | None = None
) -> None:
    """Check ``config`` against all ``parameters`` of a model, by full name; they may be on the meta device.

    Raises:
        ConfigError: options of an optimizer are invalid, a pattern selects no parameter, or an optimizer cannot update
            one of its parameters.
    """
    used = optimizers_of(config)
    for name in config.options:
        if name not in used:
            near = did_you_mean(name, used)
            raise ConfigError(f"optimizer.options.{name} is for an optimizer that no parameter group selects{near}")
    for name in used:
        own_options(name, config)
    for number, pattern in enumerate(config.groups):
        if not any(fnmatchcase(name, pattern.params) for name in parameters):
            raise ConfigError(
                f"optimizer.groups[{number}].params = {pattern.params!r} matches no parameter"
                f"{did_you_mean(pattern.params, parameters)}"
            )
    for name, parameter in parameters.items():
        used[settings_of(name, parameter, config, model).optimizer].check_parameter(name, parameter)


def build_optimizer(
    model_parts: Sequence[nn.Module],
    config: OptimizerConfig,
    mesh: Mesh | None = None,
    model: DecoderConfig | None = None,
) -> OptimizerContainer:
    """Build the optimizers of all parameters of ``model_parts``, as one container. Collective.

    Args:
        mesh: the mesh of the parameters; None for plain tensors.
        model: config of the model, for ``mup_lr_scale``; None for no factors on learning rates.
    """
    groups: dict[GroupSettings, list[tuple[str, Tensor]]] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(
                    "the optimizer must be built after model.to_empty(device=...) and init_weights() (or a load): "
                    "to_empty replaces meta parameters, and the optimizer would keep updating the old ones"
                )
            if parameter.requires_grad:
                settings = settings_of(full_name(name), parameter, config, model)
                groups.setdefault(settings, []).append((full_name(name), parameter))
    optimizers = []
    for name, optimizer in optimizers_of(config).items():
        if mesh is not None:
            optimizer.create_process_groups(mesh)
        own: list[ParameterGroup] = [
            {
                "params": parameters,
                "name": settings.name,
                "lr": config.lr * settings.lr_factor,
                "lr_factor": settings.lr_factor,
                "weight_decay": settings.weight_decay,
            }
            for settings, parameters in groups.items()
            if settings.optimizer == name
        ]
        if own:  # a pipeline stage may have no parameter for this optimizer
            optimizers.append(optimizer(own, config, own_options(name, config), mesh))
    return OptimizerContainer(optimizers)
