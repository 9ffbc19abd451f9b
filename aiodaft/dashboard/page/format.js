// Numbers, sizes and times for people.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Such as "0.12", "1.2", "12" or "124". */
function short(value) {
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(value < 1 ? 2 : 1).replace(/\.?0+$/, "");
  return value.toFixed(0);
}

/** Bytes: "12 MB". */
export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(value) : short(value)} ${UNITS[unit]}`;
}

/** Bytes per second. */
export const bytesRate = (value) => `${bytes(value)}/s`;

/** A count: "1,234" or "12 M". */
export function count(value) {
  if (value >= 1e9) return `${short(value / 1e9)} G`;
  if (value >= 1e6) return `${short(value / 1e6)} M`;
  return Math.round(value).toLocaleString("en");
}

/** Times per second: "0.4", "13", "1,250". */
export const rate = (value) => (value < 100 ? short(Math.round(value * 10) / 10) : count(value));

/** A time span: "12 s", "3 min", "2 h". */
export function span(seconds) {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** How long ago: "just now" or "12 s ago". */
export const ago = (seconds) => (seconds < 2 ? "just now" : `${span(seconds)} ago`);

/** The time of day. */
export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString([], { hour12: false });

/** Orders names, and the numbers in them. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
