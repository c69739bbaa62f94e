"""Which checkpoints of a run in stages a stage continues from, and what may have changed since."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import tomli
import tomli_w

from torchtrain.checkpoint.resume_compatibility import Difference, Kind, differences, joined
from torchtrain.config.run_plan import OtherStageError
from torchtrain.config.section import flat
from torchtrain.errors import CheckpointError
from torchtrain.plugins.stages.configs import nested, set_options


def config_of_saved_stage(saved_toml: str, current_toml: str, step: int, allow_changes: Iterable[str]) -> str:
    """The current config of the stage whose config the checkpoint of ``step`` has.

    A run in stages resumes from a checkpoint of the current stage, or from the last one of the stage before. The saved
    config is compared with the current config of the stage that saved it. Later stages may have changed.

    Raises:
        CheckpointError: an earlier stage has changed, or this one is now shorter than ``step``.
        OtherStageError: the checkpoint is not one from which the current stage can continue.
    """
    saved, current = tomli.loads(saved_toml), tomli.loads(current_toml)
    stages = current["stages"]
    saved_stages = saved.get("stages", [])
    saved_name = saved["job"].get("stage", "") if saved_stages else stages[0]["name"]
    number = [table["name"] for table in saved_stages].index(saved_name) if saved_stages else 0
    names = [table["name"] for table in saved_stages[: number + 1]] or [saved_name]
    if names != [table["name"] for table in stages[: len(names)]]:
        raise CheckpointError(
            f"the checkpoint of step {step} is of stage {saved_name!r}, after the stages {names[:-1]}, and the stages "
            f"of this run are {[table['name'] for table in stages]}: finished stages must stay; later ones may change"
        )
    for earlier in range(number):
        changed = [
            difference
            for difference in differences(_config_of_stage(saved, earlier), _config_of_stage(current, earlier))
            if difference.kind in (Kind.CHANGES, Kind.IMPOSSIBLE) and difference.key not in allow_changes
        ]
        lengths = saved_stages[earlier]["steps"], stages[earlier]["steps"]
        if lengths[0] != lengths[1]:
            changed.append(Difference("steps", *lengths))
        if changed:
            raise CheckpointError(
                f"stage {names[earlier]!r} is finished and cannot be changed: {joined(changed)}. Set the old value "
                "again, or change a later stage"
            )
    ends = list(itertools.accumulate(table["steps"] for table in stages))
    finished = saved_stages and step == sum(table["steps"] for table in saved_stages[: number + 1])
    if step > ends[number] or (finished and step != ends[number]):
        raise CheckpointError(
            f"stage {saved_name!r} has been trained up to step {step}, and now ends after step {ends[number]}: set its "
            "old length again, or add a stage"
        )
    own = [table["name"] for table in stages].index(current["job"]["stage"])
    if not (ends[own - 1] if own else 0) <= step <= ends[own]:
        raise OtherStageError(step)
    return _config_of_stage(current, number)


def _config_of_stage(config: Mapping[str, Any], number: int) -> str:
    """The config of a stage, from the resolved ``config`` of another one, as TOML."""
    varying = {option for table in config["stages"] for option in set_options(table)}
    options = {name: value for name, value in flat(config).items() if name not in varying}
    options |= set_options(config["stages"][number])
    options["job.stage"] = config["stages"][number]["name"]
    return tomli_w.dumps(nested(options))
