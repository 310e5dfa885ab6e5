// The form of nodes. The kernel decides what is right; here what was typed stays, and nothing is lost under the pointer.

const TYPED_MS = 120;
const WIDE = { name: "w3", host: "w5", port: "w2", user: "w2", identity_file: "w4", proxy_jump: "w4", address: "w4", devices: "w4", ranks: "w2", python: "w6", setup: "w12" };
const NUMBERS = new Set(["whole", "number"]);
const PHASES = ["1 Connect", "2 Send files", "3 Start ranks", "4 Join group"];
const WORDS = { running: ["run", "running"], done: ["ok", "done"], failed: ["bad", "failed"], wait: ["wait", "waits"], idle: ["idle", "not yet"], stopped: ["stopped", "stopped"] };

/** One field of one node: its label, its input, and below it what is wrong, or what another page has typed. */
class NodeField {
  constructor(row, about) {
    this.row = row; this.about = about; this.seen = 0; this.since = 0; this.sent = ""; this.timer = null; this.is_sending = false; this.sending = Promise.resolve();
    this.id = `${row.form.view.id}-${row.id}-${about.name}`;
    const is_long = about.kind === "lines", cls = `in ${about.name === "name" ? "" : "mono"} ${NUMBERS.has(about.kind) ? "num" : ""}`;
    this.input = h(is_long ? "textarea" : "input", {
      id: this.id, class: cls, spellcheck: "false", autocomplete: "off", rows: is_long ? 2 : null, placeholder: about.default || null,
      inputmode: NUMBERS.has(about.kind) ? "numeric" : null, "aria-required": about.is_needed ? "true" : null,
      oninput: () => this.type(), onfocus: () => row.help(about), onblur: () => this.send(),
      onkeydown: (event) => { if (about.kind === "whole" && !event.altKey && (event.key === "ArrowUp" || event.key === "ArrowDown")) this.step(event); },
    });
    this.error = h("div", { class: "err", id: `${this.id}e`, hidden: true });
    this.other = h("div", { class: "note is-wait", hidden: true });
    this.hint = h("span", { class: "sr", id: `${this.id}h` }, about.hint);
    const label = h("label", { for: this.id }, about.title, about.is_needed ? null : [" ", h("span", { class: "opt" }, "optional")]);
    this.choices = about.kind === "choice" ? this.make_choices() : null;
    this.el = h("div", { class: WIDE[about.name] ?? "w4" }, label, this.choices?.el, this.input, this.hint, this.error, this.other);
  }
  make_choices() { // a radio group: what can be named, and the list that the field is
    const choose = (value) => { this.is_own = value === null; if (value !== null || this.about.choices.includes(this.input.value.trim() || this.about.default)) this.input.value = value ?? "0"; this.type(); this.show_choice(); if (value === null) this.input.focus(); };
    const button = (word, value) => h("button", { type: "button", class: "b", role: "radio", "aria-checked": "false", onclick: () => choose(value), "data-value": value ?? "" }, word);
    const el = h("div", { class: "seg", role: "radiogroup", "aria-label": this.about.title }, this.about.choices.map((word) => button(word, word)), button("choose", null));
    return { el, refresh: roving(el) };
  }
  show_choice() {
    if (!this.choices) return;
    const text = this.input.value.trim() || this.about.default, is_own = !this.about.choices.includes(text);
    for (const each of this.choices.el.children) each.setAttribute("aria-checked", String(is_own ? each.dataset.value === "" : each.dataset.value === text));
    this.input.hidden = !is_own;
  }
  step(event) {
    const text = this.input.value.trim();
    if (!/^-?\d{1,15}$/.test(text || "0")) return;
    event.preventDefault();
    this.input.value = String(Number(text || 0) + (event.key === "ArrowUp" ? 1 : -1));
    this.type();
  }
  type() { clearTimeout(this.timer); this.timer = setTimeout(() => this.send(), TYPED_MS); }
  /** One message at a time: each says which change it has seen. */
  send() {
    clearTimeout(this.timer); this.timer = null;
    this.sending = this.sending.then(async () => {
      const text = this.input.value;
      if (text === this.sent) return;
      this.sent = text; this.is_sending = true;
      try {
        const { seen, revision } = await this.row.form.view.call("edit", { row: this.row.id, field: this.about.name, text, seen: this.seen });
        this.seen = seen; this.since = revision; // older news does not know of it
      } catch (error) { this.row.form.say(error.message); }
      this.is_sending = false;
      if (this.input.value !== text) this.send();
    });
    return this.sending;
  }
  get is_typed() { return this.timer !== null || this.is_sending || this.input.value !== this.sent; }
  update(row) {
    const text = row.texts[this.about.name] ?? "", other = row.other[this.about.name], error = row.errors[this.about.name];
    if (!this.is_typed && this.row.form.told.revision >= this.since) {
      if (this.sent !== text && !(other !== undefined && other === this.sent)) { this.input.value = this.sent = text; }
      if (this.sent === text) this.seen = Math.max(this.seen, row.changed[this.about.name] ?? 0);
    }
    this.show_choice();
    this.error.hidden = !error;
    if (error) replace_text(this.error, error);
    if (error) this.input.setAttribute("aria-invalid", "true"); else this.input.removeAttribute("aria-invalid");
    this.input.setAttribute("aria-describedby", error ? `${this.id}e ${this.id}h` : `${this.id}h`);
    this.show_other(text, other);
  }
  show_other(text, other) {
    this.other.hidden = other === undefined;
    if (other === undefined || this.other.dataset.text === `${text}\n${other}`) return;
    this.other.dataset.text = `${text}\n${other}`;
    const { view } = this.row.form, choose = async (takes_other) => {
      this.seen = await view.call("choose", { row: this.row.id, field: this.about.name, takes_other });
      this.input.value = this.sent = takes_other ? other : text; this.show_choice(); this.input.focus();
    };
    this.other.replaceChildren(icon("wait"), h("div", {}, h("p", {}, "Two pages have typed here. There is ", h("code", {}, text || "nothing"), ", and later came ", h("code", {}, other || "nothing"), ".")),
      h("div", { class: "acts" }, view.button("Keep", () => choose(false)), view.button("Take the later", () => choose(true))));
  }
}
const replace_text = (err, text) => { if (err.dataset.text !== text) { err.dataset.text = text; err.replaceChildren(icon("warn"), h("span", {}, text)); } };

