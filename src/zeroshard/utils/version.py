"""The version of this package, and of what it runs on."""

from __future__ import annotations

import platform
import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"
TESTED = {  # the oldest and the newest version that the tests passed with
    "torch": ("2.11", "2.15"),
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "transformers": ("5.22", "5.23"),
    "trl": ("1.16", "1.16"),
}


@cache
def check_version(package: str) -> None:
    """Raise ImportError if ``package`` is missing or older than what was tested; warn once if it is newer.

    >>> check_version("torch")
    """
    oldest, newest = TESTED[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if _release(found) < _release(oldest):
        raise ImportError(
            f"zeroshard needs {package} {oldest} or newer (found {found}): pip install '{package}>={oldest}'"
        )
    if _release(found)[:2] > _release(newest):
        message = f"zeroshard was tested with {package} up to {newest}; this is {found}. Please report what fails."
        warnings.warn(message, stacklevel=3)


def _release(text: str) -> tuple[int, ...]:
    """Return the release number of a version: (1, 15, 0) for "1.15.0rc1+cpu", () for "none"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return () if found is None else tuple(int(part) for part in found[0].split("."))


def software_versions() -> dict[str, str]:
    """Return the versions of zeroshard, torch and Python."""
    import torch  # here: the command line prints the version without it

    return {"zeroshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
