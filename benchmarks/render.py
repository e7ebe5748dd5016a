"""`python -m benchmarks render`: the cost of rendering a turn with a new screenshot."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sightline.bench.harness.screenshots import Screenshots
from sightline.bench.harness.workspace import (
    add_options,
    print_table,
    work_folder,
)
from sightline.errors import ConfigError
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user
from sightline.render import Bridged


@dataclass(frozen=True)
class Turn:
    seconds: float
    held_bytes: int
    """Bytes that the renderer keeps for images: references."""
    num_tokens: int
    put_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Extends a conversation by one screenshot a turn, in one thread. A turn is `put`, which "
        "writes the image into the store, and `bridge`."
    )
    add_options(parser, "model", "dir", turns=100, width=1280, height=800)
    parser.add_argument(
        "--tokenizer", type=Path,
        help="folder of a real tokenizer (tokenizer.json, tokenizer_config.json) for the tiny one",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.model and args.tokenizer:
        raise ConfigError("--model and --tokenizer exclude each other", "pass only one of them")
    with work_folder(args) as folder:
        if args.tokenizer:
            take_tokenizer(args.model, args.tokenizer)
        turns, png_bytes = measure(args, folder)
    half = max(1, len(turns) // 2)
    growth = middle(turns[half:] or turns) / middle(turns[:half])
    print_table(
        f"{args.turns} turns, {args.width}x{args.height}, PNG {png_bytes / 1e3:.0f} KB each",
        ("turn", "bridge ms", "put ms", "held KB", "tokens"),
        list_rows(turns),
        [
            f"bridge: {1e3 * middle(turns):.3f} ms a turn; second half over first half "
            f"{growth:.2f}; put: {1e3 * statistics.median(t.put_s for t in turns):.2f} ms"
        ],
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


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Turn], float]:
    """Return the turns, and the mean size of a screenshot."""
    store = MediaStore(folder / "media")
    renderer = load_renderer(args.model, store)
    pages, rng = Screenshots(args.turns, args.width, args.height), random.Random(0)
    ids = renderer.render([user("begin")]).token_ids
    completion_ids = [*renderer.render([user("go on")]).token_ids[3:5], renderer.stop_token_ids[0]]
    measured, held_bytes, png_bytes = [], 0, 0
    for turn in range(args.turns):
        data = pages.draw(rng)
        began = time.perf_counter()
        ref = store.put(data)
        stored = time.perf_counter()
        bridged = renderer.bridge(ids, completion_ids, [user(f"page {turn}", ref)])
        ended = time.perf_counter()
        if not isinstance(bridged, Bridged):
            fix = "choose a checkpoint that does not reason"
            raise ConfigError(f"{args.model}: {bridged}", fix)
        ids += completion_ids + bridged.token_ids
        held_bytes += sum(len(msgspec.msgpack.encode(slot)) for slot in bridged.slots)
        png_bytes += len(data)
        measured.append(Turn(ended - stored, held_bytes, len(ids), stored - began))
    return measured, png_bytes / args.turns


def list_rows(turns: list[Turn]) -> Iterator[list[str]]:
    for turn in shown_turns(len(turns)):
        # Use several turns, so that a single interruption does not distort the figure.
        stretch = slice(max(0, turn - 5), turn)
        yield [
            str(turn),
            f"{1e3 * middle(turns[stretch]):.3f}",
            f"{1e3 * statistics.median(t.put_s for t in turns[stretch]):.2f}",
            f"{turns[turn - 1].held_bytes / 1e3:.1f}",
            f"{turns[turn - 1].num_tokens:,}",
        ]


def shown_turns(turns: int) -> list[int]:
    return [turn for turn in (1, 2, 5, 10, 20, 50, 100, 200, 500) if turn < turns] + [turns]


def middle(turns: list[Turn]) -> float:
    return statistics.median(turn.seconds for turn in turns)
