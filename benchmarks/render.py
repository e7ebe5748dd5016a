"""`python -m benchmarks render`: the cost of rendering a turn with a new screenshot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sightline.bench.harness.screenshots import Screenshots
from sightline.bench.harness.workspace import (
    add_options,
    check_at_least,
    print_table,
    work_folder,
    write_tiny,
)
from sightline.errors import ConfigError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user
from sightline.render import Bridged

MB = 1e6
PEER = "renderers"
PEER_VERSION = "0.1.12"


@dataclass(frozen=True)
class Turn:
    seconds: float
    held_bytes: int
    """Bytes that the renderer keeps for images: pixels or references."""
    num_tokens: int
    put_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Extends a conversation by one screenshot a turn, with our renderer and with "
        f"{PEER}=={PEER_VERSION} where it is installed (the extra `peers`), each in one thread. "
        "Our turn is `bridge` with an image that is in the store, and `put`, which writes it "
        "there; a turn of the peer reads the image and makes its pixels."
    )
    add_options(parser, "model", "dir", turns=100, width=1280, height=800)
    parser.add_argument(
        "--tokenizer", type=Path,
        help="folder of a real tokenizer (tokenizer.json, tokenizer_config.json) for the tiny one",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    check_at_least(args, 1, "turns")
    if args.model and args.tokenizer:
        raise ConfigError("--model and --tokenizer", "name one: a model has its own tokenizer")
    with work_folder(args.dir) as folder:
        model = args.model or write_tiny(folder / "model")
        if args.tokenizer:
            take_tokenizer(model, args.tokenizer)
        png_bytes = draw(args, folder)
        ours = measure(model, folder, args.turns)
        theirs = measure_peer(model, folder, args.turns)
    print_table(
        f"{args.turns} turns, {args.width}x{args.height}, PNG {png_bytes / 1e3:.0f} KB each",
        ("turn", "bridge ms", "put ms", "held KB", "peer ms", "peer held MB", "tokens"),
        list_rows(ours, theirs),
        closing_lines(ours, theirs),
    )
    return 0


def take_tokenizer(model: Path, tokenizer: Path) -> None:
    """Copy a real tokenizer into a checkpoint, to include the cost of its merges."""
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    data = (tokenizer / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(data)
    known = json.loads(data)
    ids = [*known["model"]["vocab"].values(), *(token["id"] for token in known["added_tokens"])]
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["vocab_size"] = max(ids) + 1
    (model / "config.json").write_text(json.dumps(config))


def draw(args: argparse.Namespace, folder: Path) -> int:
    """Write the screenshots and return their mean size."""
    pages, rng = Screenshots(args.turns, args.width, args.height), random.Random(0)
    total = 0
    for turn in range(args.turns):
        data = pages.draw(rng)
        (folder / f"{turn}.png").write_bytes(data)
        total += len(data)
    return total // args.turns


def measure(model: Path, folder: Path, turns: int) -> list[Turn]:
    store = MediaStore(folder / "media")
    renderer = load_renderer(model, store)
    ids = renderer.render([user("begin")]).token_ids
    completion_ids = [*renderer.render([user("go on")]).token_ids[3:5], renderer.stop_token_ids[0]]
    measured, held_bytes = [], 0
    for turn in range(turns):
        data = (folder / f"{turn}.png").read_bytes()
        began = time.perf_counter()
        ref = store.put(data)
        stored = time.perf_counter()
        bridged = renderer.bridge(ids, completion_ids, [user(f"page {turn}", ref)])
        ended = time.perf_counter()
        if not isinstance(bridged, Bridged):
            raise ConfigError(f"{model}: {bridged}", "choose a checkpoint that does not reason")
        ids += completion_ids + bridged.token_ids
        held_bytes += sum(len(msgspec.msgpack.encode(slot)) for slot in bridged.slots)
        measured.append(Turn(ended - stored, held_bytes, len(ids), stored - began))
    return measured


def measure_peer(model: Path, folder: Path, turns: int) -> list[Turn]:
    """Measure the peer. Empty if it is not installed, or does not support the family."""
    if importlib.util.find_spec(PEER) is None:
        return []
    program = Path(__file__).parent / "harness" / "renderers_peer.py"
    words = [str(model), str(folder.resolve()), str(turns)]
    done = subprocess.run(
        [sys.executable, "-P", str(program), *words], capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError(
            f"{PEER}: {done.stderr.strip()[-400:]}", f"install {PEER}=={PEER_VERSION}"
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [Turn(*line) for line in lines]


def list_rows(ours: list[Turn], theirs: list[Turn]) -> Iterator[list[str]]:
    for turn in shown_turns(len(ours)):
        # Use several turns, so that a single interruption does not distort the figure.
        stretch = slice(max(0, turn - 5), turn)
        peer = ["-", "-"]
        if theirs:
            held = theirs[turn - 1].held_bytes / MB
            peer = [f"{1e3 * middle(theirs[stretch]):.1f}", f"{held:.1f}"]
        yield [
            str(turn),
            f"{1e3 * middle(ours[stretch]):.3f}",
            f"{1e3 * statistics.median(t.put_s for t in ours[stretch]):.2f}",
            f"{ours[turn - 1].held_bytes / 1e3:.1f}",
            *peer,
            f"{ours[turn - 1].num_tokens:,}",
        ]


def shown_turns(turns: int) -> list[int]:
    return [turn for turn in (1, 2, 5, 10, 20, 50, 100, 200, 500) if turn < turns] + [turns]


def middle(turns: list[Turn]) -> float:
    return statistics.median(turn.seconds for turn in turns)


def closing_lines(ours: list[Turn], theirs: list[Turn]) -> list[str]:
    half = max(1, len(ours) // 2)
    growth = middle(ours[half:] or ours) / middle(ours[:half])
    lines = [
        f"bridge: {1e3 * middle(ours):.3f} ms a turn; second half over first half {growth:.2f}; "
        f"put: {1e3 * statistics.median(t.put_s for t in ours):.2f} ms"
    ]
    if theirs:
        ratio = middle(theirs) / middle(ours)
        time_ratio = middle(theirs) / statistics.median(turn.seconds + turn.put_s for turn in ours)
        byte_ratio = theirs[-1].held_bytes / ours[-1].held_bytes
        lines += [
            f"{PEER}=={PEER_VERSION}, which reads the image and makes its pixels: "
            f"{1e3 * middle(theirs):.1f} ms a turn",
            f"  {ratio:.0f} times our bridge, where the image is in the store already",
            f"  {time_ratio:.0f} times our put and bridge, where it is new",
            f"  it holds {byte_ratio:,.0f} times the bytes",
        ]
    else:
        lines.append(f"no {PEER} to compare with: pip install 'sightline-rl[peers]'")
    return lines
