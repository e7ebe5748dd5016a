"""The process that renders chat templates: it answers requests on the socket at standard input.

A request has a template's `key`, its `source` if the key is new, and the `values` to render it with
if any. The answer has a `text` or a `problem`. The process ends when the parent closes the socket,
or if it is idle.

The bounded child runs this file by its path, without the imports of its package.
"""

from __future__ import annotations

import json
import socket
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sightline.bounded_child import limit_cpu, read_frame, write_frame

IDLE_S = 60
MAX_TEXT_CHARS = 1 << 25
MAX_PROBLEM_CHARS = 500


def compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, **settings: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, **{"ensure_ascii": False, **settings})


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def answer(request: dict[str, Any], templates: dict[str, jinja2.Template]) -> dict[str, str]:
    try:
        if (key := request["key"]) not in templates:
            templates[key] = compile_template(request["source"])
        text = templates[key].render(request["values"]) if "values" in request else ""
        if len(text) > MAX_TEXT_CHARS:
            return {"problem": f"it writes {len(text)} characters, above {MAX_TEXT_CHARS}"}
        return {"text": text}
    except MemoryError:
        return {"problem": "it needs too much memory"}
    except jinja2.TemplateError as error:
        return {"problem": str(error)[:MAX_PROBLEM_CHARS]}
    except Exception as error:  # templates raise all kinds
        return {"problem": f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]}


def serve(connection: socket.socket, cpu_s: int) -> None:
    """Answer requests until the parent is gone or sends none for a while."""
    templates: dict[str, jinja2.Template] = {}
    connection.settimeout(IDLE_S)
    stream: Any = connection.makefile("rwb")
    while True:
        request = read_frame(stream)
        limit_cpu(cpu_s)
        write_frame(stream, answer(request, templates))


if __name__ == "__main__":
    with suppress(TimeoutError, EOFError):
        serve(socket.socket(fileno=0), int(sys.argv[1]))
