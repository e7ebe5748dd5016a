"""Changes to pages of the site: links to files outside docs/ become their names."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|examples|benchmarks|tools)/[^)]+\)")
"""A link to a source file, which a checkout has and the site does not."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"\1", markdown)
