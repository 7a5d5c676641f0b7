// A form for a request, made from a model's signature; its call as a program; the answer.

import { credentials, ofModel, read, Refused, request } from "./api.js";
import { card, duration, h, meter, number, table } from "./dom.js";
import { binary, body, flat, programs } from "./programs.js";

const FLOATS = new Set(["FP32", "FP64"]);
const WITHOUT_JSON = new Set(["FP16", "BF16"]);
const MOST_FIELDS = 16; // numbers with a field each
const MOST_SHOWN = 200; // values of an output
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/; // of JSON
const WHOLE = /^[+-]?\d+$/;

const elements = (shape) => shape.reduce((product, dim) => product * dim, 1);
const bracket = (shape) => `[${shape.join(", ")}]`;

export class Playground {
  constructor(watch, name, version, inputs, decoupled) {
    Object.assign(this, { watch, name, version, decoupled });
    this.inputs = inputs.map((spec) => new Input(spec, () => this.changed()));
    const labels = { "aria-label": "Parameters of the request, as JSON", placeholder: '{"priority": 1}' };
    this.parameters = h("textarea", { rows: 1, spellcheck: "false", ...labels, oninput: () => this.changed() });
    this.send = h("button", { type: "submit", class: "primary" }, "Run");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.abort?.abort() }, "Stop");
    this.spent = h("span", { class: "muted", role: "status" });
    this.answer = h("div", { class: "answer" });
    this.program = h("pre", { class: "program", tabIndex: 0 });
    this.kind = "curl";
    const choose = (kind) => () => { this.kind = kind; this.changed(); };
    this.tabs = Object.keys(programs).map((kind) => h("button", { type: "button", role: "tab", onclick: choose(kind) }, kind));
    this.copy = h("button", { type: "button", onclick: () => this.copied() }, "Copy");
    const submitted = (event) => { event.preventDefault(); this.run(); };
    const pressed = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run(); };
    const form = h("form", { class: "play", onsubmit: submitted, onkeydown: pressed },
      ...this.inputs.map((input) => input.element),
      h("details", {}, h("summary", {}, "Parameters"), this.parameters),
      h("div", { class: "buttons" }, this.send, this.stop, this.spent));
    this.element = card("Try it", form, this.answer,
      h("div", { class: "bar" }, h("div", { class: "tabs", role: "tablist", "aria-label": "The same call" }, ...this.tabs),
        h("span", { class: "grow" }), this.copy), this.program);
    this.changed();
  }

  // The tensors and parameters of the request; throws an Error that says what is wrong.
  get call() {
    const tensors = this.inputs.filter((input) => input.use.checked).map((input) => input.tensor);
    const text = this.parameters.value.trim();
    let parameters = {};
    if (text) {
      try { parameters = JSON.parse(text); } catch (error) { throw new Error(`parameters: ${error.message}`); }
      if (typeof parameters !== "object" || Array.isArray(parameters) || !parameters) throw new Error("parameters: expected a JSON object");
    }
    return { name: this.name, version: this.version, decoupled: this.decoupled, tensors, parameters };
  }

  changed() {
    for (const [at, kind] of Object.keys(programs).entries()) this.tabs[at].setAttribute("aria-selected", kind === this.kind);
    let [shown, wrong] = ["", false];
    try { shown = programs[this.kind](this.call, this.watch.document.server, credentials.headers); } catch (error) { [shown, wrong] = [error.message, true]; }
    this.program.textContent = shown;
    this.program.classList.toggle("wrong", wrong);
    this.copy.disabled = wrong;
  }

  async copied() {
    const whole = this.program.textContent;
    try {
      await navigator.clipboard.writeText(whole);
      this.copy.textContent = "Copied";
    } catch { // not at a secure address: the user copies what is selected
      getSelection().selectAllChildren(this.program);
      this.copy.textContent = "Press Ctrl C";
    }
    setTimeout(() => { this.copy.textContent = "Copy"; }, 2000);
  }

  close() { this.abort?.abort(); }

  async run() {
    let call;
    try { call = this.call; } catch (error) { this.failed(error.message); return; }
    this.abort?.abort();
    const own = this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.hidden = false;
    this.spent.textContent = "running";
    const begun = performance.now();
    const spent = () => duration((performance.now() - begun) / 1000);
    try {
      if (call.decoupled) await this.stream(call, own.signal, spent);
      else {
        const sent = call.tensors.some(({ file }) => file) ? binary(call) : { content: body(call) };
        const options = { signal: own.signal, digits: true, headers: sent.headers };
        const found = await request("POST", ofModel(call.name, call.version, "/infer"), sent.content, options);
        this.spent.textContent = `answered after ${spent()}`;
        this.answer.replaceChildren(...found.outputs.map(output), ...given(found.parameters));
      }
    } catch (error) {
      if (error.name === "AbortError") this.spent.textContent = `stopped after ${spent()}`;
      else this.failed(error.message, error instanceof Refused ? `status ${error.status} after ${spent()}` : "");
    }
    if (this.abort !== own) return; // run again meanwhile
    this.send.disabled = false;
    this.stop.hidden = true;
  }

  async stream(call, signal, spent) {
    const answer = await request("POST", ofModel(call.name, call.version, "/generate_stream"), flat(call), { signal, raw: true });
    const list = h("ol", { class: "events" });
    this.answer.replaceChildren(list);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const { model_name, model_version, ...own } = read(event.replace(/^data: ?/, ""));
        list.append(h("li", { class: own.error ? "wrong" : "" }, own.error ?? JSON.stringify(own)));
      }
      this.spent.textContent = `${list.children.length} responses in ${spent()}`;
    }
  }

  failed(text, more = "") {
    this.spent.textContent = more;
    this.answer.replaceChildren(h("p", { class: "wrong", role: "alert" }, text));
  }
}

