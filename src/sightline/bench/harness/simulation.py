"""A run of any size, played by events: rollouts, servers, trainer, versions and failures.

Everything takes the seconds that a measurement or a setting says; nothing is computed. What a
server decodes is one event a turn: all its rows get their tokens at one pace, which hangs on their
number, and stand still while a prompt is computed or weights are taken.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

TOKEN_BYTES = 8
"""Of a token on the wire: a request has the ids of its prompt, a batch ids, masks and logprobs."""
NUM_COMPARED = 8
"""Servers whose loads a rollout that starts compares."""
FSDP_PASSES = 3
"""How often a trainer's ranks exchange all weights in a micro-batch: gathered twice, scattered
once."""


@dataclass(frozen=True)
class Workload:
    """What a run plays and trains."""

    groups_per_step: int
    group_size: int
    max_lag: int
    turns: int
    prompt_tokens: int
    """New ones of a turn, the image's included."""
    answer_tokens: int
    image_bytes: int
    """Of a turn, as they are stored."""
    environment_s: float
    """Seconds that a worker computes for a turn: environment, rendering, the request."""
    wait_s: float = 0.0
    """Seconds a turn in which the environment waits, and its worker plays others."""


@dataclass(frozen=True)
class Speeds:
    """What one server and one GPU of the trainer do."""

    decode_step_s: float
    """Seconds of a decoding step without rows: the weights are read."""
    decode_row_s: float
    """What every row adds to it."""
    prefill_tokens_per_s: float
    train_tokens_per_s: float
    """Of one GPU, context included."""
    step_s: float
    """Of a training step, whatever it trains: the optimizer, and what else has to be done once."""
    publish_s: float
    """From the optimizer step until servers may take the version, without the bytes' way."""
    adopt_s: float
    """In which a server stands still for a version."""
    model_bytes: int
    start_s: float = 60.0
    """Until a process that was lost works again."""


@dataclass(frozen=True)
class Machines:
    """What a run is played on."""

    servers: int
    """Each with `gpus_per_server`."""
    trainer_gpus: int
    workers: int
    gpus_per_server: int = 1
    max_num_seqs: int = 256
    link_bytes_per_s: float = 12.5e9
    """Of every machine, each way."""
    store_bytes_per_s: float = inf
    """Of what holds images and weights, to all machines together."""
    gpus_per_machine: int = 8
    micro_batches: int = 1
    """Of a step, on each rank."""
    cores: float = inf
    """That all processes share, where they are on one machine without GPUs."""
    failures_per_gpu_hour: float = 0.0
    checkpoint_every: int = 25


@dataclass
class Predicted:
    steps: int
    seconds: float
    """Of the steps behind the warm-up."""
    step_s: list[float]
    tokens_sampled: int
    lag: float
    """In versions, the mean of all rollouts that trained."""
    busy: dict[str, float]
    """Share of the time, by what might be the bottleneck."""
    bytes_by_wire: dict[str, float]
    failures: int
    prefilled_again: int
    """Tokens of turns that a failure sent elsewhere."""

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass
class _Rollout:
    group: int
    worker: int
    turn: int = 0
    server: _Server | None = None


@dataclass
class _Server:
    """Rows are served alike: one ends when `served`, the tokens of each so far, reaches its end."""

    served: float = 0.0
    since: float = 0.0
    rows: list[tuple[float, int, _Rollout]] = field(default_factory=list)
    queue: deque[_Rollout] = field(default_factory=deque)
    prefilling: _Rollout | None = None
    still_until: float = 0.0
    plan: int = 0
    """Counts what was planned: only the last is still true."""
    busy_s: float = 0.0
    is_up: bool = True
    is_computing: bool = False

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.queue) + (self.prefilling is not None)


