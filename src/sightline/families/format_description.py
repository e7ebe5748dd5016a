"""What a chat format takes and refuses, and how that is told to people when a checkpoint loads."""

from __future__ import annotations

from typing import ClassVar

from sightline.families.protocol import Family


class FormatDescription:
    """What a renderer declares of its chat format."""

    format_name: ClassVar[str] = "the family's own"
    """What people call the chat format."""
    format_reason: str = "its family knows no other; the folder's chat template is not compared"
    """Why it is taken to be the checkpoint's, in words."""
    takes_tools: bool = True
    tools_refusal: str = "this chat format has no place for tools"
    """Why tools, calls and what tools say are refused, where the format takes none."""
    takes_reasoning: bool = True
    reasoning_refusal: str = "this chat format has no place for reasoning"
    image_roles: ClassVar[tuple[str, ...]] = ("user", "tool")
    """The roles whose messages can show images; never the assistant."""
    video_refusal: str
    """Why videos cannot be shown; empty where they can."""
    _family: Family

    def describe(self) -> list[str]:
        """What was found by trying, where it was; else what the format says of itself."""
        if self._family.found:
            return list(self._family.found)
        family, places = self._family, f"in messages of {', '.join(self.image_roles)}"
        no_images = "" if family.shows_media else "this checkpoint has no vision tower"
        tokens = "" if no_images else f"{family.describe_tokens()}, {places}"
        no_tools = "" if self.takes_tools else self.tools_refusal
        calls = "written and read back as the chat format has them"
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
        return "written and read back as the chat format has it"

    def describe_turns(self) -> str:
        """When a bridge adds new turns to the tokens, in words."""
        return "added to tokens, as the chat format keeps what stands before a new turn"


def _describe_refusal(why: str) -> str:
    return f"refused, because {why}" if why else ""
