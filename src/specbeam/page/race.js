// The same prompt in two ways, side by side.

import { useFrames } from "./hooks.js";
import { Controls, FIELDS, Options, needs, requestOf } from "./options.js";
import { AsText, Cut, Numbers } from "./panel.js";
import { isWord } from "./run.js";
import { html, useRef, useState } from "./vendor/preact.js";

const REPEATS = 3, MOST_SECONDS = 8; // a race is run this often, unless it would take longer
const RACED = FIELDS.filter((field) => field.name === "num_beams" || !needs(field, "beams", "several"));

export function RacePage(all) {
  const { shared, start, redraw, setSays } = all;
  const [kind, setKind] = useState("draft");
  const [clock, setClock] = useState(null); // a replay of both, by their measured times
  const race = shared.race;
  const began = useRef(0);
  const onGo = async (form) => {
    setClock(null);
    const strategy = kind === "draft" ? { draft: form.draft === "none" ? "ngram" : form.draft } : { num_beams: Math.max(2, Number(form.num_beams) || 4), temperature: 0 };
    const plain = kind === "draft" ? { draft: "none" } : { num_beams: 1, temperature: 0 };
    const sampled = Number(form.temperature) > 0 && !form.seed ? { seed: 1 } : {};
    const sides = [{ ...form, ...sampled, ...plain }, { ...form, ...sampled, ...strategy }];
    const race = (shared.race = { kind, runs: [], times: [[], []], names: kind === "draft" ? ["Plain", `With draft ${strategy.draft}`] : ["Greedy", `${strategy.num_beams} beams`] });
    const began = performance.now();
    for (let i = 0; i < 2 * REPEATS; i++) {
      const side = i % 2, run = start(...requestOf(sides[side]));
      race.live = run;
      if (i < 2) race.runs.push(run); // those that are shown. The others only take the time
      redraw();
      await run.done;
      if (run.error || run.isStopped || shared.race !== race) { race.live = null; redraw(); return; }
      run.catchUp();
      race.times[side].push(run.decodeSeconds);
      race.isOther ||= tokensOf(run) !== tokensOf(race.runs[side]);
      if (side && (performance.now() - began) / 1000 * REPEATS * 2 / (i + 1) > MOST_SECONDS) break;
    }
    race.live = null;
    race.verdict = verdict(race);
    setSays(race.verdict[1]);
    redraw();
  };
  useFrames((now) => {
    if (!race) return;
    let changed = false;
    for (const run of race.runs) {
      if (clock === null) { changed = run.catchUp() || changed; continue; }
      const seconds = (now - began.current) / 1000;
      let count = run.at;
      while (count < run.phases.length && run.phases[count][0].pass.seconds - run.events[1].pass.seconds <= seconds) count++;
      if (count !== run.at) { run.seek(count); changed = true; }
    }
    if (clock !== null && race.runs.every((run) => run.at === run.phases.length)) setClock(null);
    if (changed) redraw();
  });
  const replay = () => { began.current = performance.now(); for (const run of race.runs) run.seek(0); setClock(0); };
  const live = race?.live;
  const most = race ? Math.max(1, ...race.runs.map((run) => run.targetPasses)) : 1;
  return html`<div class="split">
    <${Controls} ...${all} onGo=${onGo} run=${live} go="Race" fields=${RACED}>
      <fieldset class="as"><legend>Race</legend>
        <label><input type="radio" name="kind" checked=${kind === "draft"} onChange=${() => setKind("draft")} /> plain against drafted</label>
        <label><input type="radio" name="kind" checked=${kind === "beams"} onChange=${() => setKind("beams")} /> greedy against beams</label>
      </fieldset>
    <//>
    <section class="panel" aria-label="The race">
      <p class="intro">Each runs alone on the engine, one after the other, three times if that is quick. Passes are the same each time. Then both can be replayed side by side by the times of the first.</p>
      <div class="lanes">${[0, 1].map((i) => html`<${Lane} key=${i} name=${race ? race.names[i] : i ? "With draft" : "Plain"} run=${race?.runs[i]} most=${most} times=${race?.times[i]} />`)}</div>
      ${live && race.runs.length === 2 && !race.runs[1].isLive && html`<p class="help" role="status">Once more, for the times.</p>`}
      ${race?.verdict && html`<div class=${`verdict ${race.verdict[0]}`} role="status"><p>${race.verdict[1]}</p><button onClick=${replay} disabled=${clock !== null}>Replay both together</button></div>`}
      ${race?.runs.map((run, i) => html`<div key=${i}><h3 class="small">${race.names[i]}</h3><${AsText} run=${run} /></div>`)}
    </section>
    <${Options} ...${all} fields=${RACED} />
  </div>`;
}

function Lane({ name, run, most, times }) {
  const path = run ? run.bestPath.filter(isWord) : [];
  let round = -1, stripe = false;
  return html`<article class="lane" aria-label=${name}>
    <h2>${name}</h2>
    <${Numbers} run=${run} times=${times?.length ? times : undefined} />
    <div class="bar" aria-hidden="true"><i style=${{ width: `${run ? (100 * run.targetPasses) / most : 0}%` }}></i></div>
    <p class="raced">${path.map((node) => {
      if (node.round !== round && !node.isAccepted) { round = node.round; stripe = !stripe; }
      return html`<span key=${node.id} class=${`${node.isAccepted ? "accepted" : ""} ${stripe ? "odd" : ""}`}>${node.text}</span>`;
    })}<${Cut} run=${run} /></p>
  </article>`;
}

const tokensOf = (run) => run.end.sequences[0].token_ids.join();
const median = (times) => [...times].sort((a, b) => a - b)[(times.length - 1) >> 1];

function verdict({ runs: [a, b], kind, times, isOther }) {
  if (isOther) return ["wrong", "The same run gave another text the second time. That must not happen: please report it."];
  const [x, y] = [a, b].map((run) => run.end.sequences[0].token_ids);
  const differs = x.findIndex((token, i) => token !== y[i]);
  const speed = median(times[0]) / median(times[1]), runs = times[1].length;
  const faster = ` ${b.end.stats.target_passes} passes instead of ${a.end.stats.target_passes}.${speed > 0 && Number.isFinite(speed) ? ` ${speed.toFixed(1)} times the speed, ${runs > 1 ? `by the medians of ${runs} runs` : "in one run"}.` : ""}`;
  if (differs < 0 && x.length === y.length) return ["same", `Same text: all ${x.length} tokens are equal.${faster}`];
  const place = differs < 0 ? Math.min(x.length, y.length) : differs;
  if (kind === "beams") {
    const [p, q] = [a, b].map((run) => run.end.sequences[0].log_prob);
    return ["other", `Other texts, from token ${place + 1} on. Log-probabilities: greedy ${p.toFixed(3)}, beams ${q.toFixed(3)}.`];
  }
  return ["wrong", `The texts differ from token ${place + 1} on. That must not happen: please report it.`];
}
