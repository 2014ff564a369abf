"""render_page: render a template to one HTML file that includes Plotly."""

from __future__ import annotations

import secrets
from typing import Any


def render_page(package: str, template: str, page_description: str, **content: Any) -> bytes:
    """Render a template of ``package``, which extends this folder's ``base.html.j2``.

    ``page_description`` names the page in the error for a missing library. ``content`` contains ``charts`` by name.
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
    html = environment.get_template(template).render(
        **content,
        figures={name: chart.figure for name, chart in content["charts"].items()},
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(16),  # allows only the page's own scripts
    )
    return html.encode("utf-8", "replace")  # an unpaired surrogate in a string would raise
