"""When a prompt and its completion cannot be bridged to new messages: one law for all families.

The names are counted in metrics and listed in docs/chat_formats.md. A chat format itself decides
two more, by hooks of `families.renderer.BaseRenderer`: stop_in_reasoning and history_rewritten.
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
    """Why messages of `roles` cannot follow these ids in any chat format; None when they can.

    `header` is what every prompt ends with: it opens the assistant's turn.
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
