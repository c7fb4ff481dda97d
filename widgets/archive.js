/* Chosen episodes of a run, as workbench/share.py packs them, and the answers to what the explorer asks of them: those of
   widgets/data.py, whose docstrings say what each name is. Figures of a group are of all its members in the run. */

export class Archive {
  static WINDOW = 4096; // most tokens of one answer
  static PREVIEW = 400; // characters of an observation that are sent before it is opened
  static LISTED = ["step", "episode", "group", "task", "outcome", "return", "n_turns", "n_tokens", "recorded", "path", "revised", "pivotal"];
  static COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

  constructor(buffer) {
    const size = new DataView(buffer).getUint32(0, true);
    this.head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    this.bytes = new Uint8Array(buffer, 4 + size);
    const { episodes, groups, turns, arrays, derived, n_cells } = this.head;
    this.arrays = Object.fromEntries(Object.entries(arrays).map(([name, layout]) => [name, this.array(layout)]));
    for (const [name, [from, less]] of Object.entries(derived)) {
      const minus = this.arrays[less];
      this.arrays[name] = this.arrays[from].map((value, i) => value - minus[i]);
    }
    this.places = new Map(episodes.step.map((step, i) => [`${step}:${episodes.episode[i]}`, i]));
    this.all = episodes.step.map((_, i) => i);
    this.group = new Map(groups.step.map((step, i) => [`${step}:${groups.group[i]}`, i]));
    this.spans = this.all.map(() => [0, 0]);
    this.tokenAt = [0];
    this.cellAt = [0];
    turns.step.forEach((step, i) => {
      const span = this.spans[this.places.get(`${step}:${turns.episode[i]}`)];
      if (span[1] === 0) span[0] = i;
      span[1] = i + 1;
      this.tokenAt.push(this.tokenAt[i] + turns.count[i]);
      this.cellAt.push(this.cellAt[i] + n_cells[i]);
    });
  }

  array({ length, offset, float }) {
    const words = new Uint32Array(length), planes = float ? [8, 16, 24] : [0, 8, 16, 24];
    planes.forEach((shift, p) => {
      const at = offset + p * length;
      for (let i = 0; i < length; i++) words[i] |= this.bytes[at + i] << shift;
    });
    return float ? new Float32Array(words.buffer) : words;
  }

  /* The answer to one request and its buffers; throws an Error of one line where there is none. */
  answer(request, args) {
    const known = { open: "open", rows: "rows", groups: "groups", episode: "episode", window: "window", text: "text", compare: "compare", scale: "scale", notes: "notes" };
    if (!Object.hasOwn(known, request)) throw new Error(`a report is read-only: ${request} is not answered`);
    const answer = this[known[request]](args);
    return Array.isArray(answer) ? answer : [answer, []];
  }

  open() {
    const { run, experiment, method, numeric, texts, signals, labels, episodes, groups } = this.head;
    return { run, experiment, method, episodes: this.all.length, groups: groups.step.length, steps: new Set(episodes.step).size, columns: numeric,
      text_columns: texts, signals, beliefs: numeric.includes("revised"), labels, notes: false };
  }

  notes() { return { notes: this.head.notes, warnings: [] }; }

  scale({ signal }) { return { signal, limit: this.head.limits[signal] ?? null }; }

  /* The row i of a table, of all columns or of some. */
  static row(table, i, names = Object.keys(table)) { return Object.fromEntries(names.filter((n) => n in table).map((n) => [n, table[n][i]])); }

  static range(from, to) { return Array.from({ length: to - from }, (_, i) => from + i); }

  // The list

  rows({ where = [], text = "", sort = "", descending = false, start = 0, count = 60, at = null }) {
    const { episodes } = this.head, { found, hits } = this.select(where, text);
    if (sort) this.sort(found, sort, descending);
    const index = at ? found.indexOf(this.places.get(`${at[0]}:${at[1]}`)) : -1;
    const rows = found.slice(start, start + count).map((i) => ({ ...Archive.row(episodes, i, Archive.LISTED), ...hits?.get(i), ...(sort && { value: episodes[sort][i] }) }));
    return { total: found.length, rows, picks: this.picks(found), index: index < 0 ? null : index };
  }

