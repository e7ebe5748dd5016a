"""Spans of a rollout, as a collector gets them; and that none is needed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agents import Worker, picture
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serving import embedded

from sightline.config import RunFile, load_config
from sightline.envs import Chat
from sightline.errors import ConfigError
from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore
from sightline.message import ImagePart, Message, text
from sightline.run.otel import DEFAULT_LIMITS, ExportLimits, open_stages
from sightline.trace import Trace

BUSY = 503


class Collector:
    """An OTLP/HTTP collector: it accepts POST /v1/traces."""

    def __init__(self, status: int = 200, hangs: bool = False) -> None:
        self.spans: list[tuple[str, Span]] = []
        """With the name of the service."""
        self.free = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                if hangs:
                    collector.free.wait()
                if status == 200:
                    collector.take(body)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]

    def close(self) -> None:
        self.free.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Span) -> dict[str, Any]:
    return {
        pair.key.removeprefix("sightline."): getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in span.attributes
    }


def tree(spans: list[tuple[str, Span]]) -> list[tuple[str, str, str]]:
    """Path of names, service and kind of every span, in the order in which they began."""
    by_id = {span.span_id: span for _, span in spans}

    def path(span: Span) -> str:
        above = path(by_id[span.parent_span_id]) + "/" if span.parent_span_id else ""
        return above + span.name

    ordered = sorted(spans, key=lambda found: found[1].start_time_unix_nano)
    kinds = {Span.SPAN_KIND_CLIENT: "client", Span.SPAN_KIND_SERVER: "server"}
    return [(path(span), service, kinds.get(span.kind, "")) for service, span in ordered]


async def look_twice(chat: Chat) -> float:
    for number in (1, 2):
        ref = chat.put(picture(number))
        await chat.send([Message(role="user", content=(*text("Look."), ImagePart(ref)))])
    return 0.5


@contextmanager
def playing(
    settings: ServerSpec,
    media: MediaStore,
    target: str,
    server_target: str | None = None,
    limits: ExportLimits = DEFAULT_LIMITS,
) -> Iterator[Worker]:
    served = settings.replace(otel=target if server_target is None else server_target)
    with embedded(served) as client:
        stages = open_stages(target, "worker-0", "run-001", limits)
        try:
            address = f"http://{client.host}:{client.port}"
            yield Worker(Path(served.model.path), media, address, max_tokens=6, stages=stages)
        finally:
            stages.close()


def test_a_rollout_is_one_tree_through_both_processes(
    settings: ServerSpec, media: MediaStore, collector: Collector
) -> None:
    with playing(settings, media, collector.address) as worker:
        trace = asyncio.run(worker.play(look_twice))
    assert trace.error == ""
    engine = ["queue", "materialize", "prefill", "decode"]
    turn = [
        ("rollout/turn", "sightline-worker", ""),
        ("rollout/turn/render", "sightline-worker", ""),
        ("rollout/turn/generate", "sightline-worker", "client"),
        ("rollout/turn/generate/serve", "sightline-server", "server"),
        *((f"rollout/turn/generate/serve/{name}", "sightline-server", "") for name in engine),
    ]
    acts = ("rollout/environment", "sightline-worker", "")
    found = tree(collector.spans)
    assert found[0] == ("rollout", "sightline-worker", "")
    assert sorted(found) == sorted([found[0], acts, *turn, acts, *turn, acts])
    assert [path for path, *_ in found if path.count("/") == 1] == [
        "rollout/environment", "rollout/turn", "rollout/environment", "rollout/turn",
        "rollout/environment",
    ]  # fmt: skip
    assert len({span.trace_id for _, span in collector.spans}) == 1


def test_a_rollout_that_fails_says_why(
    settings: ServerSpec, media: MediaStore, collector: Collector
) -> None:
    async def breaks(chat: Chat) -> float:
        raise ValueError("the page did not load")

    with playing(settings, media, collector.address) as worker:
        asyncio.run(worker.play(breaks))
    (rollout,) = [span for _, span in collector.spans if span.name == "rollout"]
    assert rollout.status.code == Status.STATUS_CODE_ERROR
    assert rollout.status.message == "ValueError: the page did not load"
    assert attributes(rollout)["error_kind"] == "EnvironmentFailed"


def test_a_server_joins_whoever_asks_and_begins_anew_for_the_others(
    settings: ServerSpec, media: MediaStore, collector: Collector
) -> None:
    """Its own setting decides: a client that exports nothing has no header to send."""
    with playing(settings, media, "", collector.address) as worker:
        asyncio.run(worker.play(look_twice))
    paths = [path for path, *_ in tree(collector.spans)]
    assert paths.count("serve") == 2 and "rollout" not in paths


def unused_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def said(trace: Trace) -> list[list[int]]:
    return [node.token_ids.numpy().tolist() for node in trace.nodes]


@pytest.fixture(scope="module")
def without(settings: ServerSpec, media: MediaStore) -> Trace:
    """A rollout without export."""
    with playing(settings, media, "") as worker:
        return asyncio.run(worker.play(look_twice))


@pytest.mark.parametrize("kind", ["nobody listens", "it refuses", "it hangs"])
def test_a_collector_that_does_not_work_changes_nothing(
    settings: ServerSpec,
    media: MediaStore,
    without: Trace,
    kind: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hasty = ExportLimits(close_timeout_s=0.5, export_timeout_s=0.2, interval_ms=10)
    broken = None if kind == "nobody listens" else Collector(BUSY, hangs=kind == "it hangs")
    try:
        target = unused_address() if broken is None else broken.address
        with playing(settings, media, target, limits=hasty) as worker:
            with_it = asyncio.run(worker.play(look_twice))
            lines = ""
            deadline = time.monotonic() + 60
            while "the run goes on" not in lines and time.monotonic() < deadline:
                time.sleep(0.05)
                lines += capfd.readouterr().err
    finally:
        if broken is not None:
            broken.close()
    assert said(with_it) == said(without)
    assert (with_it.error, with_it.reward) == (without.error, without.reward)
    assert f"spans are lost, {target}" in lines


def test_without_the_setting_nothing_of_it_is_imported() -> None:
    script = (
        "import sys; from sightline.run.otel import open_stages, check_otel; "
        "check_otel(''); stages = open_stages('', 'worker-0'); "
        "stage = stages.begin('rollout', {'traceparent': 'x'}, task=1); "
        "assert stage.begin('turn') is stage and not stage.headers; "
        "print([name for name in sys.modules if name.split('.')[-1] in ('sdk', 'requests')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("value", ["collector:4318", "ftp://host", "http://", "spans.jsonl"])
def test_what_is_no_collector_is_refused_at_load(tmp_path: Path, value: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[env]\nname = "color_codeword"\n')
    for good in ("", "file", "http://127.0.0.1:4318", "https://otel.example/v1/traces"):
        assert load_config(RunFile, file, [f'logging.otel="{good}"']).logging.otel == good
    with pytest.raises(ConfigError, match="otel"):
        load_config(RunFile, file, [f'logging.otel="{value}"'])
