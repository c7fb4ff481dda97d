// Figures and sentences that are drawn anew whenever the kernel sets them. Plotly comes from the page where it is there
// already, else once from the kernel, never from a network.

function library(model) {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  window.__workbenchPlotly ??= new Promise((resolve) => {
    const heard = (message, buffers) => {
      if (message.library !== "plotly") return;
      model.off("msg:custom", heard);
      const held = { exports: {} };
      new Function("module", "exports", "define", new TextDecoder().decode(buffers[0]))(held, held.exports, undefined);
      resolve(held.exports);
    };
    model.on("msg:custom", heard);
    model.send({ request: "plotly" });
  });
  return window.__workbenchPlotly;
}

function render({ model, el }) {
  const figures = document.createElement("div");
  const words = document.createElement("div");
  el.classList.add("workbench-replay");
  words.className = "workbench-replay-words";
  el.append(figures, words);

  let drawing = false, stale = false, gone = false, Plotly = null;

  async function draw() {
    stale = true;
    if (drawing) return;
    drawing = true;
    while (stale && !gone) {
      stale = false;
      const specs = model.get("specs");
      Plotly ??= await library(model);
      while (figures.children.length < specs.length) figures.append(document.createElement("div"));
      while (figures.children.length > specs.length) {
        Plotly.purge(figures.lastChild);
        figures.lastChild.remove();
      }
      for (const [i, spec] of specs.entries()) {
        await Plotly.react(figures.children[i], spec.data, spec.layout, spec.config);
      }
      words.replaceChildren(...model.get("sentences").map((sentence) => {
        const line = document.createElement("p");
        line.textContent = sentence;
        return line;
      }));
    }
    drawing = false;
  }

  model.on("change:specs", draw);
  draw();
  return () => {
    gone = true;
    model.off("change:specs", draw);
    if (Plotly) for (const box of figures.children) Plotly.purge(box);
  };
}

export default { render };
