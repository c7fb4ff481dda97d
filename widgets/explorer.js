/* The explorer's page side: one ES module, no build step, no network. A host calls render({model, el}).

   THE HOST. In a notebook anywidget is the host and a kernel answers. A static page can be one as well: all that is used
   of `model` is get(name), set(name, value), save_changes(), on(event, f), off(event, f) and send(message), with
     names    link, color, filter, search, sort (texts; sort is "column" or "-column", descending), height (px)
     events   "change:<name>" when the host changed one of them, and "msg:custom" with (message, buffers).

   THE PROTOCOL. The page sends {id, request, args}; the host answers by "msg:custom" with {id, answer} and buffers (a list
   of DataViews or ArrayBuffers), or {id, error: "one line"}. A message {event: "refreshed"} makes the page read anew.
   Rows are those of widgets/data.py, whose docstrings say what each name is:
     open {}                   -> {run, experiment, method, episodes, groups, steps, columns, text_columns, beliefs, labels,
                                   signals: [{name, label, unit, meaning, centre, flip}], notes: may notes be written}
     rows {where, text, sort, descending, start, count, at: [step, episode] or null}
                               -> {total, rows, picks: {best: [step, episode], ...}, index: place of `at` or null}
                                  where: [{column, op, value}], parsed from the filter line by parseFilter below
     groups {where, text, start, count} -> {total, rows}
     episode {step, episode}   -> {episode: row, turns: [numbers, action, n_tokens]}; no token is sent
     window {step, episode, first, last, start} -> {turns: [{turn, observation, observation_chars, action, response, cells,
                                   starts, first, offset, count}], signals: [name], next: [turn, token] or null}
                                  buffers: [int32 ids (N), float32 values (signals x N), NaN: not recorded], little-endian
     text {step, episode, turn} -> {observation, action, response}, whole
     compare {step, episode}   -> {step, group, members: [{episode, outcome, return, advantage, n_turns, differs,
                                   same_state, credit, other_credit}]}
     scale {signal}            -> {signal, limit: colour limit, or null where nothing was recorded}
     notes {}, note_add {step, episode, turn, span, text, tags, label}, note_edit {note: id, text, tags, label},
     note_delete {note: id}    -> {notes: [{id, step, episode, turn, start, end, author, time, text, tags, label}], warnings}

   Text of a run or a note is hostile by assumption: it reaches the page as text nodes and titles alone. */

const ROW = 28, PAGE = 60, BATCH = 24, TOKENS = 4096, SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const KEYS = [["j / k", "next / previous episode"], ["p / P", "next / previous pivotal turn"], ["/", "search"], ["f", "filter"],
  ["c", "compare with the group"], ["n", "note on what is selected"], ["g", "groups / episodes"],
  ["click, shift-click", "select a token, a span of them"], ["Esc", "leave a field, close, deselect"], ["?", "this list"]];
const COLUMNS = { step: "step", episode: "episode", group: "group", outcome: "won", return: "return", n_turns: "turns",
  n_tokens: "tokens", revised: "largest |ΔB|", pivotal: "pivotal turns", invalid: "invalid turns", advantage: "advantage" };

// Small things

function h(tag, attributes, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.filter((child) => child != null && child !== false));
  return el;
}

function s(tag, attributes, ...children) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

const plain = (text) => String(text ?? "").replace(/\r\n?/g, "\n").replace(HIDDEN, "\ufffd");
const line = (text) => plain(text).replace(/\s+/g, " ").trim();
const known = (value) => value != null && Number.isFinite(value);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

export function number(value, signed = false) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1e5 || size < 1e-3 ? size.toExponential(1)
    : Number.isInteger(value) ? String(size) : size.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

/* `return > 0.5 and kind = "fridge"` as [{column, op, value}]; the same language as widgets/filters.py. */
export function parseFilter(text) {
  const clause = /\s*([A-Za-z_]\w*)\s*(<=|>=|!=|==|=|<|>)\s*("[^"]*"|[^\s,&"]+)\s*/y, and = /(?:,|&&?|and\b)/iy, out = [];
  let at = 0;
  while (text.slice(at).trim()) {
    and.lastIndex = at;
    const joined = !out.length || and.test(text);
    clause.lastIndex = out.length && joined ? and.lastIndex : at;
    const found = joined && clause.exec(text);
    if (!found) throw new Error(`filter: expected such as return > 0.5 and n_turns < 6 at “${text.slice(at).trim().slice(0, 30)}”`);
    const isNumber = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(found[3]);
    out.push({ column: found[1], op: found[2] === "==" ? "=" : found[2], value: isNumber ? Number(found[3]) : found[3].replaceAll('"', "") });
    at = clause.lastIndex;
  }
  return out;
}

