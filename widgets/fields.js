// The fields of a form: typed values are sent to the kernel, which validates them; errors appear below the field.

const TYPING_MS = 120; // after the last key
const WIDE = { name: 4, description: 8, "training.batch_size": 2, "parallelism.microbatches": 3, "parallelism.schedule": 3, "parallelism.precision": 2, "training.steps": 2, "training.learning_rate": 3,
  "training.optimizer": 2, "training.warmup_steps": 3, "training.clip": 2, "training.seed": 2, "source.git.url": 8, "source.git.ref": 4, "source.script": 8, "source.script_text": 12, "source.notebook": 8,
  "source.path": 8, "source.module": 8, "source.entry": 4, "source.arguments": 12, "source.setup": 12, env: 6, secrets: 6, artifacts: 12, "data.url": 6, "checkpoint.url": 6 };
const WIDE_OF_NODE = { name: 3, host: 5, port: 2, user: 2, identity_file: 4, proxy_jump: 4, address: 4, devices: 4, ranks: 2, python: 6, setup: 12 };
const SEGMENTED = new Set(["devices"]); // text fields with a few suggested values
const OF_NODE = /^nodes\[(\w+)\](?:\.(.+))?$/;

const show_fault = (err, text, is_warning = false) => {
  err.hidden = !text; err.className = `err ${is_warning ? "is-warn" : ""}`;
  if (text && err.dataset.text !== text) { err.dataset.text = text; err.replaceChildren(icon("warn"), h("span", {}, text)); }
};
/** The hint to show: for numbers and choices the part after the colon, as errors contain the whole hint. */
const short_hint = (info) => info.how || ((info.kind === "number" || info.choices.length) && info.hint.includes(": ") ? info.hint.split(": ").slice(1).join(": ") : info.hint);
const typed_at = (form, path) => {
  const match = OF_NODE.exec(path);
  let there = match ? form.draft.nodes?.[form.rows.indexOf(match[1])] : form.draft;
  for (const step of (match ? match[2] : path).split(".")) there = there !== null && typeof there === "object" && step in there ? there[step] : "";
  return there;
};

/** One field: label, input, hint, and error below. `on_help` shows the hint elsewhere instead. */
class Field {
  constructor(editor, path, info, { is_bare = false, on_help = null } = {}) {
    this.editor = editor; this.path = path; this.info = info; this.calls = 0; this.revision = 0; this.seen = 0; // the last revision with the typed value, and the last shown
    this.id = `${editor.view.id}-f${editor.serial++}`;
    this.hint = h("div", { class: on_help ? "sr" : "hint", id: `${this.id}-h` }); this.err = h("div", { class: "err", id: `${this.id}-e`, hidden: true });
    this.input = this.make_input(this.id);
    this.input.addEventListener(this.is_flag || info.kind === "choice" ? "change" : "input", () => this.typed());
    this.input.addEventListener("blur", () => this.send());
    this.input.addEventListener("focus", () => on_help?.(info));
    if (info.whole) this.input.addEventListener("keydown", (event) => { if (!event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) { event.preventDefault(); this.turn(event.key === "ArrowUp" ? 1 : -1); } });
    this.label = h("label", { for: this.id }, info.title, info.required || this.is_flag || info.default ? null : h("span", { class: "opt" }, " optional"));
    this.choices = !is_bare && SEGMENTED.has(OF_NODE.exec(path)?.[2] ?? path) ? this.make_choices() : null;
    set_text(this.hint, this.is_flag ? "" : short_hint(info));
    const of_node = OF_NODE.exec(path), wide = of_node ? WIDE_OF_NODE[of_node[2]] ?? 4 : WIDE[path] ?? 3;
    this.element = is_bare ? null : h("div", { class: `w${wide}` }, this.is_flag ? h("label", { class: "check", title: info.hint }, this.input, info.title) : [this.label, this.choices, this.input], this.hint, this.err);
  }
  get is_flag() { return this.info.kind === "flag"; }
  make_input(id) {
    const { kind, choices, default: usual, required } = this.info, is_path = OF_NODE.test(this.path) && !this.path.endsWith(".name");
    if (kind === "flag") return h("input", { type: "checkbox", id });
    if (kind === "choice") return h("select", { class: "in", id }, h("option", { value: "" }, usual ? `${usual} (default)` : "not set"), choices.filter((each) => each !== usual).map((each) => h("option", { value: each }, each)));
    if (["area", "lines", "variables"].includes(kind)) return h("textarea", { class: "in", id, rows: kind === "area" && this.path !== "description" ? 10 : 2, "aria-required": required ? "true" : null, spellcheck: "false" });
    const list = choices.length ? h("datalist", { id: `${id}-l` }, choices.map((each) => h("option", { value: each }))) : null;
    if (list) this.editor.view.el.append(list);
    return h("input", { class: `in ${kind === "number" ? "num" : ""} ${is_path ? "mono" : ""}`, id, list: list?.id, inputmode: kind === "number" ? "decimal" : null, placeholder: usual, "aria-required": required ? "true" : null, spellcheck: "false", autocomplete: "off" });
  }
  make_choices() { // a radio group: the suggested values, and a text of one's own
    const choose = (value) => { if (value !== null || !this.is_own) this.input.value = value ?? "0"; this.typed(); this.show_choice(); if (value === null) this.input.focus(); };
    const button = (word, value) => h("button", { type: "button", class: "b", role: "radio", "aria-checked": "false", onclick: () => choose(value), "data-value": value ?? "" }, word);
    const group = h("div", { class: "seg", role: "radiogroup", "aria-label": this.info.title }, this.info.choices.map((word) => button(word, word)), button("choose", null));
    roving(group);
    return group;
  }
  get is_own() { return !this.info.choices.includes(this.input.value.trim() || this.info.default); }
  show_choice() {
    if (!this.choices) return;
    for (const each of this.choices.children) each.setAttribute("aria-checked", String(each.dataset.value === (this.is_own ? "" : this.input.value.trim() || this.info.default)));
    this.input.hidden = !this.is_own;
  }
  focus() { (this.input.hidden ? this.choices.querySelector("[tabindex='0']") : this.input).focus(); }
  read() { return this.is_flag ? this.input.checked : this.input.value; }
  turn(by) {
    const text = this.input.value.trim() || this.info.default || "0";
    if (!/^-?\d{1,15}$/.test(text)) return;
    this.input.value = String(Number(text) + by);
    this.typed();
  }
  typed() { clearTimeout(this.later); this.is_waiting = true; this.later = setTimeout(() => this.send(), this.is_flag ? 0 : TYPING_MS); }
  /** Send the value; resolves when the kernel has it. */
  send() { if (this.is_waiting) this.sending = this.send_now(); return this.sending; }
  async send_now() {
    clearTimeout(this.later); this.is_waiting = false; this.calls += 1;
    const revision = await this.editor.edit(this.path, this.read(), this.seen);
    this.revision = Math.max(this.revision, revision ?? 0); this.calls -= 1;
    if (this.editor.form) this.update(this.editor.form);
  }
  /** Show the value of the form; an edit that was not applied stays until the user chooses. */
  update(form) {
    const own = form.conflicts.find((each) => each.path === this.path && each.editor === this.editor.view.page);
    if (!this.is_waiting && !this.calls && form.revision >= this.revision) { // else the form is older than the typed value
      this.put(own ? own.mine : typed_at(form, this.path));
      if (!own) this.seen = form.revision;
    }
    const error = form.errors[this.path], warning = form.warnings[this.path];
    show_fault(this.err, error ?? warning, !error);
    if (error) this.input.setAttribute("aria-invalid", "true"); else this.input.removeAttribute("aria-invalid");
    this.input.setAttribute("aria-describedby", error || warning ? `${this.id}-e ${this.id}-h` : `${this.id}-h`);
    this.show_choice();
  }
  put(there) {
    if (this.is_flag) { this.input.checked = there === "" ? this.info.default === "true" : there === true || there === "true"; return; }
    const text = typeof there === "string" ? there : JSON.stringify(there);
    if (this.info.kind === "choice" && text && ![...this.input.options].some((each) => each.value === text)) this.input.append(h("option", { value: text }, text));
    if (this.input.value !== text) this.input.value = text;
  }
}

