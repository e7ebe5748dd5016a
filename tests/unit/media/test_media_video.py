"""Video files: accepted and refused ones, and frames in RGB."""

from __future__ import annotations

import base64
import builtins
import io
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from videos import EXACT, encode_video, noise_frames

from sightline import MediaError, MediaRef, MediaRefused, MediaStore
from sightline.errors import MediaUndecodable
from sightline.media import ImageIngestor
from sightline.media.header import ImageLimits
from sightline.media.video import VideoReaders, inspect_video
from sightline.message import to_messages


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    return MediaStore(tmp_path / "store")


def readers(store: MediaStore) -> VideoReaders:
    return VideoReaders(store.get, store.limits)


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_video_has_its_own_ref_type(store: MediaStore, container: str, tmp_path: Path) -> None:
    data = encode_video(noise_frames(9, 96, 64), container, fps=4)
    ref = store.put(data)
    assert (ref.mime, ref.width, ref.height) == (f"video/{container}", 96, 64)
    assert (ref.num_frames, ref.fps, ref.nbytes) == (9, 4.0, len(data))
    assert store.get(ref) == data
    assert MediaStore(store.root).get_ref(ref.digest) == ref
    (tmp_path / "clip").write_bytes(data)
    assert store.put(tmp_path / "clip") == ref
    again = msgspec.json.decode(msgspec.json.encode(ref), type=MediaRef)
    assert again == ref and again.is_video


def test_lossless_frames_are_bit_identical(store: MediaStore) -> None:
    frames = noise_frames(12, 64, 48)
    ref = store.put(encode_video(frames))
    for numbers in ([0], [3, 5], [4], [11, 11]):
        decoded = readers(store).read(ref, numbers)
        assert all(image.mode == "RGB" and image.size == (64, 48) for image in decoded)
        for number, image in zip(numbers, decoded, strict=True):
            assert np.array_equal(np.asarray(image), frames[number])


