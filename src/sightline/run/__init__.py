"""Files that a run's processes write: the run directory and events.

Code that reads them is in `view`, which only the launcher imports.
"""

from sightline.run.events import EventLog as EventLog
from sightline.run.run_dir import RunDir as RunDir
