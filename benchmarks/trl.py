"""`python -m benchmarks trl`: the demo's training step, compared with TRL's GRPOTrainer.

Both sides use the same model and images, groups of 8, one turn, one visual token per image, the
clipped loss over tokens and 128 samples per step. TRL samples the answers. Our trainer repeats its
first step on the same tokens and advantages, and the gradient norms are compared. Generation is
timed separately: in Sightline it is the inference server's work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from sightline.bench.harness.workspace import add_options, print_table, work_folder
from sightline.config import ModelConfig, TrainerConfig
from sightline.errors import ProcessFailed
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import PackSize
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.build import build_learner, build_pixels
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.learner import Learner
from sightline.wire import Slot
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample, Segment

GROUP = 8
SAMPLES = 128
MAX_TOKENS = 8
SIDE = 32
SAME_WITHIN = 1e-4
"""Maximum relative difference of two gradient norms in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--python",
        default=".venv-trl/bin/python",
        help="interpreter with TRL; default: %(default)s",
    )
    add_options(parser, "model", steps=10, threads=1)


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    with work_folder(args) as folder:
        store = MediaStore(folder / "media")
        prompts = write_task(folder, load_renderer(args.model, store).pad_token_ids)
        theirs = run_peer(args, folder)
        ours = SightlineStep(args.model, store, folder, prompts, theirs["first"])
        ours.run(args.steps)
    norm, other = ours.norm, theirs["grad_norm"]
    same = abs(norm / other - 1) < SAME_WITHIN
    show(ours.times, theirs, [
        f"{SAMPLES} samples a step, groups of {GROUP}, {args.threads} thread(s), float32",
        f"gradient norm: {norm:.6f} here, {other:.6f} by TRL, on the same tokens",
        "the two gradients agree" if same else "THE TWO GRADIENTS DIFFER",
    ])  # fmt: skip
    return 0 if same else 1


