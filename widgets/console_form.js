// The form of a pipeline. The kernel says what is right; here fields are drawn, and what is typed is sent there.

const TYPING_MS = 120; // after the last key
const AXES = { pp: "Stages: layers one after the other", dp_shard: "Shards of all parameters, other data", dp_replicate: "Whole copies, other data", tp: "Each layer cut, same data" };
const KINDS = { script: ["Script", "A .py file"], script_text: ["Text", "Typed here"], notebook: ["Notebook", "Cells tagged job"], git: ["Git", "A repository"], path: ["Folder", "Local or s3://"], module: ["Module", "python -m name"] };
const WIDE = { name: 4, description: 8, "training.batch_size": 3, "parallelism.microbatches": 2, "parallelism.schedule": 3, "parallelism.precision": 2, "training.steps": 2, "training.learning_rate": 3,
  "training.optimizer": 2, "training.warmup_steps": 3, "training.clip": 2, "training.seed": 2, "source.git.url": 8, "source.git.ref": 4, "source.script": 8, "source.script_text": 12, "source.notebook": 8,
  "source.path": 8, "source.module": 8, "source.entry": 4, "source.arguments": 12, "source.setup": 12, env: 6, secrets: 6, artifacts: 12, setup: 6, "data.url": 6, "checkpoint.url": 6 };
const FIRST = ["training.batch_size", "parallelism.microbatches", "parallelism.schedule", "parallelism.precision", "training.steps", "training.learning_rate", "training.optimizer", "training.warmup_steps", "training.clip", "training.seed"];
const OF_NODE = ["host", "user", "port", "name", "devices", "ranks"];

/** One field: label, what is typed, its hint, and its fault below it. */
class Field {
  constructor(page, path, info, { is_bare = false } = {}) {
    this.page = page; this.path = path; this.info = info; this.calls = 0; this.revision = 0;
    const id = `${page.view.id}-f${page.serial++}`;
    this.hint = h("div", { class: "hint", id: `${id}-h` }); this.err = h("div", { class: "err", id: `${id}-e`, hidden: true });
    this.input = this.make_input(id);
    this.input.setAttribute("aria-describedby", `${id}-h ${id}-e`);
    this.input.addEventListener(this.is_flag || info.kind === "choice" ? "change" : "input", () => this.typed());
    this.input.addEventListener("blur", () => this.send());
    this.label = h("label", { for: id }, info.title, info.required || this.is_flag || info.default ? null : h("span", { class: "opt" }, " optional"));
    set_text(this.hint, this.is_flag ? "" : short_hint(info));
    const wide = WIDE[path] ?? (path.startsWith("nodes[") ? WIDE[path.split("].")[1]] : null) ?? 3;
    this.element = is_bare ? null : h("div", { class: `w${wide}` }, this.is_flag ? h("label", { class: "check", title: info.hint }, this.input, info.title) : [this.label, this.input], this.hint, this.err);
  }
  get is_flag() { return this.info.kind === "flag"; }
  make_input(id) {
    const { kind, choices, default: usual } = this.info;
    if (kind === "flag") return h("input", { type: "checkbox", id });
    if (kind === "choice") return h("select", { class: "in", id }, h("option", { value: "" }, usual ? `${usual} (default)` : "not set"), choices.filter((each) => each !== usual).map((each) => h("option", { value: each }, each)));
    if (["area", "lines", "variables"].includes(kind)) return h("textarea", { class: "in", id, rows: kind === "area" && this.path !== "description" ? 10 : 2, spellcheck: "false" });
    const list = choices.length ? h("datalist", { id: `${id}-l` }, choices.map((each) => h("option", { value: each }))) : null;
    if (list) this.page.element.append(list);
    return h("input", { class: `in ${kind === "number" ? "num" : ""}`, id, list: list?.id, inputmode: kind === "number" ? "decimal" : null, placeholder: usual, spellcheck: "false", autocomplete: "off" });
  }
  read() { return this.is_flag ? this.input.checked : this.input.value; }
  typed() { clearTimeout(this.later); this.is_waiting = true; this.later = setTimeout(() => this.send(), this.is_flag ? 0 : TYPING_MS); }
  send() {
    if (!this.is_waiting) return;
    clearTimeout(this.later); this.is_waiting = false;
    this.page.edit(this.path, this.read(), this);
  }
  update(form) {
    const there = typed_at(form, this.path);
    if (!this.is_waiting && !this.calls && form.revision >= this.revision) this.put(there); // else it is older than what is typed
    const error = form.errors[this.path], warning = form.warnings[this.path];
    this.err.hidden = !error && !warning;
    this.err.className = `err ${error ? "" : "is-warn"}`;
    if (error || warning) this.err.replaceChildren(icon("warn"), h("span", {}, error ?? warning));
    if (error) this.input.setAttribute("aria-invalid", "true"); else this.input.removeAttribute("aria-invalid");
  }
  put(there) {
    if (this.is_flag) { this.input.checked = there === "" ? this.info.default === "true" : there === true || there === "true"; return; }
    const text = typeof there === "string" ? there : JSON.stringify(there);
    if (this.info.kind === "choice" && text && ![...this.input.options].some((each) => each.value === text)) this.input.append(h("option", { value: text }, text));
    if (this.input.value !== text) this.input.value = text;
  }
}

