"""Permission to change a server's weights: the lease, the root folder, and the manifest's files."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from serving import Client, embedded, live

from sightline.compute.shared_weights import HOST_MEMORY, SharedWeights
from sightline.compute.weights import StorePublisher, write_weights
from sightline.errors import EngineError
from sightline.inference.server_spec import ServerSpec
from sightline.orchestrator.server_pool import ServerPool, give_back_leases
from sightline.rollout.client import GenerateClient, ProbeTimes
from sightline.run import EventLog
from sightline.wire.generate import AdoptRequest, ErrorBody
from sightline.wire.weights import MANIFEST, Manifest
from tests.read_back import read_weights

RUN, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
ADOPT = "/sightline/v1/adopt"


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of version 3 of a run, in the only folder with weights for the server."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)
    tensors = dict(model.named_parameters())
    root = tmp_path_factory.mktemp("runs") / "weights"
    return write_weights(root, tensors, 3, 0, run=RUN)[0]


@pytest.fixture(scope="module")
def server(settings: ServerSpec, published: Path) -> Iterator[Client]:
    with live(settings.replace(weights_root=published.parents[1])) as client:
        yield client


@pytest.fixture
def client(server: Client) -> Iterator[Client]:
    yield server
    for run in (RUN, OTHER):
        server.call("POST", "/sightline/v1/lease", lease_body(run, 0))


def lease_body(run: str, seconds: float) -> bytes:
    return json.dumps({"run": run, "seconds": seconds}).encode()


def lease(client: Client, run: str, seconds: float = 60) -> None:
    status, answer, _ = client.call("POST", "/sightline/v1/lease", lease_body(run, seconds))
    assert status == 200, answer


def refused(client: Client, manifest: Path | str) -> ErrorBody:
    return client.refused(json.dumps({"manifest": str(manifest)}).encode(), ADOPT)


def change(published: Path, name: str, **changes: object) -> Path:
    """Copy the version to a sibling folder and change the copy's manifest."""
    folder = published.parents[1] / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(published.parent, folder)
    manifest = msgspec.json.decode(published.read_bytes(), type=Manifest)
    changed = msgspec.structs.replace(manifest, **changes)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(changed))
    return folder / MANIFEST


def test_server_is_leased_to_one_run_and_refuses_another(client: Client, published: Path) -> None:
    error = refused(client, published)
    assert error.code == 409 and f"run {RUN} has no lease" in error.message
    lease(client, RUN)
    label = msgspec.json.decode(published.read_bytes(), type=Manifest).label
    assert client.adopt(published)["version"] == label and label.startswith(f"3-{RUN}-")
    assert client.get("/health")["version"] == label
    assert client.get("/health")["leased_to"] == RUN
    answer = client.generate([1, 2, 3]).choices[0].weight_versions
    assert answer is not None and [span.version for span in answer] == [label]
    error = client.refused(lease_body(OTHER, 60), "/sightline/v1/lease")
    assert (error.code, error.type) == (409, "leased")
    assert f"leased to run {RUN}" in error.message and "expires in " in error.message
    foreign = change(published, "v000004", version=4, run=OTHER)
    assert f"leased to run {RUN}" in refused(client, foreign).message
    nobody = change(published, "v000005", version=5, run="")
    assert f"leased to run {RUN}" in refused(client, nobody).message
    assert client.get("/health")["version"] == label, "the weights stay"


def test_lease_can_be_released_and_lasts_until_another_run_takes_it(
    client: Client, published: Path
) -> None:
    lease(client, RUN)
    lease(client, RUN, 0)
    lease(client, OTHER, 0.001)
    client.wait_for("now", "running", 0)
    lease(client, RUN, 0.001)  # that of the other run has expired
    client.adopt(published)  # this one too, and nobody has taken it since
    lease(client, OTHER)
    assert f"leased to run {OTHER}" in refused(client, published).message


async def wait_for_holder(client: Client, run: str) -> None:
    while True:
        if client.get("/health")["leased_to"] == run:
            return
        await asyncio.sleep(0.01)


