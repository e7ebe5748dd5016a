// Everything that comes from the server: its answers, its images, and the news that a run has moved.
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";

const embedded = document.getElementById("exported");
/** The answers and images of a page that was exported into a file; null where there is a server. */
export const exported = embedded && JSON.parse(embedded.textContent);
if (exported) document.documentElement.dataset.exported = "";

/** The exported answer. Lists are filtered here, because no server does it. */
function findExported(path, values) {
  const names = { rollout: ["file", "number"], tokens: ["file", "number", "node"], image: ["digest"] }[path] ?? [];
  const answer = exported.answers[[path, ...names.map((name) => values[name])].join("/")];
  if (!answer || values.start > 0) throw new Error("This file does not contain that. Open the run with `sightline view`.");
  if (path !== "rollouts") return answer;
  const { group, error, step_from: from, step_to: to, offset = 0 } = values;
  const rows = answer.rows.filter((row) => (
    (!group || row.group_id === group) && (!error || row.error === error)
    && (!from || row.step >= from) && (!to || row.step <= to)
  ));
  return { rows, total: rows.length, offset };
}

export async function ask(path, values = {}) {
  if (exported) return findExported(path, values);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const answer = await fetch(`/api/${path}?${query}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.problem || `the server answered ${answer.status}`);
  return body;
}

/** The address of an image or video; with `side`, of a small copy. */
export function mediaUrl(run, digest, side) {
  if (exported) return exported.media[digest] ?? "data:,";
  const where = `${encodeURIComponent(run)}/${digest}`;
  return side ? `/thumb/${where}?side=${side}` : `/media/${where}`;
}

/**
 * Calls `load` when `key` or one of `again` changes, one call at a time for each key. A change during a call
 * leads to one more call after it: a run that moves all the time must not keep a slow answer from showing.
 */
function useLoad(key, again, load) {
  const current = useRef(null);
  useEffect(() => {
    if (current.current?.key === key) {
      current.current.repeat = true;
      return;
    }
    const call = { key, repeat: true };
    current.current = call;
    const isCurrent = () => current.current === call;
    (async () => {
      while (call.repeat && isCurrent()) {
        call.repeat = false;
        await load(isCurrent);
      }
      if (isCurrent()) current.current = null;
    })();
  }, [key, ...again]);
  useEffect(() => () => { current.current = null; }, []);
}

/** The server's answer, requested again when the request or one of `again` changes. */
export function useAnswer(path, values, again = []) {
  const [state, set] = useState({ answer: null, error: null });
  const key = JSON.stringify([path, values]);
  const last = useRef(key);
  useLoad(key, again, async (isCurrent) => {
    if (last.current !== key) {
      last.current = key;
      set((before) => ({ ...before, stale: true, error: null }));
    }
    try {
      const answer = await ask(path, values);
      if (isCurrent()) set({ answer, error: null });
    } catch (error) {
      if (isCurrent()) set((before) => ({ ...before, error }));
    }
  });
  return state;
}

/** A number that grows at an interval: ages change although nothing was written. */
export function useTick(seconds) {
  const [tick, set] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => set((before) => before + 1), 1000 * seconds);
    return () => clearInterval(timer);
  }, [seconds]);
  return tick;
}

const live = { revisions: {}, connected: false, listeners: new Set(), source: null };

function connect() {
  live.source = new EventSource("/api/live");
  live.source.addEventListener("moved", (event) => {
    live.revisions = JSON.parse(event.data);
    live.connected = true;
    for (const listener of live.listeners) listener({ ...live });
  });
  live.source.onerror = () => {
    live.connected = false;
    for (const listener of live.listeners) listener({ ...live });
    // The browser reconnects by itself, unless the server answered with an error.
    if (live.source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

/** The revision of each run, and whether the server is still there. */
export function useLive() {
  const [state, set] = useState({ ...live });
  useEffect(() => {
    if (exported) return undefined;
    if (!live.source) connect();
    live.listeners.add(set);
    return () => live.listeners.delete(set);
  }, []);
  return state;
}

const cached = new Map();

async function fetchNewRows(run, names) {
  const key = JSON.stringify([run, names]);
  const known = cached.get(key) || { cursor: 0, rows: new Map() };
  cached.set(key, known);
  const news = await ask("metrics", { run, names, cursor: known.cursor });
  if (news.cursor < known.cursor) known.rows.clear();
  known.cursor = news.cursor;
  known.names = news.names;
  news.step.forEach((step, i) => {
    const row = {};
    for (const [name, column] of Object.entries(news.columns)) {
      if (column[i] !== null) row[name] = column[i];
    }
    known.rows.set(step, row);
  });
  known.steps = [...known.rows.keys()].sort((a, b) => a - b);
  return known;
}

/** The metrics of some runs, by step. Only new rows are fetched. A name that ends in a star stands for the
 * first names with that prefix. */
export function useMetrics(runs, revisions, names) {
  const [metrics, set] = useState({});
  const again = [runs.map((run) => revisions[run]).join()];
  useLoad(JSON.stringify([runs, names]), again, async (isCurrent) => {
    try {
      const pairs = await Promise.all(runs.map(async (run) => [run, await fetchNewRows(run, names)]));
      if (isCurrent()) set(Object.fromEntries(pairs));
    } catch {
      // The next revision asks again.
    }
  });
  return metrics;
}
