// My Pipelines: a list of spec files. The kernel sends the entries; this file searches and sorts them.

const axis_chips = (axes) => h("span", { class: "mesh" }, axes.map(([name, size]) => h("span", { class: "chip" }, icon(name), `${name} ${size}`)));

/** The menu of a row: one Tab stop with arrow keys; Escape closes it and gives the focus back. */
function row_menu(view, label, items) {
  const menu = h("span", { class: "menu", role: "menu", "aria-label": label, hidden: true });
  const button = h("button", { type: "button", class: "b ic q", "aria-label": label, title: label, "aria-haspopup": "menu", "aria-expanded": "false" }, icon("more"));
  const anchor = h("span", { class: "anchor" }, button, menu);
  const close = (has_focus) => {
    menu.hidden = true; view.el.style.paddingBottom = ""; button.setAttribute("aria-expanded", "false");
    if (has_focus) button.focus();
  };
  const open = () => {
    menu.replaceChildren(...items().map((item) => item === null ? h("hr") : menu_item(item)));
    const box = button.getBoundingClientRect(), all = view.el.getBoundingClientRect();
    menu.classList.toggle("above", all.bottom - box.bottom < 140 && box.top - all.top > 140);
    menu.hidden = false; button.setAttribute("aria-expanded", "true");
    for (const item of menu.querySelectorAll("button")) item.tabIndex = -1;
    const over = menu.getBoundingClientRect().bottom + 8 - all.bottom; // what is below the view would be cut off
    if (over > 0) view.el.style.paddingBottom = `${over}px`;
    menu.querySelector("button").tabIndex = 0;
    menu.querySelector("button").focus();
  };
  const menu_item = ({ text, act, reason }) => {
    const item = view.button(text, async () => { close(true); await act(); }, { on_error: view.complain });
    item.setAttribute("role", "menuitem");
    disable(item, reason);
    return item;
  };
  roving(menu);
  button.addEventListener("click", () => (menu.hidden ? open() : close(true)));
  anchor.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && event.target === button && menu.hidden) { event.preventDefault(); event.stopPropagation(); open(); }
    if (event.key === "Escape" && !menu.hidden) { event.preventDefault(); event.stopPropagation(); close(true); }
  });
  anchor.addEventListener("focusout", (event) => { if (!menu.hidden && !anchor.contains(event.relatedTarget)) close(false); });
  return anchor;
}

