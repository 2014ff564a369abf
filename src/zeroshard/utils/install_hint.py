"""The sentence of every error about a package that is not installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of zeroshard from where it came: a clone or a wheel, else by its name.

    >>> install_hint("train")  # doctest: +ELLIPSIS
    "pip install ...[train]'"
    """
    try:
        origin = json.loads(distribution("zeroshard").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # it runs from its sources: in a clone
        origin = {"url": "file://."}
    url = origin.get("url", "")
    path = unquote(url.removeprefix("file://")) if url.startswith("file://") else "zeroshard"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{path}[{extra}]'"
