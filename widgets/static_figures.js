/* Figures of a page without a kernel. plotly.js lies gzipped in #plotly; the page's security policy lets exactly this text
   run, by its hash. It takes long to start, so it waits for the explorer, and then until a figure is on screen; some seconds later it
   starts anyhow, so that the page can be printed. */

import { unpack } from "./unpack.js";

const waiting = new Map();
let library = null;

function start() {
  library ??= unpack(document.getElementById("plotly").textContent).then((text) => {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(text);
    document.head.append(script);
    if (!window.Plotly) throw new Error("plotly.js did not run");
  });
  return library;
}

async function draw(box) {
  const source = waiting.get(box);
  if (!waiting.delete(box)) return;
  try {
    await start();
    const figure = JSON.parse(source.textContent);
    const config = { ...figure.config, displaylogo: false, showSendToCloud: false, typesetMath: false };
    await window.Plotly.newPlot(box, figure.data, figure.layout, config);
  } catch (error) { box.textContent = `not drawn: ${error.message ?? error}`; }
}

const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target);
});
const watch = () => { for (const box of waiting.keys()) near.observe(box); };

for (const source of document.querySelectorAll('script[type="application/json"][data-figure]')) waiting.set(source.previousElementSibling, source);
if (document.getElementById("explorer-view")) window.addEventListener("explorer-shown", watch, { once: true });
else watch();
setTimeout(() => start().catch(() => {}), 6000);
window.addEventListener("beforeprint", () => { for (const box of [...waiting.keys()]) draw(box); });
