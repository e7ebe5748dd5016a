"""The generate protocol: vLLM's `/inference/v1/generate`, with references in place of pixels."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, TypeVar

import msgspec

from sightline.errors import EngineError, Misaligned, WireError
from sightline.wire.array import Array
from sightline.wire.item import MediaItem, Slot, check_slots
from sightline.wire.weights import Manifest, parse_version_label

WEIGHTS_UNAVAILABLE = "weights_unavailable"
"""The kind of an error if the store of the weights is temporarily unavailable."""
WRONG_ANSWER = "wrong_answer"
"""The kind of an EngineError about an invalid answer."""
FINISH_REASONS = ("stop", "length", "abort")
LOGPROB_ROUNDING = 1e-4
"""Maximum by which rounding may raise a logprob above 0."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1 for all."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = 0
    """0 for the logprob of each sampled token, or null for none."""
    prompt_logprobs: int | None = None
    """0 for the logprobs of the prompt's tokens, or null for none."""
    reward: bool = False
    """Whether to return the reward that a reward model gives the prompt. `max_tokens` is then 1."""
    routes_from: int | None = None
    """The prompt's first token whose experts the answer reports, or null for none."""
    n: int = 1
    detokenize: bool = False
    skip_reading_prefix_cache: bool | None = None


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a slot in vLLM's format, without its item."""

    offset: int
    length: int


class MultiModalFeatures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallel lists per modality: hash, position and reference of each slot."""

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
        """Return the request's slots. Raise if counts, order, bounds or keys are wrong."""
        if self.features is None:
            return []
        features = self.features
        hashes, places, raws = features.mm_hashes, features.mm_placeholders, features.kwargs_data
        if not (hashes.keys() == places.keys() == raws.keys()):
            raise Misaligned(
                "features: the three lists have different modalities", "use the same in each"
            )
        slots: list[Slot] = []
        for modality in hashes:
            counts = (len(hashes[modality]), len(places[modality]), len(raws[modality]))
            if len(set(counts)) != 1:
                odd = [
                    k for k, n in zip(FEATURE_LISTS, counts, strict=True) if counts.count(n) == 1
                ]
                where = f"features.{odd[0]}.{modality}" if len(odd) == 1 else "features"
                raise Misaligned(
                    f"{where}: the lists of hashes, placeholders and items have {counts} entries",
                    "send one entry per slot in each",
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
                        f"features.mm_hashes.{modality}[{i}]: this is not the key of its item",
                        "send MediaItem.key: SHA-256 over media digest and fingerprint",
                    )
                slots.append(Slot(place.offset, place.length, item))
            check_slots(slots, len(self.token_ids), f"features.mm_placeholders.{modality}")
        return slots


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by the weights `version`, in vLLM's format."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    """Why sampling ended: stop, length or abort."""
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    routes: Array | None = None
    """The experts of each token starting at `routes_from`, except the last one, which the engine
    has not computed: (tokens, layers, experts per token). None for a model without experts."""


class SightlineFields(msgspec.Struct, frozen=True):
    """Fields that our engines add to vLLM's."""

    pixel_digests: list[str]
    """Digests of the engine's pixels, one per slot of the request."""
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its KV cache."""
    reward: float | None = None
    """The reward of the prompt, if requested."""


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


class GenerateResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Unknown fields are ignored, because an engine may add its own."""

    request_id: str
    choices: list[Choice]
    sightline: SightlineFields | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    """One entry per token of the prompt, by its id. Null for the first token and for tokens that
    cannot be sampled."""


Answer = TypeVar("Answer")


