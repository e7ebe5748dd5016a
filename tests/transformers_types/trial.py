"""Load a checkpoint as a run does, and compare a training pass with plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from sightline.compute.model import load_model
from sightline.errors import SightlineError
from sightline.families import load_family, load_renderer
from sightline.families.anyvlm.processor import load_processor, process_options, uses_torchvision
from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.forward_pass import compute_hidden
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.sft import build_sample
from sightline.wire.array import Array
from sightline.wire.sample import Batch
from tests.transformers_types.build import CHANGES, build, build_config, list_native

TRAINS, NATIVE, REFUSED, UNBUILT, ERROR = "trains", "native", "refused", "not tried", "error"
DEFECTS = (
    "stopped with", "cannot load", "cannot be loaded", "rejects every image", "the tokenizer lacks",
    "preprocessor_config.json",
)  # fmt: skip
"""Words of refusals that may be due to the tiny checkpoint instead of the type."""
TEXTS = ("look", "a thing", "and this?", "ok")
SIZES = ((64, 80), (90, 50))


class Answer(msgspec.Struct):
    """A row of the table."""

    kind: str
    result: str
    reason: str = ""
    difference: float | None = None
    """The largest difference of a trained token's logprob from transformers."""


def try_type(kind: str, folder: Path) -> Answer:
    """Build a tiny checkpoint of the type in `folder`, and try it."""
    native = list_native().get(kind, ("anyvlm", ""))[0]
    model = folder / "model"
    plain, problem = None, ""
    try:
        build(kind, model)
    except Exception as error:  # transformers may raise anything for such small sizes
        problem = f"no tiny checkpoint: {describe(error)}"
        write_config(kind, model)
    if not problem:
        try:
            plain = compute_plain(model, CHANGES.get(kind, {}).get("template", {}))
        except Exception as error:
            problem = f"transformers does not run its tiny checkpoint: {describe(error)}"
    try:
        family = load_family(model)
        if plain is None:
            return Answer(kind, UNBUILT, problem)
        difference = measure_difference(model, family, folder / "media", plain)
    except SightlineError as error:
        if problem and any(words in error.problem for words in DEFECTS) and not is_certain(kind):
            return Answer(kind, UNBUILT, problem)
        return Answer(
            kind, REFUSED, error.problem.replace(f"{model}: ", "").replace(f"{model} ", "")
        )
    except Exception as error:  # a raw error is what this looks for
        return Answer(kind, ERROR, describe(error))
    if native != "anyvlm":
        return Answer(kind, NATIVE, f"family `{native}`", difference)
    how = "trees" if family.packing.kind == "tree" else "padded rows"
    return Answer(kind, TRAINS, how, difference)


def write_config(kind: str, model: Path) -> None:
    """Write a folder that lacks a processor and weights, for the trials that need neither."""
    model.mkdir(parents=True, exist_ok=True)
    classes = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]]
    try:
        config = build_config(kind)
        config.architectures = classes
        config.save_pretrained(model)
    except ValueError:  # the type has no defaults
        settings = {"model_type": kind, "architectures": classes}
        (model / "config.json").write_text(json.dumps(settings))
    (model / "tokenizer.json").write_text("{}")


def is_certain(kind: str) -> bool:
    """Return whether types.toml says that a refusal is not due to the tiny checkpoint."""
    return bool(CHANGES.get(kind, {}).get("is_certain"))


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def draw_images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in SIZES]


Plain = tuple[list[int], torch.Tensor]
"""The tokens of the conversation, and the log-softmax at each of them."""


def measure_difference(model: Path, family: Any, media: Path, plain: Plain) -> float:
    """Return the largest difference of the trained tokens' logprobs from plain transformers."""
    store = MediaStore(media)
    first, second = map(store.put, draw_images())
    look, thing, question, answer = TEXTS
    talk = [user(look, first), assistant(thing), user(second, question), assistant(answer)]
    sample = build_sample(talk, load_renderer(model, store, family), "types")
    zeros = Array.of(np.zeros(len(sample.trained)), "float32")
    sample = msgspec.structs.replace(sample, advantages=zeros, logprobs=zeros)
    materializer = Materializer(family, store, max_bytes=1 << 28)
    policy = BadMediaPolicy(allows_unverified_pixels=True)
    preparer = BatchPreparer(MicroBatchPixels(materializer), PackSize(1 << 20, 1 << 20), policy)
    (ready,) = preparer.prepare(Batch(1, [sample]), digest="").with_pixels().micro_batches
    materializer.close()
    token_ids = torch.from_numpy(ready.batch.token_ids.numpy().astype(np.int64))
    trained = torch.from_numpy(ready.batch.trained.numpy().astype(np.int64))
    # A renderer may end the last answer with the token that stops sampling.
    if plain[0] not in (token_ids.tolist(), token_ids[:-1].tolist()):
        raise AssertionError("the trained tokens are not those of the checkpoint's processor")
    forward = load_model(model, family, "cpu", "float32")
    hidden = compute_hidden(forward, ready, family, torch.device("cpu"))
    chosen = token_ids[trained][:, None]
    ours = torch.log_softmax(forward.logits(hidden), -1).gather(-1, chosen)
    ours.sum().backward()
    gradients = [p.grad for p in forward.model.parameters() if p.grad is not None]
    if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
        raise AssertionError("the training pass leaves no finite gradients")
    return float((ours.detach() - plain[1][trained - 1].gather(-1, chosen)).abs().max())


@torch.no_grad()
def compute_plain(path: Path, settings: dict[str, Any]) -> Plain:
    """Run transformers' own model on its own processor's inputs. `settings` are the template's."""
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    shown = [{"type": "image", "image": image} for image in draw_images()]
    texts = [{"type": "text", "text": text} for text in TEXTS]
    contents: list[list[dict[str, Any]]] = [
        [texts[0], shown[0]], [texts[1]], [shown[1], texts[2]], [texts[3]],
    ]  # fmt: skip
    talk = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    processor = load_processor(path)
    kind = "pt" if uses_torchvision(processor) else "np"
    options = {"tokenize": True, "return_dict": True, "return_tensors": kind}
    inputs = processor.apply_chat_template(
        talk, processor_kwargs=process_options(processor), **options, **settings
    )
    tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
    arrays = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    logits = model(**arrays, use_cache=False).logits[0]
    return arrays["input_ids"][0].tolist(), torch.log_softmax(logits, -1)
