"""The orchestrator as a process: connects the others, runs the loop, ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from sightline.config import RunFile
from sightline.errors import MediaError, PeerLost, ProcessFailed, WireError
from sightline.media import MediaStore, open_store
from sightline.media.stored_file import open_blobs
from sightline.orchestrator import loop
from sightline.orchestrator.build import (
    OrchestratorComponents,
    ServerClients,
    build,
    build_evaluators,
    build_servers,
)
from sightline.orchestrator.remote_files import RemoteFiles, WriteQueue
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.server_pool import ServerPool, run_until_first
from sightline.orchestrator.server_stats import ServerStatsPoller
from sightline.orchestrator.trainer_watch import TrainerWatch
from sightline.run import EventLog, RunDir
from sightline.run.mirror import BEAT
from sightline.run.server_changes import list_wanted
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire import control
from sightline.wire.codec import check_release
from sightline.wire.control import (
    BatchReady,
    ControlMessage,
    FileChanges,
    FinishTraining,
    JoinRequest,
    MemoryReport,
    ProcessReady,
    PublishedWeights,
    QuitRequest,
    RolloutResult,
    ServerList,
    TrainingFinished,
)

TRAINER = "trainer"
TELL_EVERY_S = 0.02
LOOK_EVERY_S = 0.5
CANCEL_AGAIN_S = 1.0
"""How long a task that was cancelled may take to end before it is cancelled again."""


@dataclass
class ControlRouter:
    """Sends to the other processes and hands what they send to whom it concerns."""

    hub: AsyncHub
    peers: frozenset[str]
    """The processes that it hears."""
    ready: dict[str, ProcessReady] = field(default_factory=dict)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    last_step: int = 0
    """The step that the trainer's last checkpoint covers."""
    announced: int | None = None
    """The last step that the trainer was told of; None while there is no trainer."""
    is_finishing: bool = False
    """Whether the trainer is to end."""
    servers: ServerList | None = None
    """The servers that workers may ask."""
    remote_files: RemoteFiles | None = None
    """The run directory, for processes that do not see it."""
    trainer_watch: TrainerWatch = field(default_factory=lambda: TrainerWatch())
    components: OrchestratorComponents = field(init=False)
    """Hears what the others send."""

    def __post_init__(self) -> None:
        self._ready_changed = asyncio.Condition()
        self._telling = asyncio.Lock()
        self._from_trainer: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._joining: asyncio.Queue[str] = asyncio.Queue()
        self._checkpoints = WriteQueue()

    async def send(self, peer: str, message: ControlMessage) -> None:
        await self.hub.send(peer, control.encode(message))

    async def announce(self, ready: BatchReady) -> None:
        """Tells the trainer of a batch that is on disk; one that starts later is told then."""
        await self._tell_trainer([ready])

    async def finish(self) -> None:
        """Tells the trainer that no batch follows."""
        self.is_finishing = True
        await self._tell_trainer([])

    async def _tell_trainer(self, batches: Sequence[BatchReady]) -> None:
        async with self._telling:
            try:
                for ready in batches:
                    if self.announced == ready.step - 1:
                        await self.send(TRAINER, ready)
                        self.announced = ready.step
                if self.is_finishing and self.announced is not None:
                    await self.send(TRAINER, FinishTraining(self.announced))
            except ProcessFailed:
                # It has just ended: the launcher ends the run, or starts another.
                self.announced = None

    async def _on_trainer_ready(self, at: int) -> None:
        """Brings a trainer that starts from the checkpoint of step `at` to the last batch."""
        self.components.policies.last = None  # it publishes that version again, and those after it
        self.announced = at
        await self._tell_trainer(self.components.run_state.announcements_after(at))

    async def tell_servers(self, servers: ServerList) -> None:
        """Tells the workers which servers they may ask."""
        self.servers = servers
        for worker in self.ready.keys() - {TRAINER}:
            with contextlib.suppress(ProcessFailed):  # its successor is told when it is ready
                await self.send(worker, servers)

    async def wait_until_ready(self, names: set[str]) -> None:
        async with self._ready_changed:
            await self._ready_changed.wait_for(lambda: names <= self.ready.keys())

    async def keep_receiving(self) -> None:
        """Runs beside the loop for as long as the run lasts."""
        await run_until_first(
            self._keep_receiving(), self._keep_heeding_trainer(), self._keep_giving_files(),
            self._checkpoints.keep_writing(), self.trainer_watch.keep_watching(),
        )  # fmt: skip

    async def _keep_receiving(self) -> None:
        rollouts = self.components.rollouts
        while True:
            try:
                peer, data = await self.hub.receive()
            except PeerLost as lost:  # the launcher, or a cluster, looks after its process
                print(lost, file=sys.stderr, flush=True)
                if self.ready.pop(lost.peer, None) and lost.peer != TRAINER:
                    rollouts.on_worker_lost(lost.peer, f"silence: {lost.problem}")
                continue
            if peer not in self.peers:
                raise WireError(
                    f"{peer} speaks to the orchestrator, and is no process of this run",
                    "let no other process have the secret of the run",
                )
            message = control.decode_from(peer, data)
            if peer == TRAINER:
                self.trainer_watch.note_heard(isinstance(message, ProcessReady))
            match message:
                case RolloutResult() if peer != TRAINER:
                    rollouts.on_result(message, peer)
                case MemoryReport() if peer != TRAINER:
                    rollouts.dispatcher.on_memory_report(peer, message.held_bytes)
                case JoinRequest() if peer != TRAINER and self.remote_files is not None:
                    check_release(message.release, peer)
                    self._joining.put_nowait(peer)
                case FileChanges(files) if self.remote_files is not None and (
                    peer != TRAINER or all(file.name.endswith(BEAT) for file in files)
                ):
                    await asyncio.to_thread(self.remote_files.write, peer, message)
                case ProcessReady() if peer != TRAINER:
                    check_release(message.release, peer)
                    if message.after or peer in self.ready:
                        rollouts.on_worker_lost(
                            peer, message.after or "crash: it was started again"
                        )
                    if self.servers is not None:
                        await self.send(peer, self.servers)
                    await self._note_ready(peer, message)
                case _ if peer == TRAINER:
                    self._from_trainer.put_nowait(message)
                case _:
                    raise _unexpected_error(peer, message)

    async def _keep_giving_files(self) -> None:
        """Gives processes that join what they work on; the first may have to wait until the model
        is stored."""
        while True:
            await self._give_files(await self._joining.get())

    async def _give_files(self, peer: str) -> None:
        assert self.remote_files is not None
        files = await asyncio.to_thread(self.remote_files.collect, peer)
        with contextlib.suppress(ProcessFailed):  # it has just ended: another will ask
            await self.send(peer, files)

    async def _keep_heeding_trainer(self) -> None:
        """Takes what the trainer says in its order: its files may take a while to arrive, and its
        successor is given them."""
        while True:
            message = await self._from_trainer.get()
            match message:
                case JoinRequest() if self.remote_files is not None:
                    check_release(message.release, TRAINER)
                    self.announced = None
                    await self._checkpoints.join()
                    await self._give_files(TRAINER)
                case FileChanges(files) if self.remote_files is not None:
                    if all(file.name.startswith("checkpoints/") for file in files):
                        # Large: new weights do not wait for them.
                        self._checkpoints.put(partial(self.remote_files.write, TRAINER, message))
                    else:
                        await asyncio.to_thread(self.remote_files.write, TRAINER, message)
                case PublishedWeights():
                    if self._checkpoints.num_waiting:  # what covers the batches may not be here yet
                        message = structs.replace(message, checkpoint_step=0)
                    self.components.publish(message)
                case ProcessReady():
                    check_release(message.release, TRAINER)
                    await self._on_trainer_ready(message.version)
                    await self._note_ready(TRAINER, message)
                case TrainingFinished() if message.step <= self.components.run_state.progress.step:
                    await self._checkpoints.join()
                    self.last_step = message.step
                    self.finished.set()
                case _:
                    raise _unexpected_error(TRAINER, message)

    async def _note_ready(self, peer: str, message: ProcessReady) -> None:
        async with self._ready_changed:
            self.ready[peer] = message
            self._ready_changed.notify_all()


