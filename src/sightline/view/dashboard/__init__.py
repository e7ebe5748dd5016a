"""The dashboard: reads run directories, live or finished, and serves them to a browser.

    run directory ──> index (SQLite) ──┐
    metrics.jsonl ──> history ─────────┼──> pages of JSON ──> server ──> browser
    media/, logs/, config.toml ────────┘

    run_view.py  one run: its files, index, history and problems
        index.py     all rollouts and images of a run, without reading the traces
        server.py    the routes; access.py checks access; run_collection.py notifies browsers

It never writes to a run except to `view/`, which can be removed at any time.
"""
