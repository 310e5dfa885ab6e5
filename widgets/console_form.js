// The form of a pipeline. The kernel validates it; this file draws the fields and sends typed values.

const AXES = { pp: "Stages: layers one after the other", dp_replicate: "Whole copies, different data", dp_shard: "Shards of all parameters, different data", tp: "Each layer split, same data" }; // as in the mesh
const KINDS = { script: ["Script", "A .py file"], script_text: ["Text", "Typed here"], notebook: ["Notebook", "Cells tagged job"], git: ["Git", "Cloned, then pulled"], path: ["Folder", "Local or s3://"], module: ["Module", "python -m name"] };
const FIRST = ["training.batch_size", "parallelism.microbatches", "parallelism.schedule", "parallelism.precision", "training.steps", "training.learning_rate", "training.optimizer", "training.warmup_steps", "training.clip", "training.seed"];

const section = (title, text) => h("div", { class: "sec" }, h("h4", {}, title), text ? h("span", { class: "soft" }, text) : null);

/** The plan in one line. */
const facts_of = ({ nodes, ranks, mesh, batch, stages, schedule }) => {
  const axes = Object.entries(mesh).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`).join(" × ");
  const parts = batch && [[batch.size / batch.replica, "replica"], [batch.replica / batch.micro, "microbatch"]].filter(([count]) => count > 1).map(([count, word]) => count_of(count, word));
  const told = { Ranks: `${grouped(ranks)} on ${count_of(nodes.length, "node")}`, Mesh: axes || "no axis above 1",
    Batch: batch ? [grouped(batch.size), ...(parts.length ? [`= ${[...parts, batch.micro].join(" × ")}`] : [])].join(" ") : "not given", Schedule: schedule ? `${schedule}, ${count_of(stages, "stage")}` : "none, one stage" };
  return h("div", { class: "gist", role: "group", "aria-label": "Summary" }, Object.entries(told).map(([word, value]) => h("div", {}, h("span", {}, word), h("b", {}, value))));
};

/** Insert a cell below the one that shows the widget; false in a front end without access to the notebook. */
const insert_cell = (manager, widget, source) => {
  const notebook = manager?.context?.model?.sharedModel;
  const at = notebook?.cells?.findIndex((cell) => cell.toJSON().outputs?.some((each) => each.data?.["application/vnd.jupyter.widget-view+json"]?.model_id === widget)) ?? -1;
  if (at >= 0) notebook.insertCell(at + 1, { cell_type: "code", source, metadata: {} });
  return at >= 0;
};

/** A note about the work of the kernel; null if there is none. */
const work_note = (view, work, on_error) => {
  const close = () => close_button(() => view.call("drop_work"));
  if (work?.is === "running") return note("run", h("p", { role: "status" }, `${work.what}…`));
  const show = (id) => view.button("Show job", () => view.show_job(id), { on_error });
  const stop = (id) => view.button("Stop it", () => view.call("stop_job", { id }), { cls: "danger", on_error });
  if (work?.is === "failed") return note("bad", h("p", { role: "alert" }, `${work.what}: ${work.error}`), [...(work.job ? [show(work.job), stop(work.job)] : []), close()]);
  if (work?.is === "done" && work.job) return note("ok", h("p", { role: "status" }, `${work.what}: the job is running. My Pipelines shows its state.`), [show(work.job), close()]);
  return null;
};

/** The kind of source, as radio buttons. */
class KindField extends Field {
  make_input() {
    const radio = (kind) => h("input", { type: "radio", name: `${this.id}-kind`, value: kind });
    return h("fieldset", { class: "kinds" }, h("legend", { class: "sr" }, "Source"), Object.entries(KINDS).map(([kind, [word, told]]) => h("label", {}, h("b", {}, radio(kind), word), h("small", {}, told))));
  }
  get radios() { return [...this.input.querySelectorAll("input")]; }
  read() { return this.radios.find((each) => each.checked)?.value ?? ""; }
  put(kind) { for (const each of this.radios) each.checked = each.value === kind; }
  focus() { (this.radios.find((each) => each.checked) ?? this.radios[0]).focus(); }
  typed() { super.typed(); this.editor.draw_source(); }
  update(form) { super.update(form); this.editor.draw_source(); }
}

class FormPage extends DraftEditor {
  constructor(view) {
    super(view);
    this.step = "general";
    this.name = h("h3"); this.file = h("span", { class: "soft" });
    const fail = { on_error: (text) => this.complain(text) };
    this.save = view.button("Save", () => this.do_save(false), fail);
    this.another = h("input", { class: "in", style: "width:200px", "aria-label": "Name of the other pipeline", spellcheck: "false", autocomplete: "off" });
    this.steps = h("ol", { class: "steps", "aria-label": "Pages of the form" });
    this.notes = h("div", { class: "notes", hidden: true }); this.left_out = new LeftOut(view, () => this.focus_first());
    this.body = h("div", { class: "body" }); this.would_run = h("div"); this.exporting = new ExportPanel(view, (path) => this.go_to(path));
    this.message = h("span", { role: "status" });
    this.back = h("button", { type: "button", class: "b", onclick: () => this.go(-1) }, "Back");
    this.next = h("button", { type: "button", class: "b go", onclick: () => this.go(1) });
    this.start = view.button([icon("run"), h("span", {}, "Start")], () => this.do_start(), { cls: "go", ...fail });
    this.element = h("div", { hidden: true },
      h("div", { class: "head" }, view.button([icon("left"), "My Pipelines"], () => this.leave(), { cls: "q", ...fail }), this.name, this.file,
        h("span", { class: "push row" }, view.button("Insert as code", () => this.insert(), fail), this.save)),
      this.steps, this.notes, this.left_out.element, this.body, h("div", { class: "foot" }, this.message, h("span", { class: "push row" }, this.back, this.next, this.start)));
    this.tabs = [["general", "General"], ["nodes", "Nodes"], ["source", "Source"], ["review", "Review & start"]].map(([id, title], at) => {
      const [nr, told] = [h("span", { class: "nr" }, `${at + 1}`), h("small")];
      const button = h("button", { type: "button", onclick: () => this.show(id) }, nr, h("b", {}, title), told);
      this.steps.append(h("li", {}, button));
      return { id, title, nr, told, button, at };
    });
    this.pages = { general: this.make_general(), nodes: this.make_nodes(), source: this.make_source(), review: h("div", {}, this.would_run, this.exporting.element) };
    this.body.append(...Object.values(this.pages));
    this.show("general", false);
  }
  of_step(step, without) { return Object.values(this.known.fields).filter((info) => info.step === step && !without.some((each) => info.path === each || info.path.startsWith(`${each}.`))).map((info) => info.path); }
  fold(title, paths) { return h("details", { class: "fold" }, h("summary", {}, title), this.grid(paths)); }

  make_general() {
    const axes = Object.entries(AXES).map(([axis, told]) => {
      const field = this.field(`parallelism.${axis}`, { is_bare: true });
      const turn = field.turn = (by) => { const now = parseInt(field.input.value || field.info.default, 10), to = (Number.isNaN(now) ? 1 : now) + by; field.put(`${Math.max(-1, to === 0 ? by : to)}`); field.is_waiting = true; field.send(); };
      const step = (word, by, sign) => h("button", { type: "button", class: "b ic", "aria-label": `${axis}: ${word}`, title: `${axis}: ${word}`, onclick: () => turn(by) }, icon(sign));
      field.label.replaceChildren(axis);
      return h("div", { class: "ax" }, icon(axis), h("span", { class: "stepper" }, step("fewer", -1, "minus"), field.input, step("more", 1, "plus")), h("span", {}, field.label, h("small", { id: field.hint.id }, told)), field.err);
    });
    this.drawing = h("div", { class: "drawing", role: "img" }); this.told_mesh = h("div", { style: "margin-top:6px" });
    return h("div", {}, this.grid(["name", "description"]), section("Mesh", "how the model is spread over the ranks; -1 takes the remaining ranks"),
      h("div", { class: "mesh2" }, h("div", {}, axes), this.drawing), this.told_mesh, section("Training"), this.grid(FIRST),
      this.fold("More training fields", this.of_step("general", ["name", "description", ...FIRST, ...Object.keys(AXES).map((axis) => `parallelism.${axis}`), "model", "image"])),
      this.fold("Existing model, container image", this.of_step("general", ["name", "description", "parallelism", "training"])));
  }
  make_nodes() {
    this.list = new NodeList(this, "No nodes: ranks run on this machine"); this.told_nodes = h("div", { style: "margin-top:8px" });
    set_text(this.list.facts, "the first node has the rendezvous");
    return h("div", {}, h("div", { class: "framed" }, this.list.asks, this.list.el), this.told_nodes,
      section("Rendezvous", "how ranks find each other; the defaults usually fit"), this.grid(this.of_step("nodes", [])));
  }
  make_source() {
    this.kind = new KindField(this, "source.kind", this.info_of("source.kind"), { is_bare: true });
    this.kind.hint.className = "sr"; this.fields.set("source.kind", this.kind);
    const of_kind = (kind) => (kind === "git" ? ["source.git.url", "source.git.ref", "source.entry", "source.git.folder", "source.git.token", "source.git.ssh_key", "source.git.how"] : [`source.${kind}`]);
    this.by_kind = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, h("div", { class: "grid12" }, of_kind(kind).filter((path) => path !== "source.entry").map((path) => this.field(path).element))]));
    this.entry = h("div", { class: "grid12", style: "margin-top:10px" }, this.field("source.entry").element);
    this.kind.err.setAttribute("role", "status");
    const rest = this.of_step("source", ["source.kind", ...Object.keys(KINDS).map((kind) => `source.${kind}`), "source.entry", "data", "checkpoint", "env", "secrets", "artifacts"]);
    return h("div", {}, this.kind.input, this.kind.err, this.kind.hint, ...Object.values(this.by_kind), this.entry, section("How it is run"), this.grid(rest), section("Data and checkpoints"),
      this.grid(["data.url", "checkpoint.url"]), this.fold("More data and checkpoint fields", this.of_step("source", ["source", "env", "secrets", "artifacts", "data.url", "checkpoint.url"])),
      section("Environment", "one NAME=value per line; for secrets, the name alone"), this.grid(["env", "secrets", "artifacts"]));
  }

  // ---- what is typed
  async leave() { await this.send_all(); await this.view.call("close_form"); }
  async do_save(anyway, name = null) { await this.send_all(); this.failure = null; await this.view.call("save", { anyway, name }); this.view.announce("Saved"); }
  async do_start() {
    if (this.digest === null) await this.drawing_review; // else Start was pressed before the review had arrived
    try { await this.view.call("start", { digest: this.digest }); } catch (error) { if (this.form) this.draw_review(); throw error; } // the form may have changed
  }
  async insert() {
    await this.send_all();
    const found = await this.view.call("review");
    if (found.error) { this.complain(`No code yet: ${found.error}`); return; }
    const does = "it builds this pipeline and submits it.", is_there = insert_cell(this.view.model.widget_manager, found.widget, found.code);
    const told = is_there ? `Inserted below this cell; run it: ${does}` : (await copy_text(found.code)) ? `Copied: paste it into a cell; ${does}` : `Paste this into a cell: ${does}`;
    this.said = [h("p", {}, told), command_box(found.code, "Copy the code")];
    this.draw_notes();
  }
  complain(text) { this.failure = text; this.draw_notes(); }
  set_work(work) { this.work = work; this.draw_notes(); }

  // ---- what is shown
  set_form(form) {
    if (this.form?.file !== form?.file) {
      this.failure = this.said = this.reviewed = null; this.list.clear(); this.another.value = "";
      for (const field of this.fields.values()) field.revision = field.seen = 0; // each form counts its own revisions
      if (form?.exported) this.exporting.resume(form.exported);
    }
    this.form = form;
    if (form === null) return;
    this.update_fields(form); this.list.update(); this.left_out.update(form.left_out);
    set_text(this.name, typed_at(form, "name") || "unnamed"); set_text(this.file, `${form.file} · ${form.is_changed ? "changed" : `saved ${form.saved}`}`);
    this.draw_mesh(); this.draw_steps(); this.draw_notes();
    if (this.step === "review" && this.reviewed !== form.revision) this.draw_review();
  }
  draw_source() {
    const kind = this.kind.read();
    for (const [each, grid] of Object.entries(this.by_kind)) grid.hidden = each !== kind;
    this.entry.hidden = !["git", "path"].includes(kind);
    const { errors, warnings } = this.form, error = errors["source.kind"] ?? errors.source;
    show_fault(this.kind.err, error ?? warnings.source, !error);
  }
  draw_mesh() {
    const found = this.form.mesh, mesh = found?.error ? null : found, sizes = Object.fromEntries(mesh?.axes ?? []);
    const [stages, tp] = [sizes.pp ?? 1, sizes.tp ?? 1], rows = mesh ? mesh.ranks / stages / tp : 0, is_small = stages <= 4 && rows <= 4 && tp <= 4;
    const told = mesh ? `${count_of(stages, "stage")}, each with ${count_of(rows, "row")} of ${count_of(tp, "tensor part")}: ${count_of(mesh.ranks, "rank")}` : "No mesh yet";
    this.drawing.setAttribute("aria-label", told);
    this.drawing.replaceChildren(...(mesh && is_small ? [...Array(stages).keys()].map((stage) => h("div", { class: `stage c${stage % 6}` }, h("b", {}, `stage ${stage}`), h("div", { class: "ranks", style: `grid-template-columns:repeat(${tp},1fr)` },
      [...Array(rows * tp).keys()].map((at) => h("i", {}, `${stage * rows * tp + at}`))))) : [h("span", { class: "soft" }, told)]));
    const error = this.form.errors.parallelism ?? this.form.errors[""];
    const line = () => error ?? found?.error ? [h("span", { class: "err", role: "status" }, icon("warn"), h("span", {}, error ?? found.error))] : mesh ? [state_word("ok", count_of(mesh.ranks, "rank")), h("span", { class: "soft" }, ` = ${mesh.axes.map(([, size]) => size).join(" × ")}; on ${mesh.nodes.slice(0, 4).join(", ")}${mesh.nodes.length > 4 ? " and more" : ""}`)] : [];
    for (const place of [this.told_mesh, this.told_nodes]) redraw(place, [error, found], line);
  }
  draw_steps() {
    const { form } = this, bad = form.steps.filter((step) => step.faults).map((step) => this.tabs.findIndex((tab) => tab.id === step.id) + 1);
    for (const tab of this.tabs) {
      const step = form.steps.find((each) => each.id === tab.id), is_bad = step ? step.faults > 0 : false, is_ok = step ? !is_bad : !bad.length;
      tab.button.className = is_bad ? "is-bad" : is_ok ? "is-ok" : "is-idle";
      if (this.step === tab.id) tab.button.setAttribute("aria-current", "step"); else tab.button.removeAttribute("aria-current");
      tab.nr.replaceChildren(is_ok && this.step !== tab.id ? icon("ok") : `${tab.at + 1}`);
      set_text(tab.told, step ? step.told : bad.length ? `correct ${bad.length > 1 ? "steps" : "step"} ${bad.join(", ")} first` : "ready");
    }
    const [path] = Object.keys(form.errors), count = Object.keys(form.errors).length;
    const num_warnings = Object.keys(form.warnings).length, said = count ? `${this.title_of(path)}: ${form.errors[path]}${count > 1 ? ` (and ${count - 1} more)` : ""}` : num_warnings ? `${count_of(num_warnings, "warning")}, none prevents a start` : "All fields valid";
    redraw(this.message, [path ?? null, said], () => (count ? [icon("warn"), ` ${said} `, h("button", { type: "button", class: "link", onclick: () => this.go_to(path) }, "Go there")] : [said]));
    const at = this.tabs.findIndex((tab) => tab.id === this.step);
    this.back.hidden = at === 0; this.next.hidden = at === 3; this.start.hidden = at !== 3;
    if (at < 3) set_text(this.next, `Next: ${this.tabs[at + 1].title}`);
    const where = form.rows.length ? `Start on ${count_of(form.rows.length, "node")}` : "Start on this machine";
    set_text(this.start.querySelector("span"), where); disable(this.start, count ? `${count_of(count, "field")} to correct first` : null);
  }
  draw_notes() {
    if (!this.form) return;
    const { conflict } = this.form, fail = { on_error: (text) => this.complain(text) }, made = [];
    const is_loose = ([path]) => !this.info_of(path) && !(path.startsWith("nodes[") && this.form.nodes[OF_NODE.exec(path)?.[1]]) && !["", "parallelism", "source"].includes(path);
    const errors = Object.entries(this.form.errors).filter(is_loose), warnings = Object.entries(this.form.warnings).filter((each) => each[0] === "" || is_loose(each));
    const facts = JSON.stringify([conflict, this.form.conflicts, errors, warnings, this.failure, this.work, this.said?.map((each) => each.textContent)]);
    if (facts === this.shown_facts) return; // a needless redraw loses the focus, and screen readers repeat all notes
    this.shown_facts = facts;
    if (conflict) {
      this.another.value ||= `${(typed_at(this.form, "name") || "pipeline").slice(0, 50)}-mine`;
      made.push(note("warn", [h("p", { role: "alert" }, conflict.text), ...conflict.changes.map(([path, theirs, mine]) => h("p", { class: "small" }, `${path}: ${theirs || "not given"} in the file, ${mine || "not given"} here`)),
        h("p", { class: "row wrap" }, this.view.button("Load theirs", () => this.view.call("load_theirs"), fail), this.view.button("Overwrite with mine", () => this.do_save(true), { cls: "danger", ...fail }),
          this.view.button("Save as another", () => this.do_save(false, this.another.value.trim()), fail), this.another)]));
    }
    made.push(...this.conflict_notes());
    for (const [path, text] of errors) made.push(note("bad", h("p", {}, `${this.title_of(path)}: ${text}`), path === "nodes" ? [] : [this.view.button("Remove it", () => this.edit(path, ""), fail)]));
    for (const [path, text] of warnings) made.push(note("warn", h("p", {}, path ? `${this.title_of(path)}: ${text}` : text)));
    if (this.failure && !(conflict && this.failure.startsWith(conflict.text))) made.push(note("bad", h("p", { role: "alert" }, this.failure), [this.close_button(() => { this.failure = null; })]));
    made.push(work_note(this.view, this.work, fail.on_error));
    if (this.said) made.push(note("run", this.said, [this.close_button(() => { this.said = null; })]));
    const focused = document.activeElement;
    this.notes.replaceChildren(...made.filter(Boolean)); this.notes.hidden = !this.notes.childNodes.length;
    if (this.notes.contains(focused)) focused.focus(); // the user is typing a name
  }
  close_button(act) { return close_button(() => { act(); this.draw_notes(); }); }
  async draw_review() {
    this.reviewed = this.form.revision;
    const page = this.would_run, found = await this.view.call("review").catch((error) => ({ error: error.message }));
    this.digest = found.digest ?? ""; this.exporting.element.hidden = Boolean(found.error);
    if (found.error) { page.replaceChildren(h("p", { class: "soft" }, `Nothing to review yet: ${found.error}.`)); return; }
    const { plan, commands, documents } = found;
    const ranks = (node) => [...node.ranks.map((rank) => h("div", { class: `pr c${(rank.places.pp ?? 0) % 6}` }, h("span", { class: "soft" }, rank.device), h("b", {}, `rank ${rank.rank}`), h("div", {}, Object.entries(rank.places).filter(([axis]) => (Object.fromEntries(Object.entries(plan.mesh))[axis] ?? 1) > 1).map(([axis, at]) => `${axis} ${at}`).join(" · ") || "alone"))), node.more ? h("span", { class: "soft" }, `and ${node.more} more`) : null];
    const shown = { TOML: documents.toml, JSON: documents.json, YAML: documents.yaml, Python: found.code };
    const text = h("pre", { class: "written", tabIndex: 0, role: "tabpanel", "aria-label": "Text of the spec" });
    const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Spec" }, Object.keys(shown).map((name) => h("button", { type: "button", class: "b", role: "tab", onclick: () => pick(name) }, name)));
    const copied = h("span", { class: "soft", role: "status" });
    const copy = this.view.button([icon("copy"), "Copy"], async () => set_text(copied, (await copy_text(text.textContent)) ? "Copied" : "Not copied: select the text"));
    const pick = (name) => { this.picked = name; text.textContent = shown[name]; set_text(copied, ""); for (const tab of tabs.children) tab.setAttribute("aria-selected", `${tab.textContent === name}`); };
    pick(this.picked in shown ? this.picked : "TOML");
    roving(tabs, { on_move: (tab) => tab.click() });
    page.replaceChildren(plan.error ? "" : facts_of(plan),
      section("Plan", plan.error || plan.bubble === null ? null : `ranks wait at least ${Math.round(100 * plan.bubble)} % of each step; exactly that if all stages take equally long`),
      plan.error ? h("p", { class: "soft" }, plan.error) : h("div", { class: "plan" }, plan.nodes.slice(0, 32).flatMap((node) => [h("b", {}, node.name), h("div", {}, ranks(node))])),
      section("Commands", "what runs on each node"), commands.error ? note("bad", h("p", {}, commands.error)) : h("div", { class: "cmds" }, commands.nodes.slice(0, 32).flatMap((node) => [h("b", {}, node.name), command_box(node.command)])),
      ...(commands.warnings ?? []).map((each) => note("warn", h("p", {}, each))), section("Spec"), tabs, text,
      h("div", { class: "row", style: "margin-top:6px" }, copy, copied));
    this.exporting.update(typed_at(this.form, "name"));
  }
  show(step, has_focus = true) {
    this.send_all();
    this.step = step;
    for (const [id, page] of Object.entries(this.pages)) page.hidden = id !== step;
    if (!this.form) return;
    this.draw_steps();
    if (step === "review") { this.digest = null; this.drawing_review = this.draw_review(); }
    if (!has_focus) return;
    if (step === "review") this.tabs.at(-1).button.focus(); else this.focus_first();
    this.element.firstChild.scrollIntoView({ block: "nearest" }); // the previous page may have been longer
  }
  /** Show the first page of a form that was opened; the list shows jobs started from other forms. */
  begin(has_focus) {
    if (this.work?.is !== "running") this.work = null;
    this.show("general", has_focus); this.draw_notes();
  }
  focus_first() { [...this.pages[this.step].querySelectorAll("input, textarea, button")].find((each) => each.offsetParent)?.focus(); }
  go(by) { this.show(this.tabs[this.tabs.findIndex((tab) => tab.id === this.step) + by].id); }
  /** Show and focus the field of an error. */
  go_to(path) {
    const [, key, name] = OF_NODE.exec(path) ?? [], first = path.split(/[.[]/)[0];
    const info = this.known.fields[path] ?? Object.values(this.known.fields).find((each) => each.path.split(".")[0] === first);
    this.show(first === "nodes" ? "nodes" : info?.step ?? "general", false);
    if (this.list.rows.has(key)) { this.list.rows.get(key).go_to(name); return; }
    const field = this.fields.get(path);
    field?.input.closest("details")?.setAttribute("open", "");
    if (field) field.focus(); else this.focus_first();
  }
  end() { super.end(); this.exporting.end(); }
}
