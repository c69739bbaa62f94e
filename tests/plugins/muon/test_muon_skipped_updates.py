"""An update of Muon that is skipped changes nothing."""

from typing import Any

import pytest
from test_nonfinite_guard import check_skipped_update


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_skipped_update_leaves_parameters_and_optimizer_state_unchanged(implementation: Any, state_dtype: Any) -> None:
    check_skipped_update("muon", implementation, state_dtype)
