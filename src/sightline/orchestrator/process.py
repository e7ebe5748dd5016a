"""The orchestrator as a process: builds its components, connects the others, runs the loop, ends
in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.algo.registry import load_advantage, load_credit, load_filters
from sightline.algo.verdicts import GroupJudge
from sightline.config import RunFile
from sightline.errors import ProcessFailed, WireError
from sightline.media import MediaStore
from sightline.orchestrator import loop
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.dispatcher import RolloutDispatcher
from sightline.orchestrator.evaluator import BackgroundEvaluator, Evaluator
from sightline.orchestrator.loop import LoopComponents
from sightline.orchestrator.policy_updater import UNKNOWN_VERSION, PolicyUpdater
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.server_stats import ServerStatsPoller
from sightline.orchestrator.step_metrics import StepMetrics
from sightline.rollout.client import GenerateClient
from sightline.rollout.stock_vllm_client import StockVLLMClient
from sightline.run import EventLog, RunDir
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire import control
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
class OrchestratorComponents(LoopComponents):
    """What the loop runs on, and what evaluates and reports meanwhile."""

    evaluator: Evaluator
    background_evaluator: BackgroundEvaluator | None

    def publish(self, published: PublishedWeights) -> None:
        """Has the engines adopt a new version, and removes the batches that it covers."""
        if bad := int(published.metrics.get("bad_media") or 0):
            self.run_state.progress.bad_samples[str(published.version)] = bad
        self.judge.epochs[published.version] = published.epoch
        self.run_state.remove_covered_batches(published.checkpoint_step)
        if self.background_evaluator is not None:
            self.background_evaluator.publish(published)
        self.policy.publish(published)


@dataclass
class ControlRouter:
    """Sends to the other processes and hands what they send to whom it concerns."""

    hub: AsyncHub
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
            message = control.decode(data)
            match message:
                case RolloutResult():
                    rollouts.on_result(message, peer)
                case PublishedWeights():
                    self.components.publish(message)
                case MemoryReport():
                    rollouts.dispatcher.on_memory_report(peer, message.held_bytes)
                case ProcessReady():
                    if message.after:
                        rollouts.on_worker_lost(peer, message.after)
                    async with self._ready_changed:
                        self.ready[peer] = message
                        self._ready_changed.notify_all()
                case TrainingFinished():
                    self.last_step = message.step
                    self.finished.set()
                case _:
                    raise WireError(
                        f"{peer} sent a {type(message).__name__}", "this is a bug; report it"
                    )


async def main(
    config: RunFile,
    run_dir: RunDir,
    media_root: Path,
    hub: str,
    servers: Sequence[str],
    evaluator: str = "",
) -> None:
    """Runs the loop to its end, or until a signal. `evaluator` is the address of the server that
    evaluates while the run goes on, if there is one."""
    events = EventLog(run_dir.metrics, "orchestrator")
    router = ControlRouter(AsyncHub(hub))
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    evaluator_clients = [GenerateClient(evaluator)] if evaluator else []
    store = MediaStore(media_root, max_bytes=int(config.media.max_gb * 1e9))
    clients = [
        StockVLLMClient(server, store=store, banned_token_ids=())
        if config.inference.engine == "stock_vllm"
        else GenerateClient(server)
        for server in servers
    ]
    components = _build_components(
        config, run_dir, store, events, router, workers, clients, evaluator_clients
    )
    router.components = components
    heartbeat = None if config.inference.servers else run_dir.heartbeat("server")
    stats_poller = ServerStatsPoller(clients, events, components.observer.caches, heartbeat)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def job() -> None:
        events.write("state", phase="starting")
        for client in (*clients, *evaluator_clients):
            await client.wait_healthy()
        await router.wait_until_ready({TRAINER, *workers})
        await _replay_batches(router, components)
        await _train(config, components, events, stop)
        await stats_poller.poll()
        await _finish(router, components.run_state, store, workers, events)

    helpers = [
        router.keep_receiving(),
        components.policy.keep_adopting(),
        components.rollouts.dispatcher.keep_sending(),
        stats_poller.keep_polling(),
        _keep_checking_disk(store),
    ]
    if components.background_evaluator is not None:
        helpers.append(components.background_evaluator.keep_evaluating())
    try:
        await _run_with_helpers(job(), *helpers)
    finally:
        for client in (*clients, *evaluator_clients):
            await client.close()
        router.hub.close()


def _build_components(
    config: RunFile,
    run_dir: RunDir,
    store: MediaStore,
    events: EventLog,
    router: ControlRouter,
    workers: list[str],
    clients: Sequence[GenerateClient],
    evaluator_clients: Sequence[GenerateClient],
) -> OrchestratorComponents:
    settings = config.orchestrator
    run_state = RunState.open(run_dir, settings.keep_batches)
    rollouts = RolloutScheduler(
        RolloutDispatcher(
            router.send,
            workers,
            config.rollout.max_in_flight,
            config.rollout.max_in_flight_mb * 1_000_000,
        ),
        group_size=settings.group_size,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        next_group=run_state.progress.next_group,
        unjudged_groups=list(run_state.progress.open_groups),
    )
    # Servers that ran before the run hold whatever they hold, until they adopt its first weights.
    first_version = UNKNOWN_VERSION if config.inference.servers else 0
    policy = PolicyUpdater([client.adopt for client in clients], run_dir.weights, first_version)
    observer = StepMetrics(run_state, policy, store, events, rollouts, config.run.steps)
    evaluator = Evaluator(
        rollouts, run_state, events, run_dir, config.eval.tasks, config.eval.temperature
    )
    background_evaluator = None
    if evaluator_clients:
        best_checkpoint = BestCheckpoint(
            Path(config.model.path), run_dir.checkpoints / "best", run_state
        )
        background_evaluator = BackgroundEvaluator(
            evaluator, policy, best_checkpoint, run_state, events, evaluator_clients[0],
            config.eval.every, config.run.steps,
        )  # fmt: skip
    return OrchestratorComponents(
        rollouts=rollouts,
        policy=policy,
        judge=GroupJudge(
            max_lag=settings.max_lag,
            advantage=load_advantage(settings.advantage, settings.advantage_args),
            credit=load_credit(settings.credit),
            filters=load_filters(config.filters),
            keep_without_signal=config.trainer.kl_coef > 0,
            keep_truncated=config.rollout.keep_truncated,
        ),
        run_state=run_state,
        announce=router.announce,
        observer=observer,
        groups_per_step=settings.groups_per_step,
        max_lag=settings.max_lag,
        diagnostics_every=settings.diagnostics_every,
        max_empty_batches=settings.max_empty_batches,
        max_resampled_groups=int(settings.max_resample_fraction * settings.groups_per_step),
        max_bad_fraction=config.media.max_bad_fraction,
        last_step=config.run.steps,
        check_room=store.check_room,
        evaluator=evaluator,
        background_evaluator=background_evaluator,
    )


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
        last = config.run.steps
        await evaluator.evaluate("start", 0)
        events.write("state", phase="training")
        await loop.run(components, range(components.run_state.progress.step + 1, last + 1))
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
