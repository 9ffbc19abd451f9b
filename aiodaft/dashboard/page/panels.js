// The totals, tables and lists.

import { Spark } from "./chart.js";
import { ago, byName, bytes, bytesRate, clock, count, empty, h, keyed, rate, set, span, text } from "./dom.js";

// Rows of a table: more take long to draw.
const ROWS = 100;

// Totals.

const TILES = [
  { key: "actors", name: "Actors", value: (t) => count(t.actors), hint: (t) => t.unwell ? `${t.unwell} not well` : `${count(t.busy)} busy`, bad: (t) => t.unwell > 0, spark: (t) => t.busy },
  { key: "calls", name: "Calls", value: (t) => `${rate(t.calls)}/s`, hint: (t) => `${count(t.queued)} queued`, spark: (t) => t.calls },
  { key: "transfers", name: "Transfers", value: (t) => bytesRate(t.bytes), hint: (t) => `${bytesRate(t.bytes - t.payload)} in messages`, spark: (t) => t.bytes },
  { key: "failed", name: "Failed calls", value: (t) => count(t.failures), hint: (t) => t.failed ? `${rate(t.failed)}/s now` : "none now", bad: (t) => t.failed > 0, spark: (t) => t.failed },
  { key: "memory", name: "Memory", value: (t) => bytes(t.rss), hint: (t) => t.values ? `${bytes(t.stored)} in stored values` : "no stored values", spark: (t) => t.rss },
  { key: "cpu", name: "CPU", value: (t) => `${rate(t.cpu)} CPUs`, hint: (t, frame) => `in use, of ${count(frame.nodes.reduce((sum, node) => sum + (node.total.cpus ?? 0), 0))}`, spark: (t) => t.cpu },
];

export function showTiles(panel, frame, isFirst) {
  keyed(panel, TILES, (tile) => tile.key, (tile) => {
    const element = h("div", { class: "tile" }, h("h3", {}, tile.name), h("b"), h("span"));
    element.spark = new Spark(160, 28);
    element.append(element.spark.drawing);
    return element;
  }, (element, tile) => {
    const [, value, hint] = element.children;
    text(value, tile.value(frame.totals));
    text(hint, tile.hint(frame.totals, frame));
    element.classList.toggle("bad", tile.bad?.(frame.totals) ?? false);
    if (!isFirst) element.spark.push(tile.spark(frame.totals));
  });
}

// Tables.

/** A table with columns `{name, value, cell, align, title}`; a click on a heading sorts by `value`. */
class Table {
  constructor(parent, columns) {
    this.columns = columns;
    this.heads = columns.map((column, index) => {
      const button = h("button", { type: "button" }, column.name);
      button.addEventListener("click", () => this.sort(index));
      return h("th", { class: column.align, scope: "col", title: column.title }, button);
    });
    this.body = h("tbody");
    this.more = h("p", { class: "more" });
    this.table = h("table", {}, h("thead", {}, h("tr", {}, this.heads)), this.body);
    parent.append(this.table, this.more);
  }

  sort(index) {
    this.sorted = { index, down: this.sorted?.index === index ? !this.sorted.down : this.columns[index].align === "right" };
    this.show(this.rows, this.keyOf, this.total);
  }

  /** Show rows; `total` counts those that did not come, too. */
  show(rows, keyOf, total) {
    Object.assign(this, { rows, keyOf, total });
    const { sorted, columns } = this;
    this.heads.forEach((head, index) =>
      set(head, { "aria-sort": sorted?.index === index ? (sorted.down ? "descending" : "ascending") : null }));
    let shown = rows;
    if (sorted) {
      const { value } = columns[sorted.index];
      const order = (a, b) => (typeof value(a) === "string" ? byName(value(a), value(b)) : value(a) - value(b));
      shown = rows.toSorted((a, b) => (sorted.down ? order(b, a) : order(a, b)));
    }
    keyed(this.body, shown.slice(0, ROWS), keyOf,
      () => h("tr", {}, columns.map((column) => h("td", { class: column.align }))),
      (row, item) => columns.forEach((column, index) => column.cell(row.children[index], item, row)));
    text(this.more, total > ROWS ? `${count(total - ROWS)} more` : "");
    this.table.hidden = !rows.length;
  }
}

