// Elements, numbers and small charts. Texts become text nodes: no name of a model is read as HTML.

import { SECONDS } from "./api.js";

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Text of an element, changed only if it is another one.
export const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };

export const card = (title, ...content) => h("section", { class: "card" }, h("h2", {}, title), ...content);

// Pairs of a name and a value.
export const facts = (pairs) => h("dl", {}, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

// A table of rows of cells; the numbers of columns in `right` stand on the right.
export function table(heads, rows, right = []) {
  const side = (at) => ({ class: right.includes(at) ? "right" : null });
  const head = heads.map((each, at) => h("th", { scope: "col", ...side(at) }, each));
  return h("table", {}, heads.length ? h("thead", {}, h("tr", {}, ...head)) : null,
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, at) => h("td", side(at), cell))))));
}

// A search field above what it filters.
export const filterField = (label, oninput) => h("input", {
  type: "search", placeholder: `${label}  ( / )`, "aria-label": label, autocomplete: "off", spellcheck: "false", oninput,
});

// --- numbers, in the forms of the command line

const three = (value) => {
  if (value === 0) return "0";
  const text = value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
  return Number.isInteger(value) && text.includes(".") ? String(value) : text;
};

export const number = (value) => (value === null || value === undefined ? "–" : value < 1e6 ? three(value) : `${three(value / 1e6)}M`);

export const count = (value) => value.toLocaleString("en").replaceAll(",", "\u202f");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0009995) return `${three(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${three(seconds * 1e3)} ms`;
  if (seconds < 120) return `${three(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} d`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (bytes < 1024) return `${bytes} B`;
  let power = 1;
  while (power < 4 && bytes / 1024 ** power >= 999.5) power += 1;
  return `${three(bytes / 1024 ** power)} ${["KiB", "MiB", "GiB", "TiB"][power - 1]}`;
}

// --- charts

const FEWEST = 30; // points of a chart, however few there are yet

// Points from left to right, the last one now; null is a gap.
export function sparkline(series, { width = 96, height = 20, label = "" } = {}) {
  const lines = Array.isArray(series[0]) ? series : [series];
  const of = Math.max(FEWEST, lines[0].length);
  const most = Math.max(0, ...lines.flatMap((line) => line.map((value) => value ?? 0))) || 1;
  const chart = svg("svg", {
    class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": label, preserveAspectRatio: "none",
  });
  lines.forEach((line, index) => {
    const step = (width - 2) / (of - 1);
    let path = "";
    let down = false;
    line.forEach((value, at) => {
      if (value === null || value === undefined) { down = false; return; }
      const x = width - 1 - (line.length - 1 - at) * step;
      const y = height - 1 - (value / most) * (height - 2);
      path += `${down ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${down ? "" : "h.1"}`; // a point alone is a dot
      down = true;
    });
    chart.append(svg("path", { d: path, class: `line line-${index}` }));
  });
  return chart;
}

// A chart with its name, current value and highest value.
export function chart(name, values, format, names = []) {
  const lines = Array.isArray(values[0]) ? values : [values];
  const last = lines.map((line) => format(line.at(-1) ?? null));
  const known = lines.flat().filter((value) => value !== null && value !== undefined);
  const most = known.length ? Math.max(...known) : null;
  const now = last.map((text, index) => h("span", { class: `legend-${index}` },
    names[index] ? `${names[index]} ` : "", h("b", {}, text)));
  const begin = duration(SECONDS * Math.max(FEWEST, lines[0].length));
  return h("figure", { class: lines.length > 1 ? "chart two" : "chart" },
    h("figcaption", {}, h("span", {}, name), h("span", { class: "now" }, ...now)),
    sparkline(lines, { width: 320, height: 56, label: `${name}: now ${last.join(", ")}` }),
    h("div", { class: "axis" }, h("span", {}, begin), h("span", {}, `max ${format(most)}`), h("span", {}, "now")));
}

// A share as a bar, which is coloured when it is nearly full if that `alarms`.
export function meter(share, label, alarms = false) {
  const percent = Math.min(100, Math.max(0, share * 100));
  const state = !alarms ? "good" : percent > 95 ? "bad" : percent > 80 ? "warn" : "good";
  const attributes = { class: `meter ${state}`, width: 80, height: 8, viewBox: "0 0 120 8", preserveAspectRatio: "none" };
  const bar = (name, width) => svg("rect", { class: name, width, height: 8, rx: 2 });
  return svg("svg", { ...attributes, role: "img", "aria-label": label }, bar("rest", 120), bar("fill", (120 * percent) / 100));
}

// --- dialogs

// A dialog with a form; resolves to the form's data, or null if it was left.
export function ask(title, body, action, { danger = false, cancel = true } = {}) {
  return new Promise((resolve) => {
    const form = h("form", { method: "dialog" }, h("h2", {}, title), body,
      h("div", { class: "buttons" },
        cancel ? h("button", { type: "button", onclick: () => dialog.close() }, "Cancel") : null,
        h("button", { type: "submit", class: danger ? "danger" : "primary" }, action)));
    const dialog = h("dialog", { "aria-label": title }, form);
    let data = null;
    form.addEventListener("submit", () => { data = new FormData(form); });
    dialog.addEventListener("close", () => { dialog.remove(); resolve(data); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
