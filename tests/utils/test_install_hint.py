"""The command that an error names installs from where zeroshard itself came."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from zeroshard.utils import install_hint as module
from zeroshard.utils.install_hint import install_hint


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a%20clone", "dir_info": {}}, "pip install '/a clone[train]'"),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "pip install -e '/clone[train]'"),
        (
            {"url": "file:///zeroshard-1-py3-none-any.whl", "archive_info": {}},
            "pip install '/zeroshard-1-py3-none-any.whl[train]'",
        ),
        ({"url": "https://host/zeroshard", "vcs_info": {"vcs": "git"}}, "pip install 'zeroshard[train]'"),
        (None, "pip install 'zeroshard[train]'"),
        ("sources", "pip install '.[train]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: Any, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distribution:
        def __init__(self, name: str) -> None:
            if origin == "sources":
                raise PackageNotFoundError

        def read_text(self, name: str) -> str | None:
            return origin and json.dumps(origin)

    monkeypatch.setattr(module, "distribution", Distribution)
    assert install_hint("train") == command
