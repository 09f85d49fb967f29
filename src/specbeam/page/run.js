// A run of the search: events come in, and a tree with its numbers comes out. docs/server.md describes the events.

const LAST_WORDS = 64; // tokens of the best text, for a sentence
const BEGINNING = 5000; // ms, in which one reads what a paced run begins with
const LEAST_NUMBER = -9999; // stands for minus infinity

// The beams of a step without places that no possible text takes.
export const possible = (step) => step.filter((beam) => beam.score > LEAST_NUMBER);

export class Run {
  constructor() {
    this.events = [];
    this.phases = []; // [event, "draft" | "decide"]: a round is shown in two phases, so that draft tokens are seen before their fate
    this.error = null;
    this.isLive = true;
    this.begin = null;
    this.end = null;
    this.thoughts = "";
    this.said = null; // the answer without thoughts, from a server that tells them apart
    this.reset();
  }

  // Forget the tree, and begin again before the first round.
  reset() {
    this.at = 0; // phases in the tree
    this.version = (this.version || 0) + 1;
    this.nodes = new Map();
    this.columns = []; // by depth: the nodes there. Beams come first, in their order
    this.root = null;
    this.likeliest = new Map(); // by node
    this.beams = [];
    this.text = "";
    this.certainDepth = 0;
    this.rounds = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.targetPasses = 0;
    this.draftPasses = 0;
    this.seconds = 0;
    this.firstSeconds = 0;
    this.steps = 0;
    this.front = 0; // the depth of the longest beams. Some of them may be ahead of the steps that are certain
    this.frontBeams = 0; // the number of beams there
    this.evaluatedBeams = 0;
    this.best = new Set();
    this.isWhole = false;
    this.hasMasks = false;
    this.hasDeferred = false;
    this.told = []; // by round: what a sentence about it needs
    this.proposed = 0; // draft tokens that wait for their fate
  }

  push(event) {
    if (event.event === "answer") { // no part of a recording
      this.thoughts += event.reasoning;
      this.said = (this.said || "") + event.content;
      this.version++;
      return;
    }
    this.events.push(event);
    if (event.event === "begin") this.begin = event;
    else if (event.event === "round") {
      if (event.drafted.length) this.phases.push([event, "draft"]);
      this.phases.push([event, "decide"]);
    } else if (event.event === "end") {
      this.end = event;
      this.isLive = false;
    } else if (event.error) {
      this.error = event.error;
      this.isLive = false;
    }
    this.version++;
  }

  // Show the first phases of the run.
  seek(count) {
    if (count < this.at) this.reset();
    while (this.at < Math.min(count, this.phases.length)) {
      const [event, phase] = this.phases[this.at++];
      if (phase === "draft") this.draft(event);
      else this.decide(event);
    }
    if (this.end && this.at === this.phases.length) this.finish();
    this.version++;
  }

  // Show all phases that have come. Returns whether the tree has changed.
  catchUp() {
    const isBehind = this.at < this.phases.length || Boolean(this.end && !this.isWhole);
    if (isBehind) this.seek(this.phases.length);
    return isBehind;
  }

  add(entry) {
    let node = this.nodes.get(entry.node);
    if (node) return node;
    if (!this.root) {
      this.root = { id: entry.after, depth: 0, text: "", children: [], lane: -1, rank: 0, kind: "root", isCertain: true, score: 0 };
      this.nodes.set(entry.after, this.root);
      this.columns[0] = [this.root];
    }
    const parent = this.nodes.get(entry.after);
    if (!parent) return null;
    node = {
      id: entry.node, parent, depth: parent.depth + 1, token: entry.token_id, text: entry.text, children: [],
      kind: "drafted", rank: -1, logProb: null, score: null, isDrafted: false, phase: this.at, round: this.rounds,
      isAccepted: false, isRejected: false, isDropped: false, isCertain: false, isEnd: false, isEvaluated: false,
    };
    const column = (this.columns[node.depth] ||= []);
    this.setBelow(node, column, parent.lane); // a chain of draft tokens is a straight line
    parent.children.push(node);
    this.nodes.set(node.id, node);
    column.push(node);
    return node;
  }

