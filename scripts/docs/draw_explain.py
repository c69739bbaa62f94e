"""Draw docs/explain.png: the page that ``torchtrain.explain --html`` writes about a step with a damaged document.

    python scripts/docs/draw_explain.py [PICTURE]     default: docs/explain.png

The run trains on the topics of Python's help, one of which is encoded in base64 from its second paragraph on. It needs
chromium, and takes half a minute on two CPU cores.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

ROOT = Path(__file__).parent.parent.parent
DAMAGED = "for"
STEP = 10  # which has a part of this topic in one of its rows
RUN = "help_topics"
OPTIONS = (
    *("--training.steps", str(STEP), "--checkpoint.interval", str(STEP - 1), "--data.held_out", "0"),
    *("--data.path", f"{RUN}.jsonl", "--job.dump_folder", RUN, "--report.no-enable"),
)


def write_texts(file: Path) -> None:
    """Write a document per topic, of which one is encoded in base64 from its second paragraph on."""
    lines = []
    for name, text in sorted(topics.items()):
        if name == DAMAGED:
            begin, paragraph, rest = text.partition("\n\n")
            text = begin + paragraph + base64.b64encode(rest.encode()).decode()
        lines.append(json.dumps({"text": text, "topic": name}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(picture: str = "docs/explain.png") -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder) / f"{RUN}.jsonl")
        config = ("--job.config_file", str(ROOT / "train_configs" / "debug_model.toml"))
        explain = ("torchtrain.explain", RUN, "--step", str(STEP), "--top", "3", "--html", "page.html")
        for command in (("torchtrain.train", *config, *OPTIONS), explain):
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, check=True)
        browser = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=900,620")
        page = (Path(folder) / "page.html").as_uri()
        screenshot = f"--screenshot={Path(picture).absolute()}"
        subprocess.run([*browser, screenshot, page], stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
