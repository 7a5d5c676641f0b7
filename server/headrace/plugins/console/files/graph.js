// The graph of an ensemble: its steps from left to right, with what their models do now.

import { h, number, setText, svg } from "./dom.js";
import { link, stateOf } from "./models.js";

const [WIDTH, HEIGHT, ACROSS, DOWN, MARGIN] = [190, 46, 90, 20, 6]; // of a box, between boxes, around all
const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

export class Graph {
  constructor(watch, config) {
    Object.assign(this, { watch, steps: [], edges: [], boxes: [], height: 0 });
    const makers = new Map(config.input.map(({ name }) => [name, this.add(0, name)]));
    let layer = 1;
    for (let left = config.ensemble_scheduling.step, ready = left; left.length && ready.length; layer += 1) {
      ready = left.filter((step) => Object.values(step.input_map).every((tensor) => makers.has(tensor)));
      left = left.filter((step) => !ready.includes(step));
      for (const [step, box] of ready.map((each) => [each, this.add(layer, each.model_name, each)])) {
        new Set(Object.values(step.input_map)).forEach((tensor) => this.connect(makers.get(tensor), box, tensor));
        Object.values(step.output_map).forEach((tensor) => makers.set(tensor, box));
      }
    }
    for (const { name } of config.output) this.connect(makers.get(name), this.add(layer, name), name);
    const [width, height] = [layer * (WIDTH + ACROSS) + WIDTH + 2 * MARGIN, this.height + 2 * MARGIN];
    this.element = h("div", { class: "graph" }, svg("svg", {
      width, height, viewBox: `${-MARGIN} ${-MARGIN} ${width} ${height}`, role: "img", "aria-label": `graph of ${config.name}`,
    }, ...this.edges, ...this.boxes.map(({ group }) => group)));
  }

  add(layer, name, step) {
    const [x, y] = [layer * (WIDTH + ACROSS), this.boxes.filter((each) => each.layer === layer).length * (HEIGHT + DOWN)];
    this.height = Math.max(this.height, y + HEIGHT);
    const now = svg("text", { x: x + WIDTH / 2, y: y + 34, class: "muted" });
    const shapes = [svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: step ? 6 : HEIGHT / 2 }),
      svg("text", { x: x + WIDTH / 2, y: y + (step ? 16 : 24) }, short(name, 24)), svg("title", {}, name)];
    const group = step ? svg("a", { href: link(name), "data-step": name }, ...shapes, now) : svg("g", {}, ...shapes);
    return this.boxes[this.boxes.push({ layer, x, y, group, now, step }) - 1];
  }

  connect(from, to, tensor) {
    const [x, y, endY] = [from.x + WIDTH, from.y + HEIGHT / 2, to.y + HEIGHT / 2];
    const bend = (x + to.x) / 2;
    this.edges.push(svg("path", { d: `M${x},${y} C${bend},${y} ${bend},${endY} ${to.x},${endY}` }));
    if (from.step && to.step) this.edges.push(svg("text", { x: bend, y: (y + endY) / 2 - 6, class: "edge" }, short(tensor, 13)));
  }

  update() {
    for (const { group, now, step } of this.boxes.filter((each) => each.step)) {
      const rows = this.watch.versions(step.model_name).filter(({ model }) => step.model_version < 1 || model.version === step.model_version);
      const row = rows.filter(({ model }) => model.state === "READY").at(-1) ?? rows.at(-1);
      group.dataset.state = row ? stateOf(row.model) : "not loaded";
      setText(now, row ? `${group.dataset.state}, ${number(row.requests)}/s, ${row.model.waiting} waiting` : group.dataset.state);
    }
  }
}
