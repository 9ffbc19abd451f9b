// Gets one look a second, and shows it.

import { Chart } from "./chart.js";
import { bytesRate, rate, set, text } from "./dom.js";
import { Flow } from "./flow.js";
import { Actors, Logs, Processes, showFailures, showMemory, showTiles } from "./panels.js";

// Seconds without a look after which the page says so.
const PATIENCE = 4;
const THEMES = ["system", "light", "dark"];

const at = (id) => document.getElementById(id);
const calls = new Chart(at("calls"), [{ name: "calls/s", color: "--series-1" }, { name: "failed/s", color: "--series-bad" }], rate, 1);
const transfers = new Chart(at("transfers"), [{ name: "large values", color: "--series-2" }, { name: "messages", color: "--series-3" }], bytesRate, 1000);
const flow = new Flow(at("flow"));
const actors = new Actors(at("actors"), at("actors-filter"), at("actors-count"));
const logs = new Logs(at("logs"), at("logs-filter"), at("logs-count"));
const processes = new Processes(at("processes"), at("nodes"));

let stream = null;
let newest = null;
let heard = 0;
let paused = false;
let ended = false;

function show(frame) {
  const isFirst = !frame.seconds;
  const { totals } = frame;
  text(at("where"), [frame.nodes.length === 1 ? frame.nodes[0].name : `${frame.nodes.length} nodes`, frame.runtime].join(" · "));
  showTiles(at("tiles"), frame, isFirst);
  if (!isFirst) {
    calls.push(frame.taken, [totals.calls, totals.failed]);
    transfers.push(frame.taken, [totals.payload, totals.bytes - totals.payload]);
  }
  flow.show(frame);
  actors.show(frame);
  processes.show(frame);
  showMemory(at("memory"), frame);
  showFailures(at("failures"), frame);
  logs.show(frame);
}

function tell() {
  const silent = newest !== null && (performance.now() - heard) / 1000 > PATIENCE;
  const state = ended ? "ended" : paused ? "paused" : newest === null ? "waiting" : silent ? "lost" : "live";
  const words = { ended: "ended", paused: "paused", waiting: "connecting", lost: "reconnecting", live: "live" };
  set(at("status"), { "data-state": state });
  text(at("status"), words[state]);
  at("notice").hidden = state !== "lost" && state !== "ended";
  text(at("notice"), ended ? "The runtime is closed. This is how it was last seen." : "The program does not answer. This is how it was last seen.");
}

function listen() {
  stream = new EventSource("events");
  stream.onmessage = (event) => {
    heard = performance.now();
    const frame = JSON.parse(event.data);
    // The program was started again: nothing of the last one is to be left.
    if (newest !== null && frame.runtime !== newest.runtime) location.reload();
    newest = frame;
    show(frame);
    tell();
  };
  stream.addEventListener("closed", () => {
    ended = true;
    stream.close();
    tell();
  });
  // A browser does not try again after some errors.
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED && !paused && !ended) setTimeout(listen, 1000);
  };
}

at("pause").addEventListener("click", () => {
  paused = !paused;
  set(at("pause"), { "aria-pressed": paused });
  text(at("pause"), paused ? "Go on" : "Pause");
  if (paused) stream.close();
  else listen();
  tell();
});

function useTheme(theme) {
  set(document.documentElement, { "data-theme": theme === "system" ? null : theme });
  text(at("theme"), { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme]);
}

let theme = "system";
try {
  theme = localStorage.getItem("aiodaft-theme") ?? theme;
} catch {
  // Some browsers store nothing.
}
useTheme(THEMES.includes(theme) ? theme : "system");
at("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  useTheme(theme);
  try {
    localStorage.setItem("aiodaft-theme", theme);
  } catch {
    // As above.
  }
});

setInterval(tell, 1000);
tell();
listen();