  // Give a node a row below the beams: this one if it is free, or the first free one.
  setBelow(node, column, lane) {
    const taken = new Set(column.map((one) => one.lane));
    node.rank = -1;
    node.lane = lane >= 0 && !taken.has(lane) ? lane : 0;
    while (taken.has(node.lane)) node.lane++;
  }

  // The row of a node: its rank. Draft tokens that are no beams, and finished hypotheses, stand below the beams.
  rowOf(node) {
    return node.rank >= 0 ? node.rank : this.rowsOfBeams(node.depth) + node.lane;
  }

  rowsOfBeams(depth) {
    return Math.max(this.beamsIn(depth), this.width > 1 ? (this.front ? this.frontBeams : this.width) : 0);
  }

  beamsIn(depth) {
    const column = this.columns[depth];
    let beams = 0;
    while (beams < column.length && column[beams].rank >= 0) beams++;
    return beams;
  }

  get width() {
    return this.begin ? this.begin.options.num_beams || 1 : 1;
  }

  // The number of rows of a column.
  heightOf(depth) {
    const below = this.rowsOfBeams(depth);
    return this.columns[depth].reduce((most, node) => Math.max(most, node.rank >= 0 ? node.rank + 1 : below + node.lane + 1), 1);
  }

  draft(event) {
    this.rounds++;
    for (const token of event.drafted) {
      const node = this.add(token);
      if (node) { node.isDrafted = true; node.isRejected = false; }
    }
    this.drafted += event.drafted.length;
    this.proposed = event.drafted.length;
  }

  decide(event) {
    if (!event.drafted.length) this.rounds++;
    const kept = () => event.drafted.filter(({ node }) => this.nodes.get(node)?.isAccepted).length;
    const before = { kept: kept(), accepted: this.accepted, evaluated: this.evaluatedBeams, front: this.front };
    for (const id of event.evaluated) {
      const node = this.nodes.get(id);
      if (node) this.evaluate(node);
      else if (this.root) this.evaluatedBeams++; // a place that no possible text takes
    }
    for (const step of event.steps) {
      this.steps++;
      this.beams = possible(step).map((beam, rank) => this.take(beam, rank)).filter(Boolean);
      if (!this.beams.length) continue;
      const kept = new Set(this.beams), column = this.columns[this.beams[0].depth];
      for (const node of column) if (node.rank >= 0 && !kept.has(node)) this.setBelow(node, column); // it was ahead, and the search went back
      this.sort(column);
    }
    for (const beam of possible(event.ahead)) {
      const known = this.nodes.get(beam.node);
      if (known && known.rank >= 0) continue;
      const column = this.columns[this.nodes.get(beam.after).depth + 1] || [];
      this.sort(this.columns[this.take(beam, column.filter((node) => node.rank >= 0).length).depth]);
    }
    this.front = this.lead ? this.lead.depth : 0;
    this.frontBeams = this.front ? this.beamsIn(this.front) : 0;
    for (let depth = before.front; depth < this.front; depth++) this.hasDeferred ||= this.columns[depth].some((node) => this.isDeferred(node));
    for (const entry of event.ended) {
      const node = this.add(entry);
      if (!node) continue;
      node.isEnd = true;
      node.logProb = entry.log_prob;
      if (node.kind === "drafted") node.kind = "end";
      if (node.score === null) node.score = (node.parent.score || 0) + entry.log_prob;
    }
    for (const id of event.dropped) {
      const node = this.nodes.get(id);
      if (node) {
        node.isDropped = true;
        node.phase = this.at;
        if (node.isDrafted && !node.isAccepted) node.isRejected = true;
      }
    }
    for (const id of event.certain) {
      const node = this.nodes.get(id);
      if (node) { node.isCertain = true; this.certainDepth = Math.max(this.certainDepth, node.depth); }
    }
    for (const row of event.likeliest || []) { this.likeliest.set(row.after, row.tokens); this.mask(row); }
    this.text += event.text;
    const cost = event.pass;
    this.targetPasses += cost.target_passes;
    this.draftPasses += cost.draft_passes;
    this.seconds = cost.seconds;
    if (!this.firstSeconds) this.firstSeconds = cost.seconds;
    this.proposed = 0;
    this.told.push({
      proposed: event.drafted.length, kept: kept() - before.kept, accepted: this.accepted - before.accepted, evaluated: this.evaluatedBeams - before.evaluated,
      steps: event.steps.length, text: this.bestPath.slice(-LAST_WORDS).map((node) => node.text).join(""), token: this.beams[0]?.text || "",
    });
  }

