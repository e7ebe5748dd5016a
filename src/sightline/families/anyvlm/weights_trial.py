"""The weights trial, which compares our computations with the whole model's own forward pass.

It runs after the weights are loaded. A short conversation is computed alone, packed and as a tree.
A long one is computed together with a row of a few tokens in one pass. An engine also computes it
with its KV cache: it prefills in two steps, and then decodes token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import UNSUPPORTED
from sightline.families.anyvlm.processor import (
    apply_template,
    load_processor,
    to_template_content,
    uses_torchvision,
)
from sightline.families.anyvlm.render import AnyVLMRenderer, remove_images
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.families.protocol import EngineTrial
from sightline.families.transformers_forward import TextForward
from sightline.media import MediaRef
from sightline.message import Message, assistant, user

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The allowed difference from the model's own logits, relative to the largest logit, by dtype."""
NUM_DECODED = 4
"""The number of tokens at the end of each row that are decoded one by one."""
LONG_ROW = 256
"""The length of the long row in a process without an engine."""
MAX_LONG_ROW = 2048
"""A limit because transformers' own attention stores all scores of a layer."""
CPU_OPERATIONS = 2e11
"""The number of multiplications that a CPU spends on one pass over the long row."""
WORD = "so "
SHORT = "one two three four five six seven eight"
"""The text of the short row, which has more tokens than are decoded one by one."""
PackRow = tuple["TriedRow", np.ndarray]
"""A row, and the indices of its tokens that are computed."""


@dataclass(frozen=True, eq=False)
class TriedRow:
    """A rendered conversation with its image features and the model's own logits."""

    token_ids: np.ndarray
    positions: np.ndarray
    pads: np.ndarray
    """The indices of the tokens that image features replace."""
    features: Float[Tensor, "visual_tokens features"] | None
    fork: int
    """The end of the last image, or the middle of a text."""
    logits: Float[Tensor, "last vocab"]
    """The model's own logits of the last tokens."""

    @property
    def tokens(self) -> np.ndarray:
        return np.arange(len(self.token_ids))


