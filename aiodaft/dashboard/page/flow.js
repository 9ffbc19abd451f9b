// The graph of who sends to whom: processes in columns, by how many calls they are away from the program.

import { byName, bytes, bytesRate, count, empty, keyed, rate, set, svg, text } from "./dom.js";

const BOX = { width: 164, height: 46 };
// The least room between boxes: for lines to the right, for lines down, and across the lines.
const GAP = { right: 104, down: 62, across: 24 };
const MARGIN = 14;
// How far the lines there and back are from the middle.
const APART = 6;
// Edges that get a label.
const LABELS = 20;
// Where on its line a label may be.
const SPOTS = [0.5, 0.35, 0.65, 0.25, 0.75];

/** The columns: what sends is left of what receives, as far as that is possible; the program is first. */
export function columnsOf(boxes, edges) {
  const roots = new Set(boxes.filter((box) => box.program).map((box) => box.key));
  const called = new Set(edges.filter((edge) => edge.allCalls).map((edge) => edge.key));
  const next = new Map(boxes.map((box) => [box.key, []]));
  for (const { source, target, key } of edges) {
    // What only answers does not count as a sender.
    const answers = !called.has(key) && called.has(`${target} ${source}`);
    if (!roots.has(target) && !answers) next.get(source).push(target);
  }
  const column = new Map();
  // The last circle is at the end of the lines: each gets its column after all that lead to it.
  for (const circle of circlesOf(next).reverse()) {
    const at = Math.max(...circle.map((key) => column.get(key) ?? (roots.has(key) ? 0 : 1)));
    for (const key of circle) column.set(key, at);
    for (const after of circle.flatMap((key) => next.get(key)).filter((key) => !circle.includes(key))) {
      column.set(after, Math.max(column.get(after) ?? 1, at + 1));
    }
  }
  const columns = [];
  for (const box of boxes) (columns[column.get(box.key)] ??= []).push(box);
  const place = new Map();
  return columns.filter((boxes) => boxes).map((boxes) => {
    // Near to what sends to it.
    const wish = (box) => {
      const from = edges.filter((edge) => edge.target === box.key && place.has(edge.source));
      return from.reduce((sum, edge) => sum + place.get(edge.source), 0) / (from.length || 1);
    };
    const wishes = new Map(boxes.map((box) => [box.key, wish(box)]));
    boxes.sort((a, b) => wishes.get(a.key) - wishes.get(b.key) || byName(a.title, b.title));
    boxes.forEach((box, index) => place.set(box.key, (index + 0.5) / boxes.length));
    return boxes;
  });
}

/** The boxes that reach each other, by the algorithm of Tarjan: each circle comes before those that lead to it. */
function circlesOf(next) {
  const circles = [];
  const number = new Map();
  const lowest = new Map();
  const open = [];
  const visit = (key) => {
    number.set(key, number.size);
    lowest.set(key, number.get(key));
    open.push(key);
    for (const after of next.get(key)) {
      if (!number.has(after)) visit(after);
      if (open.includes(after)) lowest.set(key, Math.min(lowest.get(key), lowest.get(after)));
    }
    if (lowest.get(key) === number.get(key)) circles.push(open.splice(open.indexOf(key)));
  };
  for (const key of next.keys()) if (!number.has(key)) visit(key);
  return circles;
}

