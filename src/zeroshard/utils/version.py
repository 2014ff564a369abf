"""The version of this package, and of what it runs on."""

from __future__ import annotations

import platform

__version__ = "0.1.0"


def software_versions() -> dict[str, str]:
    """Return the versions of zeroshard, torch and Python."""
    import torch  # here: the command line prints the version without it

    return {"zeroshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
