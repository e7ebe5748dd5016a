"""TRL's side of bench/trl_step.py: GRPO steps on the CPU, timed. Runs in an environment of its own.

    python trl_peer.py MODEL FOLDER STEPS THREADS

FOLDER holds task.json and the images; timings and the first step's tokens are written there.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch

# The registry's torchvision is built for CUDA: beside a CPU build of torch its compiled half is
# missing, and importing the rest fails on two operators that nothing here calls.
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from datasets import Dataset  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import AutoProcessor, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> list[float]:
    ended = now()
    return [ended[0] - began[0], ended[1] - began[1]]


class Timed(GRPOTrainer):
    """Notes what generation takes, and keeps the tokens of the first step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generated: list[list[float]] = []
        self.kept = None

    def _generate(self, *args, **kwargs):
        began = now()
        found = super()._generate(*args, **kwargs)
        self.generated.append(since(began))
        return found

    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        if self.kept is None:
            self.kept = {
                key: found[key].tolist()
                for key in (
                    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"
                )
            }  # fmt: skip
            self.kept["names"] = [one["name"] for one in inputs]
        return found


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[list[float]] = []

    def on_step_begin(self, *args, **kwargs):
        self.began = now()

    def on_step_end(self, *args, **kwargs):
        self.times.append(since(self.began))


def main() -> None:
    model, folder, steps, threads = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5])
    torch.set_num_threads(threads)
    task = json.loads((folder / "task.json").read_text())
    rng = random.Random(0)

    def reward(completions, **kwargs):
        return [rng.random() for _ in completions]

    rows = [
        {
            "prompt": [{"role": "user", "content": one["text"]}],
            "image": Image.open(folder / one["image"]).convert("RGB"),
            "name": one["image"],
        }
        for _ in range(steps)
        for one in task["prompts"]
    ]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=task["samples"],
        num_generations=task["group"],
        gradient_accumulation_steps=1,
        max_completion_length=task["max_tokens"],
        max_steps=steps,
        learning_rate=1e-9,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        beta=0.0,
        loss_type="bnpo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        temperature=1.0,
        generation_kwargs={"suppress_tokens": task["pads"]},
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    timed = Steps()
    trainer = Timed(
        model=model,
        args=config,
        processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[timed],
    )
    trainer.train()
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    found = {
        "steps": timed.times,
        "generated": trainer.generated,
        "grad_norm": norms[0],
        "first": trainer.kept,
    }
    (folder / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
