"""What the event of a bad step says of norms by layer."""

import re
from pathlib import Path

from forked_run import finish, read_metrics
from test_faults import spike_in_step_7


def test_norm_that_left_its_range_first_is_named(tmp_path: Path) -> None:
    spikes = ("--faults.spike_threshold", "6", "--faults.spike_window", "5", "--training.steps", "7")
    finish(tmp_path, *spikes, "--diagnostics.norms_freq", "1", hook=spike_in_step_7)
    (event,) = (line for line in read_metrics(tmp_path) if line.get("event", "").startswith("bad_step"))
    assert event["step"] == 7
    assert re.search(r"; the norm of the gradient of \S+ left its range first, in step 7: ", event["problem"])
