"""Video files: accepted and refused ones, and frames in RGB."""

from __future__ import annotations

import builtins
import io
import struct
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
        try:
            ref = store.put(bytes(bad))
        except MediaError:
            continue
        readers(store).read(ref, [0, ref.num_frames - 1])


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
    with pytest.raises(MediaUndecodable, match="no frame 8"):
        readers(store).read(longer, [8])
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


def test_a_small_file_of_many_pixels_is_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal frames compress to almost nothing, but each costs its pixels."""
    data = encode_video(np.zeros((40, 360, 640, 3), np.uint8))
    frame = 640 * 360
    assert len(data) < frame // 10
    inspect_video(data, "video/mp4", ImageLimits(max_video_pixels=40 * frame))
    monkeypatch.setattr("sightline.media.video._decode", None)
    with pytest.raises(MediaRefused, match="40 frames or more with 230400 pixels each"):
        inspect_video(data, "video/mp4", ImageLimits(max_video_pixels=40 * frame - 1))


def test_a_header_without_frames_does_not_avoid_the_limit() -> None:
    data = encode_video(noise_frames(9, 64, 64), "webm")
    with pytest.raises(MediaRefused, match="above the limit of 20480 pixels in all"):
        inspect_video(data, "video/webm", ImageLimits(max_video_pixels=5 * 64 * 64))


def test_decoding_stops_at_a_deadline() -> None:
    data = encode_video(noise_frames(9, 64, 64))
    with pytest.raises(MediaRefused, match=r"only \d+ packets of a video decoded in 1e-09 s"):
        inspect_video(data, "video/mp4", ImageLimits(max_decode_s=1e-9))


def hide_frames(data: bytes) -> bytes:
    """Return a WebM of VP8 with all frames but the first hidden: a decoder shows none of them."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="webm") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux()):
            if not packet.size:
                continue
            head, *rest = bytes(packet)
            copy = av.Packet(bytes([head & ~0x10 if number else head, *rest]))
            copy.stream, copy.time_base = stream, packet.time_base
            copy.pts, copy.dts, copy.is_keyframe = packet.pts, packet.dts, packet.is_keyframe
            file.mux(copy)
    return out.getvalue()


def test_hidden_frames_count_towards_the_limit() -> None:
    codec = ("libvpx", "yuv420p", {"lag-in-frames": "0"})
    data = hide_frames(encode_video(noise_frames(60, 64, 64), "webm", codec=codec))
    assert inspect_video(data, "video/webm").num_frames == 1
    with pytest.raises(MediaRefused, match="above the limit of 40960 pixels in all"):
        inspect_video(data, "video/webm", ImageLimits(max_video_pixels=10 * 64 * 64))
