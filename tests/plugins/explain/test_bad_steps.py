"""The log of a bad step names the command that explains it."""

from pathlib import Path

from forked_run import finish
from test_faults import nan_in_step_5_of_rank_1


def test_bad_step_names_the_command_that_lists_its_documents(tmp_path: Path) -> None:
    output = finish(tmp_path, hook=nan_in_step_5_of_rank_1)
    explain = f"its documents: python -m torchtrain.explain {tmp_path} --step 5"
    problem = "step 5 is bad (loss nan, gradient norm nan): loss not finite on 1 rank(s)"
    assert f"{problem}; {explain}; the update is skipped" in output
