"""Code that only reads runs: live view, report, dashboard, samples, sinks, notebook, compare.

Of a run's processes, only the launcher imports it.
"""
