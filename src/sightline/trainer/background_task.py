"""Work in a thread next to the loop, such as writing files.

    loop --work--> thread      loop waits for: the work before this one     unblocked by: the thread

The loop raises an error of the thread when it next starts, checks or waits.
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
        """`failed` receives an error at once, because the loop may be waiting for something else.

        `watchdog` monitors the work, which may take `min_limit_s`: the loop's own watchdog is idle
        while the loop waits for a batch.
        """
        self._name, self._failed, self._watchdog = name, failed, watchdog or StallWatchdog()
        self._min_limit_s = min_limit_s
        self._thread: threading.Thread | None = None
        self.problem: BaseException | None = None
        """The error of the thread."""

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Wait for the previous work to finish, then start `work` in a thread."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(what, work), daemon=True, name=self._name
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the thread, if there is one."""
        if self.problem is not None:
            raise self.problem

    def wait(self) -> None:
        """Wait until the work is done."""
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
