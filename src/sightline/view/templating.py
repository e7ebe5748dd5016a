"""jinja templates: of the report, of a comparison, and of what notebooks show.

HTML is escaped by default: texts come from models and environments, and may be hostile. Markdown
has no such default, and its templates put every text through `md` or `fence`.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from sightline.view import formatting

_SPECIAL = re.compile(r"([\\`*_\[\]#|~])")
_FORMATS = ("count", "whole", "duration", "fixed", "short", "percent", "clean")


@cache
def get_template(name: str) -> Template:
    """A template of this package by its file name; `.html.` templates escape every text."""
    environment = Environment(
        autoescape=".html." in name,
        undefined=StrictUndefined,
        loader=PackageLoader("sightline.view"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {one: getattr(formatting, one) for one in _FORMATS}
    environment.filters |= {"md": escape_markdown, "fence": fence_text}
    return environment.get_template(name)


def escape_markdown(text: object) -> str:
    """The text on one line, as itself: it is neither Markdown nor HTML."""
    return _SPECIAL.sub(r"\\\1", escape(formatting.clean(text), quote=False))


def fence_text(text: str) -> str:
    """The text as a block that nothing inside it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
