// The options of a run: their fields, the request that they make, and the link that holds them.

import { OPTIONS } from "./declared.js";
import { EXAMPLES } from "./examples.js";
import { html } from "./vendor/preact.js";

export const FIELDS = [
  { name: "model", label: "Model", kind: "choice", wide: true, help: "The model that decides every token.", chat: {} },
  { name: "draft", label: "Draft", kind: "choice", help: "Proposes tokens ahead. It saves passes and changes no text.", chat: {} },
  ...OPTIONS,
  { name: "structured_outputs", label: "Only these answers", kind: "lines", wide: true, help: "One per line: the text is one of them. Begin each with a space if it goes on from a text.", more: true },
  { name: "schema", label: "JSON schema", kind: "schema", wide: true, help: "The text is JSON that is valid by it. The model does not see it, so say in the prompt what you want.", beside: true },
];
// The chat has settings of its own. What is empty is left to the server.
export const CHAT_FIELDS = FIELDS.filter(({ chat }) => chat).map((field) => ({ ...field, ...field.chat }));
export const needs = (field, ...things) => (field.needs || []).some((need) => things.includes(need));
const startOf = (fields) => Object.fromEntries(fields.map((field) => [field.name, field.start ?? ""]));
export const START = { ...startOf(FIELDS), prompt: "", as: "chat" };
export const CHAT_START = startOf(CHAT_FIELDS);
export const LIKELIEST = 10;
export const linesOf = (text) => (text || "").split("\n").filter((line) => line.trim());
export const CONTROLS = "controls"; // the form that the options belong to, wherever they stand

const hasDraft = (form) => Boolean(form.draft) && form.draft !== "none";
const startIn = (view) => (view === "chat" ? CHAT_START : START);

// A view and its form from the address.
export function fromLink(views) {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const view = views.includes(given.view) ? given.view : "tree", form = { ...startIn(view) };
  for (const name of Object.keys(form)) if (name in given) form[name] = given[name];
  return { form, view };
}

export function toLink(form, view) {
  const kept = Object.entries(form).filter(([name, value]) => String(value) !== String(startIn(view)[name]));
  return "#" + new URLSearchParams([["view", view], ...kept]);
}

// The body of a request. Fields that are empty are left out.
export function bodyOf(form) {
  const body = {};
  for (const { name, kind } of FIELDS) {
    const value = form[name];
    if (value === "" || value === null || value === undefined) continue;
    if (kind === "lines") { if (linesOf(value).length) body[name] = { choice: linesOf(value) }; continue; }
    if (kind === "schema") { if (value.trim()) body.structured_outputs = { ...body.structured_outputs, json: value }; continue; }
    body[name] = kind === "number" || kind === "auto" ? Number(value) : value;
  }
  const missing = [...(body.num_beams === 1 ? ["beams", "several"] : []), ...(hasDraft(body) ? [] : ["draft"])];
  for (const field of FIELDS) if (needs(field, ...missing)) delete body[field.name];
  if (body.temperature === 0 || body.num_beams) delete body.seed;
  return body;
}

// The path and the body of a request. A search says its temperature, since a server may draw texts where none is given.
export function requestOf(form, ids = null) {
  const body = "num_beams" in form ? { temperature: 0, ...bodyOf(form) } : bodyOf(form);
  if (ids || form.as === "raw") return ["rounds/completions", { ...body, prompt: ids || form.prompt, logprobs: LIKELIEST }];
  return ["rounds/chat", { ...body, messages: [{ role: "user", content: form.prompt }], logprobs: true, top_logprobs: LIKELIEST }];
}

