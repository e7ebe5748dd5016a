"""The dashboard's access control and routes."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient
from synthetic_run import SyntheticSize, write_synthetic_run
from videos import encode_video, noise_frames

from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app

SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path = tmp_path_factory.mktemp("served") / "synthetic"
    size = SyntheticSize(steps=2, rollouts_per_step=10, images=8, conversations=10, group_size=5)
    new_run_dir = write_synthetic_run(path, size)
    (new_run_dir.logs / "trainer.log").write_text("first\n" * 20_000 + "last line\n")
    (path.parent / "secret.log").write_text("not yours")
    return new_run_dir


@pytest.fixture(scope="module")
def client(run_dir: RunDir) -> Iterator[TestClient]:
    runs = RunCollection([run_dir.path])
    for view in runs.all():
        view.refresh_all()
    yield TestClient(build_app(runs), base_url="http://127.0.0.1")
    runs.close()


RUN = {"run": "synthetic"}


def test_a_rollout_has_its_messages_tokens_and_scores(client: TestClient, run_dir: RunDir) -> None:
    where = RUN | {"file": "step_000002.msgpack", "number": 1}
    trace = list(read_traces(run_dir.traces_of(2)))[1]
    body = client.get("/api/rollout", params=where).json()
    assert body["id"] == trace.id and body["branches"] == trace.branches()
    assert [node["parent"] for node in body["nodes"]] == [node.parent for node in trace.nodes]
    for node in trace.nodes:
        tokens = client.get("/api/tokens", params=where | {"node": node.id}).json()
        assert tokens["ids"] == node.token_ids.numpy().tolist()
        assert tokens["logprobs"] == pytest.approx(node.logprobs.numpy().tolist())
        assert tokens["slots"] == [[s.offset, s.length, s.item.ref.digest] for s in node.slots]
        if body["verdict"] == "train" and node.is_turn:
            assert len(tokens["trainer"]) == len(tokens["advantages"]) == node.num_sampled
    assert client.get("/api/tokens", params=where | {"node": 99}).status_code == 404
    assert client.get("/api/rollout", params=where | {"number": 99}).status_code == 404


def test_image_content_type_comes_from_its_bytes(client: TestClient, run_dir: RunDir) -> None:
    ref = next(read_traces(run_dir.traces_of(1))).nodes[0].slots[0].item.ref
    whole = client.get(f"/media/synthetic/{ref.digest}")
    assert whole.content == MediaStore(run_dir.media).get(ref)
    assert whole.headers["content-type"] == "image/png"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in whole.headers["content-security-policy"]
    small = client.get(f"/thumb/synthetic/{ref.digest}", params={"side": 32})
    assert small.headers["content-type"] == "image/webp" and len(small.content) < 4000


def test_video_is_served_whole_in_ranges_and_as_a_first_frame(
    client: TestClient, run_dir: RunDir
) -> None:
    frames = noise_frames(4, 32, 32)
    data = encode_video(frames)
    address = f"/media/synthetic/{MediaStore(run_dir.media).put(data).digest}"
    whole = client.get(address)
    assert whole.status_code == 200 and whole.content == data
    assert whole.headers["content-type"] == "video/mp4"
    for asked, start, stop in (("5-", 5, len(data)), ("0-9", 0, 10), ("7-99999999", 7, len(data))):
        piece = client.get(address, headers={"range": f"bytes={asked}"})
        assert piece.status_code == 206 and piece.content == data[start:stop]
        assert piece.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(data)}"
    for asked in ("bytes=99999999-", "bytes=x", "bytes=1-2,4-5"):
        assert client.get(address, headers={"range": asked}).content == data
    small = client.get(address.replace("media", "thumb"), params={"side": 32})
    assert small.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(small.content)).size == (32, 32)


def test_svg_disguised_as_an_image_is_not_served(client: TestClient, run_dir: RunDir) -> None:
    digest = hashlib.sha256(SVG).hexdigest()
    path = MediaStore(run_dir.media).path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SVG)
    for place in ("media", "thumb"):
        answer = client.get(f"/{place}/synthetic/{digest}")
        assert answer.status_code == 415
        assert answer.headers["content-type"] == "application/json"
        assert b"<script" not in answer.content


@pytest.mark.parametrize(
    "path",
    [
        "/media/synthetic/..%2f..%2fconfig.toml",
        "/media/synthetic/" + "0" * 64,
        "/media/..%2fsynthetic/" + "0" * 64,
        "/thumb/other/" + "0" * 64,
        "/static/..%2fserver.py",
        "/static/server.py",
        "/static/%2e%2e/server.py",
        "/api/log?run=synthetic&name=../secret",
        "/api/log?run=synthetic&name=../../secret",
        "/api/log?run=synthetic&name=%2fetc%2fpasswd",
        "/api/rollout?run=synthetic&file=../../secret.log&number=0",
        "/api/tokens?run=synthetic&file=/etc/passwd&number=0&node=0",
        "/api/settings?run=..",
        "/api/rollouts?run=/etc",
    ],
)
def test_files_outside_the_runs_are_not_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert b"not yours" not in answer.content and b"root:" not in answer.content


def test_a_log_is_read_from_its_end(client: TestClient) -> None:
    tail = client.get("/api/log", params=RUN | {"name": "trainer"}).json()
    assert tail["text"].endswith("last line\n") and len(tail["text"]) <= 65_536
    before = client.get(
        "/api/log", params=RUN | {"name": "trainer", "before": tail["start"]}
    ).json()
    assert before["end"] == tail["start"] and before["text"].startswith("first\n")


def test_prometheus_endpoint_returns_the_latest_metrics(client: TestClient) -> None:
    text = client.get("/metrics").text
    assert 'sightline_run_step{run="synthetic"} 2\n' in text
    assert "# TYPE sightline_run_reward gauge\n" in text
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert sorted(set(names)) == sorted(types)


def test_every_response_has_strict_security_headers(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/api/rollout", "/nowhere", "/static/main.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_removed_run_does_not_affect_the_others(run_dir: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run_dir.path, tmp_path / "gone")
    runs = RunCollection([run_dir.path, tmp_path])
    client = TestClient(build_app(runs), base_url="http://127.0.0.1")
    shutil.rmtree(tmp_path / "gone")
    runs.discover()
    assert [run["key"] for run in client.get("/api/runs").json()] == ["synthetic"]
    runs.close()