/** Of a hint the part before what is left out there; the whole one is in the fault. */
const short_hint = (info) => info.how || ((info.kind === "number" || info.choices.length) && info.hint.includes(": ") ? info.hint.split(": ").slice(1).join(": ") : info.hint);
const typed_at = (form, path) => {
  const match = /^nodes\[(\w+)\]\.(.+)$/.exec(path);
  let there = match ? form.draft.nodes?.[form.rows.indexOf(match[1])] : form.draft;
  for (const step of (match ? match[2] : path).split(".")) there = there !== null && typeof there === "object" && step in there ? there[step] : "";
  return there;
};
const section = (title, text) => h("div", { class: "sec" }, h("h4", {}, title), text ? h("span", { class: "soft" }, text) : null);

class FormPage {
  constructor(view) {
    this.view = view; this.serial = 0; this.fields = new Map(); this.step = "general"; this.form = null; this.nodes = new Map();
    this.known = view.state.fields;
    this.name = h("h3"); this.file = h("span", { class: "soft" });
    const fail = { on_error: (text) => this.complain(text) };
    this.save = view.button("Save", () => this.do_save(false), fail);
    this.steps = h("ol", { class: "steps", "aria-label": "Pages of the form" });
    this.notes = h("div", { class: "notes", hidden: true });
    this.body = h("div", { class: "body" });
    this.message = h("span", { role: "status" });
    this.back = h("button", { type: "button", class: "b", onclick: () => this.go(-1) }, "Back");
    this.next = h("button", { type: "button", class: "b go", onclick: () => this.go(1) });
    this.start = view.button([icon("run"), h("span", {}, "Start")], () => view.call("start"), { cls: "go", ...fail });
    this.element = h("div", { hidden: true },
      h("div", { class: "head" }, view.button([icon("left"), "My Pipelines"], () => this.leave(), { cls: "q", ...fail }), this.name, this.file,
        h("span", { class: "push row" }, view.button("Copy as Python", () => this.copy(), fail), this.save)),
      this.steps, this.notes, this.body, h("div", { class: "foot" }, this.message, h("span", { class: "push row" }, this.back, this.next, this.start)));
    this.tabs = [["general", "General"], ["nodes", "Nodes"], ["source", "Source"], ["review", "Review & start"]].map(([id, title], at) => {
      const [nr, told] = [h("span", { class: "nr" }, `${at + 1}`), h("small")];
      const button = h("button", { type: "button", onclick: () => this.show(id) }, nr, h("b", {}, title), told);
      this.steps.append(h("li", {}, button));
      return { id, title, nr, told, button, at };
    });
    this.pages = { general: this.make_general(), nodes: this.make_nodes(), source: this.make_source(), review: h("div") };
    this.body.append(...Object.values(this.pages));
    this.show("general", false);
  }
  end() { for (const field of this.fields.values()) clearTimeout(field.later); }
  field(path, options) {
    const match = /^nodes\[\w+\]\.(.+)$/.exec(path);
    const made = new Field(this, path, match ? this.known.node[match[1]] : this.known.fields[path], options);
    this.fields.set(path, made);
    return made;
  }
  grid(paths) { return h("div", { class: "grid12" }, paths.map((path) => this.field(path).element)); }
  of_step(step, without) { return Object.values(this.known.fields).filter((info) => info.step === step && !without.some((each) => info.path === each || info.path.startsWith(`${each}.`))).map((info) => info.path); }
  fold(title, paths) { return h("details", { class: "fold" }, h("summary", {}, title), this.grid(paths)); }

