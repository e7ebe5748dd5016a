"""Small images of every kind, created once."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

import sightline.errors
from sightline.media import MediaStore


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    return MediaStore(tmp_path / "store")


@pytest.fixture(scope="session")
def picture() -> Callable[..., Image.Image]:
    """An image whose every pixel differs from its neighbours, in any mode."""

    def make(width: int = 9, height: int = 5, mode: str = "RGB", seed: int = 0) -> Image.Image:
        rgba = Image.new("RGBA", (width, height))
        rgba.putdata(
            [
                (
                    (x * 29 + seed) % 256,
                    (y * 41 + seed // 256) % 256,
                    (x * y * 7) % 256,
                    (x * 25 + y) % 256,
                )
                for y in range(height)
                for x in range(width)
            ]
        )
        return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)

    return make


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    def make(image: Image.Image, format_name: str, **settings: object) -> bytes:
        out = io.BytesIO()
        image.save(out, format_name, **settings)
        return out.getvalue()

    return make


@pytest.fixture(scope="session")
def every_format(
    picture: Callable[..., Image.Image], encode: Callable[..., bytes]
) -> dict[str, bytes]:
    """One file a format and variant, of 40x24 pixels so that each has several parts."""
    rgb, rgba = picture(40, 24), picture(40, 24, "RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6
    second = picture(40, 24, seed=90)
    return {
        "png": encode(rgb, "PNG"),
        "png_exif": encode(rgb, "PNG", exif=exif),
        "png_palette": encode(rgb.quantize(16), "PNG"),
        "jpeg": encode(rgb, "JPEG"),
        "jpeg_progressive_exif": encode(rgb, "JPEG", progressive=True, exif=exif),
        "jpeg_grey": encode(rgb.convert("L"), "JPEG"),
        "webp": encode(rgb, "WEBP"),
        "webp_lossless": encode(rgba, "WEBP", lossless=True),
        "webp_exif": encode(rgb, "WEBP", exif=exif),
        "webp_animated": encode(rgb, "WEBP", save_all=True, append_images=[second]),
        "gif": encode(rgb, "GIF"),
        "gif_animated": encode(rgb, "GIF", save_all=True, append_images=[second]),
    }


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Start a Python process of its own that can import sightline."""
    source = str(Path(sightline.errors.__file__).parents[1])

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            env=os.environ | {"PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def png(picture: Callable[..., Image.Image], encode: Callable[..., bytes]) -> bytes:
    return encode(picture(), "PNG")


@pytest.fixture
def server(png: bytes) -> Iterator[int]:
    """The port of a web server on this machine. `/302/TARGET` redirects to TARGET, and `/endless`
    sends bytes until the client leaves."""

    known = ("/a.png?size=1", "/a.png", "/slow", "/endless")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, _, target = self.path[1:].partition("/")
            if target:
                self.send_response(int(status))
                self.send_header("Location", target)
                self.end_headers()
                return
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
            if self.path in ("/slow", "/endless"):
                try:
                    for byte in png if self.path == "/slow" else itertools.repeat(0):
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(0.02)
                except OSError:
                    pass
                return
            self.wfile.write(png)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()
