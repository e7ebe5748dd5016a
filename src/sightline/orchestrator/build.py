"""Constructs the orchestrator's parts from a run file. No flow here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sightline.config import RunFile
from sightline.media import MediaStore
from sightline.monitor import EventLog, RunDir
from sightline.orchestrator.beside import Beside
from sightline.orchestrator.best import Best
from sightline.orchestrator.evaluate import Evaluator
from sightline.orchestrator.judge import Judge, build_filters
from sightline.orchestrator.loop import Parts
from sightline.orchestrator.policy import UNKNOWN, Policy
from sightline.orchestrator.progress import Books
from sightline.orchestrator.rollouts import Rollouts
from sightline.orchestrator.watch import StepWatcher
from sightline.rollout.client import GenerateClient
from sightline.wire.control import Announce, Control, Published


class Board(Protocol):
    async def send(self, peer: str, message: Control) -> None: ...

    async def announce(self, announce: Announce) -> None: ...


@dataclass
class Built:
    parts: Parts
    evaluator: Evaluator
    books: Books
    caches: dict[str, dict[str, float]]
    """Of the server; shared with what reports them."""
    beside: Beside | None

    def publish(self, published: Published) -> None:
        """What follows from a new version: engines adopt it, covered batches go."""
        if bad := int(published.metrics.get("bad_media") or 0):
            self.books.progress.bad_samples[str(published.version)] = bad
        self.parts.judge.epochs[published.version] = published.epoch
        self.books.forget_batches(published.checkpoint_step)
        if self.beside is not None:
            self.beside.publish(published)
        self.parts.policy.publish(published)


def build(
    config: RunFile,
    run_dir: RunDir,
    store: MediaStore,
    books: Books,
    events: EventLog,
    board: Board,
    workers: list[str],
    clients: Sequence[GenerateClient],
    evaluating: GenerateClient | None,
) -> Built:
    settings = config.orchestrator
    rollouts = Rollouts(
        send=board.send,
        workers=workers,
        group_size=settings.group_size,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        next_group=books.progress.next_group,
        again=list(books.progress.open_groups),
        max_in_flight=config.rollout.max_in_flight,
        max_bytes=config.rollout.max_in_flight_mb * 1_000_000,
    )
    # Servers that ran before the run hold whatever they hold, until they adopt its first weights.
    held = UNKNOWN if config.inference.servers else 0
    policy = Policy([client.adopt for client in clients], run_dir.weights, held)
    caches: dict[str, dict[str, float]] = {}
    watcher = StepWatcher(
        books,
        policy,
        store,
        events,
        rollouts,
        config.run.steps,
        config.media.max_bad_fraction,
        caches,
    )
    parts = Parts(
        rollouts=rollouts,
        policy=policy,
        judge=Judge(
            max_lag=settings.max_lag,
            advantage=settings.advantage,
            by=settings.credit,
            filters=build_filters(config.filters),
            keep_without_signal=config.trainer.kl_weight > 0,
            count_truncated=config.rollout.count_truncated,
        ),
        books=books,
        trainer=board,
        watcher=watcher,
        groups_per_step=settings.groups_per_step,
        max_lag=settings.max_lag,
        probe_every=settings.probe_every,
        max_empty_batches=settings.max_empty_batches,
        max_replaced=int(settings.max_replaced * settings.groups_per_step),
        last_step=config.run.steps,
        check_room=store.check_room,
    )
    evaluator = Evaluator(
        rollouts, books, events, run_dir, config.eval.tasks, config.eval.temperature
    )
    best = Best(Path(config.model.path), run_dir.checkpoints / "best", books)
    beside = None
    if evaluating is not None:
        beside = Beside(
            evaluator, policy, best, books, events, evaluating, config.eval.every, config.run.steps
        )
    return Built(parts, evaluator, books, caches, beside)
