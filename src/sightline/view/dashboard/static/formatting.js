// How numbers read to people.
export const NOTHING = "–";

export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  for (const [bound, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= bound * 0.9995) {
      const few = value / bound;
      return `${few.toFixed(Math.abs(few) < 9.95 ? 1 : 0)}${letter}`;
    }
  }
  return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 2 : 0);
}

export function whole(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

export function plural(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function bytes(value) {
  return value === null || value === undefined ? NOTHING : `${count(value)}B`;
}

/** Three digits at any size: 3e-5, 0.0123, 1.4, 12.5k, 2.4M. */
export function short(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e12) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  for (const [bound, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= bound * 0.9995) return `${Number((value / bound).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

/** A time on an axis: 30 s, 5 min, 1:30 h. */
export function clock(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${seconds % 60 ? duration(seconds) : seconds / 60} min`;
  const minutes = Math.round(seconds / 60);
  const rest = minutes % 60;
  return `${Math.floor(minutes / 60)}${rest ? `:${String(rest).padStart(2, "0")}` : ""} h`;
}

export function fixed(value, digits = 2) {
  return value === null || value === undefined ? NOTHING : value.toFixed(digits);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  const all = Math.max(0, Math.round(seconds));
  const hours = Math.floor(all / 3600);
  const minutes = Math.floor(all / 60) % 60;
  const rest = String(all % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}
