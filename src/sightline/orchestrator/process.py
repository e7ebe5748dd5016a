"""The orchestrator as a process: connects the others, runs the loop, ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sightline.config import Inference, RunFile
from sightline.errors import ProcessFailed, WireError
from sightline.media import MediaStore
from sightline.monitor import EventLog, RunDir
from sightline.orchestrator import loop
from sightline.orchestrator.build import Built, build
from sightline.orchestrator.busy import BusyNotes
from sightline.orchestrator.evaluate import Evaluator
from sightline.orchestrator.progress import Books
from sightline.rollout.client import GenerateClient
from sightline.rollout.stock import StockClient
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire import control
from sightline.wire.control import (
    Announce,
    Control,
    Finish,
    Finished,
    Held,
    Played,
    Published,
    Quit,
    Ready,
)

TRAINER = "trainer"


@dataclass
class Switchboard:
    """Sends to the other processes and hands what they say to whom it concerns."""

    hub: AsyncHub
    ready: dict[str, Ready] = field(default_factory=dict)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    last_step: int = 0
    """The step that the trainer's last checkpoint covers."""
    on_played: Callable[[Played, str], None] = lambda played, worker: None
    on_published: Callable[[Published], None] = lambda published: None
    on_held: Callable[[str, int], None] = lambda worker, held_bytes: None
    on_lost: Callable[[str, str], None] = lambda worker, why: None

    def __post_init__(self) -> None:
        self._joined = asyncio.Condition()

    async def send(self, peer: str, message: Control) -> None:
        await self.hub.send(peer, control.encode(message))

    async def announce(self, announce: Announce) -> None:
        await self.send(TRAINER, announce)

    async def wait_for(self, names: set[str]) -> None:
        async with self._joined:
            await self._joined.wait_for(lambda: names <= self.ready.keys())

    async def keep_receiving(self) -> None:
        while True:
            peer, data = await self.hub.receive()
            message = control.decode(data)
            match message:
                case Played():
                    self.on_played(message, peer)
                case Published():
                    self.on_published(message)
                case Held():
                    self.on_held(peer, message.held_bytes)
                case Ready():
                    if message.after:
                        self.on_lost(peer, message.after)
                    async with self._joined:
                        self.ready[peer] = message
                        self._joined.notify_all()
                case Finished():
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
    """`evaluator` is the address of the server that evaluates beside the run, if there is one."""
    events = EventLog(run_dir.metrics, "orchestrator")
    board = Switchboard(AsyncHub(hub))
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    evaluating = GenerateClient(evaluator) if evaluator else None
    store = MediaStore(media_root, max_bytes=int(config.media.max_gb * 1e9))
    clients = connect(config.inference, servers, store)
    books = Books.open(run_dir, config.orchestrator.keep_batches)
    built = build(config, run_dir, store, books, events, board, workers, clients, evaluating)
    board.on_played = built.parts.rollouts.played
    board.on_published = built.publish
    board.on_lost = built.parts.rollouts.lost
    board.on_held = built.parts.rollouts.dispatch.held
    beat = None if config.inference.servers else run_dir.beat("server")
    notes = BusyNotes(clients, events, built.caches, beat)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def job() -> None:
        events.write("state", phase="starting")
        for each in (*clients, *([] if evaluating is None else [evaluating])):
            await each.wait_healthy()
        await board.wait_for({TRAINER, *workers})
        await _catch_up(board, books, built.parts)
        await _train(config, built, events, stop)
        with contextlib.suppress(OSError, ValueError):
            await notes.take()
        await _finish(board, books, store, workers, events)

    began = time.monotonic()
    before = books.progress.seconds
    try:
        await _first_of(
            job(),
            board.keep_receiving(),
            built.parts.policy.keep_adopting(),
            built.parts.rollouts.dispatch.keep_sending(),
            _keep_time(books, before, began),
            notes.keep_taking(),
            _keep_room(store),
            *([] if built.beside is None else [built.beside.keep_evaluating()]),
        )
    finally:
        for each in (*clients, *([] if evaluating is None else [evaluating])):
            await each.close()
        board.hub.close()


