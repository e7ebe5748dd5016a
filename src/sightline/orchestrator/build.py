"""Construct the orchestrator from a run file."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from sightline.algo.algorithms import load_algorithm
from sightline.algo.registry import load_filters
from sightline.algo.verdicts import GroupFilter
from sightline.config import RunFile
from sightline.config.secret_refs import resolve_secret
from sightline.families import load_family, load_renderer
from sightline.families.checkpoint_files import resolve_checkpoint
from sightline.media import MediaStore
from sightline.media.stored_file import open_blobs
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.evaluator import BackgroundEvaluator, Evaluator, RewardGoal
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.policies import UNKNOWN_VERSION, PolicyUpdater, PublishedPolicies
from sightline.orchestrator.replay import ReplayBuffer
from sightline.orchestrator.rollout_scheduler import (
    RolloutDispatcher,
    RolloutScheduler,
    SendControl,
)
from sightline.orchestrator.run_state import Progress, RunState
from sightline.orchestrator.server_pool import ServerPool
from sightline.orchestrator.step_metrics import StepMetrics
from sightline.orchestrator.task_order import TaskOrder, load_task_order
from sightline.orchestrator.teacher import ServedTeacher
from sightline.rollout.client import GenerateClient
from sightline.rollout.engines import load_engine
from sightline.run import EventLog, RunDir
from sightline.run.server_changes import REMOVE, list_wanted
from sightline.transport.zmq_channel import derive_key
from sightline.wire.control import BatchReady
from sightline.wire.file import check_disk_room, check_writable


def open_best_checkpoint(
    config: RunFile, run_dir: RunDir, run_state: RunState, events: EventLog, blobs: MediaStore
) -> BestCheckpoint:
    """Open the best checkpoint so far. Report a damaged one and discard it."""
    best = BestCheckpoint(Path(config.model.path), run_dir.checkpoints / "best", run_state, blobs)
    if problem := best.find_problem():
        print(f"refused: {problem}", file=sys.stderr, flush=True)
        events.write("checkpoint_refused", run_state.progress.best_step, problem=problem)
        best.forget()
    return best


def build_client(config: RunFile, secret: str, url: str, is_own: bool) -> GenerateClient:
    """Build the client for a server. Tokens of the run's own servers come from its secret."""
    inference = config.inference
    token = derive_key(secret, "control") if is_own else inference.read_token(for_control=True)
    return load_engine(inference.engine).build_client(url, token=token)


def build_servers(
    config: RunFile, run_dir: RunDir, events: EventLog, secret: str, urls: Sequence[str]
) -> ServerPool:
    is_own = not config.inference.servers
    states = list_wanted(run_dir, config.inference.servers)
    return ServerPool(
        run_dir.read_id(),
        events,
        [
            build_client(config, secret, url, is_own)
            for url in urls
            if url and states.get(url) != REMOVE
        ],
        # The weights of external servers are unknown until they adopt a version.
        first_version=0 if is_own else UNKNOWN_VERSION,
        outage_timeout_s=config.inference.outage_timeout_s,
        joined_file=run_dir.heartbeat("server") if is_own else None,
    )


def build_teacher(config: RunFile, store: MediaStore, progress: Progress) -> ServedTeacher | None:
    """Build the client of the teacher's server, if there is one."""
    settings = config.algorithm
    if not settings.teacher_server:
        return None
    folder = resolve_checkpoint(settings.teacher)
    family = load_family(folder)
    client = GenerateClient(
        settings.teacher_server,
        token=resolve_secret(settings.teacher_token, "[algorithm] teacher_token"),
        deadline_s=config.inference.outage_timeout_s,
    )
    pads = load_renderer(folder, store, family).pad_token_ids
    return ServedTeacher(client, family, pads[0] if pads else -1, progress)


def build(
    config: RunFile,
    run_dir: RunDir,
    store: MediaStore,
    run_state: RunState,
    events: EventLog,
    send: SendControl,
    announce: Callable[[BatchReady], Awaitable[None]],
    workers: list[str],
    servers: ServerPool,
    evaluator_servers: ServerPool | None,
) -> Orchestrator:
    settings = config.orchestrator
    blobs = open_blobs(store.root, config.media.read_token(for_control=True))
    policies = PublishedPolicies(run_dir.read_id(), run_dir.weights, not config.inference.servers)
    progress = run_state.progress
    task_order = TaskOrder(
        load_task_order(settings),
        config.run.seed,
        progress.tasks,
        lambda: progress.step / config.run.steps,
        config.env.mix,
        dict(progress.mix_groups),
    )
    rollouts = RolloutScheduler(
        RolloutDispatcher(send, workers, config.rollout.max_in_flight),
        group_size=settings.group_size,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        next_group=progress.next_group,
        undecided_groups={g: progress.open_tasks.get(g, g) for g in progress.open_groups},
        choose_task=task_order.choose,
        check_trace=policies.check_trace,
    )
    policy = PolicyUpdater(events, [servers.adopt], run_dir.weights, blobs, servers.first_version)
    observer = StepMetrics(run_state, policy, store, events, rollouts, config.run.steps)
    evals = config.eval
    evaluator = Evaluator(rollouts, run_state, events, run_dir, evals.tasks, evals.temperature)
    stop_at = config.run.stop_at
    goal = None if stop_at is None else RewardGoal(stop_at, evaluator, policy)
    background_evaluator = None
    if evaluator_servers is not None:
        best_checkpoint = open_best_checkpoint(config, run_dir, run_state, events, blobs)
        background_evaluator = BackgroundEvaluator(
            evaluator, policy, best_checkpoint, next(iter(evaluator_servers.servers)),
            evaluator_servers.adopt, config.eval.every, config.run.steps,
        )  # fmt: skip

    def check_room() -> None:
        store.check_room()
        check_disk_room(run_dir.path)
        for folder in (run_dir.logs, store.root):  # heartbeats and images
            if isinstance(folder, Path) and folder.is_dir():
                check_writable(folder)

    return Orchestrator(
        rollouts=rollouts,
        policy=policy,
        policies=policies,
        group_filter=GroupFilter(
            max_lag=settings.max_lag,
            algorithm=load_algorithm(config.algorithm),
            filters=load_filters(config.filters),
            keep_truncated=config.rollout.keep_truncated,
        ),
        task_order=task_order,
        replay=ReplayBuffer.open(run_dir, settings, config.run.seed),
        teacher=build_teacher(config, store, progress),
        run_state=run_state,
        observer=observer,
        evaluator=evaluator,
        background_evaluator=background_evaluator,
        goal=goal,
        announce=announce,
        check_room=check_room,
        settings=settings,
        max_bad_fraction=config.media.max_bad_fraction,
        last_step=config.run.steps,
    )