/** One node: a line with its buttons, the form below it, and what its last test has found. */
class NodeRow {
  constructor(form, id) {
    this.form = form; this.id = id; this.is_open = false; this.fields = null; this.told = null;
    const { view } = form;
    const small = (name, word, act) => view.button(icon(name), act, { cls: "ic q", label: word, on_error: form.say });
    this.sign = h("span", {}, icon("right")); this.label = h("span", { class: "cut" });
    this.toggle = h("button", { type: "button", class: "twist", "aria-expanded": "false", onclick: () => this.open(!this.is_open) }, this.sign, this.label);
    this.where = h("span", { class: "mono cut" }); this.offers = h("span", { class: "soft cut" }); this.state = h("span", {});
    this.test = view.button([icon("test"), "Test"], () => view.call("test", { rows: [id] }), { cls: "q", on_error: form.say });
    this.up = small("up", "Move up", () => this.move(-1, this.up)); this.down = small("down", "Move down", () => this.move(1, this.down));
    this.copy = small("copy", "Duplicate", async () => form.focus_host(await view.call("duplicate", { row: id })));
    this.trash = small("trash", "Remove", () => this.remove());
    this.top = h("div", { class: "top" }, this.toggle, this.where, this.offers, this.state, h("span", { class: "acts" }, this.test, this.up, this.down, this.copy, this.trash));
    this.body = h("div", { class: "form", role: "group", hidden: true }); this.find = h("div", { class: "find" });
    this.el = h("div", { class: "node", role: "listitem" }, this.top, this.body, this.find);
  }
  async move(by, button) { await this.form.view.call("move", { row: this.id, by }); setTimeout(() => button.focus()); }
  async remove() {
    const next = this.form.beside(this.id);
    await this.form.view.call("remove", { row: this.id });
    (next?.toggle ?? this.form.add).focus();
  }
  help(about) { set_text(this.helped, `${about.title}: ${about.hint}`); }
  open(is_open) {
    this.is_open = is_open;
    if (is_open && !this.fields) this.build();
    this.body.hidden = !is_open; this.el.classList.toggle("open", is_open);
    this.toggle.setAttribute("aria-expanded", String(is_open)); this.sign.replaceChildren(icon(is_open ? "down" : "right"));
    if (this.told) this.update(this.told, this.at);
  }
  build() {
    this.fields = this.form.view.state.fields.map((about) => new NodeField(this, about));
    const in_order = Object.keys(WIDE).map((name) => this.fields.find((field) => field.about.name === name)).filter(Boolean);
    const others = this.fields.filter((field) => !(field.about.name in WIDE));
    this.whole = h("div", { class: "err", hidden: true }); this.helped = h("div", { class: "hint helped" });
    this.more = h("details", { class: "more" }, h("summary", {}, "More fields"), h("div", { class: "grid12" }, others.map((field) => field.el)));
    this.body.append(this.whole, h("div", { class: "grid12" }, in_order.map((field) => field.el)), this.more, this.helped);
  }
  /** Open it, and focus a field of it. */
  go_to(name) {
    this.open(true);
    const field = this.fields.find((each) => each.about.name === (name || "host"));
    if (this.more.contains(field.el)) this.more.open = true;
    (field.input.hidden ? field.choices.el.querySelector("[tabindex='0']") : field.input).focus();
  }
  update(told, at) {
    this.told = told; this.at = at;
    const { label } = told, wrong = Object.keys(told.errors).length;
    set_text(this.label, label); set_text(this.where, told.where); this.where.title = told.where; set_text(this.offers, told.offers);
    this.toggle.setAttribute("aria-label", `${label}: ${this.is_open ? "close" : "open"}`); this.body.setAttribute("aria-label", label);
    for (const [button, word] of [[this.test, "Test"], [this.up, "Move up"], [this.down, "Move down"], [this.copy, "Duplicate"], [this.trash, "Remove"]]) {
      const name = word.startsWith("Move") ? `Move ${label} ${word.slice(5)}` : `${word} ${label}`;
      if (button.dataset.title !== name) { button.setAttribute("aria-label", name); button.dataset.title = button.title = name; }
    }
    disable(this.up, at.index ? "" : "It is the first"); disable(this.down, at.index < at.count - 1 ? "" : "It is the last");
    disable(this.test, wrong ? `Correct ${count_of(wrong, "field")} first` : "");
    this.show_state(wrong);
    if (!this.fields) return;
    this.whole.hidden = !told.errors[""];
    if (told.errors[""]) replace_text(this.whole, told.errors[""]);
    for (const field of this.fields) field.update(told);
  }
  show_state(wrong) {
    const test = this.form.tests[this.id], start = this.form.start_errors[this.id];
    const key = JSON.stringify([wrong, this.is_open, test ?? null, start ?? null]);
    if (key === this.shown) return;
    this.shown = key;
    this.state.replaceChildren(wrong ? state_word("warn", count_of(wrong, "wrong field")) : word_of(test));
    if (wrong) this.state.firstChild.classList.replace("is-warn", "is-bad");
    this.find.replaceChildren(...(start ? [note("bad", [h("p", { class: "said" }, h("b", {}, "The start has failed here. "), start)])] : []), ...(this.is_open || has_findings(test) ? findings_of(test) : []));
  }
}
const has_findings = (test) => test?.is === "failed" || (test?.is === "done" && test.bad.length + test.warning.length > 0);

