// Makes and changes elements, and writes numbers, sizes and times for people. Texts from the program go in as text only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children: elements, texts, or lists of them. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change a text, if it is another one: what the user has selected stays selected. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Change attributes, if they are other ones; null removes one. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

/**
 * Make the children of an element those of a list, and keep the ones that are there: what the mouse is on stays.
 * `make` makes the element of a new item, `update` brings any up to date.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.known ?? (parent.known = new Map());
  const next = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (next.has(key)) continue;
    const element = known.get(key) ?? make(item);
    next.set(key, element);
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
    // Now that it has a size.
    update(element, item);
  }
  for (const [key, element] of known) {
    if (!next.has(key)) element.remove();
  }
  parent.known = next;
}

/** What a panel shows while it has nothing to show. */
export function empty(panel, isEmpty, title, hint) {
  panel.blank ??= h("div", { class: "empty" }, h("b"), h("span"));
  text(panel.blank.firstChild, title);
  text(panel.blank.lastChild, hint);
  if (isEmpty && !panel.blank.isConnected) panel.append(panel.blank);
  if (!isEmpty) panel.blank.remove();
  panel.classList.toggle("is-empty", isEmpty);
}

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
