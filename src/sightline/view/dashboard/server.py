"""Routes of the dashboard: JSON, images, and the files of the web application."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar

import msgspec
import uvicorn
from cachetools import LRUCache, cached
from fastapi import FastAPI, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sightline.config import RunFile, SftFile, iter_settings
from sightline.config.secret_refs import resolve_secret
from sightline.errors import MediaError, MediaMissing, SightlineError
from sightline.media.ref import is_digest
from sightline.regular_file import read_bytes
from sightline.transport.http_server import RequestGuard, build_uvicorn_config, check_address
from sightline.transport.listen import bind_socket, check_tls, describe_link
from sightline.view.dashboard import processes, queries, rollout_page, thumbnails
from sightline.view.dashboard.access import AccessMiddleware
from sightline.view.dashboard.queries import Int64
from sightline.view.dashboard.run_collection import RunCollection, RunWatcher
from sightline.view.dashboard.run_view import RunView
from sightline.wire.prometheus import CONTENT_TYPE, format_prometheus

T = TypeVar("T")
API = (
    "runs", "live", "metrics", "facets", "rollouts", "groups", "failures", "rollout", "tokens",
    "mismatch", "images", "image", "processes", "log", "settings",
)  # fmt: skip
"""Methods of `Dashboard` that answer `/api/NAME`."""
PAGES = ("", "rollouts", "rollout", "mismatch", "images", "image", "processes", "settings")
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
STATIC = Path(__file__).with_name("static")
LOOPBACK = RequestGuard("127.0.0.1")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII)
MAX_THUMBNAILS = 4096
MAX_THUMBNAIL_SIDE = 512
MAX_STEPS = 2000
"""Maximum number of steps in one answer. For longer runs, evenly spaced steps are sent."""
CACHE_FOREVER = "private, max-age=31536000, immutable"
"""Cache header for files that are named by their digest. They never change."""


class RolloutQuery(queries.RolloutFilter):
    """Query for a page of rollouts."""

    run: str
    offset: Int64 = 0
    limit: Int64 = 50


def list_static_files() -> dict[str, Path]:
    """Return the files of the web application by their path in `static/`."""
    files = [file for file in STATIC.rglob("*") if file.suffix in TYPES]
    return {file.relative_to(STATIC).as_posix(): file for file in files}


def build_app(runs: RunCollection, guard: RequestGuard = LOOPBACK) -> FastAPI:
    """Build the application. `guard` controls access to it."""
    dashboard = Dashboard(runs)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=dashboard.lifespan)
    app.router.redirect_slashes = False
    routes: list[tuple[str, Callable[..., Any]]] = [
        *((f"/api/{name}", getattr(dashboard, name)) for name in API),
        ("/metrics", dashboard.prometheus),
        ("/media/{run}/{digest}", dashboard.media),
        ("/thumb/{run}/{digest}", dashboard.thumb),
        ("/static/{name:path}", dashboard.static),
        *((f"/{page}", dashboard.page) for page in PAGES),
    ]
    for path, answer in routes:
        app.add_api_route(path, answer, methods=["GET"], response_model=None)
    app.add_exception_handler(HTTPException, _http_error_response)
    app.add_exception_handler(SightlineError, _sightline_error_response)
    app.add_middleware(AccessMiddleware, guard=guard)
    return app


def serve_dashboard(
    paths: Sequence[Path], host: str, port: int, token: str = "", cert: str = "", key: str = ""
) -> None:
    """Serve the runs at `paths`. `token` refers to a secret. `cert` and `key` are PEM files."""
    check_address(host, token, "--token")
    tls = check_tls(cert, key, host)
    guard = RequestGuard(host, resolve_secret(token, "--token"))
    runs = RunCollection(paths)
    listening = bind_socket(host, port)
    listening.listen(128)
    print(describe_link(host, listening.getsockname()[1], "/", has_tls=bool(tls)), flush=True)
    if token:
        print(f"open the address once with ?token= and the token from {token}", flush=True)
    config = build_uvicorn_config(
        build_app(runs, guard),
        # Browsers keep their event streams open. Do not wait for them.
        timeout_graceful_shutdown=1,
        **tls,
    )
    uvicorn.Server(config).run(sockets=[listening])


class Dashboard:
    """One method per route. All except the stream run in threads, because they read files."""

    def __init__(self, runs: RunCollection) -> None:
        self._runs = runs
        remember = cached(
            LRUCache(MAX_THUMBNAILS), key=lambda store, digest, side: (digest, side), lock=Lock()
        )
        self._make_thumbnail = remember(thumbnails.make_thumbnail)
        self._watch: RunWatcher | None = None
        self._files = list_static_files()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._watch = RunWatcher(self._runs)
        watching = asyncio.create_task(self._watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self._runs.close()

    def _run(self, key: str) -> RunView:
        view = next((view for view in self._runs.all() if view.key == key), None)
        return _require(view, f"there is no run {key[:80]!r}")

    # --- the application itself

    def page(self) -> Response:
        return self.static("index.html")

    def static(self, name: str) -> Response:
        file = _require(self._files.get(name), "file not found")
        headers = {"cache-control": "no-cache"}
        return Response(read_bytes(file), media_type=TYPES[file.suffix], headers=headers)

    # --- numbers

    def runs(self) -> Response:
        return _json_response([view.overview() for view in self._runs.all()])

    async def live(self) -> Response:
        assert self._watch is not None
        return StreamingResponse(
            self._watch.events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    def metrics(self, run: str, names: str, cursor: int = 0) -> Response:
        """Return columns by name. `prefix*` selects the first names with that prefix."""
        history = self._run(run).history
        return _json_response(history.since(cursor, names.split(","), MAX_STEPS))

    def mismatch(
        self,
        run: str,
        step_from: Int64 | None = None,
        step_to: Int64 | None = None,
        fresh: bool = True,
    ) -> Response:
        view = self._run(run)
        mismatch = view.index.query(queries.sum_mismatch, step_from, step_to, fresh)
        for token in mismatch["worst"]:
            token["text"] = view.tokenizer.decode([token["token_id"]]) if view.tokenizer else None
        return _json_response(mismatch)

    def prometheus(self) -> Response:
        """Return the newest numbers of every run."""
        views = self._runs.all()
        numbers = [
            ("gauge", f"run_{name}", {"run": view.key}, value)
            for view in views
            for kind in ("step", "train")
            for name, value in view.history.newest(kind).items()
        ]
        steps = [("gauge", "run_step", {"run": view.key}, view.history.last_step) for view in views]
        return Response(format_prometheus([*steps, *numbers]), media_type=CONTENT_TYPE)

    # --- rollouts

    def facets(self, run: str) -> Response:
        return _json_response(self._run(run).index.query(queries.count_facets))

    def rollouts(self, wanted: Annotated[RolloutQuery, Query()]) -> Response:
        return self._list_page(queries.list_rollouts, wanted)

    def groups(self, wanted: Annotated[RolloutQuery, Query()]) -> Response:
        return self._list_page(queries.list_groups, wanted)

    def _list_page(self, find: Callable[..., Any], wanted: RolloutQuery) -> Response:
        index = self._run(wanted.run).index
        return _json_response(index.query(find, wanted, wanted.offset, wanted.limit))

    def failures(self, run: str) -> Response:
        view = self._run(run)
        errors = view.index.query(queries.list_errors)
        return _json_response({**view.history.count_failures(), "errors": errors})

    def rollout(self, run: str, file: str, number: Int64) -> Response:
        view = self._run(run)
        rollout = rollout_page.describe_rollout(view, file, number)
        files_left = view.index.files_left
        left = f"; {files_left} files are not indexed yet" if files_left else ""
        return _json_response(_require(rollout, f"rollout not found{left}"))

    def tokens(
        self, run: str, file: str, number: Int64, node: int, start: Annotated[int, Query(ge=0)] = 0
    ) -> Response:
        tokens = rollout_page.describe_tokens(self._run(run), file, number, node, start)
        return _json_response(_require(tokens, "node not found"))

    # --- images

    def images(
        self, run: str, sort: str = "most", offset: Int64 = 0, limit: Int64 = 60, digest: str = ""
    ) -> Response:
        view = self._run(run)
        page = view.index.query(queries.list_images, sort, offset, limit, digest)
        for row in page["rows"]:
            row["missing"] = row["digest"] in view.missing
        return _json_response({**page, "missing": len(view.missing)})

    def image(self, run: str, digest: str) -> Response:
        view = self._run(run)
        image = view.index.query(queries.find_image, digest)
        image = _require(image, "no rollout contains this image")
        return _json_response({**image, "missing": digest in view.missing})

    def media(self, run: str, digest: str, request: Request) -> Response:
        store = self._run(run).store
        data, mime = thumbnails.read_image(store, _check_digest(digest))
        # A video player requests ranges. Without them it cannot seek.
        byte_range = _RANGE.fullmatch(request.headers.get("range", ""))
        return _image_response(data, mime, byte_range)

    def thumb(self, run: str, digest: str, side: int = 96) -> Response:
        store = self._run(run).store
        side = max(16, min(side, MAX_THUMBNAIL_SIDE))
        return _image_response(*self._make_thumbnail(store, _check_digest(digest), side))

    # --- processes and settings

    def processes(self, run: str) -> Response:
        return _json_response(processes.describe_processes(self._run(run)))

    def log(self, run: str, name: str, before: int | None = None) -> Response:
        log = processes.find_log(self._run(run), name, before)
        return _json_response(_require(log, "log not found"))

    def settings(self, run: str) -> Response:
        view = self._run(run)
        return _json_response(
            {
                "text": view.settings_text,
                "settings": view.settings,
                "defaults": list_defaults(view.settings),
            }
        )


def list_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the default of each setting by its dotted name, for this kind of run."""
    kind = SftFile if "sft" in settings else RunFile
    return {
        f"{section}.{name}": None
        if field.is_required()
        else field.get_default(call_default_factory=True)
        for section, name, field in iter_settings(kind)
    }


