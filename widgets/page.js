/* What every widget's page needs: elements whose text cannot run, numbers, questions to the host, colours. */

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

export function h(tag, attributes, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.filter((child) => child != null && child !== false));
  return el;
}

export function s(tag, attributes, ...children) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

export const plain = (text) => String(text ?? "").replace(/\r\n?/g, "\n").replace(HIDDEN, "\ufffd");
export const line = (text) => plain(text).replace(/\s+/g, " ").trim();
export const known = (value) => value != null && Number.isFinite(value);
export const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

export function number(value, signed = false) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  const text = size === 0 ? "0" : size >= 1e5 || size < 1e-3 ? size.toExponential(1)
    : Number.isInteger(value) ? String(size) : size.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

/* How an episode ended, where the run says. */
const ENDS = { won: ["✓", "succeeded"], lost: ["✗", "failed"], untold: ["–", "outcome not recorded"] };
const endOf = (outcome) => (known(outcome) ? (outcome ? "won" : "lost") : "untold");
export const sign = (outcome) => ENDS[endOf(outcome)][0];
export const ended = (outcome) => ENDS[endOf(outcome)][1];
export const mark = (outcome, text = "") => h("i", { class: `cw-${endOf(outcome)}`, title: ended(outcome) }, `${sign(outcome)} ${text}`.trim());

/* Questions to the host, answered as promises. */
export function client(model, onEvent) {
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

export function typed(buffer, Kind) {
  const view = ArrayBuffer.isView(buffer) ? buffer : new DataView(buffer);
  return new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

export function debounce(f, wait) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => f(...args), wait); };
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
export function colours(theme, signal, limit, value) {
  if (!known(value) || !limit) return null;
  let share = clamp((value - (signal.centre ?? 0)) / limit, -1, 1) * (signal.flip ? -1 : 1);
  if (Math.abs(share) < 0.004) return null;
  const stops = [theme.paper, ...PALETTE[theme.name][signal.centre == null ? "depth" : share < 0 ? "below" : "above"].map(rgb)];
  share = Math.abs(share) * 2;
  const [from, to] = share <= 1 ? [stops[0], stops[1]] : [stops[1], stops[2]], part = share <= 1 ? share : share - 1;
  const mixed = from.map((v, i) => Math.round(v + (to[i] - v) * part)), bright = light(mixed);
  return { background: `rgb(${mixed})`, ink: (bright + 0.05) / 0.05 > 1.05 / (bright + 0.05) ? "#000000" : "#ffffff" };
}

export function themeOf(root) {
  const found = getComputedStyle(root).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [255, 255, 255];
  const paper = found.length > 3 && found[3] === 0 ? [255, 255, 255] : found.slice(0, 3);
  return { name: light(paper) < 0.25 ? "dark" : "light", paper };
}
