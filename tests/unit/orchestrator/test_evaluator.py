"""An evaluation plays held-out tasks on one version, once with each other's images."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sightline.media import MediaRef
from sightline.message import user
from sightline.orchestrator.evaluator import Evaluator
from sightline.orchestrator.run_state import RunState
from sightline.rollout.evaluation import derive_seed, open_trace
from sightline.run import EventLog, RunDir
from sightline.trace import Node, Trace
from sightline.trace.node import int32_array
from sightline.view.events import read_events
from sightline.wire import Slot
from sightline.wire.control import RolloutRequest
from sightline.wire.item import MediaItem


class Players:
    """A scheduler whose rollouts show one image of their task, and earn less without it."""

    seed = 7

    def __init__(self) -> None:
        self.played: list[RolloutRequest] = []

    async def play_once(self, request: RolloutRequest) -> Trace:
        self.played.append(request)
        image = get_image(request.task)
        item = MediaItem(ref=image, family="qwen_vl", grid=(1, 2, 2), fingerprint="f" * 16)
        slots = (Slot(0, 1, item),)
        node = Node(0, -1, user("q"), int32_array([1]), sampled_start=1, slots=slots)
        return open_trace(request, nodes=[node], reward=0.0 if request.exchanged else 1.0)


def get_image(task: int) -> MediaRef:
    return MediaRef(f"{task}" * 64, "image/png", 28, 28, 100)


def test_held_out_tasks_are_played_once_and_with_the_images_of_their_neighbours(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    players: Any = Players()
    events = EventLog(run_dir.metrics, "orchestrator")

    def evaluate() -> float | None:
        run_state = RunState.open(run_dir)  # as after a restart
        evaluator = Evaluator(players, run_state, events, run_dir, tasks=3, temperature=0.3)
        return asyncio.run(evaluator.evaluate("final", 4, swap_images=True))

    assert [evaluate(), evaluate()] == [1.0, 1.0]
    assert len(players.played) == 6, "a resumed run does not repeat an evaluation"
    for request in players.played:
        assert (request.split, request.temperature, request.min_version) == ("eval", 0.3, 4)
    plain, swapped = players.played[:3], players.played[3:]
    assert [(r.task, r.exchanged, r.seed) for r in plain] == [
        (task, (), derive_seed(7, f"eval.{task}")) for task in range(3)
    ]
    assert [(r.task, r.exchanged) for r in swapped] == [
        (task, (get_image((task + 1) % 3),)) for task in range(3)
    ]
    (event,) = (e.values for e in read_events(run_dir.metrics) if e.kind == "eval")
    assert (event["reward"], event["swapped"]) == (1.0, 0.0)