const plain = (write) => (cell, item) => text(cell, write(item));
const quiet = (write, isQuiet) => (cell, item) => {
  text(cell, write(item));
  cell.classList.toggle("quiet", isQuiet(item));
};
const ROLES = ["controller", "node", "worker"];
const WORDS = { cpus: "CPUs", gpus: "GPUs" };
// Of a process that has answered.
const known = (write, isQuiet = () => false) => quiet((p) => (p.answered ? write(p) : "–"), (p) => !p.answered || isQuiet(p));
const ORDER = ["dead", "restarting", "silent", "busy", "idle"];

function state(cell, actor) {
  if (!cell.firstChild) cell.append(h("span", { class: "state" }, h("i"), h("span")));
  set(cell.firstChild, { "data-state": actor.state, title: actor.error });
  text(cell.firstChild.lastChild, actor.state);
}

function who(cell, actor) {
  if (!cell.firstChild) cell.append(h("b"), h("small"));
  text(cell.firstChild, actor.name);
  const names = actor.names.length ? ` as ${actor.names.join(", ")}` : "";
  text(cell.lastChild, `${actor.name.startsWith(`${actor.class}-`) ? "" : actor.class}${names}`);
}

function calls(cell, actor, row) {
  if (!row.spark) {
    row.spark = new Spark(72, 18, 60);
    cell.append(row.spark.drawing, h("span"));
  }
  text(cell.lastChild, rate(actor.calls));
  if (row.pushed !== actor.frame) row.spark.push(actor.calls);
  row.pushed = actor.frame;
  cell.classList.toggle("quiet", !actor.calls);
}

const isWell = (actor) => actor.state === "busy" || actor.state === "idle";
const running = (actor) => [...actor.running, ...(actor.besides ? [`+${count(actor.besides)}`] : [])].join(", ");
const where = (actor) => [actor.node, actor.pid ? `pid ${actor.pid}` : "", ...actor.gpus.map((gpu) => `GPU ${gpu}`)].filter(Boolean).join(" · ");

export class Actors {
  constructor(parent, filter, total) {
    Object.assign(this, { parent, filter, total });
    this.table = new Table(parent, [
      { name: "State", value: (a) => ORDER.indexOf(a.state), cell: state },
      { name: "Actor", value: (a) => a.name, cell: who },
      { name: "Where", value: (a) => where(a), cell: plain(where) },
      { name: "Running", value: (a) => running(a), cell: quiet((a) => running(a) || "–", (a) => !a.running.length) },
      { name: "Queued", align: "right", value: (a) => a.queued, cell: quiet((a) => count(a.queued), (a) => !a.queued) },
      { name: "Done", align: "right", value: (a) => a.done, cell: plain((a) => count(a.done)) },
      { name: "Calls/s", align: "right", value: (a) => a.calls, cell: calls },
      { name: "Failed", align: "right", value: (a) => a.failed, cell: (cell, a) => {
        text(cell, count(a.failed));
        cell.classList.toggle("bad", a.failed > 0);
        cell.classList.toggle("quiet", !a.failed);
      } },
      { name: "Restarts", align: "right", value: (a) => a.restarts, cell: quiet((a) => count(a.restarts), (a) => !a.restarts) },
    ]);
    filter.addEventListener("input", () => this.draw());
  }

  show(frame) {
    this.frame = frame;
    this.draw();
  }