function output({ name, datatype, shape, data }) {
  const shown = data.slice(0, MOST_SHOWN);
  const shares = FLOATS.has(datatype) && data.length > 1 && data.length <= 32 && data.every((each) => each >= 0 && each <= 1.0001);
  const bars = () => h("div", { class: "bars" },
    table([], data.map((each, at) => [String(at), meter(each, number(each)), each.toPrecision(4)]), [0, 2]));
  const text = datatype === "BYTES" ? shown.join("\n") : shown.map((each) => (typeof each === "string" ? each : JSON.stringify(each))).join(", ");
  return h("div", { class: "output" },
    h("h3", {}, name, " ", h("code", {}, `${datatype} ${bracket(shape)}`)),
    shares ? bars() : h("pre", { tabIndex: 0 }, text),
    data.length > shown.length ? h("p", { class: "muted" }, `and ${data.length - shown.length} more values`) : null);
}

const given = (parameters) => (parameters && Object.keys(parameters).length ? [h("pre", {}, JSON.stringify(parameters))] : []);

// A number or truth value in JSON, as it was typed where JSON allows that.
function written(datatype, text, wrong) {
  if (datatype === "BOOL") {
    if (!/^(true|false|0|1)$/.test(text)) throw wrong(`expected true or false, got '${text}'`);
    return { 1: "true", 0: "false" }[text] ?? text;
  }
  if (!FLOATS.has(datatype)) {
    if (!WHOLE.test(text)) throw wrong(`expected an integer, got '${text}'`);
    return String(BigInt(text.replace(/^\+/, "")));
  }
  if (text === "" || !Number.isFinite(Number(text))) throw wrong(`expected a number, got '${text}'`);
  return NUMBER.test(text) ? text : String(Number(text));
}

// --- one input

class Input {
  constructor(spec, changed) {
    this.spec = { ...spec, shape: spec.shape.map(Number) };
    this.changed = () => {};
    this.pixels = null;
    const { name, datatype, shape } = this.spec;
    const text = datatype === "BYTES";
    const oninput = () => { this.fields(); this.changed(); };
    const dimension = (axis) => h("input", { type: "number", min: 0, step: 1, value: "1", "aria-label": `axis ${axis} of ${name}`, oninput });
    this.dims = shape.map((dim, axis) => (dim < 0 ? dimension(axis) : null));
    const modes = text ? ["text", "JSON", "file"] : ["numbers", "JSON", "image"];
    this.mode = h("select", { "aria-label": `form of ${name}`, onchange: () => this.choose() }, ...modes.map((mode) => h("option", {}, mode)));
    this.use = h("input", { type: "checkbox", checked: !spec.optional, "aria-label": `send ${name}`, onchange: () => this.changed() });
    const used = () => { this.use.checked = true; this.changed(); }; // an optional one that is filled in
    this.area = h("div", { class: "area", oninput: used, onchange: used });
    this.element = h("fieldset", {}, h("legend", {}, this.use, " ", name, " ", h("code", {}, `${datatype} ${bracket(shape)}`)),
      h("div", { class: "bar" }, this.mode, ...this.dims.flatMap((dim, axis) => (dim ? [h("label", {}, `axis ${axis} `, dim)] : []))), this.area);
    this.choose();
    this.changed = changed; // not before the form is whole
  }

