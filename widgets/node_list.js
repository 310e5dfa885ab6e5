// Nodes as rows: a line with buttons, the fields below it, and the findings of the last test. Used by both forms.

/** One node of an `editor`, in a `list`. */
class NodeRow {
  constructor(list, key) {
    this.list = list; this.editor = list.editor; this.key = key; this.is_open = false; this.fields = null; this.told = null;
    const { view } = this.editor, on_error = list.say;
    const small = (name, act) => view.button(icon(name), act, { cls: "ic q", on_error });
    this.sign = h("span", {}, icon("right")); this.label = h("span", { class: "cut" });
    this.toggle = h("button", { type: "button", class: "twist", "aria-expanded": "false", onclick: () => this.open(!this.is_open) }, this.sign, this.label);
    this.host = h("span", { class: "cut" }); this.port = h("span", {}); this.where = h("span", { class: "mono ends" }, this.host, this.port); this.offers = h("span", { class: "soft cut" }); this.state = h("span", {});
    this.test = view.button([icon("test"), "Test"], () => list.test_rows([key]), { cls: "q", on_error });
    this.up = small("up", () => this.move("up", this.up)); this.down = small("down", () => this.move("down", this.down));
    this.copy = small("copy", () => list.change_to("copy", to_host, key));
    this.trash = small("trash", () => this.remove());
    this.top = h("div", { class: "top" }, this.toggle, this.where, this.offers, this.state, h("span", { class: "acts" }, this.test, this.up, this.down, this.copy, this.trash));
    this.body = h("div", { class: "form", role: "group", hidden: true }); this.find = h("div", { class: "find" });
    this.el = h("div", { class: "node", role: "listitem" }, this.top, this.body, this.find);
  }
  async move(way, button) { await this.list.change(way, this.key); setTimeout(() => focus_after(button, button)); }
  async remove() {
    const had = document.activeElement, next = this.list.beside(this.key);
    await this.list.change("remove", this.key);
    focus_after(had, next?.toggle ?? this.list.add);
  }
  open(is_open) {
    this.is_open = is_open;
    if (is_open && !this.fields) this.build();
    this.body.hidden = !is_open; this.el.classList.toggle("open", is_open);
    this.toggle.setAttribute("aria-expanded", String(is_open)); this.sign.replaceChildren(icon(is_open ? "down" : "right"));
    if (this.told) this.update();
  }
  build() {
    const helped = h("div", { class: "hint helped" }), options = { on_help: ({ title, hint }) => set_text(helped, `${title}: ${hint}`) };
    const grid = (names) => this.editor.grid(names.map((name) => `nodes[${this.key}].${name}`), options), first = Object.keys(WIDE_OF_NODE);
    this.whole = h("div", { class: "err", hidden: true }); this.fields = grid(first);
    this.more = h("details", { class: "more" }, h("summary", {}, "More fields"), grid(Object.keys(this.editor.known.node).filter((name) => !first.includes(name))));
    this.body.append(this.whole, this.fields, this.more, helped);
    this.editor.update_fields(this.editor.form);
  }
  /** Open it, and return a field of it. */
  open_at(name) {
    this.open(true);
    const field = this.editor.fields.get(`nodes[${this.key}].${name || "host"}`);
    if (this.more.contains(field.element)) this.more.open = true;
    return field;
  }
  go_to(name) { this.open_at(name).focus(); }
  update() {
    const { form } = this.editor, at = form.rows.indexOf(this.key), { label, where, offers } = this.told = form.nodes[this.key];
    const wrong = Object.keys(form.errors).filter((path) => OF_NODE.exec(path)?.[1] === this.key).length;
    set_text(this.label, label); const port = /:\d+$/.exec(where)?.[0] ?? ""; // nodes at one address differ only in the port
    set_text(this.host, where.slice(0, where.length - port.length)); set_text(this.port, port); this.where.title = where; set_text(this.offers, offers);
    this.toggle.setAttribute("aria-label", `${label}: ${this.is_open ? "close" : "open"}`); this.body.setAttribute("aria-label", label);
    for (const [button, name] of [[this.test, `Test ${label}`], [this.up, `Move ${label} up`], [this.down, `Move ${label} down`], [this.copy, `Duplicate ${label}`], [this.trash, `Remove ${label}`]]) {
      if (button.dataset.title !== name) { button.setAttribute("aria-label", name); button.dataset.title = button.title = name; }
    }
    disable(this.up, at ? "" : "This is the first node"); disable(this.down, at < form.rows.length - 1 ? "" : "This is the last node");
    disable(this.test, wrong ? `Correct ${count_of(wrong, "field")} first` : "");
    this.show_state(wrong);
    if (this.fields) show_fault(this.whole, form.errors[`nodes[${this.key}]`]);
  }
  show_state(wrong) {
    const { form, known } = this.editor, test = this.list.tests[this.key], start = this.list.start_errors[this.key];
    const doubts = this.is_open ? [] : Object.entries(form.warnings).filter(([path]) => OF_NODE.exec(path)?.[1] === this.key); // else below the field
    const is_asked = this.list.question !== null, shown = JSON.stringify([wrong, this.is_open, doubts, test ?? null, start ?? null, is_asked]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.state.replaceChildren(wrong ? state_word("warn", count_of(wrong, "invalid field")) : word_of(test, is_asked));
    if (wrong) this.state.firstChild.classList.replace("is-warn", "is-bad");
    this.find.replaceChildren(...doubts.map(([path, text]) => note("warn", h("p", {}, h("b", {}, `${known.node[OF_NODE.exec(path)[2]]?.title ?? "Node"} `), text))), ...(start ? [note("bad", [h("p", { class: "said" }, h("b", {}, "The start failed on this node. "), start)])] : []), ...(this.is_open || has_findings(test) ? findings_of(test) : []));
  }
}
const has_findings = (test) => test?.is === "failed" || (test?.is === "done" && test.bad.length + test.warning.length > 0);

const word_of = (test, is_asked) => {
  if (!test) return state_word("idle", "not tested");
  if (test.is === "running") return is_asked ? state_word("wait", "waiting for your passphrase") : state_word("run", "testing");
  if (test.is === "cancelled") return state_word("stopped", "cancelled");
  if (test.is === "failed") return state_word("bad", "test failed");
  const [bad, warning] = [test.bad.length, test.warning.length], old = test.is_old ? h("div", { class: "soft small" }, "before the last change") : null;
  const word = bad ? state_word("bad", `${bad} failed${warning ? `, ${count_of(warning, "warning")}` : ""}`)
    : warning ? state_word("warn", count_of(warning, "warning")) : state_word("ok", `${count_of(test.good.length, "check")} passed`);
  return h("span", {}, word, old);
};
const finding = (state, { check, text, advice, command }) => note(state, [
  h("p", {}, h("b", {}, `${check}. `), text),
  advice || command ? h("p", {}, h("b", {}, "To do: "), advice || "run this:") : null,
  command ? command_box(command) : null,
]);
const findings_of = (test) => {
  if (test?.is === "failed") return [note("bad", [h("p", { class: "said" }, test.error)])];
  if (test?.is !== "done") return [];
  const passed = h("details", { class: "passed" },
    h("summary", {}, state_word("ok", `${count_of(test.good.length, "check")} passed`), h("span", { class: "soft cut" }, test.good.map(({ check }) => check).join(", "))),
    h("ul", {}, test.good.map(({ check, text }) => h("li", {}, h("b", {}, check), ` ${text}`))));
  return [...test.bad.map((each) => finding("bad", each)), ...test.warning.map((each) => finding("warn", each)), test.good.length ? passed : null].filter(Boolean);
};


// what to focus in a new row
const to_toggle = (row) => row.toggle, to_host = (row) => row.open_at("host");

/** The hosts of ~/.ssh/config to choose from. */
const import_panel = (list, { hosts, more }) => {
  const { view } = list.editor, chosen = new Set(), said = h("span", { class: "soft" });
  const add = view.button("Add", async () => { const [key] = await view.call("import_hosts", { names: [...chosen] }); list.close_bar(); list.focus_made({ key, had: null, find: to_toggle }); }, { cls: "go", on_error: list.say });
  const tell = () => {
    set_text(said, `${count_of(hosts.length + more, "host")}, ${chosen.size} chosen`);
    add.firstChild.textContent = `Add ${count_of(chosen.size, "node")}`; disable(add, chosen.size ? "" : "Choose a host first");
  };
  const rows = hosts.map(({ name, where, jump, is_there, fault }) => {
    const box = h("input", { type: "checkbox", disabled: is_there || fault ? true : null, onchange: () => { if (box.checked) chosen.add(name); else chosen.delete(name); row.classList.toggle("on", box.checked); tell(); } });
    const row = h("tr", { "data-name": name.toLowerCase() }, h("td", {}, h("label", { class: "check" }, box, name)), h("td", { class: "mono" }, where), h("td", { class: "mono soft" }, jump), h("td", { class: "soft" }, fault || (is_there ? "already in the list" : "")));
    return row;
  });
  const filter = h("input", { class: "in", "aria-label": "Filter hosts", placeholder: "Filter hosts", oninput: () => { for (const row of rows) row.hidden = !row.dataset.name.includes(filter.value.toLowerCase()); } });
  const head = h("div", { class: "head" }, h("h3", {}, "Import from ", h("span", { class: "mono" }, "~/.ssh/config")), said, h("span", { class: "push search" }, icon("search"), filter));
  const table = h("div", { class: "list", tabIndex: 0, role: "region", "aria-label": "Hosts of ~/.ssh/config" }, h("table", {}, h("thead", {}, h("tr", {}, ["Name", "Where", "Jump host", "Note"].map((word, i) => h("th", {}, i < 3 ? word : h("span", { class: "sr" }, word))))), h("tbody", {}, rows)));
  const empty = hosts.length ? null : h("div", { class: "body soft" }, "~/.ssh/config lists no hosts. Add a node here, or a Host entry there.");
  const foot = h("div", { class: "foot" }, h("span", { class: "soft" }, more ? `${count_of(more, "more host")} not listed: add them by name. ` : null, "Match and Include are followed. Keys are not copied."), h("span", { class: "push row" }, view.button("Cancel", () => list.leave_bar()), add));
  tell();
  return { bar: h("div", { class: "importing", onkeydown: (event) => { if (event.key === "Escape") list.leave_bar(); } }, head, hosts.length ? table : empty, foot), input: filter };
};

/** The rows, ways to add some, and questions of the kernel. */
class NodeList {
  constructor(editor, none = "No nodes yet") {
    this.editor = editor; this.rows = new Map(); this.tests = {}; this.start_errors = {}; this.question = null; this.line = "";
    const { view } = editor, on_error = this.say = (text) => this.tell("bad", text);
    const button = (content, act, cls = "") => view.button(content, act, { cls, on_error }), add = () => this.change_to("add", to_host);
    this.facts = h("span", { class: "soft" }); this.testing = h("span", { class: "soft" });
    this.cancel_test = button("Cancel the test", () => view.call("cancel")); this.test_all = button([icon("test"), "Test all"], () => this.test_rows(editor.form.rows));
    this.head_import = button("Import from ~/.ssh/config", () => this.import()); this.head_open = button("Open nodes file…", () => this.open_file());
    this.head = h("div", { class: "head" }, h("h3", {}, "Nodes"), this.facts, this.testing, h("span", { class: "push row wrap" }, this.head_import, this.head_open, this.test_all, this.cancel_test));
    this.undo = h("div", {}); this.asks = h("div", {}); this.bar = h("div", {}); this.message = h("div", {});
    this.list = h("div", { role: "list", "aria-label": "Nodes" });
    this.add = button([icon("plus"), "Add node"], add); this.adding = h("div", { class: "body" }, this.add);
    const { num_hosts } = view.state;
    this.empty = h("div", { class: "empty" }, h("b", {}, none),
      h("p", { class: "soft" }, "Ranks run on this machine, or on hosts that you reach over SSH with a key. A host needs sshd, Python 3.10 or newer and torch; nothing is installed."),
      h("div", { class: "row wrap" }, num_hosts ? button(`Import from ~/.ssh/config (${count_of(num_hosts, "host")})`, () => this.import(), "go") : null, button([icon("plus"), "Add node"], add),
        button([icon("file"), "Open nodes file…"], () => this.open_file()), button([icon("plus"), "2 ranks on this machine"], () => this.change_to("add_here", to_toggle))));
    this.el = h("div", {}, this.head, h("div", { class: "bars" }, this.undo, this.message, this.bar), this.list, this.empty, this.adding);
    view.on("testing", (line) => this.show_testing(line));
    view.on("question", (question) => this.show_question(question));
  }
  async change(what, key = "") { await this.editor.send_all(); return this.editor.view.call("change_nodes", { do: what, key }); }
  /** Change the nodes, and focus what `find(row)` finds in the new row. */
  async change_to(what, find, key = "") {
    const had = document.activeElement, made = await this.change(what, key);
    if (made) this.focus_made({ key: made, had, find });
  }
  async test_rows(keys) { await this.editor.send_all(); await this.editor.view.call("test", { keys }); }
  // inline questions
  show_bar({ bar, input }, had = document.activeElement) {
    this.bar.replaceChildren(bar); this.empty.hidden = true;
    focus_after(had, input); input.select();
  }
  close_bar() { this.bar.replaceChildren(); this.empty.hidden = this.rows.size > 0; }
  leave_bar() { this.close_bar(); focus_after(null, this.empty.hidden ? this.head_open : this.empty.querySelector("button")); }
  async import() { const had = document.activeElement; this.show_bar(import_panel(this, await this.editor.view.call("list_hosts")), had); }
  open_file() {
    const open = (is_added) => async (path) => {
      const { nodes, left_out, more } = await this.editor.view.call("open_nodes", { path, is_added }), lines = more ? [...left_out, `and ${more} more`] : left_out;
      this.leave_bar(); this.tell(lines.length ? "warn" : "ok", `${path}: ${count_of(nodes, "node")}${lines.length ? "; left out of the import:" : ""}`, lines);
    };
    this.ask_path("Open nodes file", [["Open", open(false)], ["Add to the list", open(true)]], "A nodes file, or a file of another tool: an Akash lease, a hostfile, an ssh_config, Ravnest's node_configs.json");
  }
  ask_path(title, actions, hint = null) { this.show_bar(ask_bar(this.editor.view, title, actions, () => this.leave_bar(), { value: this.path || "nodes.toml", hint })); }
  clear() { this.message.replaceChildren(); }
  tell(state, text, lines = []) {
    const { view } = this.editor;
    this.message.replaceChildren(note(state, [h("p", {}, text), lines.length ? h("ul", { tabIndex: 0, "aria-label": "Left out" }, lines.map((line) => h("li", {}, line))) : null], [view.button("Close", () => this.clear())])); view.announce(text);
  }
  // focus
  focus_made(made) { this.made = made; this.focus_wanted(); } // the row may arrive after the answer
  focus_wanted() {
    const { key, had, find } = this.made ?? {}, row = this.rows.get(key);
    if (row) { this.made = null; focus_after(had, find(row)); }
  }
  beside(key) { const all = this.editor.form.rows, at = all.indexOf(key); return this.rows.get(all[at + 1] ?? all[at - 1]); }
  // news from the kernel
  update() {
    const { form } = this.editor, count = form.rows.length;
    for (const key of form.rows) if (!this.rows.has(key)) this.rows.set(key, new NodeRow(this, key));
    for (const key of [...this.rows.keys()]) if (!form.rows.includes(key)) this.rows.delete(key);
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    replace_children(this.list, form.rows.map((key) => this.rows.get(key).el));
    if (focused && focused !== document.activeElement && this.list.contains(focused)) focused.focus();
    for (const row of this.rows.values()) row.update();
    this.list.hidden = this.adding.hidden = !count; this.empty.hidden = count > 0 || this.bar.hasChildNodes();
    for (const button of [this.head_import, this.head_open]) button.hidden = !count;
    this.test_all.hidden = !count || this.is_testing;
    this.show_undo(form.undo);
    this.focus_wanted();
  }
  show_undo(words) {
    if (this.undo.dataset.words === words) return;
    this.undo.dataset.words = words;
    const bring_back = this.editor.view.button([icon("undo"), "Undo"], () => this.change_to("undo", to_toggle), { on_error: this.say });
    this.undo.replaceChildren(...(words ? [note("idle", h("p", {}, words), [bring_back])] : []));
  }
  show_tests(tests) { this.tests = tests; if (this.editor.form) for (const row of this.rows.values()) row.update(); }
  show_testing(line) { // replaces the usual text and button, so that nothing moves
    const had_focus = [this.test_all, this.cancel_test].includes(document.activeElement);
    this.is_testing = Boolean(line); this.line = line; this.tell_testing();
    this.testing.hidden = this.cancel_test.hidden = !line; this.facts.hidden = this.is_testing; this.test_all.hidden = this.is_testing || !this.rows.size;
    if (had_focus) (line ? this.cancel_test : this.test_all).focus();
  }
  tell_testing() { this.testing.textContent = this.line && this.question ? `waiting for the passphrase of ${this.question.key}` : this.line; }
  show_question(question) {
    const { view } = this.editor;
    this.question = question ?? null; this.tell_testing(); this.show_tests(this.tests);
    if (!question) {
      const was_here = this.asks.contains(document.activeElement);
      this.asks.replaceChildren();
      if (was_here) this.asked_from?.focus();
      return;
    }
    const id = `${view.id}-secret`, input = h("input", { id, type: "password", class: "in", autocomplete: "off" });
    const answer = async (passphrase) => { input.value = ""; await view.call("answer", { number: question.number, passphrase }); };
    const give = view.button("Use it", () => answer(input.value), { cls: "go", on_error: this.say });
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); give.click(); } });
    this.asks.replaceChildren(h("div", { class: "tools" }, h("label", { for: id }, "Passphrase of ", h("span", { class: "mono" }, question.key)), input, give, view.button("Continue without", () => answer(""), { on_error: this.say }), h("span", { class: "hint" }, "It is used once and not stored.")));
    this.asked_from = document.activeElement; input.focus();
  }
}