function parseLink(text) {
  const parts = new URLSearchParams(text), span = /^(\d+)-(\d+)$/.exec(parts.get("span") ?? "");
  const [step, episode, turn] = ["step", "episode", "turn"].map((n) => (/^\d+$/.test(parts.get(n) ?? "") ? Number(parts.get(n)) : null));
  return { run: parts.get("run"), step, episode, turn, start: span ? Number(span[1]) : null, end: span ? Number(span[2]) : null };
}

function writeLink({ run, step, episode, turn, start, end }) {
  let text = `run=${encodeURIComponent(run).replace(/[!'()*]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase())}`;
  if (step != null) text += `&step=${step}`;
  if (episode != null) text += `&episode=${episode}`;
  if (turn != null) text += `&turn=${turn}`;
  return start != null ? `${text}&span=${start}-${end}` : text;
}

/* Questions to the host, answered as promises. */
function client(model, onEvent) {
  const mine = Math.random().toString(36).slice(2), waiting = new Map();
  let count = 0;
  const hear = (message, buffers) => {
    if (message.event) return onEvent(message.event);
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else asked.resolve({ ...message.answer, buffers });
  };
  model.on("msg:custom", hear);
  const ask = (request, args = {}) => new Promise((resolve, reject) => {
    const id = `${mine}-${count++}`;
    waiting.set(id, { resolve, reject });
    model.send({ id, request, args });
  });
  return { ask, close: () => model.off("msg:custom", hear) };
}

