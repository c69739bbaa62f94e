"""The picture of the architecture page, with the plugins."""

from draw_architecture import PAGE, page_with_picture


def test_picture_is_drawn_from_the_imports() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "```mermaid\n" in page
    changed = page.replace("    plugins --> trainer\n", "")
    assert changed != page
    assert page_with_picture(changed) == page, "run python scripts/docs/draw_architecture.py"
