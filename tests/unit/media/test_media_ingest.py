from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline.errors import ConfigError, MediaError, MediaMissing, MediaRefused, MessageError
from sightline.media import ImageIngestor, MediaRef, MediaStore, UrlRefCache
from sightline.media.header import ImageLimits

Picture = Callable[..., Image.Image]
Encode = Callable[..., bytes]
WHERE = "messages[3].content[1].image_url.url"


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def refused(ingest: ImageIngestor, url: object, error: type[Exception] = MediaRefused) -> str:
    with pytest.raises(error) as caught:
        ingest.resolve(url, WHERE)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{WHERE}: "), "every error names the JSON path"
    assert type(caught.value) is error
    return str(caught.value)


# --- data:


def test_format_is_detected_from_bytes_not_from_the_url(store: MediaStore, png: bytes) -> None:
    for kind in ("image/jpeg", "image/x-anything", "IMAGE/PNG", "image/png;charset=utf-8"):
        assert ImageIngestor(store).resolve(data_url(png, kind), WHERE).mime == "image/png"


def test_base64_with_whitespace_and_percent_escapes_is_decoded(
    store: MediaStore, png: bytes
) -> None:
    lines = base64.encodebytes(png).decode()
    escaped = base64.b64encode(png).decode().replace("+", "%2B").replace("=", "%3D")
    for text in (lines, escaped):
        assert (
            store.get(ImageIngestor(store).resolve("data:image/png;base64," + text, WHERE)) == png
        )


def test_bad_base64_is_refused(store: MediaStore, png: bytes) -> None:
    good = data_url(png)
    for url in (good + "!", good[:-3], good + "é", "data:image/png;base64,====", good + "AAAA="):
        assert "base64" in refused(ImageIngestor(store), url)


def test_base64_of_a_non_image_or_truncated_image_is_refused(store: MediaStore, png: bytes) -> None:
    refused(ImageIngestor(store), data_url(b"hello"))
    assert "truncated" in refused(ImageIngestor(store), data_url(png[:-6]))
    refused(ImageIngestor(store), "data:image/png;base64,")


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,x",
        "data:text/plain;base64,aGk=",
        "data:image/png,x",
        "data:image/png;base64",
    ],
)
def test_malformed_data_url_is_a_message_error(store: MediaStore, url: str) -> None:
    refused(ImageIngestor(store), url, MessageError)


def test_a_data_url_above_the_limit_is_refused_before_it_is_decoded(
    store: MediaStore, png: bytes
) -> None:
    ingest = ImageIngestor(MediaStore(store.root, limits=ImageLimits(max_bytes=len(png))))
    ingest.resolve(data_url(png), WHERE)
    assert "above the limit" in refused(ingest, data_url(png + b"x"))
    assert "above the limit" in refused(ingest, "data:image/png;base64," + "!" * 4 * len(png))


class CountingStore(MediaStore):
    num_puts = 0

    def put(self, source: bytes | Path | Image.Image) -> MediaRef:
        self.num_puts += 1
        return super().put(source)


def test_a_data_url_seen_before_is_not_put_again(store: MediaStore, png: bytes) -> None:
    counting = CountingStore(store.root)
    ingest = ImageIngestor(counting)
    ref = ingest.resolve(data_url(png), WHERE)
    assert ingest.resolve(data_url(png), WHERE) == ref
    assert counting.num_puts == 1


def test_repeated_data_url_is_put_again_after_gc_removed_its_image(
    store: MediaStore, png: bytes
) -> None:
    ingest = ImageIngestor(store)
    ref = ingest.resolve(data_url(png), WHERE)
    store.path(ref.digest).unlink()
    assert ingest.resolve(data_url(png), WHERE) == ref
    assert store.has(ref)


def test_refusals_are_not_cached(store: MediaStore) -> None:
    urls: list[str] = []

    def refuse(url: str, path: str, takes_video: bool) -> MediaRef:
        urls.append(url)
        raise MediaRefused("no", "send another")

    cache = UrlRefCache(refuse, store)
    for _ in range(2):
        with pytest.raises(MediaRefused):
            cache.resolve("https://a/b.png", WHERE)
    assert len(urls) == 2 and len(cache) == 0