  groups({ where = [], text = "", start = 0, count = 60 }) {
    const { episodes, groups } = this.head, first = new Map();
    for (const i of this.select(where, text).found) {
      const group = this.group.get(`${episodes.step[i]}:${episodes.group[i]}`);
      if (!first.has(group)) first.set(group, episodes.episode[i]);
    }
    const rows = [...first].slice(start, start + count).map(([group, episode]) => ({ ...Archive.row(groups, group), episode }));
    return { total: first.size, rows };
  }

  select(where, text) {
    const term = text.trim().toLowerCase(), hits = term ? this.search(term) : null, tests = where.map((clause) => this.test(clause));
    return { found: this.all.filter((i) => (!hits || hits.has(i)) && tests.every((test) => test(i))), hits };
  }

  test({ column, op, value }) {
    const { numeric, texts, episodes } = this.head, isText = texts.includes(column), compare = Archive.COMPARE[op];
    if (!isText && !numeric.includes(column)) throw new Error(`unknown column to filter by '${column}'; known: ${[...numeric, ...texts].sort().join(", ")}`);
    if (typeof value !== (isText ? "string" : "number")) throw new Error(`filter: ${column} is compared with a ${isText ? "text" : "number"}`);
    if (isText && op !== "=" && op !== "!=") throw new Error(`filter: ${column} is text, which is compared by = or !=, not by ${op}`);
    return (i) => episodes[column][i] != null && compare(episodes[column][i], value);
  }

  /* Episodes with the term in a text of a turn: hits (turns) and first_hit (turn). */
  search(term) {
    const { turns } = this.head, texts = ["observation", "action", "response"].filter((n) => n in turns), out = new Map();
    this.lower ??= turns.step.map((_, i) => texts.map((n) => turns[n][i] ?? "").join("\u0000").toLowerCase());
    this.spans.forEach(([from, to], episode) => {
      for (let i = from; i < to; i++) {
        if (!this.lower[i].includes(term)) continue;
        const found = out.get(episode);
        if (found) found.hits += 1;
        else out.set(episode, { hits: 1, first_hit: turns.turn[i] });
      }
    });
    return out;
  }

  sort(found, column, descending) {
    const { numeric, episodes } = this.head;
    if (!numeric.includes(column)) throw new Error(`unknown column to sort by '${column}'; known: ${numeric.join(", ")}`);
    const values = episodes[column], by = descending ? -1 : 1;
    found.sort((a, b) => (values[a] == null) - (values[b] == null) || by * ((values[a] ?? 0) - (values[b] ?? 0)) || a - b);
  }

  /* Best, median, worst and most revised of those that pass; the latest step wins among equals. */
  picks(found) {
    const { step, episode, return: earned, n_turns: turns, revised } = this.head.episodes, name = (i) => [step[i], episode[i]];
    const later = (a, b) => step[b] - step[a] || episode[a] - episode[b];
    const by = found.filter((i) => earned[i] != null).sort((a, b) => earned[b] - earned[a] || turns[a] - turns[b] || later(a, b));
    if (!by.length) return {};
    const least = earned[by.at(-1)], worst = by.filter((i) => earned[i] === least).sort((a, b) => turns[b] - turns[a] || later(a, b))[0];
    const most = revised && found.filter((i) => revised[i] != null).sort((a, b) => revised[b] - revised[a] || later(a, b))[0];
    return { best: name(by[0]), median: name(by[by.length >> 1]), worst: name(worst), ...(most != null && { "most revised": name(most) }) };
  }

  // One episode

  span(step, episode) {
    const place = this.places.get(`${step}:${episode}`);
    if (place === undefined) throw new Error(`step ${step}, episode ${episode} is not among the ${this.all.length} episodes of this report`);
    return { place, from: this.spans[place][0], to: this.spans[place][1] };
  }

  episode({ step, episode }) {
    const { episodes, turns } = this.head, { place, from, to } = this.span(step, episode), names = Object.keys(turns).filter((n) => !["step", "episode", "observation", "response", "seen", "did", "count"].includes(n));
    return { episode: Archive.row(episodes, place), turns: Archive.range(from, to).map((i) => Archive.row(turns, i, names)) };
  }

