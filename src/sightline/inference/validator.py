"""Validation of generate requests before the engine sees them. Every error names its field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sightline.errors import FingerprintMismatch, MediaRefused, Misaligned
from sightline.families import Family
from sightline.inference.errors import MAX_BODY_BYTES, build_engine_error
from sightline.wire import MediaItem, Slot
from sightline.wire.codec import find_json_excess
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_CHOICES = 64
MAX_STOP_IDS = 256
MAX_NAME_CHARS = 256
"""Maximum length of a request id, and of a model name in an error."""
BODY_BYTES_PER_TOKEN = 1024
"""Maximum bytes of a request body per token: its id, and its share of an image's item."""
MAX_SEED = 2**64
# Outside these bounds, the scaled logits leave the range of float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e6
_SEE_DOCS = "see docs/serving_api.md for the fields of a request"
_ERROR_PATH = re.compile(r"(.*) - at `\$\.?([^`]*)`", re.DOTALL)
_DECODER = msgspec.json.Decoder(GenerateRequest)
_WORD = re.compile(r"\w+")
_ERROR_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `([^`]*)`")


@dataclass(slots=True, eq=False)
class ValidatedRequest:
    prompt: np.ndarray
    """int32 (tokens,)."""
    slots: list[Slot]
    keys: list[str]
    """The key of each slot's item. Equal keys mean equal pixels."""
    params: SamplingParams
    request_id: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class RequestValidator:
    family: Family
    pad_id: int
    """The pad id of images; -1 if the model has none."""
    vocab_size: int
    max_model_len: int
    models: frozenset[str]
    """Model names that a request may use."""
    video_pad_id: int = -1
    """The pad id of videos; -1 if the model has none."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body, given `max_model_len`."""
        return min(MAX_BODY_BYTES, BODY_BYTES_PER_TOKEN * max(self.max_model_len, 1024))

    def check(self, body: bytes) -> ValidatedRequest:
        return self.check_request(self._decode(body))

    def check_request(self, request: GenerateRequest) -> ValidatedRequest:
        params = request.sampling_params
        if len(request.request_id) > MAX_NAME_CHARS:
            problem = f"request_id: it has {len(request.request_id)} characters"
            raise build_engine_error("schema", problem, f"send at most {MAX_NAME_CHARS}")
        if request.model is not None and request.model not in self.models:
            problem = f"model: {request.model[:MAX_NAME_CHARS]!r} is not served here"
            fix = f"leave it out, or send one of: {', '.join(sorted(self.models))}"
            raise build_engine_error("model", problem, fix)
        prompt = self._check_tokens(request.token_ids, params)
        for name, allowed in _find_faults(params, self.vocab_size):
            problem = f"sampling_params.{name}: {getattr(params, name)!r} is not allowed"
            raise build_engine_error("sampling", problem, f"send {allowed}")
        slots, keys = self._check_slots(request)
        self._check_pads(prompt, slots)
        return ValidatedRequest(prompt, slots, keys, params, request_id=request.request_id)

    def _decode(self, body: bytes) -> GenerateRequest:
        if excess := find_json_excess(body, self.max_model_len):
            raise build_engine_error("schema", f"the body has {excess}", _SEE_DOCS)
        try:
            return _DECODER.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # msgspec writes `[...]` for any key of a mapping. A family has one modality.
            text = str(error).replace("[...]", f".{self.family.modality}")
            raise build_engine_error("schema", _describe_schema_error(text), _SEE_DOCS) from error

    def _check_tokens(self, token_ids: list[int], params: SamplingParams) -> np.ndarray:
        if not token_ids:
            raise build_engine_error("token_ids", "token_ids: it is empty", "send 1 token or more")
        if params.max_tokens < 1:
            problem = f"sampling_params.max_tokens: {params.max_tokens} is too small"
            raise build_engine_error("sampling", problem, "send 1 or more")
        if len(token_ids) + params.max_tokens > self.max_model_len:
            total = f"{len(token_ids)} tokens plus max_tokens = {params.max_tokens}"
            problem = f"token_ids: {total} exceed max_model_len = {self.max_model_len}"
            fix = "shorten the prompt, lower max_tokens, or serve with a larger max_model_len"
            raise build_engine_error("too_long", problem, fix)
        try:
            wide = np.array(token_ids, dtype=np.int64)
        except OverflowError:
            wide = np.array([-1])
        if int(wide.min()) < 0 or int(wide.max()) >= self.vocab_size:
            at = next(i for i, t in enumerate(token_ids) if not 0 <= t < self.vocab_size)
            raise build_engine_error(
                "token_ids",
                f"token_ids[{at}]: {token_ids[at]} is outside the vocabulary of {self.vocab_size}",
                "render with the renderer of the served checkpoint",
            )
        return wide.astype(np.int32)

    def _check_slots(self, request: GenerateRequest) -> tuple[list[Slot], list[str]]:
        if request.features is None:
            return [], []
        modality = self.family.modality
        if not self.family.shows_media or request.features.mm_hashes.keys() - {modality}:
            allowed = modality if self.family.shows_media else "no"
            sent = sorted(request.features.mm_hashes)
            problem = f"features: this checkpoint accepts {allowed} media. The request has {sent}"
            fix = "render with the renderer of the served checkpoint"
            raise build_engine_error("slots", problem, fix)
        num = sum(map(len, request.features.kwargs_data.values()))
        if num > len(request.token_ids):
            problem = f"features.kwargs_data: {num} items exceed {len(request.token_ids)} tokens"
            raise build_engine_error("slots", problem, "send one item per slot")
        slots = request.slots()
        for i, slot in enumerate(slots):
            self._check_item(i, slot, modality)
        return slots, [item_key(slot.item) for slot in slots]

    def _check_item(self, i: int, slot: Slot, modality: str) -> None:
        path = f"features.kwargs_data.{modality}[{i}]"
        try:
            self.family.check_item(slot.item)
        except FingerprintMismatch as error:
            raise FingerprintMismatch(f"{path}: {error.problem}", error.fix) from error
        except (Misaligned, MediaRefused) as error:
            raise build_engine_error("slots", f"{path}: {error.problem}", error.fix) from error
        length = self.family.num_tokens(slot.item)
        if slot.length != length:
            place, grid = f"features.mm_placeholders.{modality}[{i}]", slot.item.grid
            problem = f"{place}: it has {slot.length} tokens, but its grid {grid} needs {length}"
            fix = "expand every image into as many pads as its grid needs"
            raise build_engine_error("slots", problem, fix)

    def _check_pads(self, prompt: np.ndarray, slots: list[Slot]) -> None:
        """Raise unless the pads of the prompt are exactly the tokens in the slots."""
        pads = np.where(np.isin(prompt, (self.pad_id, self.video_pad_id)), prompt, -1)
        expected = np.full(len(prompt), -1, dtype=prompt.dtype)
        for slot in slots:
            pad_id = self.pad_id if slot.item.step is None else self.video_pad_id
            expected[slot.offset + self.family.feature_offsets(slot.item)] = pad_id
        if np.array_equal(pads, expected):
            return
        at = int(np.flatnonzero(pads != expected)[0])
        inside = f"token {int(prompt[at])} is in a slot, where {int(expected[at])} is expected"
        where = f"pad {int(prompt[at])} is outside every slot" if expected[at] < 0 else inside
        fix = "send the slots that the renderer returned with these tokens"
        raise build_engine_error("pads", f"token_ids[{at}]: {where}", fix)


def _describe_schema_error(text: str) -> str:
    """Return msgspec's message with the path of the field first."""
    at = _ERROR_PATH.fullmatch(text)
    what, path = (at[1], at[2]) if at else (text, "")
    if (field := _ERROR_FIELD.match(what)) and _WORD.fullmatch(field[1]):
        path = f"{path}.{field[1]}" if path else field[1]
    return f"{path}: {what}" if path else f"this is not a generate request: {what}"


def item_key(item: MediaItem) -> str:
    """Return the cache key of an item. It includes the size, which a client could misstate."""
    return f"{item.key}/{item.ref.width}x{item.ref.height}"


def _find_faults(params: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid parameter and its allowed values."""
    if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        yield "temperature", f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if not 0 < params.top_p <= 1:
        yield "top_p", "more than 0, at most 1"
    if not -1 <= params.top_k < 2**31:
        yield "top_k", "a count below 2**31; 0 or -1 is off"
    if not 0 <= params.min_p <= 1:
        yield "min_p", "0 to 1"
    if params.seed is not None and not 0 <= params.seed < MAX_SEED:
        yield "seed", "null, or 0 up to 2**64 - 1"
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        yield "stop_token_ids", f"ids below {vocab_size}"
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        yield "stop_token_ids", f"at most {MAX_STOP_IDS} ids"
    if params.logprobs not in (None, 0):
        yield "logprobs", "0 for the sampled tokens, or null for none"
    if params.prompt_logprobs not in (None, 0):
        yield "prompt_logprobs", "0 for the prompt's tokens, or null for none"
    if params.reward and params.max_tokens != 1:
        yield "max_tokens", "1 for a reward: a reward model samples no text"
    if params.routes_from is not None and params.routes_from < 0:
        yield "routes_from", "the index of a token, or null for none"
    if not 1 <= params.n <= MAX_CHOICES:
        yield "n", f"1 to {MAX_CHOICES}"
    if params.detokenize:
        yield "detokenize", "false: requests and answers hold token ids"
