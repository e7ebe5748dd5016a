"""Remote stores with a bad connection, and their cache."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from chaos import proxy as proxy_module
from chaos.proxy import Proxy
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from store_kinds import KINDS, TOKEN, StoreKind, behind, get_endpoint, s3_server, serve

from sightline.cli.main import main
from sightline.errors import MediaCorrupt, MediaError, MediaMissing
from sightline.launch.checks.run_files import check_trace_images
from sightline.launch.media_service import MAX_WORKER_IMAGES, MAX_WORKERS, MediaGuard
from sightline.media import ImageIngestor, MediaRef, MediaStore, open_store
from sightline.media.cache import NUM_FOLDERS, DiskCache
from sightline.media.decode import encode_png
from sightline.media.http_remote import derive_worker_token
from sightline.media.remote import Unavailable, retry
from sightline.media.stored_file import open_blobs
from sightline.message import user
from sightline.run import RunDir
from sightline.trace import Trace, write_traces
from sightline.trace.node import Node, int32_array
from sightline.wire import MediaItem, Slot


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(params=["http", "s3"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreKind]:
    if request.param == "s3":
        request.getfixturevalue("s3")
    with KINDS[request.param](tmp_path) as store_kind:
        yield store_kind


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [encode_png(Image.effect_noise((20, 20), 90 + i)) for i in range(4)]


@pytest.mark.parametrize("how", ["refusals", "cut", "torn", "slow answers"])
def test_transient_errors_are_retried(
    kind: StoreKind, pictures: list[bytes], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "SLOW_S", 0.3)
    with Proxy(get_endpoint(kind), "/") as proxy, monkeypatch.context() as patch:
        store = behind(kind, proxy.url, patch)
        with proxy.disturbed(how):
            refs = [store.put(data) for data in pictures]
            num_puts = proxy.num_requests
            assert [kind.elsewhere().get(ref) for ref in refs] == pictures
            store.cache = DiskCache(kind.folder / "empty", 10**9)
            store.prefetch(refs)
            assert proxy.num_requests > num_puts
            assert [store.get(ref) for ref in refs] == pictures
        assert sorted(store.digests()) == sorted(ref.digest for ref in refs)
        if how == "refusals":
            assert proxy.num_requests >= 2 * num_puts  # each was asked for twice


def test_unavailable_store_is_named_with_the_last_cause(
    kind: StoreKind, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = kind.store.put(pictures[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    store = behind(kind, nobody, monkeypatch, deadline_s=0.3)
    for ask in (
        lambda: store.get(ref),
        lambda: store.put(pictures[1]),
        lambda: store.check_writable(),
        lambda: store.touch(ref.digest),
        lambda: store.count(),
        lambda: store.renew_lease("run"),
    ):
        with pytest.raises(MediaError, match="not available after 0.3 s of retries") as caught:
            ask()
        assert str(store.root) in caught.value.problem
        assert isinstance(caught.value.__cause__, OSError)  # by which a server says 503
    many = [MediaRef(f"{i:064x}", "image/png", 1, 1, 1) for i in range(4000)]
    store.prefetch(many)  # left to the reads; each by itself would take a minute and more


def test_waiting_for_a_store_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> str:
        if errors := capsys.readouterr().err:
            return errors
        raise Unavailable("refused")

    errors = retry(ask, "s3://waited-for", 600.0)
    assert errors.startswith("the store s3://waited-for does not answer (refused)")
    assert "Retrying for 59" in errors and errors.count("\n") == 1


def test_unresponsive_store_times_out(
    kind: StoreKind, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = behind(kind, address, monkeypatch, timeout_s=0.2, deadline_s=0.3)
        with pytest.raises(MediaError, match="not available"):
            store.put(pictures[0])


def test_connections_closed_by_the_service_cause_no_delay(
    tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "SLOW_S", 0.3)
    with KINDS["http"](tmp_path) as kind:
        endpoint, ref = get_endpoint(kind), kind.store.put(pictures[0])
        with Proxy(endpoint, "/") as proxy, proxy.disturbed("slow answers"):
            store = behind(kind, proxy.url, monkeypatch, deadline_s=0.5)
            with ThreadPoolExecutor(24) as pool:
                assert all(pool.map(store.has, [ref] * 24))
            assert len(store.remote._kept) > 8
        with Proxy(endpoint, "/", port=int(proxy.url.rpartition(":")[2])):
            assert store.get(ref) == pictures[0]


def test_worker_token_reads_only_the_images_that_the_worker_has_put(
    tmp_path: Path, pictures: list[bytes]
) -> None:
    with KINDS["http"](tmp_path) as kind:
        address, tokens = str(kind.store.root), [derive_worker_token(TOKEN, n) for n in ("a", "b")]
        mine, other = (
            open_store(address, token=token, cache_dir=tmp_path / token[0]) for token in tokens
        )
        ref = other.put(pictures[0])
        assert not mine.has(ref) and not mine.touch(ref.digest)
        with pytest.raises(MediaMissing):
            mine.get(ref)
        assert mine.put(pictures[0]) == ref and mine.touch(ref.digest)
        assert open_store(address, token=tokens[0], cache_dir=tmp_path / "new").has(ref)
        mine.check_writable()
        for ask in (
            lambda: list(mine.digests()),
            lambda: mine.renew_lease("run"),
            lambda: mine.end_lease("run"),
            lambda: mine.gc(set()),
            lambda: open_blobs(address, tokens[0]).put_bytes(b"x"),
        ):
            with pytest.raises(MediaError, match="403"):
                ask()
        part = open_blobs(address, TOKEN).put_bytes(b"a part of the model")
        assert open_blobs(address, tokens[0]).get_bytes(part) == b"a part of the model"
        forged = open_store(address, token="a" + tokens[1][1:], cache_dir=tmp_path / "forged")
        with pytest.raises(MediaError, match="401"):
            forged.has(ref)
        assert kind.store.get(ref) == pictures[0]


def test_service_remembers_a_limited_number_of_images_and_workers() -> None:
    guard = MediaGuard("127.0.0.1", TOKEN)

    def request(worker: str) -> Request:
        header = f"Bearer {derive_worker_token(TOKEN, worker)}".encode()
        return Request({"type": "http", "headers": [(b"authorization", header)]})

    first, *others = (f"{number:064x}" for number in range(MAX_WORKER_IMAGES + 1))
    mine = request("a")
    for digest in (first, *others[:-1]):
        guard.add(mine, digest)
    assert not guard.hides(mine, first)  # this use makes the second image the oldest
    guard.add(mine, others[-1])
    assert guard.hides(mine, others[0])
    assert not guard.hides(mine, first) and not guard.hides(mine, others[-1])
    for number in range(MAX_WORKERS):
        guard.add(request(f"worker-{number}"), first)
    assert guard.hides(mine, first) and not guard.hides(request("worker-0"), first)


def test_refusal_is_not_retried(pictures: list[bytes], tmp_path: Path) -> None:
    with KINDS["http"](tmp_path) as kind:
        ref = kind.store.put(pictures[0])
        stranger = open_store(kind.store.root, token="guessed", cache_dir=tmp_path / "other")
        with pytest.raises(MediaError, match="401") as caught:
            stranger.get(ref)
        assert "[media] token" in caught.value.fix
        with pytest.raises(MediaError, match="401"):
            stranger.put(pictures[1])
        assert kind.store.count() == 1


def test_service_accepts_only_bytes_matching_their_digest(
    tmp_path: Path, pictures: list[bytes]
) -> None:
    with KINDS["http"](tmp_path) as kind:
        remote = kind.store.remote
        with pytest.raises(MediaError, match="the bytes hash to"):
            remote.write("0" * 64, pictures[0])
        with pytest.raises(MediaError, match="are not a PNG"):
            remote.write(sha256(b"no image").hexdigest(), b"no image")
        with pytest.raises(MediaError, match="not a media digest"):
            remote.read("A" * 64)
        assert remote.read("..%2F..%2Fserved%2F.lock") is None
        assert kind.backing.names() == []


def test_address_with_a_password_or_unknown_scheme_is_refused() -> None:
    with pytest.raises(MediaError, match="not the address"):
        open_store("http://me:secret@127.0.0.1:8100")
    with pytest.raises(MediaError, match="ftp:// is unknown"):
        open_store("ftp://host/images")


def test_missing_obstore_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MediaError, match="requires obstore") as caught:
        open_store("s3://bucket/images")
    assert "sightline-rl[object-store]" in caught.value.fix


def test_image_left_only_in_the_local_cache_is_missing(
    kind: StoreKind, pictures: list[bytes]
) -> None:
    ref = kind.store.put(pictures[0])
    other = kind.elsewhere()
    assert other.get(ref) == pictures[0]
    kind.backing.clear()
    with pytest.raises(MediaMissing, match="no longer in the store"):
        ImageIngestor(other).resolve(ref.url, "url")


# --- the cache


def test_a_link_at_a_guessable_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    victim, folder, is_over = tmp_path / "victim", tmp_path / "cache" / "00", threading.Event()
    victim.write_bytes(b"kept")
    folder.mkdir(parents=True)

    def place_links() -> None:
        while not is_over.is_set():
            with suppress(FileExistsError):
                (folder / f".tmp-{os.getpid()}").symlink_to(victim)

    cache = DiskCache(tmp_path / "cache", 1 << 20, num_folders=1)
    thread = threading.Thread(target=place_links)
    thread.start()
    for number in range(300):
        data = number.to_bytes(4, "big")
        cache.add(sha256(data).hexdigest(), data)
    is_over.set()
    thread.join()
    assert victim.read_bytes() == b"kept"


def test_cache_stays_within_its_limit_and_evicts_least_recently_used(
    tmp_path: Path,
) -> None:
    cache = DiskCache(tmp_path, 1000 * NUM_FOLDERS)
    chunks: list[bytes] = []
    for i in range(10_000):  # four that fall into one folder
        data = i.to_bytes(4, "big") * 100
        if sha256(data).hexdigest().startswith("ab"):
            chunks.append(data)
    a, b, c, d = chunks[:4]
    digest = {data: sha256(data).hexdigest() for data in chunks}
    for data, used_s_ago in ((a, 300), (b, 200)):
        cache.add(digest[data], data)
        path = tmp_path / "ab" / digest[data]
        os.utime(path, (time.time() - used_s_ago,) * 2)
    assert cache.find(digest[a]) == a  # used now
    left = tmp_path / "ab" / ".tmp-1"
    left.write_bytes(b"of a writer that was killed")
    cache.add(digest[c], c)
    assert [cache.has(digest[data]) for data in (a, b, c)] == [True, False, True]
    assert not left.exists()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: cache.add(digest[data], data), chunks))
    paths = list((tmp_path / "ab").glob("ab*"))
    assert sum(path.stat().st_size for path in paths) <= 1000
    assert len(paths) == 2
    cache.add(digest[d], d * 3)  # more than the share of its folder
    assert set(paths) == set((tmp_path / "ab").glob("ab*"))


def test_damaged_cache_file_counts_as_absent(kind: StoreKind, pictures: list[bytes]) -> None:
    ref = kind.store.put(pictures[0])
    cache = kind.store.cache
    path = cache.root / ref.digest[:2] / ref.digest
    path.write_bytes(b"damage")
    assert kind.store.get(ref) == pictures[0]
    assert path.read_bytes() == pictures[0]


# --- an object store, which sets no time of use and has no lock


def test_stale_list_never_decides_whether_an_image_exists(
    s3: None,
    tmp_path: Path,
    pictures: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        gone = kind.store.put(pictures[0])
        store = behind(kind, proxy.url, monkeypatch)
        assert list(store.digests()) == [gone.digest]
        kind.store.remove(gone.digest)
        new = kind.store.put(pictures[1])
        run_dir = RunDir(tmp_path / "run")
        run_dir.make()
        for name, ref in (("gone", gone), ("new", new)):
            slot = Slot(0, 1, MediaItem(ref=ref, family="f", grid=(1, 2, 2), fingerprint="f"))
            node = Node(0, -1, user("q"), int32_array([1]), sampled_start=1, slots=(slot,))
            write_traces(run_dir.traces / f"{name}.msgpack", [Trace(id="t", nodes=[node])])
        with proxy.disturbed("stale lists"):
            assert list(store.digests()) == [gone.digest]
            assert store.has(new) and store.get(new) == pictures[1] and not store.has(gone)
            with pytest.raises(MediaMissing):
                store.get(gone)
            [finding] = check_trace_images(run_dir, store)
            assert finding.text.startswith("1 of 2 images of traces are missing")
            report = store.verify()
            assert report.num_files == 0 and not report.corrupt
            assert store.gc(set(), min_age_s=0).removed == []
            assert main(["media", "ls", "--store", str(store.root)]) == 0
            assert "0 images" in capsys.readouterr().out
        assert list(kind.store.digests()) == [new.digest]


def test_gc_keeps_an_image_that_was_used_after_the_list(
    s3: None, tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        ref = kind.store.put(pictures[0])
        kind.backing.make_older(kind.backing.names()[0], 4000)
        store = behind(kind, proxy.url, monkeypatch)
        assert list(store.digests()) == [ref.digest]
        assert kind.elsewhere().put(pictures[0]) == ref
        with proxy.disturbed("stale lists"):
            report = store.gc(set())
        assert (report.removed, report.num_young) == ([], 1)
        kind.backing.make_older(kind.backing.names()[0], 4000)
        # A removal that could end after its announcement has expired does not begin.
        slow = behind(kind, proxy.url, monkeypatch, timeout_s=60.0)
        assert slow.gc(set()).removed == [] and slow.gc(set(), dry_run=True).removed
        assert kind.elsewhere("third").get(ref) == pictures[0]


@pytest.mark.parametrize("deadline_s", [0.3, 60.0])
def test_store_that_is_down_recovers_within_the_deadline_or_names_its_endpoint(
    s3: None,
    tmp_path: Path,
    pictures: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    deadline_s: float,
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        store = behind(kind, proxy.url, monkeypatch, deadline_s=deadline_s)
        with ThreadPoolExecutor(1) as pool:
            with proxy.disturbed("down"):
                putting = pool.submit(store.put, pictures[0])
                while proxy.num_requests < 3 and not putting.done():
                    time.sleep(0.01)
                if deadline_s < 60.0:
                    with pytest.raises(MediaError, match="after 0.3 s of retries") as caught:
                        putting.result(30)
                    assert proxy.url in caught.value.problem
                    return
            assert kind.elsewhere().get(putting.result(30)) == pictures[0]


def test_damaged_read_does_not_replace_an_intact_image(
    s3: None, tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        ref = kind.store.put(pictures[0])
        kind.backing.make_older(kind.backing.names()[0], 4000)
        store = behind(kind, proxy.url, monkeypatch)
        with proxy.disturbed("garbage"), pytest.raises(MediaCorrupt, match=ref.digest[:12]):
            store.touch(ref.digest)
        assert kind.store.remote.read(ref.digest) == pictures[0]
        assert store.touch(ref.digest)
        assert kind.store.gc(set()).removed == []


def test_recently_used_image_is_not_rewritten(
    s3: None, tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        refs = [kind.store.put(data) for data in pictures]
        store = behind(kind, proxy.url, monkeypatch)
        assert store.touch(refs[0].digest)  # which also looks at the store's clock
        num_before = proxy.num_requests
        assert all(store.touch(ref.digest) for ref in refs[1:])
        assert proxy.num_requests == num_before + len(refs[1:])


def test_put_waits_for_a_running_removal(s3: None, tmp_path: Path, pictures: list[bytes]) -> None:
    with KINDS["s3"](tmp_path) as kind:
        ref = kind.store.put(pictures[0])
        remote, [name] = kind.store.remote, kind.backing.names()
        kind.backing.make_older(name, 4000)
        old = remote._get_time(name)
        with ThreadPoolExecutor(1) as pool:
            with remote._announced_gc():
                putting = pool.submit(lambda: kind.elsewhere().put(pictures[0]))
                while remote._get_time(name) == old:  # until the put has written the image again
                    time.sleep(0.01)
                assert not wait([putting], timeout=1).done
                kind.backing.clear()  # what gc looked at before the put, it removes after it
            assert putting.result(30) == ref
        assert kind.elsewhere("third").get(ref) == pictures[0]


def test_put_does_not_wait_for_a_killed_gc(
    s3: None, tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        ref = kind.store.put(pictures[0])
        kind.store.remote._put(".gc", b"left")
        kind.backing.make_older(".gc", 300)
        assert behind(kind, proxy.url, monkeypatch).put(pictures[0]) == ref
        assert proxy.num_requests < 10


def test_only_one_gc_takes_over_from_a_killed_gc(
    s3: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "SLOW_S", 0.3)
    with KINDS["s3"](tmp_path) as kind, Proxy(get_endpoint(kind), "/") as proxy:
        kind.store.remote._put(".gc", b"left")
        kind.backing.make_older(".gc", 300)
        have_tried = threading.Barrier(2, timeout=60)

        def collect(store: MediaStore) -> bool:
            try:
                with store.remote._announced_gc():
                    have_tried.wait()
            except MediaError as error:
                assert "another gc" in error.problem
                have_tried.wait()
                return False
            return True

        stores = [behind(kind, proxy.url, monkeypatch) for _ in range(2)]
        with proxy.disturbed("slow answers"), ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(collect, stores)) == [False, True]
        assert kind.backing.names() == []


def test_late_gc_keeps_the_next_gcs_announcement(s3: None, tmp_path: Path) -> None:
    with KINDS["s3"](tmp_path) as kind:
        remote, late = kind.store.remote, ExitStack()
        late.enter_context(remote._announced_gc())
        with pytest.raises(MediaError, match="another gc"), remote._announced_gc():
            pass
        kind.backing.make_older(".gc", 300)
        with remote._announced_gc():
            late.close()
            assert kind.backing.names() == [".gc"]
        assert kind.backing.names() == []


def test_missing_bucket_is_named(s3: None, tmp_path: Path, pictures: list[bytes]) -> None:
    store = open_store("s3://mistyped/images", cache_dir=tmp_path)
    ref = MediaRef("0" * 64, "image/png", 1, 1, 1)
    for ask in (
        store.check_writable,
        lambda: store.put(pictures[0]),
        lambda: store.get(ref),
        store.count,
        lambda: store.gc(set()),
    ):
        with pytest.raises(MediaError, match="no such bucket: s3://mistyped/images") as caught:
            ask()
        assert "check the name" in caught.value.fix


def test_url_that_is_no_media_service_is_reported(tmp_path: Path) -> None:
    async def answer(http: Request) -> PlainTextResponse:
        return PlainTextResponse("<html>")

    app = Starlette(routes=[Route("/page/media", answer)])
    with serve(app) as address:
        for root in (address, f"{address}/page"):
            store = open_store(root, cache_dir=tmp_path / "cache")
            with pytest.raises(MediaError, match=f"{root} is not a media service"):
                store.count()
            with pytest.raises(MediaError, match="it answered 404 to POST /check"):
                store.check_writable()
