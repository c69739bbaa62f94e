"""What the event of a bad step says of norms by layer."""

import re
from pathlib import Path

from test_faults import check_spike


def test_norm_that_left_its_range_first_is_named(tmp_path: Path) -> None:
    problem = check_spike(tmp_path, "--diagnostics.norms_freq", "1")
    assert re.search(r"; the norm of the gradient of \S+ left its range first, in step 7: ", problem)
