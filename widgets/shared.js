// Shared by all views: the connection to the kernel, and common parts of pages.
// Text is inserted as text, never as HTML. A view's own file defines `mount(view)`, which may return a clean-up function.

const BEAT_MS = 10000, SLOW_MS = 1000, QUIET_MS = 5000;
const MOST_UNANSWERED = 1; // beats, before the page reports a silent kernel
const GONE = "the kernel has ended: run the cell again";
const OWN_KEYS = /^(Arrow|Page|Home$|End$)/, TYPED_INTO = "select, [type=radio]"; // outside text fields JupyterLab handles plain keys, and would move to another cell
let serial = 0;

/** Make an element: `h("b", { class: "push", onclick: f, "aria-label": "x" }, "text", child, null)`. */
const h = (tag, props, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (["value", "checked", "textContent", "hidden", "tabIndex", "open", "selected"].includes(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
};

const SVG = "http://www.w3.org/2000/svg";
/** The same for SVG elements. */
const s = (tag, props, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props ?? {})) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat());
  return node;
};

const ICONS = {
  run: "M5 3.5v9l7.5-4.5z", wait: "M4 2.5h8M4 13.5h8M5 3c0 3 6 3.5 6 5s-6 2-6 5M11 3c0 3-6 3.5-6 5s6 2 6 5", idle: "M12.5 8a4.5 4.5 0 1 1-9 0 4.5 4.5 0 0 1 9 0",
  ok: "M3 8.5 6.5 12 13 4.5", bad: "M4 4l8 8M12 4l-8 8", warn: "M8 2.5 14.5 13.5h-13zM8 6.5v3.5M8 11.7v.1", new: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  lost: "M6 10l-2 2M12 4l-2 2M7 5l1.5-1.5a2.8 2.8 0 0 1 4 4L11 9M9 11l-1.5 1.5a2.8 2.8 0 0 1-4-4L5 7", right: "M6 3.5 10.5 8 6 12.5",
  down: "M3.5 6 8 10.5 12.5 6", up: "M3.5 10 8 5.5 12.5 10", left: "M10 3.5 5.5 8 10 12.5", plus: "M8 3v10M3 8h10", minus: "M3 8h10",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3", trash: "M2.5 4.5h11M6 4.5v-2h4v2M4 4.5l.7 9h6.6l.7-9", search: "M11 7a4 4 0 1 1-8 0 4 4 0 0 1 8 0M10 10l3.5 3.5",
  get: "M8 2.5V10M4.5 7 8 10.5 11.5 7M2.5 13.5h11", stop: "M4 4h8v8H4z", undo: "M5.5 3 2.5 6l3 3M2.5 6h7a3.5 3.5 0 0 1 0 7H6", more: "M3.5 8h.1M8 8h.1M12.5 8h.1",
  file: "M4 2h5l3 3v9H4zM9 2v3h3", same: "M3.5 6h9M3.5 10h9", diff: "M3.5 6h9M3.5 10h9M11 2.5l-6 11", shard: "M2.5 2.5h4.5V7H2.5zM9 2.5h4.5V7H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z",
  one: "M10.5 8a2.5 2.5 0 1 1-5 0 2.5 2.5 0 0 1 5 0", pp: "M1.5 4.5H6v7H1.5zM10 4.5h4.5v7H10zM6 8h4", dp_shard: "M1.5 3.5h13v9h-13zM5.8 3.5v9M10.2 3.5v9",
  dp_replicate: "M1.5 2.5H10v7H1.5zM6 9.5v4h8.5v-7H10", tp: "M2.5 2.5h11v11h-11zM2.5 8h11", cp: "M2.5 2.5h11v11h-11zM8 2.5v11", ep: "M2.5 2.5h11v11h-11zM2.5 2.5l11 11",
  info: "M14 8A6 6 0 1 1 2 8a6 6 0 0 1 12 0M8 7.5V11M8 5v.1", edit: "M3 13l.7-3L11 2.7 13.3 5 6 12.3z", test: "M2 8h3l1.5-4 3 8L11 8h3",
};
const FILLED = new Set(["run", "stop", "one"]);

/** An icon, hidden from screen readers: its word is next to it. */
const icon = (name) => s("svg", { class: "i", viewBox: "0 0 16 16", "aria-hidden": "true" },
  s("path", { d: ICONS[name] ?? ICONS.info, fill: FILLED.has(name) ? "currentColor" : null, "stroke-width": name === "more" ? 2.4 : null }));

