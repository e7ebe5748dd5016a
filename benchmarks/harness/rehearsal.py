"""Plays rollouts through the real orchestrator and worker, and counts bytes on every wire.

    orchestrator <--ZMQ-- tap <--ZMQ-- worker-0 --HTTP--> policy (scripted)
         |  batch on disk                 |  images
         v                                v
       trainer (this process)           store

      tap waits for: messages of either side   unblocked by: worker-0, orchestrator
      trainer waits for: the batch             unblocked by: orchestrator

Policy and trainer are fakes without a model. Orchestrator and worker are the unchanged processes
of a run. One step is played, with all its rollouts at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web

from benchmarks.harness.scripted_agent import AGENT_PATH, AGENT_SCREENSHOTS, run_agent
from sightline import config as config_module
from sightline.bench.harness.screenshots import SCREENSHOTS
from sightline.config import RunFile, dump_toml
from sightline.errors import ProcessFailed
from sightline.families import Family, load_family
from sightline.launch.claim import make_secret
from sightline.launch.processes import Processes, ProcessSpec, reserve_port
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke, derive_spoke_key
from sightline.wire import MediaItem, control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    BatchReady,
    FinishTraining,
    ProcessReady,
    PublishedWeights,
    RolloutRequest,
    TrainingFinished,
)
from sightline.wire.sample import Batch, digest_batch
from sightline.wire.weights import MANIFEST, Manifest, log_version
from tests.scripted_policy import PolicyCounts, ScriptedPolicy, count_encoded_images

ORCHESTRATOR, WORKER, TRAINER = "orchestrator", "worker-0", "trainer"
HOST = "127.0.0.1"
ROLLOUT_LIMIT_S = 3600.0
UNBOUNDED = 1 << 30
"""Maximum tokens of a sequence. The scripted policy has no memory limit."""
POLL_S = 0.2
DATA_URL_HEAD = len("data:image/png;base64,")
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class RehearsalPlan:
    rollouts: int
    turns: int
    width: int
    height: int
    max_tokens: int = 32
    uses_agents: bool = False
    """Whether agents in another process play, and send all their history with each request."""

    @property
    def group_size(self) -> int:
        return next(size for size in (8, 4, 2) if self.rollouts % size == 0)

    @property
    def num_turns(self) -> int:
        return self.rollouts * self.turns


@dataclass(frozen=True)
class MemoryUse:
    """Resident bytes of a process, at the first rollout and at the peak."""

    start: int
    peak: int


@dataclass
class ResentBytes:
    """Bytes that the same rollouts would post if every turn sent all screenshots again."""

    data_urls: int = 0
    """Bytes of PNG files in base64."""
    floats: int = 0
    """Bytes of the processor's float32 rows in base64."""
    held_floats: int = 0
    """Bytes of each screenshot's float32 rows once, as in a history that keeps pixels."""

    def add(self, batch: Batch, float_bytes: Callable[[MediaItem], int]) -> None:
        for sample in batch.samples:
            times = len(sample.slots)
            for slot in sample.slots:
                item = sample.items[slot.item]
                # One screenshot per turn: the first is in all requests, the last in one.
                self.data_urls += times * (DATA_URL_HEAD + count_base64_bytes(item.ref.nbytes))
                self.floats += times * count_base64_bytes(float_bytes(item))
                self.held_floats += float_bytes(item)
                times -= 1


def count_base64_bytes(nbytes: int) -> int:
    return (nbytes + 2) // 3 * 4


