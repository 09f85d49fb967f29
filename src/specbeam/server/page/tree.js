// The tree as SVG. A column is a step, and a row is a rank: the best beam is on top. Only nodes near the window are
// drawn. While one pans or zooms, the drawn part is moved, and it is drawn again when the hand rests.

import { percent, shown } from "./run.js";

const COLUMN = 92, ROW = 38, PILL = 26; // at scale 1, in px
const LEAST_COLUMN = 46, LEAST_ROW = 16; // below this, there is no text
const MARGIN = 0.35; // of the window, drawn on each side
const REST = 90; // ms

const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const short = (text, most) => { const s = [...shown(text.trim() ? text.replace(/^ /, "").replace(/^<\|(.+)\|>$/, "$1") : text)]; return s.length > most ? s.slice(0, most - 1).join("") + "…" : s.join(""); };

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
    this.drawn = null; // the view that was drawn
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("aria-hidden", "true");
    this.world = document.createElement("div"); // it is moved, and not the picture itself: its texts need no new layout
    this.world.className = "world";
    this.world.append(this.svg);
    box.append(this.world);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(box);
    this.pointers = new Map();
    const on = (name, act, how) => box.addEventListener(name, act, how);
    on("wheel", (e) => { e.preventDefault(); this.wheel(e); }, { passive: false });
    on("pointerdown", (e) => this.down(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.up(e));
    on("pointercancel", (e) => this.pointers.delete(e.pointerId));
    on("pointerleave", () => this.onHover(null));
    on("keydown", (e) => this.key(e));
    this.resize();
  }

  close() { this.observer.disconnect(); clearTimeout(this.rest); this.world.remove(); }

  resize() {
    this.width = this.box.clientWidth || 1;
    this.height = this.box.clientHeight || 1;
    this.draw();
  }

  show(run) {
    if (this.run !== run) { this.run = run; this.selected = null; this.follows = true; this.view = { x: -24, y: -24, kx: 1, ky: 1 }; }
    this.draw();
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
    let rows = 1;
    for (let depth = this.first; depth < this.run.columns.length; depth++) rows = Math.max(rows, this.run.heightOf(depth));
    return Math.max(24, (this.height - rows * row) / 2);
  }

  fit() {
    const { run, view } = this;
    if (!run || !run.columns.length) return;
    const columns = run.columns.length - this.first, rows = run.columns.slice(this.first).reduce((most, _, i) => Math.max(most, run.heightOf(this.first + i)), 1);
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
    if (!was) { this.onHover(this.nodeAt(e), e); return; }
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
    const start = () => run.bestPath.at(-1) || run.beams[0];
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
    const { drawn, view } = this;
    if (!drawn) return;
    const sx = view.kx / drawn.kx, sy = view.ky / drawn.ky;
    const dx = (drawn.x - drawn.mx) * sx - view.x, dy = (drawn.y - drawn.my) * sy - view.y;
    this.world.style.transform = `translate(${dx}px,${dy}px) scale(${sx},${sy})`;
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.draw(), REST);
  }

  draw() {
    const { run } = this;
    clearTimeout(this.rest);
    if (!run || !run.root) { this.svg.innerHTML = ""; return; }
    if (this.follows) this.follow();
    const { view, width, height } = this;
    const mx = Math.round(width * MARGIN), my = Math.round(height * MARGIN);
    const cw = COLUMN * view.kx, rh = ROW * view.ky, first = this.first;
    const from = Math.max(first, first + Math.floor((view.x - mx) / cw)), to = Math.min(run.columns.length - 1, first + Math.ceil((view.x + width + mx) / cw));
    const top = (view.y - my) / rh - 1, bottom = (view.y + height + my) / rh + 1;
    const hasText = cw >= LEAST_COLUMN && rh >= LEAST_ROW;
    const X = (depth) => (depth - first) * cw - view.x + mx, Y = (row) => (row + 0.5) * rh - view.y + my;
    const gap = hasText ? Math.min(26, cw * 0.3) : 0, pill = Math.min(PILL, rh - 5), most = Math.floor((cw - gap - 10) / 7.2);
    const edges = {}, pills = [], marks = [], lines = new Map(), drawn = [];
    const one = (value) => value.toFixed(1);
    for (let depth = from; depth <= to; depth++) {
      const below = run.rowsOfBeams(depth), parentBelow = depth ? run.rowsOfBeams(depth - 1) : 0;
      for (const node of run.columns[depth]) {
        const row = node.rank >= 0 ? node.rank : below + node.lane, y = Y(row);
        const parent = node.parent, parentRow = parent && (parent.rank >= 0 ? parent.rank : parentBelow + parent.lane);
        const isSeen = row >= top && row <= bottom;
        if (parent && depth > first && (isSeen || (parentRow >= top && parentRow <= bottom))) {
          const x0 = X(depth - 1) + cw - gap, x1 = X(depth), y0 = Y(parentRow), bend = (x1 - x0) * 0.5;
          const x0t = hasText ? x0 : X(depth - 1) + cw / 2, x1t = hasText ? x1 : X(depth) + cw / 2, b = hasText ? bend : cw / 2;
          const kind = this.kindOf(node);
          const p = node.logProb === null ? 0.25 : Math.exp(node.logProb);
          const wide = hasText ? 1 + Math.round(p * 12) / 2 : kind.startsWith("best") ? 4 : 1;
          if (!hasText) { // one line for neighbours in a row, and no curves
            const line = lines.get(parent.id);
            if (line && y0 === y && line.kind === kind && line.row === row) { line.to = x1t; lines.set(node.id, line); } else {
              const next = { kind, row, wide, d: y0 === y ? `M${one(x0t)} ${one(y)}` : `M${one(x0t)} ${one(y0)}L${one(x1t)} ${one(y)}`, y, to: x1t };
              lines.set(node.id, next);
              drawn.push(next);
            }
            continue;
          }
          const d = y0 === y ? `M${one(x0t)} ${one(y0)}H${one(x1t)}` : `M${one(x0t)} ${one(y0)}C${one(x0t + b)} ${one(y0)} ${one(x1t - b)} ${one(y)} ${one(x1t)} ${one(y)}`;
          ((edges[kind] ||= {})[wide] ||= []).push(d);
        }
        if (hasText && isSeen && parent) {
          const kind = this.kindOf(node), w = cw - gap, isNew = node.phase === run.at ? " new" : "";
          const label = escaped(short(node.text, Math.max(1, most)));
          const mark = node.isAccepted ? "✓" : node.isRejected ? "✕" : "";
          pills.push(`<g data-node="${node.id}" class="pill ${kind}${isNew}${node === this.selected ? " selected" : ""}"><rect x="${one(X(depth))}" y="${one(y - pill / 2)}" width="${one(w)}" height="${one(pill)}" rx="${one(pill / 3)}"/><text x="${one(X(depth) + w / 2)}" y="${one(y + 4.5)}">${label}</text>${mark || node.isEnd ? `<circle class="badge" cx="${one(X(depth) + w - 2)}" cy="${one(y - pill / 2 + 1)}" r="6"/>${node.isEnd ? `<path class="mark" d="M${one(X(depth) + w - 4)} ${one(y - pill / 2 - 1)}h4v4h-4z"/>` : `<text class="mark" x="${one(X(depth) + w - 2)}" y="${one(y - pill / 2 + 4.2)}">${mark}</text>`}` : ""}</g>`);
        } else if (hasText && !parent) {
          marks.push(`<circle class="root" cx="${one(X(depth) + cw - gap - 6)}" cy="${one(y)}" r="6"/>`);
        }
      }
    }
    for (const { kind, wide, d, to } of drawn) ((edges[kind] ||= {})[wide] ||= []).push(`${d}H${one(to)}`);
    this.svg.setAttribute("class", hasText ? "" : "far");
    let paths = "";
    for (const kind of ORDER) for (const [wide, parts] of Object.entries(edges[kind] || {})) paths += `<path class="edge ${kind}" stroke-width="${wide}" d="${parts.join("")}"/>`;
    this.svg.setAttribute("width", width + 2 * mx);
    this.svg.setAttribute("height", height + 2 * my);
    this.world.style.transform = `translate(${-mx}px,${-my}px)`;
    this.svg.innerHTML = paths + marks.join("") + pills.join("");
    this.drawn = { ...view, mx, my };
  }

  kindOf(node) {
    if (node.kind === "masked") return "masked";
    if (node.isRejected) return node.round === this.run.rounds ? "rejected" : "rejected past";
    if (node.kind === "guess") return "guess";
    if (this.run.best.has(node) || (!this.run.isWhole && node.isCertain)) return node.isAccepted ? "best accepted" : "best";
    if (node.isDropped || (this.run.isWhole && !this.isReturned(node))) return node.isAccepted ? "pruned accepted" : "pruned";
    return node.isAccepted ? "accepted" : "live";
  }

  isReturned(node) { return this.run.width === 1 && node.kind === "beam"; }
}

const ORDER = ["masked", "pruned", "pruned accepted", "rejected past", "rejected", "guess", "live", "accepted", "best", "best accepted"];

// A node in words, for people who do not see the picture.
export function inWords(run, node) {
  const state = node.kind === "masked" ? "masked by the constraint" : node.isRejected ? "rejected guess" : node.isAccepted ? "accepted guess" : node.kind === "guess" ? "guess" : node.isEnd ? "end of a text" : "chosen by the model";
  const fate = run.best.has(node) ? ", on the best path" : node.isDropped ? ", dropped" : "";
  const p = node.logProb === null ? "" : `, probability ${percent(node.logProb)}${node.score === null ? "" : `, path score ${node.score.toFixed(3)}`}`;
  return `Step ${node.depth}, token “${shown(node.text)}”: ${state}${fate}${p}`;
}