  draw() {
    if (!this.frame) return;
    const wanted = this.filter.value.trim().toLowerCase();
    const { actors, totals } = this.frame;
    const shown = actors
      .filter((actor) => [actor.name, actor.class, actor.state, where(actor), ...actor.names].join(" ").toLowerCase().includes(wanted))
      // What changes all the time does not change the order.
      .toSorted((a, b) => isWell(a) - isWell(b) || byName(a.name, b.name))
      .map((actor) => ({ ...actor, frame: this.frame.taken }));
    text(this.total, wanted ? `${count(shown.length)} of ${count(totals.actors)}` : count(totals.actors));
    this.table.show(shown, (actor) => `${actor.process} ${actor.name}`, wanted ? shown.length : totals.actors);
    empty(this.parent, !shown.length, wanted ? "No such actor" : "No actors yet", wanted ? "Clear the filter to see all." : "They appear as soon as the program spawns some.");
  }
}

export class Processes {
  constructor(parent, nodes) {
    this.nodes = nodes;
    this.table = new Table(parent, [
      { name: "Process", value: (p) => p.title, cell: (cell, p) => {
        if (!cell.firstChild) cell.append(h("b"), h("small"));
        text(cell.firstChild, p.title);
        text(cell.lastChild, [p.node, p.pid ? `pid ${p.pid}` : ""].filter(Boolean).join(" · "));
        set(cell, { title: p.id });
      } },
      { name: "CPU", align: "right", value: (p) => p.cpu, cell: known((p) => `${Math.round(p.cpu * 100)} %`, (p) => p.cpu < 0.005) },
      { name: "Memory", align: "right", value: (p) => p.rss, cell: known((p) => bytes(p.rss)) },
      { name: "Sends", align: "right", value: (p) => p.sent, cell: known((p) => bytesRate(p.sent), (p) => p.sent < 1) },
      { name: "Receives", align: "right", value: (p) => p.received, cell: known((p) => bytesRate(p.received), (p) => p.received < 1) },
      { name: "Threads", align: "right", value: (p) => p.threads, cell: known((p) => count(p.threads)) },
      { name: "Health", value: (p) => (p.answered ? p.lag : 1e9), title: "Whether it answers, for how long its event loop stood still, and collectives that members are late for", cell: (cell, p) => {
        text(cell, !p.answered ? `silent${p.silent ? ` for ${span(p.silent)}` : ""}` : p.lag > 0.1 ? `loop blocked for ${p.lag.toFixed(1)} s` : p.late[0] ?? "well");
        cell.classList.toggle("bad", !p.answered);
        const warns = p.answered && (p.lag > 0.1 || p.late.length > 0);
        cell.classList.toggle("warn", warns);
        cell.classList.toggle("quiet", p.answered && !warns);
      } },
    ]);
  }

