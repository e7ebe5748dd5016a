"""TRL's side of `python -m benchmarks trl`: GRPO steps on the CPU, timed.

    python -P trl_peer.py MODEL FOLDER STEPS THREADS

It runs in an environment with TRL and without this package. FOLDER has task.json and the images.
Timings and the first step's tokens are written there.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

FIRST_STEP = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def read_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> list[float]:
    ended = read_clocks()
    return [ended[0] - began[0], ended[1] - began[1]]


def declare_operators() -> torch.library.Library:
    """Declare two operators of torchvision. They stay while the library lives.

    The registry's torchvision is built for CUDA: with a CPU build of torch its compiled half is
    missing, and importing the rest fails on two operators that nothing here calls.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def build_trainer_class() -> Any:
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        """Records the time of generation and the tokens of the first step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.generated: list[list[float]] = []
            self.first: Any = None

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = read_clocks()
            completions = super()._generate(*args, **kwargs)
            self.generated.append(since(began))
            return completions

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            if self.first is None:
                self.first = {key: outputs[key].tolist() for key in FIRST_STEP}
                self.first["names"] = [prompt["name"] for prompt in inputs]
            return outputs

    return TimedTrainer


def build_timer_class() -> Any:
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[list[float]] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = read_clocks()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(since(self.began))

    return StepTimer


def build_config(task: dict[str, Any], folder: Path, steps: int) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
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


def main() -> None:
    model, folder, steps, threads = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5])
    torch.set_num_threads(threads)
    library = declare_operators()
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor

    task = json.loads((folder / "task.json").read_text())
    rng = random.Random(0)

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [rng.random() for _ in completions]

    rows = [
        {
            "prompt": [{"role": "user", "content": prompt["text"]}],
            "image": Image.open(folder / prompt["image"]).convert("RGB"),
            "name": prompt["image"],
        }
        for _ in range(steps)
        for prompt in task["prompts"]
    ]
    config = build_config(task, folder, steps)
    timer = build_timer_class()()
    trainer = build_trainer_class()(
        model=model,
        args=config,
        processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        callbacks=[timer],
    )
    trainer.train()
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    results = {
        "steps": timer.times,
        "generated": trainer.generated,
        "grad_norm": norms[0],
        "first": trainer.first,
    }
    (folder / "trl.json").write_text(json.dumps(results))
    del library


if __name__ == "__main__":
    main()
