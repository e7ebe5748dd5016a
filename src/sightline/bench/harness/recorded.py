"""Training from recorded traces: the real orchestrator and trainer, and no sampler.

    recorded (this process) --traces--> orchestrator --batch on disk--> trainer
         ^  adopt k                         |   ^  published k            |
         +----------------------------------+   +-------------------------+

This process stands in for worker and server. It answers every rollout that the orchestrator asks
for with a trace of the recording, as if the version that was adopted last had sampled it; it holds
no model. Orchestrator and trainer are the processes of a run, unchanged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import msgspec
from aiohttp import web

from sightline.bench.harness.screenshots import Screenshots
from sightline.config import RunFile, dump_toml
from sightline.errors import ConfigError
from sightline.families import load_family, load_renderer
from sightline.launch.claim import make_secret
from sightline.launch.processes import Processes, ProcessSpec, reserve_port
from sightline.launch.torchrun import build_trainer_specs
from sightline.media import MediaStore
from sightline.message import user
from sightline.pixels import Materializer
from sightline.run import RunDir
from sightline.trace import PolicySpan, Trace, encode_trace, read_traces, write_traces
from sightline.transport.zmq_channel import AsyncSpoke, derive_spoke_key
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    CancelRollouts,
    ProcessReady,
    QuitRequest,
    RolloutRequest,
    RolloutResult,
    ServerList,
)
from sightline.wire.generate import AdoptRequest
from sightline.wire.weights import Manifest, PolicyLabel, read_manifest

HOST = "127.0.0.1"
ORCHESTRATOR, WORKER = "orchestrator", "worker-0"
NUM_TEXT_IDS = 94
"""The first ids of a byte-level tokenizer are the printable characters of ASCII."""
LOGPROB = -4.5
POLL_S = 0.2


@dataclass(frozen=True)
class RecordingSpec:
    """What a recorded rollout looks like."""

    turns: int = 4
    side: int = 512
    """Pixels along each side of the image of every turn."""
    answer: int = 256
    """Tokens that the policy says in a turn."""


def record_traces(
    model: Path, store: MediaStore, file: Path, num: int, recording: RecordingSpec, seed: int = 0
) -> None:
    """Writes `num` traces: images of their own, true pixel digests, answers drawn at random."""
    family = load_family(model)
    renderer = load_renderer(model, store, family)
    materializer = Materializer(family, store, max_bytes=0, threads=4)
    pages = Screenshots(recording.turns, recording.side, recording.side)
    stop = min(renderer.stop_token_ids)

    def traces() -> Iterator[Trace]:
        for i in range(num):
            rng = random.Random(f"{seed}:{i}")
            trace = Trace(id=f"r{i}", env="recorded", task=i)
            messages = []
            for number in range(recording.turns):
                messages.append(user(f"page {number}", store.put(pages.draw(rng))))
                turn = trace.prepare(messages, renderer)
                sampled = [rng.randrange(NUM_TEXT_IDS) for _ in range(recording.answer - 1)] + [
                    stop
                ]
                node = turn.commit(
                    sampled,
                    [LOGPROB] * len(sampled),
                    [PolicySpan(version=0, epoch=0, start=0, stop=len(sampled))],
                    "stop",
                    [materializer.get(slot.item).digest for slot in turn.slots],
                )
                messages.append(node.message)
            trace.reward = rng.random()
            yield trace

    write_traces(file, traces())
    materializer.close()


@dataclass
class RecordedSampler:
    """The stand-in: worker to the orchestrator's channel, engine to its client."""

    traces: list[Trace]
    policy: PolicyLabel
    played: int = 0
    _next: Iterator[Trace] = field(init=False)

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("the recording holds no trace", "record some")
        self._next = cycle(self.traces)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/sightline/v1/stats", self._stats)
        app.router.add_post("/sightline/v1/adopt", self._adopt)
        app.router.add_post("/sightline/v1/lease", self._lease)
        return app

    async def work(self, hub: str, secret: str) -> None:
        spoke = AsyncSpoke(hub, WORKER, derive_spoke_key(secret, WORKER))
        try:
            await spoke.send(control.encode(ProcessReady(WORKER, release=get_release())))
            while not isinstance(message := control.decode(await spoke.receive()), QuitRequest):
                if isinstance(message, RolloutRequest):
                    await spoke.send(control.encode(self.play(message)))
                elif not isinstance(message, CancelRollouts | ServerList):
                    raise ConfigError(f"a worker was sent {message}", "report this bug")
        finally:
            spoke.close()

    def play(self, asked: RolloutRequest) -> RolloutResult:
        """The next trace of the recording, sampled by the version that was adopted last."""
        recorded = next(self._next)
        self.played += 1
        nodes = [
            msgspec.structs.replace(
                node,
                versions=(PolicySpan(0, node.num_sampled, **self.policy._asdict()),),
            )
            if node.is_turn
            else node
            for node in recorded.nodes
        ]
        # Drawn anew where a recording comes round: a group needs rewards that differ.
        reward = random.Random(f"{asked.rollout_id}:{asked.seed}").random()
        trace = Trace(
            id=asked.rollout_id,
            group_id=asked.group_id,
            env=recorded.env,
            task=asked.task,
            nodes=nodes,
            toolsets=recorded.toolsets,
            reward=reward,
            temperature=asked.temperature,
        )
        return RolloutResult(asked.rollout_id, asked.group_id, encode_trace(trace))

    async def _adopt(self, http: web.Request) -> web.Response:
        asked = msgspec.json.decode(await http.read(), type=AdoptRequest)
        self.policy = read_manifest(Path(asked.manifest)).policy
        return web.json_response({})

    async def _lease(self, http: web.Request) -> web.Response:
        return web.json_response({})

    async def _stats(self, http: web.Request) -> web.Response:
        return web.json_response({"busy": []})

    async def _health(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "release": get_release()})


