"""Added to vLLM's application inside our middleware.

It records requests that pass ours, in the folder in which the server was started.
"""

from __future__ import annotations

from typing import Any


class Watch:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with open("reached", "a") as file:
            print(scope["type"], scope.get("path", ""), file=file)
        await self._app(scope, receive, send)