const word_of = (test) => {
  if (!test) return state_word("idle", "not tested");
  if (test.is === "running") return state_word("run", "testing");
  if (test.is === "cancelled") return state_word("stopped", "cancelled");
  if (test.is === "failed") return state_word("bad", "test failed");
  const [bad, warning] = [test.bad.length, test.warning.length], old = test.is_old ? h("div", { class: "soft small" }, "before it was changed") : null;
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

/** A row of the form that asks for a path, in place. */
const path_bar = (form, title, actions) => {
  const id = `${form.view.id}-path`, input = h("input", { id, class: "in mono", spellcheck: "false", value: form.told.file || "nodes.toml" });
  const error = h("div", { class: "err", role: "alert", hidden: true, id: `${id}e` });
  const fail = (text) => { error.hidden = false; replace_text(error, text); input.setAttribute("aria-invalid", "true"); input.setAttribute("aria-describedby", error.id); };
  const buttons = actions.map(([word, act], i) => form.view.button(word, () => act(input.value), { cls: i ? "" : "go", on_error: fail }));
  const bar = h("div", { class: "tools", onkeydown: (event) => { if (event.key === "Escape") form.show_bar(null); } }, h("label", { for: id }, title), input, buttons, form.view.button("Cancel", () => form.show_bar(null)), error);
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); buttons[0].click(); } });
  return { bar, input };
};