def test_reader_reads_forward_and_restarts_for_an_earlier_frame(store: MediaStore) -> None:
    frames = noise_frames(12)
    ref = store.put(encode_video(frames))
    open_readers = readers(store)
    for numbers in ([0, 2], [2, 4], [8, 9]):
        open_readers.read(ref, numbers)
    assert open_readers._get(ref).num_starts == 1
    (early,) = open_readers.read(ref, [1])
    assert np.array_equal(np.asarray(early), frames[1])
    assert open_readers._get(ref).num_starts == 2


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_truncated_video_is_refused_and_not_stored(store: MediaStore, container: str) -> None:
    data = encode_video(noise_frames(6, 32, 32), container)
    for end in range(12, len(data) - 1, len(data) // 60):
        with pytest.raises((MediaRefused, MediaUndecodable)):
            store.put(data[:end])
    assert store.count() == 0


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_damaged_bytes_either_decode_or_are_refused(store: MediaStore, container: str) -> None:
    data = encode_video(noise_frames(6, 32, 32), container)
    rng = np.random.default_rng(0)
    for _ in range(60):
        bad = bytearray(data)
        for place in rng.integers(8, len(data), rng.integers(1, 20)):
            bad[place] = rng.integers(0, 256)
        with suppress(MediaRefused, MediaUndecodable):
            ref = store.put(bytes(bad))
            assert len(readers(store).read(ref, [0, ref.num_frames - 1])) == 2


@pytest.mark.parametrize(
    "limits",
    [
        ImageLimits(max_bytes=100),
        ImageLimits(max_pixels=32 * 31),
        ImageLimits(max_side=31),
        ImageLimits(max_frames=5),
        ImageLimits(max_duration_s=1.4),
    ],
)
def test_each_limit_is_enforced_independently(limits: ImageLimits) -> None:
    data = encode_video(noise_frames(6, 32, 32))
    inspect_video(data, "video/mp4")
    with pytest.raises(MediaRefused, match="limit"):
        inspect_video(data, "video/mp4", limits)


def test_video_with_an_unknown_codec_is_refused(store: MediaStore) -> None:
    frames = noise_frames(4, 32, 32)
    for data, why in (
        (b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x08free", "has no moov box"),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 64, "not WebM"),
        (encode_video(frames, codec=("mjpeg", "yuvj420p", {})), "codec"),
    ):
        with pytest.raises((MediaRefused, MediaUndecodable), match=why):
            store.put(data)


def test_rotated_video_is_refused(store: MediaStore) -> None:
    """A phone stores its frames sideways, with a matrix that turns them."""
    data = bytearray(encode_video(noise_frames(4, 32, 32)))
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.index(upright, data.index(b"tkhd"))
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 32 << 16, 0, 1 << 30)
    with pytest.raises(MediaRefused, match=r"rotated[\s\S]*upright"):
        store.put(bytes(data))
    assert store.count() == 0


def test_ref_with_false_metadata_fails_when_frames_are_read(store: MediaStore) -> None:
    ref = store.put(encode_video(noise_frames(4, 32, 32)))
    longer = msgspec.structs.replace(ref, num_frames=9)
    with pytest.raises(MediaUndecodable, match="has 4 frames, its ref says 9"):
        readers(store).read(longer, [1])
    with pytest.raises(MediaUndecodable, match="no frame 8"):
        readers(store).read(ref, [8])
    wider = msgspec.structs.replace(ref, width=64)
    with pytest.raises(MediaRefused, match="not 64x32"):
        readers(store).read(wider, [0])
    with pytest.raises(MediaError, match="is a video"):
        store.image(ref)


def test_video_urls_are_handled_like_image_urls(store: MediaStore) -> None:
    data = encode_video(noise_frames(3, 32, 32))
    ingest = ImageIngestor(store)
    ref = store.put(data)
    assert ingest.resolve(ref.data_url(data), "m") == ref
    assert ingest.resolve(ref.url, "m") == ref
    with pytest.raises(MediaRefused, match="^m: .*not below an allowed file root"):
        ingest.resolve("file:///etc/clip.mp4", "m")


def test_missing_pyav_error_names_the_extra_to_install(
    store: MediaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, true_import = encode_video(noise_frames(3, 32, 32), codec=EXACT), builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return true_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MediaError, match=r"sightline-rl\[video\]"):
        store.put(data)


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_a_small_file_of_many_pixels_is_refused_before_decoding(
    container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal frames compress to almost nothing, but each costs its pixels. A WebM's header does not
    announce the number of frames."""
    data, mime = (
        encode_video(np.zeros((40, 180, 320, 3), np.uint8), container),
        f"video/{container}",
    )
    frame = 320 * 180
    assert len(data) < frame // 4
    inspect_video(data, mime, ImageLimits(max_video_pixels=40 * frame))
    monkeypatch.setattr("sightline.media.video._decode", None)
    with pytest.raises(MediaRefused, match="40 frames or more with 57600 pixels each"):
        inspect_video(data, mime, ImageLimits(max_video_pixels=40 * frame - 1))


def test_a_header_with_a_smaller_size_does_not_avoid_the_limit() -> None:
    codec = ("libvpx", "yuv420p", {})
    data = bytearray(encode_video(noise_frames(9, 64, 64), "webm", codec=codec))
    for element in (b"\xb0\x81", b"\xba\x81"):  # PixelWidth and PixelHeight, in one byte each
        assert data[data.index(element) + 2] == 64
        data[data.index(element) + 2] = 16
    assert inspect_video(bytes(data), "video/webm").width == 64
    with pytest.raises(MediaRefused, match="above the limit of 20480 pixels in all"):
        inspect_video(bytes(data), "video/webm", ImageLimits(max_video_pixels=5 * 64 * 64))


def test_decoding_stops_at_a_deadline(store: MediaStore) -> None:
    data = encode_video(noise_frames(9, 64, 64))
    short = ImageLimits(max_decode_s=1e-9)
    with pytest.raises(MediaRefused, match="more than 1e-09 s of processor time"):
        inspect_video(data, "video/mp4", short)
    ref = store.put(data)
    with pytest.raises(MediaRefused, match="more than 1e-09 s of processor time"):
        VideoReaders(store.get, short).read(ref, [0])


def test_videos_of_one_request_share_the_time_limit(tmp_path: Path) -> None:
    data = encode_video(noise_frames(9, 64, 64))
    inspect_video(data, "video/mp4")  # loads PyAV
    store = MediaStore(tmp_path, limits=ImageLimits(max_decode_s=0.1))
    # Files that differ, because a known URL is not put again.
    files = [data + b"\0\0\0\x0cfree" + number.to_bytes(4, "big") for number in range(400)]
    urls = [f"data:video/mp4;base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "video_url", "video_url": url} for url in urls]
    for part in parts[:40]:
        to_messages([{"role": "user", "content": [part]}], ImageIngestor(store))
    with pytest.raises(MediaRefused, match=r"more than 0.1 s[\s\S]*send fewer videos at once"):
        to_messages([{"role": "user", "content": parts}], ImageIngestor(store))


def change_packets(data: bytes, container: str, change: Callable[[int, bytes], bytes]) -> bytes:
    """Return the file with the packet of each number replaced. Its header stays."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=container) as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux()):
            if not packet.size:
                continue
            copy = av.Packet(change(number, bytes(packet)))
            copy.stream, copy.time_base = stream, packet.time_base
            copy.pts, copy.dts, copy.is_keyframe = packet.pts, packet.dts, packet.is_keyframe
            file.mux(copy)
    return out.getvalue()


def hide_frames(data: bytes) -> bytes:
    """Return a WebM of VP8 with all frames but the first hidden: a decoder shows none of them."""

    def hide(number: int, packet: bytes) -> bytes:
        return bytes([packet[0] & ~0x10 if number else packet[0], *packet[1:]])

    return change_packets(data, "webm", hide)


BIDIRECTIONAL = ("libx264", "yuv420p", {"bf": "3", "g": "10"})


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", BIDIRECTIONAL),
        ("mp4", ("libx264", "yuv420p", {"bf": "3", "x264-params": "open-gop=1:keyint=8"})),
        ("mp4", ("libx265", "yuv420p", {"x265-params": "log-level=none"})),
        ("mp4", ("mpeg4", "yuv420p", {"bf": "2"})),
        ("mp4", ("libsvtav1", "yuv420p", {})),
        ("webm", ("libvpx", "yuv420p", {"auto-alt-ref": "1", "lag-in-frames": "16"})),
        ("webm", ("libvpx-vp9", "yuv420p", {"auto-alt-ref": "1", "lag-in-frames": "16"})),
    ],
)
def test_packets_count_the_frames_that_decode(
    store: MediaStore, container: str, codec: Any
) -> None:
    data = encode_video(noise_frames(40), container, codec=codec)
    with av.open(io.BytesIO(data)) as file:
        num_decoded = sum(1 for _ in file.decode(video=0))
    ref = store.put(data)
    assert ref.num_frames == num_decoded == 40
    assert len(readers(store).read(ref, list(range(40)))) == 40


