// The tree as SVG. A column is a step, and a row is a rank: the best beam is on top. A tree that is longer than the window
// can be broken into lines, as a text is. It is made of tiles, and only tiles near the window are there. While one pans or zooms, the browser moves all tiles as one layer, and each frame adds tiles
// that come near, as many as fit into its time. So a layer at a new scale takes some frames. It is shown when it is whole.

import { isWord, percent, shown } from "./run.js";

const COLUMN = 92, ROW = 38, PILL = 26, FONT = 12.5, LETTER = 7.2; // at scale 1, in px
const LEAST_COLUMN = 46, LEAST_ROW = 16; // below this, there is no text
const TILE_WIDTH = 460, TILE_HEIGHT = 300, MAX_TILE_COLUMNS = 32; // px, px, steps
const MARGIN = 0.35; // of the window, drawn on each side
const LEAST_STRETCH = 0.5, MOST_STRETCH = 2; // of a layer. Beyond it, another layer is made
const REST = 90, FRAME_WORK = 2; // ms
const FIT_COLUMNS = [1, 0.88, 0.76], FIT_ROW = 0.47, MOST_WINDOWS = 3; // scales of broken lines, and how many windows they may take
const MARGIN_OF_LINES = 0.3; // columns, where a line goes on from the one before, and rows above the first line
const LABEL_ROW = 17, LABEL_LETTER = 7.9, LABEL_TOKENS = 4, MOST_LABEL_ROWS = 12; // px, px: the words of the text in a far tree