def _unexpected_error(peer: str, message: ControlMessage) -> WireError:
    return WireError(
        f"{peer} sent {str(message)[:200]}", "this is a bug, or no process of this run; report it"
    )


async def main(
    config: RunFile,
    run_dir: RunDir,
    media_root: Path | str,
    hub: str,
    servers: Sequence[str],
    evaluator: str,
    secret: str,
) -> None:
    """Runs the loop to its end, or until a signal. `evaluator` is the address of the server that
    evaluates while the run goes on, if there is one; `secret` is that of the run."""
    events = EventLog(run_dir.metrics, "orchestrator")
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    # Servers join, and say where they are; others speak for as long as they live.
    placed = list(filter(config.launch.is_elsewhere, config.server_names))
    for name in placed:
        run_dir.server_address(name).unlink(missing_ok=True)
    router = ControlRouter(AsyncHub(hub, secret), frozenset({TRAINER, *workers, *placed}))
    store = open_store(media_root, **config.media.store_options(for_control=True))
    clients = ServerClients(config, store, secret)
    pool = build_servers(config, run_dir, events, clients, servers)
    evaluators = (
        build_evaluators(run_dir, events, clients.build(evaluator, is_own=True))
        if evaluator
        else None
    )
    run_state = RunState.open(run_dir, config.orchestrator.keep_batches)
    components = build(
        config, run_dir, store, run_state, events, router.send, router.announce, workers, pool,
        evaluators,
    )  # fmt: skip
    router.components = components
    if config.launch.has_other_machines:
        blobs = open_blobs(media_root, config.media.read_token(for_control=True))
        router.remote_files = RemoteFiles(run_dir, Path(config.model.path), blobs)
    if config.launch.is_elsewhere(TRAINER):
        router.trainer_watch.error_file = run_dir.error_file(TRAINER)
    ending = placed if config.launch.cluster_starts_processes else []
    stats_poller = ServerStatsPoller(pool.list_clients, events, components.observer.caches)
    pools = [pool] if evaluators is None else [pool, evaluators]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def job() -> None:
        events.write("state", phase="starting")
        for one in pools:
            await one.wait_joined()
        await asyncio.to_thread(store.renew_lease, run_dir.read_id())
        await router.wait_until_ready({TRAINER, *workers})
        at, last = router.ready[TRAINER].version, run_state.progress.step
        await components.policy.wait_for_version(max(at, last - components.max_lag))
        await _train(config, components, events, stop)
        await stats_poller.poll()
        # Of servers that a cluster started nobody else says that they may end.
        await _finish(router, run_state, store, [*workers, *ending], events)
        await asyncio.to_thread(store.end_lease, run_dir.read_id())

    helpers = [
        router.keep_receiving(),
        components.policy.keep_adopting(),
        components.rollouts.dispatcher.keep_sending(),
        stats_poller.keep_polling(),
        *(one.keep_serving() for one in pools),
        _keep_telling_workers(router, pool),
        _keep_server_changes(run_dir, config.inference.servers, pool, clients),
        _keep_placing_servers(run_dir, placed, pool, clients),
        _keep_checking_store(store, run_dir.read_id()),
    ]
    if components.background_evaluator is not None:
        helpers.append(components.background_evaluator.keep_evaluating())
    try:
        # A helper that ends before the job has failed, and its error is the run's.
        await run_until_first(job(), *helpers)
    finally:
        for one in pools:
            await one.close()
        router.hub.close()


