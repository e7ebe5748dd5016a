"""One step on the device: encode images, run the model, sample."""

from __future__ import annotations

import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from sightline.compute.attention import AttentionPattern, PackedPattern
from sightline.compute.feature_cache import FeatureCache, ItemFeatures
from sightline.compute.fused_layers import fuse_layers
from sightline.compute.logprobs import Hidden, Logits, Temperature, chosen_logprobs
from sightline.families import Family, Forward
from sightline.families.device_copy import allocate_rows, copy_to_device
from sightline.families.experts import ExpertRouting
from sightline.inference.torch_engine import sampling
from sightline.inference.torch_engine.decode import CudaGraphDecoder
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.row_table import RowTable, StepPlan, TorchRequest
from sightline.pixels import Pixels, widen_patches
from sightline.wire import MediaItem
from sightline.wire.generate import SamplingParams

# On ARM, oneDNN adds 60 microseconds to every matrix product. Below this number of rows, OpenBLAS
# is faster.
ONEDNN_MIN_ROWS = 384

MAX_PADDED_TOKENS = 16384
"""Maximum number of tokens, with padding, in a forward pass of several whole rows."""

# Part of an image in a step: its request, key and item, the positions that its features fill, and
# the range of its features.
_ItemPart = tuple[TorchRequest, str, MediaItem, np.ndarray, int, int]