/** Where the boxes are: from left to right, or from top to bottom where there is little room. */
export function layout(columns, width) {
  const upright = width < columns.length * (BOX.width + GAP.right) - GAP.right + 2 * MARGIN;
  const places = new Map();
  if (upright) {
    const perRow = Math.max(1, Math.floor((width - 2 * MARGIN + GAP.across) / (BOX.width + GAP.across)));
    let y = MARGIN;
    for (const column of columns) {
      for (let start = 0; start < column.length; start += perRow) {
        const row = column.slice(start, start + perRow);
        const used = row.length * BOX.width + (row.length - 1) * GAP.across;
        row.forEach((box, index) =>
          places.set(box.key, { x: (width - used) / 2 + index * (BOX.width + GAP.across), y }));
        y += BOX.height + GAP.across;
      }
      y += GAP.down - GAP.across;
    }
    return { places, height: y - GAP.down + MARGIN, upright };
  }
  // Long columns are broken into several, if there is room for these.
  const room = Math.floor((width - 2 * MARGIN + GAP.right) / (BOX.width + GAP.right));
  let deepest = Math.max(...columns.map((column) => column.length));
  while (deepest > 6 && columns.reduce((sum, column) => sum + Math.ceil(column.length / (deepest - 1)), 0) <= room) deepest -= 1;
  const slices = columns.flatMap((column) => {
    const parts = Math.ceil(column.length / deepest);
    const size = Math.ceil(column.length / parts);
    return Array.from({ length: parts }, (_, part) => column.slice(part * size, (part + 1) * size));
  });
  const height = Math.max(180, deepest * (BOX.height + GAP.across) - GAP.across + 2 * MARGIN);
  const step = slices.length > 1 ? Math.min(BOX.width + 200, (width - 2 * MARGIN - BOX.width) / (slices.length - 1)) : 0;
  const start = (width - step * (slices.length - 1) - BOX.width) / 2;
  slices.forEach((slice, index) => {
    const used = slice.length * (BOX.height + GAP.across) - GAP.across;
    slice.forEach((box, row) =>
      places.set(box.key, { x: start + index * step, y: (height - used) / 2 + row * (BOX.height + GAP.across) }));
  });
  return { places, height, upright };
}

/** The line of an edge. There and back are apart. */
function curve(from, to, upright) {
  const [a, b] = [from, to].map(({ x, y }) => (upright ? { along: y, across: x, length: BOX.height, breadth: BOX.width }
    : { along: x, across: y, length: BOX.width, breadth: BOX.height }));
  const point = (along, across) => (upright ? `${across.toFixed(1)} ${along.toFixed(1)}` : `${along.toFixed(1)} ${across.toFixed(1)}`);
  if (Math.abs(a.along - b.along) < a.length) {
    const side = a.across < b.across ? APART : -APART;
    const start = [a.along + a.length, a.across + a.breadth / 2 + side];
    const end = [b.along + b.length + 4, b.across + b.breadth / 2 + side];
    return `M${point(...start)}C${point(start[0] + 44, start[1])} ${point(end[0] + 40, end[1])} ${point(...end)}`;
  }
  const onward = a.along < b.along;
  const side = onward ? -APART : APART;
  const start = [onward ? a.along + a.length : a.along, a.across + a.breadth / 2 + side];
  const end = [onward ? b.along - 4 : b.along + b.length + 4, b.across + b.breadth / 2 + side];
  const bend = (end[0] - start[0]) / 2;
  return `M${point(...start)}C${point(start[0] + bend, start[1])} ${point(end[0] - bend, end[1])} ${point(...end)}`;
}

/** Write a text that may be cut, and an ending that is not, into a box. */
function fit(element, title, ending = "") {
  if (element.written === title + ending) return;
  element.written = title + ending;
  element.textContent = title + ending;
  const room = BOX.width - 38;
  const wide = element.getComputedTextLength();
  if (wide > room) element.textContent = `${title.slice(0, Math.floor((title.length + ending.length) * room / wide) - ending.length - 1)}…${ending}`;
}

