// The last records of the log, for those who may read them.

import { Refused, request } from "./api.js";
import { h, setText } from "./dom.js";

const LEVEL = /\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|"level":"(\w+)"/;

export class Log {
  constructor() {
    this.filter = h("input", { type: "search", placeholder: "Filter  ( / )", "aria-label": "Filter the log", autocomplete: "off", spellcheck: "false", oninput: () => this.draw() });
    this.counted = h("span", { class: "muted", role: "status" });
    this.lines = h("div", { class: "log", tabIndex: 0, role: "log", "aria-label": "Log", "aria-live": "off" });
    this.element = h("div", { class: "logview" }, h("div", { class: "bar" }, this.filter, this.counted), this.lines);
    this.records = [];
    this.failed = "";
    this.aborted = new AbortController();
  }

  close() { this.aborted.abort(); }

  async update() {
    try {
      const found = await request("POST", "v2/logging/tail", undefined, { signal: this.aborted.signal });
      this.failed = "";
      this.records = found.records;
      this.kept = found.kept;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failed = error instanceof Refused ? error.message : String(error);
    }
    this.draw();
  }

  draw() {
    if (this.failed) {
      this.lines.replaceChildren(h("p", { class: "muted" }, this.failed));
      setText(this.counted, "");
      return;
    }
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.records.filter((record) => words.every((word) => record.toLowerCase().includes(word)));
    setText(this.counted, `${found.length} of the last ${this.records.length} records; at most ${this.kept} are kept`);
    const text = found.join("\n");
    if (text === this.text) return;
    this.text = text;
    const end = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
    this.lines.replaceChildren(...found.map((record) => {
      const level = LEVEL.exec(record);
      return h("div", { class: `record ${(level?.[1] ?? level?.[2] ?? "").toLowerCase()}` }, record);
    }));
    if (end) this.lines.scrollTop = this.lines.scrollHeight;
  }
}