/** One pipeline: its row is created once, and its cells change. */
class Row {
  constructor(view, page) {
    this.view = view; this.page = page;
    this.name = h("b"); this.file = h("span", { class: "mono" }); this.changed = h("span", { class: "small soft" });
    this.mesh = h("span"); this.where = h("span", { class: "where" });
    this.state = h("span"); this.detail = h("span", { class: "small" });
    this.open = view.button("Open", () => this.do_open(), { on_error: view.complain });
    this.second = view.button("Run", () => this.do_second(), { cls: "q second", on_error: view.complain });
    this.menu = null;
    this.acts = h("span", { class: "acts" }, this.open, this.second);
    this.element = h("tr", {}, h("td", { class: "n" }, this.name, this.file, this.changed), h("td", {}, this.mesh, this.where),
      h("td", { class: "job" }, this.state, this.detail), h("td", {}, this.acts));
    this.told = "";
    this.below = null;
  }
  update(entry) {
    this.entry = entry;
    const told = JSON.stringify(entry);
    if (told === this.told) return;
    this.told = told;
    set_text(this.name, entry.name); set_text(this.file, entry.file); set_text(this.changed, entry.is_changed ? " · unsaved changes" : "");
    this.mesh.replaceChildren(axis_chips(entry.axes)); set_text(this.where, entry.nodes);
    const job = entry.job;
    this.state.replaceChildren(!entry.can_open ? state_word("bad", "cannot be read") : job ? state_word(job.sign, job.word) : state_word("idle", "never run"));
    set_text(this.detail, entry.fault || (job ? job.detail : ""));
    this.open.setAttribute("aria-label", `Open ${entry.name}`);
    disable(this.open, entry.can_open ? null : entry.fault);
    this.is_running = job && !job.is_over;
    const word = this.is_running ? "Show job" : job ? "Run again" : "Run";
    set_text(this.second.firstChild, word);
    this.second.setAttribute("aria-label", `${word}: ${entry.name}`);
    disable(this.second, this.is_running || entry.can_run ? null : entry.fault);
    if (!this.menu) { this.menu = row_menu(this.view, `More for ${entry.name}`, () => this.items()); this.acts.append(this.menu); }
  }
  items() {
    const { entry, view } = this, count = entry.job?.count ?? 0;
    return [
      { text: "Duplicate", act: () => this.page.duplicate(entry), reason: entry.can_open ? null : entry.fault },
      { text: "Copy as Python", act: () => this.copy(), reason: entry.can_run ? null : entry.fault },
      { text: "Show job", act: () => this.show_view(), reason: count ? null : "this pipeline was never run" },
      { text: `Jobs of this pipeline (${count})`, act: () => this.show_job(), reason: count ? null : "this pipeline was never run" },
      null,
      { text: entry.is_beside ? "Delete" : "Remove from the list", act: () => this.page.delete(entry) },
    ];
  }
  do_open() { return this.view.call("open_pipeline", { id: this.entry.id }); }
  do_second() { if (this.is_running) return this.show_view(); else return this.view.call("run", { id: this.entry.id }); }
  async copy() {
    const code = await this.view.call("code", { id: this.entry.id });
    const is_copied = await copy_text(code);
    this.show([h("p", {}, is_copied ? "Copied: the code builds and submits this pipeline." : "This code builds and submits this pipeline:"), command_box(code, "Copy the code")]);
  }
  show_view() { return this.view.show_job(this.entry.job.id); }
  show_job() {
    const { job } = this.entry;
    this.show([h("p", {}, job.count > 1 ? `${job.count} jobs; the last one is ${job.id}: ${job.word}, ${job.detail}.` : `One job, ${job.id}: ${job.word}, ${job.detail}.`),
      command_box(`%job ${job.is_over ? "show" : "attach"} ${job.id}`), this.view.button("Show job", () => this.show_view(), { on_error: this.view.complain })]);
  }
  /** Show something below the row. */
  show(content) {
    const close = close_button(() => { this.below = null; this.page.draw(); this.open.focus(); });
    this.below = h("tr", { class: "more" }, h("td", { colspan: "4" }, h("div", { class: "row" }, h("div", { style: "flex:1;min-width:0" }, content), close)));
    this.page.draw();
    this.view.announce(content[0].textContent);
  }
}