// The prompt, the button, and the examples. The options are beside the picture.
export function Controls({ form, set, setForm, model, error, onGo, run, go, children, below, fields = FIELDS }) {
  const ofPrompt = error && ["prompt", "messages"].includes(error.param) ? error.message : null;
  const known = ["structured_outputs", ...fields.map((field) => field.name), "prompt", "messages"];
  const take = ({ title, about, ...given }) => {
    const next = { ...START, model: form.model, ...given };
    setForm(next);
    onGo(next);
  };
  return html`<form class="controls" id=${CONTROLS} aria-label="What to write" onSubmit=${(e) => { e.preventDefault(); onGo(form); }}>
    <div class="field">
      <label for="prompt">Prompt</label>
      <textarea id="prompt" rows="4" value=${form.prompt} placeholder="Write a prompt, or take an example." aria-invalid=${Boolean(ofPrompt)} aria-describedby="prompt-help" onInput=${(e) => set("prompt", e.target.value)}
        onKeyDown=${(e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); onGo(form); } }}></textarea>
      <p id="prompt-help" class=${ofPrompt ? "wrong" : "help"}>${ofPrompt || "Ctrl and Enter start it."}</p>
    </div>
    <fieldset class="as"><legend>Read the prompt as</legend>
      <label><input type="radio" name="as" checked=${form.as === "chat"} disabled=${model && !model.has_chat_template} onChange=${() => set("as", "chat")} /> a message</label>
      <label><input type="radio" name="as" checked=${form.as === "raw"} onChange=${() => set("as", "raw")} /> a text to go on from</label>
    </fieldset>
    ${fields.filter((field) => field.beside).map((field) => html`<details key=${field.name} class="beside" open=${form[field.name] !== "" || undefined}><summary>${field.label}</summary>
      <${Field} field=${field} value=${form[field.name]} set=${set} error=${ofField(error, field, form)} choices=${[]} /></details>`)}
    ${children}
    <div>${run && run.isLive
      ? html`<button key="stop" type="button" class="go stop" onClick=${() => run.stop()}>Stop</button>`
      : html`<button key="go" class="go" disabled=${!model || !form.prompt}>${go}</button>`}</div>
    ${error && error.param && !known.includes(error.param) && html`<p class="wrong" role="alert">${error.param}: ${error.message}</p>`}
    <section class="examples" aria-label="Examples"><h2 class="small">Examples</h2>${EXAMPLES.map((example) => html`<button type="button" key=${example.title} class="example" disabled=${!model} onClick=${() => take(example)}><strong>${example.title}</strong><span>${example.about}</span></button>`)}</section>
    ${below}
  </form>`;
}

export function Options({ fields = FIELDS, form, set, model, models, error }) {
  const one = (field) => html`<${Field} key=${field.name} field=${field} value=${form[field.name]} set=${set} error=${ofField(error, field, form)}
    choices=${field.name === "model" ? models.map((one) => one.id) : field.name === "draft" && model ? model.drafts : []}
    off=${needs(field, "draft") && !hasDraft(form)} />`;
  return html`<section class="options" aria-label="Options"><div class="fields">${fields.filter((field) => !field.more && !field.beside).map(one)}</div>
    <details class="more" open=${fields.some((field) => isUsed(field, form, error)) || undefined}><summary>More options</summary><div class="fields">${fields.filter((field) => field.more).map(one)}</div></details></section>`;
}

// What the server says against a field. A schema and a list of answers are one field there.
const ofField = (error, { name }, form) => (error && name === (error.param === "structured_outputs" && form.schema ? "schema" : error.param) ? error.message : null);

// Whether an option that is not shown at first has an effect, or is refused.
const isUsed = (field, form, error) => field.more && (ofField(error, field, form) !== null || String(form[field.name]) !== String(field.start ?? ""));

function Field({ field, value, set, error, choices, off }) {
  const { name, label, kind, help, least, most, step, wide, empty } = field, id = `field-${name}`;
  const about = { id, form: CONTROLS, disabled: off, "aria-describedby": `${id}-help`, "aria-invalid": Boolean(error) };
  return html`<div class=${`field ${wide ? "wide" : ""} ${off ? "off" : ""}`}>
    <label for=${id} class=${field.beside ? "hidden" : null}>${label}</label>
    ${kind === "lines" || kind === "schema" ? html`<textarea ...${about} rows=${kind === "schema" ? 8 : 3} spellcheck=${kind !== "schema"} value=${value} onInput=${(e) => set(name, e.target.value)}></textarea>` : kind === "choice"
      ? html`<select ...${about} value=${value} onChange=${(e) => set(name, e.target.value)}>${choices.map((choice) => html`<option key=${choice} value=${choice} selected=${choice === value}>${choice}</option>`)}</select>`
      : html`<input ...${about} type=${kind === "text" ? "text" : "number"} min=${least} max=${most} step=${step} placeholder=${empty || (kind === "auto" ? "auto" : "")} value=${value} onInput=${(e) => set(name, e.target.value)} />`}
    <p id=${`${id}-help`} class=${error ? "wrong" : "help"} role=${error ? "alert" : null}>${error || help}</p>
  </div>`;
}
