// The form of nodes: the rows, their file, and the start of a session on them.

const PHASES = ["1 Connect", "2 Send files", "3 Start ranks", "4 Join group"];
const WORDS = { running: ["run", "running"], done: ["ok", "done"], failed: ["bad", "failed"], wait: ["wait", "waits"], idle: ["idle", "not yet"], stopped: ["stopped", "stopped"] };

const start_cell = (node, cell, phase) => h("div", { role: "cell" }, h("div", { class: "soft small phase" }, phase), state_word(...WORDS[cell.is]), h("div", { class: "soft small cut" }, cell.text),
  cell.share === null ? null : h("span", { class: "bar is-run", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * cell.share)), "aria-label": `${node}, ${phase}` }, h("i", { style: `width:${100 * cell.share}%` })));
const start_table = (table) => h("div", { class: "prog", role: "table", "aria-label": "Phases of the start" },
  h("div", { role: "row", class: "h" }, ["Node", ...PHASES].map((word) => h("div", { role: "columnheader" }, word))),
  table.map(({ node, cells }) => h("div", { role: "row" }, h("div", { role: "rowheader", class: "cut" }, node), cells.map((cell, i) => start_cell(node, cell, PHASES[i].slice(2))))));

class NodesForm extends DraftEditor {
  constructor(view) {
    super(view);
    this.list = new NodeList(this); this.complain = this.list.say;
    const fail = { on_error: this.complain };
    this.conflicts = h("div", { class: "bars" });
    this.fault = h("span", { class: "err" }); this.save = view.button("Save", () => this.save_now(), fail);
    this.go = view.button("Start session", async () => { await this.send_all(); await view.call("start"); }, { cls: "go", ...fail });
    this.foot = h("div", { class: "foot" }, h("span", { role: "status" }, this.fault), h("span", { class: "push row" }, this.save, this.go));
    this.body = h("div", {}, this.conflicts, this.list.el, this.foot);
    this.starting = h("div", {});
    view.el.append(this.starting, this.list.asks, this.body); // a start may ask for a passphrase, too
  }
  async save_now() {
    if (this.form.file) await this.save_to(this.form.file, "");
    else this.ask_where();
  }
  ask_where() { this.list.ask_path("Save as", [["Save file", (path) => this.save_to(path, "")]]); }
  async save_to(path, over) {
    const had = document.activeElement;
    await this.send_all();
    const { view, list } = this, { ask, over: seen, said } = await view.call("save", { path, over });
    if (said) { list.bar.replaceChildren(); list.tell("ok", said); focus_after(had, this.save); return; }
    const write = view.button("Overwrite", () => this.save_to(path, seen), { cls: "danger", on_error: this.complain });
    const other = view.button("Save as…", () => { list.clear(); this.ask_where(); });
    list.message.replaceChildren(note("warn", h("p", {}, ask), [write, other, view.button("Cancel", () => list.clear())]));
    view.announce(ask); focus_after(had, write);
  }
  update(form) {
    this.update_fields(form); this.list.path = form.file; this.list.update();
    const count = form.rows.length, ranks = form.num_ranks === null ? "" : `, ${count_of(form.num_ranks, "rank")}`;
    this.list.facts.replaceChildren(count ? `${count_of(count, "node")}${ranks}` : "", ...(form.file ? [" · ", h("span", { class: "mono" }, form.file), form.is_changed ? ", changed" : ""] : []));
    this.foot.hidden = !count;
    redraw(this.conflicts, form.conflicts, () => this.conflict_notes());
    this.show_faults(form.faults);
  }
  show_faults(faults) {
    const first = faults.find(([path]) => OF_NODE.test(path));
    redraw(this.fault, faults, () => {
      const [, node, name] = first ? OF_NODE.exec(first[0]) : [];
      const go = first ? h("button", { type: "button", class: "link", onclick: () => this.list.rows.get(node).go_to(name) }, "Go there") : null;
      return faults.length ? [icon("warn"), h("span", {}, faults[0][1], faults.length > 1 ? ` (and ${faults.length - 1} more) ` : " ", go)] : [];
    });
    for (const button of [this.go, this.save]) disable(button, faults.length ? `Correct ${count_of(faults.length, first ? "field" : "error")} first` : "");
  }
  show_start(start) {
    const is_on = start.is === "running", is_done = start.is === "done";
    const was_in_form = this.body.contains(document.activeElement), was_in_start = this.starting.contains(document.activeElement);
    this.body.hidden = is_on || is_done; this.list.start_errors = start.errors ?? {};
    if (is_on) {
      if (!this.start_body) {
        this.start_line = h("span", { class: "soft" }); this.start_body = h("div", {});
        const cancel = this.view.button("Cancel", () => this.view.call("cancel"));
        this.starting.replaceChildren(h("div", { class: "head" }, h("h3", {}, "Starting session"), this.start_line, h("span", { class: "push" }, cancel)), this.start_body);
        if (was_in_form) cancel.focus();
      }
      set_text(this.start_line, `${this.list.facts.textContent.split(" · ")[0]} · ${format_seconds(start.seconds)} · ${start.line}`);
      this.start_body.replaceChildren(start_table(start.table));
    } else {
      this.start_body = null;
      const board = this.view.state.board;
      if (is_done) this.starting.replaceChildren(h("div", { class: "body" }, h("p", {}, state_word("ok", start.line)), start.notes.map((words) => h("p", { class: "soft" }, words)), h("p", { class: "soft" }, "To see its ranks, run:"), command_box(board)));
      else if (start.is === "failed") this.starting.replaceChildren(note("bad", [h("p", { class: "said" }, h("b", {}, "The session was not started. "), start.error)], [this.view.button("Close", () => this.starting.replaceChildren())]), start_table(start.table));
      else this.starting.replaceChildren(...(start.is === "cancelled" ? [note("stopped", h("p", {}, "The start was cancelled. Nothing is left running."))] : []));
      if (was_in_start && !is_done) this.go.focus();
      if (start.is !== "none") this.view.announce(is_done ? start.line : start.is === "failed" ? "The session was not started." : "The start was cancelled.");
    }
    this.list.show_tests(this.list.tests);
  }
}

function mount(view) {
  const form = new NodesForm(view);
  view.on("form", (told) => form.update(told));
  view.on("tests", (tests) => form.list.show_tests(tests));
  view.on("start", (start) => form.show_start(start));
  view.on("work", ({ is, error }) => { if (is === "failed") form.complain(error); });
  return () => form.end();
}