class ListPage {
  constructor(view) {
    this.view = view; this.rows = new Map(); this.order = []; this.sorted = "job";
    this.count = h("span", { class: "soft" });
    this.search = h("input", { class: "in", type: "search", "aria-label": "Search name, node, status", placeholder: "Search name, node, status", oninput: () => this.draw() });
    this.searching = h("span", { class: "search", style: "width:216px" }, icon("search"), this.search);
    this.renew = view.button(icon("new"), () => view.call("refresh"), { cls: "ic q", label: "Refresh", on_error: view.complain });
    this.add = h("button", { type: "button", class: "b go", onclick: () => this.ask("new") }, icon("plus"), "New");
    this.asked = h("div", {});
    this.notes = h("div", { class: "notes", hidden: true });
    this.heads = { name: this.head("Name", "name"), job: this.head("Last job", "job") };
    this.body = h("tbody");
    this.table = h("table", { class: "pl" }, h("thead", {}, h("tr", {}, this.heads.name, h("th", {}, "Mesh, nodes"), this.heads.job, h("th", {}, h("span", { class: "sr" }, "Actions")))), this.body);
    this.nothing = h("p", { class: "none soft", hidden: true });
    this.first = h("div", { class: "start", hidden: true });
    this.undo = h("div", { class: "undo", hidden: true, role: "status" });
    this.element = h("div", {},
      h("div", { class: "head" }, h("h3", {}, "My Pipelines"), this.count, h("span", { class: "push row wrap" }, this.searching, this.renew,
        h("button", { type: "button", class: "b", onclick: () => this.ask("file") }, "Open file…"),
        h("button", { type: "button", class: "b", onclick: () => this.ask("import") }, "Import…"), this.add)),
      this.asked, this.notes, this.table, this.nothing, this.first, this.undo);
    view.complain = (text) => { this.failure = text; this.draw_notes(); };
    this.make_examples();
  }
  head(text, by) {
    const button = h("button", { type: "button", class: "sort", onclick: () => { this.sorted = by; this.order = []; this.draw(); } }, text);
    const cell = h("th", {}, button);
    cell.draw = () => {
      const is_on = this.sorted === by;
      set_text(button, is_on ? `${text} ${by === "job" ? "▾" : "▴"}` : text);
      if (is_on) cell.setAttribute("aria-sort", by === "job" ? "descending" : "ascending"); else cell.removeAttribute("aria-sort");
    };
    return cell;
  }
  make_examples() {
    const pieces = (axes) => {
      const [[axis, size]] = axes, tight = axis === "dp_shard";
      return h("span", { class: `parts ${tight ? "tight" : ""}`, "aria-hidden": "true" }, [...Array(size).keys()].map((at) =>
        h("i", { class: `c${axis === "pp" ? at : 0}` }, tight ? `1/${size}` : `${axis === "pp" ? "stage" : "copy"} ${at}`)));
    };
    const tiles = this.view.state.examples.map((each) => {
      const tile = this.view.button([], () => this.view.call("create_example", { name: each.name }), { on_error: this.view.complain });
      tile.className = "";
      tile.prepend(pieces(each.axes), h("b", {}, each.title), h("span", { class: "soft" }, each.description), h("span", { class: "row wrap" }, axis_chips(each.axes), h("span", { class: "soft small" }, each.needs)));
      return tile;
    });
    this.first.append(h("b", {}, "No pipelines next to this notebook"),
      h("p", {}, "A pipeline is one file: mesh, nodes, source, training. Start from an example; it is copied to ", h("span", { class: "mono" }, "pipelines/"), " for you to change."),
      h("div", { class: "ex" }, tiles));
  }
  /** The row that asks for the path of a file, for one of another tool, or the name of a new pipeline. */
  ask(kind) {
    const [word, label, act] = kind === "new" ? ["Create", "Name of the new pipeline", (text) => this.view.call("create", { name: text })]
      : ["Open", "Path of a spec file: .toml, .yaml or .json", (text) => this.view.call("open_file", { path: text })];
    const asked_by = document.activeElement, stop = () => { this.asked.replaceChildren(); focus_after(null, asked_by); };
    const { bar, input } = kind === "import" ? import_bar(this.view, stop) : ask_bar(this.view, label, [[word, async (text) => { await act(text); stop(); }]], stop);
    if (kind === "new" && this.list.entries.length) bar.append(this.other_ways(stop));
    this.asked.replaceChildren(bar);
    input.focus();
  }
  other_ways(stop) {
    return h("div", { class: "row wrap", style: "flex-basis:100%" }, h("span", { class: "soft" }, "Or start from an example:"), this.view.state.examples.map((each) =>
      this.view.button(each.title, async () => { await this.view.call("create_example", { name: each.name }); stop(); }, { title: each.description, on_error: this.view.complain })));
  }
  async duplicate(entry) {
    const had = document.activeElement, made = await this.view.call("duplicate", { id: entry.id });
    this.view.announce(`${made.name} was created`);
    this.focus_row(made.id, had);
  }
  /** Remove the row, and focus the button that restores it. */
  async delete(entry) {
    this.deleting = { had: document.activeElement };
    try { await this.view.call("delete", { id: entry.id }); } catch (error) { this.deleting = null; throw error; }
  }
  focus_row(id, had) { this.wanted = { id, had }; this.focus_wanted(); } // the row may arrive after the answer
  focus_wanted() {
    const { id, had } = this.wanted ?? {}, row = this.rows.get(id);
    if (row) { this.wanted = null; focus_after(had, row.open); }
  }
  set_list(list) {
    const is_told_else = JSON.stringify(list.notices) !== JSON.stringify(this.list?.notices);
    this.list = list; this.draw(); this.focus_wanted();
    if (is_told_else) this.draw_notes();
  }
  /** The order of rows: it changes only when the user sorts; new rows come first. */
  arrange() {
    const there = new Map(this.list.entries.map((entry) => [entry.id, entry]));
    const by_job = (a, b) => (b.job?.at ?? 0) - (a.job?.at ?? 0) || a.name.localeCompare(b.name);
    const by_name = (a, b) => a.name.localeCompare(b.name);
    const fresh = [...there.values()].filter((entry) => !this.order.includes(entry.id)).sort(this.sorted === "job" ? by_job : by_name);
    this.order = [...fresh.map((entry) => entry.id), ...this.order.filter((id) => there.has(id))];
    return this.order.map((id) => there.get(id));
  }
  draw() {
    const { entries, folder, more } = this.list, words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = this.arrange(), found = all.filter((entry) => words.every((word) => entry.searched.includes(word)));
    for (const head of Object.values(this.heads)) head.draw();
    for (const id of [...this.rows.keys()]) if (!all.some((entry) => entry.id === id)) this.rows.delete(id);
    const elements = found.flatMap((entry) => {
      if (!this.rows.has(entry.id)) this.rows.set(entry.id, new Row(this.view, this));
      const row = this.rows.get(entry.id);
      row.update(entry);
      return row.below ? [row.element, row.below] : [row.element];
    });
    replace_children(this.body, elements);
    this.count.replaceChildren(...(entries.length ? [`${entries.length} in `, h("span", { class: "mono" }, folder), " and recently opened", more ? `; ${more} more files not listed` : ""] : []));
    this.table.hidden = !found.length; this.first.hidden = entries.length > 0; this.searching.hidden = !entries.length;
    this.nothing.hidden = !entries.length || found.length > 0;
    set_text(this.nothing, `None of ${count_of(entries.length, "pipeline")} has “${this.search.value}” in its name, nodes or status.`);
  }
  draw_notes() {
    const clear = close_button(() => { this.failure = null; this.draw_notes(); });
    const made = [this.failure ? note("bad", h("p", { role: "alert" }, this.failure), [clear]) : null, this.work?.is === "done" ? null : work_note(this.view, this.work, this.view.complain)];
    this.notes.replaceChildren(...(this.list?.notices ?? []).map((text) => note("warn", h("p", {}, text))), ...made.filter(Boolean));
    this.notes.hidden = !this.notes.childNodes.length;
  }
  set_work(work) { this.work = work; this.draw_notes(); if (work?.is === "done") this.view.announce(`${work.what}: done`); }
  set_undo(undo) {
    this.undo.hidden = !undo;
    if (!undo) { this.undo.replaceChildren(); return; }
    const bring_back = this.view.button([icon("undo"), "Undo"], async () => { const had = document.activeElement; this.focus_row(await this.view.call("undo"), had); }, { on_error: this.view.complain });
    const drop = async () => { const had = document.activeElement; await this.view.call("drop_undo"); focus_after(had, this.search); };
    this.undo.replaceChildren(icon("trash"), h("span", {}, undo.told), bring_back, h("span", { class: "push" }, this.view.button(icon("bad"), drop, { cls: "ic q", label: "Close", on_error: this.view.complain })));
    if (this.deleting) { focus_after(this.deleting.had, bring_back); this.deleting = null; }
  }
}

