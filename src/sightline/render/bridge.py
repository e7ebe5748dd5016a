"""Reasons to refuse appending new messages to a prompt and its completion.

They are the same for all families, counted in metrics and listed in docs/chat_formats.md. Chat
formats add two more through hooks in `families.renderer`: stop_in_reasoning and history_rewritten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sightline.message import ROLES


def find_bridge_refusal(
    roles: Sequence[object],
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    header: Sequence[int],
    stop_token_ids: Collection[int],
    media_token_ids: Collection[int],
) -> str | None:
    """Return why messages of `roles` cannot follow these ids in any chat format, or None.

    `header` is the ids that open the assistant's turn. Every prompt ends with them.
    """
    if not roles:
        return "no_new_messages"
    if any(role not in ROLES for role in roles):
        return "unknown_role"
    if "assistant" in roles:
        return "assistant_among_new"
    if "system" in roles:
        return "system_among_new"
    if list(prompt_ids[-len(header) :]) != list(header):
        return "prompt_without_header"
    if not set(completion_ids[:-1]).isdisjoint(stop_token_ids):
        return "stop_inside_completion"
    if not set(completion_ids).isdisjoint(media_token_ids):
        return "media_in_completion"
    return None
