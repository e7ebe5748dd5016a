"""Inspect a checkpoint of an unknown type with trials on its own code.

`python -m sightline.families.anyvlm.admission DIR` runs `TRIALS` in order and prints the findings,
or the trial that failed, as one line of JSON after an empty line. Trials use the checkpoint's own
processor and chat template. They run the model's code on the meta device and in layers with random
weights (`packing_trial`). The trials read no weights. `forward` checks them after loading.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from sightline.errors import FamilyError, MediaRefused, MessageError, SightlineError
from sightline.families.anyvlm import processor as processors
from sightline.families.anyvlm.answers import TRIED_TOOLS
from sightline.families.anyvlm.checkpoint import Checkpoint
from sightline.families.anyvlm.findings import (
    UNSUPPORTED,
    AdmissionAnswer,
    Findings,
    RowArray,
    digest_sources,
)
from sightline.families.anyvlm.forward import TOKEN_TYPES, find_encoder, find_text
from sightline.families.anyvlm.image_tokens import count_rows
from sightline.families.anyvlm.layout import RULES
from sightline.families.anyvlm.packing_trial import try_packing
from sightline.families.anyvlm.render import (
    NUM_MESSAGES,
    AnyVLMRenderer,
    draw_history,
    remove_images,
)
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.template_check import find_split, form_calls
from sightline.families.transformers_forward import refuse_errors
from sightline.families.vision_family import compute_mrope_positions
from sightline.media import MediaRef
from sightline.message import Message, TextPart, assistant, system, user
from sightline.wire import MediaItem, Slot
from sightline.wire.codec import find_version


def try_model_class(checkpoint: Checkpoint, findings: Findings) -> Findings:
    model, config = checkpoint.model, checkpoint.config
    if checkpoint.shows_media and find_encoder(model) is None:
        why = "so image features cannot be computed apart from the text"
        raise FamilyError(f"{type(model).__name__} has no get_image_features, {why}", UNSUPPORTED)
    decoder = find_text(model)
    if not hasattr(decoder, "embed_tokens"):
        raise FamilyError(
            f"{type(model).__name__} has no text model with `layers` and `embed_tokens`, so image "
            "features cannot replace token embeddings",
            UNSUPPORTED,
        )
    if not decoder._supports_sdpa:
        raise FamilyError(
            f"transformers cannot compute the attention of {type(decoder).__name__} with torch's "
            "scaled_dot_product_attention (it has attention sinks, for example), and Sightline "
            "packs sequences with that function",
            UNSUPPORTED,
        )
    parts = (decoder, model.get_output_embeddings())
    own = {id(p) for part in parts if part is not None for p in part.parameters()}
    tower = {".".join(n.split(".")[:2]) for n, p in model.named_parameters() if id(p) not in own}
    text = config.get_text_config()
    neutral = {"logit_scale": 1.0, "final_logit_softcapping": None}
    return msgspec.structs.replace(
        findings,
        model_class=type(model).__name__,
        tower=sorted(tower),
        torch_attention=[  # such as SigLIP's pooling head
            name
            for name, module in model.named_modules()
            if any(kind.__name__ == "MultiheadAttention" for kind in type(module).__mro__)
        ],
        logit_settings=[n for n, v in neutral.items() if getattr(text, n, None) not in (None, v)],
        vocab_size=int(text.vocab_size),
    )


def try_processor(checkpoint: Checkpoint, findings: Findings) -> Findings:
    processor = checkpoint.processor
    images = processor.image_processor
    settings = json.loads(images.to_json_string())
    return msgspec.structs.replace(
        findings,
        torchvision=find_version("torchvision") if processors.uses_torchvision(processor) else "",
        processor=settings | {"class": type(images).__name__},
        image_token=processors.find_image_text(processor),
        counts_tokens=hasattr(processor, "_get_num_multimodal_tokens"),
    )


def try_image_pad(checkpoint: Checkpoint, findings: Findings) -> Findings:
    """Find the token whose embeddings are replaced by image features."""
    names = ("image_token_id", "image_token_index")
    config = checkpoint.config
    token_id = next((getattr(config, n) for n in names if hasattr(config, n)), None)
    if token_id is None:
        raise FamilyError("config.json has no image_token_id", UNSUPPORTED)
    if getattr(config, "visual_indicator_token_ids", None):
        raise FamilyError(
            "the model also replaces the embeddings of the marks around an image (config.json's "
            "visual_indicator_token_ids), and Sightline replaces those of image tokens only",
            UNSUPPORTED,
        )
    pad = str(checkpoint.processor.tokenizer.convert_ids_to_tokens(int(token_id)))
    processed = checkpoint.images.process(448, 448)
    if processed is not None and pad not in processed[1]:
        raise FamilyError(
            f"config.json names token {token_id} ({pad!r}) for images, but the processor does not "
            "write it",
            "copy config.json and the tokenizer files from the same checkpoint",
        )
    return msgspec.structs.replace(findings, pad_id=int(token_id), pad=pad)


def try_image_tokens(checkpoint: Checkpoint, findings: Findings) -> Findings:
    """Find the rule that maps image sizes to tokens, and the marks around and between pads."""
    findings = checkpoint.images.find_rule(findings)
    tokenizer = checkpoint.processor.tokenizer
    added = set(tokenizer.added_tokens_decoder)
    marks = added & set(checkpoint.processor.image_token_ids)
    for expansion in findings.expansions:
        for text, _ in expansion.pieces:
            marks |= added & set(tokenizer(text, add_special_tokens=False)["input_ids"])
    return msgspec.structs.replace(findings, mark_ids=sorted(marks - {findings.pad_id}))


def try_arrays(checkpoint: Checkpoint, findings: Findings) -> Findings:
    """Find the processor arrays that the model uses, and the one that contains an image's grid."""
    rule, settings = findings.rule, findings.rule_settings
    kept_names = {
        name
        for part in (checkpoint.model, checkpoint.base)
        if hasattr(part, "get_image_features")
        for name in inspect.signature(type(part).get_image_features).parameters
    }
    processed = {size: result[0] for size, result in checkpoint.images.processed.items() if result}
    names = [name for name in next(iter(processed.values())) if name in kept_names]
    arrays: list[RowArray] = []
    grid = ""
    fills = rule == "patches_in_budget"
    for name in sorted(names, key=lambda name: name != "pixel_values"):
        if name.endswith("grid_thw") or (name == "image_sizes" and rule == "lines"):
            grid = name
            continue
        raw = [result[name] for result in processed.values()]
        if rule == "lines":
            raw = [processors.cut_patches(array[0], settings["patch"]) for array in raw]
        has_batch = fills or raw[0].ndim == 5
        has_batch = has_batch or (name != "pixel_values" and arrays[0].has_batch)
        entries = [array[0] if has_batch else array for array in raw]
        fill_values: set[float] = set()
        counts = [count_rows(result) for result in processed.values()]
        if fills:
            counts = [int(np.prod(RULES[rule][0](*size, settings) or 0)) for size in processed]
            pairs = list(zip(entries, counts, strict=True))
            fill_values = {float(value) for e, n in pairs for value in np.unique(e[n:])}
            entries = [entry[:count] for entry, count in pairs]
        elif rule == "lines":
            counts = [len(entry) for entry in entries]
        shapes = {entry.shape[1:] for entry in entries}
        if len(shapes) > 1:
            examples = " and ".join(map(str, sorted(shapes)[:2]))
            problem = f"the shape of an entry of {name} depends on the image size: {examples}"
            raise FamilyError(problem, UNSUPPORTED)
        if len(fill_values) > 1:
            problem = f"its processor pads {name} with different values, and Sightline with one"
            raise FamilyError(problem, UNSUPPORTED)
        for (width, height), entry, count in zip(processed, entries, counts, strict=True):
            if len(entry) != count:
                raise FamilyError(
                    f"its processor makes an array {name} of length {len(entry)} for an image of "
                    f"{width}x{height} pixels, and Sightline needs {count}: one entry for each "
                    "patch or tile",
                    UNSUPPORTED,
                )
        is_ones = name != "pixel_values" and all(bool((e == 1).all()) for e in entries)
        fill = int(fill_values.pop()) if fill_values else None
        dtype = entries[0].dtype.name
        arrays.append(RowArray(name, dtype, tuple(shapes.pop()), has_batch, is_ones, fill))
    return msgspec.structs.replace(findings, arrays=arrays, grid_array=grid)