def write_task(folder: Path, pads: tuple[int, ...]) -> list[dict[str, str]]:
    """Write squares of one colour each, and the prompts about them.

    TRL is configured not to sample image pads. By default it does, and our trainer refuses them.
    """
    prompts = []
    for i in range(SAMPLES // GROUP):
        colour = (37 * i % 256, 91 * i % 256, 151 * i % 256)
        Image.new("RGB", (SIDE, SIDE), colour).save(folder / f"{i}.png")
        prompts.append({"text": "Which code?", "image": f"{i}.png"})
    task = {
        "prompts": prompts,
        "samples": SAMPLES,
        "group": GROUP,
        "max_tokens": MAX_TOKENS,
        "pads": pads,
    }
    (folder / "task.json").write_text(json.dumps(task))
    return prompts


def run_peer(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    program = Path(__file__).parent / "harness" / "trl_peer.py"
    words = [str(args.model), str(folder), str(args.steps + 1), str(args.threads)]
    settings = [f"OMP_NUM_THREADS={args.threads}", "HF_HUB_OFFLINE=1"]
    done = subprocess.run(
        ["env", *settings, args.python, "-P", str(program), *words], capture_output=True, text=True
    )
    if done.returncode:
        raise ProcessFailed(
            f"{args.python} failed: {done.stderr[-3000:]}",
            "install TRL there: `make bench-trl` builds .venv-trl and runs this",
        )
    results: dict[str, Any] = json.loads((folder / "trl.json").read_text())
    return results


class SightlineStep:
    """Our training step on the tokens that TRL sampled."""

    def __init__(
        self,
        model: Path,
        store: MediaStore,
        folder: Path,
        prompts: list[dict[str, str]],
        first: dict[str, Any],
    ) -> None:
        settings = TrainerConfig(
            device="cpu",
            lr=1e-9,
            max_grad_norm=0.5,
        )
        self.learner = build_learner(ModelConfig(path=str(model)), settings, store, steps=1 << 30)
        # TRL's logprobs are over the whole vocabulary.
        self.learner.banned = self.learner.banned[:0]
        self.renderer = load_renderer(model, store, self.learner.family)
        self.preparer = BatchPreparer(
            build_pixels(self.learner, store),
            PackSize(settings.max_micro_batch_tokens, settings.micro_batch_patches),
            # TRL does not report pixel digests.
            BadMediaPolicy(max_bad_fraction=0.0, allows_unverified_pixels=True),
        )
        refs = {prompt["image"]: store.put(folder / prompt["image"]) for prompt in prompts}
        texts = {prompt["image"]: prompt["text"] for prompt in prompts}
        rendered = {
            name: self.renderer.render([user(ref, texts[name])]) for name, ref in refs.items()
        }
        samples = [self._sample(i, first, rendered[name]) for i, name in enumerate(first["names"])]
        self.batch = Batch(1, with_own_logprobs(samples, self.learner, self.preparer))
        self.times: list[tuple[float, float]] = []
        self.norm = 0.0

    def _sample(self, i: int, first: dict[str, Any], rendered: Any) -> Sample:
        """Return TRL's tokens without padding. The prompt must equal ours, token for token."""
        prompt, answer = (
            [
                t
                for t, real in zip(first[f"{part}_ids"][i], first[f"{part}_mask"][i], strict=True)
                if real
            ]
            for part in ("prompt", "completion")
        )
        assert prompt == list(rendered.token_ids), (prompt, list(rendered.token_ids))
        trained = np.arange(len(prompt), len(prompt) + len(answer))
        [slot] = rendered.slots
        return Sample(
            trace_id=f"t{i}",
            group_id=f"g{i // GROUP}",
            env="trl",
            reward=0.0,
            token_ids=Array.of([*prompt, *answer], "int32"),
            trained=Array.of(trained, "int32"),
            logprobs=Array.of(np.zeros(len(answer)), "float32"),
            advantages=Array.of(np.full(len(answer), first["advantages"][i]), "float32"),
            versions=Array.of(np.zeros(len(answer)), "int32"),
            segments=[Segment(len(prompt), len(prompt) + len(answer), node=0)],
            items=[slot.item],
            slots=[Slot(slot.offset, slot.length, 0)],
        )

    def run(self, steps: int) -> None:
        for number in range(steps + 1):
            began = time.perf_counter(), time.process_time()
            ready = self.preparer.prepare(self.batch, "")
            stepped = self.learner.step(ready)
            ended = time.perf_counter(), time.process_time()
            if number:
                self.times.append((ended[0] - began[0], ended[1] - began[1]))
            else:
                self.norm = float(stepped.metrics["grad_norm"] or 0.0)


def with_own_logprobs(
    samples: list[Sample], learner: Learner, preparer: BatchPreparer
) -> list[Sample]:
    """Return the samples with the current weights' logprobs: every ratio is 1, as in TRL."""
    scores = learner.step(preparer.prepare(Batch(1, samples), "")).scores
    logprobs = scores.logprobs.numpy()
    by_trace = {o.trace_id: logprobs[o.start : o.stop] for o in scores.origins}
    return [
        msgspec.structs.replace(s, logprobs=Array.of(by_trace[s.trace_id], "float32"))
        for s in samples
    ]


def show(ours: list[tuple[float, float]], theirs: dict[str, Any], lines: list[str]) -> None:
    steps = np.array(theirs["steps"][1:])
    sides = {
        "Sightline, training step": np.array(ours),
        "TRL, training step": steps - np.array(theirs["generated"][1 : len(steps) + 1]),
        "TRL, with generation": steps,
    }
    medians = {name: np.median(times, axis=0) for name, times in sides.items()}
    rows = []
    for name, (wall, cpu) in medians.items():
        figures = (SAMPLES / wall, 1e3 * wall, SAMPLES / cpu, 1e3 * cpu)
        rows.append([name, *(f"{figure:.0f}" for figure in figures)])
    wall, cpu = medians["TRL, training step"] / medians["Sightline, training step"]
    times = f"{wall:.1f} times as many by wall clock, {cpu:.1f} by CPU time"
    columns = ("", "samples/s", "step ms", "samples/CPU s", "CPU ms")
    print_table("the demo's training step", columns, rows, [*lines, times])
