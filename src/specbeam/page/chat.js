// A conversation. It has settings of its own.

import { branchFrom } from "./branch.js";
import { useFrames } from "./hooks.js";
import { CHAT_FIELDS, CONTROLS, LIKELIEST, Options, bodyOf } from "./options.js";
import { Cut, TreePanel } from "./panel.js";
import { html, useRef, useState } from "./vendor/preact.js";

export function ChatPage(all) {
  const { form, model, shared, start, redraw, setSays } = all;
  const [draft, setDraft] = useState("");
  const [editing, setEditing] = useState(null);
  const [shownTree, showTree] = useState(null);
  const end = useRef(null);
  const { chat } = shared;
  const last = chat.at(-1);
  const live = last?.run?.isLive ? last.run : null;
  useFrames(() => { if (last?.run && shownTree !== last.run && last.run.catchUp()) redraw(); });
  const textOf = (message) => message.run ? (message.run.said !== null ? message.run.said : message.run.end ? message.run.end.sequences[0].text : message.run.events.map((event) => event.text || "").join("")) : message.content;
  const answer = () => {
    const messages = chat.map((message) => ({ role: message.role, content: textOf(message), ...(message.run?.thoughts && { reasoning_content: message.run.thoughts }) }));
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
  return html`<div class="split talk">
    <section class="panel" aria-label="Conversation">
      <ol class="messages" aria-live="polite">${chat.map((message, i) => html`<li key=${i} class=${message.role}>
        <p class="who">${message.role === "user" ? "You" : message.run.begin?.model || form.model}</p>
        ${message.run?.thoughts && html`<details class="thoughts"><summary>${message.run.isLive && !textOf(message) ? "Thinking …" : "Thoughts"}</summary><p>${message.run.thoughts}</p></details>`}
        <p class="said">${textOf(message)}${message.run?.isLive && html`<span class="open">${message.run.said === null && message.run.openText}</span><span class="caret" aria-hidden="true"></span>`}</p>
        ${message.run?.end?.sequences[0].finish_reason === "length" && html`<p class="help"><${Cut} run=${message.run} /> “New tokens” allows longer answers.</p>`}
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
      <form class="composer" id=${CONTROLS} ref=${end} onSubmit=${send}>
        <label for="message" class="hidden">Message</label>
        <textarea id="message" rows="2" placeholder=${editing === null ? "A message" : "The changed message. What follows it is written anew."} value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter" && !e.shiftKey) send(e); }}></textarea>
        ${live ? html`<button key="stop" type="button" class="go stop" onClick=${() => live.stop()}>Stop</button>` : html`<button key="go" class="go" disabled=${!draft.trim() || !model}>${editing === null ? "Send" : "Send again"}</button>`}
      </form>
    </section>
    <${Options} ...${all} fields=${fieldsFor(model)} />
  </div>`;
}

// Fields that are empty are the server's: it says which defaults it has, or nothing.
const fieldsFor = (model) => CHAT_FIELDS.map((field) => (field.isServers ? { ...field, empty: String(model?.sampling?.[field.name] ?? "server's"), help: `${field.help} Empty: the server's default.` } : field));
