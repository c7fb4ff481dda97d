/* The explorer's page side: one ES module, no build step, no network. A host calls render({model, el}).

   THE HOST. In a notebook anywidget is the host and a kernel answers. A static page can be one as well: this module (joined
   with what it imports by workbench/pages.py) exports {render} by default, and all that is used of `model` is get(name),
   set(name, value), save_changes(), on(event, f), off(event, f) and send(message), with
     names    link, color, filter, search, sort (texts; sort is "column" or "-column", descending), height (px)
     events   "change:<name>" when the host changed one of them, and "msg:custom" with (message, buffers).
   Around it an element of class cw-own-scheme makes it follow the reader's light or dark preference.

   THE PROTOCOL. The page sends {id, request, args}; the host answers by "msg:custom" with {id, answer} and buffers (a list
   of DataViews or ArrayBuffers), or {id, error: "one line"}. A message {event: "refreshed"} makes the page read anew.
   Rows are those of widgets/data.py, whose docstrings say what each name is:
     open {}                   -> {run, experiment, method, episodes, groups, steps, columns, text_columns, beliefs, labels,
                                   signals: [{name, label, unit, meaning, centre, flip}], notes: whether notes may be written}
     rows {where, text, sort, descending, start, count, at: [step, episode] or null}
                               -> {total, rows, picks: {best: [step, episode], ...}, index: place of `at` or null}
                                  where: [{column, op, value}], parsed from the filter line by list.js
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

import { clamp, client, colours, debounce, ended, h, known, line, mark, number, plain, themeOf } from "./page.js";
import { Comparison } from "./comparison.js";
import { COLUMNS, List, parseLink, writeLink } from "./list.js";
import { Notes } from "./notes.js";
import { beliefStrip, Transcript } from "./transcript.js";

const KEYS = [["j / k", "next / previous episode"], ["p / P", "next / previous pivotal turn"], ["/", "search"], ["f", "filter"],
  ["c", "compare with the group"], ["n", "note on what is selected"], ["g", "groups / episodes"],
  ["click, shift-click", "select a token, a span of them"], ["Esc", "leave a field, close, deselect"], ["?", "this list"]];

// The whole view

class View {
  constructor(model, el) {
    Object.assign(this, { model, el, at: parseLink(model.get("link")), transcripts: [], signal: null, limit: null, shown: null });
    const { ask, close } = client(model, () => this.start());
    Object.assign(this, { ask, closeClient: close });
    this.list = new List(this);
    this.notes = new Notes(this);
    this.build();
    this.theme = themeOf(this.root);
    this.root.dataset.theme = this.theme.name;
    this.watch();
    this.start();
  }

  build() {
    const typing = (name) => debounce((event) => this.shape({ [name]: event.target.value }), 200);
    const field = (name, hint, title) => h("input", { class: `cw-${name}`, type: "text", placeholder: hint, title, value: this.model.get(name), spellcheck: "false", autocomplete: "off", oninput: typing(name) });
    this.search = field("search", "search text  /", "what an observation, an action or a response contains");
    this.filter = field("filter", "filter: return > 0.5 and n_turns < 6", "comparisons of columns, joined by and");
    this.sorter = h("select", { class: "cw-sorter", title: "sort by", onchange: () => this.shape({ sort: this.sorter.value }) });
    this.modes = h("button", { class: "cw-mode", title: "groups or episodes (g)", onclick: () => this.toggleMode() }, "groups");
    this.picks = h("div", { class: "cw-picks" });
    this.status = h("div", { class: "cw-status", role: "status", "aria-live": "polite" });
    this.colorBy = h("select", { class: "cw-color", title: "what colours the tokens", onchange: () => this.color(this.colorBy.value) });
    this.legend = h("div", { class: "cw-legend" });
    this.linkBox = h("input", { class: "cw-link", type: "text", spellcheck: "false", title: "link to this place; paste another one and press Enter", onchange: () => this.follow(this.linkBox.value) });
    this.title = h("div", { class: "cw-title" });
    this.strip = h("div", { class: "cw-belief" });
    this.main = h("div", { class: "cw-main", tabindex: "-1" });
    this.tip = h("div", { class: "cw-tip", hidden: true });
    this.help = h("div", { class: "cw-help", hidden: true, role: "dialog", "aria-label": "keys", onclick: () => this.showHelp(false) },
      h("table", {}, ...KEYS.map(([key, text]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text)))));
    const button = (name, text, title, onclick) => (this[name] = h("button", { title, onclick }, text));
    this.root = h("div", { class: "cw-explorer", tabindex: "0", style: `height:${this.height()}` },
      h("div", { class: "cw-left" }, h("div", { class: "cw-bar" }, this.search, this.filter, h("div", { class: "cw-line" }, this.sorter, this.modes)),
        this.picks, this.list.el, this.status),
      h("div", { class: "cw-right" }, this.title,
        h("div", { class: "cw-controls" }, this.colorBy, this.legend, button("comparing", "compare", "members of the group side by side (c)", () => this.compare(!this.comparison)),
          button("noting", "notes", "notes on this episode (n)", () => this.showNotes(this.notes.el.hidden)), button("helping", "?", "keys", () => this.showHelp(this.help.hidden))),
        this.strip, this.main, this.notes.el, this.linkBox), this.tip, this.help);
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.main.addEventListener("scroll", () => this.hover(null), { passive: true });
    this.el.replaceChildren(this.root);
  }

  height() { return `${clamp(Number(this.model.get("height")) || 720, 320, 4000)}px`; }

  watch() {
    this.recolour = new MutationObserver(() => this.retheme());
    for (const target of [document.body, document.documentElement]) this.recolour.observe(target, { attributes: true });
    this.resized = new ResizeObserver(debounce(() => { this.drawStrip(); this.list.draw(); }, 60));
    this.resized.observe(this.root);
    window.addEventListener("keydown", (this.guard = (event) => this.keep(event)), true);
    this.changes = { height: () => { this.root.style.height = this.height(); }, link: () => this.moved(), color: () => this.color(this.model.get("color")) };
    for (const name of ["filter", "search", "sort"]) {
      this.changes[name] = () => {
        if (this[name] && this[name].value !== this.model.get(name)) this[name].value = this.model.get(name);
        if (this.overview && this.list.changed()) this.list.reload();
      };
    }
    for (const [name, f] of Object.entries(this.changes)) this.model.on(`change:${name}`, f);
  }

  close() {
    window.removeEventListener("keydown", this.guard, true);
    this.recolour.disconnect();
    this.resized.disconnect();
    for (const [name, f] of Object.entries(this.changes)) this.model.off(`change:${name}`, f);
    for (const transcript of this.transcripts) transcript.close();
    this.closeClient();
  }

  async start() {
    try {
      this.overview = await this.ask("open");
      const { columns, signals, notes, labels } = this.overview, name = (c) => COLUMNS[c] ?? c;
      const options = [["", "order of the run"], ...columns.flatMap((c) => [[`-${c}`, `${name(c)}, high first`], [c, `${name(c)}, low first`]])];
      this.sorter.replaceChildren(...options.map(([value, text]) => h("option", { value, selected: value === this.model.get("sort") }, text)));
      this.colorBy.replaceChildren(...signals.map((g) => h("option", { value: g.name }, g.label)));
      Object.assign(this.notes, { writable: notes, labels });
      const listed = this.list.reload(true);
      await Promise.all([listed, this.color(this.model.get("color")), this.notes.try("notes")]);
      if (this.at.step == null) this.at = { ...this.at, run: this.overview.run, ...first(this.list.picks) };
      await this.show();
    } catch (error) { this.said(error.message, true); }
  }

  /* Shape the list; a host may or may not say `change` for what was set here. */
  shape(values) {
    this.put(values);
    if (this.list.changed()) this.list.reload();
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
    for (const transcript of this.transcripts) transcript.refold();
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
    this.shown = transcript.shell;
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
    if (this.comparison) await this.comparison.show();
    else this.drawTranscript();
    this.arrived();
  }

  drawTranscript() {
    for (const old of this.transcripts) old.close();
    this.main.className = "cw-main";
    const transcript = new Transcript(this, this.shown, this.main);
    this.transcripts = [transcript];
    const none = h("div", { class: "cw-none" }, "the turns of this episode were not recorded");
    this.main.replaceChildren(...(transcript.blocks.length ? transcript.blocks.map((b) => b.el) : [none]));
    this.main.scrollTop = 0;
  }

  arrived(scroll = true) {
    const { episode } = this.shown, { at } = this;
    const facts = [["return", episode.return], ["advantage", episode.advantage, true], ["prior", episode.prior], ["turns", episode.n_turns], ["tokens", episode.n_tokens]];
    this.title.replaceChildren(mark(episode.outcome, ended(episode.outcome)),
      h("b", {}, `step ${episode.step} · group ${episode.group ?? "–"} · episode ${episode.episode}`), h("span", { class: "cw-task" }, line(episode.task)),
      ...facts.filter(([, v]) => known(v)).map(([name, v, signed]) => h("span", { class: "cw-fact" }, `${name} `, h("b", {}, number(v, signed)))));
    this.linkBox.value = writeLink(at);
    this.drawStrip();
    for (const transcript of this.transcripts) { transcript.paint(); transcript.marks(this.notes.all); }
    if (scroll && at.turn != null) this.scrollTo(at.turn);
    this.list.draw();
    this.notes.draw();
  }

  scrollTo(turn) {
    const transcript = this.transcripts.find((t) => t.episode === this.at.episode), block = transcript?.blocks.find((b) => b.turn.turn === turn);
    if (!block) return;
    const delta = block.el.getBoundingClientRect().top - this.main.getBoundingClientRect().top;
    this.main.scrollTop += delta - Math.min(60, this.main.clientHeight / 5);
  }

  loaded(transcript) { transcript.marks(this.notes.all); }

  drawStrip() {
    if (!this.shown) return;
    this.strip.hidden = !this.shown.turns.some((t) => known(t.belief));
    if (!this.strip.hidden) this.strip.replaceChildren(beliefStrip(this.shown.turns, Math.max(this.strip.clientWidth - 8, 200), this.at, (turn) => this.go({ step: this.at.step, episode: this.at.episode, turn })));
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
      .map(([g, v]) => h("tr", { class: g === this.signal ? "cw-on" : "" }, h("td", {}, g.label), h("td", {}, number(mean(v), g.centre === 0)), h("td", {}, many > 1 ? `${g.unit}, mean` : g.unit)));
    this.tip.replaceChildren(h("code", {}, JSON.stringify(plain(cell.text)).slice(0, 200)),
      h("div", {}, `id ${Array.from(chunk.ids.subarray(from, to)).join(", ")} · ${place} of turn ${block.turn.turn} (${block.turn.n_tokens})`), h("table", {}, ...rows));
    const box = target.getBoundingClientRect(), root = this.root.getBoundingClientRect(), { offsetWidth, offsetHeight } = this.tip;
    const below = box.bottom - root.top + 6, above = box.top - root.top - offsetHeight - 6;
    this.tip.style.left = `${clamp(box.left - root.left, 4, root.width - offsetWidth - 8)}px`;
    this.tip.style.top = `${below + offsetHeight < root.height || above < 0 ? below : above}px`;
  }

  async compare(on) {
    this.comparison = on ? new Comparison(this) : null;
    this.comparing.classList.toggle("cw-on", on);
    if (on) await this.comparison.show();
    else this.drawTranscript();
    this.arrived();
  }

  noted() {
    const { length } = this.notes.all;
    this.noting.textContent = length ? `notes ${length}` : "notes";
    for (const transcript of this.transcripts) transcript.marks(this.notes.all);
    this.list.draw();
  }

  showNotes(on, write = false) {
    this.noting.classList.toggle("cw-on", on);
    this.notes.show(on, write);
  }

  // Keys

  /* JupyterLab must not take plain keys that are meant for the explorer; Ctrl+S and the like stay its own. */
  keep(event) {
    const ours = !(event.ctrlKey || event.metaKey) || event.key === "Enter";
    if (ours) this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    else this.root.removeAttribute("data-lm-suppress-shortcuts");
  }

  showHelp(on) { this.help.hidden = !on; }

  key(event) {
    if (!event.ctrlKey && !event.metaKey) event.stopPropagation();
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
    this.hover(null);
    does();
  }
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