def connect(
    inference: Inference, servers: Sequence[str], store: MediaStore
) -> list[GenerateClient]:
    """A client for each server, to give it weights and to ask how it is."""
    if inference.engine == "stock_vllm":
        return [StockClient(server, store=store, banned=()) for server in servers]
    return [GenerateClient(server) for server in servers]


async def _catch_up(board: Switchboard, books: Books, parts: loop.Parts) -> None:
    """Brings a trainer that starts from a checkpoint to the last batch on disk."""
    at = board.ready[TRAINER].version
    for announce in books.announcements_after(at):
        await board.announce(announce)
    await parts.policy.at_least(max(at, books.progress.step - parts.max_lag))


async def _train(config: RunFile, built: Built, events: EventLog, stop: asyncio.Event) -> None:
    """Evaluates, trains, evaluates; cut short, without loss, when `stop` is set."""
    books, parts, evaluator = built.books, built.parts, built.evaluator

    async def whole() -> None:
        last = config.run.steps
        await _evaluate(evaluator, books, events, "start", 0)
        events.write("state", phase="training")
        await loop.run(parts, range(books.progress.step + 1, last + 1))
        await parts.policy.at_least(last)
        if built.beside is not None:
            await built.beside.drain()
        await parts.rollouts.cancel()
        await _evaluate(evaluator, books, events, "final", last, exchange=True)
        if built.beside is not None:
            await built.beside.consider_final(last)

    stopping = asyncio.ensure_future(stop.wait())
    working = asyncio.ensure_future(whole())
    await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        stopping.cancel()
        working.result()
    else:
        events.write("state", phase="stopping")
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def _evaluate(
    evaluator: Evaluator,
    books: Books,
    events: EventLog,
    name: str,
    step: int,
    exchange: bool = False,
) -> None:
    """Evaluates once: what an earlier sitting has played is not played again."""
    key = f"{name}_{step:06d}"
    if key in books.progress.evals:
        return
    events.write("state", phase="evaluating")
    measure = await evaluator.evaluate(name, step, exchange)
    if measure is not None:
        books.progress.evals[key] = measure
        books.save()


async def _finish(
    board: Switchboard, books: Books, store: MediaStore, workers: list[str], events: EventLog
) -> None:
    events.write("state", phase="finishing")
    await board.send(TRAINER, Finish(books.progress.step))
    await board.finished.wait()
    books.forget_batches(board.last_step)
    for worker in workers:
        with contextlib.suppress(ProcessFailed):  # it has just ended by itself
            await board.send(worker, Quit())
    books.save()
    events.write(
        "totals",
        books.progress.step,
        images_shown=books.progress.images_shown,
        # A fresh look: this process learns of what the workers put only now and then.
        images_stored=MediaStore(store.root).count(),
        tokens_sampled=books.progress.tokens_sampled,
        forks=books.progress.forks,
        door_errors=books.progress.door_errors,
        bad_media=books.num_bad_media,
        verdicts=dict(books.verdicts),
        seconds=books.progress.seconds,
    )


async def _keep_time(books: Books, before: float, began: float) -> None:
    while True:
        books.progress.seconds = before + time.monotonic() - began
        await asyncio.sleep(0.2)


async def _keep_room(store: MediaStore) -> None:
    """Ends the run when store or disk are full; a step, or an evaluation, may last long."""
    while True:
        await asyncio.sleep(30.0)
        # Counted anew: the workers put images that this process's store does not know of.
        fresh = MediaStore(store.root, max_bytes=store.max_bytes)
        await asyncio.to_thread(fresh.check_room)


async def _first_of(job: Awaitable[None], *helpers: Awaitable[None]) -> None:
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