class Simulation:
    """Plays `steps` steps; the first `warmup` of them are not counted."""

    def __init__(self, work: Workload, speeds: Speeds, machines: Machines, seed: int = 0) -> None:
        self.work, self.speeds, self.machines = work, speeds, machines
        self.rng = random.Random(seed)
        self.now = self.wall = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.servers = [_Server() for _ in range(machines.servers)]
        self.workers = [0.0] * machines.workers
        """Until when each computes."""
        self.worker_s = self.trainer_s = 0.0
        self._num_computing = 0
        self.open_groups: dict[int, int] = {}
        self.group_versions: dict[int, int] = {}
        self.finished: deque[int] = deque()
        self.next_group = 0
        self.trained = 0
        self.in_use = 0
        """The version that every server has."""
        self.is_training = False
        self.ends: list[float] = []
        self.lags: list[int] = []
        self.bytes: dict[str, float] = dict.fromkeys(
            ("images to the store", "images to servers", "images to the trainer", "weights",
             "requests", "batches"), 0.0,
        )  # fmt: skip
        self.failures = self.prefilled_again = 0

    def run(self, steps: int, warmup: int = 1) -> Predicted:
        self._start_groups()
        for server in self.servers:
            self._plan_failure(self.machines.gpus_per_server, partial(self._lose, server))
        counted_from: tuple[float, float, dict[str, float], dict[str, float]] | None = None
        while self.trained < steps:
            when, _, act = heapq.heappop(self._events)
            sharing = min(1.0, self.machines.cores / max(self._num_computing, 1))
            self.wall += (when - self.now) / sharing
            self.now = when
            act()
            if counted_from is None and self.trained >= warmup:
                counted_from = self.wall, self.now, self._seconds(), dict(self.bytes)
        assert counted_from is not None
        since, played_since, seconds, sent = counted_from
        total, played = self.wall - since, self.now - played_since
        width = {"servers": len(self.servers), "trainer": 1, "workers": len(self.workers)}
        wires = {name: count - sent[name] for name, count in self.bytes.items()}
        busy = {
            name: (value - seconds[name]) / played / width[name]
            for name, value in self._seconds().items()
        }
        busy |= {f"wire: {name}": sec / total for name, sec in self._wire_seconds(wires).items()}
        counted = steps - warmup
        return Predicted(
            steps=counted,
            seconds=total,
            step_s=[b - a for a, b in zip(self.ends, self.ends[1:], strict=False)],
            tokens_sampled=counted * self._rollouts_per_step * self.work.turns
            * self.work.answer_tokens,
            lag=sum(self.lags) / max(len(self.lags), 1),
            busy=busy,
            bytes_by_wire={name: count / total for name, count in wires.items()},
            failures=self.failures,
            prefilled_again=self.prefilled_again,
        )  # fmt: skip

    @property
    def _rollouts_per_step(self) -> int:
        return self.work.groups_per_step * self.work.group_size

    def _seconds(self) -> dict[str, float]:
        served = sum(server.busy_s for server in self.servers)
        return {"servers": served, "trainer": self.trainer_s, "workers": self.worker_s}

    def _wire_seconds(self, sent: dict[str, float]) -> dict[str, float]:
        """Seconds that each wire needs for its bytes: the links of those that share them."""
        m = self.machines
        per_machine = max(m.gpus_per_machine // m.gpus_per_server, 1)
        num_serving = -(-m.servers // per_machine)
        num_training = -(-m.trainer_gpus // m.gpus_per_machine)
        link, store = m.link_bytes_per_s, m.store_bytes_per_s
        down = (sent["images to servers"] + sent["weights"]) / num_serving / link
        return {
            "into servers": down,
            "into the trainer": sent["images to the trainer"] / num_training / link,
            "out of the trainer": sent["weights"] / max(m.servers, 1) / link,
            "orchestrator": (sent["batches"] + sent["requests"] / max(m.workers, 1)) / link,
            "store": (
                sum(n for wire, n in sent.items() if "images" in wire) + sent["weights"]
            ) / store,
        }  # fmt: skip

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    # --- rollouts

    def _start_groups(self) -> None:
        """As far ahead as the lag allows."""
        w = self.work
        while self.next_group // w.groups_per_step <= self.in_use + w.max_lag:
            group, self.next_group = self.next_group, self.next_group + 1
            self.open_groups[group] = w.group_size
            self.group_versions[group] = self.in_use
            for member in range(w.group_size):
                worker = (group * w.group_size + member) % len(self.workers)
                self._act(_Rollout(group, worker))

    def _act(self, rollout: _Rollout) -> None:
        """The worker computes the turn's observation and asks for an answer."""
        begin = max(self.now + self.work.wait_s, self.workers[rollout.worker])
        end = self.workers[rollout.worker] = begin + self.work.environment_s
        self.worker_s += self.work.environment_s

        def start() -> None:
            self._num_computing += 1

        def done() -> None:
            self._num_computing -= 1
            if rollout.turn == self.work.turns:
                self._finish(rollout)
            else:
                self._ask(rollout)

        if self.machines.cores == inf:
            self._num_computing += 1
        else:
            self._at(begin, start)
        self._at(end, done)

    def _ask(self, rollout: _Rollout) -> None:
        server = rollout.server
        if server is None or not server.is_up:
            up = [one for one in self.servers if one.is_up]
            if not up:  # until one is back
                self._at(self.now + 1.0, lambda: self._ask(rollout))
                return
            some = up if len(up) <= NUM_COMPARED else self.rng.sample(up, NUM_COMPARED)
            server = rollout.server = min(some, key=lambda one: one.load)
        self.bytes["images to the store"] += self.work.image_bytes
        self.bytes["images to servers"] += self.work.image_bytes
        self.bytes["requests"] += TOKEN_BYTES * (rollout.turn + 1) * self._turn_tokens
        server.queue.append(rollout)
        self._advance(server)
        self._plan(server)

    @property
    def _turn_tokens(self) -> int:
        return self.work.prompt_tokens + self.work.answer_tokens

    def _finish(self, rollout: _Rollout) -> None:
        self.open_groups[rollout.group] -= 1
        if self.open_groups[rollout.group]:
            return
        del self.open_groups[rollout.group]
        self.finished.append(rollout.group)
        self._train()

    # --- servers

    def _pace(self, server: _Server) -> float:
        """Seconds of a decoding step."""
        return self.speeds.decode_step_s + self.speeds.decode_row_s * len(server.rows)

    def _advance(self, server: _Server) -> None:
        """Brings the rows to this moment."""
        if server.is_computing:
            server.busy_s += self.now - server.since
            since = max(server.since, server.still_until)
            if server.prefilling is None and self.now > since:
                server.served += (self.now - since) / self._pace(server)
        server.since = self.now

    def _plan(self, server: _Server) -> None:
        """What the server does next; what was planned before is void."""
        server.plan += 1
        plan, begin = server.plan, max(self.now, server.still_until)
        has_room = len(server.rows) < self.machines.max_num_seqs
        if server.is_up and server.prefilling is None and server.queue and has_room:
            rollout = server.prefilling = server.queue.popleft()
            seconds = self.work.prompt_tokens / self.speeds.prefill_tokens_per_s
            self._at(begin + seconds, lambda: self._prefilled(server, rollout))
        computes = server.is_up and (server.prefilling is not None or bool(server.rows))
        self._num_computing += computes - server.is_computing
        server.is_computing = computes
        if computes and server.prefilling is None:
            left = max(server.rows[0][0] - server.served, 0.0)
            self._at(begin + left * self._pace(server), lambda: self._answered(server, plan))

    def _prefilled(self, server: _Server, rollout: _Rollout) -> None:
        if server.prefilling is not rollout:
            return
        self._advance(server)
        server.prefilling = None
        self._count += 1
        end = server.served + self.work.answer_tokens
        heapq.heappush(server.rows, (end, self._count, rollout))
        self._plan(server)

    def _answered(self, server: _Server, plan: int) -> None:
        if plan != server.plan:
            return
        self._advance(server)
        while server.rows and server.rows[0][0] <= server.served + 1e-6:
            _, _, rollout = heapq.heappop(server.rows)
            rollout.turn += 1
            self._act(rollout)
        self._plan(server)

    # --- trainer and versions

    def _train(self) -> None:
        w, s, m = self.work, self.speeds, self.machines
        if self.is_training or len(self.finished) < w.groups_per_step:
            return
        self.is_training = True
        for _ in range(w.groups_per_step):
            group = self.finished.popleft()
            self.lags.append(self.trained - self.group_versions.pop(group))
        tokens = self._rollouts_per_step * w.turns * self._turn_tokens
        exchanged = FSDP_PASSES * s.model_bytes * m.micro_batches * (1 - 1 / m.trainer_gpus)
        seconds = s.step_s + max(
            tokens / s.train_tokens_per_s / m.trainer_gpus,
            exchanged / (m.link_bytes_per_s if m.trainer_gpus > m.gpus_per_machine else inf),
        )
        self.bytes["images to the trainer"] += self._rollouts_per_step * w.turns * w.image_bytes
        self.bytes["batches"] += TOKEN_BYTES * tokens
        if self.rng.random() < m.failures_per_gpu_hour * m.trainer_gpus * seconds / 3600:
            self.failures += 1
            seconds += s.start_s + (self.trained % m.checkpoint_every) * seconds
        self.trainer_s += seconds
        self._num_computing += 1
        self._at(self.now + seconds, self._stepped)

    def _stepped(self) -> None:
        self._num_computing -= 1
        self.is_training = False
        self.trained += 1
        self.ends.append(self.wall)
        s, m = self.speeds, self.machines
        sent = s.model_bytes * m.servers
        self.bytes["weights"] += sent
        per_machine = max(m.gpus_per_machine // m.gpus_per_server, 1)
        way = max(
            s.model_bytes / m.link_bytes_per_s,
            s.model_bytes * min(per_machine, m.servers) / m.link_bytes_per_s,
            sent / m.store_bytes_per_s,
        )
        version = self.trained
        self._at(self.now + s.publish_s + way, lambda: self._adopt(version))
        self._train()

    def _adopt(self, version: int) -> None:
        for server in self.servers:
            self._advance(server)
            server.still_until = max(server.still_until, self.now) + self.speeds.adopt_s
            self._plan(server)
        self.in_use = version
        self._start_groups()

    # --- failures

    def _plan_failure(self, gpus: int, act: Callable[[], None]) -> None:
        if rate := self.machines.failures_per_gpu_hour * gpus / 3600:
            self._at(self.now + self.rng.expovariate(rate), act)

    def _lose(self, server: _Server) -> None:
        """What the server had is asked elsewhere, and computed anew."""
        self._advance(server)
        self.failures += 1
        lost = [*(row for _, _, row in server.rows), *server.queue]
        lost += [server.prefilling] if server.prefilling is not None else []
        server.rows, server.prefilling = [], None
        server.queue.clear()
        server.is_up = False
        self._plan(server)
        for rollout in lost:
            rollout.server = None
            self.prefilled_again += rollout.turn * self._turn_tokens
            self._ask(rollout)

        def back() -> None:
            server.is_up, server.since = True, self.now
            self._plan_failure(self.machines.gpus_per_server, lambda: self._lose(server))

        self._at(self.now + self.speeds.start_s, back)
