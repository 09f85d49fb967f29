// A text whose tokens can be clicked, and texts that go on from other tokens.

import { useFrames } from "./hooks.js";
import { Controls, Options, linesOf, requestOf } from "./options.js";
import { AsText, Cut, Facts } from "./panel.js";
import { percent, shown } from "./run.js";
import { html, useState } from "./vendor/preact.js";

// Go on from a token of a run, or from another token in its place.
// Where only some answers are allowed, what is left of them is allowed. A schema is for whole texts, so it is left out.
export const branchFrom = ({ form, shared, start, setView, redraw, setSays }) => (run, node, token) => {
  const before = run.pathTo(node).map((one) => one.token);
  if (token !== undefined) before[before.length - 1] = token;
  const text = token === undefined ? node.text : textOfToken(run, node, token);
  const said = [...run.pathTo(node.parent).map((one) => one.text), text].join("");
  const left = linesOf(form.structured_outputs).filter((line) => line.startsWith(said)).map((line) => line.slice(said.length));
  const next = start(...requestOf({ ...form, model: run.begin.model, prompt: "", structured_outputs: left.join("\n"), schema: "" }, [...run.promptIds, ...before]));
  next.from = { run, node, token, text };
  next.shownPrompt = run.promptShown + said;
  if (!shared.branches.includes(run)) shared.branches.push(run);
  shared.branches.push(next);
  shared.branch = next;
  setSays(`The text goes on from there${form.schema ? ", without the schema" : ""}.`);
  setView("branch");
  redraw();
};

const textOfToken = (run, node, token) => (run.likeliest.get(node.parent.id) || []).find((one) => one.token_id === token)?.text || "";

export function BranchPage(all) {
  const { shared, start, redraw } = all;
  const [chosen, choose] = useState(null);
  const run = shared.branch;
  useFrames(() => { if (run?.catchUp()) redraw(); });
  const onGo = (form) => {
    const run = start(...requestOf(form));
    shared.branches = [run];
    shared.branch = run;
    choose(null);
    redraw();
  };
  const goOn = branchFrom({ ...all, setView: () => choose(null) });
  const path = run ? run.bestPath : [];
  const selected = chosen && path.includes(chosen) ? chosen : null;
  const reused = run?.end?.stats.reused_tokens;
  return html`<div class="split">
    <${Controls} ...${all} onGo=${onGo} run=${run} go="Write" />
    <section class="panel" aria-label="Branches">
      <p class="intro">Click a token to see what else could stand there. Take another one, and the text goes on from it. What came before is cached.</p>
      ${run?.begin && html`<div class="page">
        <p class="story"><span class="prompt">${run.promptShown}</span>${path.map((node) => html`<span key=${node.id}>${node.text.trim() && node.text.match(/^\s*/)[0]}<button class=${`word ${node === selected ? "selected" : ""} ${node.isAccepted ? "accepted" : ""}`} disabled=${run.isLive} aria-pressed=${node === selected} title=${node.logProb === null ? "" : percent(node.logProb)} onClick=${() => choose(node === selected ? null : node)}>${node.text.trimStart() || shown(node.text)}</button>${node.text.trim() ? "" : node.text}</span>`)}<${Cut} run=${run} /></p>
        ${run.end && html`<p class="help">${reused ? `${reused} of ${run.end.stats.prompt_tokens} tokens before the new text were cached.` : `The prompt of ${run.end.stats.prompt_tokens} tokens was prefilled.`} The new text took ${run.end.stats.target_passes} passes.</p>`}
      </div>`}
      ${!run && html`<div class="empty inline"><p>Write something first.</p></div>`}
      ${selected && html`<div class="card"><${Facts} run=${run} node=${selected} choose=${(token) => goOn(run, selected, token)} /><button class="go" onClick=${() => goOn(run, selected)}>Go on after this token</button></div>`}
      ${shared.branches.length > 1 && html`<h3 class="small">Branches</h3><ol class="branches">${shared.branches.map((one, i) => html`<li key=${i}><button aria-pressed=${one === run} onClick=${() => { shared.branch = one; choose(null); redraw(); }}>
        ${one.from ? html`<span class="at">${shared.branches.indexOf(one.from.run) + 1} › “${shown(one.from.text)}”</span>` : html`<span class="at">first text</span>`}
        <span class="snippet">${one.end ? one.end.sequences[0].text : one.text}</span></button></li>`)}</ol>`}
      <${AsText} run=${run} />
    </section>
    <${Options} ...${all} />
  </div>`;
}
