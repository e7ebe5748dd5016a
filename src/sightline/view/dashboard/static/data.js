// Everything that comes from the server: one answer at a time, and the news that a run has moved.
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";

export async function ask(path, values = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const answer = await fetch(`/api/${path}?${query}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.problem || `the server answered ${answer.status}`);
  return body;
}

/** The answer to a question, asked again when it or one of `again` changes. */
export function useAnswer(path, values, again = []) {
  const [state, set] = useState({ answer: null, error: null });
  const key = path && JSON.stringify([path, values]);
  const last = useRef(key);
  useEffect(() => {
    if (!path) return undefined;
    let current = true;
    if (last.current !== key) {
      last.current = key;
      set((before) => ({ ...before, stale: true, error: null }));
    }
    ask(path, values).then(
      (answer) => current && set({ answer, error: null }),
      (error) => current && set((before) => ({ ...before, error })),
    );
    return () => { current = false; };
  }, [key, ...again]);
  return state;
}

/** Grows every so many seconds: ages move although nothing was written. */
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
    // A browser tries again by itself, unless it was answered by an error.
    if (live.source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

/** How often each run has moved, and whether the server is still there. */
export function useLive() {
  const [state, set] = useState({ ...live });
  useEffect(() => {
    if (!live.source) connect();
    live.listeners.add(set);
    return () => live.listeners.delete(set);
  }, []);
  return state;
}

const kept = new Map();

async function catchUp(run, names) {
  const key = JSON.stringify([run, names]);
  const known = kept.get(key) || { cursor: 0, rows: new Map() };
  kept.set(key, known);
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

/** The numbers of these names of some runs, by step; only what is new is fetched. A name that ends in
 * a star stands for the first that begin so. */
export function useMetrics(runs, revisions, names) {
  const [found, set] = useState({});
  const key = runs.map((run) => `${run}:${revisions[run]}`).join();
  useEffect(() => {
    let current = true;
    Promise.all(runs.map(async (run) => [run, await catchUp(run, names)])).then(
      (pairs) => current && set(Object.fromEntries(pairs)),
      () => {},
    );
    return () => { current = false; };
  }, [key, names]);
  return found;
}