  // A beam takes its row.
  take(beam, rank) {
    const node = this.add(beam);
    if (!node) return null;
    if (node.isDrafted && !node.isAccepted) { node.isAccepted = true; node.phase = this.at; this.accepted++; }
    if (node.kind !== "beam" && node.isEvaluated) this.evaluatedBeams++;
    Object.assign(node, { kind: "beam", lane: -1, rank, logProb: beam.log_prob, score: beam.score });
    return node;
  }

  evaluate(node) {
    if (node.isEvaluated) return;
    node.isEvaluated = true;
    if (node.kind === "beam") this.evaluatedBeams++;
  }

  sort(column) {
    column.sort((a, b) => (a.rank < 0 ? 1e6 : a.rank) - (b.rank < 0 ? 1e6 : b.rank));
  }

  // Whether the search has gone on without evaluating a beam. It may come back to it.
  isDeferred(node) {
    return node.kind === "beam" && !node.isEvaluated && !node.isEnd && node.depth < this.front;
  }

  // What a node is: the name of its kind, and in words.
  stateOf(node) {
    if (node.kind === "masked") return ["masked", "masked by the constraint"];
    if (node.isRejected) return ["rejected", "rejected draft token"];
    if (node.isAccepted) return ["accepted", "accepted draft token"];
    if (node.kind === "drafted") return ["drafted", "draft token"];
    if (this.isDeferred(node)) return ["deferred", "deferred beam"];
    if (node.isDropped && !this.best.has(node)) return ["pruned", "dropped beam"];
    return ["live", node.isEnd ? "end of a text" : this.width > 1 ? "beam" : "chosen by the model"];
  }

  // The best one of the longest beams.
  get lead() {
    for (let depth = this.columns.length - 1; depth > 0; depth--) {
      const [node] = this.columns[depth];
      if (node.rank === 0 && !node.isDropped) return node;
    }
    return this.beams[0];
  }

  // The share of the beams of all steps that were evaluated. At first all beams are the prompt.
  get evaluatedShare() {
    if (this.width === 1 || !this.front) return null;
    return (this.isWhole && this.end.stats.evaluated_beams) || Math.min(1, (this.width + this.evaluatedBeams) / (this.width * this.front));
  }

  // The likeliest token of a place, if a constraint masks it, becomes a node: the model would have taken it.
  mask({ after, tokens: [token] }) {
    if (!token || token.masked === undefined) return;
    this.hasMasks = true;
    if (!token.masked) return;
    const node = this.add({ ...token, after, node: `masked-${after}` });
    if (node) { node.kind = "masked"; node.logProb = token.log_prob; }
  }

  finish() {
    this.isWhole = true;
    this.best = new Set(this.pathOf(this.end.sequences[0].token_ids));
    for (const node of this.nodes.values()) if (node.isDrafted && !node.isAccepted) node.isRejected = true;
  }

  // The nodes of a text, from its tokens.
  pathOf(tokens) {
    const path = [];
    let node = this.root;
    for (const token of tokens) {
      const same = node ? node.children.filter((child) => child.token === token && child.kind !== "drafted") : [];
      node = same.find((child) => !child.isDropped) || same[0]; // a search that went back has added it again
      if (!node) break;
      path.push(node);
    }
    return path;
  }