// state -> [class, icon]: icon, word and colour always come together
const STATES = { run: "run", wait: "wait", warn: "warn", ok: "ok", bad: "bad", new: "new", idle: "idle", lost: "lost", differs: "diff", same: "same", sharded: "shard", stopped: "stop" };
const CLASSES = { lost: "warn", differs: "wait", same: "ok", sharded: "run", stopped: "idle" };
/** The class that gives a part the colours of a state. */
const colour_of = (state) => `is-${CLASSES[state] ?? state}`;
/** A state: `state_word("run", "running")`. */
const state_word = (state, word) => h("span", { class: `st ${colour_of(state)}` }, icon(STATES[state] ?? "idle"), word);

// ---- numbers for people
const grouped = (number) => Math.round(number).toLocaleString("en-US");
const short_number = (value, digits = 4) => {
  const size = Math.abs(value);
  if (size < 1e15) for (const [unit, scale, least] of [["G", 1e9, 1e9], ["M", 1e6, 1e6], ["k", 1e3, 1e4]]) if (size >= least) return `${+(value / scale).toPrecision(3)} ${unit}`;
  return size === 0 || (size >= 1e-3 && size < 1e4) ? `${+value.toPrecision(digits)}` : value.toExponential(digits - 2);
};
const format_bytes = (bytes) => {
  if (bytes === null || bytes === undefined) return "";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= 0.9995 * size) return `${+(bytes / size).toPrecision(3)} ${unit}`;
  return `${bytes} B`;
};
const format_seconds = (seconds) => {
  if (seconds < 10) return `${+seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const [minutes, rest] = [Math.floor(seconds / 60), Math.floor(seconds % 60)];
  return minutes < 60 ? `${minutes}:${String(rest).padStart(2, "0")} min` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
};
const format_rate = (per_s) => (per_s >= 100 ? grouped(per_s) : per_s.toPrecision(3));
const told_node = (name) => (name === "" || name === "localhost" ? "this machine" : name); // as text.py does
const count_of = (number, noun) => `${grouped(number)} ${noun}${number === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

// ---- parts
/** A group of buttons (tabs, tiles, choices) as one Tab stop: arrows, Home and End move in it. `columns()` for a grid. */
const roving = (group, { selector = "button", columns = () => 1, on_move = null } = {}) => {
  const items = () => [...group.querySelectorAll(selector)].filter((item) => !item.closest("[hidden]"));
  const make_stop = (item) => { for (const each of items()) each.tabIndex = each === item ? 0 : -1; };
  const refresh = () => { const all = items(); make_stop(all.find((item) => item.tabIndex === 0) ?? all[0]); };
  group.addEventListener("focusin", (event) => { const item = event.target.closest(selector); if (item && group.contains(item)) make_stop(item); });
  group.addEventListener("keydown", (event) => {
    const all = items(), at = all.indexOf(event.target.closest(selector)), wide = columns();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : step === undefined ? -1 : at + step;
    if (at < 0 || to < 0 || to >= all.length) return;
    event.preventDefault(); event.stopPropagation();
    make_stop(all[to]); all[to].focus(); on_move?.(all[to]);
  });
  refresh();
  return refresh;
};

/** Make `wanted` the children of `parent`, without touching those already there: focus and scrolling stay. */
const replace_children = (parent, wanted) => {
  wanted = wanted.filter(Boolean);
  for (const old of [...parent.childNodes]) if (!wanted.includes(old)) old.remove();
  wanted.forEach((node, i) => { if (parent.childNodes[i] !== node) parent.insertBefore(node, parent.childNodes[i] ?? null); });
};
/** Focus `next` after an answer of the kernel, unless the user has moved the focus out of `had` meanwhile. */
const focus_after = (had, next) => { const at = document.activeElement; if (at === document.body || had?.contains(at)) next?.focus(); };
/** Fill `place` with `make()` if `facts` have changed: a needless redraw loses the focus, and screen readers repeat the content. */
const redraw = (place, facts, make) => {
  const key = JSON.stringify(facts);
  if (place.shown_facts === key) return;
  place.shown_facts = key; place.replaceChildren(...make());
};
const set_text = (node, text) => { if (node.textContent !== String(text)) node.textContent = text; };
const disable = (button, reason) => { // stays focusable; the reason is its description
  if (reason) { button.setAttribute("aria-disabled", "true"); button.title = reason; } else { button.removeAttribute("aria-disabled"); button.title = button.dataset.title ?? ""; }
};

const close_button = (act) => h("button", { type: "button", class: "b q ic", "aria-label": "Close", title: "Close", onclick: act }, icon("bad"));

/** A note: what it is about, what to do, and the buttons that help. */
const note = (state, content, actions = []) => h("div", { class: `note ${colour_of(state)}` },
  icon(STATES[state] ?? "info"), h("div", {}, content), actions.length ? h("div", { class: "acts" }, actions) : null);

const copy_text = async (text) => {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* no permission, or no https */ }
  const area = h("textarea", { value: text, style: "position:fixed;opacity:0", "aria-hidden": "true" });
  const had_focus = document.activeElement;
  document.body.append(area); area.select();
  const is_copied = document.execCommand("copy");
  area.remove(); had_focus?.focus();
  return is_copied;
};
/** A command or a piece of code, with a button that copies it. */
const command_box = (text, label = "Copy the command") => {
  const button = h("button", { type: "button", class: "b q ic", "aria-label": label, title: label, onclick: async () => { replace_children(button, [icon((await copy_text(text)) ? "ok" : "warn")]); } }, icon("copy"));
  return h("div", { class: "cmd" }, h("pre", { tabIndex: 0 }, text), button);
};

/** Ask for a text in place: a button for each of `actions`, `[word, act(text), class]`; Enter presses the first, Escape and Cancel call `close`. */
const ask_bar = (view, label, actions, close, { value = "", hint = null } = {}) => {
  const id = `${view.id}-asked${serial++}`, error = h("div", { class: "err", role: "alert", id: `${id}-error`, hidden: true });
  const right = () => { error.hidden = true; input.removeAttribute("aria-invalid"); }; // the error was about an earlier text
  const input = h("input", { class: "in mono", id, value, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-hint ${id}-error`, oninput: right });
  const fail = (text) => { error.hidden = false; error.replaceChildren(icon("warn"), h("span", {}, text)); input.setAttribute("aria-invalid", "true"); focus_after(bar, input); };
  const buttons = actions.map(([word, act, cls], i) => view.button(word, () => act(input.value.trim()), { cls: cls ?? (i ? "" : "go"), on_error: fail }));
  const onkeydown = (event) => {
    if (event.key === "Escape") close(); else if (event.key === "Enter" && event.target === input) buttons[0].click(); else return;
    event.preventDefault(); event.stopPropagation();
  };
  const bar = h("div", { class: "tools asked", onkeydown }, h("label", { for: id }, label), input, buttons,
    h("button", { type: "button", class: "b q", onclick: close }, "Cancel"), h("span", { class: "hint", id: `${id}-hint` }, hint), error);
  return { bar, input };
};

// ---- the connection
class View {
  constructor(model, el) {
    this.model = model;
    this.page = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
    this.el = h("section", { class: `dt ${VIEW}` });
    this.status = h("div", { class: "sr", role: "status" });
    this.id = `dt${serial++}`;
    el.append(this.el, this.status);
    this.calls = new Map(); this.parts = new Map(); this.lists = new Map();
    this.state = null; this.is_late = false; this.said_at = 0; this.number = 0;
    this.unmount = null; this.has_mounted = false; this.num_mounts = 0;
    this.heard_at = Date.now(); this.unanswered = 0; this.is_gone = false;
    this.fault = h("p", {}); this.alert = note("lost", this.fault);
    this.hear = this.hear.bind(this); this.look = this.look.bind(this);
    this.wake = () => { if (!document.hidden) this.send({ do: "beat" }); }; // browsers pause the timers of hidden pages
    document.addEventListener("visibilitychange", this.wake);
    this.el.addEventListener("keydown", (event) => {
      const is_typed = event.key.length === 1 && event.target.matches(TYPED_INTO);
      if (!(event.ctrlKey || event.metaKey || event.altKey) && (is_typed || OWN_KEYS.test(event.key))) event.stopPropagation();
    });
    model.on("msg:custom", this.hear);
    model.on("comm_live_update", this.look); // the kernel was restarted
    this.greet();
    this.beat = setInterval(this.look, BEAT_MS);
    this.el.append(h("div", { class: "body soft" }, "Waiting for the kernel…"));
  }
  /** Send hello until the state arrives: before there is a sub-shell, the first hello waits for the running cell. */
  greet() {
    clearInterval(this.greeting);
    this.send({ do: "hello" });
    this.greeting = setInterval(() => this.send({ do: "hello" }), SLOW_MS);
  }
  /** Send a message; returns whether there is a kernel. */
  send(message) { try { this.model.send({ ...message, page: this.page }); return true; } catch { return false; } }
  hear(message) {
    if (message.page !== undefined && message.page !== this.page) return;
    this.heard_at = Date.now(); this.unanswered = 0; this.alert.remove();
    if (message.tell === "state") this.begin(message);
    if (message.tell === "again") this.begin_anew(); // the kernel dropped this page as silent: the laptop slept
    if (message.tell === "news" && this.has_mounted) {
      for (const [part, value] of Object.entries(message.parts)) { this.state[part] = value; for (const f of this.parts.get(part) ?? []) f(value); }
      for (const [part, items] of Object.entries(message.added)) for (const f of this.lists.get(part) ?? []) f(items);
    }
    if (message.tell === "answer") { const waiting = this.calls.get(message.call); this.calls.delete(message.call);
      if ("error" in message) waiting?.[1](new Error(message.error)); else waiting?.[0](message.value); }
  }
  /** Check that the kernel exists and answers. */
  look() {
    if (this.is_gone) return;
    if (!this.send({ do: "beat" })) this.lose_kernel();
    else if (this.has_mounted && !this.is_late && ++this.unanswered > MOST_UNANSWERED) this.warn("The kernel does not answer");
  }
  /** Handle a kernel that has ended or restarted: it no longer knows this view. */
  lose_kernel() {
    clearInterval(this.beat); clearInterval(this.greeting);
    this.is_gone = true; this.el.classList.add("gone");
    for (const button of this.el.querySelectorAll("[data-asks]")) disable(button, GONE);
    for (const [, fail] of this.calls.values()) fail(new Error(GONE));
    this.calls.clear();
    this.warn("The kernel of this view has ended: run the cell again");
  }
  /** Show above the view why it may be outdated, and its age. */
  warn(what) {
    const as_of = new Date(this.heard_at).toLocaleTimeString([], { hour12: false });
    set_text(this.fault, this.has_mounted ? `${what}. This view shows the state of ${as_of}.` : `${what}.`);
    if (!this.alert.isConnected) { this.el.prepend(this.alert); this.announce(this.fault.textContent); }
  }
  /** Request the whole state and redraw the view. */
  begin_anew() { this.has_mounted = false; this.greet(); }
  begin({ state, late, error }) {
    clearInterval(this.greeting);
    if (this.has_mounted) return; // the answer to an earlier hello
    this.is_late = late;
    if (error !== undefined) { this.el.replaceChildren(h("div", { class: "body" }, note("bad", h("p", {}, error)))); return; }
    this.state = state;
    this.unmount?.(); this.parts.clear(); this.lists.clear();
    this.el.replaceChildren();
    this.unmount = mount(this); this.has_mounted = true; this.num_mounts++; this.el.classList.add("live");
  }
  /** Call `listener(value)` now, if the state has the part, and whenever the kernel publishes it. */
  on(part, listener) {
    this.parts.set(part, [...(this.parts.get(part) ?? []), listener]);
    if (this.state[part] !== undefined) listener(this.state[part]);
  }
  /** Call `listener(items)` when the kernel appends to the list. */
  on_added(part, listener) { this.lists.set(part, [...(this.lists.get(part) ?? []), listener]); }
  /** Call an action of the kernel; the promise has its answer, or fails with its one-line error. */
  call(action, args = {}) {
    const call = `${++this.number}`;
    return new Promise((resolve, reject) => { this.calls.set(call, [resolve, reject]); if (!this.send({ do: "call", call, action, arguments: args })) reject(new Error(GONE)); });
  }
  /** A button that calls `act` and shows when it waits; errors go to `on_error(text)`, or are announced. */
  button(content, act, { cls = "", label = null, on_error = null, title = null } = {}) {
    const waiting = h("span", { class: "waiting", hidden: true });
    const button = h("button", { type: "button", class: `b ${cls}`, "aria-label": label, title: title ?? label, onclick: async () => {
      if (button.getAttribute("aria-disabled") === "true" || button.dataset.busy) return;
      button.dataset.busy = "1";
      const before = this.num_mounts;
      const slow = setTimeout(() => { waiting.hidden = false; waiting.textContent = this.is_late ? "queued until the cell ends; use the stop button" : "waiting for the kernel"; }, SLOW_MS);
      try { await act(); } catch (error) { if (this.num_mounts !== before) this.tell_above(error.message); else (on_error ?? ((text) => this.announce(text)))(error.message); }
      clearTimeout(slow); waiting.hidden = true; delete button.dataset.busy;
    } }, content, waiting);
    button.dataset.title = title ?? label ?? ""; button.dataset.asks = "1";
    if (this.is_gone) disable(button, GONE);
    return button;
  }
  /** Show an error above the view, when the part that caused it is no longer shown. */
  tell_above(text) {
    const told = note("bad", h("p", { role: "alert" }, text), [close_button(() => told.remove())]);
    this.el.prepend(told);
  }
  /** Announce a text to screen readers; of several within 5 s, the last one. */
  announce(text) {
    clearTimeout(this.saying);
    const in_ms = Math.max(0, this.said_at + QUIET_MS - Date.now());
    this.saying = setTimeout(() => { this.said_at = Date.now(); this.status.textContent = text; }, in_ms);
  }
  end() {
    clearInterval(this.beat); clearInterval(this.greeting); clearTimeout(this.saying);
    this.unmount?.();
    this.model.off("msg:custom", this.hear); this.model.off("comm_live_update", this.look);
    document.removeEventListener("visibilitychange", this.wake);
    this.send({ do: "bye" });
  }
}

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.end();
}
