"""Every parser of bytes that come from outside, as a function that takes them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.config import RunFile, SftFile
from sightline.config.load import load_config
from sightline.envs.task_files import open_tasks
from sightline.families import load_family, load_renderer
from sightline.inference.chat_endpoint import ChatEndpoint
from sightline.inference.validator import RequestValidator
from sightline.media import ImageIngestor, MediaStore
from sightline.media.decode import inspect_image, open_rgb
from sightline.media.header import ImageLimits
from sightline.media.video import VideoReaders
from sightline.rollout.openai_completions import ChatDialect
from sightline.rollout.openai_responses import ResponsesDialect
from sightline.run.run_dir import RunDir
from sightline.trace import read_traces
from sightline.trace.codec import FILE_MAGIC, TraceRecord, read_records
from sightline.view.dashboard import processes, queries, rollout_page
from sightline.view.dashboard.history import MetricsHistory
from sightline.view.dashboard.run_view import RunView
from sightline.view.fenced_run_dir import FencedRunDir
from sightline.view.run_status import get_status
from sightline.wire import control, rank_messages
from sightline.wire.weights import read_manifest
from tests.read_back import read_weights

from .harness import Target

LIMITS = ImageLimits(max_bytes=1 << 20, max_pixels=1 << 20)


def build_targets(folder: Path, tiny_model: Path) -> list[Target]:
    """Return all parsers. Files that they need are below `folder`."""
    store = MediaStore(folder / "media", limits=LIMITS)
    images = ImageIngestor(store, file_roots=[folder])
    family, renderer = load_family(tiny_model), load_renderer(tiny_model, store, None, images)
    validator = RequestValidator(
        family, renderer.pad_token_ids[0], renderer.vocab_size, 4096, frozenset({"tiny"})
    )
    chat = ChatEndpoint(renderer, family.modality, "tiny", 4096)

    def parse_url(data: bytes) -> None:
        images.resolve(data.decode("latin-1"), "url")

    def parse_image(data: bytes) -> None:
        header = inspect_image(data, LIMITS)
        assert open_rgb(data, LIMITS).size == (header.width, header.height)

    def parse_video(data: bytes) -> None:
        ref = store.put(data)
        if ref.is_video:
            VideoReaders(store.get, LIMITS).read(ref, [0, ref.num_frames - 1])

    def parse_chat(kind: type[ChatDialect], data: bytes) -> None:
        asked, rendered = chat._read_request(kind(), data)
        chat._build_sampling_params(asked, len(rendered.token_ids))

    return [
        Target("ingest", parse_url),
        Target("data_urls", parse_url),
        Target("image_headers", parse_image, repair=repair_png),
        Target("videos", parse_video),
        Target("generate", validator.check, "json"),
        Target("chat", partial(parse_chat, ChatDialect), "json"),
        Target("responses", partial(parse_chat, ResponsesDialect), "json"),
        Target("adopt", _in_file(folder / "adopt" / "manifest.json", _parse_manifest), "json"),
        Target("traces", _in_file(folder / "x.msgpack", _parse_traces), repair=repair_lengths),
        Target("control", _parse_message, "msgpack"),
        Target("run_files", _in_file(folder / "run.toml", _parse_run_file)),
        Target("parquet", _in_file(folder / "rows.parquet", lambda path: _parse_rows(path, store))),
        Target("jsonl", _in_file(folder / "rows.jsonl", lambda path: _parse_rows(path, store))),
        Target("run_dirs", RunDirParser(folder / "run")),
    ]


def _in_file(path: Path, parse: Callable[[Path], object]) -> Callable[[bytes], None]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def parse_file(data: bytes) -> None:
        path.write_bytes(data)
        parse(path)

    return parse_file


def repair_png(data: bytes) -> bytes:
    """Correct the checksums of chunks, so that mutations reach the code after the check."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    pieces, at = [data[:8]], 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : end]
        pieces += [data[at : at + 4], body, struct.pack(">I", zlib.crc32(body))]
        at = end + 4
    return b"".join(pieces)


def repair_lengths(data: bytes) -> bytes:
    """One trace, whose length is right."""
    body = data.removeprefix(FILE_MAGIC)[4:]
    return FILE_MAGIC + len(body).to_bytes(4, "big") + body


def _parse_manifest(path: Path) -> None:
    if read_manifest(path).transport != "broadcast":
        read_weights(path)


def _parse_traces(path: Path) -> None:
    for found in read_records(path):
        if isinstance(found, TraceRecord):
            found.trace.check()
    for trace in read_traces(path):
        trace.check()


def _parse_message(data: bytes) -> None:
    (rank_messages if data[:1] == b"r" else control).decode(data.removeprefix(b"r"))


def _parse_run_file(path: Path) -> None:
    kind = SftFile if b"[sft]" in path.read_bytes() else RunFile
    load_config(kind, path)


def _parse_rows(path: Path, store: MediaStore) -> None:
    tasks = open_tasks(path, images=["image"])
    for number in range(min(len(tasks), 4)):
        tasks.read(number, store.put)


class RunDirParser:
    """Replace one file of a run.

    The first line of the input is its name. Then read the run with every reader of the dashboard
    and `sightline status`.
    """

    def __init__(self, path: Path) -> None:
        size = SyntheticSize(1, 4, images=2, conversations=2, group_size=2)
        write_synthetic_run(path, size)
        self._view = RunView("run", FencedRunDir(path, path.resolve()))

    def __call__(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        known = {file.encode(): file for file in RUN_DIR_FILES}
        path = self._view.run_dir.path / known.get(name, "metrics.jsonl")
        before = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        try:
            self._read()
        finally:
            if before is None:
                path.unlink()
            else:
                path.write_bytes(before)

    def _read(self) -> None:
        view = self._view
        view.history = MetricsHistory(view.run_dir.metrics)
        view.refresh_all()
        view.overview()
        view.history.since(0)
        processes.describe_processes(view)
        with view.index.connect_readonly() as connection:
            rows = queries.list_rollouts(connection, queries.RolloutFilter(), 0, 50)["rows"]
            queries.list_groups(connection, queries.RolloutFilter(), 0, 50)
            queries.sum_mismatch(connection, None, None, True)
        for row in rows[:2]:
            rollout_page.describe_rollout(view, row["file"], row["number"])
            rollout_page.describe_tokens(view, row["file"], row["number"], 1, 0)
        get_status(RunDir(view.run_dir.path))


RUN_DIR_FILES = (
    "config.toml", "metrics.jsonl", "verdicts.jsonl", "summary.json", "notes.md", ".lock",
    "traces/step_000001.msgpack", "scores/step_000001.msgpack", "logs/trainer.log",
)  # fmt: skip
