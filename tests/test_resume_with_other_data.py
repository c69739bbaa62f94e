"""A run that continues with another batch, sequence length or mix of sources: positions in the data."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from data_samples import DOCUMENTS, make_loader, take, write_jsonl
from forked_run import finish, logged_losses, read_metrics

from torchtrain.datasets.dataloader import DataLoader, LoaderLayout
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.order import Mixture
from torchtrain.errors import DataError


def loader(config: DataConfig, batch: int = 4, seq_len: int = 16) -> DataLoader:
    return make_loader(config, range(batch), batch=batch, seq_len=seq_len)


def resumed(old: DataLoader, new: DataLoader, continued: tuple[bool, ...] = (True,)) -> DataLoader:
    new.resume(old.state_dict()["rows"].numpy(), old.layout, continued)
    return new


@pytest.fixture
def text(tmp_path: Path) -> DataConfig:
    return DataConfig(path=write_jsonl(tmp_path / "text.jsonl", DOCUMENTS), prefetch=0)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_other_batch_continues_with_the_next_window(text: DataConfig, packing: Literal["cut", "best_fit"]) -> None:
    config = replace(text, packing=packing)
    old, whole = loader(config), loader(config)
    take(old, 3)
    new = resumed(old, loader(config, batch=6))
    assert torch.equal(take(new, 2).reshape(12, -1), take(whole, 6)[3:].reshape(12, -1))


def test_longer_sequences_than_planned_continue_after_as_many_tokens(
    text: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    old = loader(text, seq_len=16)
    take(old, 3)
    new = resumed(old, loader(text, seq_len=32))
    assert new.state_dict()["rows"][0, :2].tolist() == [3, 6]  # 12 windows of 16 are 6 of 32
    assert caplog.text.count("training.seq_len = 32 is longer than the 16 tokens by which the data were ordered") == 1
    whole = loader(text, batch=6, seq_len=32)
    assert torch.equal(take(new, 1)[0], torch.cat((take(whole, 1)[0], take(whole, 1)[0]))[6:10])


def test_planned_length_orders_the_data_and_a_checkpoint_keeps_the_order(text: DataConfig) -> None:
    old = make_loader(text, range(4), batch=4, seq_len=16, longest_seq_len=64)
    take(old, 2)
    unplanned = loader(text)
    unplanned.load_state_dict({"rows": old.state_dict()["rows"]})
    assert torch.equal(take(unplanned, 9), take(old, 9))


def test_data_that_have_ended_do_not_begin_again_with_another_sequence_length(tmp_path: Path) -> None:
    """The last window of data that are read once is not full."""
    path = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS[:20])
    config = DataConfig(path=path, when_exhausted="stop", prefetch=0)
    targets = len(loader(config).sources[0]) - 1  # type: ignore[arg-type]
    for before, now in ((16, 32), (32, 16), (7, 100)):
        old, new = loader(config, 1, before), loader(config, 1, now)
        rows = old.state_dict()["rows"]
        rows[:, :2] = torch.tensor([1, -(-targets // before)])
        old.load_state_dict({"rows": rows})
        assert next(old, None) is None
        assert next(resumed(old, new), None) is None


def test_new_source_begins_and_the_other_continues(tmp_path: Path) -> None:
    first = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    second = SourceConfig(path=write_jsonl(tmp_path / "b.jsonl", DOCUMENTS[:30]))
    old = loader(DataConfig(sources=(first,), prefetch=0))
    take(old, 5)
    both = DataConfig(sources=(first, second), prefetch=0)
    new, fresh = resumed(old, loader(both), (True, False)), loader(both)
    assert new.state_dict()["rows"][:, 1].tolist() == [20] * 4
    assert torch.equal(new.state_dict()["rows"][:, 3], old.state_dict()["rows"][:, 2])
    assert torch.equal(new.state_dict()["rows"][:, 4:], fresh.state_dict()["rows"][:, 4:])


def test_custom_stream_rejects_another_batch(text: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtrain.datasets.data_source import Stream
    from torchtrain.datasets.token_dataset import TokenStream

    monkeypatch.setattr(TokenStream, "resume", Stream.resume)
    with pytest.raises(DataError, match=r"TokenStream cannot continue with another training.global_batch_size"):
        resumed(loader(text), loader(text, batch=8))


@pytest.mark.parametrize("columns", [0, 3])
def test_positions_of_other_versions_are_rejected(text: DataConfig, columns: int) -> None:
    for batch in (4, 8):
        rows = np.zeros((4, 2 + columns), dtype=np.int64)
        with pytest.raises(DataError, match=r"the saved position in .* is of other data, "):
            loader(text, batch=batch).resume(rows, LoaderLayout(4, 16, (columns,)), (True,))


def test_source_of_weight_zero_is_never_chosen() -> None:
    rows = np.arange(1000)
    assert set(Mixture([1, 0, 2, 0]).choose(rows).tolist()) == {0, 2}
    assert Mixture([0, 1, 0]).choose(rows).tolist() == [1] * 1000
    assert Mixture([2, 0, 1]).choose(rows).tolist() == [2 * s for s in Mixture([2, 1]).choose(rows).tolist()]


def test_run_continues_with_another_batch_length_and_rope_base_if_allowed(tmp_path: Path) -> None:
    finish(tmp_path, "--training.steps", "4", ranks=1)
    options = ["--training.steps", "6", "--training.global_batch_size", "8", "--training.seq_len", "64"]
    options += ["--model.shape.rope_theta", "20000"]
    allowed = ["training.global_batch_size", "training.seq_len", "model.shape.rope_theta"]
    output = finish(tmp_path, *options, "--checkpoint.allow_changes", *allowed, ranks=1)
    assert "model.shape.rope_theta = 20000.0" in output
    assert list(logged_losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    # The run of one start, from the checkpoint that the larger batch has saved.
    finish(tmp_path, *options, "--training.steps", "8", "--checkpoint.allow_changes", *allowed, ranks=1)
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" in line][-2:] == [7, 8]


def test_layout_of_the_state() -> None:
    config = DataConfig(prefetch=0)
    assert loader(config).layout == LoaderLayout(4, 16, (1,))