/** The hosts of ~/.ssh/config, to choose among. */
const import_panel = (form, { hosts, more }) => {
  const chosen = new Set(), said = h("span", { class: "soft" });
  const add = form.view.button("Add", async () => { const rows = await form.view.call("import_hosts", { names: [...chosen] }); form.show_bar(null); form.focus_row(rows[0]); }, { cls: "go", on_error: form.say });
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
  const table = h("div", { class: "list", tabIndex: 0, role: "region", "aria-label": "Hosts of ~/.ssh/config" }, h("table", {}, h("thead", {}, h("tr", {}, ["Name", "Where", "Jump host", "Is there"].map((word, i) => h("th", {}, i < 3 ? word : h("span", { class: "sr" }, word))))), h("tbody", {}, rows)));
  const empty = hosts.length ? null : h("div", { class: "body soft" }, "~/.ssh/config names no host. Add a node, or write a Host there.");
  const foot = h("div", { class: "foot" }, h("span", { class: "soft" }, more ? `${count_of(more, "more host")}: type their names. ` : null, "Match and Include are followed. Keys stay where they are."), h("span", { class: "push row" }, form.view.button("Cancel", () => form.show_bar(null)), add));
  tell();
  return { bar: h("div", { class: "importing", onkeydown: (event) => { if (event.key === "Escape") form.show_bar(null); } }, head, hosts.length ? table : empty, foot), input: filter };
};

const start_cell = (node, cell, phase) => h("div", { role: "cell" }, h("div", { class: "soft small phase" }, phase), state_word(...WORDS[cell.is]), h("div", { class: "soft small cut" }, cell.text),
  cell.share === null ? null : h("span", { class: "bar is-run", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * cell.share)), "aria-label": `${node}, ${phase}` }, h("i", { style: `width:${100 * cell.share}%` })));
const start_table = (table) => h("div", { class: "prog", role: "table", "aria-label": "Phases of the start" },
  h("div", { role: "row", class: "h" }, ["Node", ...PHASES].map((word) => h("div", { role: "columnheader" }, word))),
  table.map(({ node, cells }) => h("div", { role: "row" }, h("div", { role: "rowheader", class: "cut" }, node), cells.map((cell, i) => start_cell(node, cell, PHASES[i].slice(2))))));