def train_recorded(
    config: RunFile,
    run_dir: RunDir,
    traces: Path,
    threads: int,
    on_tick: Callable[[], None] = lambda: None,
) -> None:
    """Runs `config` from its first step, in `run_dir`, until its last; what a recording calls
    logprobs says nothing."""
    unmeasured = {"max_mismatch": 0.0, "diagnostics_every": 0}
    orchestrator = config.orchestrator.model_copy(update=unmeasured)
    config = config.model_copy(update={"orchestrator": orchestrator})
    run_dir.make()
    make_secret(run_dir)
    run_dir.config.write_text(dump_toml(config))
    processes = Processes(run_dir)
    first = Manifest(version=0, vision_version=0, files=[], run=run_dir.read_id()).policy
    recorded = RecordedSampler(list(read_traces(traces)), first)
    try:
        asyncio.run(_train(config, processes, recorded, threads, on_tick))
    finally:
        processes.kill()


async def _train(
    config: RunFile,
    processes: Processes,
    recorded: RecordedSampler,
    threads: int,
    on_tick: Callable[[], None],
) -> None:
    hub = f"tcp://{HOST}:{reserve_port(HOST, 0, 'port of the hub')}"
    port = reserve_port(HOST, 0, "port of the stand-in")
    runner = web.AppRunner(recorded.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    path = str(processes.run_dir.path)
    place = [path, "--hub", hub, "--server", f"http://{HOST}:{port}"]
    trainer = ProcessSpec(
        "trainer", ["process", "trainer", *place, "--threads", str(threads)], threads
    )
    for spec in build_trainer_specs(trainer, config.trainer):
        processes.start(spec)
    processes.start(ProcessSpec(ORCHESTRATOR, ["process", ORCHESTRATOR, *place], 1))
    work = asyncio.create_task(recorded.work(hub, make_secret(processes.run_dir)))
    try:
        while processes.exit_code(ORCHESTRATOR) is None:
            await asyncio.wait({work}, timeout=POLL_S)
            if work.done():
                work.result()
            if failed := processes.failed():
                await asyncio.sleep(2 * POLL_S)
                raise processes.explain_exit(*processes.failed()[0])
            on_tick()
        if failed := processes.failed():
            raise processes.explain_exit(*failed[0])
        processes.stop()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await runner.cleanup()
