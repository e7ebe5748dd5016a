"""Work beside the loop, in a thread: files that training need not wait for.

    loop --work--> thread      loop waits for: the work before this one     unblocked by: the thread

What goes wrong in the thread is raised in the loop, where it next starts, checks or waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sightline.trainer.watchdog import StallWatchdog


class BackgroundTask:
    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None] = lambda error: None,
        watchdog: StallWatchdog | None = None,
        min_limit_s: float = 0.0,
    ) -> None:
        """`failed` hears of a problem at once, for the loop may wait for what never comes.

        `watchdog` watches the work itself: the loop's own is idle while it waits for a batch. It
        lets a piece of work take `min_limit_s`.
        """
        self._name, self._failed, self._watchdog = name, failed, watchdog or StallWatchdog()
        self._min_limit_s = min_limit_s
        self._thread: threading.Thread | None = None
        self.problem: BaseException | None = None
        """What went wrong in the thread."""

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Waits for the work before it to be done, then begins `work` in a thread."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(what, work), daemon=True, name=self._name
        )
        self._thread.start()

    def check(self) -> None:
        """Raises, in the loop, what went wrong in the thread."""
        if self.problem is not None:
            raise self.problem

    def wait(self) -> None:
        """Returns when the work that was begun is done."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _run(self, what: str, work: Callable[[], None]) -> None:
        self._watchdog.enter(what, self._min_limit_s)
        try:
            work()
        except BaseException as error:  # the loop raises it again, in the main thread
            self.problem = error
            self._failed(error)
        self._watchdog.idle()