@dataclass
class WeightsTrial:
    forward: TextForward
    family: AnyVLMFamily
    own_attention: Callable[[], AbstractContextManager[None]]
    build_pattern: Callable[[np.ndarray], Any]
    engine: EngineTrial | None

    def __post_init__(self) -> None:
        self._renderer = AnyVLMRenderer.load(self.family.path, self.family)
        self._parameter = next(self.forward.model.parameters())

    @torch.no_grad()
    def run(self) -> None:
        """Raise FamilyError if a computation differs from the whole model's."""
        self._try_tree()
        long = self._build_row(self._draw_long(), NUM_DECODED)
        short = self._build_row(([user(SHORT)], []), NUM_DECODED)
        ends = np.cumsum([len(long.token_ids), len(short.token_ids)])
        pattern = self.build_pattern(np.repeat(ends, np.diff(ends, prepend=0)))
        hidden = self._compute([(long, long.tokens), (short, short.tokens)], pattern)
        lengths = f"rows of {len(long.token_ids)} and {len(short.token_ids)} tokens"
        for row, end in zip((long, short), ends.tolist(), strict=True):
            logits = self.forward.logits(hidden[end - NUM_DECODED : end])
            self._compare(f"in one pass over {lengths}", logits, row.logits)
        if self.engine is not None and self.family.packing.kind != "rows":
            self._try_decoding(self.engine, [long, short], lengths)

    def _try_tree(self) -> None:
        row = self._build_row(self._draw_short(), 0)
        tokens, length, fork = row.tokens, len(row.token_ids), row.fork
        tail = length - fork
        tried = {
            # One sequence, two copies in one row, and a tree whose two branches are equal.
            "alone": (tokens, [length] * length),
            "packed": (np.tile(tokens, 2), [length] * length + [2 * length] * length),
            "as a tree": (
                np.concatenate([tokens, tokens[fork:]]),
                [length + tail] * fork + [length] * tail + [length + tail] * tail,
            ),
        }
        if self.family.packing.kind == "rows":
            del tried["as a tree"]
        for kind, (computed, ends) in tried.items():
            hidden = self._compute([(row, computed)], self.build_pattern(np.array(ends)))
            self._compare(f"computed {kind}", self.forward.logits(hidden), row.logits[computed])

    def _try_decoding(self, engine: EngineTrial, rows: list[TriedRow], lengths: str) -> None:
        """Prefill the rows in two steps, and decode their last tokens one by one."""
        ends = np.array([len(row.token_ids) for row in rows])
        build = engine.build_cache(len(rows), int(ends.max()))
        prompts = ends - NUM_DECODED
        steps = [0 * ends, prompts // 2, *(prompts + i for i in range(NUM_DECODED + 1))]
        for number, (starts, stops) in enumerate(zip(steps, steps[1:], strict=False)):
            spans = zip(rows, starts, stops, strict=True)
            parts = [(row, row.tokens[start:stop]) for row, start, stop in spans]
            pattern = build(np.arange(len(rows)), starts, stops - starts)
            hidden = self._compute(parts, pattern)
            for i, row in enumerate(rows):
                if (decoded := number - 2) >= 0:
                    logits = self.forward.logits(hidden[i : i + 1])
                    reference = row.logits[decoded : decoded + 1]
                    self._compare(f"decoded with the KV cache for {lengths}", logits, reference)

    def _compare(self, tried: str, logits: Tensor, reference: Tensor) -> None:
        difference = float((logits - reference).abs().max() / reference.abs().max())
        allowed = TOLERANCES[reference.dtype]
        if not difference <= allowed:
            raise FamilyError(
                f"{self.family.path}: the weights trial failed: {tried}, logits differ from "
                f"{type(self.forward.model).__name__}'s own by {difference:.2g} of the largest "
                f"logit ({allowed:.0e} is allowed), so its layers do more than causal attention",
                UNSUPPORTED,
            )

    def _draw_short(self) -> tuple[list[Message], list[Image.Image]]:
        images = []
        for seed, (width, height) in enumerate(((64, 40), (50, 90))):
            noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
            images.append(Image.fromarray(noise))
        refs = [MediaRef(f"{i}" * 64, "image/png", *im.size, 1) for i, im in enumerate(images)]
        messages = [user("look", refs[0]), assistant("yes"), user(refs[1], "and this?")]
        return (messages, images) if self.family.shows_media else (remove_images(messages), [])

    def _draw_long(self) -> tuple[list[Message], list[Image.Image]]:
        """Return a conversation of as many tokens as a row may have."""
        limit = LONG_ROW if self.engine is None else self.engine.max_model_len
        limit = min(limit, MAX_LONG_ROW)
        if self._parameter.device.type == "cpu":
            num_parameters = sum(p.numel() for p in self.forward.model.parameters())
            limit = min(limit, max(LONG_ROW // 2, int(CPU_OPERATIONS / num_parameters)))
        messages, images = self._draw_short()

        def lengthen(num_words: int) -> list[Message]:
            return [*messages, assistant("no"), user(WORD * num_words + "why?")]

        render = self._renderer.render_read
        few, more = (len(render(lengthen(n), None, True).token_ids) for n in (1, 101))
        return lengthen(1 + max(0, (limit - few) * 100 // (more - few))), images

    def _build_row(self, talk: tuple[list[Message], list[Image.Image]], last: int) -> TriedRow:
        """Render a conversation, and compute its features and the model's `last` logits, or all."""
        messages, images = talk
        rendered = self._renderer.render_read(messages, None, True)
        token_ids, slots, features = rendered.token_ids, rendered.slots, None
        pads = [slot.offset + self.family.feature_offsets(slot.item) for slot in slots]
        if slots:
            items = [slot.item for slot in slots]
            patches = np.concatenate(
                [self.family.patches(i, item) for i, item in zip(images, items, strict=True)]
            )
            stacked = torch.from_numpy(patches).to(self._parameter.device)
            features = self.forward.encode(stacked, [item.grid for item in items])
        positions = self.family.positions(len(token_ids), slots)[0].astype(np.int64)
        places = np.concatenate(pads) if pads else np.zeros(0, dtype=np.int64)
        fork = slots[-1].end if slots else len(token_ids) // 2
        logits = self._run_model(token_ids, images, messages, last)
        return TriedRow(np.array(token_ids), positions, places, features, fork, logits)

    def _run_model(
        self, token_ids: list[int], images: list[Image.Image], messages: list[Message], last: int
    ) -> Tensor:
        """Return the whole model's `last` logits, or all, for the inputs from its own processor."""
        processor, model = load_processor(self.family.path), self.forward.model
        template = AnyVLMRenderer.find_template(self.family.path)
        shows_media = self.family.shows_media
        talk = [
            {"role": m.role, "content": to_template_content(m, images, shows_media)}
            for m in messages
        ]
        kind = "pt" if uses_torchvision(processor) else "np"
        _, inputs = apply_template(processor, template, talk, return_tensors=kind)
        if inputs["input_ids"][0].tolist() != token_ids:
            raise FamilyError(
                f"{self.family.path}: the weights trial failed: the processor writes different "
                "tokens than it did in the trials",
                "install the same transformers in every environment of the run",
            )
        arrays = {name: torch.as_tensor(array) for name, array in inputs.items()}
        dtype, device = self._parameter.dtype, self._parameter.device
        arguments: dict[str, Any] = {
            name: (a.to(dtype) if a.is_floating_point() else a).to(device)
            for name, a in arrays.items()
        }
        if last and "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = last
        with self.own_attention():
            logits: Tensor = model(**arguments, use_cache=False).logits[0]
        return logits[-last:]

    def _compute(self, parts: list[PackRow], pattern: Any) -> Float[Tensor, "tokens hidden"]:
        """Return the hidden states of tokens of several rows, as one run with `pattern`."""
        device = self._parameter.device
        token_ids = np.concatenate([row.token_ids[tokens] for row, tokens in parts])
        along = np.concatenate([row.positions[:, tokens] for row, tokens in parts], axis=1)
        masks = [np.isin(tokens, row.pads) for row, tokens in parts]
        places, features = np.flatnonzero(np.concatenate(masks)), None
        if len(places):
            image_features = [
                row.features[np.searchsorted(row.pads, tokens[mask])]
                for (row, tokens), mask in zip(parts, masks, strict=True)
                if row.features is not None
            ]
            features = torch.cat(image_features)
        ids, axes, at = (torch.from_numpy(x).to(device) for x in (token_ids, along, places))
        return self.forward.hidden(ids[None], axes[:, None], features, at, pattern)[0]
