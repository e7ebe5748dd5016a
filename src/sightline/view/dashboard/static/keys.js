// Keyboard shortcuts. A layout effect installs them as soon as a page is drawn, so that no key reaches the
// handlers of the page before it.
import { useLayoutEffect, useRef } from "./vendor/hooks.mjs";

const FIELDS = "input, select, textarea";

/** Calls `handle(event)` for each key, and `typed(event, field)` for keys typed into a field. */
export function useKeys(handle, typed = () => {}) {
  const latest = useRef();
  latest.current = { handle, typed };
  useLayoutEffect(() => {
    const listen = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey) return;
      const field = event.target.closest?.(FIELDS);
      if (field) latest.current.typed(event, field);
      else latest.current.handle(event);
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}