/** The graph in its panel. */
export class Flow {
  constructor(parent) {
    this.parent = parent;
    const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 5, refY: 4, markerWidth: 9, markerHeight: 9,
      markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8Z" }));
    this.edges = svg("g", { class: "edges" });
    this.boxes = svg("g", { class: "boxes" });
    this.labels = svg("g", { class: "labels" });
    this.drawing = svg("svg", { role: "img" }, svg("defs", {}, arrow), this.edges, this.boxes, this.labels);
    parent.append(this.drawing);
    // Bytes per second of each edge, which settle slowly, so that they can be read.
    this.smooth = new Map();
    this.shape = "";
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  show(frame) {
    this.graph = frame.graph;
    const smooth = new Map();
    for (const edge of this.graph.edges) {
      edge.key = `${edge.source} ${edge.target}`;
      const before = this.smooth.get(edge.key) ?? edge.bytes;
      edge.bytes = edge.bytes + before < 1 ? 0 : (edge.bytes + before) / 2;
      smooth.set(edge.key, edge.bytes);
    }
    this.smooth = smooth;
    this.draw();
  }

  draw() {
    const width = this.parent.clientWidth;
    if (!this.graph || !width) return;
    const { boxes, edges, hidden } = this.graph;
    const alone = boxes.every((box) => box.program);
    empty(this.parent, alone, "No actors yet", "Each process gets a box here, with lines for what it sends.");
    this.drawing.style.display = alone ? "none" : "";
    if (alone) return;
    const shape = [width, ...boxes.map((box) => box.key).sort(), ...edges.map((edge) => edge.key).sort()].join("\n");
    if (shape !== this.shape) {
      this.shape = shape;
      this.layout = layout(columnsOf(boxes, edges), width);
    }
    const { places, height, upright } = this.layout;
    set(this.drawing, { width, height, viewBox: `0 0 ${width} ${height}` });
    this.drawEdges(edges, places, upright);
    this.drawBoxes(boxes, places);
    this.parent.dataset.hidden = hidden ? `${hidden} more processes, which send less` : "";
  }

  drawEdges(edges, places, upright) {
    const titles = new Map(this.graph.boxes.map((box) => [box.key, box.title]));
    keyed(this.edges, edges, (edge) => edge.key,
      () => svg("g", { class: "edge" }, svg("title"), svg("path", { class: "base", "marker-end": "url(#arrow)" }), svg("path", { class: "pulse" })),
      (element, edge) => {
        const [title, base, pulse] = element.children;
        const d = curve(places.get(edge.source), places.get(edge.target), upright);
        const thick = Math.min(9, 1.2 + Math.log10(1 + edge.bytes / 200) * 1.15);
        set(base, { d, "stroke-width": thick.toFixed(1) });
        set(pulse, { d, "stroke-width": Math.max(1, thick * 0.36).toFixed(1) });
        element.classList.toggle("idle", !edge.bytes && !edge.calls);
        text(title, `${titles.get(edge.source)} → ${titles.get(edge.target)}\n${bytesRate(edge.bytes)}, ${rate(edge.calls)} calls/s\nin all ${bytes(edge.allBytes)}, ${count(edge.allCalls)} calls`);
      });
    this.drawLabels(edges, [...places.values()]);
  }

  /** Write the rates of the busiest edges where they hide neither a box nor another rate. */
  drawLabels(edges, boxes) {
    const busiest = edges.filter((edge) => edge.bytes >= 1).sort((a, b) => b.bytes - a.bytes).slice(0, LABELS);
    const placed = [];
    for (const edge of busiest) {
      if (edge.bytes < busiest[0].bytes / 200) break;
      const line = this.edges.known.get(edge.key).children[1];
      const length = line.getTotalLength();
      const spots = SPOTS.map((part) => line.getPointAtLength(length * part));
      const free = spots.find(({ x, y }) =>
        placed.every((other) => Math.abs(other.x - x) > 62 || Math.abs(other.y - y) > 16) &&
        boxes.every((box) => Math.abs(box.x + BOX.width / 2 - x) > BOX.width / 2 + 8 || Math.abs(box.y + BOX.height / 2 - y) > BOX.height / 2 + 8));
      if (free) placed.push({ key: edge.key, bytes: edge.bytes, x: free.x, y: free.y });
    }
    keyed(this.labels, placed, (label) => label.key, () => svg("text"), (element, { x, y, bytes }) => {
      set(element, { x: x.toFixed(1), y: (y + 4).toFixed(1) });
      text(element, bytesRate(bytes));
    });
  }

  drawBoxes(boxes, places) {
    keyed(this.boxes, boxes, (box) => box.key,
      () => svg("g", { class: "box" }, svg("title"), svg("rect", { width: BOX.width, height: BOX.height, rx: 10 }),
        svg("circle", { cx: 16, cy: 17, r: 4 }), svg("text", { class: "name", x: 28, y: 21 }), svg("text", { class: "what", x: 28, y: 37 })),
      (element, box) => {
        const { x, y } = places.get(box.key);
        const [title, , , name, what] = element.children;
        const state = box.program ? "program" : box.state;
        set(element, { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, "data-state": state });
        const several = box.processes > 1 ? ` ×${box.processes}` : "";
        text(title, box.title + several);
        fit(name, box.title, several);
        const queued = box.queued ? ` · ${count(box.queued)} queued` : "";
        fit(what, box.program ? "your program" : `${["busy", "idle"].includes(state) ? `${rate(box.calls)} calls/s` : state}${queued}`);
      });
  }
}
