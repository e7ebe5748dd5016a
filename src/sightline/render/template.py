"""Render a checkpoint's own chat template like transformers, using only jinja2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sightline.errors import FamilyError

TemplateError = jinja2.TemplateError


class ChatTemplate:
    """A sandboxed chat template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)

    @classmethod
    def find(cls, path: Path) -> ChatTemplate | None:
        """Load the template of a checkpoint folder, or return None if it has none."""
        source = _find_source(path)
        if source is None:
            return None
        try:
            return cls(source)
        except TemplateError as error:
            raise FamilyError(
                f"{path}: the chat template is not valid jinja: {error}",
                "use the chat template that was published with the checkpoint",
            ) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
        **settings: Any,
    ) -> str:
        return self._template.render(
            messages=list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=generation_prompt,
            **settings,
        )


def _find_source(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = path / name
        source = json.loads(file.read_text()).get("chat_template") if file.is_file() else None
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if isinstance(source, str):
            return source
    return None


def _to_json(value: Any, **settings: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, **{"ensure_ascii": False, **settings})


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)
