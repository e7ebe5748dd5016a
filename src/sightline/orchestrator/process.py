"""The orchestrator as a process: connects the others, runs the loop, ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ProcessFailed, WireError
from sightline.media import MediaStore
from sightline.orchestrator import loop
from sightline.orchestrator.build import OrchestratorComponents, build
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.server_leases import ServerLeases
from sightline.orchestrator.server_stats import ServerHealthWatch, ServerStatsPoller
from sightline.rollout.client import GenerateClient
from sightline.rollout.stock_vllm_client import StockVLLMClient
from sightline.run import EventLog, RunDir
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire import control
from sightline.wire.codec import check_release
from sightline.wire.control import (
    BatchReady,
    ControlMessage,
    FinishTraining,
    MemoryReport,
    ProcessReady,
    PublishedWeights,
    QuitRequest,
    RolloutResult,
    TrainingFinished,
)

TRAINER = "trainer"


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
    components: OrchestratorComponents = field(init=False)
    """Hears what the others send."""

    def __post_init__(self) -> None:
        self._ready_changed = asyncio.Condition()

    async def send(self, peer: str, message: ControlMessage) -> None:
        await self.hub.send(peer, control.encode(message))

    async def announce(self, ready: BatchReady) -> None:
        await self.send(TRAINER, ready)

    async def wait_until_ready(self, names: set[str]) -> None:
        async with self._ready_changed:
            await self._ready_changed.wait_for(lambda: names <= self.ready.keys())

    async def keep_receiving(self) -> None:
        rollouts = self.components.rollouts
        while True:
            peer, data = await self.hub.receive()
            if peer not in self.peers:
                raise WireError(
                    f"{peer} speaks to the orchestrator, and is no process of this run",
                    "let no other process have the secret of the run",
                )
            message = control.decode_from(peer, data)
            match message:
                case RolloutResult() if peer != TRAINER:
                    rollouts.on_result(message, peer)
                case PublishedWeights() if peer == TRAINER:
                    self.components.publish(message)
                case MemoryReport() if peer != TRAINER:
                    rollouts.dispatcher.on_memory_report(peer, message.held_bytes)
                case ProcessReady():
                    check_release(message.release, peer)
                    if message.after:
                        rollouts.on_worker_lost(peer, message.after)
                    async with self._ready_changed:
                        self.ready[peer] = message
                        self._ready_changed.notify_all()
                case TrainingFinished() if (
                    peer == TRAINER and message.step <= self.components.run_state.progress.step
                ):
                    self.last_step = message.step
                    self.finished.set()
                case _:
                    raise _unexpected_error(peer, message)


def _unexpected_error(peer: str, message: ControlMessage) -> WireError:
    return WireError(
        f"{peer} sent {str(message)[:200]}", "this is a bug, or no process of this run; report it"
    )


async def main(
    config: RunFile,
    run_dir: RunDir,
    media_root: Path,
    hub: str,
    servers: Sequence[str],
    evaluator: str,
    secret: str,
) -> None:
    """Runs the loop to its end, or until a signal. `evaluator` is the address of the server that
    evaluates while the run goes on, if there is one; `secret` is that of the run."""
    events = EventLog(run_dir.metrics, "orchestrator")
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    router = ControlRouter(AsyncHub(hub, secret), frozenset({TRAINER, *workers}))
    evaluator_clients = [GenerateClient(evaluator, token=secret)] if evaluator else []
    token = config.inference.read_token(secret)
    store = MediaStore(media_root, max_bytes=int(config.media.max_gb * 1e9))
    clients = [
        StockVLLMClient(server, token=token, store=store, banned_token_ids=())
        if config.inference.engine == "stock_vllm"
        else GenerateClient(server, token=token)
        for server in servers
    ]
    run_state = RunState.open(run_dir, config.orchestrator.keep_batches)
    components = build(
        config, run_dir, store, run_state, events, router.send, router.announce, workers, clients,
        next(iter(evaluator_clients), None),
    )  # fmt: skip
    router.components = components
    heartbeat = None if config.inference.servers else run_dir.heartbeat("server")
    leases = ServerLeases((*clients, *evaluator_clients), run_dir.read_id())
    stats_poller = ServerStatsPoller(clients, events, components.observer.caches, heartbeat)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def job() -> None:
        events.write("state", phase="starting")
        for client in (*clients, *evaluator_clients):
            await client.wait_healthy()
        await leases.take()
        await router.wait_until_ready({TRAINER, *workers})
        await _replay_batches(router, components)
        await _train(config, components, events, stop)
        await stats_poller.poll()
        await _finish(router, run_state, store, workers, events)

    helpers = [
        router.keep_receiving(),
        leases.run_when_taken(components.policy.keep_adopting),
        components.rollouts.dispatcher.keep_sending(),
        stats_poller.keep_polling(),
        leases.keep_renewing(),
        ServerHealthWatch((*clients, *evaluator_clients), events).keep_watching(),
        _keep_checking_disk(store),
    ]
    if components.background_evaluator is not None:
        helpers.append(leases.run_when_taken(components.background_evaluator.keep_evaluating))
    try:
        await _run_with_helpers(job(), *helpers)
    finally:
        for client in (*clients, *evaluator_clients):
            await client.close()
        router.hub.close()


async def _replay_batches(router: ControlRouter, components: OrchestratorComponents) -> None:
    """Brings a trainer that starts from a checkpoint to the last batch on disk."""
    at = router.ready[TRAINER].version
    for ready in components.run_state.announcements_after(at):
        await router.announce(ready)
    last = components.run_state.progress.step
    await components.policy.wait_for_version(max(at, last - components.max_lag))


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
    workers: list[str],
    events: EventLog,
) -> None:
    events.write("state", phase="finishing")
    await router.send(TRAINER, FinishTraining(run_state.progress.step))
    await router.finished.wait()
    run_state.remove_covered_batches(router.last_step)
    for worker in workers:
        with contextlib.suppress(ProcessFailed):  # it has just ended by itself
            await router.send(worker, QuitRequest())
    run_state.save()
    events.write(
        "totals",
        run_state.progress.step,
        images_shown=run_state.progress.images_shown,
        # A fresh look: this process learns of what the workers put only now and then.
        images_stored=MediaStore(store.root).count(),
        tokens_sampled=run_state.progress.tokens_sampled,
        forks=run_state.progress.forks,
        door_errors=run_state.progress.refused_requests,
        bad_media=run_state.num_bad_media,
        verdicts=dict(run_state.verdicts),
        seconds=run_state.progress.seconds,
    )


async def _keep_checking_disk(store: MediaStore) -> None:
    """Ends the run when store or disk are full; a step, or an evaluation, may last long."""
    while True:
        await asyncio.sleep(30.0)
        # Counted anew: the workers put images that this process's store does not know of.
        fresh = MediaStore(store.root, max_bytes=store.max_bytes)
        await asyncio.to_thread(fresh.check_room)


async def _run_with_helpers(job: Awaitable[None], *helpers: Awaitable[None]) -> None:
    """Runs until `job` ends; a helper that ends first has failed, and its error is the run's."""
    main_task = asyncio.ensure_future(job)
    others = [asyncio.ensure_future(helper) for helper in helpers]
    try:
        done, _ = await asyncio.wait({main_task, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (main_task, *others):
            task.cancel()
        await asyncio.gather(main_task, *others, return_exceptions=True)
