// The models: figures of the whole server above a table that draws only the rows in view.

import { chart, count, duration, filterField, h, meter, number, setText, size, sparkline } from "./dom.js";

const ROW = 30; // height of a row, as in console.css
const AROUND = 8; // rows drawn above and below those in view

export const link = (name, version) => `#/models/${encodeURIComponent(name)}${version ? `/${version}` : ""}`;

export const instances = (model) => Object.entries(model.instances).map(([kind, each]) => `${each} ${kind}`).join(", ") || "–";

export const stateOf = (model) => (model.state || "not loaded").toLowerCase();
const troubled = (row) => (row.model.state !== "READY" && !row.model.unloaded && row.model.state !== "")
  || row.model.reason || row.model.overloaded || row.model.stalled;

// Head, value to sort by, text, and class; the first two and the state are made of elements.
const COLUMNS = [
  { id: "name", head: "Model", value: (row) => row.lower, text: (row) => row.name },
  { id: "version", head: "Version", value: (row) => Number(row.model.version), text: (row) => row.model.version || "–", side: "right" },
  { id: "state", head: "State", value: (row) => stateOf(row.model), text: (row) => stateOf(row.model) },
  { id: "requests", head: "Req/s", value: (row) => row.requests ?? 0, text: (row) => number(row.requests), side: "right" },
  { id: "trend", head: "Trend", text: () => "" },
  { id: "failures", head: "Err/s", value: (row) => row.failures ?? 0, text: (row) => number(row.failures), side: "right" },
  { id: "waiting", head: "Waiting", value: (row) => row.model.waiting, text: (row) => count(row.model.waiting), side: "right" },
  { id: "p50", head: "p50", value: (row) => row.p50 ?? -1, text: (row) => duration(row.p50), side: "right" },
  { id: "p99", head: "p99", value: (row) => row.p99 ?? -1, text: (row) => duration(row.p99), side: "right" },
  { id: "queue", head: "Queue p99", value: (row) => row.queue ?? -1, text: (row) => duration(row.queue), side: "right", wide: true },
  { id: "batch", head: "Rows/batch", value: (row) => row.batch ?? -1, text: (row) => number(row.batch), side: "right", wide: true },
  { id: "memory", head: "Memory", value: (row) => row.model.memory_bytes, text: (row) => size(row.model.memory_bytes || null), side: "right" },
  { id: "instances", head: "Instances", value: (row) => instances(row.model), text: (row) => instances(row.model), wide: true },
  { id: "reason", head: "Reason", value: (row) => row.model.reason, text: (row) => row.model.reason },
];
const SHOWN = {
  all: () => true, "not ready": (row) => row.model.state !== "READY",
  busy: (row) => row.requests > 0 || row.model.waiting > 0, degraded: troubled,
};

