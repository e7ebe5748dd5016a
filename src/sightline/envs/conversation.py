"""A conversation whose history is a plain list: windows, compaction, sub-agents, retries, edits.

    talk = Conversation(chat, last_images(3))       # shows the newest three images only
    answer = await talk.send([user("...", ref)])
    if talk.num_context_tokens > 6000:
        await talk.compact()                        # history becomes a summary of itself
    found = await talk.branch().send([user("..")])  # an aside that `talk` does not remember
    answer = await talk.retry()                     # another answer to the same
    talk.history[2] = user("...")                   # anything may be edited

Whatever is done to the history, a turn that only adds to what the model was shown last is sent as
an addition; any other is sent as a whole, and the trace forks where it differs.
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
    """Goes on from where `chat` is, on a branch of its own; `windows` are applied in order."""

    def __init__(self, chat: Chat, *windows: Window) -> None:
        self._chat = chat.branch()
        self._windows = windows
        self.history = self._chat.history
        """Every message, shown to the model or not. Yours to edit."""
        self._shown = list(self.history)
        """What the model saw last, and its answer."""

    @property
    def calls(self) -> list[int]:
        """Which of the rollout's model calls were made here: places in `Outcome.per_turn`."""
        return self._chat.calls

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the last prompt and its answer."""
        return self._chat.num_context_tokens

    async def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        """Appends messages to the history, shows the model a window of it, appends the answer."""
        return await self._ask([*self.history, *await self._chat.messages(new_messages)], tools)

    async def _ask(self, history: list[Message], tools: Tools | None) -> AssistantMessage:
        view = history
        for window in self._windows:
            view = window(view)
        num_shown = len(self._shown)
        if num_shown < len(view) and view[:num_shown] == self._shown:
            answer = await self._chat.send(view[num_shown:], tools=tools)
        else:
            answer = await self._chat.ask(view, tools=tools)
        last = answer.as_message()
        self.history = [*history, last]
        self._shown = [*view, last]
        return answer

    async def retry(self, *, tools: Tools | None = None) -> AssistantMessage:
        """Takes the last answer out of the history and asks for another; both stay in the trace."""
        if not self.history or self.history[-1].role != "assistant":
            raise EnvironmentFailed("there is no answer to ask for again", "send something first")
        return await self._ask(self.history[:-1], tools)

    async def compact(self, instruction: str = SUMMARIZE) -> str:
        """Asks for a summary on a branch, and goes on from the opening and the summary.

        The opening is the system messages and the user's first message.
        """
        summary = (await self.branch().send([user(instruction)])).text
        self.history = [*opening(self.history), user(SUMMARY_HEAD + summary)]
        return summary

    def branch(
        self, history: Sequence[Message] | None = None, windows: Sequence[Window] | None = None
    ) -> Conversation:
        """A conversation beside this one, from a copy of its history, or from `history`.

        It may run at the same time as this one and others.
        """
        made = Conversation(self._chat, *(self._windows if windows is None else windows))
        made.history = list(self.history if history is None else history)
        return made
