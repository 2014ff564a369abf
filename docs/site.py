"""The pages of the site: docs/, other files, the API reference. `python docs/site.py` writes them to build/pages."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
PAGES = {  # files outside docs/ that are pages of the site
    "benchmarks/results/README.md": "records.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "examples/cluster/README.md": "cluster.md",
    "README.md": "index.md",
}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```.*?^```)", re.M | re.S)


def write_pages(target: Path) -> None:
    """Write the pages, with links that hold on the site, and the other files of docs/."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    sources = {page: ROOT / source for source, page in PAGES.items()}
    sources |= {path.name: path for path in (ROOT / "docs").glob("*.md")}
    for page, source in sources.items():
        text = source.read_text(encoding="utf-8")
        if page == "examples.md":
            for path in EXAMPLES:
                text += f"\n## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        (target / page).write_text(_with_site_links(text, source), encoding="utf-8")
    (target / "api.md").write_text(api_page(), encoding="utf-8")


def _with_site_links(text: str, source: Path) -> str:
    def on_site(match: re.Match[str]) -> str:
        mark, shown, link = match.groups()
        path, _, anchor = link.partition("#")
        if link.startswith(("http", "#")):
            return match[0]
        target = (source.parent / path).resolve()
        if target.is_relative_to(ROOT / "docs"):
            found = str(target.relative_to(ROOT / "docs"))
        elif target in EXAMPLES:
            found, anchor = "examples.md", target.name.replace(".", "")
        elif target.is_dir() and f"{target.relative_to(ROOT)}/README.md" in PAGES:
            found = PAGES[f"{target.relative_to(ROOT)}/README.md"]
        elif str(target.relative_to(ROOT)) in PAGES:
            found = PAGES[str(target.relative_to(ROOT))]
        else:
            if not target.exists():
                raise FileNotFoundError(f"{source}: {link}")
            return shown if "`" in shown else f"`{shown}`"
        return f"{mark}[{shown}]({found}{f'#{anchor}' if anchor else ''})"

    parts = FENCED.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(on_site, part) for part in parts)


# ------------------------------------------------------------------------------------------------- API reference

GROUPS = {
    "Sharding": "shard Config Offload is_sharded unwrap unshard",
    "Training": "ShardedOptimizer no_sync checkpoint_activations register_forward_method EMA",
    "Values": "gathered full_parameter full_gradient full_state state_dict",
    "Checkpoints": "save load Save Loaded CheckpointError",
    "Memory and time": "report Report profile Profile plan offload_states reload_states",
    "Faults": "RanksDisagreeError",
}


def api_page() -> str:
    """Return the page with all public names, and the integrations."""
    tree = ast.parse((ROOT / "src/zeroshard/__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    lines = ["# API reference", "", "All public names, by what they are for. `import zeroshard` has them all.", ""]
    groups = {title: [name for name in text.split() if name in names] for title, text in GROUPS.items()}
    listed = {name for group in groups.values() for name in group}
    groups["Other"] = [name for name in names if name not in listed and not name.startswith("_")]
    for title, group in groups.items():
        if group:
            lines += [f"## {title}", "", *(f"::: {defined_in('zeroshard', name)}\n" for name in group)]
    modules = sorted((ROOT / "src/zeroshard/integrations").glob("[a-z]*.py"))
    for module in modules:
        lines += [f"## {module.stem}", "", f"::: zeroshard.integrations.{module.stem}\n"]
        lines += ["    options: { show_root_heading: false, show_root_toc_entry: false }", ""]
    return "\n".join(lines)


@functools.cache
def defined_in(module: str, name: str) -> str:
    """Return where a name is defined, as a path. (A function and its module can have the same name, as load.load.)"""
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return defined_in(node.module, name)
    return f"{module}.{name}"


class MarkdownDocstrings(griffe.Extension):
    """Turns roles (:func:`zeroshard.shard`) into links and doctests into code blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of each function, class, module and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    text = re.sub(r":(?:func|class|meth|attr|mod):`~?([^`]+)`", _reference, text)
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(_fenced(block) if block.lstrip().startswith(">>>") else block for block in blocks)


def _fenced(doctest: str) -> str:
    return f"```pycon\n{re.sub(r' *# doctest:.*', '', doctest)}\n```"


def _reference(match: re.Match[str]) -> str:
    name = match[1].removeprefix("zeroshard.")
    return f"[`{name}`][{defined_in('zeroshard', name)}]" if name in GROUP_NAMES else f"`{match[1]}`"


GROUP_NAMES = {name for text in GROUPS.values() for name in text.split()}

if __name__ == "__main__":
    write_pages(ROOT / "build" / "pages")