async def _train(
    config: RunFile, components: OrchestratorComponents, events: EventLog, stop: asyncio.Event
) -> None:
    """Evaluates, trains, evaluates; cut short, without loss, when `stop` is set."""
    evaluator, background = components.evaluator, components.background_evaluator

    async def play_and_train() -> None:
        await evaluator.evaluate("start", 0)
        last = components.run_state.progress.step
        if components.goal is None or not components.goal.was_reached:
            events.write("state", phase="training")
            components.observer.start()
            last = await loop.run(components, range(last + 1, config.run.steps + 1))
        await components.policy.wait_for_version(last)
        if background is not None:
            await background.drain()
        await components.rollouts.cancel()
        await evaluator.evaluate("final", last, swap_images=True)
        if background is not None:
            await background.keep_final_if_best(last)

    stopping = asyncio.ensure_future(stop.wait())
    working = asyncio.ensure_future(play_and_train())
    await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        stopping.cancel()
        working.result()
    else:
        events.write("state", phase="stopping")
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def _finish(
    router: ControlRouter,
    run_state: RunState,
    store: MediaStore,
    others: list[str],
    events: EventLog,
) -> None:
    events.write("state", phase="finishing")
    await router.finish()
    await router.finished.wait()
    run_state.remove_covered_batches(router.last_step)
    for peer in others:
        with contextlib.suppress(ProcessFailed):  # it has just ended by itself
            await router.send(peer, QuitRequest())
    run_state.save()
    events.write(
        "totals",
        run_state.progress.step,
        images_shown=run_state.progress.images_shown,
        # A fresh look: this process learns of what the workers put only now and then.
        images_stored=copy.copy(store).count(),
        tokens_sampled=run_state.progress.tokens_sampled,
        forks=run_state.progress.forks,
        door_errors=run_state.progress.refused_requests,
        bad_media=run_state.num_bad_media,
        verdicts=dict(run_state.verdicts),
        seconds=run_state.progress.seconds,
    )


