// What happens in a run, in sentences: one for each round, and one for each term where it first appears.

import { html } from "./vendor/preact.js";
import { shown } from "./run.js";

export const TOUR_MS = 23_000; // a recorded run that shows what a search is
const TAIL = 44; // characters of the best text so far

const BEAM = "A beam is one of the texts that grow side by side. The best one wins at the end.";
const PASS = "A pass is one run of the model. It scores the next token of every text that it is given.";
const isForced = (run) => !run.begin.draft || run.begin.draft === "none"; // without a draft, only a constraint proposes
const FORCED = "Where the constraint allows one token alone, that token is certain. The model takes all such tokens in one pass.";
const draftTerm = (run) => isForced(run) ? FORCED : `A draft proposes the next tokens cheaply, ${["ngram", "suffix"].includes(run.begin.draft) ? "here by copying what followed the same words before" : "here with a smaller model"}. The model verifies them all in one pass.`;

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const isSearch = (run) => run.width > 1;

function soFar(text) {
  const all = text.trim().replace(/\s+/g, " ");
  return all.length > TAIL ? `… ${all.slice(-TAIL).replace(/^\S*\s/, "")}` : all;
}

// A round that is decided.
function lineOfRound(run, { proposed, kept: ofThese, accepted, steps, evaluated, text, token }) {
  const earlier = accepted - ofThese; // a beam can take up what was proposed for another one
  const kept = proposed ? `The ${isForced(run) ? "constraint forced" : "draft proposed"} ${count(proposed, "token")}, the model kept ${ofThese || "none"}${earlier > 0 ? ` and ${earlier} of earlier ones` : ""}` : "";
  if (!isSearch(run)) {
    if (!proposed) return `The pass chose one token: “${shown(token)}”.`;
    return accepted < steps ? `${kept} and chose “${shown(token)}” itself.` : `${kept}.`;
  }
  const best = text ? `; the best so far says “${soFar(text)}”.` : ".";
  return (kept || `${evaluated} of ${run.width} beams evaluated`) + best;
}

// The line of a run as it is shown now: a tokens' proposal, a round, the end, or the beginning.
export function lineOf(run) {
  if (!run || !run.begin) return "";
  if (run.isWhole) return endOf(run);
  if (run.proposed) return `The ${isForced(run) ? "constraint forces" : "draft proposes"} ${count(run.proposed, "token")}.`;
  if (run.told.length) return lineOfRound(run, run.told.at(-1));
  return isSearch(run) ? `The search begins with ${run.width} beams. Each pass moves them on.` : "The model goes on from the prompt. Each pass gives one token, or more if a draft is right.";
}

function endOf(run) {
  const { stats } = run.end;
  const plain = run.begin.plain_passes;
  return `Done: ${count(stats.new_tokens, "token")} in ${count(stats.target_passes, "pass")}${plain ? `. Without a draft it takes ${plain} for the same text` : ""}.`.replace("passs", "passes");
}

// The terms that first appear in a line: -1 is the beginning, and each round has its number.
function termsAt(run, i) {
  if (i < 0) return isSearch(run) ? [BEAM, PASS] : [PASS];
  return run.told[i].proposed && !run.told.slice(0, i).some((one) => one.proposed) ? [draftTerm(run)] : [];
}

// The newest term so far.
export function termOf(run) {
  if (!run || !run.begin) return "";
  return run.proposed || run.told.some((one) => one.proposed) ? draftTerm(run) : termsAt(run, -1).join(" ");
}

// The line and the terms of a round, for a list.
export const toldIn = (run, i) => [lineOfRound(run, run.told[i]), ...termsAt(run, i)].join(" ");

// All lines so far, for whoever wants no motion.
export function Told({ run }) {
  return html`<ol class="told" aria-label="What happened">
    <li>${[lineOf({ begin: run.begin, width: run.width, told: [] }), ...termsAt(run, -1)].join(" ")}</li>
    ${run.told.map((_, i) => html`<li key=${i}>${toldIn(run, i)}</li>`)}
  </ol>`;
}