/** The base of all forms: fields by path, and conflicts between pages. A subclass defines `complain(text)`. */
class DraftEditor {
  constructor(view) { this.view = view; this.serial = 0; this.fields = new Map(); this.form = null; this.known = view.state.fields; }
  info_of(path) { const match = OF_NODE.exec(path); return match ? this.known.node[match[2]] : this.known.fields[path]; }
  field(path, options) {
    const made = new Field(this, path, this.info_of(path), options);
    this.fields.set(path, made);
    return made;
  }
  grid(paths, options) { return h("div", { class: "grid12" }, paths.map((path) => this.field(path, options).element)); }
  /** Send an edit; returns the revision that contains it, or null if it was not applied. */
  async edit(path, typed, revision = this.form.revision) {
    try {
      const done = await this.view.call("edit", { path, typed, revision, editor: this.view.page });
      if (done === null) this.view.announce("Another tab changed this field: choose which value to keep");
      return done;
    } catch (error) { this.complain(error.message); return null; }
  }
  send_all() { return Promise.all([...this.fields.values()].map((field) => field.send())); }
  update_fields(form) {
    this.form = form;
    for (const [path, field] of this.fields) { const key = OF_NODE.exec(path)?.[1]; if (key && !form.rows.includes(key)) this.fields.delete(path); else field.update(form); }
  }
  title_of(path) {
    const [, key, name] = OF_NODE.exec(path) ?? [];
    if (!key) return this.known.fields[path]?.title ?? ({ "": "The form", parallelism: "Mesh", source: "Source", training: "Training", nodes: "Nodes" }[path] ?? path);
    return `${this.form.nodes[key]?.label ?? "A removed node"}${name ? `, ${this.known.node[name]?.title ?? name}` : ""}`;
  }
  /** A note for each edit that was not applied, from any page. */
  conflict_notes() {
    return this.form.conflicts.map((each) => note("run", h("p", {}, h("b", {}, "Another tab changed this form. "), `The edit of ${this.title_of(each.path)} was not applied: ${JSON.stringify(each.mine)}${each.theirs === null ? "" : ` instead of ${JSON.stringify(each.theirs)}`}.`), ["theirs", "mine"].map((keep) =>
      this.view.button(keep === "mine" ? "Apply mine" : "Keep theirs", () => this.view.call("resolve", { path: each.path, keep, editor: each.editor }), { on_error: (text) => this.complain(text) }))));
  }
  end() { for (const field of this.fields.values()) clearTimeout(field.later); }
}
