"""Who may change a server's weights, and from where: the lease, the root, what a manifest names."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from serving import Client, live

from sightline.compute.weights import write_weights
from sightline.errors import EngineError
from sightline.inference.server_spec import ServerSpec
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.server_leases import ServerLeases, give_back_leases
from sightline.rollout.client import GenerateClient
from sightline.wire.control import PublishedWeights
from sightline.wire.generate import ErrorBody
from sightline.wire.weights import MANIFEST, Manifest

RUN, OTHER = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
ADOPT = "/sightline/v1/adopt"


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest of version 3 of a run, in the one folder that the server takes weights from."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)
    tensors = dict(model.named_parameters())
    root = tmp_path_factory.mktemp("runs") / "weights"
    return write_weights(root, tensors, 3, 0, run=RUN)[0]


@pytest.fixture(scope="module")
def server(settings: ServerSpec, published: Path) -> Iterator[Client]:
    with live(settings.replace(weights_root=published.parents[1])) as made:
        yield made


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
    """A copy of the version beside it, whose manifest differs."""
    folder = published.parents[1] / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(published.parent, folder)
    manifest = msgspec.json.decode(published.read_bytes(), type=Manifest)
    changed = msgspec.structs.replace(manifest, **changes)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(changed))
    return folder / MANIFEST


def test_a_server_is_leased_to_one_run_and_says_so_to_another(
    client: Client, published: Path
) -> None:
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


def test_a_lease_can_be_given_back_or_expires_and_stays_until_another_takes_it(
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


def test_a_run_renews_its_leases_until_it_gives_them_back(client: Client) -> None:
    address = f"http://{client.host}:{client.port}"

    async def wait_for_lease() -> None:
        while True:
            if client.get("/health")["leased_to"] == RUN:
                return
            await asyncio.sleep(0.01)

    async def main() -> None:
        mine, others = (
            ServerLeases([GenerateClient(address)], run, renew_every_s=0.01) for run in (RUN, OTHER)
        )
        renewing = asyncio.ensure_future(mine.keep_renewing())
        await asyncio.wait_for(wait_for_lease(), 30)
        with pytest.raises(EngineError, match=f"leased to run {RUN}"):
            await asyncio.wait_for(others.keep_renewing(), 30)
        renewing.cancel()
        await asyncio.wait([renewing])
        await give_back_leases([address], "", RUN)
        assert client.get("/health")["leased_to"] == ""
        for leases in (mine, others):
            await leases.clients[0].close()

    asyncio.run(main())


def test_what_is_published_before_the_lease_is_adopted_after_it(
    client: Client, published: Path
) -> None:
    asks = GenerateClient(f"http://{client.host}:{client.port}")
    policy = PolicyUpdater([asks.adopt], published.parents[1])
    leases = ServerLeases([asks], RUN)

    async def main() -> None:
        policy.publish(PublishedWeights(3, 0, str(published), {}, 0))
        adopting = asyncio.ensure_future(leases.run_when_taken(policy.keep_adopting))
        done, _ = await asyncio.wait([adopting], timeout=0.2)
        assert not done and policy.version == 0, "it waits for the lease"
        await leases.take()
        await asyncio.wait_for(policy.wait_for_version(3), 30)
        adopting.cancel()
        await asyncio.wait([adopting])
        await asks.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [b"{}", lease_body("", 1), lease_body("A!", 1), lease_body(RUN, -1), lease_body(RUN, 1e9)],
)
def test_a_lease_that_makes_no_sense_is_refused(client: Client, body: bytes) -> None:
    assert client.refused(body, "/sightline/v1/lease").type == "schema"


def test_nothing_outside_of_the_root_is_read_or_told(
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
    assert "not in the folder that this server takes weights from" in errors[0].message


def test_without_a_root_nothing_is_adopted(settings: ServerSpec, published: Path) -> None:
    with live(settings.replace(weights_root=None)) as bare:
        lease(bare, RUN)
        error = refused(bare, published)
    assert "not in the folder" in error.message and "--weights-root" in error.fix


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_of_its_size_does_not_hold_the_server_up(
    client: Client, published: Path
) -> None:
    lease(client, RUN)
    root = published.parents[1]
    fifo, huge = root / "fifo", root / "huge"
    for path in (fifo, huge):
        path.unlink(missing_ok=True)
    os.mkfifo(fifo)
    with open(huge, "wb") as file:
        file.truncate(1 << 40)
    assert "not a regular file" in refused(client, fifo).message
    assert "at most are read" in refused(client, huge).message
    assert refused(client, root).type == "weights"
    file = msgspec.json.decode(published.read_bytes(), type=Manifest).files[0]
    for name, make, said in (
        ("v000006", os.mkfifo, "not a regular file"),
        ("v000007", lambda path: os.symlink(published.parent / file.name, path), "symbolic"),
        ("v000008", lambda path: path.write_bytes(b"x" * (file.nbytes + 1)), "at most are read"),
    ):
        manifest = change(published, name, version=int(name[1:]))
        (manifest.parent / file.name).unlink()
        make(manifest.parent / file.name)
        assert said in refused(client, manifest).message
    assert client.get("/health")["status"] == "ok"


@pytest.mark.parametrize("name", ["/etc/passwd", "../v000003/model.safetensors", "..", "", "a\0b"])
def test_a_manifest_names_files_of_its_own_folder_alone(
    client: Client, published: Path, name: str
) -> None:
    lease(client, RUN)
    files = msgspec.json.decode(published.read_bytes(), type=Manifest).files
    first = msgspec.structs.replace(files[0], name=name)
    manifest = change(published, "v000009", version=9, files=[first, *files[1:]])
    assert "which is not in its folder" in refused(client, manifest).message
