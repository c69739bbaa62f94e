"""The code of the pages of docs/."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
