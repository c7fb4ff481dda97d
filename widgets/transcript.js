import { colours, h, known, line, number, plain, s, typed } from "./page.js";

const BATCH = 24, TOKENS = 4096;

// One episode's turns: drawn at once without tokens, which are asked for when a turn comes into view

export class Transcript {
  constructor(view, shell, scroller) {
    Object.assign(this, { view, shell, scroller, step: shell.episode.step, episode: shell.episode.episode, turns: shell.turns, asked: new Set() });
    this.blocks = shell.turns.map((turn) => this.block(turn));
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.load(Number(entry.target.dataset.index));
    }, { root: scroller, rootMargin: "500px 0px" });
    for (const { el } of this.blocks) this.seen.observe(el);
  }

  close() { this.seen.disconnect(); }

  block(turn) {
    const index = this.turns.indexOf(turn), agent = h("div", { class: "cw-agent" }, h("span", { class: "cw-wait" }, line(turn.action) || "…"));
    const env = h("div", { class: "cw-env", role: "button", tabindex: "0", "aria-expanded": "false", title: "show or hide what the agent saw" });
    const flags = h("div", { class: "cw-flags" }, turn.pivotal && h("span", { class: "cw-pivot", title: "pivotal turn" }, "◆"),
      turn.valid === false && h("span", { class: "cw-bad", title: "the environment did not accept the action" }, "invalid"),
      turn.truncated && h("span", { class: "cw-bad", title: "cut off at the token limit" }, "cut off"));
    const gutter = h("div", { class: "cw-gutter" }, h("button", { class: "cw-turnno", title: "select this turn",
      onclick: () => this.view.select(this, turn.turn) }, String(turn.turn)), flags, h("div", { class: "cw-marks" }));
    const el = h("div", { class: `cw-turn${turn.pivotal ? " cw-is-pivotal" : ""}`, "data-index": String(index) }, gutter,
      h("div", { class: "cw-body" }, env, agent, this.facts(turn)));
    const lines = Math.ceil(((turn.n_tokens ?? 0) * 30) / Math.max((this.scroller?.clientWidth ?? 600) - 120, 200));
    agent.style.minHeight = `${lines * 22}px`;
    env.addEventListener("click", () => this.unfold(index));
    env.addEventListener("keydown", (event) => event.key === "Enter" && this.unfold(index));
    agent.addEventListener("mouseover", (event) => this.view.hover(this, index, event.target));
    agent.addEventListener("mouseleave", () => this.view.hover(null));
    agent.addEventListener("click", (event) => this.pickToken(index, event));
    return { el, env, agent, turn, chunks: [], open: false };
  }

  facts(turn) {
    const parts = [["credit", turn.turn_advantage, true], ["ΔB", turn.revision, true], ["belief", turn.belief], ["evidence", turn.evidence, true],
      ["z", turn.z, true], ["weight", turn.weight], ["reward", turn.reward]].filter(([, value]) => known(value));
    return h("div", { class: "cw-facts" }, ...parts.map(([name, value, signed]) =>
      h("span", {}, `${name} `, h("b", { class: signed && value ? (value > 0 ? "cw-up" : "cw-down") : "" }, number(value, signed)))));
  }

  async load(index, start = 0) {
    const from = this.turns[index], key = `${from.turn}:${start}`;
    if (this.asked.has(key) || (!start && this.blocks[index].chunks.length)) return;
    let last = index;
    for (let sum = from.n_tokens ?? 0; last + 1 < this.turns.length && last - index < BATCH && sum < TOKENS; last++) {
      if (this.asked.has(`${this.turns[last + 1].turn}:0`)) break;
      sum += this.turns[last + 1].n_tokens ?? 0;
    }
    this.asked.add(key);
    for (let i = index + 1; i <= last; i++) this.asked.add(`${this.turns[i].turn}:0`);
    try {
      const found = await this.view.ask("window", { step: this.step, episode: this.episode, first: from.turn, last: this.turns[last].turn, start });
      this.fill(found);
      const reached = found.turns.at(-1)?.turn ?? from.turn;
      for (let i = index; i <= last; i++) if (this.turns[i].turn > reached) this.asked.delete(`${this.turns[i].turn}:0`);
      if (found.next) this.more(found.next);
    } catch (error) { this.view.said(error.message, true); }
  }

  fill({ turns, signals, buffers }) {
    const ids = typed(buffers[0], Int32Array), values = typed(buffers[1], Float32Array), n = ids.length;
    for (const turn of turns) {
      const block = this.blocks.find((b) => b.turn.turn === turn.turn);
      const part = (k) => values.subarray(k * n + turn.offset, k * n + turn.offset + turn.count);
      const chunk = { ...turn, ids: ids.subarray(turn.offset, turn.offset + turn.count), values: Object.fromEntries(signals.map((name, k) => [name, part(k)])) };
      block.chunks.push(chunk);
      if (block.chunks.length === 1) this.begin(block, turn);
      this.cells(block, chunk, block.chunks.length - 1);
    }
    this.paint();
    this.view.loaded(this);
  }

  begin(block, turn) {
    block.seen = { text: turn.observation, whole: turn.observation.length >= turn.observation_chars, chars: turn.observation_chars };
    block.env.hidden = !turn.observation_chars;
    this.fold(block);
    block.agent.replaceChildren();
    block.agent.style.minHeight = "";
    if (!turn.cells.length) block.agent.append(h("span", { class: "cw-wait" }, plain(turn.response || turn.action) || "∅", h("small", {}, "  no tokens were recorded")));
  }

  cells(block, chunk, which) {
    const spans = chunk.cells.map((text, k) => {
      const shown = plain(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
      return h("span", { class: "cw-tok", "data-at": `${which}:${k}` }, shown || "∅");
    });
    block.agent.append(...spans);
  }

  /* The rest of a turn too long for one answer: asked for when its end comes into view. */
  more([turn, token]) {
    const index = this.turns.findIndex((t) => t.turn === turn);
    if (!token) return this.load(index);
    const mark = h("span", { class: "cw-wait" }, ` … ${this.turns[index].n_tokens - token} more tokens`);
    this.blocks[index].agent.append(mark);
    const watch = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      watch.disconnect();
      mark.remove();
      this.load(index, token);
    }, { root: this.scroller, rootMargin: "300px 0px" });
    watch.observe(mark);
  }

  fold(block) {
    const term = this.view.model.get("search").trim(), text = block.open ? plain(block.seen.text) : line(block.seen.text);
    block.env.classList.toggle("cw-open", block.open);
    block.env.setAttribute("aria-expanded", String(block.open));
    block.env.replaceChildren(h("span", { class: "cw-caret" }, block.open ? "▾" : "▸"), ...marked(text, term),
      block.open || block.seen.chars < 100 ? "" : h("small", {}, ` ${block.seen.chars} chars`));
  }

  refold() { for (const block of this.blocks) if (block.seen) this.fold(block); }

  async unfold(index) {
    const block = this.blocks[index];
    if (!block.seen) return;
    block.open = !block.open;
    if (block.open && !block.seen.whole) {
      try {
        const found = await this.view.ask("text", { step: this.step, episode: this.episode, turn: block.turn.turn });
        Object.assign(block.seen, { text: found.observation, whole: true });
      } catch (error) { this.view.said(error.message, true); }
    }
    this.fold(block);
  }

  /* Tokens of the cell a span stands for: [chunk, from, to) within the chunk. */
  cellOf(block, span) {
    const at = span?.dataset?.at?.split(":").map(Number);
    if (!at) return null;
    const chunk = block.chunks[at[0]], from = chunk.starts ? chunk.starts[at[1]] - chunk.first : at[1];
    const to = chunk.starts ? (at[1] + 1 < chunk.starts.length ? chunk.starts[at[1] + 1] - chunk.first : chunk.count) : at[1] + 1;
    return { chunk, from, to, text: chunk.cells[at[1]] };
  }

  paint() {
    const { theme, signal, limit, at } = this.view;
    for (const block of this.blocks) {
      const mine = this.step === at.step && this.episode === at.episode && block.turn.turn === at.turn;
      block.el.classList.toggle("cw-on", mine);
      for (const span of block.agent.querySelectorAll(".cw-tok")) {
        const cell = this.cellOf(block, span), values = cell.chunk.values[signal.name]?.subarray(cell.from, cell.to) ?? [];
        const colour = colours(theme, signal, limit, values.reduce((sum, v) => sum + v, 0) / values.length);
        span.style.backgroundColor = colour?.background ?? "";
        span.style.color = colour?.ink ?? "";
        const first = cell.chunk.first + cell.from, end = cell.chunk.first + cell.to;
        span.classList.toggle("cw-sel", mine && at.start != null && first < at.end && end > at.start);
      }
    }
  }

  pickToken(index, event) {
    const block = this.blocks[index], cell = this.cellOf(block, event.target);
    if (!cell) return;
    let [start, end] = [cell.chunk.first + cell.from, cell.chunk.first + cell.to];
    const { at } = this.view, same = this.step === at.step && this.episode === at.episode && at.turn === block.turn.turn;
    if (event.shiftKey && same && at.start != null) [start, end] = [Math.min(start, at.start), Math.max(end, at.end)];
    this.view.select(this, block.turn.turn, start, end);
  }

  marks(notes) {
    for (const block of this.blocks) {
      const found = notes.filter((n) => n.step === this.step && n.episode === this.episode && n.turn === block.turn.turn);
      block.el.querySelector(".cw-marks").textContent = found.length ? `✎${found.length > 1 ? found.length : ""}` : "";
    }
  }
}

