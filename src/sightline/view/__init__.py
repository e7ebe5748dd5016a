"""Everything that only reads runs: live view, report, dashboard, samples, sinks, notebook, compare.

Of the processes of a run, only the launcher imports it.
"""
