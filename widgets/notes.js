import { h, line, plain } from "./page.js";

/* The notes on the episode that is shown, and a form for another one. Their text is shown as it was typed. */
export class Notes {
  constructor(view) {
    Object.assign(this, { view, all: [], labels: [], writable: false });
    this.el = h("div", { class: "cw-notes", hidden: true });
  }

  async ask(request, args) {
    const { notes, warnings } = await this.view.ask(request, args);
    this.all = notes;
    if (warnings?.length) this.view.said(warnings[0], true);
    this.view.noted();
    this.draw();
  }

  /* What a button does; an error is said, not thrown. */
  try(request, args) { return this.ask(request, args).catch((error) => this.view.said(error.message, true)); }

  of({ step, episode }) { return this.all.filter((n) => n.step === step && n.episode === episode); }

  show(on, write = false) {
    this.el.hidden = !on;
    this.draw();
    if (on && write) this.el.querySelector("textarea")?.focus();
  }

  draw() {
    if (this.el.hidden) return;
    const begun = this.el.querySelector("textarea")?.value ?? "", entries = this.of(this.view.at).map((note) => this.entry(note));
    this.el.replaceChildren(...(this.writable ? [this.form(begun)] : []),
      ...(entries.length ? entries : [h("span", { class: "cw-wait" }, "no notes on this episode yet")]));
  }

  form(text, note = null) {
    const area = h("textarea", { rows: "2", maxlength: "10000", placeholder: "a note (Ctrl+Enter saves)" });
    const label = h("select", { title: "label" }, ...["", ...this.labels].map((l) => h("option", { value: l, selected: l === (note?.label ?? "") }, l || "no label")));
    const tags = h("input", { type: "text", class: "cw-tags", placeholder: "tags, with commas", value: note?.tags.join(", ") });
    area.value = text;
    const save = async () => {
      const values = { text: area.value, label: label.value || null, tags: tags.value.split(",").map((t) => t.trim()).filter(Boolean) };
      if (!values.text.trim() && !values.label) return;
      const { step, episode, turn, start, end } = this.view.at, place = { step, episode, turn, span: start == null ? null : [start, end] };
      try {
        area.value = "";
        await this.ask(...(note ? ["note_edit", { note: note.id, ...values }] : ["note_add", { ...place, ...values }]));
        this.view.root.focus({ preventScroll: true });
      } catch (error) {
        area.value = values.text;
        this.view.said(error.message, true);
      }
    };
    area.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && save());
    return h("div", { class: "cw-form" }, h("div", { class: "cw-where" }, note ? "edit the note on " : "on ", h("b", {}, placeName(note ?? this.view.at))), area,
      h("div", { class: "cw-line" }, label, tags, h("button", { class: "cw-save", onclick: save }, "save"),
        note && h("button", { onclick: () => this.draw() }, "cancel")));
  }

  entry(note) {
    const { step, episode, turn, start, end } = note, button = (text, onclick) => h("button", { onclick }, text);
    const entry = h("div", { class: "cw-note" }, h("div", { class: "cw-where" },
      h("button", { class: "cw-goto", title: "go there", onclick: () => this.view.go({ step, episode, turn, start, end }) }, placeName(note)),
      note.label && h("span", { class: "cw-label" }, line(note.label)), ...note.tags.map((tag) => h("span", { class: "cw-tag" }, `#${line(tag)}`)),
      h("small", {}, `${line(note.author)}, ${line(note.time).slice(0, 16).replace("T", " ")} UTC`),
      this.writable && button("edit", () => entry.replaceWith(this.form(note.text, note))),
      this.writable && button("delete", () => this.try("note_delete", { note: note.id }))), h("div", { class: "cw-text" }, plain(note.text)));
    return entry;
  }
}

function placeName({ turn, start, end }) {
  if (turn == null) return "the whole episode";
  return `turn ${turn}` + (start == null ? "" : end - start > 1 ? `, tokens ${start} to ${end - 1}` : `, token ${start}`);
}
