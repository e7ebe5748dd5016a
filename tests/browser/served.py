"""Check the dashboard of an installed package: `python served.py RUNS`. Needs no browser."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path


def main(runs: str) -> None:
    command = [str(Path(sys.executable).with_name("sightline")), "view", runs, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            page = get(address)
            files = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
            sizes = {file: len(get(address.rstrip("/") + file)) for file in files}
            assert len(sizes) == 4 and min(sizes.values()) > 100, sizes
            assert '"step":' in get(f"{address}api/runs")
        finally:
            process.terminate()
    print(f"the dashboard is served: {sizes}")


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main(sys.argv[1])
