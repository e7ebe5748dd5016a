// The address bar holds the state of the application: every choice can be shared as a link.
import { html } from "./html.js";
import { useEffect, useState } from "./vendor/hooks.mjs";
import { exported } from "./data.js";

const listeners = new Set();

/** The page and its query. A file on disk has one path, so that an export keeps both in the fragment. */
function read() {
  const { pathname, search } = exported ? new URL(location.hash.slice(1) || "/", "http://file") : location;
  return { page: pathname.slice(1), query: new URLSearchParams(search) };
}

function write(page, query) {
  const text = query.toString();
  return `${exported ? "#" : ""}/${page}${text ? `?${text}` : ""}`;
}

function assign(query, values) {
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  return query;
}

function notify() {
  for (const listener of listeners) listener(read());
}

addEventListener("popstate", notify);

/** The page and its query, up to date. */
export function useAddress() {
  const [address, set] = useState(read);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  return address;
}

/** The address of a page with `values` as its query. The chosen runs are kept. */
export function href(page, values = {}) {
  const { query } = read();
  for (const name of [...query.keys()]) if (name !== "runs" && name !== "run") query.delete(name);
  return write(page, assign(query, values));
}

export function go(to) {
  history.pushState(null, "", to);
  notify();
  scrollTo(0, 0);
}

/** Changes some of the query of this page. */
export function change(values, { replace = true } = {}) {
  const { page, query } = read();
  const to = write(page, assign(query, values));
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  notify();
}

/** A link that changes the page without loading it again. */
export function Link({ to, children, ...rest }) {
  const follow = (event) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${to} onClick=${follow} ...${rest}>${children}</a>`;
}