def try_positions(checkpoint: Checkpoint, findings: Findings) -> Findings:
    """Compare the model's positions with ours, if the model derives them from grids."""
    if not hasattr(checkpoint.base, "get_rope_index"):
        return findings
    ref = MediaRef("0" * 64, "image/png", 8, 8, 1)
    grid = (1, 2 * findings.merge, 3 * findings.merge)
    slots = [Slot(at, 6, MediaItem(ref, "anyvlm", grid, "")) for at in (3, 11)]
    computed, _ = compute_mrope_positions(20, slots, findings.merge)
    ids = torch.zeros(1, 20, dtype=torch.long)
    for slot in slots:
        ids[0, slot.offset : slot.end] = findings.pad_id
    kinds, grids = (ids == findings.pad_id).int(), torch.tensor([grid, grid])
    reference, _ = checkpoint.base.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=torch.ones_like(ids)
    )
    if findings.rule != "patches" or not np.array_equal(reference[:, 0].numpy(), computed):
        raise FamilyError("the model gives image tokens positions that are not MRoPE", UNSUPPORTED)
    return msgspec.structs.replace(findings, num_axes=3)


def try_packing_layers(checkpoint: Checkpoint, findings: Findings) -> Findings:
    rows_reason, trees_reason = try_packing(checkpoint.path, checkpoint.config, findings)
    return msgspec.structs.replace(findings, rows_reason=rows_reason, trees_reason=trees_reason)


