"""The indexes of the docs and of the decisions are complete."""

import re

from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


def test_every_page_is_in_the_index() -> None:
    """The site has the pages in the same order."""
    named = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text("utf-8"))
    pages = {page.name for page in DOCS.glob("*.md")}
    assert set(named) == pages - {"index.md"}
    site = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert site == ["index.md", *dict.fromkeys(named)]


def test_every_decision_is_in_the_index_with_its_title_and_state() -> None:
    index = (DOCS / "adr" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\(([\w-]+\.md)\) \| (.+) \| (.+) \|$", index, re.MULTILINE)
    assert [row[1] for row in rows] == sorted(p.name for p in DOCS.glob("adr/0*.md"))
    for number, name, title, state in rows:
        text = (DOCS / "adr" / name).read_text("utf-8")
        assert text.startswith(f"# {int(number)}. {title}\n")
        assert ("superseded" in state) == ("Superseded" in text), name
