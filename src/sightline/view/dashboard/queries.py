"""Queries to the index, each of which returns a page of rows."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from typing import Annotated, Any

from pydantic import BaseModel, Field

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integers that SQLite can store."""
MAX_ROWS = 200
NUM_WORST = 50
SORT_ORDERS = {
    "newest": "step DESC, id ASC",
    "oldest": "step ASC, id ASC",
    "reward_high": "reward DESC, id ASC",
    "reward_low": "reward IS NULL, reward ASC, id ASC",
    "mismatch": "kl DESC, id ASC",
    "longest": "tokens DESC, id ASC",
}
GROUP_ORDERS = SORT_ORDERS | {
    "mismatch": "max(kl) DESC, id ASC",
    "spread": "max(reward) - min(reward) DESC, id ASC",
}
MAX_ERRORS = 20
_INTERNAL = {"id", "start", "size"}
"""Columns of `rollouts` that pages do not contain."""


class RolloutFilter(BaseModel, frozen=True, extra="forbid"):
    """A filter and sort order for rollouts. None and empty values match everything."""

    step_from: Int64 | None = None
    step_to: Int64 | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    verdict: str = ""
    env: str = ""
    split: str = ""
    group: str = ""
    file: str = ""
    error: str = ""
    """Last line of the error that broke or truncated the rollout."""
    text: str = ""
    """Text in messages, tool calls or the rollout's id."""
    image: str = ""
    """Digest of an image in the rollout."""
    sort: str = "newest"

    def where(self) -> tuple[str, list[Any]]:
        equal = ("verdict", "env", "split", "file", "error")
        conditions: dict[str, Any] = {
            "step >= ?": self.step_from,
            "step <= ?": self.step_to,
            "reward >= ?": self.reward_from,
            "reward <= ?": self.reward_to,
            "group_id = ?": self.group or None,
            **{f"{name} = ?": getattr(self, name) or None for name in equal},
        }
        chosen = {clause: value for clause, value in conditions.items() if value is not None}
        clauses, values = list(chosen), list(chosen.values())
        if self.text:
            pattern = "%" + re.sub(r"[\\%_]", r"\\\g<0>", self.text) + "%"
            clauses.append(
                "(id IN (SELECT rollout FROM says WHERE text IN"
                " (SELECT id FROM texts WHERE text LIKE ? ESCAPE '\\'))"
                " OR trace_id LIKE ? ESCAPE '\\')"
            )
            values += [pattern, pattern]
        if self.image:
            clauses.append("id IN (SELECT rollout FROM shows WHERE digest = ?)")
            values.append(self.image)
        return (f"WHERE {' AND '.join(clauses)}" if clauses else ""), values


