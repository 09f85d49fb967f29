// A run as a picture, with its numbers, its text, and what can be said of each token.

import { useFrames, useRedraw } from "./hooks.js";
import { Hypotheses } from "./hypotheses.js";
import { Told, lineOf, termOf, toldIn } from "./narration.js";
import { Playback, percent, possible, shown } from "./run.js";
import { TreeView, inWords } from "./tree.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";

const DEFERRED = "It was not evaluated. None of its continuations scores above it, so they cannot matter, or not yet.";
const TIP_WIDTH = 250, TIP_HEIGHT = 380; // px

export function TreePanel({ run, onTurn, onBranch, setSays, setError }) {
  const box = useRef(null), view = useRef(null), playback = useRef(null);
  const [hovered, setHovered] = useState(null);
  const [selected, setSelected] = useState(null);
  const [collapses, setCollapses] = useState(null);
  const [speed, setSpeed] = useState(1);
  const redraw = useRedraw();
  if (run && playback.current?.run !== run) playback.current = new Playback(run, speed);
  const player = playback.current;
  useEffect(() => {
    view.current = new TreeView(box.current, {
      onHover: (node, x, y) => setHovered(node && { node, x, y }),
      onSelect: (node) => { setSelected(node); if (node) setSays?.(inWords(view.current.run, node)); },
    });
    return () => view.current.close();
  }, []);
  const isCollapsed = () => collapses ?? Boolean(run && run.beams.length > 1 && !run.isWhole);
  const version = useRef(-1);
  useFrames((now) => {
    if (!run) return;
    const changed = player.tick(now);
    if (!changed && version.current === run.version && view.current.run === run) return;
    version.current = run.version;
    if (!changed && view.current.run === run && view.current.drawnAt === run.at) { redraw(); return; } // only the numbers
    view.current.drawnAt = run.at;
    view.current.collapses = isCollapsed();
    view.current.show(run);
    redraw();
  });
  useEffect(() => { setSelected(null); setHovered(null); setCollapses(null); version.current = -1; }, [run]);
  const show = (how) => { view.current.collapses = how; setCollapses(how); view.current.followRun(); };
  return html`<section class="panel" aria-label="The tree">
    <${Numbers} run=${run} />
    <${Narration} run=${run} player=${player} onTurn=${onTurn} redraw=${redraw} />
    <div class="agreed" role="region" tabindex="0" aria-label="The text so far"><${Agreed} run=${run} /></div>
    <div class="stage">
      <div class="canvas" ref=${box} tabindex="0" role="application" aria-label="Tree of the search. Arrow keys go from token to token, plus and minus zoom, 0 shows all. The text view below has the same facts."></div>
      ${!run && html`<div class="empty"><p>Beams grow here.</p><p>Take an example, or write a prompt.</p></div>`}
      ${run && !run.phases.length && run.isLive && html`<div class="empty"><p>The model prefills the prompt.</p></div>`}
      ${hovered && !selected && html`<${Tip} run=${run} hovered=${hovered} box=${box.current} />`}
      ${selected && html`<${Details} run=${run} node=${selected} onBranch=${onBranch} close=${() => view.current.select(null)} />`}
    </div>
    <${Player} run=${run} player=${player} speed=${speed} setSpeed=${(value) => { setSpeed(value); if (player) player.speed = value; }} redraw=${redraw} view=${view} isCollapsed=${isCollapsed()} toggle=${() => show(!isCollapsed())} setError=${setError} />
    <${Legend} run=${run} />
    ${run?.isStill && html`<${Told} run=${run} />`}
    ${run && html`<${Hypotheses} run=${run} />`}
    <${AsText} run=${run} />
  </section>`;
}

