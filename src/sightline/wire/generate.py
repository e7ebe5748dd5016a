"""The generate protocol: vLLM's `/inference/v1/generate` shape, with references for pixels."""

from __future__ import annotations

import msgspec

from sightline.errors import Misaligned, WireError
from sightline.wire.item import MediaItem, Slot, check_slots


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 or -1 takes all."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that cannot be sampled, beside the pads, which never can."""
    logprobs: int | None = 0
    """0 asks for the logprob of each sampled token; null asks for none."""
    prompt_logprobs: int | None = None
    """0 asks for the logprobs of the prompt's own tokens; null asks for none."""
    n: int = 1
    detokenize: bool = False
    skip_reading_prefix_cache: bool | None = None


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a slot as vLLM writes it, without its item."""

    offset: int
    length: int


class MultiModalFeatures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lists per modality, in step with one another: hash, place and reference of each slot."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[Placeholder]]
    kwargs_data: dict[str, list[str]]


FEATURE_LISTS = ("mm_hashes", "mm_placeholders", "kwargs_data")


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    token_ids: list[int]
    sampling_params: SamplingParams
    features: MultiModalFeatures | None = None
    request_id: str = ""
    model: str | None = None

    @classmethod
    def of(
        cls,
        token_ids: list[int],
        slots: list[Slot],
        params: SamplingParams,
        modality: str = "image",
        request_id: str = "",
        model: str | None = None,
    ) -> GenerateRequest:
        features = None
        if slots:
            features = MultiModalFeatures(
                mm_hashes={modality: [slot.item.key for slot in slots]},
                mm_placeholders={modality: [Placeholder(s.offset, s.length) for s in slots]},
                kwargs_data={modality: [slot.item.to_raw() for slot in slots]},
            )
        return cls(token_ids, params, features, request_id, model)

    def slots(self) -> list[Slot]:
        """The slots of the request, checked: counts, order, bounds and keys."""
        if self.features is None:
            return []
        features = self.features
        hashes, places, raws = features.mm_hashes, features.mm_placeholders, features.kwargs_data
        if not (hashes.keys() == places.keys() == raws.keys()):
            raise Misaligned(
                "features: its three lists name different modalities", "send the same in each"
            )
        slots: list[Slot] = []
        for modality in hashes:
            counts = (len(hashes[modality]), len(places[modality]), len(raws[modality]))
            if len(set(counts)) != 1:
                raise Misaligned(
                    f"{_find_odd_list(counts, modality)}: the lists of hashes, places and items "
                    f"hold {counts} entries",
                    "send one entry a slot in each",
                )
            for i, (key, place, raw) in enumerate(
                zip(hashes[modality], places[modality], raws[modality], strict=True)
            ):
                try:
                    item = MediaItem.from_raw(raw)
                except WireError as error:
                    path = f"features.kwargs_data.{modality}[{i}]"
                    raise WireError(f"{path}: {error.problem}", error.fix) from error
                if key != item.key:
                    raise Misaligned(
                        f"features.mm_hashes.{modality}[{i}]: not the key of its item",
                        "send MediaItem.key: SHA-256 over media digest and fingerprint",
                    )
                slots.append(Slot(place.offset, place.length, item))
            check_slots(slots, len(self.token_ids), f"features.mm_placeholders.{modality}")
        return slots


def _find_odd_list(counts: tuple[int, int, int], modality: str) -> str:
    """The path of the list that differs from the two others; of all where each differs."""
    odd = [name for name, num in zip(FEATURE_LISTS, counts, strict=True) if counts.count(num) == 1]
    return f"features.{odd[0]}.{modality}" if len(odd) == 1 else "features"


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights called `version`: vLLM's shape."""

    version: str
    start: int
    end: int


def join_version_labels(spans: list[VersionSpan]) -> str:
    """The versions that sampled an answer, as one word; several where weights changed in it."""
    return ",".join(dict.fromkeys(span.version for span in spans))


class Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    """Why sampling ended: stop, length or abort."""
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class SightlineFields(msgspec.Struct, frozen=True):
    """What our engines add to vLLM's own fields."""

    pixel_digests: list[str]
    """Digests of the pixels that the engine made, one per slot of the request."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its KV cache."""


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


class GenerateResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Read leniently: an engine may say more than we know."""

    request_id: str
    choices: list[Choice]
    sightline: SightlineFields | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    """One entry per token of the prompt, by its id; null for the first token and for tokens that
    cannot be sampled."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    """Stable name of the kind of error, as listed in docs/serving.md."""
    code: int
    fix: str = ""
    path: str = ""
    """JSON path of the field that a 400 is about."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class AdoptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells an engine to take the weights of a manifest."""

    manifest: str
    """Path of the manifest file, as the server sees it."""
