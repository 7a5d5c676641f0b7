// The server: its processes, the account's limits, memory, certificates and answers.

import { succeeded } from "./api.js";
import { card, count, duration, facts, h, meter, number, size, table } from "./dom.js";
import { degradedName, link } from "./models.js";

const percent = (share) => `${(share * 100).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
const BYTES = new Set(["request bytes", "model memory"]);

export class Server {
  constructor(watch) {
    this.watch = watch;
    this.before = new Map(); // seconds of CPU by process id
    this.element = h("div", { class: "cards" });
  }

  update() {
    const now = this.watch.document;
    if (!now) return;
    const { server, cores, memory } = now;
    const seconds = this.at ? now.time - this.at : 0;
    const share = (each) => (seconds > 0 && this.before.has(each.pid) ? Math.max(0, (each.cpu_seconds - this.before.get(each.pid)) / seconds) : null);
    const processes = now.processes.map((each) => [
      each.kind === "server" ? "server" : each.name,
      each.model ? h("a", { href: link(each.model, each.version) }, `${each.model}/${each.version}`) : "",
      each.pid ? String(each.pid) : h("span", { class: "state", "data-state": "unavailable" }, "ended"),
      number(share(each)), duration(each.cpu_seconds), String(each.threads), size(each.resident_bytes),
      meter(each.resident_bytes / Math.max(memory.resident_bytes, 1), `${size(each.resident_bytes)} of all`),
    ]);
    if (!this.at || seconds > 0.5) {
      this.before = new Map(now.processes.map((each) => [each.pid, each.cpu_seconds]));
      this.at = now.time;
    }
    const limits = now.limits.map((each) => {
      const text = BYTES.has(each.name) ? size : count;
      const full = each.limit ? each.used / each.limit : 0;
      return [each.name, text(each.used), each.limit === null ? "no limit" : text(each.limit),
        ...(each.limit === null ? ["", ""] : [percent(full), meter(full, `${percent(full)} full`, true)]),
        count(each.refused), h("code", {}, each.option)];
    });
    const certificates = now.certificates.map((each) => {
      const left = each.expires - now.time;
      const soon = left < 14 * 86400 ? "unavailable" : "ready";
      return [h("code", {}, each.file), each.door, new Date(each.expires * 1000).toISOString().slice(0, 16).replace("T", " "),
        h("span", { class: "state", "data-state": soon }, left > 0 ? `in ${duration(left)}` : "expired")];
    });
    const answers = [...now.answers].sort((a, b) => b.count - a.count).slice(0, 30).map((each) => {
      const good = succeeded(each);
      return [each.door, each.operation, h("span", { class: "state", "data-state": good ? "ready" : "unavailable" }, each.status), count(each.count)];
    });
    const budget = memory.budget_bytes ? ` of ${size(memory.budget_bytes)}` : "";
    const none = (text) => h("p", { class: "muted" }, text);
    this.element.replaceChildren(
      h("div", {},
        card("Server", facts([
          ["Version", `${server.name} ${server.version}`], ["Up", duration(Math.max(0, now.time - server.started))],
          ["Model control", `${server.model_control}; traffic rules ${server.traffic_control ? "may" : "may not"} be changed`],
          ...Object.entries(server.addresses).map(([door, address]) => [door, h("code", {}, address)]),
          ["Threads", `${count(cores.model_threads)} of models on ${count(cores.available)} cores; ${count(cores.process_threads)} in all processes`],
          ["Memory", `${size(memory.resident_bytes)}; models ${size(memory.model_bytes)}${budget}`],
          ...(memory.evictions ? [["Evictions", count(memory.evictions)]] : []),
          ...Object.entries(now.lost).filter(([, each]) => each).map(([name, each]) => [`Lost ${name.replace("_", " ")}`, count(each)]),
          ["You", `${now.client.name || "unknown"}: ${now.client.may.join(", ")}`],
        ])),
        card("Limits", table(["Limit", "Used", "Of", "Full", "", "Refused", "Option"], limits, [1, 2, 3, 5])),
        ...(certificates.length ? [card("Certificates", table(["File", "Door", "Expires (UTC)", ""], certificates))] : [])),
      h("div", {},
        card("Degraded", now.degraded.length
          ? h("ul", {}, ...now.degraded.slice(0, 200).map((each) => h("li", {}, degradedName(each), " ", each.reason)))
          : none("Nothing is degraded.")),
        card("Processes", table(["Process", "Model", "PID", "Cores", "CPU time", "Threads", "Memory", ""], processes, [2, 3, 4, 5, 6])),
        card("Answers since the start", answers.length ? table(["Door", "Operation", "Status", "Count"], answers, [3]) : none("None yet."))),
    );
  }
}
