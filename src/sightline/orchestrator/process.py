"""The orchestrator process: connects to the others, runs the loop, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from sightline.config import RunFile
from sightline.errors import MediaError, ProcessFailed
from sightline.media import MediaStore, open_store
from sightline.media.stored_file import open_blobs
from sightline.orchestrator.build import build, build_client, build_servers
from sightline.orchestrator.control_router import TRAINER, ControlRouter
from sightline.orchestrator.remote_files import RemoteFiles
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.server_pool import ServerPool, run_until_first
from sightline.orchestrator.step_metrics import ServerStatsPoller
from sightline.regular_file import read_text
from sightline.rollout.client import GenerateClient
from sightline.run import EventLog, RunDir
from sightline.run.server_changes import list_wanted
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire.control import QuitRequest

TELL_EVERY_S = 0.02
LOOK_EVERY_S = 0.5

NewClient = Callable[..., GenerateClient]


async def main(
    config: RunFile,
    run_dir: RunDir,
    media_root: Path | str,
    hub: str,
    servers: Sequence[str],
    evaluator: str,
    secret: str,
) -> None:
    """Run the loop until it ends or a signal arrives. `evaluator` is the address of the server
    for background evaluation, if there is one."""
    events = EventLog(run_dir.metrics, "orchestrator")
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    # Servers on other machines join and report their addresses.
    placed = list(filter(config.launch.is_elsewhere, config.server_names))
    for name in placed:
        run_dir.server_address(name).unlink(missing_ok=True)
    router = ControlRouter(AsyncHub(hub, secret), frozenset({TRAINER, *workers, *placed}))
    store = open_store(media_root, **config.media.store_options(for_control=True))
    new_client = partial(build_client, config, secret)
    pool = build_servers(config, run_dir, events, secret, servers)
    evaluators = None
    if evaluator:
        joined = run_dir.heartbeat("evaluator")
        client = new_client(evaluator, is_own=True)
        evaluators = ServerPool(run_dir.read_id(), events, [client], 0, joined_file=joined)
    run_state = RunState.open(run_dir, config.orchestrator.keep_batches)
    orchestrator = build(
        config, run_dir, store, run_state, events, router.send, router.announce, workers, pool,
        evaluators,
    )  # fmt: skip
    router.orchestrator = orchestrator
    if config.launch.has_other_machines:
        router.remote_files = _open_remote_files(config, run_dir, media_root)
    if config.launch.is_elsewhere(TRAINER):
        router.trainer_error_file = run_dir.error_file(TRAINER)
    ending = placed if config.launch.on == "kubernetes" else []
    stats_poller = ServerStatsPoller(pool.list_clients, events)
    pools = [pool] if evaluators is None else [pool, evaluators]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def job() -> None:
        events.write("state", phase="starting")
        for each in pools:
            await each.wait_joined()
        await asyncio.to_thread(store.renew_lease, run_dir.read_id())
        await router.wait_until_ready({TRAINER, *workers})
        at, last = router.ready[TRAINER].version, run_state.progress.step
        await orchestrator.policy.wait_for_version(max(at, last - config.orchestrator.max_lag))
        await run_until_first(orchestrator.run(), stop.wait())
        if stop.is_set():  # a signal: the run stops early, without losing progress
            events.write("state", phase="stopping")
        await stats_poller.poll()
        # This also ends servers that a cluster started, which nothing else does.
        await _finish(router, run_state, store, [*workers, *ending], events)
        await asyncio.to_thread(store.end_lease, run_dir.read_id())

    helpers = [
        router.keep_receiving(),
        orchestrator.policy.keep_adopting(),
        orchestrator.rollouts.dispatcher.keep_sending(),
        stats_poller.keep_polling(),
        *(each.keep_serving() for each in pools),
        _keep_telling_workers(router, pool),
        _keep_server_changes(run_dir, config.inference.servers, pool, new_client),
        _keep_placing_servers(run_dir, placed, pool, new_client),
        _keep_checking_store(store, run_dir.read_id()),
        orchestrator.teacher.keep_lease(),
    ]
    if orchestrator.background_evaluator is not None:
        helpers.append(orchestrator.background_evaluator.keep_evaluating())
    try:
        # If a helper ends before the job, it has failed, and its error ends the run.
        await run_until_first(job(), *helpers)
    finally:
        for each in pools:
            await each.close()
        router.hub.close()


def _open_remote_files(config: RunFile, run_dir: RunDir, media_root: str | Path) -> RemoteFiles:
    blobs = open_blobs(media_root, config.media.read_token(for_control=True))
    token = config.media.read_service_token()
    return RemoteFiles(run_dir, Path(config.model.path), blobs, token)


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
        with contextlib.suppress(ProcessFailed):  # it has already ended
            await router.send(peer, QuitRequest())
    run_state.save()
    events.write(
        "totals",
        run_state.progress.step,
        images_shown=run_state.progress.images_shown,
        # Not `count`, which includes the workers' images only after a delay.
        images_stored=sum(1 for _ in store.digests()),
        tokens_sampled=run_state.progress.tokens_sampled,
        forks=run_state.progress.forks,
        door_errors=run_state.progress.refused_requests,
        bad_media=run_state.num_bad_media,
        verdicts=dict(run_state.verdicts),
        seconds=run_state.progress.seconds,
    )


async def _keep_telling_workers(router: ControlRouter, pool: ServerPool) -> None:
    """Send the workers every change to the list of servers."""
    while True:
        if (now := pool.status) == router.servers:
            await pool.changed.wait()
            continue
        await router.tell_servers(now)
        await asyncio.sleep(TELL_EVERY_S)


async def _keep_server_changes(
    run_dir: RunDir, base: Sequence[str], pool: ServerPool, new_client: NewClient
) -> None:
    """Add and remove servers at users' request, and report their states in a file."""
    seen, reported = -1, b""
    while True:
        with contextlib.suppress(FileNotFoundError):
            if (now := run_dir.servers.stat().st_mtime_ns) != seen:
                seen = now
                states = list_wanted(run_dir, base)
                await pool.apply(states, lambda url: new_client(url, is_own=False))
        if (report := msgspec.json.encode(pool.reports)) != reported:
            reported = report
            # Not synced: the report is useless once the processes have ended.
            part = run_dir.server_report.with_suffix(".part")
            part.write_bytes(report)
            part.replace(run_dir.server_report)
        await asyncio.sleep(LOOK_EVERY_S)


async def _keep_placing_servers(
    run_dir: RunDir, names: Sequence[str], pool: ServerPool, new_client: NewClient
) -> None:
    """Add each of the run's remote servers when it reports its address."""
    known: dict[str, str] = {}
    while True:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                address = read_text(run_dir.server_address(name))
                if address != known.get(name):
                    known[name] = address
                    client = new_client(address, is_own=True)
                    await pool.place(name, client, run_dir.heartbeat(name))
        await asyncio.sleep(LOOK_EVERY_S)


async def _keep_checking_store(store: MediaStore, run_id: str) -> None:
    """Renew the run's lease on its images, and raise if the store or disk is full.

    Runs in the background, because a step or an evaluation may take a long time.
    """

    def check() -> None:
        try:
            store.renew_lease(run_id)
            store.check_room()
        except MediaError as error:
            if type(error) is not MediaError or not isinstance(error.__cause__, OSError):
                raise
            # This is temporary, or a reader that needs an image raises.
            print(error, file=sys.stderr, flush=True)

    while True:
        await asyncio.sleep(30.0)
        await asyncio.to_thread(check)
