import { html, render, useEffect, useReducer, useRef, useState } from "./vendor/preact.js";
import { Playback, Refusal, Run, errorOf, percent, possible, recordingOf, shown, stream } from "./run.js";
import { TreeView, inWords } from "./tree.js";

const VIEWS = [["tree", "Tree"], ["race", "Race"], ["branch", "Branch"], ["chat", "Chat"]];
const whole = (least, most) => ({ kind: "number", least, most, step: 1 });
const FIELDS = [
  { name: "model", label: "Model", kind: "choice", wide: true, help: "The model that decides every token." },
  { name: "draft", label: "Draft", kind: "choice", help: "Proposes tokens ahead. It saves passes and changes no text." },
  { name: "num_beams", label: "Beams", ...whole(1, 64), start: 4, help: "Texts that grow side by side. 1 is greedy search or sampling." },
  { name: "max_tokens", label: "New tokens", ...whole(1, 4096), start: 48, help: "The text ends after this many tokens at the latest." },
  { name: "num_draft_tokens", label: "Draft length", kind: "auto", least: 1, most: 64, help: "How far the draft looks ahead. Empty: as far as it pays.", needs: "draft" },
  { name: "draft_width", label: "Draft width", kind: "auto", least: 1, most: 64, help: "How many continuations are drafted. Empty: as many as pay.", needs: "draft" },
  { name: "temperature", label: "Temperature", kind: "number", least: 0, most: 2, step: 0.1, start: 0, help: "0 takes the likeliest token. Higher ones draw more freely.", more: true },
  { name: "top_p", label: "Top p", kind: "number", least: 0.01, most: 1, step: 0.01, help: "Draw among the likeliest tokens that have this probability together.", more: true },
  { name: "top_k", label: "Top k", ...whole(0, 1000), help: "Draw among this many likeliest tokens. 0 means all.", more: true },
  { name: "seed", label: "Seed", ...whole(0, 2 ** 31), help: "The same seed draws the same text.", more: true },
  { name: "n", label: "Texts", ...whole(1, 32), help: "How many of the best beams are returned.", more: true },
  { name: "length_penalty", label: "Length penalty", kind: "number", least: -2, most: 5, step: 0.1, help: "Above 0, longer beams rank better.", more: true },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", least: 0.5, most: 2, step: 0.05, help: "Above 1, tokens that occurred get less likely.", more: true },
  { name: "no_repeat_ngram_size", label: "No repeated n-grams", ...whole(0, 20), help: "No run of this many tokens comes twice. 0 allows all.", more: true },
  { name: "structured_outputs", label: "Only these answers", kind: "lines", wide: true, help: "One per line: the text is one of them. Begin each with a space if it goes on from a text.", more: true },
  { name: "stop", label: "Stop text", kind: "text", help: "The text ends before this string.", more: true },
];
const START = Object.fromEntries([...FIELDS.map((field) => [field.name, field.start ?? ""]), ["prompt", ""], ["as", "chat"]]);
const REPEAT = "Repeat this: \"The tea is in the red box, the sugar is in the blue box, and the coffee is in the green box.\"";
const LIST = "Repeat this list: red, green, blue, yellow, black, white, brown, pink, purple, orange.";
const CITIES = ["Rome is the capital of Italy.", "The capital of Italy is Rome.", "Milan is the capital of Italy.", "The capital of Italy is Milan."].join("\n");
const PRESETS = [
  { title: "Copied words are drafted", about: "One text. The n-gram draft proposes whole phrases, and one pass accepts many of their tokens.", prompt: REPEAT, as: "chat", num_beams: 1, draft: "ngram", max_tokens: 48 },
  { title: "Beams with a draft", about: "Four beams share the draft tokens. Green ones save a pass.", prompt: REPEAT, as: "chat", num_beams: 4, draft: "ngram", num_draft_tokens: 4, draft_width: 4, max_tokens: 40 },
  { title: "Beams disagree", about: "Four beams without a draft: see which one survives.", prompt: "The best thing about the sea is", as: "raw", num_beams: 4, draft: "none", max_tokens: 24 },
  { title: "A wide search", about: "Sixteen beams. Zoom out to see the river.", prompt: "Once upon a time", as: "raw", num_beams: 16, draft: "none", max_tokens: 40 },
  { title: "Beams that wait", about: "Sixteen beams. Dotted ones wait, and some are never evaluated.", prompt: LIST, as: "chat", num_beams: 16, draft: "ngram", max_tokens: 48 },
  { title: "Only these answers", about: "Tokens that the answers do not allow are masked, however likely they are.", prompt: "Which city is the capital of Italy?", as: "chat", num_beams: 4, draft: "none", structured_outputs: CITIES, max_tokens: 12 },
  { title: "A drawn text", about: "Temperature 0.8 with a draft: the same seed draws the same text.", prompt: "Write one sentence about autumn.", as: "chat", num_beams: 1, draft: "ngram", temperature: 0.8, seed: 7, max_tokens: 40 },
];
const LIKELIEST = 10;
const DEFERRED = "It was not evaluated. None of its continuations scores above it, so they cannot matter, or not yet.";
const ADDRESS_REST = 300; // ms
const recording = document.getElementById("recording"); // in a page that replays one run
const TIP_WIDTH = 250, TIP_HEIGHT = 380; // px
const linesOf = (text) => text.split("\n").filter((line) => line.trim());