const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const one = (value) => value.toFixed(1);
const hasTextAt = ({ kx, ky }) => COLUMN * kx >= LEAST_COLUMN && ROW * ky >= LEAST_ROW;
const sizeAt = ({ kx, ky }) => Math.max(0.88, Math.min(kx, ky)); // of a pill and its letters
const sizeOfType = () => (document.documentElement.classList.contains("presenting") ? 1.6 : 1);
const gapOf = (column) => (column < COLUMN ? Math.min(26, Math.max(10, column * 0.3 - 10)) : 26); // between two pills
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
    this.svg.setAttribute("font-size", one(FONT * sizeAt(this.scale)));
    this.edges = create("g", this.svg);
    this.pills = create("g", this.svg);
  }

  // Chromium takes ten times as long to compose texts that lie outside of their picture.
  resize(columns, rows, labelRows) {
    this.svg.setAttribute("width", columns * COLUMN * this.scale.kx);
    this.svg.setAttribute("height", rows * ROW * this.scale.ky + labelRows * LABEL_ROW);
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
    this.perLine = 0; // columns, if the tree is broken into lines
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
    if (this.follows && this.size !== sizeOfType()) this.followRun(); else this.draw();
  }

  show(run) {
    if (this.run !== run) { this.run = run; this.selected = null; this.followRun(); }
    this.isGrowing = !run.isWhole; // then what is new appears gently
    this.draw();
    this.isGrowing = false;
  }

  get first() { // the first column that is shown
    const { run } = this;
    return run && this.collapses && run.columns.length ? Math.max(0, Math.min(run.certainDepth, run.columns.length - 2)) : 0;
  }

  // Show where the run is, at full size.
  followRun() {
    const size = (this.size = sizeOfType());
    this.follows = true;
    this.perLine = 0;
    this.view = { x: -24, y: -24, kx: size, ky: size };
    this.draw();
  }

  follow() {
    const { run, view } = this, width = COLUMN * view.kx, columns = Math.floor((this.width - 40) / width);
    if (!run || !this.follows) return;
    const right = ((run.isWhole ? this.mostHappensUntil(columns) : Math.min(run.columns.length, run.front + 1 + Math.ceil(0.6 * columns))) - this.first) * width + 40;
    view.x = Math.max(-24, right - this.width);
    view.y = -this.above(ROW * view.ky);
  }

  // The end of these many columns of a run that is over where most happens: draft tokens are accepted, and beams go apart.
  // What stands behind the text's end is no part of it.
  mostHappensUntil(columns) {
    const { run } = this;
    const last = Math.max(...[...run.best].map((node) => node.depth), 1) + 1;
    const happens = run.columns.slice(0, last).map((column, depth) => (depth ? column.filter((node) => node.kind === "beam" && (node.isAccepted || node.parent.children.filter((child) => child.kind === "beam").length > 1)).length : 0));
    let best = Math.min(columns, last), most = happens.slice(0, best).reduce((a, b) => a + b, 0);
    for (let end = best + 1, sum = most; end <= last; end++) {
      sum += happens[end - 1] - happens[end - 1 - columns];
      if (sum > most) [best, most] = [end, sum];
    }
    return best;
  }

  // The tree in lines of some columns: the row that each line begins in. A tree that is not broken is one line.
  get lines() {
    const { run, first, perLine } = this;
    if (!perLine) return [0];
    const tops = [MARGIN_OF_LINES];
    for (let depth = first; depth < run.columns.length; depth += perLine) {
      let rows = 1;
      for (let i = depth; i < Math.min(depth + perLine, run.columns.length); i++) rows = Math.max(rows, run.heightOf(i));
      tops.push(tops.at(-1) + rows + 0.6);
    }
    return tops;
  }

  // The column and the first row of a depth.
  placeOf(depth, lines) {
    if (!this.perLine) return [depth, 0];
    const at = depth - this.first;
    return [at % this.perLine + MARGIN_OF_LINES, lines[Math.floor(at / this.perLine)]];
  }

  // Space above the first row, so that a low tree stands in the middle.
  above(row) {
    return Math.max(24, (this.height - this.rowsFrom(this.first) * row) / 2);
  }

  rowsFrom(first) { return this.run.columns.reduce((most, _, depth) => (depth < first ? most : Math.max(most, this.run.heightOf(depth))), 1); }

  // Everything in the window, in words that one can read: in broken lines if they are enough. Else the words of the text
  // stand below a tree without words.
  fit() {
    const { run, view } = this;
    if (!run || !run.columns.length) return;
    const columns = run.columns.length - this.first, rows = this.rowsFrom(this.first), height = this.height - 48;
    this.follows = false;
    const best = FIT_COLUMNS.map((kx) => {
      this.perLine = Math.max(1, Math.floor((this.width - 48) / (COLUMN * kx) - MARGIN_OF_LINES));
      if (this.perLine >= columns) this.perLine = 0;
      const all = this.perLine ? this.lines.at(-1) : rows;
      return { kx, perLine: this.perLine, ky: Math.min(kx, height / (all * ROW)), windows: all * ROW * FIT_ROW / height };
    }).reduce((a, b) => (a.ky >= FIT_ROW || a.windows <= b.windows ? a : b));
    this.perLine = best.perLine;
    if (best.windows <= (best.perLine ? MOST_WINDOWS : 1)) {
      view.kx = best.kx;
      view.ky = Math.max(FIT_ROW, best.ky);
      view.x = -24;
      view.y = -Math.max(24, (this.height - (best.perLine ? this.lines.at(-1) : rows) * ROW * view.ky) / 2);
    } else this.overview();
    this.draw();
  }

  all() {
    if (!this.run || !this.run.columns.length) return;
    this.follows = false;
    this.overview();
    this.draw();
  }

  overview() {
    const { run, view } = this, columns = run.columns.length - this.first, rows = this.rowsFrom(this.first);
    this.perLine = 0;
    view.kx = Math.min(1, (this.width - 48) / (columns * COLUMN));
    view.ky = Math.min(1, (this.height - 48) / (rows * ROW));
    const labels = this.labelsAt(view).rows * LABEL_ROW;
    view.ky = Math.min(view.ky, (this.height - 40 - labels) / (rows * ROW));
    view.x = -24; view.y = -Math.max(20, (this.height - rows * ROW * view.ky - labels) / 2);
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
    let depth = this.first + Math.floor((e.clientX - left + view.x) / (COLUMN * view.kx) - (this.perLine ? MARGIN_OF_LINES : 0));
    let row = (e.clientY - top + view.y) / (ROW * view.ky);
    if (this.perLine) {
      const { lines } = this, line = Math.max(0, lines.findLastIndex((top) => top <= row));
      if (depth - this.first >= this.perLine) return null;
      depth += line * this.perLine;
      row -= lines[line];
    }
    row = Math.floor(row);
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
      "+": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.all(),
    };
    if (acts[e.key]) { e.preventDefault(); acts[e.key](); }
  }

  reveal(node) {
    const { view } = this, [column, top] = this.placeOf(node.depth, this.lines);
    const x = (column - (this.perLine ? 0 : this.first)) * COLUMN * view.kx - view.x, y = (top + this.run.rowOf(node)) * ROW * view.ky - view.y;
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

  place() { for (const layer of [this.layer, this.next]) layer?.place(this.view, this.perLine ? 0 : this.first); }

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
    const { lines } = this;
    if (!until || !layer.tiles.size) layer.resize(this.perLine ? this.perLine + 1 : this.run.columns.length, this.perLine ? lines.at(-1) : this.rowsFrom(0), this.labelsAt(layer.scale).rows);
    const wanted = this.tilesNear(layer.scale, lines), keys = new Set(wanted.map((tile) => tile.key));
    for (const key of layer.tiles.keys()) if (!keys.has(key)) layer.drop(key);
    for (const tile of wanted) {
      if (until && layer.tiles.has(tile.key)) continue;
      if (until && performance.now() > until) return false;
      layer.put(tile, tile.isEdges ? this.edgesOf(tile, layer.scale, lines) : tile.isLabels ? this.labelsOf(layer.scale) : this.pillsOf(tile, layer.scale, lines));
    }
    return true;
  }

  // The tiles near the window. The edges of some columns are one tile, and the pills of some rows there are another.
  // Of a tree in lines, the edges of a line are one tile, and its pills another.
  tilesNear(scale, lines) {
    const { run, view, width, height, first, perLine } = this, hasText = hasTextAt(scale);
    if (perLine) return lines.slice(0, -1).flatMap((top, i) => {
      const from = first + i * perLine, to = Math.min(run.columns.length, from + perLine), row = ROW * view.ky;
      if (lines[i + 1] * row < view.y - MARGIN * height || top * row > view.y + (1 + MARGIN) * height) return [];
      const line = { place: i, from, to, far: Math.abs(top * row - view.y) };
      return [{ ...line, key: `line ${i}`, isEdges: true }, ...(hasText ? [{ ...line, key: `pills ${i}`, top: 0, bottom: Infinity }] : [])];
    }).sort((a, b) => a.far - b.far);
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
    if (!hasText) tiles.push({ key: "labels", place: 1e4, isLabels: true, far: 1e4 });
    return tiles.sort((a, b) => a.far - b.far);
  }

  // The words of the text below a tree that is too small for words: a few tokens each, in the first row that has room.
  labelsAt({ kx, ky }) {
    if (hasTextAt({ kx, ky }) || this.perLine) return { rows: 0, labels: [] };
    const { run } = this, path = run.bestPath, ends = [], labels = [];
    for (let i = 0, next; i < path.length; i = next) {
      for (next = i + LABEL_TOKENS; next < path.length && !/^\s/.test(path[next].text); next++); // whole words
      const text = shown(path.slice(i, next).filter(isWord).map((node) => node.text).join("").trim()), wide = (text.length + 1.5) * LABEL_LETTER;
      const x = Math.max(0, Math.min(path[i].depth * COLUMN * kx, run.columns.length * COLUMN * kx - wide));
      let row = ends.findIndex((end) => end < x);
      if (row < 0) row = ends.length;
      if (row >= MOST_LABEL_ROWS) continue;
      ends[row] = x + wide;
      labels.push({ x, row, text });
    }
    return { rows: ends.length, labels };
  }

  labelsOf(scale) {
    const top = this.rowsFrom(0) * ROW * scale.ky;
    return this.labelsAt(scale).labels.map(({ x, row, text }) => `<text class="word-of-text" x="${one(x)}" y="${one(top + row * LABEL_ROW + 13)}">${escaped(text)}</text>`).join("");
  }

  edgesOf({ from, to }, scale, all) {
    const { run, first } = this, hasText = hasTextAt(scale);
    const cw = COLUMN * scale.kx, rh = ROW * scale.ky, gap = hasText ? gapOf(cw) : 0;
    const edges = {}, lines = new Map(), drawn = [];
    for (let depth = Math.max(from, first + 1); depth < to; depth++) {
      const below = run.rowsOfBeams(depth), parentBelow = run.rowsOfBeams(depth - 1), [at, top] = this.placeOf(depth, all);
      const goesOn = this.perLine && depth === from; // from the line before
      const x0 = at * cw - (hasText ? gap : cw / 2), x1 = at * cw + (hasText ? 0 : cw / 2), bend = (x1 - x0) / 2;
      for (const node of run.columns[depth]) {
        const parent = node.parent, row = node.rank >= 0 ? node.rank : below + node.lane;
        const y = (top + row + 0.5) * rh, y0 = goesOn ? y : (top + (parent.rank >= 0 ? parent.rank : parentBelow + parent.lane) + 0.5) * rh;
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

  pillsOf({ from, to, top, bottom }, scale, all) {
    const { run } = this, size = sizeAt(scale);
    const cw = COLUMN * scale.kx, rh = ROW * scale.ky, gap = gapOf(cw), w = cw - gap, pill = Math.min(PILL * size, rh - 3), most = Math.floor((w - 8) / (LETTER * size));
    const pills = [];
    for (let depth = from; depth < to; depth++) {
      const below = run.rowsOfBeams(depth), [at, up] = this.placeOf(depth, all), x = at * cw;
      for (const node of run.columns[depth]) {
        const row = node.rank >= 0 ? node.rank : below + node.lane, y = (up + row + 0.5) * rh;
        if (row < top || row >= bottom) continue;
        if (!node.parent) { pills.push(`<circle class="root" cx="${one(x + w - 6)}" cy="${one(y)}" r="6"/>`); continue; }
        const classes = `${this.kindOf(node)}${this.isGrowing && node.phase === run.at ? " new" : ""}${node === this.selected ? " selected" : ""}`;
        const mark = node.isAccepted ? "✓" : node.isRejected ? "✕" : "";
        const badge = node.isEnd ? `<path class="mark" d="M${one(x + w - 4)} ${one(y - pill / 2 - 1)}h4v4h-4z"/>` : `<text class="mark" x="${one(x + w - 2)}" y="${one(y - pill / 2 + 4.2)}">${mark}</text>`;
        pills.push(`<g data-node="${node.id}" class="pill ${classes}"><rect x="${one(x)}" y="${one(y - pill / 2)}" width="${one(w)}" height="${one(pill)}" rx="${one(pill / 3)}"/><text x="${one(x + w / 2)}" y="${one(y + 0.36 * FONT * size)}">${escaped(!isWord(node) ? "end" : short(node.text, Math.max(1, most)))}</text>${mark || node.isEnd ? `<circle class="badge" cx="${one(x + w - 2)}" cy="${one(y - pill / 2 + 1)}" r="6"/>${badge}` : ""}</g>`);
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
