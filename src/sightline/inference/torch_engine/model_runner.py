"""One step on the device: encode the images that it shows, forward, sample."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.compute.attention import AttentionPattern
from sightline.compute.feature_cache import FeatureCache, ImageFeatures
from sightline.compute.logprobs import Hidden, chosen_logprobs
from sightline.families import Family, Forward
from sightline.inference.torch_engine import sampling
from sightline.inference.torch_engine.decode import CudaGraphDecoder
from sightline.inference.torch_engine.kv_cache import KVCache
from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.row_table import RowTable
from sightline.inference.torch_engine.step_plan import StepPlan
from sightline.pixels import Pixels
from sightline.wire import MediaItem
from sightline.wire.generate import SamplingParams

# On ARM, oneDNN spends 60 microseconds on every matrix product, however small; below this many
# rows OpenBLAS is faster.
ONEDNN_MIN_ROWS = 384

# Part of an image that a run shows: whose, which, its place in the run, and from where to where in
# its own tokens.
_ImagePart = tuple[TorchRequest, str, MediaItem, int, int, int]


@dataclass
class ModelRunner:
    """Used by the engine's thread alone."""

    forward: Forward
    family: Family
    features: FeatureCache
    rows: RowTable
    banned: tuple[int, ...]

    def __post_init__(self) -> None:
        parameter = next(self.forward.model.parameters())
        self._device = parameter.device
        self._banned = torch.tensor(self.banned, dtype=torch.long, device=self._device)
        self._picks_kernels = self._device.type == "cpu" and platform.machine() == "aarch64"
        self.kv = KVCache(
            self.rows.num_rows, self.rows.max_model_len, self._device, parameter.dtype
        )
        self.decoder: CudaGraphDecoder | None = None
        self._had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        if self._device.type == "cuda":
            # cuDNN plans anew for every shape of a prompt, which takes longer than to attend.
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.decoder = CudaGraphDecoder(self.forward, self.kv, self.rows, self._device)

    def close(self) -> None:
        """Sets the switches of torch that this runner has used back to where they were."""
        self._pick_kernels(ONEDNN_MIN_ROWS)
        torch.backends.cuda.enable_cudnn_sdp(self._had_cudnn)

    def _pick_kernels(self, num_rows: int) -> None:
        if self._picks_kernels:
            enabled: Any = num_rows >= ONEDNN_MIN_ROWS  # torch's stubs take the switch for constant
            torch.backends.mkldnn.enabled = enabled

    @property
    def nbytes(self) -> int:
        """Memory of what is kept of the rows."""
        return self.kv.nbytes

    @property
    def num_replayed(self) -> int:
        """Steps that were replayed as a CUDA graph."""
        return 0 if self.decoder is None else self.decoder.num_replayed

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Hidden states of the plan's tokens, which the KV cache holds afterwards."""
        if self.decoder is not None and (hidden := self.decoder.hidden(plan)) is not None:
            return hidden
        return self._forward(plan, running, self.kv.build_pattern(plan))

    def _forward(
        self,
        plan: StepPlan,
        running: dict[int, TorchRequest],
        pattern: AttentionPattern,
        num_rows: int = 1,
    ) -> Hidden:
        """Hidden states; the model gets the run cut into `num_rows` rows of equal length."""
        features, places = self._gather_features(plan, running)
        self._pick_kernels(plan.num_tokens)
        row, index = plan.flat()
        token_ids = torch.from_numpy(self.rows.tokens[row, index].astype(np.int64))
        positions = torch.from_numpy(self.rows.positions[:, row, index].astype(np.int64))
        hidden = self.forward.hidden(
            token_ids.to(self._device).view(num_rows, -1),
            positions.to(self._device).unflatten(1, (num_rows, -1)),
            features,
            places,
            pattern,
        )
        return hidden.flatten(0, 1)

    def _gather_features(
        self, plan: StepPlan, running: dict[int, TorchRequest]
    ) -> tuple[Float[Tensor, "shown hidden"] | None, Int[Tensor, " shown"] | None]:
        """Features that the plan's tokens show, and their places in its run."""
        parts = self._find_image_parts(plan, running)
        if not parts:
            return None, None
        self._encode_missing(parts)
        features = [request.features[key][low:high] for request, key, _, _, low, high in parts]
        places = [np.arange(at, at + high - low) for *_, at, low, high in parts]
        return torch.cat(features), torch.from_numpy(np.concatenate(places)).to(self._device)

    def _find_image_parts(
        self, plan: StepPlan, running: dict[int, TorchRequest]
    ) -> list[_ImagePart]:
        parts: list[_ImagePart] = []
        for i in np.flatnonzero(plan.starts < self.rows.prompt_length[plan.rows]).tolist():
            request = running[int(plan.rows[i])]
            start, end, at = int(plan.starts[i]), int(plan.ends[i]), int(plan.offsets[i])
            for slot, key in zip(request.slots, request.keys, strict=True):
                low, high = max(slot.offset, start), min(slot.end, end)
                if low < high:
                    within = (low - slot.offset, high - slot.offset)
                    parts.append((request, key, slot.item, at + low - start, *within))
        return parts

    def _encode_missing(self, parts: list[_ImagePart]) -> None:
        """Gives each request the features it lacks; an image goes through the tower once."""
        missing: dict[str, tuple[MediaItem, Pixels]] = {}
        for request, key, item, *_ in parts:
            if key not in request.features:
                missing.setdefault(key, (item, request.pixels[key]))
        if not missing:
            return
        self._pick_kernels(sum(len(pixels.patches) for _, pixels in missing.values()))
        encoded = self._encode_images(missing)
        for key, shown in encoded.items():
            self.features.put(key, shown)
        for request, key, *_ in parts:
            if key not in request.features:
                request.features[key] = encoded[key].features
                del request.pixels[key]

    def _encode_images(
        self, images: dict[str, tuple[MediaItem, Pixels]]
    ) -> dict[str, ImageFeatures]:
        """The features of all `images`, by key, in one pass of the vision tower."""
        items = [item for item, _ in images.values()]
        stacked = np.concatenate([pixels.patches for _, pixels in images.values()])
        patches = torch.from_numpy(stacked).to(self._device)
        features = self.forward.encode(patches, [item.grid for item in items])
        parts = features.split([self.family.num_tokens(item) for item in items])
        return {
            # A copy: a view would keep the features of the whole batch alive.
            key: ImageFeatures(part.clone() if len(items) > 1 else part, pixels.digest)
            for (key, (_, pixels)), part in zip(images.items(), parts, strict=True)
        }

    def score_prompts(
        self, plan: StepPlan, hidden: Hidden, running: dict[int, TorchRequest]
    ) -> None:
        """Fills in the prompt logprobs that this step has computed, where they are asked for.

        They are those of the distribution that a sampled token would come from: banned ids leave
        the softmax, then the temperature divides (1 where it is 0). Filters have no part.
        """
        for i in np.flatnonzero(plan.starts < self.rows.prompt_length[plan.rows]).tolist():
            row, start = int(plan.rows[i]), int(plan.starts[i])
            request = running[row]
            if request.params.prompt_logprobs is None:
                continue
            size = len(request.prompt)
            if request.prompt_logprobs is None:
                request.prompt_logprobs = np.full(size, np.nan, dtype=np.float32)
            # A token predicts the next one; the last of the prompt predicts none of it.
            count = min(int(plan.ends[i]), size - 1) - start
            if count > 0:
                at, scored = int(plan.offsets[i]), slice(start + 1, start + 1 + count)
                tokens = self.rows.tokens[row, scored]
                request.prompt_logprobs[scored] = self._logprobs(
                    hidden[at : at + count], tokens, request.params
                )

    def _logprobs(
        self, hidden: Hidden, token_ids: Int[np.ndarray, " tokens"], params: SamplingParams
    ) -> Float[np.ndarray, " tokens"]:
        """Logprobs of the tokens, each of which follows its hidden state; -inf for banned ids."""
        chosen = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        bans = torch.tensor(params.banned_token_ids, dtype=torch.long, device=self._device)
        banned, temperature = torch.cat([self._banned, bans]), params.temperature or 1.0
        found = chosen_logprobs(self.forward, hidden, chosen, banned, temperature)
        on_host: np.ndarray = found.cpu().numpy()
        return on_host

    def sample(
        self, plan: StepPlan, hidden: Hidden
    ) -> tuple[Int[np.ndarray, " samples"], Float[np.ndarray, " samples"]]:
        """The next token of each row that samples, and its logprob."""
        table, rows = self.rows, plan.rows[plan.samples]
        bans = [
            (i, table.banned[row]) for i, row in enumerate(rows.tolist()) if row in table.banned
        ]
        settings = sampling.SamplingMetadata(
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            uniform=sampling.draw_uniforms(
                table.seed[rows], table.length[rows] - table.prompt_length[rows]
            ),
            bans=bans,
        )
        if len(rows) < len(hidden):
            hidden = hidden[torch.from_numpy(plan.last()).to(self._device)]
        return sampling.sample(self.forward.logits(hidden), self._banned, settings)