/** Call `act` once the view in `el` shows something. */
const when_live = (el, act) => {
  const look = () => { if (el.querySelector(".dt.live")) { watching.disconnect(); act(); } };
  const watching = new MutationObserver(look);
  watching.observe(el, { subtree: true, childList: true, attributes: true, attributeFilter: ["class"] });
  look();
};

/** A job, live, below the console: a widget of its own, and the command that shows it elsewhere. */
class JobPanel {
  constructor(view) {
    this.view = view; this.widget = null; this.shown = null;
    this.command = h("span", { class: "cmdline" }); this.place = h("div");
    this.open = view.button("Open pipeline", () => view.call("open_pipeline", { id: this.entry().id }), { on_error: (text) => view.complain(text) });
    this.line = h("section", { class: `dt ${VIEW}` }, h("div", { class: "head" }, this.command, h("span", { class: "push row" }, this.open, close_button(() => view.call("hide_job")))));
    this.element = h("div", { class: "dt-shown" }, this.line, this.place);
    this.is_asked = false; // set by a button of this page, which then scrolls to the job; other and reloaded pages do not scroll
  }
  /** The listed pipeline whose last job this is. */
  entry() { const { job, list } = this.view.state; return job && list?.entries.find((entry) => entry.can_open && entry.job?.id === job.id); }
  draw_open() { this.open.hidden = Boolean(this.view.state.form) || !this.entry(); }
  async ask(id) {
    this.is_asked = true;
    try { await this.view.call("show_job", { id }); } catch (error) { this.is_asked = false; throw error; }
  }
  async set_job(job) {
    if (job && job.command !== this.command.textContent) this.command.replaceChildren(command_box(job.command)); // it was submitted again
    this.draw_open();
    if ((job?.widget ?? null) === this.widget) return;
    const is_asked = this.is_asked;
    this.widget = job?.widget ?? null; this.is_asked = false;
    this.shown?.remove(); this.shown = null; this.place.replaceChildren();
    if (!job) { this.element.remove(); return; }
    this.view.el.after(this.element);
    try {
      const manager = this.view.model.widget_manager, shown = await manager.create_view(await manager.get_model(job.widget));
      if (this.widget !== job.widget) { shown.remove(); return; }
      this.shown = shown; this.place.replaceChildren(shown.el);
      if (is_asked) when_live(shown.el, () => this.element.scrollIntoView({ block: "nearest" }));
    } catch (error) { this.place.replaceChildren(h("div", { class: `dt ${VIEW}` }, note("warn", h("p", {}, `The job cannot be shown here: ${error.message}. Run the command above in a cell.`)))); }
  }
  end() { this.shown?.remove(); this.element.remove(); }
}

function mount(view) {
  const list = new ListPage(view), form = new FormPage(view);
  const job = new JobPanel(view);
  view.show_job = (id) => job.ask(id);
  view.el.append(list.element, form.element);
  view.on("tests", (tests) => form.list.show_tests(tests));
  view.on("form", (value) => {
    const was_open = !form.element.hidden, has_focus = [view.el, job.line].some((each) => each.contains(document.activeElement)); // another display may have it
    list.element.hidden = value !== null; form.element.hidden = value === null;
    form.set_form(value);
    if (value !== null && !was_open && view.has_mounted) form.begin(has_focus); // a reloaded page stays where it is
    if (value === null && was_open && has_focus) list.search.focus();
    job.draw_open();
  });
  view.on("list", (value) => { list.set_list(value); job.draw_open(); });
  view.on("undo", (value) => list.set_undo(value));
  view.on("work", (value) => { list.set_work(value); form.set_work(value); });
  view.on("job", (value) => job.set_job(value));
  return () => { form.end(); job.end(); };
}
