"""A conversation whose history is a plain list: windows, compaction, sub-agents, retries, edits.

    talk = Conversation(chat, last_images(3))       # shows the newest three images only
    answer = await talk.send([user("...", ref)])
    if talk.num_context_tokens > 6000:
        await talk.compact()                        # history becomes a summary of itself
    note = await talk.branch().send([user("..")])   # a side question that `talk` does not remember
    answer = await talk.retry()                     # another answer to the same prompt
    talk.history[2] = user("...")                   # anything may be edited

A turn that only appends to the last prompt is sent as an addition. Any other turn is sent whole,
and the trace forks where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from sightline.envs.protocol import Chat, Messages, Tools
from sightline.envs.windows import Window, opening
from sightline.errors import EnvironmentFailed
from sightline.message import AssistantMessage, Message, user

SUMMARIZE = (
    "Summarize this conversation so that you can go on from your summary alone: the task, what "
    "was seen and done, and what is left to do."
)
SUMMARY_HEAD = "Summary of what happened so far:\n"


class Conversation:
    """Continues `chat` on its own branch; `windows` are applied in order."""

    def __init__(self, chat: Chat, *windows: Window) -> None:
        self._chat = chat.branch()
        self._windows = windows
        self.history = self._chat.history
        """Every message, shown to the model or not. You may edit it."""
        self._shown = list(self.history)
        """The last prompt and its answer."""

    @property
    def calls(self) -> list[int]:
        """Indices in `Outcome.per_turn` of the model calls made here."""
        return self._chat.calls

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in the last prompt and its answer."""
        return self._chat.num_context_tokens

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Append messages to the history, show the model a window of it, and return its answer."""
        return await self._ask([*self.history, *await self._chat.messages(new_messages)], tools)

    async def _ask(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        prompt = history
        for window in self._windows:
            prompt = window(prompt)
        num_shown = len(self._shown)
        if num_shown < len(prompt) and prompt[:num_shown] == self._shown:
            answer = await self._chat.send(prompt[num_shown:], tools=tools)
        else:
            answer = await self._chat.ask(prompt, tools=tools)
        message = answer.as_message()
        self.history = [*history, message]
        self._shown = [*prompt, message]
        return answer

    async def retry(self, *, tools: Tools | None = None) -> AssistantMessage:
        """Replace the last answer in the history by a new one; both stay in the trace."""
        if not self.history or self.history[-1].role != "assistant":
            raise EnvironmentFailed("retry() was called before any answer", "call send() first")
        return await self._ask(self.history[:-1], tools)

    async def compact(self, instruction: str = SUMMARIZE) -> str:
        """Ask for a summary on a branch, and continue from the opening and the summary.

        The opening is the system messages and the user's first message.
        """
        summary = (await self.branch().send([user(instruction)])).text
        self.history = [*opening(self.history), user(SUMMARY_HEAD + summary)]
        return summary

    def branch(
        self, history: Sequence[Message] | None = None, windows: Sequence[Window] | None = None
    ) -> Conversation:
        """Return a conversation that starts from a copy of this history, or from `history`.

        Conversations may run at the same time.
        """
        branch = Conversation(self._chat, *(self._windows if windows is None else windows))
        branch.history = list(self.history if history is None else history)
        return branch