@dataclass
class RehearsalFigures:
    """The results of one rehearsal, sizes in bytes."""

    plan: RehearsalPlan
    memory: dict[str, MemoryUse] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time of each process from the first rollout to the end of the step."""
    policy: PolicyCounts = field(default_factory=PolicyCounts)
    to_worker: int = 0
    to_orchestrator: int = 0
    batch: int = 0
    traces: int = 0
    stored: int = 0
    stored_images: int = 0
    samples: int = 0
    slots: int = 0
    """Number of image slots in all samples."""
    encoded_images: int = 0
    """Encoded images in messages and files outside the store. There must be none."""
    resent: ResentBytes = field(default_factory=ResentBytes)
    seconds: float = 0.0

    @property
    def first_sent(self) -> int:
        """Bytes of new images in base64 that agents sent."""
        return count_base64_bytes(self.stored)


def rehearse(plan: RehearsalPlan, model: Path, folder: Path) -> RehearsalFigures:
    """Play `plan` in `folder`."""
    run_dir = RunDir(folder)
    run_dir.make()
    server = f"http://{HOST}:{reserve_port(HOST, 0, 'port of the policy')}"
    run_dir.config.write_text(dump_toml(_run_file(plan, model, server)))
    processes = Processes(run_dir)
    try:
        return asyncio.run(_Rehearsal(plan, model, run_dir, processes, server).run())
    finally:
        processes.kill()


def _run_file(plan: RehearsalPlan, model: Path, server: str) -> RunFile:
    args: dict[str, object] = {
        "turns": plan.turns, "width": plan.width, "height": plan.height,
        **({"agent": server + AGENT_PATH} if plan.uses_agents else {}),
    }  # fmt: skip
    size = plan.group_size
    values = {
        "run": {"name": "rehearsal", "steps": 1},
        "model": {"path": str(model.resolve())},
        "env": {"name": AGENT_SCREENSHOTS if plan.uses_agents else SCREENSHOTS, "args": args},
        "rollout": {
            "workers": 1, "max_tokens": plan.max_tokens, "timeout_s": ROLLOUT_LIMIT_S,
        },
        "orchestrator": {
            "group_size": size, "groups_per_step": plan.rollouts // size, "max_lag": 0,
        },
        "inference": {"max_model_len": UNBOUNDED},
        "eval": {"tasks": 0},
    }  # fmt: skip
    return config_module.validate_config(RunFile, values, "rehearsal")


@dataclass
class _Rehearsal:
    plan: RehearsalPlan
    model: Path
    run_dir: RunDir
    processes: Processes
    server: str

    def __post_init__(self) -> None:
        self.figures = RehearsalFigures(self.plan)
        self.store = MediaStore(self.run_dir.media)
        self.hub, self.tap = (
            f"tcp://{HOST}:{reserve_port(HOST, 0, 'port of a channel')}" for _ in range(2)
        )
        self._starts: dict[str, int] = {}
        self._cpu_starts: dict[str, float] = {}

    async def run(self) -> RehearsalFigures:
        policy = await self._serve_policy()
        secret = make_secret(self.run_dir)
        upper = AsyncSpoke(self.hub, WORKER, derive_spoke_key(secret, WORKER))
        lower = AsyncHub(self.tap, secret)
        trainer = AsyncSpoke(self.hub, TRAINER, derive_spoke_key(secret, TRAINER))
        tasks = [
            asyncio.create_task(self._tap_down(upper, lower)),
            asyncio.create_task(self._tap_up(upper, lower)),
            asyncio.create_task(self._train(trainer)),
        ]
        self._start()
        began = time.monotonic()
        try:
            await self._watch(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await policy.cleanup()
            for channel in (upper, lower, trainer):
                channel.close()
        self.figures.seconds = time.monotonic() - began
        self._read_files()
        return self.figures

    def _start(self) -> None:
        path = str(self.run_dir.path)
        for name, hub in ((ORCHESTRATOR, self.hub), (WORKER, self.tap)):
            words = ["process", name, path, "--hub", hub, "--server", self.server]
            self.processes.start(ProcessSpec(name, words, threads=1))

    async def _serve_policy(self) -> web.AppRunner:
        policy = ScriptedPolicy()
        self.figures.policy = policy.counts
        app = policy.app()
        app.router.add_post(AGENT_PATH, run_agent)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, _, port = self.server.removeprefix("http://").rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        return runner

    async def _watch(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until the orchestrator ends. Raise the first error of any task or process."""
        while self.processes.exit_code(ORCHESTRATOR) is None:
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if failed := self.processes.failed():
                raise self.processes.explain_exit(*failed[0])
        if failed := self.processes.failed():
            raise self.processes.explain_exit(*failed[0])

    # --- the wire between orchestrator and worker

    async def _tap_down(self, upper: AsyncSpoke, lower: AsyncHub) -> None:
        while True:
            data = await upper.receive()
            self.figures.to_worker += len(data)
            if not self._starts and isinstance(control.decode(data), RolloutRequest):
                self._starts = {
                    name: _read_memory(self.processes.list_pids()[name], "VmRSS")
                    for name in (ORCHESTRATOR, WORKER)
                }
                self._cpu_starts = {
                    name: read_cpu(self.processes.list_pids()[name]) for name in self._starts
                }
            self.figures.encoded_images += count_encoded_images(data)
            await lower.send(WORKER, data)

    async def _tap_up(self, upper: AsyncSpoke, lower: AsyncHub) -> None:
        while True:
            _, data = await lower.receive()
            self.figures.to_orchestrator += len(data)
            self.figures.encoded_images += count_encoded_images(data)
            await upper.send(data)

    # --- the trainer's part

    async def _train(self, spoke: AsyncSpoke) -> None:
        await spoke.send(control.encode(ProcessReady(release=get_release())))
        while True:
            message = control.decode(await spoke.receive())
            match message:
                case BatchReady():
                    self._take_batch(message)
                    await spoke.send(control.encode(self._publish(message.step)))
                case FinishTraining():
                    # The step is over and both processes still run, so their peaks can be read.
                    self.figures.memory = {
                        name: MemoryUse(
                            start, _read_memory(self.processes.list_pids()[name], "VmHWM")
                        )
                        for name, start in self._starts.items()
                    }
                    self.figures.cpu_s = {
                        name: read_cpu(self.processes.list_pids()[name]) - start
                        for name, start in self._cpu_starts.items()
                    }
                    await spoke.send(control.encode(TrainingFinished(message.last_step)))
                case _:
                    raise ProcessFailed(
                        f"the trainer was sent a {type(message).__name__}", "report this bug"
                    )

    def _publish(self, step: int) -> PublishedWeights:
        manifest = Manifest(step, 0, [], run=self.run_dir.read_id())
        folder, _ = log_version(self.run_dir.weights, manifest)
        folder.mkdir()
        (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        return PublishedWeights(step, 0, str(folder / MANIFEST), {}, checkpoint_step=step - 1)

    def _take_batch(self, announce: BatchReady) -> None:
        data = announce.data
        if digest_batch(data) != announce.digest:
            problem = f"the batch of step {announce.step} is not what was announced"
            raise ProcessFailed(problem, "report this bug")
        batch, figures = Batch.from_bytes(data), self.figures
        figures.batch += len(data)
        figures.encoded_images += count_encoded_images(data)
        figures.samples += len(batch.samples)
        figures.slots += sum(len(sample.slots) for sample in batch.samples)
        figures.resent.add(batch, _FloatSizes(load_family(self.model), self.store).of)

    def _read_files(self) -> None:
        for file in self.run_dir.traces.iterdir():
            data = file.read_bytes()
            self.figures.traces += len(data)
            self.figures.encoded_images += count_encoded_images(data)
        self.figures.stored = self.store.size_bytes()
        self.figures.stored_images = self.store.count()


@dataclass
class _FloatSizes:
    """Sizes of an image's float rows, computed once for each grid."""

    family: Family
    store: MediaStore
    _known: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def of(self, item: MediaItem) -> int:
        if item.grid not in self._known:
            patches = self.family.patches(self.store.image(item.ref), item)
            # The processor's rows repeat the frame, and our patches do not.
            repeats = self.family.settings.get("temporal", 1)
            self._known[item.grid] = patches.size * repeats * FLOAT32_BYTES
        return self._known[item.grid]


def read_cpu(pid: int) -> float:
    """Return a process's CPU seconds so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_memory(pid: int, name: str) -> int:
    """Return a memory field of /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessFailed(f"process {pid} has ended", "look at the logs")
