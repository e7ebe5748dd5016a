"""Guarantees of every store, tested on each implementation."""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image
from store_kinds import KINDS, TOKEN, FolderBacking, StoreKind, s3_server

from sightline.errors import MediaCorrupt, MediaError, MediaMissing, MediaRefused
from sightline.media import MediaRef, MediaStore
from sightline.media.stored_file import open_blobs


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreKind]:
    if request.param == "s3":
        request.getfixturevalue("s3")
    with KINDS[request.param](tmp_path) as store_kind:
        yield store_kind


@pytest.fixture
def store(kind: StoreKind) -> MediaStore:
    return kind.store


def png(color: object = "red", size: tuple[int, int] = (6, 4)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def name_of(ref: MediaRef) -> str:
    return f"{ref.digest[:2]}/{ref.digest[2:4]}/{ref.digest}"


def test_get_returns_the_stored_bytes(store: MediaStore) -> None:
    data = png() + b"bytes behind the image stay, too"
    ref = store.put(data)
    assert ref == MediaRef(sha256(data).hexdigest(), "image/png", 6, 4, len(data))
    assert store.get(ref) == data


def test_put_is_idempotent(kind: StoreKind) -> None:
    ref = kind.store.put(png())
    assert kind.store.put(png()) == kind.elsewhere().put(png()) == ref
    assert kind.backing.names() == [name_of(ref)]


def test_existing_image_is_not_rewritten(kind: StoreKind) -> None:
    if not isinstance(kind.backing, FolderBacking):
        return
    path = kind.backing.root / name_of(kind.store.put(png()))
    before = path.stat().st_ino
    kind.elsewhere().put(png())
    assert path.stat().st_ino == before


def test_put_accepts_bytes_a_path_and_a_pil_image(store: MediaStore, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(png())
    assert store.put(file) == store.put(png()) == store.put(bytearray(png()))
    drawn = store.put(Image.new("RGBA", (6, 4), (255, 0, 0, 128)))
    assert drawn.mime == "image/png"
    assert store.image(drawn).getpixel((0, 0)) == (255, 0, 0)


def test_refused_put_stores_nothing(kind: StoreKind) -> None:
    for data in (b"", b"no image", png()[:-5]):
        with pytest.raises(MediaRefused):
            kind.store.put(data)
    assert kind.backing.names() == []


def test_ref_with_a_wrong_size_gives_no_image(store: MediaStore) -> None:
    ref = store.put(png())
    liar = MediaRef(ref.digest, ref.mime, ref.height, ref.width, ref.nbytes)
    with pytest.raises(MediaError, match="its ref says 4x6"):
        store.image(liar)


def test_find_returns_the_ref_in_a_new_store_object(kind: StoreKind) -> None:
    ref = kind.store.put(png())
    fresh = kind.elsewhere()
    assert fresh.get_ref(ref.digest) == ref
    assert fresh.get_ref(ref.digest) == ref


def test_unknown_digest_is_missing(store: MediaStore) -> None:
    ref = MediaRef("0" * 64, "image/png", 1, 1, 1)
    assert not store.has(ref)
    for look in (store.get, store.image, lambda r: store.get_ref(r.digest)):
        with pytest.raises(MediaMissing) as caught:
            look(ref)
        assert str(store.root) in caught.value.problem


@pytest.mark.parametrize("name", ["", "../../etc", "A" * 64, "a" * 63, "a" * 64 + "/"])
def test_invalid_digest_reaches_no_file(store: MediaStore, name: str) -> None:
    for look in (store.has, store.get_ref, store.touch, store.path):
        with pytest.raises(MediaError, match="not a media digest"):
            look(name)


@pytest.mark.parametrize("damage", [b"", b"other bytes", png("blue")])
def test_a_corrupt_file_is_refused_on_every_read(kind: StoreKind, damage: bytes) -> None:
    ref = kind.store.put(png())
    kind.backing.write(name_of(ref), damage)
    fresh = kind.elsewhere()
    for look in (fresh.get, fresh.image, lambda r: fresh.get_ref(r.digest)):
        with pytest.raises(MediaCorrupt, match=ref.digest[:12]):
            look(ref)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link", "loop"])
def test_only_a_regular_file_is_an_image(tmp_path: Path, kind: str) -> None:
    """Reading never blocks on a pipe, and never follows a link, even to the same bytes."""
    store = MediaStore(tmp_path / "media")
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
    fresh = MediaStore(store.root)
    for look in (store.get, store.image, fresh.get, lambda r: store.get_ref(r.digest)):
        with pytest.raises(MediaCorrupt, match=f"{ref.digest[:12]} is not a regular file.*{path}"):
            look(ref)
    assert not store.has(ref) and not store.touch(ref.digest)
    other = MediaStore(tmp_path / "own", fallback_roots=[store.root, aside.parent / "copy"])
    with pytest.raises(MediaCorrupt, match="not a regular file"):
        other.get(ref)
    MediaStore(aside.parent / "copy").put(png())
    assert other.get(ref) == png() and other.has(ref)
    assert store.put(png()) == ref and store.get(ref) == png()
    assert aside.read_bytes() == png()


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    ref = store.put(png())
    os.truncate(store.path(ref.digest), 1 << 40)
    with pytest.raises(MediaRefused, match=f"above the limit.*{ref.digest}"):
        store.get(ref)


def test_store_root_may_be_a_symlink(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    ref = store.put(png())
    (tmp_path / "link").symlink_to(store.root)
    for linked in (
        MediaStore(tmp_path / "link"),
        MediaStore(tmp_path / "own", fallback_roots=[tmp_path / "link"]),
    ):
        assert linked.get(ref) == png() and linked.has(ref) and linked.touch(ref.digest)


def test_putting_an_image_again_repairs_a_corrupt_file(kind: StoreKind) -> None:
    ref = kind.store.put(png())
    kind.backing.write(name_of(ref), b"\0" * ref.nbytes)
    fresh = kind.elsewhere()
    with pytest.raises(MediaCorrupt):
        fresh.get(ref)
    assert fresh.put(png()) == ref
    assert kind.elsewhere("third").get(ref) == png()


def test_verify_lists_damaged_files_and_removes_none(kind: StoreKind) -> None:
    refs = [kind.store.put(png(color)) for color in ("red", "green", "blue")]
    kind.backing.write(name_of(refs[1]), b"damage")
    if isinstance(kind.backing, FolderBacking) and isinstance(kind.store.root, Path):
        kind.backing.write(str(Path(name_of(refs[0])).with_name("notes.txt")), b"x")
    before = kind.backing.names()
    report = kind.store.verify()
    assert (report.num_files, report.corrupt) == (3, [refs[1].digest])
    assert kind.backing.names() == before


def test_fallback_root_is_read_only(store: MediaStore, tmp_path: Path) -> None:
    ref = store.put(png())
    other = MediaStore(tmp_path / "own", fallback_roots=[store])
    assert other.get(ref) == png()
    assert other.get_ref(ref.digest) == ref
    assert other.has(ref)
    assert other.touch(ref.digest)
    assert not (tmp_path / "own").exists()
    blue = other.put(png("blue"))
    assert not store.has(blue)


def test_intact_fallback_copy_replaces_a_corrupt_one(store: MediaStore, tmp_path: Path) -> None:
    other = MediaStore(tmp_path / "own", fallback_roots=[store])
    ref = other.put(png())
    store.put(png())
    other.path(ref.digest).write_bytes(b"damage")
    assert other.get(ref) == png()


def test_removed_image_is_missing_for_a_new_client(kind: StoreKind) -> None:
    ref = kind.store.put(png())
    fresh = kind.elsewhere()
    kind.backing.clear()
    assert not fresh.touch(ref.digest)
    with pytest.raises(MediaMissing):
        fresh.get_ref(ref.digest)


def test_prefetch_skips_unavailable_images(kind: StoreKind) -> None:
    refs = [kind.store.put(png((i, 0, 0))) for i in range(20)]
    fresh, absent = kind.elsewhere(), MediaRef("0" * 64, "image/png", 1, 1, 1)
    fresh.prefetch([*refs, absent])
    if not isinstance(kind.store.root, Path):
        kind.backing.clear()
    assert [fresh.get(ref) for ref in refs] == [png((i, 0, 0)) for i in range(20)]
    with pytest.raises(MediaMissing):
        fresh.get(absent)


def test_gc_removes_old_unused_images(kind: StoreKind) -> None:
    refs = [kind.store.put(png(color)) for color in ("red", "green", "blue")]
    for ref in refs[:2]:
        kind.backing.make_older(name_of(ref), 4000)
    removed = kind.store.gc({refs[0].digest}, dry_run=True)
    assert removed.removed == [refs[1].digest] and len(kind.backing.names()) == 3
    report = kind.store.gc({refs[0].digest})
    assert (report.removed, report.removed_bytes) == ([refs[1].digest], refs[1].nbytes)
    assert (report.num_in_use, report.num_young) == (1, 1)
    assert kind.backing.names() == sorted(name_of(ref) for ref in (refs[0], refs[2]))
    with pytest.raises(MediaError, match="not a media digest"):
        kind.store.gc({refs[0].url})


def test_a_put_or_a_new_reference_keeps_an_old_image(kind: StoreKind) -> None:
    refs = [kind.store.put(png(color)) for color in ("red", "green", "blue")]
    for ref in refs:
        kind.backing.make_older(name_of(ref), 4000)
    fresh = kind.elsewhere()
    fresh.put(png("red"))
    assert fresh.touch(refs[1].digest)
    assert kind.store.gc(set()).removed == [refs[2].digest]


def test_images_used_under_a_lease_are_kept(
    kind: StoreKind,
) -> None:
    before = kind.store.put(png("red"))
    kind.store.renew_lease("run-1")
    during = kind.store.put(png("blue"))
    kind.backing.make_older(name_of(before), 10_000)
    kind.backing.make_older(name_of(during), 4000)
    lease = ".leases/run-1"
    # The state after more than an hour, in which the run renewed the lease.
    kind.backing.write(lease, str(time.time() - 4000).encode())
    kind.store.renew_lease("run-1")
    assert kind.store.gc(set()).removed == [before.digest]
    kind.backing.make_older(lease, 2000)  # its processes were killed
    assert kind.store.gc(set(), dry_run=True).removed == [during.digest]
    kind.store.renew_lease("run-1")
    assert kind.store.gc(set()).removed == []
    kind.store.end_lease("run-1")
    assert kind.store.gc(set()).removed == [during.digest]
    with pytest.raises(MediaError, match="cannot name a lease"):
        kind.store.renew_lease("../run")


def test_image_lease_also_protects_blobs(kind: StoreKind) -> None:
    blobs = open_blobs(kind.store.root, TOKEN)
    part = blobs.put_bytes(b"of a file")
    kind.backing.make_older(f"blobs/{part[:2]}/{part[2:4]}/{part}", 500)
    kind.store.renew_lease("run-1")
    assert blobs.gc(set(), min_age_s=100).removed == []
    kind.store.end_lease("run-1")
    assert blobs.gc(set(), min_age_s=100).removed == [part]


@pytest.mark.parametrize("source", [None, 5, object(), "picture.png"])
def test_put_refuses_unsupported_types(store: MediaStore, source: object) -> None:
    with pytest.raises(MediaRefused, match=r"put does not accept[\s\S]*ImageIngestor"):
        store.put(source)  # type: ignore[arg-type]


def test_unreadable_path_is_a_clear_error(store: MediaStore, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"nothing\.png"):
        store.put(tmp_path / "nothing.png")
    with pytest.raises(MediaError):
        store.put(tmp_path)
