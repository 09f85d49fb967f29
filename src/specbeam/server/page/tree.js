// The tree as SVG. A column is a step, and a row is a rank: the best beam is on top. It is made of tiles, and only tiles
// near the window are there. While one pans or zooms, the browser moves all tiles as one layer, and each frame adds tiles
// that come near, as many as fit into its time. So a layer at a new scale takes some frames. It is shown when it is whole.

import { percent, shown } from "./run.js";

const COLUMN = 92, ROW = 38, PILL = 26; // at scale 1, in px
const LEAST_COLUMN = 46, LEAST_ROW = 16; // below this, there is no text
const TILE_WIDTH = 460, TILE_HEIGHT = 300, MAX_TILE_COLUMNS = 32; // px, px, steps
const MARGIN = 0.35; // of the window, drawn on each side
const LEAST_STRETCH = 0.5, MOST_STRETCH = 2; // of a layer. Beyond it, another layer is made
const REST = 90, FRAME_WORK = 2; // ms

const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const one = (value) => value.toFixed(1);
const hasTextAt = ({ kx, ky }) => COLUMN * kx >= LEAST_COLUMN && ROW * ky >= LEAST_ROW;
const gapOf = (column) => Math.min(26, column * 0.3); // between two pills
const short = (text, most) => { const s = [...shown(text.trim() ? text.replace(/^ /, "").replace(/^<\|(.+)\|>$/, "$1") : text)]; return s.length > most ? s.slice(0, most - 1).join("") + "…" : s.join(""); };

const create = (name, parent) => parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));

// Tiles at one scale. The layer is moved, and not the picture in it: its texts need no new layout.
class Layer {
  constructor(box, { kx, ky }) {
    this.scale = { kx, ky };
    this.tiles = new Map(); // by key: the group, and its markup
    this.world = box.appendChild(document.createElement("div"));
    this.world.className = "world";
    this.svg = create("svg", this.world);
    this.svg.setAttribute("aria-hidden", "true");
    this.svg.setAttribute("class", hasTextAt(this.scale) ? "" : "far");
    this.edges = create("g", this.svg);
    this.pills = create("g", this.svg);
  }

  // Chromium takes ten times as long to compose texts that lie outside of their picture.
  resize(columns, rows) {
    this.svg.setAttribute("width", columns * COLUMN * this.scale.kx);
    this.svg.setAttribute("height", rows * ROW * this.scale.ky);
  }

  remove() { this.world.remove(); }

  // How much larger a view is than this layer, in the direction where that is more.
  stretch({ kx, ky }) {
    const [x, y] = [kx / this.scale.kx, ky / this.scale.ky];
    return Math.abs(Math.log(x)) > Math.abs(Math.log(y)) ? x : y;
  }

  place(view, first) {
    this.world.style.transform = `translate(${-view.x - first * COLUMN * view.kx}px,${-view.y}px) scale(${view.kx / this.scale.kx},${view.ky / this.scale.ky})`;
  }

  // Tiles have an order, so that the same tree is the same picture.
  put({ key, place, isEdges }, markup) {
    if (!this.tiles.has(key)) {
      const parent = isEdges ? this.edges : this.pills, group = create("g", parent);
      group.place = place;
      parent.insertBefore(group, [...parent.children].find((other) => other.place > place) || null);
      this.tiles.set(key, { group, markup: "" });
    }
    const tile = this.tiles.get(key);
    if (tile.markup !== markup) tile.group.innerHTML = tile.markup = markup;
  }

  drop(key) {
    this.tiles.get(key).group.remove();
    this.tiles.delete(key);
  }
}