def list_rollouts(
    connection: sqlite3.Connection, selection: RolloutFilter, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of rows, each with its first images, and the total number of rows."""
    where, values = selection.where()
    total = connection.execute(f"SELECT count(*) FROM rollouts {where}", values).fetchone()[0]
    order = SORT_ORDERS.get(selection.sort, SORT_ORDERS["newest"])
    # Select the ids first, so that rows before the page are skipped in an index and not read.
    rows = connection.execute(
        "SELECT * FROM rollouts WHERE id IN"
        f" (SELECT id FROM rollouts {where} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
        [*values, max(1, min(limit, MAX_ROWS)), max(0, offset)],
    ).fetchall()
    page = [
        {name: value for name, value in dict(row).items() if name not in _INTERNAL}
        | {"rewards": json.loads(row["rewards"]), "thumbs": _thumbs(connection, row)}
        for row in rows
    ]
    return {"total": total, "offset": offset, "rows": page}


def _thumbs(connection: sqlite3.Connection, row: sqlite3.Row) -> list[str]:
    """Return the digests of a rollout's first images."""
    images = connection.execute(
        "SELECT digest FROM shows WHERE rollout = ? ORDER BY node, place LIMIT 4", (row["id"],)
    )
    return [image["digest"] for image in images]


def list_groups(
    connection: sqlite3.Connection, selection: RolloutFilter, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of groups, each with its rollouts' rewards and verdicts."""
    where, values = selection.where()
    grouped = f"FROM rollouts {where} GROUP BY group_id, file"
    total = connection.execute(f"SELECT count(*) FROM (SELECT 1 {grouped})", values).fetchone()[0]
    order = GROUP_ORDERS.get(selection.sort, GROUP_ORDERS["newest"])
    # Select the groups from an index first, then read only those of the page.
    page = connection.execute(
        "SELECT group_id, file, step, min(id) AS id, avg(reward) AS reward, avg(tokens) AS tokens"
        f" {grouped} ORDER BY {order} LIMIT ? OFFSET ?",
        [*values, max(1, min(limit, MAX_ROWS)), max(0, offset)],
    ).fetchall()
    inside = f"{where} AND" if where else "WHERE"
    groups = []
    for group in page:
        row = connection.execute(
            "SELECT env, task, split, count(*) AS rollouts, min(reward) AS low,"
            " max(reward) AS high, avg(turns) AS turns, group_concat(verdict) AS verdicts"
            f" FROM rollouts {inside} group_id = ? AND file = ?",
            [*values, group["group_id"], group["file"]],
        ).fetchone()
        verdicts = dict(Counter(str(row["verdicts"]).split(",")))
        thumbs = _thumbs(connection, group)
        groups.append({**dict(group), **dict(row), "verdicts": verdicts, "thumbs": thumbs})
    return {"total": total, "offset": offset, "rows": groups}


def list_errors(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return distinct exceptions, most frequent first, each with an example rollout."""
    rows = connection.execute(
        "SELECT error, count(*) AS num, min(step) AS first_step, max(id) AS newest,"
        " max(step) AS last_step FROM rollouts WHERE error != '' GROUP BY error"
        " ORDER BY num DESC, error LIMIT ?",
        (MAX_ERRORS,),
    ).fetchall()
    errors = []
    for row in rows:
        example = connection.execute(
            "SELECT file, number, trace_id, verdict FROM rollouts WHERE id = ?", (row["newest"],)
        ).fetchone()
        errors.append({**dict(row), **dict(example)})
    return errors


def find_neighbours(connection: sqlite3.Connection, file: str, number: int) -> dict[str, Any]:
    """Return the previous and next rollout in a file, and the siblings in the group."""
    around = connection.execute(
        "SELECT (SELECT max(number) FROM rollouts WHERE file = :file AND number < :number) AS"
        " before, (SELECT min(number) FROM rollouts WHERE file = :file AND number > :number) AS"
        " after",
        {"file": file, "number": number},
    ).fetchone()
    siblings = connection.execute(
        "SELECT file, number, trace_id, reward, verdict FROM rollouts WHERE file = ? AND group_id ="
        " (SELECT group_id FROM rollouts WHERE file = ? AND number = ?) AND group_id != ''"
        " ORDER BY number LIMIT 64",
        (file, file, number),
    )
    return {**dict(around), "siblings": [dict(row) for row in siblings]}


def find_rollout(connection: sqlite3.Connection, file: str, number: int) -> dict[str, Any] | None:
    row = connection.execute(
        "SELECT * FROM rollouts WHERE file = ? AND number = ?", (file, number)
    ).fetchone()
    return None if row is None else dict(row)


def count_facets(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the values of each filter, with counts."""

    def counted(column: str) -> dict[str, int]:
        rows = connection.execute(
            f"SELECT {column} AS name, count(*) AS num FROM rollouts GROUP BY {column}"
            " ORDER BY num DESC LIMIT 100"
        )
        return {str(row["name"]): row["num"] for row in rows}

    bounds = connection.execute("SELECT min(step), max(step), count(*) FROM rollouts").fetchone()
    files = connection.execute(
        "SELECT name FROM files WHERE name NOT LIKE 'step\\_%' ESCAPE '\\' AND rollouts > 0"
        " ORDER BY name"
    )
    return {
        "rollouts": bounds[2],
        "steps": [bounds[0], bounds[1]],
        "verdicts": counted("verdict"),
        "envs": counted("env"),
        "splits": counted("split"),
        "evals": [row["name"] for row in files],
    }


def list_images(
    connection: sqlite3.Connection, sort: str, offset: int, limit: int, digest: str = ""
) -> dict[str, Any]:
    """Return a page of distinct images. `digest` may be a prefix."""
    order = {
        "most": "num_shown DESC, digest",
        "least": "num_shown ASC, digest",
        "largest": "width * height DESC, digest",
        "smallest": "width * height ASC, digest",
    }.get(sort, "num_shown DESC, digest")
    where, values = "", list[Any]()
    if digest:
        where, values = "WHERE digest >= ? AND digest < ?", [digest, digest + "g"]
    total, num_sent, nbytes = connection.execute(
        "SELECT count(*), coalesce(sum(num_shown), 0), coalesce(sum(nbytes), 0)"
        f" FROM images {where}",
        values,
    ).fetchone()
    rows = connection.execute(
        f"SELECT * FROM images {where} ORDER BY {order} LIMIT ? OFFSET ?",
        [*values, max(1, min(limit, MAX_ROWS)), max(0, offset)],
    )
    return {
        "total": total,
        "shown": num_sent,
        "nbytes": nbytes,
        "offset": offset,
        "rows": [dict(row) for row in rows],
    }


def find_image(connection: sqlite3.Connection, digest: str) -> dict[str, Any] | None:
    row = connection.execute("SELECT * FROM images WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        return None
    first, last, num = connection.execute(
        "SELECT min(step), max(step), count(*) FROM rollouts"
        " WHERE id IN (SELECT rollout FROM shows WHERE digest = ?)",
        (digest,),
    ).fetchone()
    return {**dict(row), "first_step": first, "last_step": last, "rollouts": num}


def sum_mismatch(
    connection: sqlite3.Connection, step_from: int | None, step_to: int | None, fresh: bool
) -> dict[str, Any]:
    """Return the mismatch over some steps by dimension and bucket, and the worst tokens."""
    low = -1 if step_from is None else step_from
    high = 1 << 60 if step_to is None else step_to
    chosen = "AND fresh = 1" if fresh else ""
    rows = connection.execute(
        "SELECT dimension, bucket, sum(tokens) AS tokens, sum(kl) / sum(tokens) AS kl,"
        " sum(ratio) / sum(tokens) AS ratio, max(worst) AS worst FROM mismatch"
        f" WHERE step BETWEEN ? AND ? {chosen} GROUP BY dimension, bucket ORDER BY bucket",
        (low, high),
    )
    dimensions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cell = {key: row[key] for key in ("bucket", "tokens", "kl", "ratio", "worst")}
        dimensions.setdefault(row["dimension"], []).append(cell)
    worst = connection.execute(
        "SELECT worst.*, rollouts.file, rollouts.number, rollouts.trace_id FROM worst"
        " JOIN rollouts ON rollouts.id = worst.rollout WHERE worst.step BETWEEN ? AND ?"
        f" {'AND worst.lag = 0' if fresh else ''} ORDER BY worst.kl DESC LIMIT ?",
        (low, high, NUM_WORST),
    )
    return {"dimensions": dimensions, "worst": [dict(row) for row in worst]}


def list_problems(connection: sqlite3.Connection) -> list[str]:
    """Describe the run's unreadable files."""
    files = connection.execute("SELECT name, problem FROM files WHERE problem != '' LIMIT 20")
    problems = [f"traces/{row['name']}: {row['problem']}" for row in files]
    scores = connection.execute("SELECT step, problem FROM scored WHERE problem != '' LIMIT 20")
    return problems + [f"scores of step {row['step']}: {row['problem']}" for row in scores]
