"""Describe what a chat format supports, for the log line when a checkpoint is loaded."""

from __future__ import annotations

from typing import ClassVar

from sightline.families.protocol import Family


class FormatDescription:
    """A renderer's declaration of its chat format."""

    format_name: ClassVar[str] = "the family's own"
    """The name of the chat format, for people."""
    format_reason: str = "its family has no other (the folder's chat template is not compared)"
    """Why the checkpoint is assumed to use it."""
    takes_tools: bool = True
    tools_refusal: str = "this chat format has no tools"
    """Why tools, calls and tool messages are refused, where they are."""
    takes_reasoning: bool = True
    reasoning_refusal: str = "this chat format has no reasoning"
    image_roles: ClassVar[tuple[str, ...]] = ("user", "tool")
    """The roles whose messages can show images. The assistant is never one of them."""
    video_refusal: str
    """Why videos cannot be shown. Empty if they can."""
    _family: Family

    def describe(self) -> list[str]:
        """Return the probe's findings, or a description of the format, one line each."""
        if self._family.found:
            return list(self._family.found)
        family, places = self._family, f"in messages of role {' or '.join(self.image_roles)}"
        no_images = "" if family.shows_media else "this checkpoint has no vision tower"
        tokens = "" if no_images else f"{family.describe_tokens()}, {places}"
        no_tools = "" if self.takes_tools else self.tools_refusal
        calls = "supported by the chat format"
        return [
            f"model: the family {family.name}",
            f"chat format: {self.format_name}, because {self.format_reason}",
            f"images: {tokens or _describe_refusal(no_images)}",
            f"videos: {_describe_refusal(self.video_refusal) or places}",
            f"tools: {_describe_refusal(no_tools) or calls}",
            f"reasoning: {self.describe_reasoning()}",
            f"turns: {self.describe_turns()}",
        ]

    def describe_reasoning(self) -> str:
        if not self.takes_reasoning:
            return _describe_refusal(self.reasoning_refusal)
        return "supported by the chat format"

    def describe_turns(self) -> str:
        """Describe when new turns are appended to the existing tokens."""
        return "appended to the existing tokens"


def _describe_refusal(why: str) -> str:
    return f"refused, because {why}" if why else ""
