// One version of a model: figures, facts, traffic, configuration, what can be done, and a playground.

import { keyOf, ofModel, Refused, request } from "./api.js";
import { ask, card, chart, count, duration, facts, h, number, setText, size, table } from "./dom.js";
import { Graph } from "./graph.js";
import { instances, link, stateOf } from "./models.js";
import { Playground } from "./playground.js";

const shape = (dims) => `[${dims.join(", ")}]`;

export class Model {
  constructor(watch, name, version, refresh) {
    Object.assign(this, { watch, name, version, refresh });
    this.state = h("span", { class: "state" });
    this.reason = h("p", { class: "reason", hidden: true });
    this.versions = h("nav", { class: "versions", "aria-label": "Versions" });
    this.actions = h("div", { class: "buttons" });
    this.outcome = h("p", { class: "outcome", role: "status", hidden: true });
    this.charts = h("div", { class: "tiles" });
    [this.drawn, this.facts, this.traffic, this.signature, this.try] = Array.from({ length: 5 }, () => h("div"));
    this.config = h("details", { ontoggle: () => this.readConfig() }, h("summary", {}, "Configuration"), h("pre", {}));
    this.element = h("div", { class: "model" },
      h("div", { class: "title" }, h("a", { href: "#/", class: "back", title: "All models (Esc)" }, "Models"), h("h1", {}, name),
        this.versions, this.state, h("span", { class: "grow" }), this.actions),
      this.reason, this.outcome, this.charts, this.drawn,
      h("div", { class: "columns" }, h("div", {}, this.facts, this.signature, this.traffic, card("More", this.config)), this.try));
    this.aborted = new AbortController();
    this.readings = 0;
  }

  close() { this.aborted.abort(); this.playground?.close(); }

  update() {
    if (!this.watch.document) return;
    const versions = this.watch.versions(this.name);
    if (!this.version && versions.length) { // the highest one that serves
      const serving = versions.filter((row) => row.model.state === "READY");
      this.version = (serving.at(-1) ?? versions.at(-1)).model.version;
    }
    this.versions.replaceChildren(...versions.filter((row) => row.model.version).map((row) => h("a", {
      href: link(this.name, row.model.version), "aria-current": row.model.version === this.version ? "page" : null,
    }, `version ${row.model.version}`)));
    const row = this.watch.byKey.get(keyOf(this));
    const state = row ? stateOf(row.model) : "not loaded";
    setText(this.state, state);
    this.state.dataset.state = state;
    this.reason.hidden = !row?.model.reason;
    setText(this.reason, row?.model.reason ?? "");
    this.config.parentElement.hidden = row?.model.state !== "READY";
    this.act(row, versions);
    if (!row) return;
    const { history } = row;
    this.charts.replaceChildren(
      chart("Requests/s", history.requests, number), chart("Errors/s", history.failures, number),
      chart("Latency", [history.p50, history.p99], duration, ["p50", "p99"]), chart("Queue p99", history.queue, duration),
      chart("Waiting", history.waiting, number));
    this.describe(row);
    this.draw();
    if (this.readings % 4 === 0) this.readTraffic(versions);
    this.readings += 1;
    if (row.model.state === "READY" && !this.read) this.readMetadata(row.model);
    if (row.model.state !== "READY") this.read = false;
  }

  describe({ model, batch }) {
    this.facts.replaceChildren(card("Figures", facts([
      ["Backend", model.backend || "–"], ["Instances", `${instances(model)}${model.threads ? `, ${model.threads} threads` : ""}`],
      ["Memory", size(model.memory_bytes || null)], ...(model.gpu_memory_bytes ? [["GPU memory", size(model.gpu_memory_bytes)]] : []),
      ["Loaded in", duration(model.load_seconds || null)], ["Requests", `${count(model.requests)}, ${count(model.failures)} failed`],
      ["Rows", `${count(model.rows)} in ${count(model.batches)} batches${batch ? `, now ${number(batch)} a batch` : ""}`],
      ["Last request", model.last_request ? new Date(model.last_request * 1000).toLocaleTimeString() : "none"],
      ...(model.latency.length ? [["Latencies", histogram(model.latency, this.watch.document.bounds_seconds)]] : []),
    ])));
  }

  // --- what can be done

  act(row, versions) {
    const { server } = this.watch.document;
    const ready = (each) => each?.model.state === "READY";
    const [may, loaded] = [this.watch.may.has("control"), versions.some(ready)];
    const wanted = may && server.model_control === "explicit" ? [["load", loaded ? "Reload" : "Load"]] : [];
    if (wanted.length && loaded) wanted.push(["unload", "Unload"]);
    if (may && server.traffic_control && ready(row) && versions.length > 1) wanted.push(["promote", `Promote version ${this.version}`]);
    const key = JSON.stringify(wanted);
    if (key === this.wanted) return; // buttons keep the focus
    this.wanted = key;
    this.actions.replaceChildren(...wanted.map(([action, text]) => h("button", {
      type: "button", class: action === "unload" ? "danger" : "", "data-action": action, onclick: () => this.control(action),
    }, text)));
  }

