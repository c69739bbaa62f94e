"""The files and line counts in docs/adding-a-model.md match the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = re.compile("qk_norm|q_norm|k_norm|qwen3", re.IGNORECASE)


def test_listed_files_and_line_counts_match_the_code() -> None:
    page = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    listed = {file: int(lines) for file, lines in re.findall(r"^\| `(torchtrain/\S+)` \| (\d+) \|", page, re.MULTILINE)}
    counted = {}
    for path in (ROOT / "torchtrain").rglob("*.py"):
        lines = sum(bool(NAMES.search(line)) for line in path.read_text(encoding="utf-8").splitlines())
        if lines:
            counted[str(path.relative_to(ROOT))] = lines
    assert listed == counted