def try_chat(checkpoint: Checkpoint, findings: Findings) -> Findings:
    """Render conversations with our renderer and with the processor, and compare the tokens."""
    tokenizer, shows_media = checkpoint.tokenizer, checkpoint.shows_media
    if shows_media:
        _check_prompt(checkpoint, findings.pad_id)
    question = [
        {"role": "user", "content": processors.to_template_content(user("a"), [], shows_media)}
    ]
    text, ids = checkpoint.encode(question)
    num_plain = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    findings = msgspec.structs.replace(
        findings,
        stop_ids=_find_stops(checkpoint),
        template_values={n: str(v) for n, v in tokenizer.special_tokens_map.items()},
        first_ids=ids[: len(ids) - num_plain],
    )
    family = AnyVLMFamily(checkpoint.path, findings)
    renderer = AnyVLMRenderer.load(checkpoint.path, family)
    for messages, prompt in draw_conversations():
        messages = messages if shows_media else remove_images(messages)
        tools = TRIED_TOOLS if any(m.tool_calls for m in messages) else None
        if tools and not renderer.takes_tools:
            continue
        try:
            rendered_ids = renderer.render_read(messages, tools, prompt).token_ids
        except (MessageError, MediaRefused) as error:
            if len(messages) == NUM_MESSAGES and _is_rendered(renderer, messages[:2]):
                raise FamilyError(
                    f"a conversation of {NUM_MESSAGES} messages cannot be rendered, although its "
                    f"first two can: {error.problem}",
                    "use a chat template that writes every message of a long conversation",
                ) from error
            continue  # a run also refuses this conversation, with its path
        sizes = [(ref.width, ref.height) for m in messages for ref in m.images]
        images = [Image.new("RGB", size) for size in sizes]
        given = [
            {"role": m.role, "content": processors.to_template_content(m, images, shows_media)}
            | form_calls(m)
            | ({"reasoning_content": m.reasoning} if m.reasoning else {})
            for m in messages
        ]
        _, template_ids = checkpoint.encode(given, prompt, tools)
        if rendered_ids != template_ids:
            before, own, other = find_split(renderer, rendered_ids, template_ids)
            problem = f"after {before!r} transformers writes {other!r}, and our renderer {own!r}"
            raise FamilyError(problem, UNSUPPORTED)
    return findings