  make_general() {
    const axes = Object.entries(AXES).map(([axis, told]) => {
      const field = this.field(`parallelism.${axis}`, { is_bare: true });
      const turn = (by) => { const now = parseInt(field.input.value || field.info.default, 10), to = (Number.isNaN(now) ? 1 : now) + by; field.put(`${Math.max(-1, to === 0 ? by : to)}`); field.is_waiting = true; field.send(); };
      const step = (word, by, sign) => h("button", { type: "button", class: "b ic", "aria-label": `${axis}: ${word}`, title: `${axis}: ${word}`, onclick: () => turn(by) }, icon(sign));
      field.label.replaceChildren(axis);
      return h("div", { class: "ax" }, icon(axis), h("span", { class: "stepper" }, step("fewer", -1, "minus"), field.input, step("more", 1, "plus")), h("span", {}, field.label, h("small", { id: field.hint.id }, told)), field.err);
    });
    this.drawing = h("div", { class: "drawing", role: "img" }); this.told_mesh = h("div", { style: "margin-top:6px" });
    return h("div", {}, this.grid(["name", "description"]), section("Mesh", "how the model lies over ranks; -1 takes the rest"),
      h("div", { class: "mesh2" }, h("div", {}, axes), this.drawing), this.told_mesh, section("Training"), this.grid(FIRST),
      this.fold("More of training", this.of_step("general", ["name", "description", ...FIRST, ...Object.keys(AXES).map((axis) => `parallelism.${axis}`), "model", "image"])),
      this.fold("Model that is there already, container image", this.of_step("general", ["name", "description", "parallelism", "training"])));
  }
  make_nodes() {
    this.list = h("ul", { class: "nodes" });
    this.no_nodes = h("p", { class: "soft", style: "margin:0 0 8px" }, "No nodes yet. Ranks run on this machine, or on hosts that you reach over SSH with a key.");
    this.told_nodes = h("div", { style: "margin-top:8px" });
    return h("div", {}, section("Nodes", "the first one has the rendezvous: put the one first that you trust to stay"), this.no_nodes, this.list,
      this.view.button([icon("plus"), "Add node"], () => this.change("add", ""), { on_error: (text) => this.complain(text) }), this.told_nodes,
      section("Rendezvous", "how ranks find each other; the defaults suit most"), this.grid(this.of_step("nodes", [])));
  }
  node(key) {
    const fail = { on_error: (text) => this.complain(text) }, told = h("b"), where = h("span", { class: "mono soft" }), marks = h("span", { class: "marks" });
    const inner = h("div", { class: "inner", hidden: true });
    const toggle = h("button", { type: "button", class: "b q toggle", "aria-expanded": "false", onclick: () => open(inner.hidden) }, icon("right"), told, where);
    const open = (is_open) => { inner.hidden = !is_open; toggle.setAttribute("aria-expanded", `${is_open}`); toggle.firstChild.replaceWith(icon(is_open ? "down" : "right")); };
    const act = (sign, word, what) => this.view.button(icon(sign), () => this.change(what, key), { cls: "ic q", label: word, ...fail });
    const buttons = [["up", "Move up", "up"], ["down", "Move down", "down"], ["copy", "Copy node", "copy"], ["trash", "Remove node", "remove"]].map((each) => act(...each));
    const more = Object.keys(this.known.node).filter((name) => !OF_NODE.includes(name));
    inner.append(this.grid(OF_NODE.map((name) => `nodes[${key}].${name}`)), this.fold("More of this node", more.map((name) => `nodes[${key}].${name}`)));
    const element = h("li", {}, h("div", { class: "line" }, toggle, marks, ...buttons), inner);
    return { element, toggle, open, update: (form, at) => {
      const host = typed_at(form, `nodes[${key}].host`), name = typed_at(form, `nodes[${key}].name`), ranks = typed_at(form, `nodes[${key}].ranks`), faults = Object.keys(form.errors).filter((path) => path.startsWith(`nodes[${key}]`)).length;
      const title = name || host || `node ${at + 1}`;
      set_text(told, title); set_text(where, [name && host, ranks && count_of(Number(ranks) || 0, "rank")].filter(Boolean).join(" · ")); set_text(marks, faults ? `${count_of(faults, "field")} to correct` : "");
      buttons.forEach((button, i) => button.setAttribute("aria-label", `${["Move up", "Move down", "Copy", "Remove"][i]}: ${title}`));
    } };
  }
  make_source() {
    this.kinds = h("fieldset", { class: "kinds" }, h("legend", { class: "sr" }, "Source"), Object.entries(KINDS).map(([kind, [word, told]]) => h("label", {}, h("b", {},
      h("input", { type: "radio", name: `${this.view.id}-kind`, value: kind, onchange: () => this.edit("source.kind", kind) }), word), h("small", {}, told))));
    const of_kind = (kind) => (kind === "git" ? ["source.git.url", "source.git.ref", "source.entry", "source.git.folder", "source.git.token", "source.git.ssh_key", "source.git.how"] : [`source.${kind}`]);
    this.by_kind = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, h("div", { class: "grid12" }, of_kind(kind).filter((path) => path !== "source.entry").map((path) => this.field(path).element))]));
    this.entry = h("div", { class: "grid12", style: "margin-top:10px" }, this.field("source.entry").element);
    this.kind_error = h("div", { class: "err", role: "status", hidden: true });
    const rest = this.of_step("source", ["source.kind", ...Object.keys(KINDS).map((kind) => `source.${kind}`), "source.entry", "data", "checkpoint", "env", "secrets", "artifacts"]);
    return h("div", {}, this.kinds, this.kind_error, ...Object.values(this.by_kind), this.entry, section("How it is called"), this.grid(rest), section("Data and checkpoints"),
      this.grid(["data.url", "checkpoint.url"]), this.fold("More of data and checkpoints", this.of_step("source", ["source", "env", "secrets", "artifacts", "data.url", "checkpoint.url"])),
      section("Environment", "a line NAME=value for each; secrets go by their names alone"), this.grid(["env", "secrets", "artifacts"]));
  }

  // ---- what is typed
  async edit(path, typed, field = null) {
    if (field) field.calls += 1;
    try {
      const revision = await this.view.call("edit", { path, typed, revision: this.form.revision, editor: this.view.page });
      if (revision === null) this.view.announce("Another tab changed this field: choose which to keep");
      else if (field) field.revision = revision;
    } catch (error) { this.complain(error.message); }
    if (field) { field.calls -= 1; if (this.form) field.update(this.form); }
  }
  send_all() { for (const field of this.fields.values()) field.send(); }
  async change(what, key) {
    this.send_all();
    const at = this.form.rows.indexOf(key), title = key ? typed_at(this.form, `nodes[${key}].name`) || typed_at(this.form, `nodes[${key}].host`) || `node ${at + 1}` : "";
    const made = await this.view.call("change_nodes", { do: what, key });
    this.focus_next = what === "add" || what === "copy" ? { key: made, is_new: true } : what === "remove" ? { key: this.form.rows[at + 1] ?? this.form.rows[at - 1] } : null;
    this.removed = what === "remove" ? { key, title } : what === "restore" ? null : this.removed;
    this.draw_notes(); this.focus_node();
  }
  focus_node() {
    const node = this.focus_next && this.nodes.get(this.focus_next.key);
    if (!node?.element.isConnected) return;
    if (this.focus_next.is_new) { node.open(true); this.fields.get(`nodes[${this.focus_next.key}].host`).input.focus(); } else node.toggle.focus();
    this.focus_next = null;
  }
  async leave() { this.send_all(); await this.view.call("close_form"); }
  async do_save(anyway, name = null) { this.send_all(); this.failure = null; await this.view.call("save", { anyway, name }); this.view.announce("Saved"); }
  async copy() {
    this.send_all();
    const found = await this.view.call("review");
    if (found.error) { this.complain(`No code yet: ${found.error}`); return; }
    const is_copied = await copy_text(found.code);
    this.said = [h("p", {}, is_copied ? "Copied: paste it into a cell; it builds this pipeline and submits it." : "It builds this pipeline and submits it:"), command_box(found.code, "Copy the code")];
    this.draw_notes();
  }
  complain(text) { this.failure = text; this.draw_notes(); }
  set_work(work) { this.work = work; this.draw_notes(); }

  // ---- what is shown
  set_form(form) {
    if (form === null) { this.form = null; this.failure = null; this.said = null; this.removed = null; return; }
    if (this.form?.file !== form.file) { this.failure = null; this.said = null; this.removed = null; }
    this.form = form;
    set_text(this.name, typed_at(form, "name") || "without a name"); set_text(this.file, `${form.file} · ${form.is_changed ? "changed" : `saved ${form.saved}`}`);
    this.draw_nodes();
    for (const [path, field] of this.fields) { const key = /^nodes\[(\w+)\]/.exec(path)?.[1]; if (key && !form.rows.includes(key)) this.fields.delete(path); else field.update(form); }
    this.draw_source(); this.draw_mesh(); this.draw_steps(); this.draw_notes(); this.focus_node();
    if (this.step === "review" && this.reviewed !== form.revision) this.draw_review();
  }
  draw_nodes() {
    for (const key of [...this.nodes.keys()]) if (!this.form.rows.includes(key)) this.nodes.delete(key);
    for (const key of this.form.rows) if (!this.nodes.has(key)) this.nodes.set(key, this.node(key));
    replace_children(this.list, this.form.rows.map((key) => this.nodes.get(key).element));
    this.form.rows.forEach((key, at) => this.nodes.get(key).update(this.form, at));
    this.no_nodes.hidden = this.form.rows.length > 0;
  }
  draw_source() {
    const kind = typed_at(this.form, "source.kind");
    for (const radio of this.kinds.querySelectorAll("input")) radio.checked = radio.value === kind;
    for (const [each, grid] of Object.entries(this.by_kind)) grid.hidden = each !== kind;
    this.entry.hidden = !["git", "path"].includes(kind);
    const error = this.form.errors.source, told = error ?? this.form.warnings.source;
    this.kind_error.hidden = !told; this.kind_error.className = `err ${error ? "" : "is-warn"}`;
    if (told) this.kind_error.replaceChildren(icon("warn"), h("span", {}, told));
  }
  draw_mesh() {
    const found = this.form.mesh, mesh = found?.error ? null : found, sizes = Object.fromEntries(mesh?.axes ?? []);
    const [stages, tp] = [sizes.pp ?? 1, sizes.tp ?? 1], rows = mesh ? mesh.ranks / stages / tp : 0, is_small = stages <= 4 && rows <= 4 && tp <= 4;
    const told = mesh ? `${count_of(stages, "stage")}, in each ${count_of(rows, "row")} of ${count_of(tp, "tensor part")}: ${count_of(mesh.ranks, "rank")}` : "No mesh yet";
    this.drawing.setAttribute("aria-label", told);
    this.drawing.replaceChildren(...(mesh && is_small ? [...Array(stages).keys()].map((stage) => h("div", { class: `stage c${stage % 6}` }, h("b", {}, `stage ${stage}`), h("div", { class: "ranks", style: `grid-template-columns:repeat(${tp},1fr)` },
      [...Array(rows * tp).keys()].map((at) => h("i", {}, `${stage * rows * tp + at}`))))) : [h("span", { class: "soft" }, told)]));
    const error = this.form.errors.parallelism ?? this.form.errors[""];
    const line = error ?? found?.error ? [h("span", { class: "err", role: "status" }, icon("warn"), h("span", {}, error ?? found.error))] : mesh ? [state_word("ok", count_of(mesh.ranks, "rank")), h("span", { class: "soft" }, ` = ${mesh.axes.map(([, size]) => size).join(" × ")}; on ${mesh.nodes.slice(0, 4).join(", ")}${mesh.nodes.length > 4 ? " and more" : ""}`)] : [];
    this.told_mesh.replaceChildren(...line); this.told_nodes.replaceChildren(...line.map((each) => each.cloneNode(true)));
  }
  draw_steps() {
    const { form } = this, bad = form.steps.filter((step) => step.faults).map((step) => this.tabs.findIndex((tab) => tab.id === step.id) + 1);
    for (const tab of this.tabs) {
      const step = form.steps.find((each) => each.id === tab.id), is_bad = step ? step.faults > 0 : false, is_ok = step ? !is_bad : !bad.length;
      tab.button.className = is_bad ? "is-bad" : is_ok ? "is-ok" : "is-idle";
      if (this.step === tab.id) tab.button.setAttribute("aria-current", "step"); else tab.button.removeAttribute("aria-current");
      tab.nr.replaceChildren(is_ok && this.step !== tab.id ? icon("ok") : `${tab.at + 1}`);
      set_text(tab.told, step ? step.told : bad.length ? `needs ${bad.join(", ")}` : "ready");
    }
    const [path] = Object.keys(form.errors), count = Object.keys(form.errors).length;
    this.message.replaceChildren(...(count ? [icon("warn"), ` ${this.title_of(path)}${count > 1 ? ` and ${count - 1} more` : ""} `, h("button", { type: "button", class: "link", onclick: () => this.go_to(path) }, "Go there")]
      : [Object.keys(form.warnings).length ? `${count_of(Object.keys(form.warnings).length, "warning")}, nothing that stops a start` : "All fields valid"]));
    const at = this.tabs.findIndex((tab) => tab.id === this.step);
    this.back.hidden = at === 0; this.next.hidden = at === 3; this.start.hidden = at !== 3;
    if (at < 3) set_text(this.next, `Next: ${this.tabs[at + 1].title}`);
    const where = form.rows.length ? `Start on ${count_of(form.rows.length, "node")}` : "Start on this machine";
    set_text(this.start.querySelector("span"), where); disable(this.start, count ? `${count_of(count, "field")} to correct first` : null);
  }
  title_of(path) {
    const match = /^nodes\[(\w+)\]\.?(.*)$/.exec(path);
    if (match) return `${this.form.rows.includes(match[1]) ? `Node ${this.form.rows.indexOf(match[1]) + 1}` : "A node that was removed"}${match[2] ? `, ${this.known.node[match[2]]?.title ?? match[2]}` : ""}`;
    return this.known.fields[path]?.title ?? ({ "": "The whole", parallelism: "Mesh", source: "Source", training: "Training" }[path] ?? path);
  }
  draw_notes() {
    if (!this.form) return;
    const { conflict, conflicts } = this.form, fail = { on_error: (text) => this.complain(text) }, made = [];
    if (conflict) made.push(note("warn", [h("p", { role: "alert" }, conflict.text), ...conflict.changes.map(([path, theirs, mine]) => h("p", { class: "small" }, `${path}: ${theirs || "not given"} there, ${mine || "not given"} here`))], [
      this.view.button("Load theirs", () => this.view.call("load_theirs"), fail), this.view.button("Save mine over it", () => this.do_save(true), { cls: "danger", ...fail }), this.view.button("Save as another", () => this.do_save(false, `${(typed_at(this.form, "name") || "pipeline").slice(0, 50)}-mine`), fail)]));
    for (const each of conflicts) made.push(note("run", h("p", {}, h("b", {}, "Another tab changed this form. "), `The edit of ${this.title_of(each.path)} was not applied: ${JSON.stringify(each.mine)}${each.theirs === null ? "" : ` instead of ${JSON.stringify(each.theirs)}`}.`), ["theirs", "mine"].map((keep) =>
      this.view.button(keep === "mine" ? "Apply mine" : "Keep theirs", () => this.view.call("resolve", { path: each.path, keep, editor: each.editor }), fail))));
    const unknown = Object.entries(this.form.errors).filter(([path]) => !this.fields.has(path) && !["", "parallelism", "source"].includes(path));
    for (const [path, text] of unknown) made.push(note("bad", h("p", {}, path ? `${path}: ${text}` : text), [this.view.button("Leave it out", () => this.edit(path, ""), fail)]));
    const loose = Object.entries(this.form.warnings).filter(([path]) => !this.fields.has(path) && path !== "source");
    for (const [path, text] of loose) made.push(note("warn", h("p", {}, path ? `${this.title_of(path)}: ${text}` : text)));
    if (this.failure && !conflict) made.push(note("bad", h("p", { role: "alert" }, this.failure), [this.close_button(() => { this.failure = null; })]));
    if (this.work?.is === "running") made.push(note("run", h("p", { role: "status" }, `${this.work.what}…`)));
    if (this.work?.is === "failed") made.push(note("bad", h("p", { role: "alert" }, `${this.work.what}: ${this.work.error}`), [this.close_button(() => { this.work = null; })]));
    if (this.work?.is === "done") made.push(note("ok", h("p", { role: "status" }, `${this.work.what}: it runs. My Pipelines shows how it is.`), [this.view.button("Show job", () => this.view.call("show_job", { id: this.view.state.started }), fail), this.close_button(() => { this.work = null; })]));
    if (this.removed) made.push(note("run", h("p", { role: "status" }, `${this.removed.title} was removed`), [this.view.button([icon("undo"), "Undo"], () => this.change("restore", this.removed.key), fail), this.close_button(() => { this.removed = null; })]));
    if (this.said) made.push(note("run", this.said, [this.close_button(() => { this.said = null; })]));
    this.notes.replaceChildren(...made); this.notes.hidden = !made.length;
  }
  close_button(act) { return close_button(() => { act(); this.draw_notes(); }); }
  async draw_review() {
    this.reviewed = this.form.revision;
    const page = this.pages.review, found = await this.view.call("review").catch((error) => ({ error: error.message }));
    if (found.error) { page.replaceChildren(h("p", { class: "soft" }, `What would run is shown here: ${found.error}.`)); return; }
    const { plan, commands, documents, exports } = found;
    const ranks = (node) => [...node.ranks.map((rank) => h("div", { class: `pr c${(rank.places.pp ?? 0) % 6}` }, h("span", { class: "soft" }, rank.device), h("b", {}, `rank ${rank.rank}`), h("div", {}, Object.entries(rank.places).filter(([axis]) => (Object.fromEntries(Object.entries(plan.mesh))[axis] ?? 1) > 1).map(([axis, at]) => `${axis} ${at}`).join(" · ") || "alone"))), node.more ? h("span", { class: "soft" }, `and ${node.more} more`) : null];
    const shown = { TOML: documents.toml, JSON: documents.json, YAML: documents.yaml, Python: found.code, ...Object.fromEntries(Object.entries(exports).map(([name, made]) => [name, made.text ?? `It cannot be written: ${made.error}`])) };
    const text = h("pre", { class: "written", tabIndex: 0, role: "tabpanel", "aria-label": "Written out" });
    const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Spec" }, Object.keys(shown).map((name) => h("button", { type: "button", class: "b", role: "tab", onclick: () => pick(name) }, name)));
    const pick = (name) => { this.picked = name; text.textContent = shown[name]; for (const tab of tabs.children) tab.setAttribute("aria-selected", `${tab.textContent === name}`); };
    pick(this.picked in shown ? this.picked : "TOML");
    roving(tabs, { on_move: (tab) => tab.click() });
    page.replaceChildren(section("Plan", plan.error ? null : `${count_of(plan.nodes.length, "node")}, ${count_of(plan.ranks, "rank")}, ${count_of(plan.stages, "stage")}${plan.bubble === null ? "" : `; ranks wait at least ${Math.round(100 * plan.bubble)} % of each step, as little as that where all stages take equally long`}`),
      plan.error ? h("p", { class: "soft" }, plan.error) : h("div", { class: "plan" }, plan.nodes.slice(0, 32).flatMap((node) => [h("b", {}, node.name), h("div", {}, ranks(node))])),
      section("Commands", "what runs on each node"), commands.error ? note("bad", h("p", {}, commands.error)) : h("div", { class: "cmds" }, commands.nodes.slice(0, 32).flatMap((node) => [h("b", {}, node.name), command_box(node.command)])),
      ...(commands.warnings ?? []).map((each) => note("warn", h("p", {}, each))), section("Spec"), tabs, text,
      h("div", { style: "margin-top:6px" }, this.view.button([icon("copy"), "Copy"], () => copy_text(text.textContent))));
  }
  show(step, has_focus = true) {
    this.send_all();
    this.step = step;
    for (const [id, page] of Object.entries(this.pages)) page.hidden = id !== step;
    if (!this.form) return;
    this.draw_steps();
    if (step === "review") this.draw_review();
    if (has_focus && step !== "review") this.focus_first();
  }
  focus_first() { this.pages[this.step].querySelector("input:not([hidden]), textarea, .toggle, button")?.focus(); }
  go(by) { this.show(this.tabs[this.tabs.findIndex((tab) => tab.id === this.step) + by].id); }
  /** Show the field of a fault, and put the focus there. */
  go_to(path) {
    const key = /^nodes\[(\w+)\]/.exec(path)?.[1], first = path.split(/[.[]/)[0];
    const info = this.known.fields[path] ?? Object.values(this.known.fields).find((each) => each.path.split(".")[0] === first);
    this.show(key || first === "nodes" ? "nodes" : info?.step ?? "general", false);
    if (key) this.nodes.get(key)?.open(true);
    const field = this.fields.get(path);
    field?.input.closest("details")?.setAttribute("open", "");
    (field?.input ?? this.pages[this.step].querySelector("input"))?.focus();
  }
}
