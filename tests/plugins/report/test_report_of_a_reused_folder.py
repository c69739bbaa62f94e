"""Reports and curves in a dump folder that several runs use."""

from pathlib import Path

from forked_run import finish


def test_files_of_a_complete_run_come_back_after_another_run_in_its_folder(tmp_path: Path) -> None:
    """With links of reports to their own curves."""
    report = ("--report.enable", "--training.steps")
    finish(tmp_path, *report, "2", ranks=1)
    first = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "curves.png", "report.md")}
    finish(tmp_path, *report, "1", "--checkpoint.folder", "other", ranks=1)
    assert "![Curves of the run](curves.1.png)" in (tmp_path / "report.1.md").read_text()
    assert (tmp_path / "curves.1.png").read_bytes() == first["curves.png"]
    assert "![Curves of the run](curves.png)" in (tmp_path / "report.md").read_text()
    output = finish(tmp_path, *report, "2", ranks=1)
    assert "the run is complete: step 2 of 2" in output
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert "![Curves of the run](curves.2.png)" in (tmp_path / "report.2.md").read_text()
    assert not (tmp_path / "metrics.1.jsonl").exists()
