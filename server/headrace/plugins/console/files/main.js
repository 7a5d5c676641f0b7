// The page: sections by the address's fragment, the server's status again and again, keys.

import { credentials, Refused, request, SECONDS, Watch } from "./api.js";
import { ask, duration, h, setText } from "./dom.js";
import { Log } from "./log.js";
import { Model } from "./model.js";
import { Models } from "./models.js";
import { Server } from "./server.js";

const [PATIENCE, INDEX_EVERY] = [30, 8]; // most seconds between two attempts; readings between two of the repository's index
const byId = (id) => document.getElementById(id);

const watch = new Watch();
const models = new Models(watch);
let [view, shown] = [null, ""];
let [failures, readings, timer] = [0, 0, 0];
let [paused, reading, asking, declined] = [false, false, false, false]; // the last two: of a key

// --- sections

function route() {
  const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } }; // "50%", as people write it
  const [section, name, version] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  if (section === "models" && name) return ["model", name, version ?? ""];
  return [section === "server" || section === "log" ? section : "models"];
}

function show() {
  const found = route();
  const key = found.join("/");
  if (key === shown) return;
  view?.close?.();
  shown = key;
  const [section, name, version] = found;
  view = section === "model" ? new Model(watch, name, version, refresh) : section === "server" ? new Server(watch)
    : section === "log" ? new Log() : models;
  byId("main").replaceChildren(view.element);
  document.title = section === "model" ? `${name} – headrace` : `${section} – headrace`;
  for (const anchor of document.querySelectorAll("nav a[data-section]")) {
    anchor.ariaCurrent = anchor.dataset.section === (section === "model" ? "models" : section) ? "page" : null;
  }
  view.update();
  view.opened?.();
  if (document.activeElement === document.body) byId("main").focus({ preventScroll: true });
}

// --- status

async function refresh() {
  if (reading) return;
  reading = true;
  clearTimeout(timer);
  try {
    watch.take(await request("GET", "v2/status"));
    if (readings % INDEX_EVERY === 0) await readIndex();
    readings += 1;
    failures = 0;
    notice("");
    head();
    view.update();
  } catch (error) {
    failures += 1;
    explain(error);
  }
  reading = false;
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  timer = setTimeout(refresh, 1000 * Math.min(SECONDS * 2 ** Math.min(failures, 5), PATIENCE));
}

// Models that were never loaded are in the index alone, where clients control models.
async function readIndex() {
  if (watch.document.server.model_control !== "explicit" || !watch.may.has("read")) return;
  try {
    const found = await request("POST", "v2/repository/index", {});
    watch.list([...new Set(found.filter((each) => !each.version).map((each) => each.name))]);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    watch.list([]); // restricted to others
  }
}

function explain(error) {
  if (error instanceof Refused) {
    notice(error.message);
    if ((error.status === 401 || error.status === 403) && !asking && !declined) askForKey(error.message);
  } else {
    notice(`The server does not answer (${error.message}). It is asked again.`);
    byId("readiness").dataset.state = "unavailable";
    setText(byId("readiness"), "away");
  }
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function head() {
  const { server, client, time } = watch.document;
  const readiness = byId("readiness");
  readiness.className = "state";
  readiness.dataset.state = server.ready ? "ready" : "unavailable";
  setText(readiness, server.ready ? "ready" : "not ready");
  readiness.title = `${server.name} ${server.version}, up ${duration(Math.max(0, time - server.started))}`;
  setText(byId("client"), client.kind === "anonymous" ? "" : `${client.name} (${client.kind})`);
}

// --- keys

async function askForKey(why = "") {
  asking = true;
  const data = await ask("Key for this session", h("div", { class: "fields" },
    why ? h("p", {}, why) : null,
    h("label", {}, "API key or token",
      h("input", { name: "key", type: "password", autocomplete: "off", value: credentials.key, pattern: "[ -~]*", autofocus: true })),
    h("label", {}, "Further header, such as restricted operations need",
      h("input", { name: "header", autocomplete: "off", placeholder: "NAME: VALUE", value: credentials.header, pattern: " *[A-Za-z0-9_.\\-]+ *:[ -~]*" })),
    h("p", { class: "muted" }, "Both are sent to this server alone, and forgotten with this tab."),
  ), "Use");
  asking = false;
  declined = !data;
  if (declined) return;
  credentials.set(String(data.get("key")).trim(), String(data.get("header")).trim());
  failures = 0;
  readings = 0;
  shown = "";
  show();
  refresh();
}

function pause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  setText(byId("pause"), paused ? "Resume" : "Pause");
  if (paused) schedule(); else refresh();
}

const HELP = [["/", "filter"], ["↓ ↑ or j k", "next and previous model"], ["Enter", "open the model"], ["Esc", "back"],
  ["1 2 3", "models, server, log"], ["p", "pause"], ["k", "key, outside of the table"], ["Ctrl Enter", "run the model"], ["?", "this help"]];

const help = () => ask("Keyboard", h("dl", { class: "keys" },
  ...HELP.flatMap(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])), "Close", { cancel: false });

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape") {
    event.preventDefault(); // which would empty a search field
    if (typing) event.target.blur();
    else if (shown.startsWith("model/")) location.hash = "#/";
    return;
  }
  if (typing) return;
  const act = {
    "/": () => { view.filter?.focus(); view.filter?.select(); }, "?": help, p: pause, k: () => askForKey(),
    1: () => { location.hash = "#/"; }, 2: () => { location.hash = "#/server"; }, 3: () => { location.hash = "#/log"; },
    j: () => view.scroll?.focus(), ArrowDown: () => view.scroll?.focus(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

addEventListener("hashchange", show);
addEventListener("keydown", pressed);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : paused || refresh()));
byId("pause").addEventListener("click", pause);
byId("key").addEventListener("click", () => askForKey());
byId("help").addEventListener("click", help);
show();
refresh();