def test_a_video_in_place_of_an_image_is_refused_by_its_first_bytes(store: MediaStore) -> None:
    video = b"\0\0\0\x10ftypisom\0\0\0\0"
    url = data_url(video)
    with pytest.raises(MessageError, match=f"^{re.escape(WHERE)}: expected an image, got"):
        ImageIngestor(store).resolve(url, WHERE, takes_video=False)
    with pytest.raises(MediaRefused, match=f"^{re.escape(WHERE)}: the MP4 has no moov"):
        ImageIngestor(store).resolve(url, WHERE, takes_video=True)
    assert store.count() == 0


@pytest.mark.parametrize("brand", [b"avif", b"heic", b"mif1"])
def test_a_picture_in_the_boxes_of_mp4_is_not_called_a_video(
    brand: bytes, store: MediaStore
) -> None:
    """Phones write HEIC files."""
    url = data_url(b"\0\0\0\x10ftyp" + brand + b"\0\0\0\0")
    with pytest.raises(MediaRefused, match="are not a PNG, JPEG, WebP"):
        ImageIngestor(store).resolve(url, WHERE, takes_video=False)


# --- media:


def test_media_url_resolves_to_the_stored_image(store: MediaStore, png: bytes) -> None:
    ref = store.put(png)
    assert ImageIngestor(MediaStore(store.root)).resolve(ref.url, WHERE) == ref


def test_media_url_of_a_missing_image_is_refused_with_its_path(store: MediaStore) -> None:
    refused(ImageIngestor(store), "media:sha256:" + "0" * 64, MediaMissing)


def test_unreadable_store_error_keeps_its_cause(store: MediaStore) -> None:
    store.path("0" * 64).mkdir(parents=True)
    with pytest.raises(MediaError, match="cannot read") as caught:
        ImageIngestor(store).resolve("media:sha256:" + "0" * 64, WHERE)
    assert isinstance(caught.value.__cause__, OSError), "by which a server knows that it may heal"


# --- everything else


@pytest.mark.parametrize(
    "url",
    [
        "",
        "picture.png",
        "/etc/passwd",
        "ftp://host/a.png",
        "blob:x",
        "0" * 64,
        "media:" + "0" * 64,
        "media:sha256:",
        "media:sha256:xyz",
        "javascript:1",
        " data:x",
        "://",
    ],
)
def test_every_other_url_is_a_message_error(store: MediaStore, url: str) -> None:
    refused(ImageIngestor(store), url, MessageError)


# --- file:


@pytest.fixture
def roots(tmp_path: Path, png: bytes) -> Path:
    """An allowed root with an image, next to a folder that is not allowed."""
    (tmp_path / "allowed" / "deep").mkdir(parents=True)
    (tmp_path / "allowed" / "deep" / "a b.png").write_bytes(png)
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "secret.png").write_bytes(png)
    return tmp_path


def test_file_under_an_allowed_root_is_accepted(store: MediaStore, roots: Path, png: bytes) -> None:
    ingest = ImageIngestor(store, file_roots=[roots / "allowed"])
    for host in ("", "localhost"):
        ref = ingest.resolve(f"file://{host}{roots}/allowed/deep/a%20b.png", WHERE)
        assert store.get(ref) == png


def test_files_are_refused_by_default(store: MediaStore, roots: Path) -> None:
    assert "not below an allowed" in refused(
        ImageIngestor(store), f"file://{roots}/allowed/deep/a b.png"
    )


def test_paths_cannot_escape_an_allowed_root(store: MediaStore, roots: Path) -> None:
    allowed = roots / "allowed"
    (allowed / "link.png").symlink_to(roots / "allowed-not" / "secret.png")
    (allowed / "folder").symlink_to(roots / "allowed-not")
    ingest = ImageIngestor(store, file_roots=[allowed])
    for name in (
        "allowed-not/secret.png",
        "allowed/../allowed-not/secret.png",
        "allowed/%2e%2e/allowed-not/secret.png",
        "allowed/link.png",
        "allowed/folder/secret.png",
        "allowed-not/there-is-no-such.png",
    ):
        assert "not below an allowed file root" in refused(ingest, f"file://{roots}/{name}")


