// Large type on the full screen, driven by keys.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";

const KEYS = [
  ["?", "these keys"],
  ["p", "present: large type on the full screen. Once more, or Esc, ends it"],
  ["Space", "pause, go on, and replay"],
  ["← →", "one step back, one step on"],
  ["f", "fit the run into the picture"],
  ["1 to 8", "run an example"],
  ["g", "run the prompt"],
  ["Esc", "leave a field, so that these keys work"],
];
const IN_TREE = [["← → ↑ ↓", "from token to token"], ["+ −", "zoom"], ["0", "all in the window"], ["Esc", "close the token"]];

const press = (selector) => { const button = document.querySelector(selector); if (button && !button.disabled) button.click(); return Boolean(button); };
const ACTS = {
  " ": () => press("[data-key=play]"), ArrowLeft: () => press("[data-key=back]"), ArrowRight: () => press("[data-key=on]"), f: () => press("[data-key=fit]"), g: () => press(".controls .go"),
  ...Object.fromEntries([1, 2, 3, 4, 5, 6, 7, 8].map((n) => [n, () => press(`.examples .example:nth-of-type(${n})`)])),
};
const isTyping = (element) => element.closest("input, textarea, select, [contenteditable]");

export function usePresentation() {
  const [isOn, setOn] = useState(false), keys = useRef(null);
  const set = (on) => {
    setOn(on);
    document.documentElement.classList.toggle("presenting", on);
    if (on) document.documentElement.requestFullscreen?.().catch(() => null); // large type does without it
    else if (document.fullscreenElement) document.exitFullscreen();
  };
  const showKeys = () => keys.current.showModal();
  useEffect(() => {
    const down = (e) => {
      if (e.altKey || e.ctrlKey || e.metaKey || keys.current?.open) return;
      if (isTyping(e.target)) { if (e.key === "Escape") e.target.blur(); return; }
      if (e.key === "?") showKeys();
      else if (e.key === "p") set(!isOn);
      else if (e.key === "Escape" && isOn) set(false);
      // The picture has arrow keys of its own, and a button its space.
      else if (!e.defaultPrevented && !(e.key === " " && e.target.closest("button, summary, a, [tabindex]:not(.canvas, main)")) && ACTS[e.key]) { if (!ACTS[e.key]()) return; } else return;
      e.preventDefault();
    };
    const left = () => { if (!document.fullscreenElement) set(false); };
    addEventListener("keydown", down);
    document.addEventListener("fullscreenchange", left);
    return () => { removeEventListener("keydown", down); document.removeEventListener("fullscreenchange", left); };
  }, [isOn]);
  return { isOn, toggle: () => set(!isOn), showKeys, keys };
}

const list = (keys) => html`<dl>${keys.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>`;

export function Keys({ presentation }) {
  return html`<dialog class="keys" ref=${presentation.keys} aria-label="Keys">
    <h2>Keys</h2>${list(KEYS)}
    <h2>While the tree has the focus</h2>${list(IN_TREE)}
    <form method="dialog"><button class="go">Close</button></form>
  </dialog>`;
}
