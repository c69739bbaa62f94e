"""The faults of scripts/faults/gpu_faults.py fit the code. The script itself runs the tests that notice them."""

import shutil
from pathlib import Path

import pytest
from gpu_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault: Fault, tmp_path: Path) -> None:
    planted = tmp_path / fault.file
    planted.parent.mkdir(parents=True)
    shutil.copy(ROOT / "torchtrain" / fault.file, planted)
    fault.plant(tmp_path)
    compile(planted.read_text(encoding="utf-8"), planted, "exec")
    assert [test for test in fault.tests if test.startswith("tests/") and not (ROOT / test).exists()] == []
