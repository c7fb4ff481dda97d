import { h, known, line, mark, number, sign } from "./page.js";
import { Transcript } from "./transcript.js";

/* Members of a group side by side, a row a turn, from the first turn at which they part. */
export class Comparison {
  constructor(view) { Object.assign(this, { view, members: [], base: null, picked: [], open: false }); }

  /* The view's episode and, to begin with, the member of the other outcome that went its way longest. */
  async show() {
    const { step, episode } = this.view.at;
    try {
      const { members } = await this.view.ask("compare", { step, episode });
      const other = members.slice(1).find((m) => m.outcome !== members[0].outcome) ?? members[1];
      const kept = this.base === episode ? this.picked.filter((e) => members.some((m) => m.episode === e)) : [];
      Object.assign(this, { members, base: episode, picked: kept.length ? kept : other ? [other.episode] : [] });
      await this.draw();
    } catch (error) { this.view.said(error.message, true); }
  }

  async draw() {
    const { view, members, picked } = this, { step } = view.at, mine = view.shown;
    const shown = [members[0], ...picked.map((e) => members.find((m) => m.episode === e))];
    const shells = await Promise.all(shown.map((m) => (m.episode === mine.episode.episode ? mine : view.ask("episode", { step, episode: m.episode }))));
    for (const old of view.transcripts) old.close();
    view.transcripts = shells.map((shell) => new Transcript(view, shell, view.main));
    const part = Math.min(...shown.slice(1).map((m) => m.differs ?? Infinity)), same = Number.isFinite(part) ? part : 0;
    const grid = h("div", { class: "cw-columns", style: `grid-template-columns:repeat(${shown.length},minmax(210px,1fr))` }, ...shown.map(columnHead));
    if (same > 0) grid.append(this.shared(shells[0].turns.slice(0, same)));
    for (let k = this.open ? 0 : same; k < Math.max(...shells.map((shell) => shell.turns.length)); k++) {
      if (k === part) grid.append(h("div", { class: "cw-wide cw-part" }, parting(shown, part, shells)));
      for (const { blocks } of view.transcripts) grid.append(blocks[k]?.el ?? h("div", { class: "cw-none" }, k === blocks.length ? "ended" : ""));
    }
    view.main.className = "cw-main cw-comparing";
    view.main.replaceChildren(h("div", { class: "cw-chips" }, "beside it: ", ...members.slice(1).map((m) => this.chip(m))), grid);
    view.main.scrollTop = 0;
    view.repaint();
  }

  chip({ episode, outcome, differs }) {
    const title = differs == null ? "the same throughout" : `the same up to turn ${differs}`;
    return h("button", { class: this.picked.includes(episode) ? "cw-on" : "", title, onclick: () => this.choose(episode) }, `${sign(outcome)} ${episode}`);
  }

  shared(turns) {
    const which = turns.length === 1 ? "turn 0 is" : `turns 0 to ${turns.length - 1} are`, did = turns.map((t) => line(t.action)).join(" → ").slice(0, 160);
    return h("button", { class: "cw-wide cw-shared", onclick: () => { this.open = !this.open; this.draw(); } }, `${this.open ? "▾" : "▸"} ${which} the same: ${did}`);
  }

  choose(episode) {
    const next = this.picked.includes(episode) ? this.picked.filter((e) => e !== episode) : [...this.picked, episode];
    if (next.length) this.picked = next;
    this.draw();
  }
}

function columnHead({ outcome, episode, return: earned, advantage }) {
  return h("div", { class: "cw-colhead" }, mark(outcome),
    h("b", {}, ` episode ${episode} `), `return ${number(earned)}, A ${number(advantage, true)}`);
}

/* The turn at which they part, in words. The state is the same where all that was seen and done before is. */
function parting(shown, part, shells) {
  const which = shown.findIndex((m, i) => i && m.differs === part), { same_state: same, credit, other_credit: other } = shown[which];
  if (!same) return `Turn ${part}: the first difference; what they saw differs already.`;
  const did = (i, earned) => `Episode ${shown[i].episode} “${line(shells[i].turns[part]?.action).slice(0, 60)}” ${number(earned, true)}`;
  const opposite = known(credit) && known(other) && credit * other < 0;
  return `Turn ${part}: same state, different action${opposite ? ", opposite credit" : ""}. ${did(0, credit)}; ${did(which, other).replace("E", "e")}.`;
}