  text({ step, episode, turn }) {
    const { turns } = this.head, { from, to } = this.span(step, episode), i = Archive.range(from, to).find((k) => turns.turn[k] === turn);
    if (i === undefined) throw new Error(`no turn ${turn} of step ${step}, episode ${episode}`);
    return Object.fromEntries(["observation", "action", "response"].map((n) => [n, turns[n]?.[i] ?? ""]));
  }

  window({ step, episode, first, last, start = 0 }) {
    const { turns, signals } = this.head, { from, to } = this.span(step, episode), names = signals.map((g) => g.name);
    const out = [], pieces = [];
    let used = 0, next = null;
    for (const i of Archive.range(from, to).filter((k) => turns.turn[k] >= first && turns.turn[k] <= last)) {
      if (used >= Archive.WINDOW) { next = [turns.turn[i], 0]; break; }
      const begin = turns.turn[i] === first ? start : 0, part = this.cells(i, begin, Archive.WINDOW - used), seen = turns.observation?.[i] ?? "";
      out.push({ turn: turns.turn[i], observation: seen.slice(0, Archive.PREVIEW), observation_chars: seen.length, action: (turns.action?.[i] ?? "").slice(0, Archive.PREVIEW),
        response: (turns.response?.[i] ?? "").slice(0, Archive.PREVIEW), cells: part.cells, starts: part.starts, first: begin, offset: used, count: part.stop - begin });
      pieces.push([this.tokenAt[i] + begin, this.tokenAt[i] + part.stop]);
      used += part.stop - begin;
      if (part.stop < turns.count[i]) { next = [turns.turn[i], part.stop]; break; }
    }
    const ids = new Int32Array(used).fill(-1), values = new Float32Array(names.length * used).fill(NaN);
    let at = 0;
    for (const [a, b] of pieces) {
      if (this.arrays.ids) ids.set(this.arrays.ids.subarray(a, b), at);
      names.forEach((name, k) => values.set(this.arrays[name].subarray(a, b), k * used + at));
      at += b - a;
    }
    return [{ turns: out, signals: names, next }, [ids.buffer, values.buffer]];
  }

  /* Cells of a turn from token `begin` on, of at most `room` tokens but of one cell at least. */
  cells(i, begin, room) {
    const { words, widths } = this.arrays, cells = [], starts = [];
    let token = 0, single = true;
    for (let c = this.cellAt[i]; c < this.cellAt[i + 1]; c++) {
      const width = widths ? widths[c] : 1;
      if (token >= begin) {
        if (cells.length && token + width - begin > room) break;
        cells.push(this.head.cells[words[c]]);
        starts.push(token);
        single &&= width === 1;
      }
      token += width;
    }
    return { cells, starts: single ? null : starts, stop: Math.max(token, begin) };
  }

  compare({ step, episode }) {
    const { episodes } = this.head, { place } = this.span(step, episode), group = episodes.group[place], mine = this.spans[place];
    const members = this.all.filter((i) => episodes.step[i] === step && episodes.group[i] === group)
      .map((i) => ({ ...Archive.row(episodes, i, ["episode", "outcome", "return", "advantage", "n_turns"]), ...this.difference(mine, this.spans[i]) }));
    members.sort((a, b) => (a.episode !== episode) - (b.episode !== episode) || (b.differs ?? -1) - (a.differs ?? -1)
      || (a.outcome === episodes.outcome[place]) - (b.outcome === episodes.outcome[place]) || a.episode - b.episode);
    return { step, group, members };
  }

  difference([from, to], [other, end]) {
    const { seen, did, turn_advantage: credit } = this.head.turns;
    for (let k = 0; k < Math.min(to - from, end - other); k++) {
      const [a, b] = [from + k, other + k], same = seen[a] === seen[b];
      if (!same || did[a] !== did[b]) return { differs: k, same_state: same, credit: credit?.[a] ?? null, other_credit: credit?.[b] ?? null };
    }
    return { differs: null, same_state: true, credit: null, other_credit: null };
  }
}