export class Models {
  constructor(watch) {
    Object.assign(this, { watch, order: "name", down: false, rows: [] });
    this.drawn = new Map(); // rows of the table by key
    this.tiles = h("section", { class: "tiles", "aria-label": "Server" });
    this.degraded = h("section", { class: "degraded", "aria-label": "Degraded", hidden: true });
    this.downloads = h("section", { class: "downloads", "aria-label": "Downloads", hidden: true });
    this.filter = filterField("Filter models", () => this.update(true));
    this.shown = h("select", { "aria-label": "Shown models", onchange: () => this.update(true) },
      ...Object.keys(SHOWN).map((name) => h("option", {}, name)));
    this.counted = h("span", { class: "muted", role: "status" });
    this.heads = COLUMNS.map((column) => h("th", { scope: "col", class: this.classes(column) },
      column.value ? h("button", { type: "button", onclick: () => this.sort(column.id) }, column.head) : column.head));
    this.above = h("tr", { "aria-hidden": "true" }, h("td"));
    this.below = h("tr", { "aria-hidden": "true" }, h("td"));
    this.body = h("tbody", {}, this.above, this.below);
    this.table = h("table", { class: "grid" }, h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.scroll = h("div", {
      class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of models",
      onscroll: () => this.soon(), onkeydown: (event) => this.key(event),
    }, this.table);
    this.element = h("div", { class: "models" }, this.tiles, this.downloads, this.degraded,
      h("div", { class: "bar" }, this.filter, this.shown, this.counted), this.scroll);
    new ResizeObserver(() => this.soon()).observe(this.scroll);
  }

  classes(column) { return `${column.side ?? ""} ${column.wide ? "wide" : ""} c-${column.id}`.trim(); }

  // Another section is shown: its filter and order stay, and so do the place and the focus.
  close() { [this.top, this.left] = [this.scroll.scrollTop, document.activeElement.closest("tr[data-key]")?.dataset.key]; }

  opened() {
    this.scroll.scrollTop = this.top ?? 0;
    this.draw();
    this.drawn.get(this.left)?.link.focus();
  }

  sort(id) {
    this.down = this.order === id ? !this.down : !["name", "version", "state", "reason", "instances"].includes(id);
    this.order = id;
    this.update(true);
  }

  update(fromUser = false) {
    if (!this.watch.document) return;
    if (!fromUser) this.summarise();
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const known = [...this.watch.rows, ...this.watch.absent.map(neverLoaded)];
    const wanted = SHOWN[this.shown.value];
    this.rows = known.filter((row) => wanted(row) && words.every((word) => row.lower.includes(word)));
    const { value } = COLUMNS.find((column) => column.id === this.order);
    const sign = this.down ? -1 : 1;
    this.rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return x < y ? -sign : x > y ? sign : a.lower < b.lower ? -1 : a.lower > b.lower ? 1 : a.model.version - b.model.version;
    });
    const sorted = this.down ? "descending" : "ascending";
    this.heads.forEach((head, at) => { head.ariaSort = COLUMNS[at].id === this.order ? sorted : null; });
    const of = this.rows.length === known.length ? "" : `${count(this.rows.length)} of `;
    setText(this.counted, `${of}${count(known.length)} versions`);
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.draw();
  }

  summarise() {
    const { history, totals, document } = this.watch;
    const states = {};
    for (const { model } of this.watch.rows) states[stateOf(model)] = (states[stateOf(model)] ?? 0) + 1;
    const listed = Object.entries(states).map(([name, each]) => `${count(each)} ${name}`).join(", ");
    const [requests] = document.limits;
    this.tiles.replaceChildren(
      chart("Requests/s", history.requests, number), chart("Errors/s", history.failures, number),
      chart("Latency", [history.p50, history.p99], duration, ["p50", "p99"]),
      chart("Waiting", history.waiting, number), chart("CPU (cores)", history.cpu, number),
      chart("Memory", history.memory, size),
    );
    const most = requests.limit === null ? "any number" : count(requests.limit);
    this.tiles.title = `${listed || "no models"}; ${count(requests.used)} requests under way of ${most}`;
    const { downloads } = document;
    this.downloads.hidden = !downloads.length;
    if (downloads.length) this.downloads.replaceChildren(h("ul", {}, ...downloads.slice(0, 5).map(downloading),
      downloads.length > 5 ? h("li", { class: "muted" }, `and ${count(downloads.length - 5)} more`) : null));
    const found = document.degraded;
    this.degraded.hidden = !found.length;
    const open = this.degraded.querySelector("details")?.open ?? found.length <= 5;
    if (found.length) this.degraded.replaceChildren(h("details", { open }, h("summary", {}, `${count(found.length)} degraded`),
      h("ul", {}, ...found.slice(0, 50).map((each) => h("li", {}, degradedName(each), " ", each.reason)),
        found.length > 50 ? h("li", { class: "muted" }, `and ${count(found.length - 50)} more`) : null)));
  }

  soon() { this.waits ||= requestAnimationFrame(() => { this.waits = 0; this.draw(); }); }

  draw() {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil((this.scroll.scrollTop + this.scroll.clientHeight) / ROW) + AROUND);
    const focused = document.activeElement?.closest?.("tr[data-key]")?.dataset.key;
    const drawn = new Map();
    let before = this.above;
    for (let at = first; at < last; at += 1) {
      const row = this.rows[at];
      const line = this.drawn.get(row.key) ?? this.line(row);
      this.fill(line, row, at);
      if (before.nextSibling !== line.element) before.after(line.element);
      before = line.element;
      drawn.set(row.key, line);
    }
    for (const [key, line] of this.drawn) if (!drawn.has(key)) line.element.remove();
    this.drawn = drawn;
    this.above.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.style.height = `${(this.rows.length - last) * ROW}px`;
    this.above.hidden = !first;
    this.below.hidden = last === this.rows.length;
    if (focused && drawn.has(focused)) drawn.get(focused).link.focus({ preventScroll: true });
  }

  line(row) {
    const cells = COLUMNS.map((column) => h("td", { class: this.classes(column) }));
    const anchor = h("a", { href: link(row.name, row.model.version) });
    cells[0].append(anchor);
    const badge = h("span", { class: "state" });
    cells[2].append(badge);
    return { element: h("tr", { "data-key": row.key }, ...cells), cells, link: anchor, badge, trend: "" };
  }

  fill(line, row, at) {
    line.element.setAttribute("aria-rowindex", at + 2);
    COLUMNS.forEach((column, number) => {
      if (column.id === "trend") return;
      const target = column.id === "name" ? line.link : column.id === "state" ? line.badge : line.cells[number];
      setText(target, column.text(row));
    });
    line.link.title = row.name;
    line.badge.dataset.state = row.model.overloaded || row.model.stalled ? "warn" : stateOf(row.model);
    line.cells.at(-1).title = row.model.reason;
    line.cells[5].classList.toggle("alarm", row.failures > 0);
    line.element.classList.toggle("idle", !row.requests);
    const trend = row.history.requests.join();
    if (trend !== line.trend) {
      line.trend = trend;
      const busy = row.history.requests.some((value) => value);
      line.cells[4].replaceChildren(busy ? sparkline(row.history.requests, { label: `requests/s of ${row.name}` }) : "");
    }
  }

  key(event) {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    const end = { Home: 0, End: this.rows.length - 1 }[event.key];
    if ((step === undefined && end === undefined) || event.ctrlKey || event.metaKey || event.altKey || !this.rows.length) return;
    event.preventDefault();
    event.stopPropagation();
    const now = this.rows.findIndex((row) => row.key === document.activeElement.closest("tr[data-key]")?.dataset.key);
    const at = end ?? Math.min(Math.max(now + step, 0), this.rows.length - 1);
    const head = this.table.tHead.offsetHeight;
    const { scrollTop, clientHeight } = this.scroll;
    if (at * ROW < scrollTop) this.scroll.scrollTop = at * ROW;
    else if ((at + 1) * ROW + head > scrollTop + clientHeight) this.scroll.scrollTop = (at + 1) * ROW + head - clientHeight;
    this.draw();
    this.drawn.get(this.rows[at].key)?.link.focus({ preventScroll: true });
  }
}

export function degradedName(each) {
  const name = each.version ? `${each.name} version ${each.version}` : each.name;
  const shown = each.kind === "model" ? h("a", { href: link(each.name, each.version) }, name) : name;
  const lead = name === "" || name.startsWith(each.kind) ? "" : `${each.kind} `;
  return h("span", {}, h("span", { class: "muted" }, lead), h("b", {}, shown || each.kind));
}

function downloading({ model, store, bytes, fetched_bytes: fetched }) {
  return h("li", {}, h("b", {}, model), meter(bytes ? fetched / bytes : 1, `download of ${model}`),
    h("span", {}, `${size(fetched)} of ${size(bytes)}`), h("span", { class: "muted" }, store));
}

function neverLoaded(name) {
  return {
    key: `${name}/`, name, lower: name.toLowerCase(), requests: null, failures: null, p50: null, p99: null, queue: null, batch: null,
    history: { requests: [] },
    model: { name, version: "", state: "", reason: "", unloaded: true, instances: {}, memory_bytes: 0, waiting: 0 },
  };
}
