"""One optimizer for the model: its parameters in groups by name, each with a rule, a decay and a learning rate."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.config.schema import Optimizer
from torchtrain.distributed.mesh import Mesh
from torchtrain.initialization import full_name
from torchtrain.optimizers.adamw import AdamWBfloat16, ShardedAdamW
from torchtrain.optimizers.muon import Muon

EMBEDDINGS = frozenset({"tok_embeddings.weight", "output.weight"})


def group_of(name: str, parameter: Tensor) -> str:
    """The group of a Transformer's parameter: "matrices" (of blocks), "embeddings" (and the output) or "vectors"."""
    if parameter.ndim < 2:
        return "vectors"
    return "embeddings" if full_name(name) in EMBEDDINGS else "matrices"


def build_optimizer(parts: Sequence[nn.Module], config: Optimizer, mesh: Mesh | None = None) -> torch.optim.Optimizer:
    """One optimizer over the parameters of ``parts``, which are on ``mesh``; None: plain tensors. Collective.

    Each of its ``param_groups`` has a ``name`` (see ``group_of``), a ``rule``, a ``weight_decay`` and a ``lr_factor``,
    by which the schedule's rate is multiplied: ``LRSchedule.apply`` sets ``lr``, a plain float, anew each step.
    """
    rules = {"matrices": config.name, "embeddings": "adamw", "vectors": "adamw"}
    decays = {"matrices": config.weight_decay, "embeddings": config.weight_decay, "vectors": 0.0}
    parameters: dict[str, list[Tensor]] = {group: [] for group in rules}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(
                    "the optimizer must be built after model.to_empty(device=...) and init_weights() (or a load): "
                    "to_empty replaces meta parameters, and the optimizer would go on updating the old ones"
                )
            if parameter.requires_grad:
                parameters[group_of(name, parameter)].append(parameter)
    groups: list[dict[str, Any]] = []
    for name, rule in rules.items():
        own = getattr(config, name)
        decay = decays[name] if own.weight_decay is None else own.weight_decay
        options = {"rule": rule, "weight_decay": decay, "lr_factor": own.lr_factor, "lr": config.lr * own.lr_factor}
        groups.append({"params": parameters[name], "name": name, **options})
    kind = AdamWBfloat16 if config.state_dtype == "bfloat16" else ShardedAdamW
    optimizer = kind(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
    if config.name == "muon":
        optimizer.step_of_other_rules = Muon(optimizer, parameters["matrices"], config, mesh).step
    return optimizer


def update(optimizer: torch.optim.Optimizer, refused: Tensor) -> None:
    """``optimizer.step()``, unless ``refused``, a float32 scalar that all ranks know, is 1.

    The contract of a refused update, which every rule keeps: parameters and states stay as they are, to the bit,
    although gradients may be infinite or NaN. With the fused implementation the step is made, and the rule obeys
    ``optimizer.found_inf``, which is ``refused``, on the device: so the host need not wait for it. (By this name
    gradient scaling tells torch's fused kernel of infinities.) With the others the host waits, and no step is made.
    """
    group = optimizer.param_groups[0]
    if group["fused"]:
        optimizer.found_inf = refused.to(group["params"][0].device)  # type: ignore[attr-defined]
        optimizer.step()
    elif not refused.item():
        optimizer.step()