def test_frames_before_the_start_of_an_edit_list_do_not_count(store: MediaStore) -> None:
    data = bytearray(encode_video(noise_frames(40), codec=BIDIRECTIONAL))
    with av.open(io.BytesIO(data)) as file:
        ticks = round(1 / (4 * file.streams.video[0].time_base))
    at = data.index(b"elst") + 16
    (start,) = struct.unpack_from(">i", data, at)
    struct.pack_into(">i", data, at, start + 3 * ticks)
    ref = store.put(bytes(data))
    assert ref.num_frames == 37
    assert len(readers(store).read(ref, list(range(37)))) == 37


def test_put_does_not_decode_all_frames_and_a_damaged_one_is_found_when_it_is_read(
    store: MediaStore,
) -> None:
    data = encode_video(noise_frames(40), codec=BIDIRECTIONAL)
    broken = change_packets(data, "mp4", lambda n, old: old if n < 30 else old[:5] + b"\xff" * 90)
    ref = store.put(broken)
    assert ref.num_frames == 40
    assert len(readers(store).read(ref, [0, 9])) == 2
    with pytest.raises((MediaUndecodable, MediaRefused), match=f"^video {ref.digest[:12]}: "):
        readers(store).read(ref, [39])


NOT_CODED = ("mpeg4", {"bf": "0"}, b"\0\0\1\xb6\x52\x7f")
ONLY_DELIMITER = ("libx265", {"x265-params": "log-level=none:bframes=0"}, b"\0\0\0\3\x46\1\x50")
"""Codecs, and a packet for which their decoder has no frame."""


@pytest.mark.parametrize(
    ("codec", "number", "what"),
    [
        (NOT_CODED, 1, "^frame 1 of 40 is missing or has another time"),
        (NOT_CODED, 20, "^video [0-9a-f]{12}: frame 20 of 40 is missing or has another time"),
        (ONLY_DELIMITER, 39, "^video [0-9a-f]{12}: only 39 of 40 frames decode"),
    ],
)
def test_video_with_fewer_frames_than_packets_is_undecodable(
    store: MediaStore, codec: Any, number: int, what: str
) -> None:
    name, options, empty = codec
    data = encode_video(noise_frames(40), codec=(name, "yuv420p", options))
    short = change_packets(data, "mp4", lambda n, packet: empty if n == number else packet)
    with pytest.raises(MediaUndecodable, match=what):
        readers(store).read(store.put(short), [39])
    assert store.count() == (number > 1)


def test_hidden_frames_count_towards_the_limit() -> None:
    codec = ("libvpx", "yuv420p", {"lag-in-frames": "0"})
    data = hide_frames(encode_video(noise_frames(60, 64, 64), "webm", codec=codec))
    assert inspect_video(data, "video/webm").num_frames == 1
    with pytest.raises(MediaRefused, match="above the limit of 40960 pixels in all"):
        inspect_video(data, "video/webm", ImageLimits(max_video_pixels=10 * 64 * 64))
