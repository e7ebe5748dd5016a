"""Files that a run's processes write: the run directory and events.

Code that reads them is in `view`, which only the launcher imports.
"""

from sightline.run.events import EventLog
from sightline.run.run_dir import RunDir

__all__ = ["EventLog", "RunDir"]
