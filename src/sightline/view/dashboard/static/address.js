// The address bar is the state of the application: whatever is chosen can be shared as a link.
import { html } from "./html.js";
import { useEffect, useState } from "./vendor/hooks.mjs";

const listeners = new Set();

function read() {
  return { page: location.pathname.slice(1), query: new URLSearchParams(location.search) };
}

function tell() {
  for (const listener of listeners) listener(read());
}

addEventListener("popstate", tell);

/** The page and its query, up to date. */
export function useAddress() {
  const [address, set] = useState(read);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  return address;
}

const KEPT = ["runs", "run"];

/** The address of a page: what names runs is kept from the present one, the rest is `values`. */
export function href(page, values = {}) {
  const query = new URLSearchParams();
  const now = read().query;
  for (const name of KEPT) if (now.has(name)) query.set(name, now.get(name));
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  return `/${page}${text ? `?${text}` : ""}`;
}

export function go(to, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  tell();
  if (!replace) scrollTo(0, 0);
}

/** Changes some of the query of this page. */
export function change(values, { replace = true } = {}) {
  const { page, query } = read();
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  const to = `/${page}${text ? `?${text}` : ""}`;
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  tell();
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
