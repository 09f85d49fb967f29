// The hypotheses of a search that has ended, best first, and how each differs from the best one.

import { UNSET } from "./declared.js";
import { isWord } from "./run.js";
import { html, useMemo } from "./vendor/preact.js";

const MOST = 8;
const penaltyOf = (run) => run.begin.options.length_penalty ?? UNSET.length_penalty;

// Returned hypotheses have their scores from the server. The others are those that the search has found on its way:
// finished ones, and beams of the last step.
export function hypothesesOf(run) {
  if (!run.isWhole || run.width === 1) return [];
  const penalty = penaltyOf(run);
  const ends = [...run.nodes.values()].filter((node) => node.score !== null && node.kind !== "masked" && (node.isEnd || node.rank >= 0 && node.depth === run.front && !node.isEnd));
  const returned = run.end.sequences.map(({ token_ids, score, text }) => ({ path: run.pathOf(token_ids), score, text, isReturned: true }));
  const known = new Set(returned.map(({ path }) => path.at(-1)));
  const others = ends.filter((node) => !known.has(node)).map((node) => ({ path: run.pathTo(node), score: node.score / node.depth ** penalty, isFinished: node.isEnd }));
  return [...returned, ...others.sort((a, b) => b.score - a.score)].slice(0, MOST);
}

// The pieces of a text against another one: [text, "same" | "other" | "missing"], by a longest common subsequence of tokens.
export function differences(best, path) {
  const [a, b] = [best, path].map((nodes) => nodes.filter(isWord));
  let from = 0, toA = a.length, toB = b.length;
  while (from < toA && from < toB && a[from].token === b[from].token) from++;
  while (toA > from && toB > from && a[toA - 1].token === b[toB - 1].token) { toA--; toB--; }
  const length = Array.from({ length: toA - from + 1 }, () => new Uint16Array(toB - from + 1));
  for (let i = toA - from - 1; i >= 0; i--) for (let j = toB - from - 1; j >= 0; j--) length[i][j] = a[from + i].token === b[from + j].token ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const pieces = [];
  const add = (text, kind) => { if (!text) return; if (pieces.at(-1)?.[1] === kind) pieces.at(-1)[0] += text; else pieces.push([text, kind]); };
  add(b.slice(0, from).map((node) => node.text).join(""), "same");
  let i = from, j = from;
  while (i < toA || j < toB) {
    if (i < toA && j < toB && a[i].token === b[j].token) { add(b[j].text, "same"); i++; j++; }
    else if (j < toB && (i === toA || length[i - from][j + 1 - from] >= length[i + 1 - from][j - from])) add(b[j++].text, "other");
    else add(a[i++].text, "missing");
  }
  add(b.slice(toB).map((node) => node.text).join(""), "same");
  return pieces.filter(([, kind], k) => kind !== "missing" || pieces[k - 1]?.[1] !== "other" && pieces[k + 1]?.[1] !== "other"); // its place is marked
}

export function Hypotheses({ run }) {
  const all = useMemo(() => {
    const all = hypothesesOf(run);
    return all.map((one, i) => ({ ...one, pieces: i ? differences(all[0].path, one.path) : [[one.text, "same"]] }));
  }, [run, run.isWhole]);
  if (all.length < 2) return null;
  return html`<section class="hypotheses" aria-label="Hypotheses"><h2>The best and its runners-up</h2>
    <p class="help">Ranked by score: log-probability per token${penaltyOf(run) === 1 ? "" : `, with length penalty ${penaltyOf(run)}`}. What differs from the best text is marked. ${run.end.sequences.length > 1 ? "" : "The runners-up are those that the search met on its way. “Texts” returns as many as you ask for."}</p>
    <ol>${all.map(({ pieces, score, isReturned, isFinished }, i) => html`<li key=${i} class=${i ? "" : "first"}>
      <span class="score">${score.toFixed(3)}</span>
      <p>${pieces.map(([piece, kind], j) => (kind === "same" ? piece : kind === "other" ? html`<mark key=${j}>${piece.trim() ? piece : piece.replace(/\n/g, "⏎")}</mark>` : html`<del key=${j}>${piece}</del>`))}${!isReturned && !isFinished ? html` <small>not finished</small>` : ""}</p>
    </li>`)}</ol>
  </section>`;
}
