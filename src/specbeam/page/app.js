import { BranchPage, branchFrom } from "./branch.js";
import { ChatPage } from "./chat.js";
import { useRedraw } from "./hooks.js";
import { TOUR_MS } from "./narration.js";
import { CHAT_START, Controls, Options, START, fromLink, requestOf, toLink } from "./options.js";
import { TreePanel } from "./panel.js";
import { Keys, usePresentation } from "./presentation.js";
import { RacePage } from "./race.js";
import { Refusal, Run, errorOf, pace, recordingOf, stream } from "./run.js";
import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";


const VIEWS = [["tree", "Tree"], ["race", "Race"], ["branch", "Branch"], ["chat", "Chat"]];
const VIEW_NAMES = VIEWS.map(([name]) => name);
const ADDRESS_REST = 300; // ms
const recording = document.getElementById("recording"); // in a page that replays one run
const wantsNoMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function App() {
  const link = useRef(null);
  link.current ||= fromLink(VIEW_NAMES);
  const [view, setView] = useState(link.current.view);
  const ofChat = useState(view === "chat" ? link.current.form : CHAT_START), ofRuns = useState(view === "chat" ? START : link.current.form);
  const [form, setForm] = view === "chat" ? ofChat : ofRuns; // the chat has settings of its own
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
      for (const [, setForm] of [ofChat, ofRuns]) setForm((form) => {
        const model = data.find((one) => one.id === form.model) || data[0];
        const draft = model.drafts.includes(form.draft) ? form.draft : model.drafts.includes("ngram") ? "ngram" : model.drafts[0];
        return { ...form, model: model.id, draft, ...("as" in form && !model.has_chat_template ? { as: "raw" } : {}) };
      });
    }).catch((error) => setError({ message: error.message }));
  }, [key]);
  useEffect(() => { // when one has typed: browsers limit how often the address changes
    const id = setTimeout(() => history.replaceState(null, "", toLink(form, view)), ADDRESS_REST);
    return () => clearTimeout(id);
  }, [form, view]);
  useEffect(() => {
    const changed = () => { const { form: given, view } = fromLink(VIEW_NAMES); (view === "chat" ? ofChat : ofRuns)[1]((form) => ({ ...given, model: given.model || form.model, draft: given.draft || form.draft })); setView(view); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);

  useEffect(() => { // an empty page begins with a recorded run
    if (view !== "tree" || form.prompt) return;
    fetch("page/tour.jsonl").then((response) => (response.ok ? response.text() : Promise.reject())).then((text) => {
      if (shared.tree) return;
      const run = (shared.tree = pace(recordingOf(text), TOUR_MS));
      if (wantsNoMotion()) { run.isStill = true; run.seek(run.phases.length); }
      redraw();
    }).catch(() => null); // then the page is empty
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

  const presentation = usePresentation();
  const common = { form, set, setForm, model, models, start, shared, redraw, setError, setSays, setView };
  const Current = { tree: TreePage, race: RacePage, branch: BranchPage, chat: ChatPage }[view];
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the picture</a>
    <header class="top">
      <h1><img src="page/icon.svg" alt="" width="26" height="26" /> specbeam</h1>
      <nav aria-label="Views">${VIEWS.map(([name, title]) => html`<button key=${name} class="tab" aria-current=${view === name ? "page" : null} onClick=${() => setView(name)}>${title}</button>`)}</nav>
      <button class="quiet" aria-pressed=${presentation.isOn} onClick=${presentation.toggle} title="Large type, the full screen, and keys">Present</button>
      <button class="quiet" onClick=${presentation.showKeys} aria-label="Keys" title="The keys of this page">?</button>
      <button class="quiet" onClick=${copyLink} title="The link holds the prompt and the options">${isCopied ? "Copied ✓" : "Copy link"}</button>
    </header>
    <main id="main" tabindex="-1">
      ${error && !error.param && html`<p class="error" role="alert">${error.message}</p>`}
      ${needsKey ? html`<${KeyForm} setKey=${(key) => { sessionStorage.setItem("specbeam-key", key); setKey(key); }} wrong=${Boolean(key)} />` : html`<${Current} ...${common} error=${error} />`}
    </main>
    <${Keys} presentation=${presentation} />
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
  const onTurn = (isAsked) => { // nobody's focus is taken
    if (isAsked || document.activeElement === document.body && matchMedia("(hover: hover)").matches) document.getElementById("prompt").focus({ preventScroll: !isAsked });
  };
  return html`<div class="split">
    <${Controls} ...${all} onGo=${onGo} run=${shared.tree} go="Grow the tree" below=${html`<label class="file"><input type="file" accept=".jsonl" onChange=${open} /><span>Replay a recording…</span></label>`} />
    <${TreePanel} ...${all} run=${shared.tree} onTurn=${onTurn} onBranch=${branchFrom(all)} />
    <${Options} ...${all} />
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