  show(frame) {
    const order = (a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || byName(a.title, b.title);
    this.table.show(frame.processes.toSorted(order), (process) => process.id, frame.totals.processes);
    const free = (node) => Object.entries(node.total).filter(([, total]) => total)
      .map(([name, total]) => `${count(node.free[name] ?? 0)} of ${count(total)} ${WORDS[name] ?? name} free`).join(", ");
    const [first, ...others] = frame.nodes;
    const strange = frame.nodes.filter((node) => node.state !== "ready").map((node) => `${node.name} is ${node.state}`);
    text(this.nodes, others.length ? [`${count(frame.nodes.length)} nodes`, ...strange].join(", ") : first ? `${first.name}: ${free(first)}` : "");
  }
}

// Memory.

export function showMemory(panel, frame) {
  panel.parts ??= [h("div", { class: "bars" }), h("h3", {}, "Largest values"), h("div", { class: "values" })];
  const [bars, heading, values] = panel.parts;
  const stores = frame.processes.filter((process) => process.stored || process.pooled)
    .sort((a, b) => b.stored + b.pooled - a.stored - a.pooled).slice(0, 8);
  empty(panel, !stores.length, "No large values", "Results and arguments that travel by themselves are counted here.");
  if (!bars.isConnected) panel.prepend(...panel.parts);
  const top = Math.max(1, ...stores.map((process) => process.stored + process.pooled));
  keyed(bars, stores, (process) => process.id,
    () => h("div", { class: "bar" }, h("b"), h("span", { class: "size" }), h("div", { class: "track" }, h("i", { class: "stored" }), h("i", { class: "pooled" }))),
    (element, process) => {
      const [name, size, track] = element.children;
      text(name, process.title);
      const parts = [process.stored && bytes(process.stored), process.pooled && `${bytes(process.pooled)} pooled`];
      text(size, parts.filter(Boolean).join(" + "));
      track.children[0].style.width = `${(100 * process.stored) / top}%`;
      track.children[1].style.width = `${(100 * process.pooled) / top}%`;
      set(element, { title: `${count(process.values)} values stored; pooled memory is kept for the next ones` });
    });
  heading.hidden = !frame.stored.length;
  keyed(values, frame.stored.slice(0, 12).map((value, index) => ({ ...value, index })), (value) => value.index,
    () => h("div", { class: "value" }, h("b"), h("span", { class: "size" }), h("small")),
    (element, value) => {
      const [name, size, note] = element.children;
      text(name, value.label || "a copy for others");
      text(size, bytes(value.bytes));
      const reading = value.readers ? `, read by ${count(value.readers)}` : "";
      text(note, `in ${value.process}${value.device ? ", on a GPU" : ""}, ref held by ${value.owner}${reading}`);
    });
}

// Failures.

const KINDS = { call: "", death: "died", start: "could not be made", node: "was lost", limit: "is given up" };

function headline(failure) {
  const root = failure.causes[0];
  return failure.what === "call" ? `${root.type}: ${root.message}` : `${failure.actor} ${KINDS[failure.what]}`;
}

function placeOf(failure) {
  const root = failure.causes[0];
  const raised = root.path[0] ?? "";
  const what = failure.what === "call" ? raised || `${failure.method} in ${failure.actor}` : root.type === "ActorDied" ? root.message : `${root.type}: ${root.message}`;
  return [what, failure.line].filter(Boolean).join(" · ");
}

function steps(failure, depth = 0) {
  return failure.followed.flatMap((one) => [{ failure: one, depth }, ...steps(one, depth + 1)]);
}

function consequence({ failure, depth }) {
  const last = failure.causes.at(-1);
  const raised = failure.causes.length > 1 ? ` raised ${last.type}${last.message ? `: ${last.message}` : ""}` : " failed";
  const times = failure.times > 1 ? ` ×${count(failure.times)}` : "";
  const element = h("li", {}, h("b", {}, failure.method || failure.actor), ` of ${failure.actor}${raised}${times}`);
  element.style.marginInlineStart = `${depth}rem`;
  return element;
}

export function showFailures(panel, frame) {
  empty(panel, !frame.failures.length, "Nothing has failed", "Errors appear here with what they led to.");
  panel.list ??= h("div", { class: "failures" });
  if (!panel.list.isConnected) panel.append(panel.list);
  const keyOf = (one) => JSON.stringify([one.what, one.actor, one.method, one.pid, one.first, one.causes]);
  keyed(panel.list, frame.failures, keyOf,
    () => h("article", {}, h("header", {}, h("b"), h("span")), h("p"), h("ul"), h("ol")),
    (element, failure) => {
      const [header, place, causes, followed] = element.children;
      text(header.firstChild, headline(failure));
      set(header.firstChild, { title: headline(failure) });
      text(header.lastChild, `${failure.times > 1 ? `×${count(failure.times)} · ` : ""}${ago(frame.taken - failure.last)}`);
      set(header.lastChild, { title: clock(failure.last) });
      text(place, placeOf(failure));
      // What it became on its way, if other exceptions were raised from it.
      const later = failure.causes.slice(1);
      const told = JSON.stringify([later, failure.followed.map((one) => [one.times, one.causes, one.followed])]);
      if (element.told !== told) {
        element.told = told;
        causes.replaceChildren(...later.map((one) => h("li", {}, `raised as ${one.type}${one.message ? `: ${one.message}` : ""}`)));
        followed.replaceChildren(...steps(failure).map(consequence));
      }
    });
}

// Logs.

// Lines that the page keeps.
const LINES = 1000;
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
    for (const line of this.lines.splice(0, Math.max(0, this.lines.length - LINES))) line.element.remove();
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