function marked(text, term) {
  const out = [], low = text.toLowerCase(), find = term.toLowerCase();
  let at = 0;
  for (let i; find && low.length === text.length && (i = low.indexOf(find, at)) >= 0; at = i + find.length) {
    out.push(text.slice(at, i), h("mark", {}, text.slice(i, i + find.length)));
  }
  return [...out, text.slice(at)];
}

// The belief over an episode's turns: what each turn did to it, pivotal turns flagged

export function beliefStrip(turns, width, at, onTurn) {
  const height = 84, left = 30, top = 14, deep = 56, n = turns.length, wide = (width - left - 10) / Math.max(n, 1);
  const y = (value) => top + deep * (1 - value), box = s("svg", { class: "cw-strip", width, height, role: "img", "aria-label": "belief over the turns" });
  for (const value of [0, 0.5, 1]) {
    box.append(s("line", { x1: left, x2: width - 10, y1: y(value), y2: y(value), class: "cw-grid" }),
      s("text", { x: left - 5, y: y(value) + 3.5, "text-anchor": "end" }, String(value)));
  }
  let path = "";
  turns.forEach((turn, i) => {
    const x = left + i * wide, { belief_before: before, belief: after } = turn;
    const title = `turn ${turn.turn}${turn.pivotal ? ", pivotal" : ""}: belief ${number(before)} → ${number(after)}, ΔB ${number(turn.revision, true)}, z ${number(turn.z, true)}\n${line(turn.action).slice(0, 120)}`;
    const part = s("g", { class: `cw-bar${turn.turn === at.turn ? " cw-on" : ""}`, "data-turn": turn.turn }, s("title", {}, title),
      s("rect", { x, y: 0, width: wide, height, class: "cw-hit" }));
    if (known(before) && known(after)) {
      path += `${path ? "L" : "M"}${x},${y(before)}H${x + wide / 2}L${x + wide / 2},${y(after)}H${x + wide}`;
      part.append(s("rect", { x: x + wide / 2 - Math.min(wide * 0.3, 9), width: Math.min(wide * 0.6, 18), y: Math.min(y(before), y(after)),
        height: Math.max(Math.abs(y(after) - y(before)), 1), class: after >= before ? "cw-rise" : "cw-fall" }));
    }
    if (turn.pivotal) part.append(s("path", { d: `M${x + wide / 2},1l4.5,5l-4.5,5l-4.5,-5z`, class: "cw-diamond" }));
    if (i % Math.ceil(24 / wide) === 0) part.append(s("text", { x: x + wide / 2, y: height - 2, "text-anchor": "middle" }, String(turn.turn)));
    part.addEventListener("click", () => onTurn(turn.turn));
    box.append(part);
  });
  if (path) box.append(s("path", { d: path, class: "cw-path" }));
  return box;
}
