"""One optimizer for the model: its parameters in groups by name, each with a rule, a decay and a learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.config.schema import OptimizerConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.initialization import full_name
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.optimizers.adamw import ShardedAdamW
from torchtrain.optimizers.muon import Muon

EMBEDDINGS = frozenset({"tok_embeddings.weight", "output.weight"})


def group_of(name: str, parameter: Tensor) -> str:
    """The group of a Transformer's parameter: "matrices" (of blocks), "embeddings" (and the output) or "vectors"."""
    if parameter.ndim < 2:
        return "vectors"
    return "embeddings" if full_name(name) in EMBEDDINGS else "matrices"


def mup_lr_scale(name: str, group: str, rule: str, model: TransformerConfig) -> float:
    """Factor on a parameter's learning rate, by width and depth over the base model's; its decay is divided by it.

    muP (https://arxiv.org/abs/2203.03466, table 3): AdamW's rates of the blocks' matrices are divided by width, Muon's
    by sqrt(width): at the same root mean square, the largest singular value of its update grows only so fast.
    muP's multiplier of the logits, 1 / width, is in the gain of the last norm (its first value and its rate), and
    CompleteP's 1 / depth of each residual branch (https://arxiv.org/abs/2505.01618) is in wo and w2: so tied
    embeddings and exported models need no multipliers.
    """
    width, depth = model.mup_ratios
    if name == "norm.weight":
        return 1 / width
    if group != "matrices":
        return 1.0
    writes = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
    return 1 / ((depth if writes else 1.0) * (math.sqrt(width) if rule == "muon" else width))


def build_optimizer(
    parts: Sequence[nn.Module],
    config: OptimizerConfig,
    mesh: Mesh | None = None,
    model: TransformerConfig | None = None,
) -> torch.optim.Optimizer:
    """One optimizer over the parameters of ``parts``, which are on ``mesh``; None: plain tensors. Collective.

    ``model``: their config, for ``mup_lr_scale``; None: no factors.

    Each of its ``param_groups`` has a ``name`` (see ``group_of``), a ``rule``, a ``weight_decay`` and a ``lr_factor``,
    by which the schedule's rate is multiplied: ``LRSchedule.apply`` sets ``lr``, a plain float, anew each step.
    """
    rules = {"matrices": config.name, "embeddings": "adamw", "vectors": "adamw"}
    decays = {"matrices": config.weight_decay, "embeddings": config.weight_decay, "vectors": 0.0}
    members: dict[tuple[str, float], list[Tensor]] = {}  # by group and ``mup_lr_scale``
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.is_meta:
                raise RuntimeError(
                    "the optimizer must be built after model.to_empty(device=...) and init_weights() (or a load): "
                    "to_empty replaces meta parameters, and the optimizer would go on updating the old ones"
                )
            if parameter.requires_grad:
                group = group_of(name, parameter)
                factor = mup_lr_scale(full_name(name), group, rules[group], model) if model is not None else 1.0
                members.setdefault((group, factor), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for (name, factor), parameters in members.items():
        own = getattr(config, name)
        rate, decay = own.lr_factor * factor, decays[name] if own.weight_decay is None else own.weight_decay
        options = {"rule": rules[name], "weight_decay": decay / factor, "lr_factor": rate, "lr": config.lr * rate}
        groups.append({"params": parameters, "name": name, **options})
    optimizer = ShardedAdamW(
        groups,
        getattr(torch, config.state_dtype),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
    if config.name == "muon":
        optimizer.step_of_other_rules = Muon(optimizer, config, mesh).step
    return optimizer


def update(optimizer: torch.optim.Optimizer, refused: Tensor) -> None:
    """Run ``optimizer.step()``, unless ``refused``, a float32 scalar identical on all ranks, is 1.

    A skipped update leaves parameters and optimizer state bitwise unchanged, even if gradients are infinite or NaN. The
    fused implementation always runs the step, and the optimizer honors ``optimizer.found_inf``, set to ``refused``, on
    the device, so that the host does not wait. (Gradient scaling uses the same attribute to report infinities to
    torch's fused kernel.) With other implementations the host waits for ``refused`` and does not run a skipped step.
    """
    group = optimizer.param_groups[0]
    if group["fused"]:
        optimizer.found_inf = refused.to(group["params"][0].device)  # type: ignore[attr-defined]
        optimizer.step()
    elif not refused.item():
        optimizer.step()
