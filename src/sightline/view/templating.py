"""Jinja templates of the report, of comparisons and of notebook output.

HTML is escaped by default, because models and environments may write hostile texts. Markdown
templates must pass every text through `md` or `fence`.
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
    """Return a template by its file name. `.html.` templates escape every text."""
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
    """Return the text as one line in which neither Markdown nor HTML has a meaning."""
    return _SPECIAL.sub(r"\\\1", escape(formatting.clean(text), quote=False))


def fence_text(text: str) -> str:
    """Return the text as a code block that its contents cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
