r"""One rank that loads models shard by shard and compares them with what loading them whole gives.

python rank_load.py RANK SIZE CHECKPOINT[:WORD]..=HOST:PORT ..

Words: lora, bfloat16, frozen. With `measured` it prints the peak growth in bytes instead.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
torch.set_num_threads(1)

import making  # noqa: E402

from sightline.compute.model import load_model  # noqa: E402
from sightline.config import LoraConfig  # noqa: E402
from sightline.families import Forward  # noqa: E402
from sightline.media import MediaStore  # noqa: E402
from sightline.trainer.lora import add_adapters  # noqa: E402
from sightline.trainer.ranks import RankInfo  # noqa: E402
from sightline.trainer.shard import shard_model  # noqa: E402


def compare(rank: int, size: int, checkpoint: str, words: list[str], meet: str) -> None:
    model = making.model_config(
        Path(checkpoint),
        train_vision="frozen" not in words,
        dtype="bfloat16" if "bfloat16" in words else "float32",
    )
    lora = LoraConfig(rank=4, vision_targets=("*",)) if "lora" in words else LoraConfig()
    trainer = making.trainer_config()
    store = MediaStore(Path(checkpoint) / "media")
    algorithm = making.algorithm(kl_coef=0.1)
    learner = making.build_learner(
        model, trainer, store, 10, RankInfo(rank, size, meet), algorithm=algorithm, lora=lora
    )
    whole = load_model(checkpoint, learner.family, "cpu", model.dtype)
    whole.model.train()
    if lora.rank:
        add_adapters(whole, lora, model.train_vision, seed=0)
    elif not model.train_vision:
        for _, parameter in whole.vision_parameters():
            parameter.requires_grad_(False)
    shard_model(whole, learner.dims)
    reference = load_model(checkpoint, learner.family, "cpu", model.dtype)
    reference.model.eval().requires_grad_(False)
    shard_model(reference, learner.dims, frozen=True)
    assert learner.reference is not None
    same(learner.forward, whole)
    same(learner.reference.forward, reference)
    dist.destroy_process_group()


def measure(rank: int, size: int, checkpoint: str, meet: str) -> int:
    """Return the largest growth of the process's own memory while it loads, without file pages."""
    most = before = read_anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, read_anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model, store = making.model_config(Path(checkpoint)), MediaStore(Path(checkpoint) / "media")
    trainer = making.trainer_config()
    making.build_learner(model, trainer, store, 10, RankInfo(rank, size, meet))
    done.set()
    watcher.join()
    return most - before


def read_anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) << 10


def same(ours: Forward, theirs: Forward) -> None:
    for kind in ("named_parameters", "named_buffers"):
        # Tied parameters are listed under both names.
        tensors = dict(getattr(ours.model, kind)(remove_duplicate=False))
        other = dict(getattr(theirs.model, kind)(remove_duplicate=False))
        assert list(tensors) == list(other)
        for name, wanted in other.items():
            parameter = tensors[name]
            assert parameter.shape == wanted.shape and parameter.dtype == wanted.dtype, name
            assert parameter.requires_grad == wanted.requires_grad, name
            if kind == "named_parameters":
                assert parameter.placements == wanted.placements, name
                parameter, wanted = parameter.to_local(), wanted.to_local()
            assert torch.equal(parameter, wanted), name
        assert len(set(map(id, tensors.values()))) == len(set(map(id, other.values())))


if __name__ == "__main__":
    for case in sys.argv[3:]:
        named, _, meet = case.partition("=")
        checkpoint, *words = named.split(":")
        if "measured" in words:
            print("held", measure(int(sys.argv[1]), int(sys.argv[2]), checkpoint, meet))
            break
        compare(int(sys.argv[1]), int(sys.argv[2]), checkpoint, words, meet)
        print("same", named, flush=True)