@dataclass
class ModelRunner:
    """Runs steps on the device. Only the engine's thread uses it."""

    forward: Forward
    family: Family
    features: FeatureCache
    rows: RowTable
    banned: tuple[int, ...]
    exact: bool = False
    """Whether the model was loaded for exact arithmetic: see `compute.exact`."""
    max_kv_bytes: int = 0
    """Maximum size of the KV cache; 0 for no limit other than the rows."""
    decodes_in_graphs: ClassVar[bool] = True
    keeps_kv: ClassVar[bool] = True
    """Whether each token is computed once. If not, every step recomputes its row."""

    def __post_init__(self) -> None:
        parameter = next(self.forward.model.parameters())
        self._device = parameter.device
        # Routes are stored in the KV cache's pages.
        routing = getattr(self.forward, "routing", None) if self.keeps_kv else None
        self.routing: ExpertRouting | None = routing
        self._banned = torch.tensor(self.banned, dtype=torch.long, device=self._device)
        is_cpu = self._device.type == "cpu"
        self._picks_kernels = is_cpu and platform.machine() == "aarch64" and not self.exact
        size = (self.rows.num_rows, self.rows.max_model_len, self._device, parameter.dtype)
        self._vision_marks: deque[tuple[Any, Any]] = deque()
        """Start and end of vision passes whose time is not counted yet."""
        self._had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        if self._device.type == "cuda":
            # cuDNN makes a plan for every prompt shape, which takes longer than the attention.
            torch.backends.cuda.enable_cudnn_sdp(False)
            if self.keeps_kv and not self.exact:
                fuse_layers(self.forward.model)
        max_bytes = self.max_kv_bytes if self.keeps_kv else 0
        kv = KVCache(*size, exact=self.exact, max_bytes=max_bytes)
        has_fixed_shapes = self.keeps_kv and (self._device.type == "cuda" or self.exact)
        if has_fixed_shapes and not self.decodes_in_graphs:
            print("decoding without graphs: layers carry a state", file=sys.stderr)
        self.use_kv_cache(kv, has_fixed_shapes)

    def use_kv_cache(self, kv: KVCache, has_fixed_shapes: bool = True) -> None:
        """Use `kv` as the KV cache, and decode with fixed shapes if requested and possible."""
        self.kv = kv
        self.rows.on_release = kv.free_row
        self.decoder: CudaGraphDecoder | None = None
        if has_fixed_shapes and self.decodes_in_graphs:
            self.decoder = CudaGraphDecoder(self.forward, kv, self.rows, self._device)

    def close(self) -> None:
        """Restore the torch settings that this runner changed."""
        self._pick_kernels(ONEDNN_MIN_ROWS)
        torch.backends.cuda.enable_cudnn_sdp(self._had_cudnn)

    def _pick_kernels(self, num_rows: int) -> None:
        if self._picks_kernels:
            enabled: Any = num_rows >= ONEDNN_MIN_ROWS  # torch's stubs declare it constant
            torch.backends.mkldnn.enabled = enabled

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def gives_rewards(self) -> bool:
        """Return whether the checkpoint is a reward model."""
        return hasattr(self.forward.model, "score")

    def share_prefix(self, source: int, row: int, length: int) -> None:
        self.kv.share_prefix(source, row, length)

    @property
    def num_replayed(self) -> int:
        return 0 if self.decoder is None else self.decoder.num_replayed

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Compute the plan's tokens into the KV cache, and return their hidden states."""
        return self._forward(plan, running, self.kv.build_pattern(plan))

    def _forward(
        self,
        plan: StepPlan,
        running: dict[int, TorchRequest],
        pattern: AttentionPattern,
        num_rows: int = 1,
    ) -> Hidden:
        """Return hidden states. The model gets the run as `num_rows` rows of equal length."""
        features, places = self._gather_features(plan, running)
        self._pick_kernels(plan.num_tokens)
        row, index = plan.flat()
        tokens = self._copy(self.rows.tokens[row, index].astype(np.int64)).view(num_rows, -1)
        along = self._copy(self.rows.positions[:, row, index].astype(np.int64))
        positions = along.unflatten(1, (num_rows, -1))
        hidden = self.forward.hidden(tokens, positions, features, places, pattern)
        if self.routing is not None:
            self.kv.put_routes(plan, self.routing.get_routes())
        return hidden.flatten(0, 1)

    def _copy(self, array: np.ndarray) -> Tensor:
        """Copy to the device without waiting for earlier work there."""
        return copy_to_device(array, self._device)

    def _gather_features(
        self, plan: StepPlan, running: dict[int, TorchRequest]
    ) -> tuple[Float[Tensor, "shown hidden"] | None, Int[Tensor, " shown"] | None]:
        """Return the image features in the plan's tokens, and their positions in its run."""
        parts = self._find_item_parts(plan, running)
        if not parts:
            return None, None
        self._encode_missing(parts)
        features = [request.features[key][low:high] for request, key, _, _, low, high in parts]
        places = np.concatenate([positions for *_, positions, _, _ in parts])
        return torch.cat(features), self._copy(places)

    def _find_item_parts(self, plan: StepPlan, running: dict[int, TorchRequest]) -> list[_ItemPart]:
        parts: list[_ItemPart] = []
        for i in np.flatnonzero(plan.starts < self.rows.prompt_length[plan.rows]).tolist():
            request = running[int(plan.rows[i])]
            start, end, at = int(plan.starts[i]), int(plan.ends[i]), int(plan.offsets[i])
            for slot, key in zip(request.slots, request.keys, strict=True):
                if slot.end <= start or slot.offset >= end:
                    continue
                places = slot.offset + self.family.feature_offsets(slot.item)
                low, high = np.searchsorted(places, (start, end)).tolist()
                if low < high:
                    positions = at - start + places[low:high]
                    parts.append((request, key, slot.item, positions, low, high))
        return parts

    def _encode_missing(self, parts: list[_ItemPart]) -> None:
        """Encode the images that requests lack features of, each of them once."""
        missing: dict[str, tuple[MediaItem, Pixels]] = {}
        for request, key, item, *_ in parts:
            if key not in request.features:
                missing.setdefault(key, (item, request.pixels[key]))
        if not missing:
            return
        self._pick_kernels(sum(len(pixels.patches) for _, pixels in missing.values()))
        began = self._mark()
        encoded = self._encode_items(missing)
        self._vision_marks.append((began, self._mark()))
        for key, features in encoded.items():
            self.features.put(key, features)
        for request, key, *_ in parts:
            if key not in request.features:
                request.features[key] = encoded[key].features
                del request.pixels[key]

    def _mark(self) -> Any:
        """Return the current time, or on CUDA an event in the device's queue."""
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def take_vision_seconds(self) -> float:
        """Return the seconds of finished vision passes since the last call. Never waits."""
        seconds, is_cuda = 0.0, self._device.type == "cuda"
        while self._vision_marks and (not is_cuda or self._vision_marks[0][1].query()):
            began, ended = self._vision_marks.popleft()
            seconds += began.elapsed_time(ended) / 1e3 if is_cuda else ended - began
        return seconds

    def _encode_items(self, images: dict[str, tuple[MediaItem, Pixels]]) -> dict[str, ItemFeatures]:
        """Encode all `images` in one pass of the vision tower."""
        items = [item for item, _ in images.values()]
        parts = [pixels.patches for _, pixels in images.values()]
        width = max(part.shape[1] for part in parts)
        stacked = allocate_rows(sum(map(len, parts)), width, self._device)
        np.concatenate([widen_patches(part, width, self.family) for part in parts], out=stacked)
        features = self.forward.encode(self._copy(stacked), [item.grid for item in items])
        parts_per_item = features.split([len(self.family.feature_offsets(item)) for item in items])
        return {
            # A copy, because a view would keep the whole batch alive.
            key: ItemFeatures(part.clone() if len(items) > 1 else part, pixels.digest)
            for (key, (_, pixels)), part in zip(images.items(), parts_per_item, strict=True)
        }

    def score_prompts(
        self, plan: StepPlan, hidden: Hidden, running: dict[int, TorchRequest]
    ) -> None:
        """Store the requested prompt logprobs that this step computed.

        They come from the sampling distribution: banned ids are masked, then logits are divided by
        the temperature (by 1 if it is 0). Top-k, top-p and min-p do not apply.
        """
        for i in np.flatnonzero(plan.starts < self.rows.prompt_length[plan.rows]).tolist():
            row, start = int(plan.rows[i]), int(plan.starts[i])
            request = running[row]
            if request.params.prompt_logprobs is None:
                continue
            size = len(request.prompt)
            if request.prompt_logprobs is None:
                request.prompt_logprobs = np.full(size, np.nan, dtype=np.float32)
            # Each token predicts the next one. The prompt's last token predicts none of the prompt.
            count = min(int(plan.ends[i]), size - 1) - start
            if count > 0:
                at, scored = int(plan.offsets[i]), slice(start + 1, start + 1 + count)
                states, tokens = hidden[at : at + count], self.rows.tokens[row, scored]
                request.prompt_logprobs[scored] = self._logprobs(states, tokens, request.params)

    def _logprobs(
        self, hidden: Hidden, token_ids: Int[np.ndarray, " tokens"], params: SamplingParams
    ) -> Float[np.ndarray, " tokens"]:
        """Return the logprob of each token, given the hidden state before it."""
        chosen = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        number = params.temperature or 1.0
        temperature: Temperature = number
        if self.exact:
            temperature = torch.full((1, 1), number, device=self._device)
        logprobs = chosen_logprobs(self.forward, hidden, chosen, self._banned, temperature)
        return logprobs.cpu().numpy()

    def step(self, plan: StepPlan, running: dict[int, TorchRequest]) -> list[Drawn]:
        """Compute the plan's tokens, and sample the next token of each row that is ready."""
        drawn = []
        if self.decoder is not None and (decodes := self.decoder.find_rows(plan)).any():
            part = plan.select(np.flatnonzero(decodes))
            drawn.append(self._draw(part.rows, self.decoder.logits(part)))
            plan = plan.select(np.flatnonzero(~decodes))
        if len(plan.rows):
            hidden = self.hidden(plan, running)
            self.score_prompts(plan, hidden, running)
            if plan.samples.any():
                rows = plan.rows[plan.samples]
                if len(rows) < len(hidden):
                    hidden = hidden[self._copy(plan.last())]
                if self.gives_rewards:
                    head: Any = self.forward.model.score
                    rewards = head(hidden).squeeze(1).tolist()
                    for row, reward in zip(rows.tolist(), rewards, strict=True):
                        running[row].reward = reward
                drawn.append(self._draw(rows, self.forward.logits(hidden)))
        return drawn

    def _draw(self, rows: np.ndarray, logits: Logits) -> Drawn:
        """Sample the next token of each of `rows`, and start copying it to the host."""
        table = self.rows
        num_sampled = table.length[rows] - table.prompt_length[rows]
        uniform = sampling.draw_uniforms(table.seed[rows], num_sampled)
        limits = table.top_k[rows], table.top_p[rows], table.min_p[rows]
        settings = sampling.SamplingMetadata(table.temperature[rows], *limits, uniform)
        drawn = sampling.draw_samples(logits, self._banned, settings, self.exact)
        if self.decoder is None:
            return Drawn(rows, drawn.cpu(), None)
        self.decoder.put_tokens(rows, drawn[0].long())
        if not drawn.is_cuda:
            return Drawn(rows, drawn, None)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Drawn(rows, host, event)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampled tokens and their logprobs."""

    rows: np.ndarray
    both: Float64[Tensor, "2 rows"]
    event: torch.cuda.Event | None
    """Marks the end of the copy to the host."""

    def read(self) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.both.numpy()
        return tokens.astype(np.int64), logprobs.astype(np.float32)


class WholeRowRunner(ModelRunner):
    """Runs models whose own attention cannot use our KV cache, so that each step recomputes whole
    rows."""

    keeps_kv = False

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Return the hidden states of the plan's tokens."""
        done, places = [], []
        for part in group_rows(plan.ends):
            picked = plan.select(part)
            whole = replace(picked, starts=np.zeros_like(picked.starts), counts=picked.ends)
            pattern = PackedPattern(whole.counts.tolist(), self._device)
            hidden = self._forward(whole, running, pattern)
            new_tokens = _find_tokens(whole.offsets + picked.starts, picked.counts)
            done.append(hidden[self._copy(new_tokens)])
            places.append(_find_tokens(plan.offsets[part], picked.counts))
        order = self._copy(np.argsort(np.concatenate(places)))
        return torch.cat(done)[order]


def group_rows(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of each forward pass: rows of similar length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, MAX_PADDED_TOKENS // int(lengths[order[start]]))
        yield order[start:end]
        start = end


def _find_tokens(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the positions of several runs of tokens."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