def _check_prompt(checkpoint: Checkpoint, pad_id: int) -> None:
    """Raise FamilyError if text changes what the processor and the model do before it."""
    processor = checkpoint.processor
    parts = [{"type": "text", "text": "7"}, {"type": "image", "image": Image.new("RGB", (64, 64))}]
    talk = [{"role": "user", "content": parts}]
    text, encoded = processors.apply_template(processor, checkpoint.template, talk)
    before, mark, _ = text.partition(processors.find_image_text(processor))
    ids, kinds = (np.asarray(encoded.get(n, [])).reshape(-1) for n in ("input_ids", TOKEN_TYPES[0]))
    first = int((ids == pad_id).argmax())
    if mark and "7" in before and "7" not in processor.tokenizer.decode(ids[:first].tolist()):
        why = "so a later turn with an image would change the tokens of earlier turns"
        what = f"{type(processor).__name__} moves every image to the start of the prompt"
        raise FamilyError(f"{what}, {why}", UNSUPPORTED)
    takes_kinds = TOKEN_TYPES[0] in inspect.signature(type(checkpoint.base).forward).parameters
    if takes_kinds and len(kinds) and not np.array_equal(kinds, ids == pad_id):
        raise FamilyError(
            "the model attends over the whole prompt in both directions, not only within an image, "
            "so a later turn would change the logprobs of earlier turns",
            UNSUPPORTED,
        )


def draw_conversations() -> Iterator[tuple[list[Message], bool]]:
    """Yield conversations, and whether to add a generation prompt to each."""
    sizes = ((64, 64), (300, 20), (33, 95))
    one, two, three = (MediaRef(f"{i}" * 64, "image/png", *s, 1) for i, s in enumerate(sizes))
    yield [user("hi")], True
    yield [user("two\nlines", one)], True
    yield [user(two, "what is it?"), assistant("a thing."), user(" and ", three, one, "?")], True
    yield [system("be brief"), user("hi", three), assistant("ok"), user("so?")], True
    yield [user("hi"), assistant("fine \n")], False
    yield [Message(role="user", content=(TextPart("0 "), TextPart("0")))], True
    yield [user("hi"), assistant("fine", reasoning="so")], False
    yield draw_history(NUM_MESSAGES), False
    yield [system("be brief"), *draw_history(NUM_MESSAGES - 1)], True
    yield draw_history(NUM_MESSAGES, has_calls=True), False


def _is_rendered(renderer: AnyVLMRenderer, messages: list[Message]) -> bool:
    try:
        return bool(renderer.render_read(messages, None, False).token_ids)
    except (MessageError, MediaRefused):
        return False


def _find_stops(checkpoint: Checkpoint) -> list[int]:
    path = checkpoint.path
    token_ids = None
    if (path / "generation_config.json").is_file():
        token_ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    ids = [token_ids] if isinstance(token_ids, int) else list(token_ids or ())
    last = checkpoint.tokenizer.eos_token_id
    return list(dict.fromkeys([*ids, *([last] if last is not None else [])]))


Trial = Callable[[Checkpoint, Findings], Findings]
TRIALS: dict[str, Trial] = {
    "model class": try_model_class,
    "processor": try_processor,
    "image pad": try_image_pad,
    "image tokens": try_image_tokens,
    "arrays": try_arrays,
    "positions": try_positions,
    "packing": try_packing_layers,
    "chat template": try_chat,
}
"""The trials by name. Each adds its findings or raises FamilyError. A checkpoint is accepted if all
trials pass."""
TEXT_TRIALS = ("model class", "packing", "chat template")
"""The trials of a text-only checkpoint."""


def run_trials(path: Path) -> AdmissionAnswer:
    """Run all trials. transformers' warnings about the test images are hidden."""
    processors.load_processor.cache_clear()  # files may have changed
    checkpoint = Checkpoint(path)
    findings = Findings(source=digest_sources(path), transformers=find_version("transformers"))
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        for name, trial in TRIALS.items():
            try:
                with refuse_errors(path, UNSUPPORTED):
                    if checkpoint.shows_media or name in TEXT_TRIALS:
                        findings = trial(checkpoint, findings)
            except SightlineError as error:
                problem = f"the {name} trial failed: {error.problem}"
                return AdmissionAnswer(problem=problem, fix=error.fix)
    finally:
        transformers_logging.set_verbosity(verbosity)
    return AdmissionAnswer(findings)


def main() -> None:
    print("\n\n" + msgspec.json.encode(run_trials(Path(sys.argv[1]))).decode(), end="")


if __name__ == "__main__":
    main()