  async control(action) {
    const named = encodeURIComponent(this.name);
    const [title, text, path, body] = {
      load: [`Load ${this.name}?`, "Its files are read again. Versions that serve go on until the new ones are ready.",
        `v2/repository/models/${named}/load`, {}],
      unload: [`Unload ${this.name}?`, "Requests under way are finished; further ones are refused until it is loaded again.",
        `v2/repository/models/${named}/unload`, {}],
      promote: [`Promote version ${this.version} of ${this.name}?`, "It gets all requests that name no version.",
        `v2/models/${named}/traffic/promote`, { version: this.version, reason: "console" }],
    }[action];
    if (!(await ask(title, h("p", {}, text), title.split(" ")[0], { danger: action === "unload" }))) return;
    this.say(`${action} …`);
    for (const button of this.actions.children) button.disabled = true;
    try {
      await request("POST", path, body);
      this.say(`${action}: done`);
    } catch (error) {
      this.say(`${action}: ${error.message}`, true);
    }
    this.wanted = "";
    this.read = false;
    this.readings = 0;
    await this.refresh();
    if (!this.aborted.signal.aborted) this.update();
  }

  say(text, wrong = false) {
    this.outcome.hidden = false;
    this.outcome.classList.toggle("wrong", wrong);
    setText(this.outcome, text);
  }

  // --- documents

  async readMetadata(model) {
    this.read = true;
    if (!this.watch.may.has("read")) return;
    try {
      const { signal } = this.aborted;
      const read = (end) => request("GET", ofModel(this.name, this.version, end), undefined, { signal });
      const [{ inputs = [], outputs = [] }, config] = await Promise.all([read(""), read("/config")]);
      const optional = new Set((config.input ?? []).filter((each) => each.optional).map((each) => each.name));
      const row = (kind, each) => [h("span", { class: "muted" }, kind), each.name, h("code", {}, each.datatype), h("code", {}, shape(each.shape))];
      this.signature.replaceChildren(card("Signature", table([], [
        ...inputs.map((each) => row(optional.has(each.name) ? "optional input" : "input", each)),
        ...outputs.map((each) => row("output", each)),
      ])));
      [this.ensemble, this.graph] = [config.ensemble_scheduling ? config : null, null];
      this.drawn.replaceChildren();
      if (!this.watch.may.has("infer")) return;
      this.playground?.close();
      const wanted = inputs.map((each) => ({ ...each, optional: optional.has(each.name) }));
      this.playground = new Playground(this.watch, this.name, this.version, wanted, model.decoupled);
      this.try.replaceChildren(this.playground.element);
    } catch (error) {
      if (error.name !== "AbortError") this.signature.replaceChildren(card("Signature", h("p", { class: "muted" }, error.message)));
    }
  }

  // The graph of an ensemble, for those who may see what all of its steps do.
  draw() {
    const seen = this.ensemble?.ensemble_scheduling.step.every(({ model_name }) => this.watch.versions(model_name).length);
    if (seen && !this.graph) this.drawn.replaceChildren(card("Graph", (this.graph = new Graph(this.watch, this.ensemble)).element));
    this.graph?.update();
  }

  async readTraffic(versions) {
    if (versions.length < 2) return;
    try {
      const found = await request("GET", ofModel(this.name, "", "/traffic"), undefined, { signal: this.aborted.signal });
      const ruled = found.source && found.source !== "none";
      const rows = found.versions.map((each) => [each.version, (each.state || "–").toLowerCase(), each.role || "–",
        ruled ? `${(each.share * 100).toFixed(0)} %` : "–", count(Number(each.routed)), each.reason]);
      this.traffic.replaceChildren(card("Traffic", table(["Version", "State", "Role", "Share", "Routed", "Reason"], rows, [3, 4]),
        ruled ? "" : h("p", { class: "muted" }, "There are no rules: the highest version that is ready gets requests that name none.")));
    } catch (error) {
      if (error instanceof Refused) this.traffic.replaceChildren(); // a model without rules, or not for this client
      else if (error.name !== "AbortError") throw error;
    }
  }

  async readConfig() {
    if (!this.config.open) return;
    const show = (text) => setText(this.config.querySelector("pre"), text);
    const read = request("GET", ofModel(this.name, this.version, "/config"), undefined, { signal: this.aborted.signal });
    await read.then((found) => show(JSON.stringify(found, null, 2)), (error) => error.name === "AbortError" || show(error.message));
  }
}

// All latencies as bars: from the bucket before the first one with any to the last one.
function histogram(counts, bounds) {
  const first = Math.max(counts.findIndex((each) => each) - 1, 0);
  const most = Math.max(...counts);
  const end = (at) => (at < bounds.length ? `up to ${duration(bounds[at])}` : `above ${duration(bounds.at(-1))}`);
  const bars = counts.map((each, at) => h("span", { "data-share": Math.ceil((each / most) * 10), title: `${count(each)} ${end(at)}` }));
  return h("div", {},
    h("div", { class: "histogram", role: "img", "aria-label": "Latencies of all requests since the load" }, ...bars.slice(first)),
    h("div", { class: "axis" }, h("span", {}, end(first)), h("span", {}, end(counts.length - 1))));
}
