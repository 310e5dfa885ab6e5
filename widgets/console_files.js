// Files of other tools: export of a pipeline to one, import from one. The kernel reads and writes them.

/** The field of one export option, shared by all formats with the same option and hint. */
class OptionField {
  constructor(view, option, hint, on_typed) {
    const id = `${view.id}-o${serial++}`, word = option.replaceAll("_", "-");
    this.err = h("div", { class: "err", id: `${id}-e`, hidden: true });
    this.input = h("input", { class: "in", id, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-e ${id}-h`, oninput: on_typed });
    this.element = h("div", { class: "w4" }, h("label", { for: id, class: "mono" }, word), this.input, h("div", { class: "hint", id: `${id}-h` }, hint), this.err);
  }
  tell(error) { show_fault(this.err, error); if (error) this.input.setAttribute("aria-invalid", "true"); else this.input.removeAttribute("aria-invalid"); }
}

/** The export of the open pipeline: format, options, and file. Only the chosen format is requested. */
class ExportPanel {
  constructor(view, go_to) {
    this.view = view; this.go_to = go_to; this.fields = new Map(); this.asked_for = 0; this.digest = ""; this.name = "";
    const format = ({ name, about }) => h("label", {}, h("b", {}, h("input", { type: "radio", name: `${view.id}-target`, value: name, onchange: () => this.pick(name) }), name), h("small", {}, about));
    this.formats = h("fieldset", { class: "kinds targets" }, h("legend", { class: "sr" }, "Format of the export"), view.state.targets.map(format));
    this.options = h("div", { class: "grid12" }); this.fault = h("div", { role: "status" });
    this.text = h("pre", { class: "written", tabIndex: 0, role: "region", "aria-label": "Exported file" });
    this.cut = h("p", { class: "soft", hidden: true });
    const fail = { on_error: (text) => this.tell("bad", text) };
    this.copy = view.button([icon("copy"), "Copy the file"], async () => this.tell(...((await copy_text(this.text.textContent)) ? ["ok", "Copied"] : ["warn", "Not copied: select the text"])), fail);
    this.save = view.button([icon("file"), "Save the file…"], () => this.ask_path(), fail);
    this.asked = h("div"); this.said = h("div");
    this.acts = h("div", { class: "row wrap" }, this.copy, this.save);
    this.element = h("div", { class: "export" }, section("Export", "the pipeline as a file of another tool"), this.formats, this.options, this.fault, this.text, this.cut, this.acts, this.asked, this.said);
    this.pick(view.state.targets[0].name);
  }
  pick(name) {
    this.target = this.view.state.targets.find((each) => each.name === name);
    for (const radio of this.formats.querySelectorAll("input")) radio.checked = radio.value === name;
    this.of_target = Object.entries(this.target.options).map(([option, hint]) => [option, this.field_of(option, hint)]);
    this.options.replaceChildren(...this.of_target.map(([, field]) => field.element));
    this.asked.replaceChildren();
    if (this.name) this.ask();
  }
  field_of(option, hint) {
    const key = JSON.stringify([option, hint]);
    if (!this.fields.has(key)) this.fields.set(key, new OptionField(this.view, option, hint, () => this.typed()));
    return this.fields.get(key);
  }
  /** Restore what was chosen and typed before the page or the pipeline was opened again. */
  resume({ to, options }) {
    const last = this.view.state.targets.find((each) => each.name === to); // formats share fields: the values typed for the last one are the present ones
    for (const target of [...this.view.state.targets, last]) for (const [option, typed] of Object.entries(options[target.name] ?? {})) if (option in target.options) this.field_of(option, target.options[option]).input.value = typed;
    this.pick(to);
  }
  /** Show the export of the present pipeline. */
  update(name) { this.name = name; this.ask(); }
  typed() { clearTimeout(this.later); this.later = setTimeout(() => this.ask(), TYPING_MS); }
  get given() { return { to: this.target.name, options: Object.fromEntries(this.of_target.map(([option, field]) => [option, field.input.value])) }; }
  async ask() {
    clearTimeout(this.later);
    const asked_for = ++this.asked_for, found = await this.view.call("export", this.given).catch((error) => ({ error: error.message, option: "", field: "" }));
    if (asked_for === this.asked_for) this.show(found); // else the user has typed meanwhile
  }
  show({ text, more, error, option, field, digest }) {
    this.digest = digest ?? ""; this.said.replaceChildren();
    for (const [name, field] of this.of_target) field.tell(name === option ? error : "");
    const go = field ? [h("button", { type: "button", class: "link", onclick: () => this.go_to(field) }, "Go there")] : [];
    redraw(this.fault, [this.target.name, option, error], () => (error && !option ? [note("bad", h("p", {}, `${this.target.name}: ${error}`), go)] : []));
    this.text.textContent = text ?? ""; this.text.hidden = Boolean(error);
    const wrong = error ? "Correct the marked error first" : null;
    this.cut.hidden = !more; set_text(this.cut, more ? `The file has ${grouped(more)} more characters: save it to get them.` : "");
    disable(this.save, wrong); disable(this.copy, more ? "Too long to copy: save the file" : wrong);
  }
  tell(state, text, actions = []) { this.said.replaceChildren(note(state, h("p", {}, text), actions)); this.view.announce(text); }
  ask_path() {
    const close = () => { this.asked.replaceChildren(); this.said.replaceChildren(); this.save.focus(); };
    const { bar, input } = ask_bar(this.view, "Save as", [["Write file", (path) => this.save_to(path, false)]], close, { value: `${this.name}${this.target.suffix}`, hint: "A path on the kernel's machine, or a URL such as s3://bucket/name" });
    this.said.replaceChildren(); this.asked.replaceChildren(bar); input.focus(); input.select();
  }
  async save_to(path, anyway) {
    const had = document.activeElement, { ask, said } = await this.view.call("save_export", { ...this.given, path, digest: this.digest, anyway });
    if (said) { this.asked.replaceChildren(); this.tell("ok", said); focus_after(had, this.save); return; }
    const fail = { on_error: (text) => this.tell("bad", text) };
    const write = this.view.button("Overwrite", () => this.save_to(path, true), { cls: "danger", ...fail });
    const stay = () => { this.said.replaceChildren(); this.asked.querySelector("input")?.focus(); };
    this.tell("warn", ask, [write, this.view.button("Cancel", stay, fail)]);
    this.said.firstChild.onkeydown = (event) => { if (event.key === "Escape") { event.stopPropagation(); stay(); } };
    focus_after(had, write);
  }
  end() { clearTimeout(this.later); }
}

/** The row that asks for a file of another tool, by location or as text. */
const import_bar = (view, close) => {
  const kinds = view.state.kinds, kind = h("select", { class: "in", "aria-label": "Kind of file" }, h("option", { value: "" }, "detected"), kinds.map(({ name, about }) => h("option", { value: name, title: about }, name)));
  const id = `${view.id}-pasted${serial++}`, pasted = h("textarea", { class: "in", id, rows: 5, spellcheck: "false" });
  const act = async (path) => { await view.call("import_pipeline", { path, text: pasted.value, kind: kind.value }); close(); };
  const made = ask_bar(view, "Path or URL of another tool's file", [["Import", act]], close, { hint: "It becomes a new pipeline, which lists what could not be imported." });
  made.bar.append(h("details", { class: "pasted" }, h("summary", {}, "Paste its text, choose its kind"),
    h("label", { for: id }, "Text of the file"), pasted, h("div", { class: "hint" }, "If text is pasted, the path only names it."), h("label", {}, "Kind", kind)));
  return made;
};

/** The parts that an import left out: each line stays until it is dismissed. */
class LeftOut {
  constructor(view, on_end) {
    this.view = view; this.on_end = on_end; this.rows = new Map();
    this.title = h("h4"); this.list = h("ul");
    const all = view.button("Dismiss all", () => this.dismiss(null));
    this.element = h("div", { class: "left-out is-warn", role: "group", "aria-label": "Left out of the import", hidden: true }, h("div", { class: "row" }, icon("warn"), this.title, h("span", { class: "push" }, all)), this.list);
  }
  row(line) {
    const close = this.view.button(icon("bad"), () => this.dismiss(line), { cls: "q ic", label: `Dismiss: ${line}` });
    return h("li", {}, h("span", {}, line), close);
  }
  async dismiss(line) {
    const had = document.activeElement, lines = [...this.rows.keys()], at = lines.indexOf(line), next = line === null ? undefined : lines[at + 1] ?? lines[at - 1];
    await this.view.call("dismiss", { line });
    focus_after(had, next === undefined ? { focus: this.on_end } : this.rows.get(next)?.querySelector("button"));
  }
  update(lines) {
    for (const line of [...this.rows.keys()]) if (!lines.includes(line)) this.rows.delete(line);
    for (const line of lines) if (!this.rows.has(line)) this.rows.set(line, this.row(line));
    replace_children(this.list, lines.map((line) => this.rows.get(line)));
    set_text(this.title, `${count_of(lines.length, "part")} of the imported file ${lines.length === 1 ? "is" : "are"} not in this pipeline`);
    if (lines.length && this.element.hidden) this.view.announce(this.title.textContent);
    this.element.hidden = !lines.length;
  }
}
