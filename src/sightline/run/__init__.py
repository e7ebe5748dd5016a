"""What the processes of a run write: the run directory, events and spans.

Readers of it stand in `view`; of a run's processes only the launcher has them.
"""

from sightline.run.events import EventLog
from sightline.run.run_dir import RunDir

__all__ = ["EventLog", "RunDir"]
