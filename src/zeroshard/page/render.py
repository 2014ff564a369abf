"""Sheet: a page as one HTML file, made of a template and what it shows, with Plotly inside."""

from __future__ import annotations

import secrets
from typing import Any


def render_page(package: str, template: str, page_description: str, **content: Any) -> bytes:
    """Fill the template that lies in a package; it extends ``base.html.j2``, which lies here.

    ``what``: the page in a few words, for the error where a library is missing. ``content`` has ``charts``, by name.
    """
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{page_description} needs {error.name}, which is not installed: pip install 'zeroshard[train]'"
        ) from error
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("zeroshard.page", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    text = environment.get_template(template).render(
        **content,
        figures={name: chart.figure for name, chart in content["charts"].items()},
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(16),  # only the page's own scripts know it
    )
    return text.encode("utf-8", "replace")  # half a surrogate pair in a string would raise
