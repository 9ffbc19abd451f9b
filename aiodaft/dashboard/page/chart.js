// Lines over time.

import { ago, h, set, svg, text } from "./dom.js";

// Seconds that a chart shows at most, and at least.
const SPAN = 300;
const LEAST = 60;
const MARGIN = { left: 58, right: 10, top: 10, bottom: 20 };
const HEIGHT = 170;

/** The number that an axis ends with. */
function roof(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= value * 1.001);
}

/** A chart of some series: `{name, color}` each, where the color is the name of a variable of the style sheet. */
export class Chart {
  constructor(parent, series, format, least) {
    this.parent = parent;
    this.series = series;
    this.format = format;
    // What the axis reaches at least.
    this.least = least;
    // Each is a time in seconds, and a value per series.
    this.points = [];
    this.areas = series.map((one) => svg("path", { class: "area", fill: `var(${one.color})` }));
    this.lines = series.map((one) => svg("path", { class: "line", stroke: `var(${one.color})` }));
    this.grid = svg("g", { class: "grid" });
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.drawing = svg("svg", { height: HEIGHT, role: "img" }, this.grid, this.areas, this.lines, this.cursor);
    this.legend = h("div", { class: "legend" });
    this.values = series.map((one) => h("b"));
    series.forEach((one, index) => {
      const key = h("i", {});
      key.style.background = `var(${one.color})`;
      this.legend.append(h("span", {}, key, one.name, this.values[index]));
    });
    parent.append(this.legend, this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  /** Add values at a time. */
  push(time, values) {
    this.points.push([time, ...values]);
    while (this.points[0][0] < time - SPAN - 5) this.points.shift();
    this.draw();
  }

  x(time) {
    const width = this.width - MARGIN.left - MARGIN.right;
    return MARGIN.left + width * (1 - (this.now - time) / this.span);
  }

  y(value) {
    return MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - value / this.top);
  }

  draw() {
    this.width = this.parent.clientWidth;
    if (!this.width) return;
    set(this.drawing, { width: this.width, viewBox: `0 0 ${this.width} ${HEIGHT}` });
    this.now = this.points.at(-1)?.[0] ?? 0;
    this.span = Math.min(SPAN, Math.max(LEAST, this.now - (this.points[0]?.[0] ?? 0)));
    this.top = roof(Math.max(this.least * 0.99, ...this.points.flatMap((point) => point.slice(1))));
    this.drawGrid();
    if (!this.points.length) return;
    this.series.forEach((_, index) => {
      // After a gap, a new line begins.
      let path = "";
      let area = "";
      let before = null;
      for (const point of this.points) {
        const at = `${this.x(point[0]).toFixed(1)} ${this.y(point[index + 1]).toFixed(1)}`;
        const joins = before !== null && point[0] - before < 5;
        path += `${joins ? "L" : "M"}${at}`;
        if (!joins) area += `${before === null ? "" : `L${this.x(before).toFixed(1)} ${this.y(0)}Z`}M${this.x(point[0]).toFixed(1)} ${this.y(0)}`;
        area += `L${at}`;
        before = point[0];
      }
      set(this.lines[index], { d: path });
      set(this.areas[index], { d: `${area}L${this.x(before).toFixed(1)} ${this.y(0)}Z` });
    });
    this.tell(this.points.at(-1));
  }

  drawGrid() {
    const marks = [];
    for (const part of [0, 0.5, 1]) {
      const y = this.y(this.top * part);
      marks.push(svg("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      marks.push(svg("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, this.format(this.top * part)));
    }
    for (const [part, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
      const label = part ? ago(this.span * part) : "now";
      marks.push(svg("text", { x: this.x(this.now - this.span * part), y: HEIGHT - 4, "text-anchor": anchor }, label));
    }
    this.grid.replaceChildren(...marks);
  }

  /** Show the values where the mouse is; null: the newest. */
  point(x) {
    if (!this.points.length) return;
    if (x === null) {
      set(this.cursor, { visibility: "hidden" });
      this.tell(this.points.at(-1));
      return;
    }
    const nearest = this.points.reduce((best, point) =>
      Math.abs(this.x(point[0]) - x) < Math.abs(this.x(best[0]) - x) ? point : best);
    set(this.cursor, { x1: this.x(nearest[0]), x2: this.x(nearest[0]), visibility: "visible" });
    this.tell(nearest);
  }

  tell(point) {
    this.values.forEach((element, index) => text(element, this.format(point[index + 1])));
  }
}

/** A small line without axes: `push` a value, about one per second. */
export class Spark {
  constructor(width, height, length = 60) {
    Object.assign(this, { width, height, length });
    this.values = [];
    this.line = svg("path", { class: "line" });
    this.area = svg("path", { class: "area" });
    this.drawing = svg(
      "svg",
      { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.line,
    );
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > this.length) this.values.shift();
    const top = Math.max(1e-9, ...this.values);
    const step = this.width / (this.length - 1);
    const from = this.length - this.values.length;
    const points = this.values.map((one, index) =>
      `${((from + index) * step).toFixed(1)} ${(this.height - 1 - (one / top) * (this.height - 2)).toFixed(1)}`);
    set(this.line, { d: `M${points.join("L")}` });
    set(this.area, { d: `M${(from * step).toFixed(1)} ${this.height}L${points.join("L")}L${this.width} ${this.height}Z` });
  }
}
