// Keys of a page. What is on the screen decides what they do, from the moment that it is there: an
// effect that ran later would leave keys to the page as it was before.
import { useLayoutEffect, useRef } from "./vendor/hooks.mjs";

const FIELDS = "input, select, textarea";

/** Calls `handle(event)` for each key, but for those typed into a field, which `typed` gets. */
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
