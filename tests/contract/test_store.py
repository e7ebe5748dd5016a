"""What every store promises, run on each implementation."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from sightline.errors import MediaCorrupt, MediaError, MediaMissing, MediaRefused
from sightline.media import MediaRef, MediaStore

STORES: dict[str, Callable[[Path], MediaStore]] = {
    "directory": lambda folder: MediaStore(folder / "store"),
}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MediaStore:
    return STORES[request.param](tmp_path)


def png(color: object = "red", size: tuple[int, int] = (6, 4)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def files_of(store: MediaStore) -> list[Path]:
    return sorted(path for path in store.root.rglob("*") if path.is_file() and path.name != ".lock")


def test_get_returns_exactly_the_bytes_that_were_put(store: MediaStore) -> None:
    data = png() + b"bytes behind the image stay, too"
    ref = store.put(data)
    assert ref == MediaRef(sha256(data).hexdigest(), "image/png", 6, 4, len(data))
    assert store.get(ref) == data


def test_put_is_idempotent_and_does_not_write_again(store: MediaStore) -> None:
    ref = store.put(png())
    (path,) = files_of(store)
    before = path.stat()
    assert store.put(png()) == ref
    assert files_of(store) == [path]
    assert path.stat().st_ino == before.st_ino


def test_an_image_lies_two_directories_deep_by_its_digest(store: MediaStore) -> None:
    digest = store.put(png()).digest
    assert files_of(store) == [store.root / digest[:2] / digest[2:4] / digest]


def test_put_takes_bytes_a_path_and_a_pil_image(store: MediaStore, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(png())
    assert store.put(file) == store.put(png()) == store.put(bytearray(png()))
    drawn = store.put(Image.new("RGBA", (6, 4), (255, 0, 0, 128)))
    assert drawn.mime == "image/png"
    assert store.image(drawn).getpixel((0, 0)) == (255, 0, 0)


def test_text_is_refused_and_the_refusal_names_ingest(store: MediaStore) -> None:
    with pytest.raises(MediaRefused, match="Ingest"):
        store.put("picture.png")  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [None, 5, [1, 2], object()])
def test_anything_else_is_refused(store: MediaStore, source: object) -> None:
    with pytest.raises(MediaRefused, match="put was given"):
        store.put(source)  # type: ignore[arg-type]


def test_what_is_refused_leaves_nothing_behind(store: MediaStore) -> None:
    for data in (b"", b"no image", png()[:-5]):
        with pytest.raises(MediaRefused):
            store.put(data)
    assert files_of(store) == []


def test_a_path_that_cannot_be_read_is_a_clear_error(store: MediaStore, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"nothing\.png"):
        store.put(tmp_path / "nothing.png")
    with pytest.raises(MediaError):
        store.put(tmp_path)


def test_image_gives_rgb_of_the_size_in_the_ref(store: MediaStore) -> None:
    ref = store.put(Image.new("L", (7, 3), 9))
    image = store.image(ref)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (7, 3), (9, 9, 9))


def test_a_ref_that_lies_about_the_size_gives_no_picture(store: MediaStore) -> None:
    ref = store.put(png())
    liar = MediaRef(ref.digest, ref.mime, ref.height, ref.width, ref.nbytes)
    with pytest.raises(MediaError, match="its ref says 4x6"):
        store.image(liar)


def test_find_gives_back_the_ref_without_any_memory_of_the_put(store: MediaStore) -> None:
    ref = store.put(png())
    fresh = pickle.loads(pickle.dumps(store))
    assert fresh.get_ref(ref.digest) == ref
    assert fresh.get_ref(ref.digest) == ref


def test_a_digest_that_was_never_put_is_missing(store: MediaStore) -> None:
    ref = MediaRef("0" * 64, "image/png", 1, 1, 1)
    assert not store.has(ref)
    for look in (store.get, store.image, lambda r: store.get_ref(r.digest)):
        with pytest.raises(MediaMissing) as caught:
            look(ref)
        assert str(store.root) in caught.value.problem


def test_has_takes_a_ref_or_a_digest(store: MediaStore) -> None:
    ref = store.put(png())
    assert store.has(ref)
    assert store.has(ref.digest)


@pytest.mark.parametrize("name", ["", "../../etc", "A" * 64, "a" * 63, "a" * 64 + "/"])
def test_a_name_that_is_no_digest_reaches_no_file(store: MediaStore, name: str) -> None:
    for look in (store.has, store.get_ref, store.touch, store.path):
        with pytest.raises(MediaError, match="not a media digest"):
            look(name)


@pytest.mark.parametrize("damage", [b"", b"other bytes", png("blue")])
def test_a_corrupt_file_is_refused_on_every_read(store: MediaStore, damage: bytes) -> None:
    ref = store.put(png())
    store.path(ref.digest).write_bytes(damage)
    fresh = pickle.loads(pickle.dumps(store))
    for look in (fresh.get, fresh.image, lambda r: fresh.get_ref(r.digest)):
        with pytest.raises(MediaCorrupt, match=ref.digest[:12]):
            look(ref)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link", "loop"])
def test_only_a_regular_file_is_an_image(store: MediaStore, tmp_path: Path, kind: str) -> None:
    """Reading waits for no writer, and follows no link, not even to the very same bytes."""
    ref = store.put(png())
    path = store.path(ref.digest)
    aside = path.rename(tmp_path / "aside.png")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "device":
            try:
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("only root makes devices")
        case "link":
            path.symlink_to(aside)
        case "loop":
            path.symlink_to(path)
    fresh = pickle.loads(pickle.dumps(store))
    for look in (store.get, store.image, fresh.get, lambda r: store.get_ref(r.digest)):
        with pytest.raises(MediaCorrupt, match=f"{ref.digest[:12]} is no regular file.*{path}"):
            look(ref)
    assert not store.has(ref) and not store.touch(ref.digest)
    other = MediaStore(tmp_path / "own", fallback_roots=[store.root, aside.parent / "copy"])
    with pytest.raises(MediaCorrupt, match="no regular file"):
        other.get(ref)
    MediaStore(aside.parent / "copy").put(png())
    assert other.get(ref) == png() and other.has(ref)
    assert store.put(png()) == ref and store.get(ref) == png()
    assert aside.read_bytes() == png()


def test_a_file_larger_than_any_image_is_not_read(store: MediaStore) -> None:
    ref = store.put(png())
    os.truncate(store.path(ref.digest), 1 << 40)
    with pytest.raises(MediaRefused, match=f"above the limit.*{ref.digest}"):
        store.get(ref)


def test_the_root_of_a_store_may_be_a_link(store: MediaStore, tmp_path: Path) -> None:
    ref = store.put(png())
    (tmp_path / "link").symlink_to(store.root)
    for linked in (
        MediaStore(tmp_path / "link"),
        MediaStore(tmp_path / "own", fallback_roots=[tmp_path / "link"]),
    ):
        assert linked.get(ref) == png() and linked.has(ref) and linked.touch(ref.digest)


def test_putting_the_image_again_heals_a_corrupt_file(store: MediaStore) -> None:
    ref = store.put(png())
    store.path(ref.digest).write_bytes(b"\0" * ref.nbytes)
    assert store.put(png()) == ref
    assert store.get(ref) == png()


def test_verify_lists_what_is_damaged_and_removes_nothing(store: MediaStore) -> None:
    refs = [store.put(png(color)) for color in ("red", "green", "blue")]
    store.path(refs[1].digest).write_bytes(b"damage")
    stray = store.path(refs[0].digest).parent / "notes.txt"
    stray.write_text("x")
    before = files_of(store)
    report = store.verify()
    assert (report.num_files, report.corrupt) == (3, [refs[1].digest])
    assert [store.root / leftover for leftover in report.leftovers] == [stray]
    assert files_of(store) == before


def test_digests_count_and_size_tell_what_is_there(store: MediaStore) -> None:
    assert (list(store.digests()), store.count(), store.size_bytes()) == ([], 0, 0)
    refs = [store.put(png(color)) for color in ("red", "green", "blue", "red")]
    assert set(store.digests()) == {ref.digest for ref in refs}
    assert (store.count(), store.size_bytes()) == (3, sum(ref.nbytes for ref in refs[:3]))


def test_a_fallback_root_is_read_and_never_written(store: MediaStore, tmp_path: Path) -> None:
    ref = store.put(png())
    other = MediaStore(tmp_path / "own", fallback_roots=[store.root])
    assert other.get(ref) == png()
    assert other.get_ref(ref.digest) == ref
    assert other.has(ref)
    assert other.touch(ref.digest)
    assert not (tmp_path / "own").exists()
    blue = other.put(png("blue"))
    assert not store.has(blue)


def test_a_sound_copy_in_a_fallback_root_stands_in_for_a_corrupt_one(
    store: MediaStore, tmp_path: Path
) -> None:
    other = MediaStore(tmp_path / "own", fallback_roots=[store.root])
    ref = other.put(png())
    store.put(png())
    other.path(ref.digest).write_bytes(b"damage")
    assert other.get(ref) == png()


def test_a_removed_image_is_missing_even_when_its_header_is_remembered(store: MediaStore) -> None:
    ref = store.put(png())
    shutil.rmtree(store.root)
    assert not store.touch(ref.digest)
    with pytest.raises(MediaMissing):
        store.get_ref(ref.digest)


def test_threads_may_put_and_get_at_once(store: MediaStore) -> None:
    images = [png((i, 0, 0)) for i in range(8)]

    def work(i: int) -> bool:
        ref = store.put(images[i % 8])
        return store.get(ref) == images[i % 8]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert store.count() == 8