  pathTo(node) {
    const path = [];
    for (; node && node.parent; node = node.parent) path.unshift(node);
    return path;
  }

  // The nodes of the best text so far.
  get bestPath() {
    return this.isWhole ? [...this.best] : this.lead ? this.pathTo(this.lead) : [];
  }

  // The text of the best beam so far that is not certain.
  get openText() {
    return this.isWhole ? "" : this.bestPath.filter((node) => !node.isCertain).map((node) => node.text).join("");
  }

  // Steps, those included that the best text is ahead.
  get length() {
    return Math.max(this.steps, this.front);
  }

  // Seconds of the decoding. The prefill is left out.
  get decodeSeconds() {
    return this.seconds - this.firstSeconds;
  }

  // Beams of all steps, and how many of them were evaluated.
  get beamCounts() {
    const share = this.evaluatedShare, possible = this.width * this.length;
    return share === null ? null : { possible, evaluated: Math.round(share * possible) };
  }

  get promptIds() {
    return this.begin ? this.begin.prompt.map((token) => token.token_id) : [];
  }

  get promptText() {
    return this.begin ? this.begin.prompt.map((token) => token.text).join("") : "";
  }

  // The prompt as a person wrote it: without the chat template around it.
  get promptShown() {
    return this.shownPrompt ?? (this.begin?.message === undefined ? this.promptText : `${this.begin.message}\n`);
  }

  get lines() {
    return this.events.map((event) => JSON.stringify(event)).join("\n") + "\n";
  }
}

// Shows a run phase by phase. A live run that is behind is shown faster.
export class Playback {
  constructor(run, speed = 1) {
    this.run = run;
    this.speed = speed;
    this.isPlaying = true;
    this.next = 0;
  }

  get isAtEnd() {
    return this.run.at >= this.run.phases.length;
  }

  // One frame. Returns whether the tree has changed.
  tick(now) {
    const { run } = this;
    if (this.isAtEnd) return run.catchUp();
    if (!this.isPlaying) return false;
    if (run.pace && !this.next) this.next = now + BEGINNING / this.speed;
    if (now < this.next) return false;
    if (this.speed === Infinity) return run.catchUp();
    const behind = run.phases.length - run.at;
    const hurry = run.isLive ? Math.max(1, behind / 4) : 1;
    const delay = (run.phases[run.at][1] === "draft" ? 240 : 130) / this.speed / hurry;
    run.seek(run.at + Math.max(1, Math.floor(16 / delay)));
    this.next = now + (run.pace ? (run.proposed ? 1 : 2) * run.pace / this.speed : delay);
    return true;
  }
}

// Server-sent events of a request, until it ends or is aborted.
export async function stream(path, body, key, signal, take) {
  const response = await fetch(path, {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
  });
  if (!response.ok) throw new Refusal(response.status, await errorOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) if (frame.startsWith("data: ")) take(JSON.parse(frame.slice(6)));
  }
}

export async function errorOf(response) {
  try { return (await response.json()).error || {}; } catch { return { message: `the server answered with status ${response.status}` }; }
}

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param;
  }
}

export function recordingOf(text) {
  const run = new Run();
  for (const line of text.split("\n")) if (line.trim()) run.push(JSON.parse(line));
  if (!run.begin || run.begin.format !== 1) throw new Error("this file is no recording of specbeam");
  run.isLive = false;
  return run;
}

// Play a run slowly enough to read a sentence for each round: in this time, in ms.
export function pace(run, whole) {
  run.pace = (whole - BEGINNING) / run.phases.reduce((sum, [, phase]) => sum + (phase === "draft" ? 1 : 2), 0);
  return run;
}

export const percent = (logProb) => {
  const p = Math.exp(logProb) * 100;
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
};

// Whether a node is part of the text. The token that ends a text can be a word, or say only that it ends.
export const isWord = (node) => !(node.isEnd && /^<.*>$/.test(node.text));

// A token on one line, with marks for white space.
export const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "\u00a0") || "∅";