function typed(buffer, Kind) {
  const view = ArrayBuffer.isView(buffer) ? buffer : new DataView(buffer);
  return new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// Colours: orange and blue of Okabe and Ito's set, told apart by colour-blind people; nothing at the centre

const PALETTE = {
  light: { below: ["#f0a868", "#b34a00"], above: ["#7fb8dc", "#00588a"], depth: ["#b9a6d8", "#4b2a86"] },
  dark: { below: ["#8f4f1a", "#ffb27a"], above: ["#1f6796", "#9ad4ff"], depth: ["#5d4791", "#d5c2ff"] },
};
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const light = ([r, g, b]) => [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);

/* {background, ink} of a value; limit: distance from the centre at which the colour is full. */
function colours(theme, signal, limit, value) {
  if (!known(value) || !limit) return null;
  let share = clamp((value - (signal.centre ?? 0)) / limit, -1, 1) * (signal.flip ? -1 : 1);
  if (Math.abs(share) < 0.004) return null;
  const stops = [theme.paper, ...PALETTE[theme.name][signal.centre == null ? "depth" : share < 0 ? "below" : "above"].map(rgb)];
  share = Math.abs(share) * 2;
  const [from, to] = share <= 1 ? [stops[0], stops[1]] : [stops[1], stops[2]], part = share <= 1 ? share : share - 1;
  const mixed = from.map((v, i) => Math.round(v + (to[i] - v) * part)), bright = light(mixed);
  return { background: `rgb(${mixed})`, ink: (bright + 0.05) / 0.06 > 1.05 / (bright + 0.05) ? "#111418" : "#ffffff" };
}

function themeOf(root) {
  const found = getComputedStyle(root).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [255, 255, 255];
  const paper = found.length > 3 && found[3] === 0 ? [255, 255, 255] : found.slice(0, 3);
  return { name: light(paper) < 0.25 ? "dark" : "light", paper };
}

function sparkline(row) {
  const box = s("svg", { class: "cw-spark", width: 76, height: 20, viewBox: "0 0 76 20", "aria-hidden": "true" });
  const path = row.path ?? [], x = (i) => 3 + (70 * i) / Math.max(path.length - 1, 1), y = (v) => 17 - 14 * v;
  const points = path.map((v, i) => (known(v) ? `${x(i).toFixed(1)},${y(v).toFixed(1)}` : null)).filter(Boolean);
  box.append(s("line", { x1: 3, x2: 73, y1: y(0.5), y2: y(0.5), class: "cw-half" }));
  if (points.length) {
    const [cx, cy] = points.at(-1).split(",");
    box.append(s("polyline", { points: points.join(" ") }), s("circle", { cx, cy, r: 2 }));
  }
  return box;
}

// The list of episodes or groups: rows are asked for when they come into view

class List {
  constructor(view) {
    Object.assign(this, { view, mode: "episodes", total: 0, pages: new Map(), age: 0, cursor: -1, picks: {} });
    this.body = h("div", { class: "cw-rows" });
    this.head = h("div", { class: "cw-head" });
    this.el = h("div", { class: "cw-list", role: "listbox", tabindex: "-1", "aria-label": "episodes" }, this.head, this.body);
    this.el.addEventListener("scroll", () => this.draw(), { passive: true });
  }

  query() {
    const { model } = this.view, sort = model.get("sort");
    const shared = { where: parseFilter(model.get("filter")), text: model.get("search") };
    return this.mode === "groups" ? shared : { ...shared, sort: sort.replace(/^-/, ""), descending: sort.startsWith("-") };
  }

  async reload(keep = false) {
    const age = ++this.age, { at } = this.view;
    try {
      const place = this.mode === "episodes" && at.step != null ? { at: [at.step, at.episode] } : {};
      const found = await this.view.ask(this.mode === "groups" ? "groups" : "rows", { ...this.query(), ...place, start: 0, count: PAGE });
      if (age !== this.age) return;
      this.pages = new Map([[0, found.rows]]);
      this.total = found.total;
      this.picks = found.picks ?? this.picks;
      this.cursor = found.index ?? -1;
      this.view.said("");
      this.view.listed();
    } catch (error) {
      if (age === this.age) this.view.said(error.message, true);
      return;
    }
    this.heading();
    this.body.style.height = `${this.total * ROW}px`;
    if (!keep) this.el.scrollTop = 0;
    this.reveal();
    this.draw();
  }

  async page(number_) {
    if (this.pages.has(number_)) return this.pages.get(number_);
    const age = this.age, request = this.mode === "groups" ? "groups" : "rows";
    this.pages.set(number_, null);
    const found = await this.view.ask(request, { ...this.query(), start: number_ * PAGE, count: PAGE });
    if (age !== this.age) return null;
    this.pages.set(number_, found.rows);
    this.draw();
    return found.rows;
  }

  draw() {
    const first = Math.floor(this.el.scrollTop / ROW), last = Math.min(this.total, first + Math.ceil(this.el.clientHeight / ROW) + 2);
    const rows = [];
    for (let i = Math.max(0, first - 2); i < last; i++) {
      const page = this.pages.get(Math.floor(i / PAGE));
      if (page === undefined) this.page(Math.floor(i / PAGE));
      const row = page?.[i % PAGE];
      if (row) rows.push(this.row(row, i));
    }
    this.body.replaceChildren(...rows);
  }

  row(row, index) {
    const { at, notes } = this.view, isGroup = this.mode === "groups";
    const picked = row.step === at.step && (isGroup ? row.group === this.view.shown?.episode.group : row.episode === at.episode);
    const noted = notes.some((n) => n.step === row.step && n.episode === row.episode);
    const cells = isGroup
      ? [h("b", {}, `${row.step}·${row.group}`), h("span", {}, `${row.won} of ${row.n}`), h("span", {}, number(row.mean)),
         h("span", {}, number(row.high - row.low)), h("span", {}, number(row.revised)), h("span", { class: "cw-task" }, line(row.task))]
      : [h("i", { class: row.outcome ? "cw-won" : "cw-lost", title: row.outcome ? "succeeded" : "failed" }, row.outcome ? "✓" : "✗"),
         h("b", {}, `${row.step}·${row.group}·${row.episode}`, noted && h("sup", { title: "has notes" }, "✎")),
         h("span", {}, number(row.return)), h("span", {}, number(row.n_turns)), this.last(row), sparkline(row)];
    const title = `step ${row.step}, group ${row.group}` + (isGroup ? "" : `, episode ${row.episode}: ${row.pivotal ?? 0} pivotal turns`
      + (row.hits ? `, found in ${row.hits} turns` : "")) + `\n${line(row.task)}`;
    return h("div", { class: `cw-row${isGroup ? " cw-group" : ""}${picked ? " cw-on" : ""}${!isGroup && row.group % 2 ? " cw-odd" : ""}`,
      role: "option", "aria-selected": String(picked), style: `top:${index * ROW}px`, title,
      onclick: () => this.choose(row, index) }, ...cells);
  }

  last(row) {
    const value = "value" in row && !["return", "n_turns"].includes(this.query().sort) ? row.value : row.n_tokens;
    return h("span", {}, row.hits ? `${row.hits} hits` : number(value));
  }

  heading() {
    const sort = this.view.model.get("sort"), name = sort.replace(/^-/, "");
    const third = name && !["return", "n_turns"].includes(name) ? name : "n_tokens";
    const column = (key) => h("button", { class: "cw-sort", title: `sort by ${COLUMNS[key] ?? key}`, onclick: () => this.sortBy(key) },
      COLUMNS[key] ?? key, name === key ? (sort.startsWith("-") ? " ↓" : " ↑") : "");
    this.head.className = `cw-head${this.mode === "groups" ? " cw-group" : ""}`;
    this.head.replaceChildren(...(this.mode === "groups"
      ? ["step·group", "won", "mean return", "spread", "|ΔB|", "task"].map((text) => h("span", {}, text))
      : [column("outcome"), h("button", { class: "cw-sort", title: "the order of the run", onclick: () => this.sortBy("") }, "step·group·ep."),
         column("return"), column("n_turns"), column(third), h("span", {}, this.view.overview.beliefs ? "belief" : "")]));
    this.head.firstChild.classList.toggle("cw-narrow", this.mode !== "groups");
  }

  sortBy(column) {
    const now = this.view.model.get("sort");
    this.view.put({ sort: column && (now === `-${column}` ? column : `-${column}`) });
    this.reload();
  }

  choose(row, index) {
    this.cursor = index;
    if (this.mode === "groups") return this.view.go({ step: row.step, episode: row.episode }).then(() => this.view.compare(true));
    return this.view.go({ step: row.step, episode: row.episode, turn: row.hits ? row.first_hit : null });
  }

  async move(by) {
    if (!this.total) return;
    const index = clamp(this.cursor < 0 ? 0 : this.cursor + by, 0, this.total - 1);
    const rows = await this.page(Math.floor(index / PAGE));
    const row = rows?.[index % PAGE];
    if (row) await this.choose(row, index);
    this.reveal();
    this.draw();
  }

  reveal() {
    if (this.cursor < 0) return;
    const top = this.cursor * ROW, room = this.el.clientHeight - ROW - this.head.offsetHeight;
    if (top < this.el.scrollTop || top > this.el.scrollTop + room) this.el.scrollTop = Math.max(0, top - room / 2);
  }
}

// One episode's turns: drawn at once without tokens, which are asked for when a turn comes into view

class Transcript {
  constructor(view, shell, scroller) {
    Object.assign(this, { view, scroller, step: shell.episode.step, episode: shell.episode.episode, turns: shell.turns, asked: new Set() });
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

function beliefStrip(turns, width, at, onTurn) {
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

// The whole view

class View {
  constructor(model, el) {
    Object.assign(this, { model, el, at: parseLink(model.get("link")), notes: [], transcripts: [], signal: null, limit: null, shown: null });
    const { ask, close } = client(model, () => this.start());
    Object.assign(this, { ask, closeClient: close });
    this.list = new List(this);
    this.build();
    this.theme = themeOf(this.root);
    this.root.dataset.theme = this.theme.name;
    this.watch();
    this.start();
  }

  build() {
    const typing = (name) => debounce((event) => { this.put({ [name]: event.target.value }); this.list.reload(); }, 200);
    const field = (name, hint, title) => h("input", { class: `cw-${name}`, type: "text", placeholder: hint, title, value: this.model.get(name), spellcheck: "false", autocomplete: "off", oninput: typing(name) });
    this.search = field("search", "search text  /", "what an observation, an action or a response contains");
    this.filter = field("filter", "filter: return > 0.5 and n_turns < 6", "comparisons of columns, joined by and");
    this.sorter = h("select", { class: "cw-sorter", title: "sort by", onchange: () => { this.put({ sort: this.sorter.value }); this.list.reload(); } });
    this.modes = h("button", { class: "cw-mode", title: "groups or episodes (g)", onclick: () => this.toggleMode() }, "groups");
    this.picks = h("div", { class: "cw-picks" });
    this.status = h("div", { class: "cw-status", role: "status", "aria-live": "polite" });
    this.colorBy = h("select", { class: "cw-color", title: "what colours the tokens", onchange: () => this.color(this.colorBy.value) });
    this.legend = h("div", { class: "cw-legend" });
    this.linkBox = h("input", { class: "cw-link", type: "text", spellcheck: "false", title: "link to this place; paste another one and press Enter", onchange: () => this.follow(this.linkBox.value) });
    this.title = h("div", { class: "cw-title" });
    this.strip = h("div", { class: "cw-belief" });
    this.main = h("div", { class: "cw-main", tabindex: "-1" });
    this.notesPane = h("div", { class: "cw-notes", hidden: true });
    this.tip = h("div", { class: "cw-tip", hidden: true });
    this.help = h("div", { class: "cw-help", hidden: true, role: "dialog", "aria-label": "keys", onclick: () => this.showHelp(false) },
      h("table", {}, ...KEYS.map(([key, text]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text)))));
    const button = (name, text, title, onclick) => (this[name] = h("button", { title, onclick }, text));
    this.root = h("div", { class: "cw-explorer", tabindex: "0", "data-lm-suppress-shortcuts": "true", style: `height:${clamp(Number(this.model.get("height")) || 720, 320, 4000)}px` },
      h("div", { class: "cw-left" }, h("div", { class: "cw-bar" }, this.search, this.filter, h("div", { class: "cw-line" }, this.sorter, this.modes)),
        this.picks, this.list.el, this.status),
      h("div", { class: "cw-right" }, this.title,
        h("div", { class: "cw-controls" }, this.colorBy, this.legend, button("comparing", "compare", "members of the group side by side (c)", () => this.compare(!this.comparison)),
          button("noting", "notes", "notes on this episode (n)", () => this.showNotes(this.notesPane.hidden)), button("helping", "?", "keys", () => this.showHelp(this.help.hidden))),
        this.strip, this.main, this.notesPane, this.linkBox), this.tip, this.help);
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.el.replaceChildren(this.root);
  }

  watch() {
    this.recolour = new MutationObserver(() => this.retheme());
    for (const target of [document.body, document.documentElement]) this.recolour.observe(target, { attributes: true });
    this.resized = new ResizeObserver(debounce(() => { this.drawStrip(); this.list.draw(); }, 60));
    this.resized.observe(this.root);
    this.changes = { link: () => this.moved(), color: () => this.color(this.model.get("color")) };
    for (const name of ["filter", "search", "sort"]) {
      this.changes[name] = () => {
        if (this[name] && this[name].value === this.model.get(name)) return;
        if (this[name]) this[name].value = this.model.get(name);
        if (this.overview) this.list.reload();
      };
    }
    for (const [name, f] of Object.entries(this.changes)) this.model.on(`change:${name}`, f);
  }

  close() {
    this.recolour.disconnect();
    this.resized.disconnect();
    for (const [name, f] of Object.entries(this.changes)) this.model.off(`change:${name}`, f);
    for (const transcript of this.transcripts) transcript.close();
    this.closeClient();
  }

  async start() {
    try {
      this.overview = await this.ask("open");
      const { columns, signals, notes } = this.overview, name = (c) => COLUMNS[c] ?? c;
      const options = [["", "order of the run"], ...columns.flatMap((c) => [[`-${c}`, `${name(c)}, high first`], [c, `${name(c)}, low first`]])];
      this.sorter.replaceChildren(...options.map(([value, text]) => h("option", { value, selected: value === this.model.get("sort") }, text)));
      this.colorBy.replaceChildren(...signals.map((g) => h("option", { value: g.name }, g.label)));
      this.noting.hidden = !notes && !this.overview.notes_shown;
      const listed = this.list.reload();
      await Promise.all([listed, this.color(this.model.get("color")), this.readNotes()]);
      if (this.at.step == null) this.at = { ...this.at, run: this.overview.run, ...first(this.list.picks) };
      await this.show();
    } catch (error) { this.said(error.message, true); }
  }

  put(values) {
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  said(text, bad = false) {
    const { total, mode } = this.list, all = this.overview?.[mode];
    this.status.textContent = text || (this.overview ? `${total === all ? total : `${total} of ${all}`} ${mode}, ${this.overview.run}` : "");
    this.status.classList.toggle("cw-error", bad);
  }

  listed() {
    this.picks.replaceChildren(...Object.entries(this.list.picks).map(([name, [step, episode]]) =>
      h("button", { title: `step ${step}, episode ${episode}`, onclick: () => this.go({ step, episode }).then(() => this.list.reload(true)) }, name)));
    this.sorter.value = this.model.get("sort");
  }

  toggleMode() {
    this.list.mode = this.list.mode === "groups" ? "episodes" : "groups";
    this.modes.textContent = this.list.mode === "groups" ? "episodes" : "groups";
    this.list.reload();
  }

  // Where the view is

  async go(place) {
    const next = { run: this.overview.run, turn: null, start: null, end: null, ...place };
    const same = next.step === this.at.step && next.episode === this.at.episode && this.shown;
    this.at = next;
    this.put({ link: writeLink(next) });
    if (same) this.arrived();
    else await this.show();
  }

  select(transcript, turn, start = null, end = null) {
    const { step, episode } = transcript;
    this.at = { run: this.overview.run, step, episode, turn, start, end };
    this.put({ link: writeLink(this.at) });
    this.arrived(false);
  }

  follow(text) {
    this.put({ link: text.trim().replace(/^[#?]/, "") });
    this.moved();
  }

  async moved() {
    const text = this.model.get("link");
    if (!this.overview || text === writeLink(this.at)) return;
    const next = parseLink(text);
    if (next.run !== this.overview.run || next.step == null || next.episode == null) {
      this.linkBox.value = writeLink(this.at);
      return this.said("the link names no episode of this run", true);
    }
    const same = next.step === this.at.step && next.episode === this.at.episode;
    this.at = next;
    if (same && this.shown) this.arrived();
    else await this.show();
    this.list.reload(true);
  }

  async show() {
    const { step, episode } = this.at;
    let shell;
    try { shell = await this.ask("episode", { step, episode }); } catch (error) { return this.said(error.message, true); }
    if (step !== this.at.step || episode !== this.at.episode) return;
    this.shown = shell;
    if (this.comparison) await this.drawComparison();
    else this.drawTranscript();
    this.arrived();
  }

  drawTranscript() {
    for (const old of this.transcripts) old.close();
    this.main.className = "cw-main";
    const transcript = new Transcript(this, this.shown, this.main);
    this.transcripts = [transcript];
    this.main.replaceChildren(...transcript.blocks.map((b) => b.el));
    this.main.scrollTop = 0;
  }

  arrived(scroll = true) {
    const { episode } = this.shown, { at } = this;
    const facts = [["return", episode.return], ["advantage", episode.advantage, true], ["prior", episode.prior], ["turns", episode.n_turns], ["tokens", episode.n_tokens]];
    this.title.replaceChildren(h("i", { class: episode.outcome ? "cw-won" : "cw-lost" }, episode.outcome ? "✓ succeeded" : "✗ failed"),
      h("b", {}, `step ${episode.step} · group ${episode.group} · episode ${episode.episode}`), h("span", { class: "cw-task" }, line(episode.task)),
      ...facts.filter(([, v]) => known(v)).map(([name, v, signed]) => h("span", { class: "cw-fact" }, `${name} `, h("b", {}, number(v, signed)))));
    this.linkBox.value = writeLink(at);
    this.drawStrip();
    for (const transcript of this.transcripts) { transcript.paint(); transcript.marks(this.notes); }
    if (scroll && at.turn != null) this.scrollTo(at.turn);
    this.list.draw();
    this.drawNotes();
  }

  scrollTo(turn) {
    const block = this.transcripts[0]?.blocks.find((b) => b.turn.turn === turn);
    if (!block) return;
    const delta = block.el.getBoundingClientRect().top - this.main.getBoundingClientRect().top;
    this.main.scrollTop += delta - Math.min(60, this.main.clientHeight / 5);
  }

  loaded(transcript) { transcript.marks(this.notes); }

  drawStrip() {
    if (!this.shown) return;
    this.strip.hidden = !this.shown.turns.some((t) => known(t.belief));
    if (!this.strip.hidden) this.strip.replaceChildren(beliefStrip(this.shown.turns, Math.max(this.strip.clientWidth, 200), this.at, (turn) => this.go({ step: this.at.step, episode: this.at.episode, turn })));
  }

  pivotal(by) {
    const turns = this.shown.turns.filter((t) => t.pivotal).map((t) => t.turn), now = this.at.turn ?? (by > 0 ? -1 : Infinity);
    const next = by > 0 ? turns.find((t) => t > now) ?? turns[0] : turns.filter((t) => t < now).at(-1) ?? turns.at(-1);
    if (next == null) return this.said("no turn of this episode is flagged as pivotal");
    this.go({ step: this.at.step, episode: this.at.episode, turn: next });
  }

  // Colours

  async color(name) {
    const { signals } = this.overview ?? {}, signal = signals?.find((g) => g.name === name) ?? signals?.[0];
    if (!signal) return;
    this.signal = signal;
    this.colorBy.value = signal.name;
    if (this.model.get("color") !== signal.name) this.put({ color: signal.name });
    const { limit } = await this.ask("scale", { signal: signal.name });
    if (this.signal !== signal) return;
    this.limit = limit;
    this.repaint();
  }

  repaint() {
    const { signal, limit, theme } = this;
    if (!signal) return;
    const low = signal.centre == null ? 0 : signal.centre - limit, high = (signal.centre ?? 0) + limit;
    const steps = Array.from({ length: 21 }, (_, i) => colours(theme, signal, limit, low + ((high - low) * i) / 20)?.background ?? `rgb(${theme.paper})`);
    this.legend.title = signal.meaning;
    this.legend.replaceChildren(...(limit == null ? [h("span", { class: "cw-error" }, "not recorded in this run")]
      : [h("span", {}, number(low)), h("span", { class: "cw-ramp", style: `background:linear-gradient(to right,${steps.join(",")})` }),
         h("span", {}, number(high)), h("span", { class: "cw-unit" }, signal.unit)]));
    for (const transcript of this.transcripts) transcript.paint();
  }

  retheme() {
    const theme = themeOf(this.root);
    if (String(theme.paper) === String(this.theme.paper)) return;
    this.theme = theme;
    this.root.dataset.theme = theme.name;
    this.repaint();
  }

  hover(transcript, index, target) {
    const block = transcript?.blocks[index], cell = block && transcript.cellOf(block, target);
    this.tip.hidden = !cell;
    if (!cell) return;
    const { chunk, from, to } = cell, many = to - from, mean = (v) => v.reduce((sum, x) => sum + x, 0) / v.length;
    const first = chunk.first + from, place = many > 1 ? `tokens ${first} to ${first + many - 1}, joined` : `token ${first}`;
    const rows = this.overview.signals.map((g) => [g, chunk.values[g.name].subarray(from, to)]).filter(([, v]) => known(v[0]))
      .map(([g, v]) => h("tr", { class: g === this.signal ? "cw-on" : "" }, h("td", {}, g.label), h("td", {}, number(mean(v), true)), h("td", {}, many > 1 ? `${g.unit}, mean` : g.unit)));
    this.tip.replaceChildren(h("code", {}, JSON.stringify(plain(cell.text)).slice(0, 200)),
      h("div", {}, `id ${Array.from(chunk.ids.subarray(from, to)).join(", ")} · ${place} of turn ${block.turn.turn} (${block.turn.n_tokens})`), h("table", {}, ...rows));
    const box = target.getBoundingClientRect(), root = this.root.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.tip;
    const below = box.bottom - root.top + 6, above = box.top - root.top - offsetHeight - 6;
    this.tip.style.left = `${clamp(box.left - root.left, 4, root.width - offsetWidth - 8)}px`;
    this.tip.style.top = `${below + offsetHeight < root.height || above < 0 ? below : above}px`;
  }

  // Members of a group side by side, from the first turn at which they part

  async compare(on) {
    this.comparison = on ? { members: null } : null;
    this.comparing.classList.toggle("cw-on", on);
    if (on) await this.drawComparison();
    else this.drawTranscript();
    this.arrived();
  }

  async drawComparison() {
    const { step, episode } = this.at;
    try {
      const { members } = await this.ask("compare", { step, episode });
      const other = members.slice(1).filter((m) => m.outcome !== members[0].outcome);
      const picked = this.comparison.picked?.filter((e) => members.some((m) => m.episode === e)) ?? [];
      this.comparison = { members, base: episode, picked: picked.length && this.comparison.base === episode ? picked : [(other[0] ?? members[1])?.episode].filter((e) => e != null) };
      await this.layComparison();
    } catch (error) { this.said(error.message, true); }
  }

  async layComparison() {
    const { members, base, picked, open } = this.comparison, step = this.at.step;
    const shown = [members[0], ...picked.map((e) => members.find((m) => m.episode === e))];
    const shells = await Promise.all(shown.map((m) => (m.episode === base ? this.shown : this.ask("episode", { step, episode: m.episode }))));
    for (const old of this.transcripts) old.close();
    this.transcripts = shells.map((shell) => new Transcript(this, shell, this.main));
    const part = Math.min(...shown.slice(1).map((m) => m.differs ?? Infinity)), rows = Math.max(...shells.map((x) => x.turns.length));
    const same = Number.isFinite(part) ? part : 0;
    const chips = members.slice(1).map((m) => h("button", { class: picked.includes(m.episode) ? "cw-on" : "", title: m.differs == null ? "the same throughout" : `the same up to turn ${m.differs}`,
      onclick: () => this.chooseMember(m.episode) }, `${m.outcome ? "✓" : "✗"} ${m.episode}`));
    const heads = shown.map((m) => h("div", { class: "cw-colhead" }, h("i", { class: m.outcome ? "cw-won" : "cw-lost" }, m.outcome ? "✓" : "✗"), h("b", {}, ` episode ${m.episode} `), `return ${number(m.return)}, A ${number(m.advantage, true)}`));
    const grid = h("div", { class: "cw-columns", style: `grid-template-columns:repeat(${shown.length},minmax(210px,1fr))` }, ...heads);
    if (same > 0) grid.append(h("button", { class: "cw-wide cw-shared", onclick: () => { this.comparison.open = !open; this.layComparison(); } },
      `${open ? "▾" : "▸"} ${same === 1 ? "turn 0 is" : `turns 0 to ${same - 1} are`} the same: ${shells[0].turns.slice(0, same).map((t) => line(t.action)).join(" → ").slice(0, 160)}`));
    for (let k = open ? 0 : same; k < rows; k++) {
      if (k === same && Number.isFinite(part)) grid.append(h("div", { class: "cw-wide cw-part" }, this.parting(shown, part, shells)));
      for (const transcript of this.transcripts) grid.append(transcript.blocks[k]?.el ?? h("div", { class: "cw-none" }, k === transcript.blocks.length ? "ended" : ""));
    }
    this.main.className = "cw-main cw-comparing";
    this.main.replaceChildren(h("div", { class: "cw-chips" }, "beside it: ", ...chips), grid);
    this.main.scrollTop = 0;
    this.repaint();
  }

  parting(shown, part, shells) {
    const [mine, theirs] = [shown[0], shown.slice(1).find((m) => m.differs === part)], action = (i) => `“${line(shells[i].turns[part]?.action).slice(0, 60)}”`;
    if (!theirs.same_state) return `Turn ${part}: the first difference; what they saw differs already.`;
    const { credit, other_credit: other } = theirs, opposite = known(credit) && known(other) && credit * other < 0;
    return `Turn ${part}: same state, different action${opposite ? ", opposite credit" : ""}. Episode ${mine.episode} ${action(0)} ${number(credit, true)}; episode ${theirs.episode} ${action(shown.indexOf(theirs))} ${number(other, true)}.`;
  }

  chooseMember(episode) {
    const { picked } = this.comparison;
    const next = picked.includes(episode) ? picked.filter((e) => e !== episode) : [...picked, episode];
    if (next.length) this.comparison.picked = next;
    this.layComparison();
  }

  // Notes

  async readNotes() {
    try { this.noted(await this.ask("notes")); } catch (error) { this.said(error.message, true); }
  }

  noted({ notes, warnings }) {
    this.notes = notes;
    this.noting.textContent = notes.length ? `notes ${notes.length}` : "notes";
    if (warnings?.length) this.said(warnings[0], true);
    for (const transcript of this.transcripts) transcript.marks(notes);
    this.list.draw();
    if (this.shown) this.drawNotes();
  }

  showNotes(on, write = false) {
    this.notesPane.hidden = !on;
    this.noting.classList.toggle("cw-on", on);
    this.drawNotes();
    if (on && write) this.notesPane.querySelector("textarea")?.focus();
  }

  drawNotes() {
    if (this.notesPane.hidden) return;
    const typed_ = this.notesPane.querySelector("textarea")?.value ?? "", { at } = this;
    const here = this.notes.filter((n) => n.step === at.step && n.episode === at.episode);
    const entries = here.map((note) => this.noteEntry(note));
    this.notesPane.replaceChildren(...(this.overview.notes ? [this.noteForm(typed_)] : []),
      h("div", { class: "cw-notelist" }, ...(entries.length ? entries : [h("span", { class: "cw-wait" }, "no notes on this episode yet")])));
  }

  placeName({ turn, start, end }) {
    return turn == null ? "the whole episode" : `turn ${turn}` + (start == null ? "" : `, token${end - start > 1 ? `s ${start} to ${end - 1}` : ` ${start}`}`);
  }

  noteForm(text, note = null) {
    const labels = ["", ...this.overview.labels], area = h("textarea", { rows: "2", maxlength: "10000", placeholder: "a note (Ctrl+Enter saves)" });
    area.value = text;
    const label = h("select", { title: "label" }, ...labels.map((l) => h("option", { value: l, selected: l === (note?.label ?? "") }, l || "no label")));
    const tags = h("input", { type: "text", class: "cw-tags", placeholder: "tags, with commas", value: note?.tags.join(", ") });
    const save = async () => {
      const values = { text: area.value, label: label.value || null, tags: tags.value.split(",").map((t) => t.trim()).filter(Boolean) }, { at } = this;
      if (!values.text.trim() && !values.label) return;
      try {
        const place = { step: at.step, episode: at.episode, turn: at.turn, span: at.start == null ? null : [at.start, at.end] };
        const found = note ? await this.ask("note_edit", { note: note.id, ...values }) : await this.ask("note_add", { ...place, ...values });
        area.value = "";
        this.noted(found);
        this.root.focus({ preventScroll: true });
      } catch (error) { this.said(error.message, true); }
    };
    area.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && save());
    return h("div", { class: "cw-form" }, h("div", { class: "cw-where" }, note ? "edit" : "on ", h("b", {}, this.placeName(note ?? this.at))), area,
      h("div", { class: "cw-line" }, label, tags, h("button", { class: "cw-save", onclick: save }, "save"),
        note && h("button", { onclick: () => this.drawNotes() }, "cancel")));
  }

  noteEntry(note) {
    const remove = async () => {
      try { this.noted(await this.ask("note_delete", { note: note.id })); } catch (error) { this.said(error.message, true); }
    };
    const entry = h("div", { class: "cw-note" }, h("div", { class: "cw-where" },
      h("button", { class: "cw-goto", onclick: () => this.go({ step: note.step, episode: note.episode, turn: note.turn, start: note.start, end: note.end }) }, this.placeName(note)), note.label && h("span", { class: "cw-label" }, note.label),
      ...note.tags.map((tag) => h("span", { class: "cw-tag" }, `#${line(tag)}`)), h("small", {}, `${line(note.author)}, ${note.time.slice(0, 16).replace("T", " ")} UTC`),
      this.overview.notes && h("button", { onclick: () => entry.replaceWith(this.noteForm(note.text, note)) }, "edit"),
      this.overview.notes && h("button", { onclick: remove }, "delete")), h("div", { class: "cw-text" }, plain(note.text)));
    return entry;
  }

  // Keys

  showHelp(on) { this.help.hidden = !on; }

  key(event) {
    event.stopPropagation();
    const field = event.target.matches("input, textarea, select");
    if (event.key === "Escape") {
      if (field) this.root.focus({ preventScroll: true });
      else if (!this.help.hidden) this.showHelp(false);
      else if (this.shown && this.at.turn != null) this.go({ step: this.at.step, episode: this.at.episode });
      return;
    }
    if (field || event.ctrlKey || event.metaKey || event.altKey || !this.shown) return;
    const does = { j: () => this.list.move(1), k: () => this.list.move(-1), p: () => this.pivotal(1), P: () => this.pivotal(-1), "/": () => this.search.focus(),
      f: () => this.filter.focus(), c: () => this.compare(!this.comparison), n: () => this.showNotes(true, true), g: () => this.toggleMode(),
      "?": () => this.showHelp(this.help.hidden) }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}

function debounce(f, wait) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => f(...args), wait); };
}

function first(picks) {
  const [step, episode] = picks["most revised"] ?? picks.median ?? [null, null];
  return { step, episode };
}

/* Draw the explorer into `el`; returns what takes it away again. */
export function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
