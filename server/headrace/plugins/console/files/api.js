// Requests to the server, and the figures that two answers about its status give.

const KEY = "headrace.key";
const HEADER = "headrace.header";
export const SECONDS = 2; // between two readings of the status
const POINTS = 90;

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// The headers that a client shows, kept as long as the tab.
export const credentials = {
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  get header() { return sessionStorage.getItem(HEADER) ?? ""; },
  set(key, header) { sessionStorage.setItem(KEY, key); sessionStorage.setItem(HEADER, header); },
  get headers() {
    const found = {};
    if (this.key) found.authorization = `Bearer ${this.key}`;
    const [name, ...value] = this.header.split(":");
    if (name && value.length) found[name.trim()] = value.join(":").trim();
    return found;
  },
};

// Numbers beyond 2^53 keep their digits, as texts.
const exact = (_, value, context) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? context.source : value;

// Servers of the protocol write NaN and infinities as bare words: here they become texts.
const bare = (text) => text.replace(/"(?:[^"\\]|\\.)*"|-?(?:NaN|Infinity)/g, (found) => (found[0] === '"' ? found : `"${found}"`));
export const read = (text, revive) => (text ? JSON.parse(/NaN|Infinity/.test(text) ? bare(text) : text, revive) : null);

// The document of an answer, with all `digits` of integers if wanted, which takes longer; or the `raw` answer.
export async function request(method, path, body, { signal, headers = {}, raw = false, digits = false } = {}) {
  const options = { method, signal, headers: { ...credentials.headers, ...headers }, cache: "no-store", credentials: "same-origin" };
  if (body !== undefined) {
    options.body = typeof body === "string" || body instanceof Blob ? body : JSON.stringify(body);
    options.headers["content-type"] ??= "application/json";
  }
  const answer = await fetch(path, options);
  if (!answer.ok) {
    let why = await answer.text();
    try { why = JSON.parse(why).error ?? why; } catch { /* not of the protocol */ }
    throw new Refused(answer.status, why || `status ${answer.status}`);
  }
  return raw ? answer : read(await answer.text(), digits ? exact : undefined);
}

export const ofModel = (name, version, end = "") => `v2/models/${encodeURIComponent(name)}${version ? `/versions/${version}` : ""}${end}`;

// --- figures

// The quantile of counts by upper bound, linear in each bucket; the highest bound above all of them.
function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  const wanted = share * total;
  let below = 0;
  for (let at = 0; at < counts.length; at += 1) {
    if (below + counts[at] >= wanted && counts[at]) {
      const low = at ? bounds[at - 1] : 0;
      if (at >= bounds.length) return low;
      return low + (bounds[at] - low) * ((wanted - below) / counts[at]);
    }
    below += counts[at];
  }
  return bounds.at(-1);
}

// What was counted between two readings; counters of something restarted begin at 0.
const more = (now, before) => (now >= (before ?? 0) ? now - (before ?? 0) : now);
const moreOf = (now, before = []) => {
  const found = now.map((each, at) => each - (before[at] ?? 0));
  return found.some((each) => each < 0) ? now : found;
};

// True of an answer that is no failure, by its status on either door.
export const succeeded = (answer) => /^[123]|^OK$/.test(answer.status);

const failed = (document) => document.answers.reduce((sum, each) => sum + (succeeded(each) ? 0 : each.count), 0);

const push = (series, value) => { if (series.push(value) > POINTS) series.shift(); };

export const keyOf = (model) => `${model.name}/${model.version}`;

// The server over time: `rows` are its models with their figures since the reading before.
export class Watch {
  constructor() {
    this.document = null;
    this.rows = [];
    this.byKey = new Map();
    this.history = { requests: [], failures: [], p50: [], p99: [], waiting: [], cpu: [], memory: [] };
    this.never = []; // names of models that were never loaded
    this.absent = []; // those of them that the status does not have
  }

  // The names of models that were never loaded, as of the last index.
  list(names) {
    this.never = names;
    const listed = new Set(this.rows.map((row) => row.name));
    this.absent = names.filter((name) => !listed.has(name));
  }

  take(document) {
    const before = this.document;
    const same = before && before.server.id === document.server.id;
    const seconds = same ? Math.max(document.time - before.time, 0.001) : 0;
    const bounds = document.bounds_seconds;
    const rows = [];
    const all = [];
    // Answers of all doors, also to requests that no model was asked for.
    const totals = { requests: 0, failures: same ? more(failed(document), failed(before)) / seconds : 0, waiting: 0 };
    const byKey = new Map();
    for (const model of document.models) {
      const key = keyOf(model);
      const old = same ? this.byKey.get(key) : undefined;
      const was = old?.model;
      const row = old ?? { key, history: { requests: [], failures: [], p50: [], p99: [], queue: [], waiting: [] } };
      const unknown = { requests: null, failures: null, p50: null, p99: null, queue: null, batch: null };
      Object.assign(row, { model, name: model.name, lower: model.name.toLowerCase(), ...unknown });
      if (was && seconds) {
        row.requests = more(model.requests, was.requests) / seconds;
        row.failures = more(model.failures, was.failures) / seconds;
        totals.requests += row.requests;
        if (row.requests) {
          const latency = moreOf(model.latency, was.latency);
          latency.forEach((each, at) => { all[at] = (all[at] ?? 0) + each; });
          row.p50 = quantile(latency, bounds, 0.5);
          row.p99 = quantile(latency, bounds, 0.99);
          row.queue = quantile(moreOf(model.queue, was.queue), bounds, 0.99);
          const batches = more(model.batches, was.batches);
          row.batch = batches ? more(model.rows, was.rows) / batches : null;
        }
        for (const name of ["requests", "failures", "p50", "p99", "queue"]) push(row.history[name], row[name]);
        push(row.history.waiting, model.waiting);
      }
      totals.waiting += model.waiting;
      rows.push(row);
      byKey.set(key, row);
    }
    this.rows = rows;
    this.list(this.never);
    this.byKey = byKey;
    const cpu = document.processes.reduce((sum, each) => sum + each.cpu_seconds, 0);
    this.totals = {
      ...totals,
      p50: quantile(all, bounds, 0.5),
      p99: quantile(all, bounds, 0.99),
      cpu: same ? Math.max(0, cpu - this.cpu) / seconds : null,
      memory: document.memory.resident_bytes,
    };
    if (same) for (const name of Object.keys(this.history)) push(this.history[name], this.totals[name]);
    this.cpu = cpu;
    this.document = document;
  }

  get may() { return new Set(this.document?.client.may ?? []); }
  versions(name) { return this.rows.filter((row) => row.name === name); }
}
