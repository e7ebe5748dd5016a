"""A run directory as the processes of a run would leave it, without running any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import tokenizers.models
from PIL import Image

from sightline.media import MediaRef, MediaStore
from sightline.message import Message, assistant, user
from sightline.run import RunDir
from sightline.trace import Node, PolicySpan, Trace, write_traces
from sightline.trace.node import float32_array, int32_array
from sightline.wire import MediaItem, Slot
from sightline.wire.event import Event
from sightline.wire.file import append_line

T0 = 1_700_000_000.0
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>```\n# hi | there"


def append(run_dir: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run_dir.metrics, msgspec.json.encode(event))


def step(k: int, total: int = 150, at: float | None = None, **values: Any) -> Event:
    known = {
        "reward": 1 - math.exp(-k / 40),
        "parts": {"letters": 1 - math.exp(-k / 35), "exact": max(0, k - 60) / 100},
        "lag_mean": 0.4,
        "lag_max": 1,
        "verdicts": {"train": 64 * k, "no_signal": 9 * k, "stale": k // 3},
        "bad_media": 0,
        "tokens_sampled": 700 * k,
        "tokens_per_s": 1900.0,
        "images_shown": 384 * k,
        "images_stored": 36,
        "store_bytes": 9000,
        "seconds": 1.5,
        "steps_total": total,
        "eta_s": (total - k) * 1.5,
        "mismatch_kl": 3.2e-8,
        "version": k - 1,
        "rollouts_in_flight": 24,
    }
    time = T0 + 20 + 1.5 * k if at is None else at
    return Event(time=time, process="orchestrator", kind="step", step=k, values=known | values)


def train(k: int, **values: Any) -> Event:
    end = T0 + 20 + 1.5 * k
    known = {
        "loss": -0.02 + 0.001 * (k % 5),
        "mismatch_kl": None if k % 5 else 3e-8 + 1e-9 * (k % 7),
        "entropy": 2.2 * math.exp(-k / 60),
        "grad_norm": 0.5 + 0.1 * (k % 3),
        "seconds": {
            "forward": 0.3,
            "backward": 0.4,
            "optimizer": 0.1,
            "wait": 0.5,
            "materialize": 0.01,
            "publish": 0.1,
        },
        "busy": [end - 0.9, end],
    }
    return Event(time=end, process="trainer", kind="train", step=k, values=known | values)


def busy(k: int) -> Event:
    """The server pauses for a moment in each step."""
    start = T0 + 20 + 1.5 * (k - 1)
    intervals = [[start, start + 0.7], [start + 0.85, start + 1.5]]
    return Event(time=start + 1.5, process="server", kind="busy", values={"intervals": intervals})


def evaluation(name: str, reward: float, at: float, **values: Any) -> Event:
    known = {
        "name": name,
        "tasks": 256,
        "reward": reward,
        "parts": {"letters": reward, "exact": reward**3},
    }
    return Event(time=at, process="orchestrator", kind="eval", values=known | values)


def state(phase: str, at: float, process: str = "orchestrator") -> Event:
    return Event(time=at, process=process, kind="state", values={"phase": phase})


def trace_of(store: MediaStore, index: int, right: bool, text: str = "") -> Trace:
    """Return two turns with one image each."""
    nodes: list[Node] = []
    for turn in range(2):
        colour = (40 + 60 * turn, 40 * index % 255, 200)
        ref = store.put(Image.new("RGB", (32, 32), colour))
        nodes.append(_node(nodes, user(text, ref) if text else user(ref), 4, 0, [ref]))
        nodes.append(_node(nodes, assistant(text or "AB"[: turn + 1]), 2, 3, []))
    return Trace(
        id=f"r{index}",
        group_id=f"g{index}",
        env="color_codeword",
        task=index,
        nodes=nodes,
        reward=1.0 if right else 0.25,
        rewards={"letters": 1.0 if right else 0.25},
        per_turn=[0.5, 1.0],
    )


def _node(
    nodes: list[Node], message: Message, fields: int, sampled: int, refs: list[MediaRef]
) -> Node:
    items = [MediaItem(ref=ref, family="tiny", grid=(1, 2, 2), fingerprint="f") for ref in refs]
    return Node(
        id=len(nodes),
        parent=len(nodes) - 1,
        message=message,
        token_ids=int32_array(range(10, 10 + fields + sampled)),
        sampled_start=fields,
        logprobs=float32_array([-0.01, -0.7, -3.0][:sampled]),
        versions=(PolicySpan(version=7, epoch=0, start=0, stop=sampled),) if sampled else (),
        slots=tuple(Slot(offset=1, length=1, item=item) for item in items),
        finish_reason="stop" if sampled else "",
    )


def write_tokenizer(path: Path, words: list[str]) -> None:
    """A checkpoint folder with a tokenizer whose ids 10, 11, ... are `words`."""
    vocabulary = {f"w{i}": i for i in range(10)} | {w: 10 + i for i, w in enumerate(words)}
    path.mkdir(parents=True, exist_ok=True)
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(path / "tokenizer.json"))


def write_run(path: Path, steps: int = 20, text: str = "") -> RunDir:
    """A successful run."""
    run_dir = RunDir(path)
    run_dir.make()
    checkpoint = path / "checkpoint"
    write_tokenizer(checkpoint, [*"wxyz", text or "A", "B\n", "<|im_end|>"])
    run_dir.config.write_text(
        f'[run]\nseed = 3\n\n[env]\nname = "color_codeword"\n\n[model]\npath = "{checkpoint}"\n'
    )
    store = MediaStore(run_dir.media)
    append(run_dir, state("starting", T0), evaluation("start", 0.11, T0 + 15))
    for k in range(1, steps + 1):
        append(run_dir, busy(k), train(k), step(k, steps))
    end = T0 + 20 + 1.5 * steps
    append(run_dir, evaluation("final", 0.96, end + 10, swapped={"metric": 0.12}))
    for k, right in ((1, False), (steps, True)):
        write_traces(run_dir.traces_of(k), [trace_of(store, i, right, text) for i in range(5)])
    return run_dir
