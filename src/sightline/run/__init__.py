"""What a run shows of itself: the run directory, events, the live view, the report.

It reads what other processes wrote and never stops them: a line, a trace or an image that cannot
be read is left out, and said to be.
"""

from sightline.run.events import EventLog, EventTail, read_events
from sightline.run.run_dir import RunDir

__all__ = ["EventLog", "EventTail", "RunDir", "read_events"]
