// Makes and changes elements. Texts from the program go in as text only, never as markup.

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
