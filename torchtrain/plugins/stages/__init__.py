"""Plugin: runs in stages, and batch sizes that change during a run (docs/stages.md)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torchtrain.config.parse import to_toml
from torchtrain.config.registry import RUN_PLANS
from torchtrain.config.run_plan import ResolveOne, RunPlan
from torchtrain.config.schema import JobConfig


@RUN_PLANS.register("stages")
class StagePlan(RunPlan):
    """A run in stages: tables ``[[stages]]``, or the batch sizes of a schedule."""

    has_stages = True
    way_to_continue = "add a stage"

    @classmethod
    def divides(cls, config: JobConfig) -> bool:
        return bool(config.stages or config.training.global_batch_size_schedule)

    def resolve(self, resolve_one: ResolveOne) -> Sequence[JobConfig]:
        from torchtrain.plugins.stages.driver import resolve_stages  # imports PyTorch

        return resolve_stages(self.config, resolve_one)

    def train(self, build: Callable[..., Any]) -> int:
        from torchtrain.plugins.stages.driver import train_in_stages  # imports PyTorch

        return train_in_stages(self.config, build)

    @cached_property
    def stages(self) -> Sequence[JobConfig]:
        from torchtrain.plugins.stages.configs import stage_configs

        return [replace(own, stages=self.config.stages) for own in stage_configs(self.config)]

    def table(self) -> list[tuple[str, ...]]:
        from torchtrain.plugins.stages.table import stage_table  # imports PyTorch

        return stage_table(self)

    def config_of_saved_stage(self, saved_toml: str, step: int, allow_changes: Iterable[str]) -> str:
        from torchtrain.plugins.stages.resume import config_of_saved_stage

        return config_of_saved_stage(saved_toml, to_toml(self.config), step, allow_changes)