def test_run_renews_its_leases_until_it_releases_them(client: Client, tmp_path: Path) -> None:
    address = f"http://{client.host}:{client.port}"

    async def main() -> None:
        rarely = ProbeTimes(ask_every_s=600.0)
        events = EventLog(tmp_path / "metrics.jsonl", "orchestrator")
        mine, others = (
            ServerPool(run, events, [GenerateClient(address)], times=rarely, renew_every_s=0.01)
            for run in (RUN, OTHER)
        )
        keeping = asyncio.ensure_future(mine.keep_serving())
        async with asyncio.timeout(30):
            await wait_for_holder(client, RUN)
            lease(client, RUN, 0)  # as one that has expired
            await wait_for_holder(client, RUN)
            with pytest.raises(EngineError, match=f"leased to run {RUN}"):
                await others.keep_serving()
        keeping.cancel()
        await asyncio.wait([keeping])
        await give_back_leases([address], "", RUN)
        assert client.get("/health")["leased_to"] == ""
        for pool in (mine, others):
            await pool.close()

    asyncio.run(main())


def test_weights_published_before_the_lease_are_adopted_after_it(
    client: Client, published: Path, tmp_path: Path
) -> None:
    asks = GenerateClient(f"http://{client.host}:{client.port}")
    pool = ServerPool(RUN, EventLog(tmp_path / "metrics.jsonl", "orchestrator"), [asks])

    async def main() -> None:
        lease(client, RUN, 0)
        adopting = asyncio.ensure_future(pool.adopt(str(published)))
        done, _ = await asyncio.wait([adopting], timeout=0.2)
        assert not done, "it waits for the lease"
        keeping = asyncio.ensure_future(pool.keep_serving())
        await asyncio.wait_for(adopting, 30)
        keeping.cancel()
        await asyncio.wait([keeping])
        await pool.close()

    asyncio.run(main())


def test_paths_outside_the_root_are_neither_read_nor_revealed(
    client: Client, published: Path, tmp_path: Path
) -> None:
    lease(client, RUN)
    outside = Path(shutil.copytree(published.parent, tmp_path / "v000003")) / MANIFEST
    linked = published.parents[1] / "linked"
    linked.unlink(missing_ok=True)
    linked.symlink_to(outside.parent)
    around = published.parents[1] / ".." / ".." / tmp_path.name / "v000003" / MANIFEST
    paths = [
        outside,
        tmp_path / "none",
        linked / MANIFEST,
        around,
        "/etc/passwd",
        "/dev/zero",
        "\0",
    ]
    errors = [refused(client, path) for path in paths]
    assert {(error.type, error.code) for error in errors} == {("weights", 422)}
    assert len({error.message for error in errors}) == 1, "what exists there is not told"
    assert "not in the folder that this server reads weights from" in errors[0].message


@pytest.mark.timeout(60)
def test_fifo_or_oversized_file_does_not_block_the_server(client: Client, published: Path) -> None:
    lease(client, RUN)
    root = published.parents[1]
    fifo, huge = root / "fifo", root / "huge"
    for path in (fifo, huge):
        path.unlink(missing_ok=True)
    os.mkfifo(fifo)
    with open(huge, "wb") as file:
        file.truncate(1 << 40)
    assert "not a regular file" in refused(client, fifo).message
    assert "but the limit is" in refused(client, huge).message
    assert refused(client, root).type == "weights"
    file = msgspec.json.decode(published.read_bytes(), type=Manifest).files[0]
    for name, make, problem in (
        ("v000006", os.mkfifo, "not a regular file"),
        (
            "v000007",
            lambda path: os.symlink(published.parent / file.name, path),
            "not a regular file",
        ),
        ("v000008", lambda path: path.write_bytes(b"x" * (file.nbytes + 1)), "but the limit is"),
    ):
        manifest = change(published, name, version=int(name[1:]))
        (manifest.parent / file.name).unlink()
        make(manifest.parent / file.name)
        assert problem in refused(client, manifest).message
    assert client.get("/health")["status"] == "ok"