  get whole() { return this.spec.datatype.includes("INT"); }
  get shape() { return this.spec.shape.map((dim, axis) => (dim < 0 ? Math.max(0, Math.floor(Number(this.dims[axis].value) || 0)) : dim)); }

  choose() {
    this.pixels = this.content = null;
    this.wrong = "";
    const { name, datatype } = this.spec;
    this.text = h("textarea", { rows: 3, spellcheck: "false", "aria-label": `values of ${name}`, oninput: () => this.changed() });
    const form = this.mode.value;
    this.text.placeholder = form === "text" ? "one value; of several, one a line" : datatype === "BYTES" ? '["text"]' : "[[0, 1], [2, 3]]";
    if (form === "text" || form === "JSON") this.area.replaceChildren(this.text);
    else if (form === "image") this.image();
    else if (form === "file") {
      this.file = h("input", { type: "file", "aria-label": `file for ${name}`, onchange: () => this.load() });
      this.area.replaceChildren(this.file);
    } else this.fields();
    this.changed();
  }

  // A field for each of a few numbers, else an area for all.
  fields() {
    if (this.mode.value !== "numbers") return;
    const many = elements(this.shape);
    this.single = [];
    if (many > MOST_FIELDS) {
      if (!this.area.contains(this.text)) this.area.replaceChildren(this.text);
      this.text.placeholder = `${many} numbers, separated by blanks or commas; nothing is zeros`;
      return;
    }
    const kind = this.spec.datatype === "BOOL" ? { type: "checkbox" } : { type: "text", inputmode: "decimal", value: "0", size: 6 };
    this.single = Array.from({ length: many }, (_, at) =>
      h("input", { ...kind, "aria-label": `value ${at} of ${this.spec.name}`, oninput: () => this.changed() }));
    this.area.replaceChildren(...this.single);
  }

  // Numbers from the pixels of a file, scaled to the axes of the input.
  image() {
    this.file = h("input", { type: "file", accept: "image/*", "aria-label": `image for ${this.spec.name}`, onchange: () => this.read() });
    this.low = h("input", { type: "number", value: "0", step: "any", "aria-label": "value of black", oninput: () => this.read() });
    this.high = h("input", { type: "number", value: this.whole ? "255" : "1", step: "any", "aria-label": "value of white", oninput: () => this.read() });
    this.preview = h("canvas", { width: 0, height: 0, class: "preview" });
    this.area.replaceChildren(this.file, h("label", {}, "black ", this.low), h("label", {}, "white ", this.high), this.preview);
  }

  // The bytes of a file, as one element.
  async load() {
    const [file] = this.file.files;
    this.content = file ? { name: file.name, bytes: new Uint8Array(await file.arrayBuffer()) } : null;
    this.changed();
  }

  async read() {
    const [file] = this.file.files;
    if (!file) return;
    this.wrong = "";
    try { this.put(await createImageBitmap(file)); } catch (error) { this.pixels = null; this.wrong = error.message; }
    this.changed();
  }

