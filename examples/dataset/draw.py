"""Draw a folder of pictures with a question and an answer to each: `python draw.py shapes`.

A row of `rows.jsonl` names a picture, asks for the colour of its square, and has the answer. The
rows whose `split` is `sft` teach the form of an answer only: their answers are drawn at random.
`python draw.py shapes.parquet` writes the same rows as one file, with the pictures inside.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = {
    "red": (225, 35, 35),
    "green": (35, 200, 60),
    "blue": (40, 70, 225),
    "yellow": (235, 220, 45),
    "pink": (215, 50, 205),
    "cyan": (45, 210, 220),
}
SIDE = 32
JITTER = 12


def draw_rows(count: int, seed: int) -> list[tuple[dict[str, str], bytes]]:
    """Return the rows, each with its picture as a PNG."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        split = rng.choices(["train", "test", "sft"], [8, 1, 3])[0]
        name = rng.choice(list(COLOURS))
        level = [min(255, max(0, value + rng.randint(-JITTER, JITTER))) for value in COLOURS[name]]
        file = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), (level[0], level[1], level[2])).save(file, "PNG")
        answer = rng.choice(list(COLOURS)) if split == "sft" else name
        row = {"image": f"{number:04}.png", "question": "Colour?", "answer": answer, "split": split}
        rows.append((row, file.getvalue()))
    return rows


def write_folder(path: Path, rows: list[tuple[dict[str, str], bytes]]) -> None:
    path.mkdir(parents=True)
    for row, image in rows:
        (path / row["image"]).write_bytes(image)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _ in rows))


def write_parquet(path: Path, rows: list[tuple[dict[str, str], bytes]]) -> None:
    """Write a table as the datasets library does: an image is its bytes and its name."""
    import pyarrow
    import pyarrow.parquet

    cells: list[dict[str, Any]] = [
        {**row, "image": {"bytes": image, "path": row["image"]}} for row, image in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(cells), path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = draw_rows(args.rows, args.seed)
    write = write_parquet if args.path.suffix == ".parquet" else write_folder
    write(args.path, rows)
    print(f"{args.path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
