"""Private PyTorch APIs that the planner uses exist."""

import pytest
from test_torch_internals import resolve, skip_if_absent

import torchtrain.plugins.planner.torch_internals as internals


@pytest.mark.parametrize("name", internals.NAMES)
def test_every_listed_name_exists(name: str) -> None:
    skip_if_absent(internals.NAMES[name][1])
    assert getattr(internals, name) is not None


@pytest.mark.parametrize("path", internals.MEMBERS)
def test_every_listed_member_exists(path: str) -> None:
    skip_if_absent(internals.MEMBERS[path])
    resolve(path)