@pytest.mark.parametrize("swapped", ["allowed", "allowed/deep", "allowed/deep/secret.png"])
def test_link_swapped_in_after_the_check_is_not_followed(
    store: MediaStore, roots: Path, png: bytes, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    (roots / "allowed-not" / "deep").mkdir()
    (roots / "allowed-not" / "deep" / "secret.png").write_bytes(png)
    (roots / "allowed" / "deep" / "secret.png").write_bytes(png)
    ingest = ImageIngestor(store, file_roots=[roots / "allowed"])
    system_open = os.open

    def open_late(path: Any, flags: int, *more: Any, **named: Any) -> int:
        """A link is created between the check and the first open."""
        monkeypatch.setattr(os, "open", system_open)
        place = roots / swapped
        place.rename(roots / "aside")
        place.symlink_to(roots / swapped.replace("allowed", "allowed-not"))
        return system_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_late)
    assert "cannot read" in refused(ingest, f"file://{roots}/allowed/deep/secret.png")
    assert (roots / swapped).is_symlink() and store.count() == 0


@pytest.mark.parametrize(
    "url", ["file:", "file://a.png", "file:a.png", "file://host/a.png", "file:///a%00b"]
)
def test_a_file_url_without_an_absolute_path_is_a_message_error(
    store: MediaStore, roots: Path, url: str
) -> None:
    refused(ImageIngestor(store, file_roots=["/"]), url, MessageError)


def test_non_image_file_under_an_allowed_root_is_refused(store: MediaStore, roots: Path) -> None:
    os.mkfifo(roots / "allowed" / "pipe")
    (roots / "allowed" / "text").write_text("x")
    ingest = ImageIngestor(store, file_roots=[roots / "allowed"])
    for name in ("pipe", "deep", "text", "nothing"):
        refused(ingest, f"file://{roots}/allowed/{name}")
    tight = MediaStore(store.root, limits=ImageLimits(max_bytes=10))
    small = ImageIngestor(tight, file_roots=[roots / "allowed"])
    assert "above the limit" in refused(small, f"file://{roots}/allowed/deep/a b.png")


def test_a_relative_file_root_is_refused(store: MediaStore) -> None:
    with pytest.raises(ConfigError, match="relative"):
        ImageIngestor(store, file_roots=["pictures"])


# --- http:


def test_image_from_an_allowed_address_is_accepted(
    store: MediaStore, server: int, png: bytes
) -> None:
    ingest = ImageIngestor(store, http_hosts=[f"127.0.0.1:{server}"])
    for path in ("/a.png", "/a.png?size=1#part"):
        assert store.get(ingest.resolve(f"http://127.0.0.1:{server}{path}", WHERE)) == png


def test_slow_response_is_cut_at_the_time_limit(store: MediaStore, server: int) -> None:
    ingest = ImageIngestor(store, http_hosts=[f"127.0.0.1:{server}"], timeout_s=0.2)
    assert "within 0.2 s" in refused(ingest, f"http://127.0.0.1:{server}/slow")


def test_response_above_the_limit_is_refused(store: MediaStore, server: int) -> None:
    tight = MediaStore(store.root, limits=ImageLimits(max_bytes=20))
    ingest = ImageIngestor(tight, http_hosts=[f"127.0.0.1:{server}"])
    for path in ("a.png", "endless"):
        assert "above the limit" in refused(ingest, f"http://127.0.0.1:{server}/{path}")


def test_unresponsive_host_is_refused(store: MediaStore) -> None:
    ingest = ImageIngestor(store, http_hosts=["127.0.0.1:1"], timeout_s=1)
    refused(ingest, "http://127.0.0.1:1/a.png")
    refused(ingest, "http://[::bad/a.png")