function fromLink() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const form = { ...START };
  for (const name of Object.keys(START)) if (name in given) form[name] = given[name];
  return { form, view: VIEWS.some(([name]) => name === given.view) ? given.view : "tree" };
}

function toLink(form, view) {
  const kept = Object.entries(form).filter(([name, value]) => String(value) !== String(START[name]));
  return "#" + new URLSearchParams([["view", view], ...kept]);
}

// The body of a request. Fields that are empty are left out.
function bodyOf(form) {
  const body = {};
  for (const { name, kind } of FIELDS) {
    const value = form[name];
    if (value === "" || value === null || value === undefined) continue;
    if (kind === "lines") { if (linesOf(value).length) body[name] = { choice: linesOf(value) }; continue; }
    body[name] = kind === "number" || kind === "auto" ? Number(value) : value;
  }
  if (body.num_beams === 1) { delete body.num_beams; delete body.n; delete body.length_penalty; }
  if (body.draft === "none" || !body.draft) { delete body.num_draft_tokens; delete body.draft_width; }
  if (body.temperature === 0 || body.num_beams) delete body.seed;
  return body;
}

function requestOf(form, ids = null) {
  const body = bodyOf(form);
  if (ids || form.as === "raw") return ["rounds/completions", { ...body, prompt: ids || form.prompt, logprobs: LIKELIEST }];
  return ["rounds/chat", { ...body, messages: [{ role: "user", content: form.prompt }], logprobs: true, top_logprobs: LIKELIEST }];
}

const useRedraw = () => useReducer((n) => n + 1, 0)[1];

// One frame after the other, while it is shown.
function useFrames(act) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    let id = requestAnimationFrame(function frame(now) { latest.current(now); id = requestAnimationFrame(frame); });
    return () => cancelAnimationFrame(id);
  }, []);
}

