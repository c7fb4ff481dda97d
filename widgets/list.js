import { clamp, h, known, line, mark, number, s } from "./page.js";

const ROW = 28, PAGE = 60;
export const COLUMNS = { step: "step", episode: "episode", group: "group", outcome: "won", return: "return", n_turns: "turns",
  n_tokens: "tokens", revised: "largest |ΔB|", pivotal: "pivotal turns", invalid: "invalid turns", advantage: "advantage" };

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

export function parseLink(text) {
  const parts = new URLSearchParams(text), span = /^(\d+)-(\d+)$/.exec(parts.get("span") ?? "");
  const [step, episode, turn] = ["step", "episode", "turn"].map((n) => (/^\d+$/.test(parts.get(n) ?? "") ? Number(parts.get(n)) : null));
  return { run: parts.get("run"), step, episode, turn, start: span ? Number(span[1]) : null, end: span ? Number(span[2]) : null };
}

export function writeLink({ run, step, episode, turn, start, end }) {
  let text = `run=${encodeURIComponent(run).replace(/[!'()*]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase())}`;
  if (step != null) text += `&step=${step}`;
  if (episode != null) text += `&episode=${episode}`;
  if (turn != null) text += `&turn=${turn}`;
  return start != null ? `${text}&span=${start}-${end}` : text;
}

// The list of episodes or groups: rows are asked for when they come into view

export class List {
  constructor(view) {
    Object.assign(this, { view, mode: "episodes", total: 0, pages: new Map(), age: 0, cursor: -1, picks: {} });
    this.body = h("div", { class: "cw-rows" });
    this.head = h("div", { class: "cw-head" });
    this.none = h("div", { class: "cw-wait cw-empty", hidden: true }, "Nothing passes. ",
      h("button", { onclick: () => view.shape({ filter: "", search: "" }) }, "clear filter and search"));
    this.el = h("div", { class: "cw-list", role: "listbox", tabindex: "-1", "aria-label": "episodes" }, this.head, this.none, this.body);
    this.el.addEventListener("scroll", () => this.draw(), { passive: true });
  }

  query() {
    const { model } = this.view, sort = model.get("sort");
    const shared = { where: parseFilter(model.get("filter")), text: model.get("search") };
    return this.mode === "groups" ? shared : { ...shared, sort: sort.replace(/^-/, ""), descending: sort.startsWith("-") };
  }

  /* Whether the model's sort, filter and search are not those last asked for. */
  changed() {
    try { return JSON.stringify(this.query()) !== this.wanted; } catch (error) { this.view.said(error.message, true); return false; }
  }

  reload(keep = false) {
    this.loading = this.load(keep);
    return this.loading;
  }

  async load(keep) {
    const age = ++this.age, { at } = this.view;
    try {
      this.wanted = JSON.stringify(this.query());
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
    this.none.hidden = this.total > 0;
    this.body.style.height = `${this.total * ROW}px`;
    if (keep) this.reveal();
    else this.el.scrollTop = 0;
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
    const { at, notes: { all } } = this.view, isGroup = this.mode === "groups";
    const picked = row.step === at.step && (isGroup ? row.group === this.view.shown?.episode.group : row.episode === at.episode);
    const noted = all.some((n) => n.step === row.step && n.episode === row.episode);
    const cells = isGroup
      ? [h("b", {}, `${row.step}·${row.group ?? "–"}`), h("span", {}, `${row.won} of ${row.n}`), h("span", {}, number(row.mean)),
         h("span", {}, number(row.high - row.low)), h("span", {}, number(row.revised)), h("span", { class: "cw-task" }, line(row.task))]
      : [mark(row.outcome),
         h("b", {}, `${row.step}·${row.group ?? "–"}·${row.episode}`, noted && h("sup", { title: "has notes" }, "✎")),
         h("span", {}, number(row.return)), h("span", {}, number(row.n_turns)), this.last(row), sparkline(row)];
    const title = `step ${row.step}, group ${row.group ?? "–"}` + (isGroup ? "" : `, episode ${row.episode}: ${row.pivotal ?? 0} pivotal turns`
      + (row.hits ? `, found in ${row.hits} turns` : "")) + `\n${line(row.task)}`;
    return h("div", { class: `cw-row${isGroup ? " cw-group" : ""}${picked ? " cw-on" : ""}${!isGroup && row.group % 2 ? " cw-odd" : ""}${row.recorded === 0 ? " cw-bare" : ""}`,
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
    const column = (key) => h("button", { class: "cw-sort", title: `sort by ${key}`, onclick: () => this.sortBy(key) },
      key === "outcome" ? "✓" : COLUMNS[key] ?? key, name === key ? (sort.startsWith("-") ? " ↓" : " ↑") : "");
    this.head.className = `cw-head${this.mode === "groups" ? " cw-group" : ""}`;
    this.head.replaceChildren(...(this.mode === "groups"
      ? ["step·group", "won", "mean", "spread", "|ΔB|", "task"].map((text) => h("span", {}, text))
      : [column("outcome"), h("button", { class: "cw-sort", title: "the order of the run", onclick: () => this.sortBy("") }, "step·group·ep."),
         column("return"), column("n_turns"), column(third), h("span", {}, this.view.overview.beliefs ? "belief" : "")]));
  }

  sortBy(column) {
    const now = this.view.model.get("sort");
    this.view.shape({ sort: column && (now === `-${column}` ? column : `-${column}`) });
  }

  choose(row, index) {
    this.cursor = index;
    if (this.mode === "groups") return this.view.go({ step: row.step, episode: row.episode }).then(() => this.view.compare(true));
    return this.view.go({ step: row.step, episode: row.episode, turn: row.hits ? row.first_hit : null });
  }

  async move(by) {
    await this.loading; // a list under way has another order, and another place in it
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

export function sparkline(row) {
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