export class TreeView {
  constructor(box, { onHover, onSelect }) {
    this.box = box;
    this.onHover = onHover;
    this.onSelect = onSelect;
    this.run = null;
    this.selected = null;
    this.collapses = true;
    this.follows = true;
    this.view = { x: 0, y: 0, kx: 1, ky: 1 };
    this.layer = new Layer(box, this.view);
    this.next = null; // a layer at another scale, which is not whole yet
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(box);
    this.pointers = new Map();
    const on = (name, act, how) => box.addEventListener(name, act, how);
    on("wheel", (e) => { e.preventDefault(); this.wheel(e); }, { passive: false });
    on("pointerdown", (e) => this.down(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.up(e));
    on("pointercancel", (e) => this.pointers.delete(e.pointerId));
    on("pointerleave", () => this.hover(null));
    on("keydown", (e) => this.key(e));
    this.resize();
  }

  close() { this.observer.disconnect(); clearTimeout(this.rest); cancelAnimationFrame(this.frame); this.layer.remove(); this.next?.remove(); }

  resize() {
    this.width = this.box.clientWidth || 1;
    this.height = this.box.clientHeight || 1;
    this.draw();
  }

  show(run) {
    if (this.run !== run) { this.run = run; this.selected = null; this.follows = true; this.view = { x: -24, y: -24, kx: 1, ky: 1 }; }
    this.isGrowing = !run.isWhole; // then what is new appears gently
    this.draw();
    this.isGrowing = false;
  }

  get first() { // the first column that is shown
    const { run } = this;
    return run && this.collapses && run.columns.length ? Math.max(0, Math.min(run.certainDepth, run.columns.length - 2)) : 0;
  }

  follow() {
    const { run, view } = this;
    if (!run || !this.follows) return;
    const last = run.isWhole ? Math.max(...[...run.best].map((node) => node.depth), 0) : run.columns.length - 1;
    const deepest = last - this.first;
    const right = (deepest + 1) * COLUMN * view.kx + 40;
    view.x = Math.max(-24, right - this.width);
    view.y = -this.above(ROW * view.ky);
  }

  // Space above the first row, so that a low tree stands in the middle.
  above(row) {
    return Math.max(24, (this.height - this.rowsFrom(this.first) * row) / 2);
  }

  rowsFrom(first) { return this.run.columns.reduce((most, _, depth) => (depth < first ? most : Math.max(most, this.run.heightOf(depth))), 1); }

  fit() {
    const { run, view } = this;
    if (!run || !run.columns.length) return;
    const columns = run.columns.length - this.first, rows = this.rowsFrom(this.first);
    view.kx = Math.min(1, (this.width - 48) / (columns * COLUMN));
    view.ky = Math.min(1, (this.height - 48) / (rows * ROW));
    view.x = -24; view.y = -this.above(ROW * view.ky);
    this.follows = false;
    this.draw();
  }

  zoom(factor, cx = this.width / 2, cy = this.height / 2) {
    const { view } = this;
    const kx = Math.min(2, Math.max(0.008, view.kx * factor)), ky = Math.min(2, Math.max(0.05, view.ky * factor));
    view.x = (view.x + cx) * (kx / view.kx) - cx;
    view.y = (view.y + cy) * (ky / view.ky) - cy;
    view.kx = kx; view.ky = ky;
    this.follows = false;
    this.moved();
  }

  wheel(e) {
    const { left, top } = this.box.getBoundingClientRect();
    if (e.ctrlKey || e.metaKey || !e.deltaX) this.zoom(Math.exp(-e.deltaY * (e.ctrlKey ? 0.01 : 0.0016)), e.clientX - left, e.clientY - top);
    else this.pan(e.deltaX, e.deltaY);
  }

  pan(dx, dy) { this.view.x += dx; this.view.y += dy; this.follows = false; this.moved(); }

  down(e) {
    this.box.setPointerCapture(e.pointerId);
    this.pointers.set(e.pointerId, [e.clientX, e.clientY]);
    this.dragged = 0;
  }

  move(e) {
    const was = this.pointers.get(e.pointerId);
    if (!was) { this.hover(this.nodeAt(e), e); return; }
    const now = [e.clientX, e.clientY];
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([id]) => id !== e.pointerId).map(([, at]) => at);
      const far = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]) || 1;
      const { left, top } = this.box.getBoundingClientRect();
      this.zoom(far(now) / far(was), other[0] - left, other[1] - top);
    } else this.pan(was[0] - now[0], was[1] - now[1]);
    this.dragged += Math.abs(now[0] - was[0]) + Math.abs(now[1] - was[1]);
    this.pointers.set(e.pointerId, now);
  }

  up(e) {
    this.pointers.delete(e.pointerId);
    if (this.dragged < 5) this.select(this.nodeAt(e));
  }

  hover(node, e) {
    if (node === this.hovered) return;
    const { left, top } = this.box.getBoundingClientRect();
    this.hovered = node;
    this.onHover(node, node && e.clientX - left, node && e.clientY - top);
  }

  nodeAt(e) {
    const { run, view } = this;
    if (!run) return null;
    const { left, top } = this.box.getBoundingClientRect();
    const depth = this.first + Math.floor((e.clientX - left + view.x) / (COLUMN * view.kx));
    const row = Math.floor((e.clientY - top + view.y) / (ROW * view.ky));
    return (run.columns[depth] || []).find((node) => this.run.rowOf(node) === row && node.parent) || null;
  }

  select(node) { this.selected = node; this.draw(); this.onSelect(node); }

  key(e) {
    const { run, selected } = this;
    if (!run || e.altKey || e.ctrlKey || e.metaKey) return;
    const to = (node) => { if (node && node.parent) { this.select(node); this.reveal(node); } };
    const beside = (by) => { const column = [...run.columns[selected.depth]].sort((a, b) => this.run.rowOf(a) - this.run.rowOf(b)); return column[column.indexOf(selected) + by]; };
    const start = () => run.bestPath.at(-1);
    const acts = {
      ArrowLeft: () => to(selected ? selected.parent : start()),
      ArrowRight: () => to(selected ? [...selected.children].sort((a, b) => this.run.rowOf(a) - this.run.rowOf(b))[0] : start()),
      ArrowUp: () => to(selected ? beside(-1) : start()),
      ArrowDown: () => to(selected ? beside(1) : start()),
      Escape: () => this.select(null),
      "+": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit(),
    };
    if (acts[e.key]) { e.preventDefault(); acts[e.key](); }
  }

  reveal(node) {
    const { view } = this, x = (node.depth - this.first) * COLUMN * view.kx - view.x, y = this.run.rowOf(node) * ROW * view.ky - view.y;
    this.follows = false;
    if (x < 0 || x > this.width - COLUMN) view.x += x - this.width / 2;
    if (y < 0 || y > this.height - ROW) view.y += y - this.height / 2;
    this.draw();
  }

  moved() {
    if (!this.run || !this.run.root) return;
    this.place();
    clearTimeout(this.rest);
    this.rest = setTimeout(() => { this.rests = true; this.drawNear(); }, REST);
    this.rests = false;
    this.frame ||= requestAnimationFrame(() => this.drawNear());
  }

  // One frame of a movement.
  drawNear() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.run || !this.run.root) return;
    const [least, most] = this.rests ? [1, 1] : [LEAST_STRETCH, MOST_STRETCH], stretch = this.layer.stretch(this.view);
    if (!this.next && (stretch < least || stretch > most)) {
      this.next = new Layer(this.box, this.view);
      this.next.world.style.opacity = 0;
      this.place();
    }
    const isWhole = this.addTiles(this.next || this.layer, performance.now() + FRAME_WORK);
    if (isWhole && this.next) this.swap();
    if (!isWhole || this.rests && this.layer.stretch(this.view) !== 1) this.frame = requestAnimationFrame(() => this.drawNear());
  }

  swap() {
    this.layer.remove();
    this.layer = this.next;
    this.layer.world.style.opacity = "";
    this.next = null;
  }

  place() { for (const layer of [this.layer, this.next]) layer?.place(this.view, this.first); }

  // Draw all tiles near the window at once.
  draw() {
    const { run, view } = this, isThere = run && run.root;
    clearTimeout(this.rest);
    if (isThere && this.follows) this.follow();
    this.next?.remove();
    this.next = null;
    if (!isThere || this.layer.stretch(view) !== 1) { this.next = new Layer(this.box, view); this.swap(); }
    if (!isThere) return;
    this.place();
    this.addTiles(this.layer);
  }

  // Add the tiles near the window to a layer, the nearest ones first, until a time. Returns whether all are there.
  // Without a time, tiles that are there are drawn again if they have changed.
  addTiles(layer, until) {
    if (!until || !layer.tiles.size) layer.resize(this.run.columns.length, this.rowsFrom(0));
    const wanted = this.tilesNear(layer.scale), keys = new Set(wanted.map((tile) => tile.key));
    for (const key of layer.tiles.keys()) if (!keys.has(key)) layer.drop(key);
    for (const tile of wanted) {
      if (until && layer.tiles.has(tile.key)) continue;
      if (until && performance.now() > until) return false;
      layer.put(tile, tile.isEdges ? this.edgesOf(tile, layer.scale) : this.pillsOf(tile, layer.scale));
    }
    return true;
  }

  // The tiles near the window. The edges of some columns are one tile, and the pills of some rows there are another.
  tilesNear(scale) {
    const { run, view, width, height, first } = this, hasText = hasTextAt(scale);
    const columns = Math.max(1, Math.min(MAX_TILE_COLUMNS, Math.round(TILE_WIDTH / (COLUMN * scale.kx)))), rows = Math.round(TILE_HEIGHT / (ROW * scale.ky));
    const near = (at, size, cell, tile) => [Math.floor((at - MARGIN * size) / cell / tile), Math.floor((at + (1 + MARGIN) * size) / cell / tile)];
    const [left, right] = near(view.x + first * COLUMN * view.kx, width, COLUMN * view.kx, columns);
    const [top, bottom] = near(view.y, height, ROW * view.ky, rows);
    const tiles = [];
    for (let i = Math.max(left, Math.floor(first / columns)); i <= right && i * columns < run.columns.length; i++) {
      const from = Math.max(first, i * columns), to = Math.min(run.columns.length, (i + 1) * columns), far = Math.abs(2 * i - left - right);
      tiles.push({ key: `${i}`, place: i, isEdges: true, from, to, far });
      for (let j = Math.max(0, top); hasText && j <= bottom; j++) tiles.push({ key: `${i} ${j}`, place: i + j / 1e4, from, to, top: j * rows, bottom: (j + 1) * rows, far: far + Math.abs(2 * j - top - bottom) });
    }
    return tiles.sort((a, b) => a.far - b.far);
  }

  edgesOf({ from, to }, scale) {
    const { run, first } = this, hasText = hasTextAt(scale);
    const cw = COLUMN * scale.kx, rh = ROW * scale.ky, gap = hasText ? gapOf(cw) : 0;
    const edges = {}, lines = new Map(), drawn = [];
    for (let depth = Math.max(from, first + 1); depth < to; depth++) {
      const below = run.rowsOfBeams(depth), parentBelow = run.rowsOfBeams(depth - 1);
      const x0 = depth * cw - (hasText ? gap : cw / 2), x1 = depth * cw + (hasText ? 0 : cw / 2), bend = (x1 - x0) / 2;
      for (const node of run.columns[depth]) {
        const parent = node.parent, row = node.rank >= 0 ? node.rank : below + node.lane;
        const y = (row + 0.5) * rh, y0 = ((parent.rank >= 0 ? parent.rank : parentBelow + parent.lane) + 0.5) * rh;
        const kind = this.kindOf(node);
        if (hasText) {
          const wide = 1 + Math.round((node.logProb === null ? 0.25 : Math.exp(node.logProb)) * 12) / 2;
          const d = y0 === y ? `M${one(x0)} ${one(y)}H${one(x1)}` : `M${one(x0)} ${one(y0)}C${one(x0 + bend)} ${one(y0)} ${one(x1 - bend)} ${one(y)} ${one(x1)} ${one(y)}`;
          ((edges[kind] ||= {})[wide] ||= []).push(d);
          continue;
        }
        const line = lines.get(parent.id); // one line for neighbours in a row, and no curves
        if (line && y0 === y && line.kind === kind) { line.to = x1; lines.set(node.id, line); continue; }
        const next = { kind, d: y0 === y ? `M${one(x0)} ${one(y)}` : `M${one(x0)} ${one(y0)}L${one(x1)} ${one(y)}`, to: x1 };
        lines.set(node.id, next);
        drawn.push(next);
      }
    }
    for (const { kind, d, to } of drawn) ((edges[kind] ||= {})[kind.startsWith("best") ? 4 : 1] ||= []).push(`${d}H${one(to)}`);
    return ORDER.flatMap((kind) => Object.entries(edges[kind] || {}).map(([wide, parts]) => `<path class="edge ${kind}" stroke-width="${wide}" d="${parts.join("")}"/>`)).join("");
  }

  pillsOf({ from, to, top, bottom }, scale) {
    const { run } = this;
    const cw = COLUMN * scale.kx, rh = ROW * scale.ky, gap = gapOf(cw), w = cw - gap, pill = Math.min(PILL, rh - 5), most = Math.floor((w - 10) / 7.2);
    const pills = [];
    for (let depth = from; depth < to; depth++) {
      const below = run.rowsOfBeams(depth), x = depth * cw;
      for (const node of run.columns[depth]) {
        const row = node.rank >= 0 ? node.rank : below + node.lane, y = (row + 0.5) * rh;
        if (row < top || row >= bottom) continue;
        if (!node.parent) { pills.push(`<circle class="root" cx="${one(x + w - 6)}" cy="${one(y)}" r="6"/>`); continue; }
        const classes = `${this.kindOf(node)}${this.isGrowing && node.phase === run.at ? " new" : ""}${node === this.selected ? " selected" : ""}`;
        const mark = node.isAccepted ? "✓" : node.isRejected ? "✕" : "";
        const badge = node.isEnd ? `<path class="mark" d="M${one(x + w - 4)} ${one(y - pill / 2 - 1)}h4v4h-4z"/>` : `<text class="mark" x="${one(x + w - 2)}" y="${one(y - pill / 2 + 4.2)}">${mark}</text>`;
        pills.push(`<g data-node="${node.id}" class="pill ${classes}"><rect x="${one(x)}" y="${one(y - pill / 2)}" width="${one(w)}" height="${one(pill)}" rx="${one(pill / 3)}"/><text x="${one(x + w / 2)}" y="${one(y + 4.5)}">${escaped(short(node.text, Math.max(1, most)))}</text>${mark || node.isEnd ? `<circle class="badge" cx="${one(x + w - 2)}" cy="${one(y - pill / 2 + 1)}" r="6"/>${badge}` : ""}</g>`);
      }
    }
    return pills.join("");
  }

  kindOf(node) {
    if (node.kind === "masked") return "masked";
    if (node.isRejected) return node.round === this.run.rounds ? "rejected" : "rejected past";
    if (node.kind === "drafted") return node.round === this.run.rounds ? "drafted" : "drafted past";
    if (this.run.best.has(node) || (!this.run.isWhole && node.isCertain)) return node.isAccepted ? "best accepted" : "best";
    if (this.run.isDeferred(node)) return "deferred";
    if (node.isDropped || (this.run.isWhole && !this.isReturned(node))) return node.isAccepted ? "pruned accepted" : "pruned";
    return node.isAccepted ? "accepted" : "live";
  }

  isReturned(node) { return this.run.width === 1 && node.kind === "beam"; }
}

const ORDER = ["masked", "deferred", "drafted past", "pruned", "pruned accepted", "rejected past", "rejected", "drafted", "live", "accepted", "best", "best accepted"];

// A node in words, for people who do not see the picture.
export function inWords(run, node) {
  const [kind, state] = run.stateOf(node);
  const fate = run.best.has(node) ? ", on the best path" : node.isDropped && kind !== "pruned" ? ", dropped" : "";
  const p = node.logProb === null ? "" : `, probability ${percent(node.logProb)}${node.score === null ? "" : `, path score ${node.score.toFixed(3)}`}`;
  return `Step ${node.depth}, token “${shown(node.text)}”: ${state}${kind === "deferred" ? ", not evaluated" : ""}${fate}${p}`;
}
