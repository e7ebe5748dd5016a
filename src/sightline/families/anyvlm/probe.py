"""Finds out what a checkpoint is like, by trying: `python -m sightline.families.anyvlm.probe DIR`.

It prints what it found, or the probe that failed, as one line of JSON behind an empty line. The
processor and the template are the checkpoint's own; of the model the code is asked, on the meta
device and by layers with random weights (`packing_trial`). No weight is read: what depends on
weights is tried where they are loaded (`forward`).
"""

from __future__ import annotations

import inspect
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
from transformers.utils import logging as transformers_logging

from sightline.errors import FamilyError, MediaRefused, MessageError, SightlineError
from sightline.families.anyvlm.findings import (
    Expansion,
    Findings,
    ProbeAnswer,
    RowArray,
    digest_sources,
    find_version,
)
from sightline.families.anyvlm.layout import RULES, count_whole
from sightline.families.anyvlm.model_parts import (
    find_layer_kinds,
    find_logit_settings,
    find_torch_attention,
    find_tower,
)
from sightline.families.anyvlm.packing_trial import try_packing
from sightline.families.anyvlm.probe_report import (
    describe_difference,
    describe_findings,
    draw_conversations,
)
from sightline.families.anyvlm.processor import (
    FOREIGN,
    OPTIONS,
    apply_template,
    cut_patches,
    find_processor_problem,
    load_processor,
    process,
    to_template_parts,
    uses_torchvision,
)
from sightline.families.anyvlm.render import AnyVLMRenderer
from sightline.families.anyvlm.rule_settings import find_candidates, list_tile_sides
from sightline.families.anyvlm.vision import GRID_RULES, AnyVLMFamily, fill_lines
from sightline.media import MediaRef

NUM_SIZES = 16
"""Sizes on which a rule is tried, beside those by which its layouts are learnt."""
NUM_DRAWN = 3000
"""Sizes of all shapes for which rules are asked, so that an image of each layout is processed."""
MAX_SIDE = 1200
MAX_REFUSED = 12
"""Sizes after which a processor that has refused all of them is given up."""
SIDES = (8, 20, 32, 50, 64, 100, 150, 224, 300, 336, 448, 512, 640, 768, 896, 1024, 1200)
_NO_RESOLVER: Any = None
"""Messages of the probe hold refs already."""
_FIX = "add a family for it (docs/adding_a_family.md), or use another checkpoint"


def list_sizes(settings: dict[str, int]) -> list[tuple[int, int]]:
    """Sizes of all proportions, the smallest first: enough for each layout of a rule with these
    settings."""
    draw = random.Random(0)
    sides = {*SIDES, *list_tile_sides(settings)}
    sizes = [(w, h) for w in sides for h in sides]
    for _ in range(NUM_DRAWN):
        sizes.append((round(2 ** draw.uniform(0, 14)), round(2 ** draw.uniform(0, 14))))
    return sorted(sizes, key=math.prod)


