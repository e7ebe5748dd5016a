"""When a prompt and its completion cannot be bridged to new messages: one law for all families.

The names are counted in metrics and listed in docs/chat_formats.md. A chat format itself decides
the last two, by hooks of `families.renderer.BaseRenderer`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sightline.message import ROLES

NO_NEW_MESSAGES = "no_new_messages"
UNKNOWN_ROLE = "unknown_role"
ASSISTANT_AMONG_NEW = "assistant_among_new"
SYSTEM_AMONG_NEW = "system_among_new"
PROMPT_WITHOUT_HEADER = "prompt_without_header"
STOP_INSIDE_COMPLETION = "stop_inside_completion"
MEDIA_IN_COMPLETION = "media_in_completion"
STOP_IN_REASONING = "stop_in_reasoning"
HISTORY_REWRITTEN = "history_rewritten"


def find_bridge_refusal(
    roles: Sequence[object],
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    header: Sequence[int],
    stop_token_ids: Collection[int],
    media_token_ids: Collection[int],
) -> str | None:
    """Why messages of `roles` cannot follow these ids in any chat format; None when they can.

    `header` is what every prompt ends with: it opens the assistant's turn.
    """
    if not roles:
        return NO_NEW_MESSAGES
    if any(role not in ROLES for role in roles):
        return UNKNOWN_ROLE
    if "assistant" in roles:
        return ASSISTANT_AMONG_NEW
    if "system" in roles:
        return SYSTEM_AMONG_NEW
    if list(prompt_ids[-len(header) :]) != list(header):
        return PROMPT_WITHOUT_HEADER
    if not set(completion_ids[:-1]).isdisjoint(stop_token_ids):
        return STOP_INSIDE_COMPLETION
    if not set(completion_ids).isdisjoint(media_token_ids):
        return MEDIA_IN_COMPLETION
    return None
