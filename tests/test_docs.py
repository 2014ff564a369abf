"""The pages: links, source paths and names in them exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import combinations
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def source_words() -> frozenset[str]:
    sources = (ROOT / "src").rglob("*.py")
    return frozenset(word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_source_paths_exist(page: Path) -> None:
    text = prose(page)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|c))`", text):
        assert (ROOT / path).exists() or (ROOT / "src/zeroshard" / path).exists(), path


def test_every_promise_has_a_test() -> None:
    promises = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs/guarantees.md").read_text("utf-8"), re.M)
    marked = [
        decorator.args[0].value
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for decorator in getattr(node, "decorator_list", ())
        if ast.unparse(decorator).startswith("pytest.mark.guarantee(")
    ]
    assert len(promises) == len(set(promises)) > 30
    assert set(marked) == {name.replace("`", "") for name in promises}


def test_names_on_the_architecture_page_are_in_the_source() -> None:
    named = re.findall(r"`(\w+(?:\.\w+)*)(?:\(.*?\))?`", prose(ROOT / "docs/architecture.md"))
    identifiers = {part for name in named for part in name.split(".") if "_" in part or re.match("[A-Z][a-z]", part)}
    assert len(identifiers) > 80
    assert sorted(identifiers - source_words() - {"torch", "py"}) == []


def test_the_layout_on_the_architecture_page_exists() -> None:
    (tree,) = re.findall(
        r"^```\nsrc/zeroshard/\n(.*?)^```", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M | re.S
    )
    folders: list[str] = []
    for indent, name in re.findall(r"^( +)([\w.]+/|\w+\.py)  ", tree, re.M):
        folders[len(indent) // 2 - 1 :] = [name]
        assert (ROOT / "src/zeroshard" / "".join(folders)).exists(), "".join(folders)
    assert len(re.findall(r"\.py  ", tree)) > 30


def test_what_combines_with_what_is_what_the_tests_have_run() -> None:
    assert combinations.PAGE.read_text(encoding="utf-8") == combinations.page()
