// The transcript as a strip of cells on a canvas.

import { count, percent } from "./dom.js";

const CELL = 10;
const ROW = 18;
const MOST_ROWS = 40;

/** How many (layer, KV head) pairs hold each token, from base64 of little-endian uint16. */
export function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
}

/** The label of every token from flat (start, end, label) runs. */
export function spread(runs, length) {
  const labels = new Uint8Array(length);
  for (let i = 0; i < runs.length; i += 3) labels.fill(runs[i + 2], runs[i], runs[i + 1]);
  return labels;
}

export class Strip {
  constructor(box, detail, moved) {
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.detail = detail;
    this.moved = moved;
    this.zoom = 0;
    this.at = 0;
    this.view = null;
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerdown", (event) => this.point(event));
    box.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(view) {
    this.view = view;
    this.labels = spread(view.runs, view.tokens);
    this.kept = view.engine.kept ? unpack(view.engine.kept) : new Uint16Array(0);
    this.at = Math.min(this.at, Math.max(0, view.tokens - 1));
    this.draw();
    this.tell();
  }

  /** Tokens per cell: as chosen, else few enough for the strip to stay in sight. */
  get per() {
    const columns = this.columns;
    return this.zoom || Math.max(1, Math.ceil(this.view.tokens / (columns * MOST_ROWS)));
  }

  get columns() {
    return Math.max(8, Math.floor(this.box.clientWidth / CELL));
  }

  share(token) {
    return token < this.kept.length ? this.kept[token] / this.view.engine.levels : 0;
  }

  phase(token) {
    return this.view.phases[this.labels[token]];
  }

  draw() {
    if (!this.view || !this.box.clientWidth) return;
    const { canvas, per, columns } = this;
    const cells = Math.ceil(this.view.tokens / per);
    const rows = Math.max(1, Math.ceil(cells / columns));
    const scale = window.devicePixelRatio || 1;
    const width = columns * CELL;
    canvas.width = width * scale;
    canvas.height = rows * ROW * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${rows * ROW}px`;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const palette = Object.fromEntries(["think", "act", "tool", "others", "track", "ink", "bad"].map((n) => [n, colour(n)]));
    const starts = new Set(this.view.ends.slice(0, -1).map((end) => Math.floor(end / per)));
    for (let cell = 0; cell < cells; cell++) {
      const x = (cell % columns) * CELL;
      const y = Math.floor(cell / columns) * ROW;
      this.cell(pen, palette, cell * per, Math.min((cell + 1) * per, this.view.tokens), x, y);
      if (starts.has(cell)) {
        pen.fillStyle = palette.ink;
        pen.fillRect(x - 1, y, 2, ROW - 3);
      }
    }
    const mark = Math.floor(this.at / per);
    pen.strokeStyle = palette.ink;
    pen.lineWidth = 2;
    pen.strokeRect((mark % columns) * CELL, Math.floor(mark / columns) * ROW, CELL - 1, ROW - 2);
  }

  cell(pen, palette, from, to, x, y) {
    let sum = 0;
    for (let token = from; token < to; token++) sum += this.share(token);
    const share = sum / (to - from);
    const phase = this.phase(from);
    pen.fillStyle = palette.track;
    pen.fillRect(x, y, CELL - 1, ROW - 6);
    if (share > 0) {
      pen.globalAlpha = 0.12 + 0.88 * share;
      pen.fillStyle = palette[phase];
      pen.fillRect(x, y, CELL - 1, ROW - 6);
      pen.globalAlpha = 1;
    }
    // The phase without colour: a solid line, dashes, dots, or a hair line.
    pen.fillStyle = palette[phase];
    const below = y + ROW - 5;
    if (phase === "think") pen.fillRect(x, below, CELL - 1, 3);
    else if (phase === "act") pen.fillRect(x, below, 6, 3);
    else if (phase === "tool") for (const dot of [0, 3, 6]) pen.fillRect(x + dot, below, 2, 3);
    else pen.fillRect(x, below + 1, CELL - 1, 1);
  }

  point(event) {
    if (!this.view) return;
    const place = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left) / CELL);
    const row = Math.floor((event.clientY - place.top) / ROW);
    if (column >= 0 && column < this.columns && row >= 0) this.move((row * this.columns + column) * this.per);
  }

  press(event) {
    if (!this.view) return;
    const { per, columns } = this;
    const steps = {
      ArrowRight: per, ArrowLeft: -per, ArrowDown: per * columns, ArrowUp: -per * columns,
      PageDown: per * columns * 5, PageUp: -per * columns * 5, Home: -Infinity, End: Infinity,
    };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.move(this.at + step);
  }

  move(token) {
    const to = Math.max(0, Math.min(this.view.tokens - 1, token));
    if (to === this.at) return;
    this.at = to;
    this.draw();
    this.tell();
  }

  tell() {
    const { view, at } = this;
    if (!view.tokens) return;
    const turn = view.ends.findIndex((end) => at < end) + 1;
    const layer = view.engine.layer;
    const where = layer === null || layer === undefined ? "layers and heads" : `heads of layer ${layer}`;
    const held = at < this.kept.length
      ? `held by ${this.kept[at]} of ${view.engine.levels} ${where} (${percent(this.share(at))})`
      : "no keys and values";
    const label = view.labels[this.labels[at]];
    const phase = this.phase(at);
    const what = label === phase ? label : `${label} (${phase})`;
    const text = `Token ${count(at + 1)} of ${count(view.tokens)}, turn ${turn}, ${what}, ${held}`;
    this.detail.textContent = text;
    this.box.setAttribute("aria-valuemax", view.tokens);
    this.box.setAttribute("aria-valuenow", at + 1);
    this.box.setAttribute("aria-valuetext", text);
    this.moved(at);
  }

  /** The strip with a heading, as a PNG. */
  picture(heading) {
    const scale = window.devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    const sheet = new OffscreenCanvas(this.canvas.width, this.canvas.height + 28 * scale);
    const pen = sheet.getContext("2d");
    pen.fillStyle = style.getPropertyValue("--back");
    pen.fillRect(0, 0, sheet.width, sheet.height);
    pen.fillStyle = style.getPropertyValue("--ink");
    pen.font = `${13 * scale}px sans-serif`;
    pen.fillText(heading, 4 * scale, 18 * scale);
    pen.drawImage(this.canvas, 0, 28 * scale);
    return sheet.convertToBlob({ type: "image/png" });
  }
}
