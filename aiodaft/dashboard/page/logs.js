// What actors print and log.

import { empty, h, text } from "./dom.js";
import { clock } from "./format.js";

// Lines that the page keeps.
const MOST = 1000;
// Colors that tell actors apart.
const HUES = 8;
const COLOR_CODES = /\x1b\[[0-?]*[ -/]*[@-~]/g;

function hueOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 997;
  return sum % HUES;
}

function levelOf(line) {
  if (["WARNING", "WARN"].includes(line.level)) return "warn";
  if (["ERROR", "CRITICAL", "FATAL"].includes(line.level)) return "bad";
  return line.level === "DEBUG" ? "quiet" : null;
}

/** The lines in their panel, which follows the newest ones as long as its end is in view. */
export class Logs {
  constructor(parent, filter, total) {
    Object.assign(this, { parent, filter, total });
    this.list = h("div", { class: "lines", role: "log" });
    parent.append(this.list);
    this.lines = [];
    filter.addEventListener("input", () => this.look());
  }

  show(frame) {
    const follows = this.parent.scrollHeight - this.parent.scrollTop - this.parent.clientHeight < 40;
    for (const line of frame.lines) {
      const words = line.text.replace(COLOR_CODES, "");
      const element = h("div", { class: "line", "data-level": levelOf(line) },
        h("time", {}, clock(line.at)),
        h("b", { "data-hue": hueOf(line.actor), title: `${line.actor}, pid ${line.pid}` }, line.actor),
        h("span", {}, line.level ? h("i", {}, line.level.toLowerCase()) : null, words));
      this.lines.push({ element, words: `${line.actor} ${line.level} ${words}`.toLowerCase() });
      this.list.append(element);
    }
    for (const line of this.lines.splice(0, Math.max(0, this.lines.length - MOST))) line.element.remove();
    this.look();
    if (follows) this.parent.scrollTop = this.parent.scrollHeight;
  }

  look() {
    const wanted = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const line of this.lines) {
      line.element.hidden = !line.words.includes(wanted);
      shown += !line.element.hidden;
    }
    text(this.total, this.lines.length ? `the last ${shown}` : "");
    empty(this.parent, !shown, this.lines.length ? "No such line" : "Nothing printed yet",
      this.lines.length ? "Clear the filter to see all." : "What actors print and log appears here.");
  }
}
