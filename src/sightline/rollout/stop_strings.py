"""Stop strings: find where a completion ends, after it was sampled.

The engine stops at token ids only, and samples the whole turn. The turn keeps the tokens up to the
one that completes the first stop string. Whether a token is kept depends only on it and the tokens
before it, so the kept tokens and their logprobs are those of an engine that stops there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from sightline.message import AssistantMessage, text
from sightline.render import Renderer, Tools


def read_answer(
    renderer: Renderer, token_ids: Sequence[int], tools: Tools | None, stops: Sequence[str]
) -> tuple[AssistantMessage, int | None]:
    """Return an answer's message, and its number of tokens if a stop string ends it.

    The text of such a message is cut before the stop string, as OpenAI does.
    """
    end = find_stop(token_ids, stops, renderer.decode)
    message = renderer.parse(token_ids[:end], tools)
    return (message, None) if end is None else (_cut_message(message, stops), end)


def find_stop(
    token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None without one."""

    def has_stop(num_tokens: int) -> bool:
        decoded = decode(token_ids[:num_tokens])
        return any(stop in decoded for stop in stops)

    num_tokens = len(token_ids)
    if not stops or not has_stop(num_tokens):
        return None
    return bisect_left(range(num_tokens), True, key=has_stop)


def _cut_message(message: AssistantMessage, stops: Sequence[str]) -> AssistantMessage:
    return msgspec.structs.replace(
        message,
        content=text(_cut(message.text, stops)),
        reasoning=None if message.reasoning is None else _cut(message.reasoning, stops),
        stopped=True,
    )


def _cut(spelled: str, stops: Sequence[str]) -> str:
    return spelled[: min((at for stop in stops if (at := spelled.find(stop)) >= 0), default=None)]
