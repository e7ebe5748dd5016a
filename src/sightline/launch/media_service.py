"""The media service: serves a folder of images to machines that do not share its disk.

`media/http_remote.py` lists the routes. The folder's `MediaStore` verifies all data that it stores
and returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from sightline.errors import (
    EngineError,
    MediaCorrupt,
    MediaError,
    MediaMissing,
    SightlineError,
    StoreFull,
)
from sightline.inference.errors import (
    Handler,
    answer_errors,
    error_response,
    json_response,
    read_body,
)
from sightline.media import MediaStore
from sightline.media.files import BLOBS, GcReport
from sightline.media.http_remote import CORRUPT, FULL, MISSING, GcRequest
from sightline.media.ref import check_digest
from sightline.transport.http_server import (
    SAFE_METHODS,
    GuardMiddleware,
    RequestGuard,
    build_uvicorn_config,
    check_address,
    encode_refusal,
)
from sightline.transport.listen import bind_socket, check_tls, describe_link

KEEP_ALIVE_S = 75
MAX_GC_BYTES = 1 << 30

_STATUSES: dict[type[MediaError], int] = {MediaMissing: MISSING, MediaCorrupt: CORRUPT}


def is_control(method: str, path: str) -> bool:
    """Return whether a request requires the control token. This holds for removals, and for
    weights and checkpoints, except for reading a part by its digest."""
    name, is_blob = path.removeprefix(f"/{BLOBS}"), path.startswith(f"/{BLOBS}/")
    is_read = method in SAFE_METHODS or (method == "POST" and name.endswith("/renew"))
    reads_part = is_read and name.startswith("/media/")
    return method == "DELETE" or name == "/gc" or (is_blob and not reads_part)


def build_media_app(store: MediaStore, guard: RequestGuard) -> Starlette:
    """Return the ASGI application that serves the images and the parts of files in `store`."""
    blobs = MediaStore(Path(store.root) / BLOBS)
    check_room = partial(store.check_room, also=[blobs])
    return Starlette(
        routes=[Mount(f"/{BLOBS}", routes=_build_routes(blobs, check_room, any_bytes=True)),
                *_build_routes(store, check_room, any_bytes=False)],
        middleware=[Middleware(GuardMiddleware, guard=guard)],
    )  # fmt: skip


def _build_routes(
    store: MediaStore, check_room: Callable[..., None], any_bytes: bool
) -> list[Route]:
    """Return the routes of one store. It accepts only images unless `any_bytes`."""

    async def read(http: Request) -> Response:
        digest = _get_digest(http)
        if http.method == "HEAD":
            has_image = await run_in_threadpool(store.has, digest)
            return Response(status_code=200 if has_image else MISSING)
        data = await run_in_threadpool(store.get_bytes, digest)
        return Response(data, media_type="application/octet-stream")

    async def write(http: Request) -> Response:
        digest = _get_digest(http)
        data = await read_body(http, store.limits.max_bytes)

        def put() -> bool:
            if (actual := sha256(data).hexdigest()) != digest:
                raise MediaError(f"the bytes hash to {actual}", "send the bytes of this digest")
            is_new = not store.has(digest)
            if is_new:
                check_room(len(data))
            if any_bytes:
                store.put_bytes(data)
            else:
                store.put(data)
            return is_new

        return Response(status_code=201 if await run_in_threadpool(put) else 200)

    async def renew(http: Request) -> Response:
        has_image = await run_in_threadpool(store.touch, _get_digest(http))
        return Response(status_code=200 if has_image else MISSING)

    async def remove(http: Request) -> Response:
        await run_in_threadpool(store.remove, _get_digest(http))
        return Response()

    async def list_sizes(http: Request) -> Response:
        return json_response(await run_in_threadpool(lambda: list(store.iter_sizes())))

    async def lease(http: Request) -> Response:
        change = store.end_lease if http.method == "DELETE" else store.renew_lease
        await run_in_threadpool(change, http.path_params["name"])
        return Response()

    async def check(http: Request) -> Response:
        await run_in_threadpool(store.check_writable)
        await run_in_threadpool(check_room)
        return Response()

    async def health(http: Request) -> Response:
        return Response()

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, answer_errors(handler, _respond), methods=list(methods))

    return [
        # Only gc removes images, because other runs may use them.
        *([route("/media/{digest}", remove, "DELETE")] if any_bytes else []),
        route("/media/{digest}", read, "GET", "HEAD"),
        route("/media/{digest}", write, "PUT"),
        route("/media/{digest}/renew", renew, "POST"),
        route("/media", list_sizes, "GET"),
        route("/leases/{name}", lease, "PUT", "DELETE"),
        route("/gc", partial(_gc, store), "POST"),
        route("/check", check, "POST"),
        route("/health", health, "GET"),
    ]


async def _gc(store: MediaStore, http: Request) -> Response:
    try:
        request = msgspec.json.decode(await read_body(http, MAX_GC_BYTES), type=GcRequest)
    except msgspec.DecodeError as error:
        raise EngineError(str(error), "send a GcRequest", "schema", 400) from error

    def collect() -> GcReport:
        store.check_writable()  # creates the folder of parts
        return store.gc(request.in_use, request.min_age_s, dry_run=request.dry_run)

    return json_response(await run_in_threadpool(collect))


def _get_digest(http: Request) -> str:
    digest: str = http.path_params["digest"]
    check_digest(digest)
    return digest


def _respond(error: SightlineError) -> Response:
    """Return an error of the store with its HTTP status."""
    if not isinstance(error, MediaError):
        return error_response(error)
    status = _STATUSES.get(type(error), 400)
    if isinstance(error, StoreFull):
        status = FULL
    elif isinstance(error.__cause__, OSError):
        status = 503
    refusal = EngineError(error.problem, error.fix, type(error).__name__, status)
    return Response(encode_refusal(refusal), status, media_type="application/json")


def serve_media(store: MediaStore, guard: RequestGuard, port: int, cert: str, key: str) -> None:
    """Serve until SIGTERM or SIGINT, with TLS if `cert` and `key` name files."""
    host = guard.host
    check_address(host, guard.token, "--token")
    tls = check_tls(cert, key, host)
    store.check_writable()
    listening = bind_socket(host, port)
    config = build_uvicorn_config(
        build_media_app(store, guard), timeout_keep_alive=KEEP_ALIVE_S, **tls
    )
    listening.listen()
    link = describe_link(host, listening.getsockname()[1], has_tls=bool(tls))
    print(f"serving the images of {store.root} at {link}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])
