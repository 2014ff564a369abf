"""zeroshard inside other training tools. One module per tool, which imports the tool; the core imports none of them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


def require(package: str, versions: str, extra: str | None = None) -> None:
    """Raise ImportError unless ``package`` is installed in a version that its integration was tested with.

    ``versions`` is a range such as ">=1.15,<2". ``extra`` is the extra of zeroshard that installs the package, by
    default the one of the same name.

    >>> require("torch", ">=2.11,<3")
    >>> require("torch", ">=1.5,<2", extra="old")
    Traceback (most recent call last):
        ...
    ImportError: zeroshard was tested with torch >=1.5,<2, found ...: pip install 'zeroshard[old]'
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    least, below = (_release(bound) for bound in versions.removeprefix(">=").split(",<"))
    if found == "none" or not least <= _release(found) < below:
        install = f"pip install 'zeroshard[{extra or package}]'"
        raise ImportError(f"zeroshard was tested with {package} {versions}, found {found}: {install}")


def _release(text: str) -> tuple[int, ...]:
    """Return the release number of a version: (1, 15, 0) for "1.15.0rc1+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found is not None else ()
