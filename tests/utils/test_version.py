"""Versions: what is older than the tests is an error, what is newer a warning, and pyproject.toml says the same."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from zeroshard.utils import version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def check(monkeypatch: pytest.MonkeyPatch, found: str | None) -> list[str]:
    """Check a torch of version ``found`` twice; return the warnings."""

    def lookup(package: str) -> str:
        if found is None:
            raise version.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(version, "version", lookup)
    monkeypatch.setitem(version.TESTED, "torch", ("2.11", "2.15"))
    version.check_version.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        version.check_version("torch")
        version.check_version("torch")
    version.check_version.cache_clear()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("found", ["2.11", "2.11.0+cu130", "2.13.0", "2.15.9"])
def test_a_tested_version_is_taken_silently(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    assert check(monkeypatch, found) == []


@pytest.mark.parametrize("found", ["2.16.0a0+git", "2.16.0", "3.0"])
def test_a_newer_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    (message,) = check(monkeypatch, found)
    assert message.startswith(f"zeroshard was tested with torch up to 2.15; this is {found}")


@pytest.mark.parametrize(("found", "said"), [("2.10.2", "2.10.2"), (None, "none")])
def test_an_older_or_missing_version_is_an_error(monkeypatch: pytest.MonkeyPatch, found: str | None, said: str) -> None:
    with pytest.raises(ImportError, match=rf"needs torch 2.11 or newer \(found {said}\): pip install 'torch>=2.11'"):
        check(monkeypatch, found)


@pytest.mark.parametrize("package", version.TESTED)
def test_the_oldest_version_is_the_lower_bound_of_the_project(package: str) -> None:
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    bounds = {re.search(r">=([\d.]+)", text)[1] for text in requirements if re.match(rf"{package}[<>=]", text)}
    assert bounds == {version.TESTED[package][0]}


def test_nothing_but_a_next_major_version_is_shut_out() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    extras = PROJECT["optional-dependencies"]
    for name in set(extras) - {"test", "test-nightly", "docs", "dev"}:
        for text in extras[name]:
            cap = re.search(r"<([\d.]+)", text)
            assert cap is None or "." not in cap[1], text