def _require(value: T | None, problem: str) -> T:
    """Return the value. If there is none, the answer is 404 with the problem."""
    if value is None:
        raise HTTPException(404, problem)
    return value


def _check_digest(text: str) -> str:
    if not is_digest(text):
        raise HTTPException(404, "an image is named by its digest of 64 hexadecimal digits")
    return text


def _image_response(data: bytes, mime: str, byte_range: re.Match[str] | None = None) -> Response:
    # An image that is opened in its own tab must not run or load anything either.
    headers = {
        "cache-control": CACHE_FOREVER,
        "content-security-policy": "default-src 'none'; sandbox",
    }
    if mime.startswith("video/"):
        headers["accept-ranges"] = "bytes"
        first = int(byte_range[1]) if byte_range is not None else len(data)
        if byte_range is not None and first < len(data):
            stop = min(int(byte_range[2]) + 1 if byte_range[2] else len(data), len(data))
            headers["content-range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            return Response(data[first:stop], 206, media_type=mime, headers=headers)
    return Response(data, media_type=mime, headers=headers)


def _json_response(value: Any, status: int = 200) -> Response:
    """Return the value as JSON, with null for NaN and infinities."""
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json_response({"problem": str(error.detail)}, error.status_code)


async def _sightline_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, SightlineError)
    status = (
        404 if isinstance(error, MediaMissing) else 415 if isinstance(error, MediaError) else 500
    )
    return _json_response({"problem": error.problem, "fix": error.fix}, status)
