"""The dashboard: reads run directories, live or finished, and serves them to a browser.

    run directory ──> index (SQLite) ──┐
    metrics.jsonl ──> history ─────────┼──> pages of JSON ──> server ──> browser
    media/, logs/, config.toml ────────┘

    run_view.py  one run: its files, its index, its history, what is wrong with it
    index.py     every rollout and image of a run, found again without reading the traces
    server.py    the routes; access.py who may ask; live_updates.py tells browsers of news

It never writes to a run but for `view/`, which can be removed at any time.
"""