def decode_answer(data: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong_answer("", f"it cannot be decoded: {error}") from error


def check_answer(
    request: GenerateRequest,
    response: GenerateResponse,
    vocab_size: int = 0,
    banned_token_ids: Collection[int] = (),
    max_model_len: int = 0,
) -> None:
    """Raise if the answer is invalid for this request. A size of 0 means unknown.

    The error concerns the server, not one rollout, so it ends the run.
    """
    params = request.sampling_params
    if sorted(choice.index for choice in response.choices) != list(range(params.n)):
        indices = [choice.index for choice in response.choices[:8]]
        raise _wrong_answer(request.request_id, f"choices {indices} for n = {params.n}")
    for choice in response.choices:
        problem = (
            _find_wrong_end(request, choice, max_model_len)
            or _find_wrong_ids(choice.token_ids, vocab_size, banned_token_ids)
            or _find_wrong_logprobs(params, choice)
            or _find_wrong_versions(choice)
            or _find_wrong_routes(request, choice)
        )
        if problem:
            raise _wrong_answer(request.request_id, problem)


def _find_wrong_end(request: GenerateRequest, choice: Choice, max_model_len: int) -> str:
    ids, params, reason = choice.token_ids, request.sampling_params, choice.finish_reason
    if reason not in FINISH_REASONS:
        return f"finish reason {reason[:40]!r}"
    if len(ids) > params.max_tokens:
        return f"{len(ids)} tokens for max_tokens = {params.max_tokens}"
    is_full = 0 < max_model_len <= len(request.token_ids) + len(ids)
    if reason == "length" and len(ids) < params.max_tokens and not is_full:
        return f"ended by length after {len(ids)} tokens, for max_tokens = {params.max_tokens}"
    stops = [at for at, token in enumerate(ids) if token in params.stop_token_ids]
    if stops[:1] not in ([], [len(ids) - 1]):
        return f"tokens after the stop token at {stops[0]}"
    if reason == "stop" and not stops:
        return f"ended by stop with token {ids[-1:]}, which is not a stop token"
    return ""


def _find_wrong_ids(ids: list[int], vocab_size: int, banned: Collection[int]) -> str:
    for at, token in enumerate(ids):
        if token in banned:
            return f"token {at} is {token}, which is banned"
        if token < 0 or 0 < vocab_size <= token:
            return f"token {at} is {token}, for a vocabulary of {vocab_size or 'unknown size'}"
    return ""


def _find_wrong_logprobs(params: SamplingParams, choice: Choice) -> str:
    if params.logprobs is None:
        return ""
    entries = [] if choice.logprobs is None else choice.logprobs.content
    if [entry.token_id for entry in entries] != choice.token_ids:
        return f"{len(entries)} logprobs that do not match its {len(choice.token_ids)} tokens"
    for at, entry in enumerate(entries):
        if not -math.inf < entry.logprob <= LOGPROB_ROUNDING:
            return f"the logprob of token {at} is {entry.logprob}"
    return ""


def _find_wrong_versions(choice: Choice) -> str:
    """Describe spans that do not cover the tokens. A missing list is checked elsewhere."""
    if choice.weight_versions is None:
        return ""
    end = 0
    for span in choice.weight_versions:
        try:
            parse_version_label(span.version)
        except WireError as error:
            return error.problem
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    else:
        if end == len(choice.token_ids):
            return ""
    spans = [(span.start, span.end) for span in choice.weight_versions[:8]]
    return f"weight_versions {spans} for {len(choice.token_ids)} tokens"


def _find_wrong_routes(request: GenerateRequest, choice: Choice) -> str:
    if (routes := choice.routes) is None:
        return ""
    first, num_tokens = request.sampling_params.routes_from, len(request.token_ids)
    num_expected = 0 if first is None else num_tokens + len(choice.token_ids) - 1 - first
    is_right = len(routes.shape) == 3 and len(routes) == num_expected
    return "" if is_right else f"routes of shape {routes.shape} for {num_expected} tokens"


def _wrong_answer(request_id: str, what: str) -> EngineError:
    return EngineError(
        f"the inference server gave a wrong answer{f' to {request_id}' * bool(request_id)}: {what}",
        "look at the server's log, and fix or replace its engine. This answer was not trained on",
        kind=WRONG_ANSWER,
        status=502,
    )


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    """Stable name of the kind of error, as listed in docs/serving_api.md."""
    code: int
    fix: str = ""
    path: str = ""
    """JSON path of the field that caused a 400."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class AdoptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks an engine to adopt the weights of a manifest."""

    manifest: str
    """Path of the manifest file, as the server sees it."""
    content: Manifest | None = None
    """The manifest itself, if the server cannot read the file."""


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Takes, renews or, for 0 seconds, returns the right to change a server's weights."""

    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,64}$")]
    """Id of the run."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """Duration of the lease from now on."""
