"""Fill HTML templates: one skeleton and one style for all pages. No torch."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader


def render(package: str, template: str, **content: Any) -> str:
    """Fill a template of a package; whatever a run has written is escaped.

    Args:
        package: dotted name of the package that the template's file is in.
        template: name of the file; it may extend `page.html.j2`, which includes the style.
    """
    return _environment(package).get_template(template).render(content)


@cache
def _environment(package: str) -> Environment:
    loaders = [PackageLoader(name, ".") for name in (package, __package__)]
    return Environment(loader=ChoiceLoader(loaders), autoescape=True)