def fail(probe: str, problem: str, fix: str = _FIX) -> FamilyError:
    return FamilyError(f"probe of {probe}: {problem}", fix)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Prober:
    """One checkpoint, asked one thing after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self._load_config()
        self.processor = self._load_processor()
        self._processed: dict[tuple[int, int], tuple[dict[str, np.ndarray], str] | None] = {}
        self._refusal = ""
        with torch.device("meta"):
            self.model: Any = AutoModelForImageTextToText.from_config(self.config)
        self.base: Any = getattr(self.model, "model", self.model)
        if not hasattr(self.base, "get_image_features"):
            name = type(self.model).__name__
            raise fail("the model", f"{name} has no get_image_features, by which towers are called")

    def _load_config(self) -> Any:
        try:
            config = AutoConfig.from_pretrained(self.path, **OPTIONS)
        except ValueError as error:
            raise fail("the model", _first_line(error)) from error
        if type(config) not in AutoModelForImageTextToText._model_mapping:
            raise fail(
                "the model",
                f"transformers {find_version('transformers')} has no image-and-text class for "
                f"{config.model_type!r}",
            )
        return config

    def _load_processor(self) -> Any:
        try:
            processor = load_processor(self.path)
        except FOREIGN as error:
            if "Missing optional dependencies: torchvision" in str(error):
                raise fail(
                    "the processor",
                    "transformers has it for torchvision alone, which is not installed here",
                    "install the torchvision that belongs to your torch, wherever pixels are made: "
                    "in the environments of the server and of the trainer",
                ) from error
            raise fail(
                "the processor",
                f"transformers cannot load it: {_first_line(error)}",
                "install what it names, complete the folder, or use another checkpoint",
            ) from error
        if problem := find_processor_problem(processor, self.path):
            raise fail(*problem)
        return processor

    # -- how an image becomes tokens

    def process(self, width: int, height: int) -> tuple[dict[str, np.ndarray], str] | None:
        """What the processor makes of an image of this size; None for one that it refuses."""
        size = (width, height)
        if size not in self._processed:
            noise = random.Random(f"{size}").randbytes(width * height * 3)
            try:
                made = process(self.processor, Image.frombytes("RGB", size, noise))
                if "pixel_values" not in made[0]:
                    raise fail("the arrays", f"the processor makes {sorted(made[0])} of an image")
                self._processed[size] = made
            except FOREIGN as error:
                self._processed[size], self._refusal = None, _first_line(error)
        return self._processed[size]

    def find_pad(self) -> tuple[int, str]:
        names = ("image_token_id", "image_token_index")
        found = next((getattr(self.config, n) for n in names if hasattr(self.config, n)), None)
        if found is None:
            raise fail("the pad", "config.json names no image_token_id")
        pad = str(self.processor.tokenizer.convert_ids_to_tokens(int(found)))
        made = self.process(448, 448)
        if made is not None and pad not in made[1]:
            named = f"config.json names token {found} for images, {pad!r}, which it writes for none"
            raise fail("the pad", named, "copy config.json and the tokenizer of one checkpoint")
        return int(found), pad

    def find_rule(self, pad: str) -> tuple[str, dict[str, int], list[Expansion]]:
        tried = []
        for name, settings in find_candidates(self.processor):
            expansions = self._learn(name, settings, pad)
            if not expansions:
                raise fail("images", f"the processor takes none that was tried: {self._refusal}")
            difference = self._find_difference(name, settings, expansions, pad)
            if difference is None:
                return name, settings, expansions
            tried.append(f"{RULES[name][1]} ({difference})")
        raise fail("images", f"no rule gives the processor's tokens: {'; '.join(tried)}")

    def _learn(self, name: str, settings: dict[str, int], pad: str) -> list[Expansion]:
        """What the processor writes for each layout of the rule, by its smallest image."""
        sizes: dict[tuple[int, int], tuple[int, int]] = {}
        refused = 0
        tried = list_sizes(settings)
        if name == "lines":  # two of them show what stands behind the first and the last
            tried = [(2 * settings["patch"] * settings["merge"],) * 2]
        for width, height in tried:
            shape = RULES[name][0](width, height, settings)
            if shape is None or shape in sizes:
                continue
            if self.process(width, height) is not None:
                sizes[shape] = (width, height)
            else:
                refused += 1
            if (not sizes and refused == MAX_REFUSED) or (name in GRID_RULES and sizes):
                break
        learnt = []
        for shape, size in sizes.items():
            made = self.process(*size)
            assert made is not None
            arrays, text = made
            is_grid = name in GRID_RULES
            num = 0 if is_grid else self._count_rows(arrays)
            pieces = [(p, 0 if is_grid and p == pad else n) for p, n in split_pieces(text, pad)]
            if name == "tiles_of_large":  # the last pads are those of the image as a whole
                last = max(i for i, (piece, _) in enumerate(pieces) if piece == pad)
                pieces[last] = (pad, 0)
            learnt.append(Expansion(*shape, num, pieces))
        return learnt

    def _count_rows(self, arrays: dict[str, np.ndarray]) -> int:
        shape = arrays["pixel_values"].shape
        return int(shape[1] if len(shape) == 5 else shape[0])

    def _find_difference(
        self, name: str, settings: dict[str, int], learnt: list[Expansion], pad: str
    ) -> str | None:
        """The first size for which the rule does not say what the processor does."""
        known = {(e.rows, e.columns): e for e in learnt}
        draw = random.Random(0)
        sizes = [(draw.randint(4, MAX_SIDE), draw.randint(4, MAX_SIDE)) for _ in range(NUM_SIZES)]
        for width, height in sizes:
            made, shape = self.process(width, height), RULES[name][0](width, height, settings)
            if made is None or shape is None:
                if (made is None) != (shape is None):
                    return f"{width}x{height} is refused by one of the two"
                continue
            arrays, text = made
            pieces, num = split_pieces(text, pad), self._count_rows(arrays)
            if name == "lines":
                says = fill_lines(learnt[0].pieces, *shape), num
            elif name in GRID_RULES:
                count = shape[0] * shape[1] // settings["merge"] ** 2
                rows = shape[0] * shape[1] if name == "patches" else num
                says = [(p, n or count) for p, n in learnt[0].pieces], rows
            else:
                found = known.get(shape)
                says = (found.pieces, found.num_rows) if found else ([], 0)
                if name == "tiles_of_large":
                    count = math.prod(count_whole(width, height, settings))
                    says = [(p, n or count) for p, n in says[0]], says[1]
            if says != (pieces, num):
                return f"{width}x{height} becomes {sum(n for p, n in pieces if p == pad)} tokens"
        return None

    # -- the arrays

    def find_arrays(self, rule: str, settings: dict[str, int]) -> tuple[list[RowArray], str]:
        """The arrays that the model wants of an image, and the name of the one with its grid."""
        wanted = inspect.signature(type(self.model).get_image_features).parameters
        inner = inspect.signature(type(self.base).get_image_features).parameters
        made = [entry for entry in self._processed.values() if entry is not None]
        names = [n for n in made[0][0] if n in wanted or n in inner]
        rows: list[RowArray] = []
        grid = ""
        for name in sorted(names, key=lambda n: n != "pixel_values"):
            all_of = [arrays[name] for arrays, _ in made]
            if name.endswith("grid_thw") or (name == "image_sizes" and rule == "lines"):
                grid = name
                continue
            if rule == "lines":
                all_of = [cut_patches(array[0], settings["patch"]) for array in all_of]
            fills = rule == "patches_in_budget"
            has_batch = all_of[0].ndim == 5 or (name != "pixel_values" and rows[0].has_batch)
            has_batch = has_batch or fills
            entries = [array[0] if has_batch else array for array in all_of]
            behind: set[float] = set()
            if fills:
                sizes = [size for size, entry in self._processed.items() if entry is not None]
                lengths = [np.prod(RULES[rule][0](*size, settings) or 0) for size in sizes]
                pairs = list(zip(entries, lengths, strict=True))
                behind = {float(value) for e, n in pairs for value in np.unique(e[n:])}
                entries = [entry[:length] for entry, length in pairs]
            shapes = {entry.shape[1:] for entry in entries}
            counts = [self._count_rows(arrays) for arrays, _ in made]
            counts = [*map(len, entries)] if rule == "lines" or fills else counts
            if len(shapes) > 1 or len(behind) > 1 or [len(entry) for entry in entries] != counts:
                raise fail(
                    "the arrays",
                    f"the shape of {name} changes with the size of an image: "
                    f"{sorted(shapes)[:3]}, which is not supported",
                )
            is_ones = name != "pixel_values" and all(bool((e == 1).all()) for e in entries)
            kind, fill = entries[0].dtype.name, int(behind.pop()) if behind else None
            rows.append(RowArray(name, kind, tuple(shapes.pop()), has_batch, is_ones, fill))
        return rows, grid

    # -- the text model

    def find_axes(self, rule: str, merge: int) -> int:
        """Rows of a position array: three where the model computes them from grids."""
        if not hasattr(self.base, "get_rope_index"):
            return 1
        from sightline.families.vision_family import compute_mrope_positions
        from sightline.wire import MediaItem, Slot

        ref = MediaRef("0" * 64, "image/png", 8, 8, 1)
        grid = (1, 2 * merge, 3 * merge)
        slots = [Slot(at, 6, MediaItem(ref, "anyvlm", grid, "")) for at in (3, 11)]
        ours, _ = compute_mrope_positions(20, slots, merge)
        pad, _ = self.find_pad()
        ids = torch.zeros(1, 20, dtype=torch.long)
        for slot in slots:
            ids[0, slot.offset : slot.end] = pad
        theirs, _ = self.base.get_rope_index(
            ids,
            mm_token_type_ids=(ids == pad).int(),
            image_grid_thw=torch.tensor([grid, grid]),
            attention_mask=torch.ones_like(ids),
        )
        if rule != "patches" or not np.array_equal(theirs[:, 0].numpy(), ours):
            raise fail("the positions", "the model places the tokens of an image in its own way")
        return 3

    # -- the chat

    def find_stops(self) -> list[int]:
        file = self.path / "generation_config.json"
        named = None
        if file.is_file():
            named = GenerationConfig.from_pretrained(self.path, local_files_only=True).eos_token_id
        ids = [named] if isinstance(named, int) else list(named or ())
        last = self.processor.tokenizer.eos_token_id
        return list(dict.fromkeys([*ids, *([last] if last is not None else [])]))

    def probe(self) -> Findings:
        pad_id, pad = self.find_pad()
        rule, settings, expansions = self.find_rule(pad)
        arrays, grid_array = self.find_arrays(rule, settings)
        merge = settings.get("merge", 1)
        axes = self.find_axes(rule, merge)
        tokenizer = self.processor.tokenizer
        marks = {
            token_id
            for expansion in expansions
            for text, _ in expansion.pieces
            for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]
            if token_id in tokenizer.added_tokens_decoder
        }
        marks |= set(self.processor.image_token_ids) & set(tokenizer.added_tokens_decoder)
        images = self.processor.image_processor
        described = msgspec.to_builtins(_plain(images.to_dict()))
        findings = Findings(
            source=digest_sources(self.path),
            transformers=find_version("transformers"),
            torchvision=find_version("torchvision") if uses_torchvision(self.processor) else "",
            model_class=type(self.model).__name__,
            processor={**described, "class": type(images).__name__},
            image_token=self.processor.image_token,
            pad_id=pad_id,
            pad=pad,
            mark_ids=sorted(marks - {pad_id}),
            rule=rule,
            rule_settings=settings,
            expansions=expansions,
            arrays=arrays,
            grid_array=grid_array,
            tower=find_tower(self.model),
            merge=merge,
            num_axes=axes,
            rows_reason="",
            trees_reason="",
            layer_kinds=find_layer_kinds(self.config),
            sees_ahead=False,
            torch_attention=find_torch_attention(self.model),
            counts_tokens=hasattr(self.processor, "_get_num_multimodal_tokens"),
            logit_settings=find_logit_settings(self.config),
            vocab_size=int(self.config.get_text_config().vocab_size),
            stop_ids=self.find_stops(),
            template_values={n: str(v) for n, v in tokenizer.special_tokens_map.items()},
            first_ids=self._find_first_ids(),
            lines=[],
        )
        trial = try_packing(self.path, self.config, findings)
        lines = self._check_chat(findings)
        return msgspec.structs.replace(findings, lines=lines, **vars(trial))

    def _find_first_ids(self) -> list[int]:
        asked = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        ids = self._template_ids(asked)
        text = apply_template(self.processor, asked, add_generation_prompt=True)
        plain = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[: len(ids) - len(plain)]

    def _template_ids(self, messages: list[dict[str, Any]], prompt: bool = True) -> list[int]:
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": prompt}
        made = apply_template(self.processor, messages, **options)
        return [int(token) for token in np.asarray(made["input_ids"]).reshape(-1)]

    def _check_chat(self, findings: Findings) -> list[str]:
        """Renders a few conversations in our way and in the processor's; what is like what."""
        family = AnyVLMFamily(self.path, findings)
        renderer = AnyVLMRenderer.load(self.path, family, _NO_RESOLVER)
        for messages, prompt in draw_conversations():
            try:
                ours = renderer.render_read(messages, None, prompt).token_ids
            except (MessageError, MediaRefused):
                continue  # refused with its path, whenever it comes
            sizes = [(ref.width, ref.height) for m in messages for ref in m.images]
            images = [Image.new("RGB", size) for size in sizes]
            theirs = self._template_ids(
                [
                    {"role": m.role, "content": to_template_parts(m, images)}
                    | ({"reasoning_content": m.reasoning} if m.reasoning else {})
                    for m in messages
                ],
                prompt,
            )
            if ours != theirs:
                raise fail("the chat template", describe_difference(ours, theirs, renderer))
        return describe_findings(findings, renderer, NUM_SIZES)


def split_pieces(text: str, pad: str) -> list[tuple[str, int]]:
    """A text as runs of pads, with how many, and what is between them."""
    parts = re.split(f"((?:{re.escape(pad)})+)", text)
    return [(pad, len(p) // len(pad)) if i % 2 else (p, 1) for i, p in enumerate(parts) if p]


def _plain(value: Any) -> Any:
    """Settings as JSON has them."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not str(k).startswith("_")}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def answer_probe(path: Path) -> ProbeAnswer:
    try:
        return ProbeAnswer(Prober(path).probe())
    except SightlineError as error:
        return ProbeAnswer(problem=error.problem, fix=error.fix)
    except FOREIGN as error:
        problem = f"code of the checkpoint fails in a probe: {type(error).__name__}: {error}"
        return ProbeAnswer(problem=problem, fix=_FIX)


def main() -> None:
    transformers_logging.set_verbosity_error()
    print("\n\n" + msgspec.json.encode(answer_probe(Path(sys.argv[1]))).decode(), end="")


if __name__ == "__main__":
    main()