class NodesForm {
  constructor(view) {
    this.view = view; this.rows = new Map(); this.told = view.state.form; this.tests = view.state.tests; this.start_errors = {};
    this.say = (text) => this.tell("bad", text);
    this.facts = h("span", { class: "soft" });
    this.cancel_test = view.button("Cancel the test", () => view.call("cancel"), { on_error: this.say }); this.testing = h("span", { class: "soft" });
    this.test_all = view.button([icon("test"), "Test all"], () => view.call("test", { rows: this.told.rows.map((row) => row.id) }), { on_error: this.say });
    this.head_import = view.button("Import from ~/.ssh/config", () => this.import(), { on_error: this.say }); this.head_open = view.button("Open file…", () => this.open_file());
    this.head = h("div", { class: "head" }, h("h3", {}, "Nodes"), this.facts, this.testing, h("span", { class: "push row wrap" }, this.head_import, this.head_open, this.test_all, this.cancel_test));
    this.undo = h("div", {}); this.asks = h("div", {}); this.bar = h("div", {}); this.message = h("div", {});
    this.bars = h("div", { class: "bars" }, this.undo, this.message, this.bar);
    this.list = h("div", { role: "list", "aria-label": "Nodes" });
    this.add = view.button([icon("plus"), "Add node"], async () => this.focus_host(await view.call("add", { kind: "empty" })), { on_error: this.say });
    this.empty = this.make_empty();
    this.adding = h("div", { class: "body" }, this.add);
    this.fault = h("span", { class: "err" }); this.save = view.button("Save", () => this.save_now(), { on_error: this.say });
    this.go = view.button("Start session", () => view.call("start"), { cls: "go", on_error: this.say });
    this.foot = h("div", { class: "foot" }, h("span", { role: "status" }, this.fault), h("span", { class: "push row" }, this.save, this.go));
    this.form = h("div", {}, this.head, this.bars, this.list, this.empty, this.adding, this.foot);
    this.starting = h("div", {});
    view.el.append(this.starting, this.asks, this.form); // a start asks, too
  }
  make_empty() {
    const { num_hosts } = this.view.state, { view } = this;
    return h("div", { class: "empty" }, h("b", {}, "No nodes yet"),
      h("p", { class: "soft" }, "Ranks run on this machine, or on hosts that you reach over SSH with a key. A host needs sshd, Python 3.10 or newer and torch; nothing is installed."),
      h("div", { class: "row wrap" },
        num_hosts ? view.button(`Import from ~/.ssh/config (${count_of(num_hosts, "host")})`, () => this.import(), { cls: "go", on_error: this.say }) : null,
        view.button([icon("plus"), "Add node"], async () => this.focus_host(await view.call("add", { kind: "empty" })), { on_error: this.say }),
        view.button([icon("file"), "Open nodes file…"], () => this.open_file()),
        view.button([icon("run"), "2 ranks on this machine"], async () => this.focus_row(await view.call("add", { kind: "here" })), { on_error: this.say })));
  }
  // what is asked in place
  show_bar(made) { this.bar.replaceChildren(...(made ? [made.bar] : [])); this.empty.hidden = this.told.rows.length > 0 || made !== null; if (made) { made.input.focus(); made.input.select(); } else (this.empty.hidden ? this.head_open : this.empty.querySelector("button")).focus(); }
  async import() { this.show_bar(import_panel(this, await this.view.call("list_hosts"))); }
  open_file() {
    const open = (is_added) => async (path) => { const count = await this.view.call("open_file", { path, is_added }); this.show_bar(null); this.tell("ok", `${path}: ${count_of(count, "node")}`); };
    this.show_bar(path_bar(this, "Open nodes file", [["Open", open(false)], ["Add to the list", open(true)]]));
  }
  async save_now() {
    if (this.told.file) await this.save_to(this.told.file, "");
    else this.show_bar(path_bar(this, "Save as", [["Save file", (path) => this.save_to(path, "")]]));
  }
  async save_to(path, over) {
    await Promise.all([...this.rows.values()].flatMap((row) => (row.fields ?? []).map((field) => field.send())));
    const { ask, over: seen, said } = await this.view.call("save", { path, over });
    if (said) { this.bar.replaceChildren(); this.tell("ok", said); this.save.focus(); return; }
    const write = this.view.button("Write over it", () => this.save_to(path, seen), { cls: "danger", on_error: this.say });
    const other = this.view.button("Save as…", () => { this.clear(); this.show_bar(path_bar(this, "Save as", [["Save file", (to) => this.save_to(to, "")]])); });
    this.message.replaceChildren(note("warn", h("p", {}, ask), [write, other, this.view.button("Cancel", () => this.clear())]));
    this.view.announce(ask); write.focus();
  }
  clear() { this.message.replaceChildren(); }
  tell(state, text) {
    const close = this.view.button("Close", () => this.clear());
    this.message.replaceChildren(note(state, h("p", {}, text), [close])); this.view.announce(text);
  }
  // focus
  focus_row(id) { this.when_there(id, (row) => row.toggle.focus()); }
  focus_host(id) { this.when_there(id, (row) => row.go_to("host")); }
  when_there(id, act) { if (this.rows.has(id)) act(this.rows.get(id)); else this.wanted = { id, act }; } // its news may come after the answer
  beside(id) { const all = this.told.rows.map((row) => row.id), at = all.indexOf(id); return this.rows.get(all[at + 1] ?? all[at - 1]); }
  // what the kernel tells
  update(told) {
    this.told = told;
    const count = told.rows.length;
    const rows = told.rows.map(({ id }) => { if (!this.rows.has(id)) this.rows.set(id, new NodeRow(this, id)); return this.rows.get(id); });
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    replace_children(this.list, rows.map((row) => row.el));
    if (focused && focused !== document.activeElement && this.list.contains(focused)) focused.focus();
    for (const id of [...this.rows.keys()]) if (!told.rows.some((row) => row.id === id)) this.rows.delete(id);
    told.rows.forEach((each, index) => this.rows.get(each.id).update(each, { index, count }));
    const ranks = told.num_ranks === null ? "" : `, ${count_of(told.num_ranks, "rank")}`;
    this.facts.replaceChildren(count ? `${count_of(count, "node")}${ranks}` : "", ...(told.file ? [" · ", h("span", { class: "mono" }, told.file), told.is_changed ? ", changed" : ""] : []));
    this.list.hidden = !count; this.empty.hidden = count > 0 || this.bar.hasChildNodes(); this.adding.hidden = this.foot.hidden = !count;
    for (const button of [this.head_import, this.head_open]) button.hidden = !count;
    this.test_all.hidden = !count || this.is_testing;
    this.show_undo(told.undo); this.show_faults();
    if (this.wanted && this.rows.has(this.wanted.id)) { const { id, act } = this.wanted; this.wanted = null; act(this.rows.get(id)); }
  }
  show_undo(words) {
    if (this.undo.dataset.words === words) return;
    this.undo.dataset.words = words;
    const bring_back = this.view.button([icon("undo"), "Undo"], async () => { const row = await this.view.call("undo"); if (row !== null) this.focus_row(row); }, { on_error: this.say });
    this.undo.replaceChildren(...(words ? [note("idle", h("p", {}, words), [bring_back])] : []));
  }
  show_faults() {
    const faults = this.told.rows.flatMap((row) => Object.entries(row.errors).map(([name, text]) => ({ row, name, text })));
    const all = [...faults.map(({ row, name, text }) => `${row.label}${name ? `, ${this.view.state.fields.find((field) => field.name === name).title}` : ""}: ${text}`), ...this.told.twins];
    const key = JSON.stringify([all, faults[0]?.row.id, faults[0]?.name]);
    if (key !== this.fault.dataset.key) {
      this.fault.dataset.key = key;
      const go = faults.length ? h("button", { type: "button", class: "link", onclick: () => this.rows.get(faults[0].row.id).go_to(faults[0].name) }, "Go there") : null;
      this.fault.replaceChildren(...(all.length ? [icon("warn"), h("span", {}, all[0], all.length > 1 ? ` (and ${all.length - 1} more) ` : " ", go)] : []));
    }
    const first = `Correct ${count_of(all.length, faults.length === all.length ? "field" : "fault")} first`;
    for (const button of [this.go, this.save]) disable(button, all.length ? first : "");
  }
  show_tests(tests) { this.tests = tests; for (const row of this.rows.values()) if (row.told) row.update(row.told, row.at); }
  show_testing(line) { // in the place of what it says and does else: nothing moves
    const had_focus = [this.test_all, this.cancel_test].includes(document.activeElement);
    this.is_testing = Boolean(line); this.testing.textContent = line;
    this.testing.hidden = this.cancel_test.hidden = !line; this.facts.hidden = this.is_testing; this.test_all.hidden = this.is_testing || !this.told.rows.length;
    if (had_focus) (line ? this.cancel_test : this.test_all).focus();
  }
  show_question(question) {
    if (!question) { this.asks.replaceChildren(); return; }
    const id = `${this.view.id}-secret`, input = h("input", { id, type: "password", class: "in", autocomplete: "off" });
    const answer = async (passphrase) => { input.value = ""; await this.view.call("answer", { number: question.number, passphrase }); };
    const give = this.view.button("Use it", () => answer(input.value), { cls: "go", on_error: this.say });
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); give.click(); } });
    this.asks.replaceChildren(h("div", { class: "tools" }, h("label", { for: id }, "Passphrase of ", h("span", { class: "mono" }, question.key)), input, give, this.view.button("Go on without", () => answer(""), { on_error: this.say }), h("span", { class: "hint" }, "It is used once, and kept nowhere.")));
    input.focus();
  }
  show_start(start) {
    const is_on = start.is === "running", is_done = start.is === "done";
    this.form.hidden = is_on || is_done; this.start_errors = start.errors ?? {};
    if (is_on) {
      if (!this.start_body) {
        this.start_line = h("span", { class: "soft" }); this.start_body = h("div", {});
        const cancel = this.view.button("Cancel", () => this.view.call("cancel"));
        this.starting.replaceChildren(h("div", { class: "head" }, h("h3", {}, "Starting session"), this.start_line, h("span", { class: "push" }, cancel)), this.start_body);
      }
      set_text(this.start_line, `${this.facts.textContent.split(" · ")[0]} · ${format_seconds(start.seconds)} · ${start.line}`);
      this.start_body.replaceChildren(start_table(start.table));
    } else {
      this.start_body = null;
      const board = this.view.state.board;
      if (is_done) this.starting.replaceChildren(h("div", { class: "body" }, h("p", {}, state_word("ok", start.line)), start.notes.map((words) => h("p", { class: "soft" }, words)), h("p", { class: "soft" }, "Its ranks are shown by:"), command_box(board)));
      else if (start.is === "failed") this.starting.replaceChildren(note("bad", [h("p", { class: "said" }, h("b", {}, "The session was not started. "), start.error)], [this.view.button("Close", () => this.starting.replaceChildren())]), start_table(start.table));
      else this.starting.replaceChildren(...(start.is === "cancelled" ? [note("stopped", h("p", {}, "The start was cancelled. Nothing is left running."))] : []));
      if (start.is !== "none") this.view.announce(is_done ? start.line : start.is === "failed" ? "The session was not started." : "The start was cancelled.");
    }
    this.show_tests(this.tests);
  }
}

function mount(view) {
  const form = new NodesForm(view);
  view.on("form", (told) => form.update(told));
  view.on("tests", (tests) => form.show_tests(tests));
  view.on("testing", (line) => form.show_testing(line));
  view.on("question", (question) => form.show_question(question));
  view.on("start", (start) => form.show_start(start));
  view.on("work", ({ is, error }) => { if (is === "failed") form.say(error); });
}
