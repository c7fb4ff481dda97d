/* The explorer in a page without a kernel: the page holds its data and is its own host.

   The page has the elements #explorer-view, #explorer-data (base64 of what workbench/share.py packs) and #explorer-said.
   The part of its address after # is the explorer's link and follows it. */

import { Archive } from "./archive.js";
import { parseLink, writeLink } from "./list.js";
import { render } from "./explorer.js";
import { unpack } from "./unpack.js";

class Host {
  constructor(archive, state) { Object.assign(this, { archive, state, heard: new Map() }); }

  get(name) { return this.state[name]; }

  set(name, value) { this.state[name] = value; }

  save_changes() {
    if (this.state.link && location.hash !== `#${this.state.link}`) history.replaceState(null, "", `#${this.state.link}`);
  }

  on(event, f) { this.heard.set(event, (this.heard.get(event) ?? new Set()).add(f)); }

  off(event, f) { this.heard.get(event)?.delete(f); }

  tell(event, ...values) { for (const f of this.heard.get(event) ?? []) f(...values); }

  /* Tell the page, after the first tokens were drawn. */
  shown() { requestAnimationFrame(() => setTimeout(() => window.dispatchEvent(new Event("explorer-shown")))); }

  send({ id, request, args }) {
    let reply, buffers = [];
    try {
      const [answer, found] = this.archive.answer(request, args ?? {});
      [reply, buffers] = [{ id, answer }, found];
    } catch (error) { reply = { id, error: error.message }; }
    queueMicrotask(() => this.tell("msg:custom", reply, buffers));
    if (request === "window") this.shown();
  }
}

/* Where an address leads: its link, or what of it this page holds, and what to say where that is less. */
function placeOf(archive, address) {
  if (!/(^|&)run=/.test(address)) return { link: "", said: "" };
  const { head } = archive, at = parseLink(address), all = head.episodes;
  if (at.run !== head.run) return { link: "", said: "The link is about another run than this report." };
  if (at.step == null) return { link: "", said: "" };
  const i = at.episode == null ? all.step.indexOf(at.step) : archive.places.get(`${at.step}:${at.episode}`) ?? -1;
  const named = `step ${at.step}${at.episode == null ? "" : `, episode ${at.episode}`}`;
  if (i < 0) return { link: "", said: `The link names ${named}, which is not among the ${archive.all.length} episodes of this report.` };
  const [from, to] = archive.spans[i], episode = all.episode[i], turns = head.turns.turn.slice(from, to);
  if (at.turn == null || turns.includes(at.turn)) return { link: writeLink({ ...at, episode }), said: "" };
  return { link: writeLink({ run: at.run, step: at.step, episode }), said: `The link names turn ${at.turn} of ${named}, which has ${turns.length} turns.` };
}

async function openReport() {
  const box = document.getElementById("explorer-view"), said = document.getElementById("explorer-said");
  const address = () => location.hash.replace(/^#/, "");
  try {
    const archive = new Archive(await unpack(document.getElementById("explorer-data").textContent));
    const place = placeOf(archive, address());
    const height = Math.round(box.getBoundingClientRect().height);
    const host = new Host(archive, { link: place.link, color: archive.head.signals[0]?.name ?? "", filter: "", search: "", sort: "", height });
    said.textContent = place.said;
    box.replaceChildren();
    render({ model: host, el: box });
    const enter = () => {
      box.scrollIntoView({ block: "center" });
      box.firstElementChild.focus({ preventScroll: true });
    };
    if (place.link || place.said) enter();
    else box.firstElementChild.focus({ preventScroll: true });
    window.addEventListener("hashchange", () => {
      const next = placeOf(archive, address());
      said.textContent = next.said;
      if (!next.link) return;
      host.set("link", next.link);
      host.tell("change:link");
      enter();
    });
    // a page's colours change without a change of the page, which is what the explorer watches
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { document.documentElement.dataset.scheme = Date.now(); });
  } catch (error) {
    box.textContent = `The explorer was not opened: ${error.message}.`;
    window.dispatchEvent(new Event("explorer-shown"));
  }
}

openReport();