// One sentence on what happens now, and one on the term that it brings.
function Narration({ run, player, onTurn, redraw }) {
  const isTour = Boolean(run?.pace), isOver = run?.isWhole;
  useEffect(() => { if (isTour && isOver) onTurn?.(false); }, [run, isOver]);
  const skip = () => { player.isPlaying = false; run.seek(run.phases.length); redraw(); };
  return html`<div class=${`narration ${isTour ? "tour" : ""}`}>
    ${isTour && html`<p class="about">A recorded run of ${run.begin.model}</p>`}
    <p class="line" aria-live=${isTour ? "polite" : null}>${lineOf(run)} ${isTour && isOver && onTurn && html`<strong>Your turn: write a prompt, or take an example.</strong>`}</p>
    ${!(isTour && isOver) && html`<p class="term">${termOf(run)}</p>`}
    ${isTour && onTurn && html`<p class="turn">${isOver ? html`<button onClick=${() => onTurn(true)}>Write a prompt</button>` : html`<button onClick=${() => { player.isPlaying = !player.isPlaying; redraw(); }}>${player.isPlaying ? "Pause" : "Go on"}</button><button onClick=${skip}>Skip</button>`}</p>`}
  </div>`;
}

// Passes come first: they are the same in each run, and times are not.
export function Numbers({ run, times = run?.end ? [run.decodeSeconds] : [] }) {
  const passes = run ? run.targetPasses : 0, beams = run?.beamCounts;
  const seconds = times.length ? [...times].sort((a, b) => a - b) : [run ? run.decodeSeconds : 0];
  const middle = seconds[(seconds.length - 1) >> 1], range = seconds.length > 1 ? `${seconds[0].toFixed(2)} to ${seconds.at(-1).toFixed(2)} s in ${seconds.length} runs` : "one run";
  const cells = [
    [`passes${run && run.length ? ` for ${run.length} ${run.width > 1 ? "steps" : "tokens"}` : ""}`, passes ? `${passes}${run.draftPasses ? ` + ${run.draftPasses}` : ""}` : "–", "Passes of the model, and of a draft model. They are the same in each run."],
    ...(run?.begin && run.begin.draft === "none" ? [] : [["draft tokens kept", run && run.drafted ? `${run.accepted} of ${run.drafted.toLocaleString("en")}` : "–", "Each accepted draft token saves work of a pass"]]),
    ...(beams ? [["beams evaluated", `${beams.evaluated.toLocaleString("en")} of ${beams.possible.toLocaleString("en")} possible`, "The other beams cannot matter, or not yet"]] : []),
    ...(run?.pace ? [] : [[`time after the prefill, ${range}`, middle > 0 ? `${middle.toFixed(2)} s` : "–", "Other programs on the machine change it"]]),
  ];
  return html`<dl class="numbers">${cells.map(([name, value, help], i) => html`<div key=${i} title=${help}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Agreed({ run }) {
  if (!run || !run.begin) return null;
  const text = run.isWhole ? run.end.sequences[0].text : run.text;
  return html`<p><span class="prompt">${run.promptShown}</span><span class="certain">${text}</span><span class="open">${run.openText}</span><${Cut} run=${run} /></p>`;
}

// That a text was cut, and where.
export function Cut({ run }) {
  return run?.end?.sequences[0].finish_reason === "length" && html`<span class="cut"> The limit of ${run.begin.options.max_new_tokens} new tokens cut it here.</span>`;
}

function Legend({ run }) {
  const kinds = [["best", "the text"], ["live", "beam"], ...(run?.hasDeferred ? [["deferred", "deferred beam", DEFERRED]] : []), ["accepted", "accepted draft token"], ["rejected", "rejected draft token"], ["drafted", "draft token"], ["pruned", "dropped beam"], ...(run?.hasMasks ? [["masked", "masked token"]] : [])];
  return html`<ul class="legend" aria-label="Colours">${kinds.map(([kind, name, help]) => html`<li key=${kind} title=${help}><i class=${kind}></i>${name}</li>`)}<li>thick line: likely token</li></ul>`;
}

function Player({ run, player, speed, setSpeed, redraw, view, isCollapsed, toggle, setError }) {
  const most = run ? run.phases.length : 0;
  const go = (count) => { player.isPlaying = false; run.seek(Math.max(0, Math.min(most, count))); redraw(); };
  const save = (content, name, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const savePage = async () => {
    const page = await fetch("page/replay.html").then((response) => response.text(), () => null);
    if (page === null) { setError({ message: "The page cannot be saved, since the server does not answer. Save writes the recording." }); return; }
    const lines = run.lines.replace(/</g, "\\u003c"); // it could end the element that holds them
    save(page.replace('id="recording">\n', (start) => start + lines), "specbeam-run.html", "text/html");
  };
  const isPlaying = player?.isPlaying && !player.isAtEnd;
  return html`<div class="player" role="group" aria-label="Replay">
    <button data-key="play" disabled=${!run || !most} onClick=${() => { if (player.isAtEnd) run.seek(0); player.isPlaying = !isPlaying; view.current.followRun(); redraw(); }}>${isPlaying ? "Pause" : player?.isAtEnd && !run?.isLive ? "Replay" : "Play"}</button>
    <button disabled=${!most} data-key="back" aria-label="One step back" onClick=${() => go(run.at - 1)}>◂</button>
    <button disabled=${!most} data-key="on" aria-label="One step on" onClick=${() => go(run.at + 1)}>▸</button>
    <input type="range" min="0" max=${most} value=${run ? run.at : 0} disabled=${!most} aria-label="Place in the run" onInput=${(e) => go(Number(e.target.value))} />
    <label class="inline">Speed <select value=${String(speed)} onChange=${(e) => setSpeed(Number(e.target.value))}>${[["0.25", "¼"], ["1", "1"], ["4", "4"], ["Infinity", "all"]].map(([value, name]) => html`<option key=${value} value=${value} selected=${value === String(speed)}>${name}</option>`)}</select></label>
    <span class="gap"></span>
    <button disabled=${!run} aria-pressed=${isCollapsed} onClick=${toggle} title="The tokens that all beams share are left out of the tree. The text above has them.">Hide agreed</button>
    <button disabled=${!run} aria-label="Zoom out" onClick=${() => view.current.zoom(0.7)}>−</button>
    <button disabled=${!run} aria-label="Zoom in" onClick=${() => view.current.zoom(1.4)}>+</button>
    <button data-key="fit" disabled=${!run} onClick=${() => view.current.fit()}>Fit</button>
    <button disabled=${!run?.end} onClick=${() => save(run.lines, "specbeam-run.jsonl", "application/jsonl")} title="A file that this page replays without a model">Save</button>
    ${!document.getElementById("recording") && html`<button disabled=${!run?.end} onClick=${savePage} title="A file that shows this run in any browser, without a server">Save page</button>`}
  </div>`;
}

function Tip({ run, hovered: { node, x, y }, box }) {
  const left = x > box.clientWidth - TIP_WIDTH - 24 ? x - TIP_WIDTH - 16 : x + 16, top = Math.max(4, Math.min(y + 16, box.clientHeight - TIP_HEIGHT));
  return html`<div class="tip" style=${{ left: `${left}px`, top: `${top}px` }}><${Facts} run=${run} node=${node} /></div>`;
}

export function Facts({ run, node, choose }) {
  const likeliest = run.likeliest.get(node.parent.id) || [];
  const isAmong = !likeliest.length || node.logProb === null || likeliest.some((one) => one.token_id === node.token);
  const tokens = isAmong ? likeliest : [...likeliest, { token_id: node.token, text: node.text, log_prob: node.logProb }];
  const [kind, state] = run.stateOf(node);
  const instead = node.isRejected ? node.parent.children.find((one) => one.kind === "beam") : null;
  return html`<h3 class="token">${shown(node.text)}</h3>
    <p class=${`state ${kind}`}>${state}${node.rank >= 0 && run.width > 1 ? `, number ${node.rank + 1}` : ""}</p>
    <dl class="facts">
      ${node.logProb !== null && html`<div><dt>probability</dt><dd>${percent(node.logProb)}</dd></div><div><dt>log-probability</dt><dd>${node.logProb.toFixed(4)}</dd></div>`}
      ${node.score !== null && html`<div><dt>score of the path</dt><dd>${node.score.toFixed(4)}</dd></div>`}
      ${run.width > 1 && node.kind === "beam" && !node.isEnd && node.depth < run.front && html`<div><dt>evaluated</dt><dd>${node.isEvaluated ? "yes" : "no"}</dd></div>`}
      ${instead && html`<div><dt>came instead</dt><dd>${shown(instead.text)}</dd></div>`}
    </dl>
    ${kind === "deferred" && html`<p class="help">${DEFERRED}</p>`}
    ${tokens.length > 0 && html`<ol class="likeliest" aria-label="The likeliest tokens here">${tokens.map((one) => {
      const inside = html`${choose && html`<span class="hidden">Go on with </span>`}<span class="name">${shown(one.text)}</span><meter min="0" max="1" value=${Math.exp(one.log_prob)} aria-hidden="true"></meter><span class="share">${percent(one.log_prob)}</span>${one.masked && html`<span class="hidden">, masked by the constraint</span>`}`;
      return html`<li key=${one.token_id} class=${`${one.token_id === node.token ? "this" : ""} ${one.masked ? "masked" : ""}`} title=${one.masked ? "The constraint masks it" : null}>${choose ? html`<button onClick=${() => choose(one.token_id)}>${inside}</button>` : html`<span class="row">${inside}</span>`}</li>`;
    })}</ol>`}`;
}

function Details({ run, node, onBranch, close }) {
  return html`<aside class="details" aria-label="The token">
    <button class="close" aria-label="Close" onClick=${close}>✕</button>
    <${Facts} run=${run} node=${node} choose=${onBranch && !run.isLive ? (token) => onBranch(run, node, token) : null} />
    ${onBranch && node.kind !== "drafted" && node.kind !== "masked" && html`<button class="go" disabled=${run.isLive} onClick=${() => onBranch(run, node)}>Go on after this token</button>`}
    ${onBranch && html`<p class="help">${run.isLive ? "Once the search is over, a token here goes on from its place." : "Take one of the tokens, and the text goes on with it. What came before is cached."}</p>`}
  </aside>`;
}

// The likely tokens that a constraint masked in a round.
const maskedOf = ({ likeliest = [] }) => likeliest.flatMap((row) => row.tokens.filter((token) => token.masked));

// The same facts as text. It is made when it is opened.
export function AsText({ run }) {
  const [isOpen, setOpen] = useState(false);
  if (!run || !run.begin) return null;
  const rounds = isOpen ? run.events.filter((event) => event.event === "round").slice(0, run.rounds) : [];
  const text = (entry) => `“${shown(entry.text)}”`;
  const scored = (beam) => `${text(beam)} ${percent(beam.log_prob)}, score ${beam.score.toFixed(3)}`;
  const isDeferred = (beam) => { const node = run.nodes.get(beam.node); return node && run.isDeferred(node); };
  return html`<details class="as-text" onToggle=${(e) => setOpen(e.target.open)}><summary>The same as text</summary>
    ${isOpen && html`${run.begin.message !== undefined && html`<p class="help">The prompt as the model reads it, with the chat template: ${run.promptText}</p>`}<ol class="rounds" tabindex="0" aria-label="Rounds">${rounds.map((one, i) => html`<li key=${i}>
      ${run.told[i] && html`<p><strong>${toldIn(run, i)}</strong></p>`}
      ${one.drafted.length > 0 && html`<p>Drafted: ${one.drafted.map((token, j) => { const node = run.nodes.get(token.node); return html`<span key=${j} class=${node?.isAccepted ? "accepted" : "rejected"}>${text(token)} (${node?.isAccepted ? "accepted" : "rejected"})${j < one.drafted.length - 1 ? ", " : "."}</span>`; })}</p>`}
      ${one.steps.map(possible).map((step, k) => html`<p key=${k}>${step.length > 1 ? "Beams: " : "Token: "}${step.map((beam, j) => html`<span key=${j}>${scored(beam)}${isDeferred(beam) ? ", not evaluated" : ""}${j < step.length - 1 ? "; " : "."}</span>`)}</p>`)}
      ${one.ahead.length > 0 && html`<p>Ahead of the steps that are certain: ${possible(one.ahead).map(scored).join("; ")}.</p>`}
      ${maskedOf(one).length > 0 && html`<p>Masked by the constraint: ${maskedOf(one).map((token) => `${text(token)} ${percent(token.log_prob)}`).join("; ")}.</p>`}
      ${one.text && html`<p>Certain now: ${text(one)}.</p>`}
    </li>`)}</ol>
    ${run.end && html`<h3>Texts</h3><ol>${run.end.sequences.map((one, i) => html`<li key=${i}>${one.text} <small>score ${one.score.toFixed(4)}, log-probability ${one.log_prob.toFixed(4)}, ${one.finish_reason}</small></li>`)}</ol>`}`}
  </details>`;
}
