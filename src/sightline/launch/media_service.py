"""The media service: serves a folder of images to machines that do not share its disk.

`media/http_remote.py` lists the routes. The folder's `MediaStore` verifies all data that it stores
and returns.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import uvicorn
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from sightline.errors import EngineError, MediaError, MediaMissing
from sightline.inference.errors import Handler, answer_errors, json_response, read_body
from sightline.media import MediaStore
from sightline.media.files import BLOBS, GcReport
from sightline.media.http_remote import MISSING, GcRequest, derive_worker_token
from sightline.media.ref import check_digest
from sightline.transport.http_server import (
    SAFE_METHODS,
    GuardMiddleware,
    RequestGuard,
    build_uvicorn_config,
    check_address,
    read_bearer,
)
from sightline.transport.listen import bind_socket, check_tls, describe_link

KEEP_ALIVE_S = 75
MAX_GC_BYTES = 1 << 30
MAX_WORKERS, MAX_WORKER_IMAGES = 4096, 65_536
"""The service remembers this many images of each worker, and this many workers. It forgets the
least recently used, such as the workers of earlier runs."""


def is_control(method: str, path: str) -> bool:
    """Return whether a request requires the control token. This holds for removals, and for
    weights and checkpoints, except for reading a part by its digest."""
    name, is_blob = path.removeprefix(f"/{BLOBS}"), path.startswith(f"/{BLOBS}/")
    is_read = method in SAFE_METHODS or (method == "POST" and name.endswith("/renew"))
    reads_part = is_read and name.startswith("/media/")
    return method == "DELETE" or name == "/gc" or (is_blob and not reads_part)


@dataclass(frozen=True)
class MediaGuard(RequestGuard):
    """Also accepts the tokens of workers, and knows which images each of them has put.

    An image that the service has forgotten, for instance because it was restarted, is missing for
    the worker. Its rollouts in progress then fail, and the run plays them again.
    """

    put: LRUCache[str, LRUCache[str, bool]] = field(
        default_factory=lambda: LRUCache(MAX_WORKERS), repr=False
    )
    """The digests of the images that each worker has put."""

    def is_token(self, given: str) -> bool:
        return super().is_token(given) or bool(self._find_worker(given))

    def find_refusal(
        self, method: str, path: str, headers: Mapping[str, str], token: str = ""
    ) -> EngineError | None:
        refusal = super().find_refusal(method, path, headers, token)
        if refusal is None and self._find_worker(read_bearer(headers)):
            is_part = path.startswith(f"/{BLOBS}/media/") and method in SAFE_METHODS
            if method == "DELETE" or not (is_part or path.startswith(("/media/", "/check"))):
                fix = "use the service's token"
                return EngineError("a worker's token does not allow this", fix, "control", 403)
        return refusal

    def add(self, http: Request, digest: str) -> None:
        """Note that the sender of a request has put an image."""
        if worker := self._find_worker(read_bearer(http.headers)):
            self.put.setdefault(worker, LRUCache(MAX_WORKER_IMAGES))[digest] = True

    def hides(self, http: Request, digest: str) -> bool:
        """Return whether an image is missing for the sender of a request."""
        worker = self._find_worker(read_bearer(http.headers))
        images = self.put.get(worker)
        return bool(worker) and (images is None or images.get(digest) is None)

    def _find_worker(self, given: str) -> str:
        name = given.rpartition(".")[0]
        is_own = bool(self.token and name) and hmac.compare_digest(
            given.encode(), derive_worker_token(self.token, name).encode()
        )
        return name if is_own else ""


def build_media_app(store: MediaStore, host: str, token: str, control_token: str = "") -> Starlette:
    """Return the ASGI application that serves the images and the parts of files in `store`."""
    blobs = MediaStore(Path(store.root) / BLOBS)
    check_room = partial(store.check_room, also=[blobs])
    guard = MediaGuard(host, token, control_token, is_control)
    return Starlette(
        routes=[Mount(f"/{BLOBS}", routes=_build_routes(blobs, check_room, None)),
                *_build_routes(store, check_room, guard)],
        middleware=[Middleware(GuardMiddleware, guard=guard)],
    )  # fmt: skip


def _build_routes(
    store: MediaStore, check_room: Callable[..., None], guard: MediaGuard | None
) -> list[Route]:
    """Return the routes of one store. Without a guard, it accepts any bytes, and every sender may
    read them."""

    def get_visible(http: Request) -> str:
        digest = _get_digest(http)
        if guard is not None and guard.hides(http, digest):
            raise MediaMissing(f"image {digest[:12]} is not one of this worker", "put it first")
        return digest

    async def read(http: Request) -> Response:
        digest = get_visible(http)
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
            if guard is None:
                store.put_bytes(data)
            else:
                store.put(data)
            return is_new

        is_new = await run_in_threadpool(put)
        if guard is not None:
            guard.add(http, digest)
        return Response(status_code=201 if is_new else 200)

    async def renew(http: Request) -> Response:
        has_image = await run_in_threadpool(store.touch, get_visible(http))
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
        return Route(path, answer_errors(handler), methods=list(methods))

    return [
        # Only gc removes images, because other runs may use them.
        *([route("/media/{digest}", remove, "DELETE")] if guard is None else []),
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


def serve_media(
    store: MediaStore, host: str, port: int, token: str, control_token: str, cert: str, key: str
) -> None:
    """Serve until SIGTERM or SIGINT, with TLS if `cert` and `key` name files."""
    check_address(host, token, "--token")
    tls = check_tls(cert, key, host)
    store.check_writable()
    listening = bind_socket(host, port)
    config = build_uvicorn_config(
        build_media_app(store, host, token, control_token), timeout_keep_alive=KEEP_ALIVE_S, **tls
    )
    listening.listen()
    link = describe_link(host, listening.getsockname()[1], has_tls=bool(tls))
    print(f"serving the images of {store.root} at {link}", flush=True)
    uvicorn.Server(config).run(sockets=[listening])