  put(picture) {
    const axes = this.axes();
    const square = (axis, given) => {
      if (this.spec.shape[axis] < 0 && Number(this.dims[axis].value) <= 1) this.dims[axis].value = String(given);
      return this.shape[axis];
    };
    const [height, width] = [square(axes.height, picture.height), square(axes.width, picture.width)];
    const channels = axes.channels === null ? 1 : this.shape[axes.channels];
    Object.assign(this.preview, { width, height });
    const context = this.preview.getContext("2d", { willReadFrequently: true });
    context.drawImage(picture, 0, 0, width, height);
    const { data } = context.getImageData(0, 0, width, height);
    const [low, high] = [Number(this.low.value), Number(this.high.value)];
    const value = (at, channel) => {
      const [r, g, b] = data.slice(at, at + 3);
      const bright = channels === 1 ? 0.299 * r + 0.587 * g + 0.114 * b : [r, g, b, data[at + 3]][channel];
      const scaled = low + (bright / 255) * (high - low);
      return this.whole ? String(Math.round(scaled)) : String(Number(scaled.toFixed(6)));
    };
    const found = [];
    const pixel = (y, x, channel) => found.push(value(4 * (y * width + x), channel));
    if (axes.first) for (let c = 0; c < channels; c += 1) for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) pixel(y, x, c);
    else for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) for (let c = 0; c < channels; c += 1) pixel(y, x, c);
    this.pixels = found;
  }

  // Which axes are height, width and channels: the last ones of the shape.
  axes() {
    const { shape, shape: { length: rank } } = this.spec;
    if (rank >= 3 && [1, 3, 4].includes(shape[rank - 1])) return { height: rank - 3, width: rank - 2, channels: rank - 1, first: false };
    if (rank >= 3 && [1, 3, 4].includes(shape[rank - 3])) return { height: rank - 2, width: rank - 1, channels: rank - 3, first: true };
    if (rank >= 2) return { height: rank - 2, width: rank - 1, channels: null, first: true };
    throw new Error("an image needs an input with two axes or more");
  }

  get tensor() {
    const { name, datatype } = this.spec;
    const wrong = (text) => new Error(`${name}: ${text}`);
    if (WITHOUT_JSON.has(datatype)) throw wrong(`${datatype} has no form in JSON; a client sends it in binary`);
    if (this.wrong) throw wrong(this.wrong);
    let shape = this.shape;
    let data;
    const mode = this.mode.value;
    if (mode === "image" && !this.pixels) throw wrong("choose an image");
    if (mode === "JSON") ({ data, shape } = this.parsed(wrong));
    else if (mode === "image") data = this.pixels;
    else if (mode === "file") {
      if (!this.content) throw wrong("choose a file");
      if (elements(shape) !== 1) throw wrong(`a file is one value, and the shape ${bracket(shape)} has ${elements(shape)}`);
      return { name, datatype, shape, data: [], file: this.content };
    } else if (mode === "text") {
      data = (elements(shape) === 1 ? [this.text.value] : this.text.value.split("\n")).map((each) => JSON.stringify(each));
    } else if (this.single.length) data = this.single.map((field) => (datatype === "BOOL" ? String(field.checked) : field.value.trim()));
    else {
      data = this.text.value.split(/[\s,;]+/).filter(Boolean);
      if (!data.length) data = new Array(elements(shape)).fill(datatype === "BOOL" ? "false" : "0");
    }
    shape = this.fitted(shape, data.length);
    if (elements(shape) !== data.length) throw wrong(`expected ${elements(shape)} values for the shape ${bracket(shape)}, got ${data.length}`);
    if (datatype !== "BYTES") data = data.map((each) => written(datatype, each, wrong));
    return { name, datatype, shape, data };
  }

  // A single open axis follows the number of values.
  fitted(shape, many) {
    const open = this.spec.shape.flatMap((dim, axis) => (dim < 0 ? [axis] : []));
    if (open.length !== 1 || elements(shape) === many) return shape;
    const others = elements(shape.filter((_, axis) => axis !== open[0]));
    return others && many % others === 0 ? shape.map((dim, axis) => (axis === open[0] ? many / others : dim)) : shape;
  }

  // Values and shape of nested arrays, with numbers as they were typed.
  parsed(wrong) {
    let found;
    const source = (_, value, context) => (typeof value === "number" ? { source: context?.source ?? String(value) } : value);
    try { found = JSON.parse(this.text.value || "[]", source); } catch (error) { throw wrong(error.message); }
    const shape = [];
    for (let level = found; Array.isArray(level); [level] = level) shape.push(level.length);
    const data = [found].flat(Infinity).map((each) => (each?.source ?? (typeof each === "string" ? JSON.stringify(each) : String(each))));
    return { data, shape: shape.length === this.spec.shape.length ? shape : this.shape };
  }
}