@pytest.mark.parametrize("name", ["/etc/passwd", "../v000003/model.safetensors", "..", "", "a\0b"])
def test_manifest_may_name_only_files_in_its_own_folder(
    client: Client, published: Path, name: str
) -> None:
    lease(client, RUN)
    manifest = change(published, "v000009", version=9)
    values = json.loads(manifest.read_bytes())
    values["files"][0]["name"] = name
    manifest.write_text(json.dumps(values))
    assert "which is not in its folder" in refused(client, manifest).message


def test_weights_in_the_store_are_fetched_checked_and_adopted(
    client: Client, published: Path, settings: ServerSpec, tmp_path: Path
) -> None:
    """Adopt weights like a server that does not see the run's disk."""
    folder = tmp_path / "v000003"
    shutil.copytree(published.parent, folder)
    before = msgspec.json.decode(published.read_bytes(), type=Manifest)
    moved = StorePublisher(tmp_path, settings.open_blobs()).put(folder / MANIFEST, before)
    assert [path.name for path in folder.iterdir()] == [MANIFEST]
    lease(client, RUN)
    seven = structs.replace(moved, version=7)
    status, answer, _ = client.call("POST", ADOPT, adopt_body(seven))
    assert status == 200 and json.loads(answer)["version"] == seven.label, answer
    assert before.digest == moved.digest
    assert f"leased to run {RUN}" in refused_content(client, structs.replace(moved, run=OTHER))
    file = moved.files[0]
    outside = adopt_body(seven).replace(b'"model.safetensors"', b'"../model.safetensors"')
    assert "is not in its folder" in client.refused(outside, ADOPT).message
    # The server compares each value in the manifest with the file.
    other = structs.replace(file, sha256="0" * 64)
    eight = structs.replace(seven, version=8)
    assert "the checksum differs" in refused_content(client, structs.replace(eight, files=[other]))
    absent = structs.replace(file, parts=("0" * 64,), nbytes=1000)
    assert "is not in the store" in refused_content(client, structs.replace(eight, files=[absent]))
    assert client.get("/health")["version"] == seven.label, "the weights stay"


def adopt_body(manifest: Manifest) -> bytes:
    return msgspec.json.encode(AdoptRequest("", manifest))


def refused_content(client: Client, manifest: Manifest) -> str:
    return client.refused(adopt_body(manifest), ADOPT).message


def test_shared_weights_equal_weights_from_files(
    settings: ServerSpec, published: Path, tmp_path: Path
) -> None:
    """Use a mapped file on the CPU. On a GPU, the same code maps the device's memory."""
    tensors = {name: 1.25 * tensor for name, tensor in read_weights(published)[1].items()}
    shared, root = SharedWeights(tmp_path / "shared"), tmp_path / "shared"

    def share(version: int) -> Path:
        shared.take(tensors)
        return shared.write(Manifest(version, version, [], transport="ipc", run=RUN))[0]

    with embedded(settings.replace(weights_root=tmp_path)) as server:
        lease(server, RUN)
        before = server.generate([1, 2, 3]).choices[0]
        label = server.adopt(share(4))["version"]
        choice = server.generate([1, 2, 3]).choices[0]
        written, manifest = write_weights(tmp_path / "files", tensors, 5, 5, run=RUN)
        assert manifest.label.partition("-")[2] == label.partition("-")[2], "one digest"
        server.adopt(written)
        same = server.generate([1, 2, 3]).choices[0]
        assert choice.token_ids == same.token_ids and choice.logprobs == same.logprobs
        assert choice.logprobs != before.logprobs
        # The buffer is damaged, and then overwritten by a version that is not yet announced.
        late = share(6)
        with open(root / HOST_MEMORY, "r+b") as memory:
            memory.write(b"\1")
        error = refused(server, late)
        assert (error.type, error.code) == ("weights", 422)
        assert "its bits differ from the announced ones" in error.message
        share(7)
        error = refused(server, late)
        assert (error.type, error.code) == ("weights_unavailable", 503)
        assert server.get("/health")["version"] == manifest.label, "the weights stay"


def test_server_without_a_root_adopts_nothing(settings: ServerSpec, published: Path) -> None:
    with live(settings.replace(weights_root=None)) as bare:
        lease(bare, RUN)
        error = refused(bare, published)
    assert "not in the folder" in error.message and "--weights-root" in error.fix
