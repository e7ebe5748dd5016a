"""Describe a chat format's features, for the log message when a checkpoint is loaded."""

from __future__ import annotations

from typing import ClassVar

from sightline.families.protocol import Family


class FormatDescription:
    """The features of a renderer's chat format."""

    format_name: ClassVar[str] = "the family's own"
    format_reason: str = "its family has no other (the folder's chat template is not compared)"
    """Why the checkpoint is assumed to use this format."""
    takes_tools: bool = True
    tools_refusal: str = "this chat format has no tools"
    """Why tools, tool calls and tool messages are refused. Unused if `takes_tools` is true."""
    takes_reasoning: bool = True
    reasoning_refusal: str = "this chat format has no reasoning"
    image_roles: ClassVar[tuple[str, ...]] = ("user", "tool")
    """The roles whose messages can contain images. Never includes the assistant."""
    video_refusal: str
    """Why videos cannot be shown. Empty if they can."""
    _family: Family

    def describe(self) -> list[str]:
        """Describe the model and its chat format, one line each."""
        family, places = self._family, f"in messages of role {' or '.join(self.image_roles)}"
        images = "refused, because this checkpoint has no vision tower"
        if family.shows_media:
            images = f"{family.describe_tokens()}, {places}"
        supported = "supported by the chat format"
        no_tools = "" if self.takes_tools else self.tools_refusal
        no_reasoning = "" if self.takes_reasoning else self.reasoning_refusal
        return [
            f"model: {family.model_class or f'the family {family.name}'}",
            f"chat format: {self.format_name}, because {self.format_reason}",
            f"images: {images}",
            f"videos: {_describe_refusal(self.video_refusal) or places}",
            f"tools: {_describe_refusal(no_tools) or supported}",
            f"reasoning: {_describe_refusal(no_reasoning) or supported}",
        ]


def _describe_refusal(why: str) -> str:
    return f"refused, because {why}" if why else ""