function App() {
  const link = useRef(null);
  link.current ||= fromLink();
  const [form, setForm] = useState(link.current.form);
  const [view, setView] = useState(link.current.view);
  const [models, setModels] = useState([]);
  const [error, setError] = useState(null);
  const [key, setKey] = useState(sessionStorage.getItem("specbeam-key") || "");
  const [needsKey, setNeedsKey] = useState(false);
  const [says, setSays] = useState("");
  const [isCopied, setCopied] = useState(false);
  const shared = useRef({ tree: null, branches: [], race: null, chat: [] }).current;
  const redraw = useRedraw();

  useEffect(() => {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    fetch("v1/models", { headers }).then(async (response) => {
      if (response.status === 401) { setNeedsKey(true); return; }
      if (!response.ok) throw new Error((await errorOf(response)).message);
      const { data } = await response.json();
      setNeedsKey(false);
      setModels(data);
      setForm((form) => {
        const model = data.find((one) => one.id === form.model) || data[0];
        const draft = model.drafts.includes(form.draft) ? form.draft : model.drafts.includes("ngram") ? "ngram" : model.drafts[0];
        return { ...form, model: model.id, draft, as: model.has_chat_template ? form.as : "raw" };
      });
    }).catch((error) => setError({ message: error.message }));
  }, [key]);
  useEffect(() => { // when one has typed: browsers limit how often the address changes
    const id = setTimeout(() => history.replaceState(null, "", toLink(form, view)), ADDRESS_REST);
    return () => clearTimeout(id);
  }, [form, view]);
  useEffect(() => {
    const changed = () => { const { form: given, view } = fromLink(); setForm((form) => ({ ...given, model: given.model || form.model, draft: given.draft || form.draft })); setView(view); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);

  const model = models.find((one) => one.id === form.model);
  const set = (name, value) => { setForm((form) => ({ ...form, [name]: value })); setError(null); };

  // Start a run. Returns it with a promise of its end, and a way to stop it.
  function start(path, body) {
    const run = new Run(), stopper = new AbortController();
    run.stop = () => stopper.abort();
    run.done = stream(path, body, key, stopper.signal, (event) => run.push(event)).catch((error) => {
      if (error.name === "AbortError") { run.isStopped = true; return; }
      if (error instanceof Refusal && error.status === 401) setNeedsKey(true);
      run.error = { message: error instanceof Refusal ? error.message : `the connection to the server ended: ${error.message}`, param: error.param };
    }).then(() => {
      run.isLive = false;
      run.version++;
      if (run.error) setError(run.error);
      redraw();
    });
    setError(null);
    if (innerWidth <= 900) document.querySelector(".panel")?.scrollIntoView({ block: "start" });
    return run;
  }

  const copyLink = async () => {
    history.replaceState(null, "", toLink(form, view));
    try {
      await navigator.clipboard.writeText(location.href);
      setCopied(true);
      setTimeout(() => setCopied(false), 2000);
      setSays("The link is copied. It holds the prompt and the options.");
    } catch { setSays("Copy the address of this page: it holds the prompt and the options."); }
  };

  const common = { form, set, setForm, model, models, start, shared, redraw, setError, setSays, setView };
  const Current = { tree: TreePage, race: RacePage, branch: BranchPage, chat: ChatPage }[view];
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the picture</a>
    <header class="top">
      <h1><img src="page/icon.svg" alt="" width="26" height="26" /> specbeam</h1>
      <nav aria-label="Views">${VIEWS.map(([name, title]) => html`<button key=${name} class="tab" aria-current=${view === name ? "page" : null} onClick=${() => setView(name)}>${title}</button>`)}</nav>
      <button class="quiet" onClick=${copyLink} title="The link holds the prompt and the options">${isCopied ? "Copied ✓" : "Copy link"}</button>
    </header>
    <main id="main" tabindex="-1">
      ${error && !error.param && html`<p class="error" role="alert">${error.message}</p>`}
      ${needsKey ? html`<${KeyForm} setKey=${(key) => { sessionStorage.setItem("specbeam-key", key); setKey(key); }} wrong=${Boolean(key)} />` : html`<${Current} ...${common} error=${error} />`}
    </main>
    <p class="says" role="status">${says}</p>`;
}

function KeyForm({ setKey, wrong }) {
  return html`<form class="card key" onSubmit=${(e) => { e.preventDefault(); setKey(new FormData(e.target).get("key")); }}>
    <h2>This server asks for a key</h2>
    <label for="key">API key</label>
    <input id="key" name="key" type="password" autocomplete="off" required aria-invalid=${wrong} aria-describedby="key-help" />
    <p id="key-help" class=${wrong ? "wrong" : "help"}>${wrong ? "The key was wrong." : "It is kept until this tab is closed, and sent to this server only."}</p>
    <button class="go">Use this key</button>
  </form>`;
}

// Controls

function Controls({ form, set, setForm, model, models, error, onGo, run, go, children, fields = FIELDS }) {
  const ofPrompt = error && ["prompt", "messages"].includes(error.param) ? error.message : null;
  const known = [...fields.map((field) => field.name), "prompt", "messages"];
  return html`<form class="controls" aria-label="Options" onSubmit=${(e) => { e.preventDefault(); onGo(form); }}>
    <section class="presets" aria-label="Examples">${PRESETS.map((preset) => html`<button type="button" key=${preset.title} class="preset" title=${preset.about} onClick=${() => {
      const { title, about, ...given } = preset;
      const next = { ...START, model: form.model, ...given };
      setForm(next);
      onGo(next);
    }}><strong>${preset.title}</strong><span>${preset.about}</span></button>`)}</section>
    ${children}
    <div class="field wide">
      <label for="prompt">Prompt</label>
      <textarea id="prompt" rows="4" value=${form.prompt} aria-invalid=${Boolean(ofPrompt)} aria-describedby="prompt-help" onInput=${(e) => set("prompt", e.target.value)}
        onKeyDown=${(e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); onGo(form); } }}></textarea>
      <p id="prompt-help" class=${ofPrompt ? "wrong" : "help"}>${ofPrompt || "Ctrl and Enter start it."}</p>
    </div>
    <fieldset class="as"><legend>Read the prompt as</legend>
      <label><input type="radio" name="as" checked=${form.as === "chat"} disabled=${model && !model.has_chat_template} onChange=${() => set("as", "chat")} /> a message</label>
      <label><input type="radio" name="as" checked=${form.as === "raw"} onChange=${() => set("as", "raw")} /> a text to go on from</label>
    </fieldset>
    <div>${run && run.isLive
      ? html`<button key="stop" type="button" class="go stop" onClick=${() => run.stop()}>Stop</button>`
      : html`<button key="go" class="go" disabled=${!model || !form.prompt}>${go}</button>`}</div>
    ${error && error.param && !known.includes(error.param) && html`<p class="wrong" role="alert">${error.param}: ${error.message}</p>`}
    <${Options} ...${{ fields, form, set, model, models, error }} />
  </form>`;
}

function Options({ fields = FIELDS, form, set, model, models, error }) {
  const one = (field) => html`<${Field} key=${field.name} field=${field} value=${form[field.name]} set=${set} error=${error?.param === field.name ? error.message : null}
    choices=${field.name === "model" ? models.map((one) => one.id) : field.name === "draft" && model ? model.drafts : []}
    off=${field.needs === "draft" && (form.draft === "none" || !form.draft)} />`;
  return html`<div class="fields">${fields.filter((field) => !field.more).map(one)}</div>
    <details class="more" open=${hasMore(form, error) || undefined}><summary>More options</summary><div class="fields">${fields.filter((field) => field.more).map(one)}</div></details>`;
}

// Whether an option that is not shown at first has an effect, or is refused.
const hasMore = (form, error) => FIELDS.some(({ name, more }) => more && (error?.param === name || String(form[name]) !== String(START[name])));

function Field({ field, value, set, error, choices, off }) {
  const { name, label, kind, help, least, most, step, wide } = field, id = `field-${name}`;
  const about = { id, disabled: off, "aria-describedby": `${id}-help`, "aria-invalid": Boolean(error) };
  return html`<div class=${`field ${wide ? "wide" : ""} ${off ? "off" : ""}`}>
    <label for=${id}>${label}</label>
    ${kind === "lines" ? html`<textarea ...${about} rows="3" value=${value} onInput=${(e) => set(name, e.target.value)}></textarea>` : kind === "choice"
      ? html`<select ...${about} value=${value} onChange=${(e) => set(name, e.target.value)}>${choices.map((choice) => html`<option key=${choice} value=${choice} selected=${choice === value}>${choice}</option>`)}</select>`
      : html`<input ...${about} type=${kind === "text" ? "text" : "number"} min=${least} max=${most} step=${step} placeholder=${kind === "auto" ? "auto" : ""} value=${value} onInput=${(e) => set(name, e.target.value)} />`}
    <p id=${`${id}-help`} class=${error ? "wrong" : "help"} role=${error ? "alert" : null}>${error || help}</p>
  </div>`;
}

// Tree

function TreePage(all) {
  const { shared, start, redraw, setError, setSays } = all;
  const onGo = (form) => {
    if (shared.tree) shared.tree.stop?.();
    shared.tree = start(...requestOf(form));
    setSays("The search has begun.");
    redraw();
  };
  const open = async (e) => {
    const [file] = e.target.files;
    e.target.value = "";
    if (!file) return;
    try { shared.tree = recordingOf(await file.text()); setError(null); redraw(); } catch (error) { setError({ message: `${file.name} cannot be replayed: ${error.message}` }); }
  };
  return html`<div class="split">
    <${Controls} ...${all} onGo=${onGo} run=${shared.tree} go="Grow the tree">
      <label class="file"><input type="file" accept=".jsonl" onChange=${open} /><span>Replay a recording…</span></label>
    <//>
    <${TreePanel} ...${all} run=${shared.tree} onBranch=${branchFrom(all)} />
  </div>`;
}

// Go on from a token of a run, or from another token in its place.
// Where only some answers are allowed, what is left of them is allowed.
const branchFrom = ({ form, shared, start, setView, redraw, setSays }) => (run, node, token) => {
  const before = run.pathTo(node).map((one) => one.token);
  if (token !== undefined) before[before.length - 1] = token;
  const text = token === undefined ? node.text : textOfToken(run, node, token);
  const said = [...run.pathTo(node.parent).map((one) => one.text), text].join("");
  const left = linesOf(form.structured_outputs).filter((line) => line.startsWith(said)).map((line) => line.slice(said.length));
  const next = start(...requestOf({ ...form, model: run.begin.model, prompt: "", structured_outputs: left.join("\n") }, [...run.promptIds, ...before]));
  next.from = { run, node, token, text };
  if (!shared.branches.includes(run)) shared.branches.push(run);
  shared.branches.push(next);
  shared.branch = next;
  setSays("The text goes on from there.");
  setView("branch");
  redraw();
};

const textOfToken = (run, node, token) => (run.likeliest.get(node.parent.id) || []).find((one) => one.token_id === token)?.text || "";

function TreePanel({ run, onBranch, setSays, setError }) {
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
  const toggle = () => { view.current.collapses = !isCollapsed(); setCollapses(view.current.collapses); view.current.follows = true; view.current.draw(); };
  const focus = selected || hovered?.node;
  return html`<section class="panel" aria-label="The tree">
    <${Numbers} run=${run} />
    <div class="agreed" role="region" tabindex="0" aria-label="The text so far"><${Agreed} run=${run} /></div>
    <div class="stage">
      <div class="canvas" ref=${box} tabindex="0" role="application" aria-label="Tree of the search. Arrow keys go from token to token, plus and minus zoom, 0 shows all. The text view below has the same facts."></div>
      ${!run && html`<div class="empty"><p>Beams grow here.</p><p>Take an example, or write a prompt.</p></div>`}
      ${run && !run.phases.length && run.isLive && html`<div class="empty"><p>The model prefills the prompt.</p></div>`}
      ${hovered && !selected && html`<${Tip} run=${run} hovered=${hovered} box=${box.current} />`}
      ${selected && html`<${Details} run=${run} node=${selected} onBranch=${onBranch} close=${() => view.current.select(null)} />`}
    </div>
    <${Legend} run=${run} />
    <${Player} run=${run} player=${player} speed=${speed} setSpeed=${(value) => { setSpeed(value); if (player) player.speed = value; }} redraw=${redraw} view=${view} isCollapsed=${isCollapsed()} toggle=${toggle} setError=${setError} />
    <${AsText} run=${run} />
  </section>`;
}

function Numbers({ run }) {
  const passes = run ? run.targetPasses : 0;
  const cells = [
    ["tokens/s", run && run.tokensPerSecond ? run.tokensPerSecond.toFixed(1) : "–", "Steps per second, after the prefill"],
    ["passes", run ? `${passes}${run.draftPasses ? ` + ${run.draftPasses}` : ""}` : "–", "Passes of the model, and of a draft model"],
    ["steps per pass", passes ? (run.length / passes).toFixed(2) : "–", "1 without a draft"],
    ["draft tokens accepted", run && run.drafted ? `${run.accepted} of ${run.drafted}` : "–", "Each accepted draft token saves work of a pass"],
    ...(run && run.evaluatedShare ? [["beams evaluated", `${Math.round(100 * run.evaluatedShare)} %`, "The other beams cannot matter, or not yet"]] : []),
  ];
  return html`<dl class="numbers">${cells.map(([name, value, help]) => html`<div key=${name} title=${help}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Agreed({ run }) {
  if (!run || !run.begin) return null;
  const text = run.isWhole ? run.end.sequences[0].text : run.text;
  return html`<p><span class="prompt">${run.promptText}</span><span class="certain">${text}</span><span class="open">${run.openText}</span></p>`;
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
    <button disabled=${!run || !most} onClick=${() => { if (player.isAtEnd) run.seek(0); player.isPlaying = !isPlaying; view.current.follows = true; redraw(); }}>${isPlaying ? "Pause" : player?.isAtEnd && !run?.isLive ? "Replay" : "Play"}</button>
    <button disabled=${!most} aria-label="One step back" onClick=${() => go(run.at - 1)}>◂</button>
    <button disabled=${!most} aria-label="One step on" onClick=${() => go(run.at + 1)}>▸</button>
    <input type="range" min="0" max=${most} value=${run ? run.at : 0} disabled=${!most} aria-label="Place in the run" onInput=${(e) => go(Number(e.target.value))} />
    <label class="inline">Speed <select value=${String(speed)} onChange=${(e) => setSpeed(Number(e.target.value))}>${[["0.25", "¼"], ["1", "1"], ["4", "4"], ["Infinity", "all"]].map(([value, name]) => html`<option key=${value} value=${value} selected=${value === String(speed)}>${name}</option>`)}</select></label>
    <span class="gap"></span>
    <button disabled=${!run} aria-pressed=${isCollapsed} onClick=${toggle} title="The tokens that all beams share are left out of the tree. The text above has them.">Hide agreed</button>
    <button disabled=${!run} aria-label="Zoom out" onClick=${() => view.current.zoom(0.7)}>−</button>
    <button disabled=${!run} aria-label="Zoom in" onClick=${() => view.current.zoom(1.4)}>+</button>
    <button disabled=${!run} onClick=${() => view.current.fit()}>Fit</button>
    <button disabled=${!run?.end} onClick=${() => save(run.lines, "specbeam-run.jsonl", "application/jsonl")} title="A file that this page replays without a model">Save</button>
    ${!recording && html`<button disabled=${!run?.end} onClick=${savePage} title="A file that shows this run in any browser, without a server">Save page</button>`}
  </div>`;
}

function Tip({ run, hovered: { node, x, y }, box }) {
  const left = x > box.clientWidth - TIP_WIDTH - 24 ? x - TIP_WIDTH - 16 : x + 16, top = Math.max(4, Math.min(y + 16, box.clientHeight - TIP_HEIGHT));
  return html`<div class="tip" style=${{ left: `${left}px`, top: `${top}px` }}><${Facts} run=${run} node=${node} /></div>`;
}

function Facts({ run, node, choose }) {
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
function AsText({ run }) {
  const [isOpen, setOpen] = useState(false);
  if (!run || !run.begin) return null;
  const rounds = isOpen ? run.events.filter((event) => event.event === "round").slice(0, run.rounds) : [];
  const text = (entry) => `“${shown(entry.text)}”`;
  const scored = (beam) => `${text(beam)} ${percent(beam.log_prob)}, score ${beam.score.toFixed(3)}`;
  const isDeferred = (beam) => { const node = run.nodes.get(beam.node); return node && run.isDeferred(node); };
  return html`<details class="as-text" onToggle=${(e) => setOpen(e.target.open)}><summary>The same as text</summary>
    ${isOpen && html`<ol class="rounds" tabindex="0" aria-label="Rounds">${rounds.map((one, i) => html`<li key=${i}>
      ${one.drafted.length > 0 && html`<p>Drafted: ${one.drafted.map((token, j) => { const node = run.nodes.get(token.node); return html`<span key=${j} class=${node?.isAccepted ? "accepted" : "rejected"}>${text(token)} (${node?.isAccepted ? "accepted" : "rejected"})${j < one.drafted.length - 1 ? ", " : "."}</span>`; })}</p>`}
      ${one.steps.map(possible).map((step, k) => html`<p key=${k}>${step.length > 1 ? "Beams: " : "Token: "}${step.map((beam, j) => html`<span key=${j}>${scored(beam)}${isDeferred(beam) ? ", not evaluated" : ""}${j < step.length - 1 ? "; " : "."}</span>`)}</p>`)}
      ${one.ahead.length > 0 && html`<p>Ahead of the steps that are certain: ${possible(one.ahead).map(scored).join("; ")}.</p>`}
      ${maskedOf(one).length > 0 && html`<p>Masked by the constraint: ${maskedOf(one).map((token) => `${text(token)} ${percent(token.log_prob)}`).join("; ")}.</p>`}
      ${one.text && html`<p>Certain now: ${text(one)}.</p>`}
    </li>`)}</ol>
    ${run.end && html`<h3>Texts</h3><ol>${run.end.sequences.map((one, i) => html`<li key=${i}>${one.text} <small>score ${one.score.toFixed(4)}, log-probability ${one.log_prob.toFixed(4)}, ${one.finish_reason}</small></li>`)}</ol>`}`}
  </details>`;
}

// Race

function RacePage(all) {
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
    const race = (shared.race = { kind, runs: [], sides, names: kind === "draft" ? ["Plain", `With draft ${strategy.draft}`] : ["Greedy", `${strategy.num_beams} beams`] });
    for (const side of sides) {
      const run = start(...requestOf(side));
      race.runs.push(run);
      redraw();
      await run.done;
      if (run.error || run.isStopped || shared.race !== race) return;
    }
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
  const live = race && race.runs.find((run) => run.isLive);
  const most = race ? Math.max(1, ...race.runs.map((run) => run.targetPasses)) : 1;
  return html`<div class="split">
    <${Controls} ...${all} onGo=${onGo} run=${live} go="Race" fields=${FIELDS.filter(({ name }) => !["n", "length_penalty"].includes(name))}>
      <fieldset class="as"><legend>Race</legend>
        <label><input type="radio" name="kind" checked=${kind === "draft"} onChange=${() => setKind("draft")} /> plain against drafted</label>
        <label><input type="radio" name="kind" checked=${kind === "beams"} onChange=${() => setKind("beams")} /> greedy against beams</label>
      </fieldset>
    <//>
    <section class="panel" aria-label="The race">
      <p class="intro">Each runs alone on the engine, one after the other, so no time is shared. Then both can be replayed side by side by their measured times.</p>
      <div class="lanes">${[0, 1].map((i) => html`<${Lane} key=${i} name=${race ? race.names[i] : i ? "With draft" : "Plain"} run=${race?.runs[i]} most=${most} />`)}</div>
      ${race?.verdict && html`<div class=${`verdict ${race.verdict[0]}`} role="status"><p>${race.verdict[1]}</p><button onClick=${replay} disabled=${clock !== null}>Replay both together</button></div>`}
      ${race?.runs.map((run, i) => html`<div key=${i}><h3 class="small">${race.names[i]}</h3><${AsText} run=${run} /></div>`)}
    </section>
  </div>`;
}

function Lane({ name, run, most }) {
  const path = run ? run.bestPath : [];
  let round = -1, stripe = false;
  return html`<article class="lane" aria-label=${name}>
    <h2>${name}</h2>
    <${Numbers} run=${run} />
    <div class="bar" aria-hidden="true"><i style=${{ width: `${run ? (100 * run.targetPasses) / most : 0}%` }}></i></div>
    <p class="raced">${path.map((node) => {
      if (node.round !== round && !node.isAccepted) { round = node.round; stripe = !stripe; }
      return html`<span key=${node.id} class=${`${node.isAccepted ? "accepted" : ""} ${stripe ? "odd" : ""}`}>${node.text}</span>`;
    })}</p>
  </article>`;
}

function verdict({ runs: [a, b], kind }) {
  const [x, y] = [a, b].map((run) => run.end.sequences[0].token_ids);
  const differs = x.findIndex((token, i) => token !== y[i]);
  const speed = decodeSpeed(b) / decodeSpeed(a);
  const faster = Number.isFinite(speed) && speed > 0 ? ` ${b.end.stats.target_passes} passes instead of ${a.end.stats.target_passes}, ${speed.toFixed(2)} times the speed.` : "";
  if (differs < 0 && x.length === y.length) return ["same", `Same text: all ${x.length} tokens are equal.${faster}`];
  const place = differs < 0 ? Math.min(x.length, y.length) : differs;
  if (kind === "beams") {
    const [p, q] = [a, b].map((run) => run.end.sequences[0].log_prob);
    return ["other", `Other texts, from token ${place + 1} on. Log-probabilities: greedy ${p.toFixed(3)}, beams ${q.toFixed(3)}.`];
  }
  return ["wrong", `The texts differ from token ${place + 1} on. That must not happen: please report it.`];
}

const decodeSpeed = ({ end: { stats } }) => (stats.new_tokens - 1) / (stats.seconds - stats.time_to_first_token);

// Branch

function BranchPage(all) {
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
        <p class="story"><span class="prompt">${run.promptText}</span>${path.map((node) => html`<span key=${node.id}>${node.text.trim() && node.text.match(/^\s*/)[0]}<button class=${`word ${node === selected ? "selected" : ""} ${node.isAccepted ? "accepted" : ""}`} disabled=${run.isLive} aria-pressed=${node === selected} title=${node.logProb === null ? "" : percent(node.logProb)} onClick=${() => choose(node === selected ? null : node)}>${node.text.trimStart() || shown(node.text)}</button>${node.text.trim() ? "" : node.text}</span>`)}</p>
        ${run.end && html`<p class="help">${reused ? `${reused} of ${run.end.stats.prompt_tokens} tokens before the new text were cached.` : `The prompt of ${run.end.stats.prompt_tokens} tokens was prefilled.`} The new text took ${run.end.stats.target_passes} passes.</p>`}
      </div>`}
      ${!run && html`<div class="empty inline"><p>Write something first.</p></div>`}
      ${selected && html`<div class="card"><${Facts} run=${run} node=${selected} choose=${(token) => goOn(run, selected, token)} /><button class="go" onClick=${() => goOn(run, selected)}>Go on after this token</button></div>`}
      ${shared.branches.length > 1 && html`<h3 class="small">Branches</h3><ol class="branches">${shared.branches.map((one, i) => html`<li key=${i}><button aria-pressed=${one === run} onClick=${() => { shared.branch = one; choose(null); redraw(); }}>
        ${one.from ? html`<span class="at">${shared.branches.indexOf(one.from.run) + 1} › “${shown(one.from.text)}”</span>` : html`<span class="at">first text</span>`}
        <span class="snippet">${one.end ? one.end.sequences[0].text : one.text}</span></button></li>`)}</ol>`}
      <${AsText} run=${run} />
    </section>
  </div>`;
}

// Chat

function ChatPage(all) {
  const { form, model, shared, start, redraw, setSays } = all;
  const [draft, setDraft] = useState("");
  const [editing, setEditing] = useState(null);
  const [shownTree, showTree] = useState(null);
  const end = useRef(null);
  const { chat } = shared;
  const last = chat.at(-1);
  const live = last?.run?.isLive ? last.run : null;
  useFrames(() => { if (last?.run && shownTree !== last.run && last.run.catchUp()) redraw(); });
  const textOf = (message) => message.run ? (message.run.end ? message.run.end.sequences[0].text : message.run.events.map((event) => event.text || "").join("")) : message.content;
  const answer = () => {
    const messages = chat.map((message) => ({ role: message.role, content: textOf(message) }));
    const run = start("rounds/chat", { ...bodyOf(form), messages, logprobs: true, top_logprobs: LIKELIEST });
    chat.push({ role: "assistant", run });
    run.done.then(() => setSays(run.error ? "" : "The answer is there."));
    redraw();
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "end" }));
  };
  const send = (e) => {
    e.preventDefault();
    if (!draft.trim() || live) return;
    if (editing !== null) chat.length = editing;
    chat.push({ role: "user", content: draft });
    setDraft("");
    setEditing(null);
    answer();
  };
  const again = () => { chat.pop(); answer(); };
  if (model && !model.has_chat_template) return html`<p class="intro">The model ${model.id} has no chat template. The other views go on from a text.</p>`;
  return html`<div class="split">
    <form class="controls" aria-label="Options" onSubmit=${(e) => e.preventDefault()}><${Options} ...${all} /></form>
    <section class="panel" aria-label="Conversation">
      <ol class="messages" aria-live="polite">${chat.map((message, i) => html`<li key=${i} class=${message.role}>
        <p class="who">${message.role === "user" ? "You" : message.run.begin?.model || form.model}</p>
        <p class="said">${textOf(message)}${message.run?.isLive && html`<span class="open">${message.run.openText}</span><span class="caret" aria-hidden="true"></span>`}</p>
        ${message.run?.error && html`<p class="wrong" role="alert">${message.run.error.message}</p>`}
        <p class="acts">
          ${message.role === "user" && !live && html`<button class="quiet" onClick=${() => { setEditing(i); setDraft(message.content); document.getElementById("message").focus(); }}>Edit</button>`}
          ${message.run && message.run === last.run && !live && html`<button class="quiet" onClick=${again}>Regenerate</button>`}
          ${message.run && message.run.phases.length > 0 && html`<button class="quiet" aria-expanded=${shownTree === message.run} onClick=${() => showTree(shownTree === message.run ? null : message.run)}>How was this made?</button>`}
          ${message.run?.end && html`<small>${message.run.end.stats.new_tokens} tokens in ${message.run.end.stats.target_passes} passes${message.run.end.stats.drafted ? `, ${message.run.end.stats.accepted} of ${message.run.end.stats.drafted} draft tokens accepted` : ""}</small>`}
        </p>
        ${shownTree === message.run && message.run && html`<${TreePanel} run=${message.run} onBranch=${branchFrom(all)} setSays=${setSays} setError=${all.setError} />`}
      </li>`)}</ol>
      ${!chat.length && html`<div class="empty inline"><p>Say something to ${form.model}.</p><p>Every answer can show how it was made.</p></div>`}
      <form class="composer" ref=${end} onSubmit=${send}>
        <label for="message" class="hidden">Message</label>
        <textarea id="message" rows="2" placeholder=${editing === null ? "A message" : "The changed message. What follows it is written anew."} value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter" && !e.shiftKey) send(e); }}></textarea>
        ${live ? html`<button key="stop" type="button" class="go stop" onClick=${() => live.stop()}>Stop</button>` : html`<button key="go" class="go" disabled=${!draft.trim() || !model}>${editing === null ? "Send" : "Send again"}</button>`}
      </form>
    </section>
  </div>`;
}

// A page that holds a recording. No server answers it, so no text goes on from a token.
function Recorded({ run }) {
  const [says, setSays] = useState("");
  const { model, draft, options } = run.begin;
  const about = [model, run.width > 1 ? `${run.width} beams` : options.do_sample ? "sampling" : "greedy search", draft && draft !== "none" ? `draft ${draft}` : "no draft"];
  return html`
    <header class="top"><h1>specbeam</h1><p class="about">${about.join(", ")}</p></header>
    <main id="main"><${TreePanel} run=${run} setSays=${setSays} /></main>
    <p class="says" role="status">${says}</p>`;
}

render(recording ? html`<${Recorded} run=${recordingOf(recording.textContent)} />` : html`<${App} />`, document.getElementById("app"));