async def _keep_telling_workers(router: ControlRouter, pool: ServerPool) -> None:
    """Tells the workers of every change among the servers."""
    while True:
        if (now := pool.status) == router.servers:
            await pool.changed.wait()
            continue
        await router.tell_servers(now)
        await asyncio.sleep(TELL_EVERY_S)


async def _keep_server_changes(
    run_dir: RunDir, base: Sequence[str], pool: ServerPool, clients: ServerClients
) -> None:
    """Adds and removes the servers that a person wants so, and reports how they stand."""
    seen, reported = -1, b""
    while True:
        with contextlib.suppress(FileNotFoundError):
            if (now := run_dir.servers.stat().st_mtime_ns) != seen:
                seen = now
                wanted = list_wanted(run_dir, base)
                await pool.apply(wanted, lambda url: clients.build(url, is_own=False))
        if (report := msgspec.json.encode(pool.reports)) != reported:
            reported = report
            # Not synced: it says nothing that outlasts the processes.
            part = run_dir.server_report.with_suffix(".part")
            part.write_bytes(report)
            part.replace(run_dir.server_report)
        await asyncio.sleep(LOOK_EVERY_S)


async def _keep_placing_servers(
    run_dir: RunDir, names: Sequence[str], pool: ServerPool, clients: ServerClients
) -> None:
    """Takes the servers of the run that start elsewhere, each time that one says where it is."""
    known: dict[str, str] = {}
    while True:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                address = run_dir.server_address(name).read_text()
                if address != known.get(name):
                    known[name] = address
                    client = clients.build(address, is_own=True)
                    await pool.place(name, client, run_dir.heartbeat(name))
        await asyncio.sleep(LOOK_EVERY_S)


async def _keep_checking_store(store: MediaStore, run_id: str) -> None:
    """Renews the run's lease of its images, and ends the run when store or disk are full; a step,
    or an evaluation, may last long."""
    fresh = copy.copy(store)  # it has counted nothing yet, and does so again as time passes

    def check() -> None:
        try:
            fresh.renew_lease(run_id)
            fresh.check_room()
        except MediaError as error:
            if type(error) is not MediaError or not isinstance(error.__cause__, OSError):
                raise
            print(error, file=sys.stderr, flush=True)  # it may heal, and who needs an image says so

    while True:
        await asyncio.sleep(30.0)
        await asyncio.to_thread(check)
