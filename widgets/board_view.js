const WORDS = { running: "run", waits: "wait", awaited: "warn", died: "bad", unknown: "lost", starting: "new", idle: "idle" };
const LOUD = new Set(["waits", "awaited", "died", "unknown"]);
const MOST_TILES = 16, LEASE_MS = 4000, HIGH = 0.9, SPARKS = 60;

const name_ranks = (ranks) => `rank${ranks.length === 1 ? "" : "s"} ${ranks.join(", ")}`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
const stopwatch = (seconds) => {
  const [minutes, rest] = [Math.floor(seconds / 60), String(seconds % 60).padStart(2, "0")];
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
};
const share_of = (row) => (row.used !== null && row.total ? Math.min(1, row.used / row.total) : null);
const memory_of = (row) => {
  if (row.used === null) return "–";
  if (row.gpu === null || !row.total) return format_bytes(row.used);
  return `${+(row.used / 1e9).toPrecision(row.used < 1e10 ? 2 : 3)}/${Math.round(row.total / 1e9)} GB`;
};
const percent = (value) => (value === null ? "–" : `${value} %`);

/** Show a state in an existing element, without touching unchanged parts. */
const set_state = (place, state, word) => {
  const kind = WORDS[state] ?? "lost";
  if (place.dataset.state !== state) {
    place.dataset.state = state; place.className = `st ${colour_of(kind)}`;
    place.replaceChildren(icon(STATES[kind]), document.createTextNode(word));
  } else if (place.lastChild.data !== word) place.lastChild.data = word;
};
const set_attribute = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };
const set_width = (bar, share) => { bar.firstChild.style.width = `${Math.round(100 * (share ?? 0))}%`; };
const tone = (state) => colour_of(WORDS[state] ?? "lost");

// ---- one rank: a tile, a cell, or a row
const measure = (label) => {
  const bar = h("span", { class: "bar is-run" }, h("i", {})), value = h("span", {});
  const name = h("span", {}, label);
  return { el: h("span", { class: "m" }, name, bar, value), name, bar, value };
};

const make_tile = (b, rank) => {
  const word = h("span", {}), at = h("span", { class: "at cut" }), last = h("span", { class: "last cut" });
  const used = measure("CPU"), memory = measure("mem"), rate = h("span", {}), fresh = h("span", { class: "fresh small" });
  const line = s("polyline", { points: "" });
  const spark = s("svg", { class: "plot spark", viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  const rows = [used.el, memory.el, h("span", { class: "m" }, h("span", {}, "rate"), spark, rate)];
  const el = h("button", { type: "button", class: "tile", "data-rank": `${rank}`, "aria-pressed": "false", onclick: () => open_pane(b, rank) },
    h("span", { class: "l1" }, h("b", {}, `rank ${rank}`), word), at, rows, fresh, last);
  const draw_spark = (rates) => {
    const most = Math.max(...rates), step = 100 / (SPARKS - 1), from = SPARKS - rates.length;
    line.setAttribute("points", rates.map((each, i) => `${((from + i) * step).toFixed(1)},${(13 - (most ? (10 * each) / most : 0)).toFixed(1)}`).join(" "));
  };
  const update = (row) => {
    set_attribute(el, "class", `tile ${tone(row.state)}${LOUD.has(row.state) ? " loud" : ""}`);
    set_state(word, row.state, row.word);
    set_text(at, row.at); at.title = row.more || row.at;
    set_text(used.name, row.gpu === null ? "CPU" : "GPU");
    set_text(used.value, percent(row.gpu ?? row.cpu)); set_width(used.bar, Math.min(1, (row.gpu ?? row.cpu ?? 0) / 100));
    const share = share_of(row), is_high = share !== null && share > HIGH;
    set_width(memory.bar, share); set_attribute(memory.bar, "class", `bar ${is_high ? "is-warn" : "is-run"}`);
    if (is_high) memory.value.replaceChildren(icon("warn"), ` ${format_bytes(row.used)}`); else set_text(memory.value, memory_of(row));
    set_text(rate, row.rate === null ? "–" : `${row.rate === 0 ? 0 : format_rate(row.rate)} /s`);
    for (const each of rows) each.hidden = Boolean(row.fresh);
    fresh.hidden = !row.fresh;
    if (row.fresh && fresh.textContent !== row.fresh) fresh.replaceChildren(state_word("new", row.fresh));
    set_text(last, row.last); last.title = row.last;
  };
  return { el, update, draw_spark };
};

const make_cell = (b, rank) => {
  const sign = h("span", {}), fill = h("i", {});
  const el = h("button", { type: "button", class: "k", "data-rank": `${rank}`, "aria-pressed": "false", onclick: () => open_pane(b, rank),
    onfocus: () => show_tip(b, rank), onmouseenter: () => show_tip(b, rank) }, `${rank}`, sign, h("span", { class: "fill" }, fill));
  const update = (row) => {
    const is_quiet = row.state === "running" || row.state === "idle", share = share_of(row);
    set_attribute(el, "class", `k ${tone(row.state)}${is_quiet ? "" : " loud"}`);
    if (sign.dataset.state !== row.state) { sign.dataset.state = row.state; replace_children(sign, row.state === "running" ? [] : [icon(STATES[WORDS[row.state]])]); }
    fill.style.width = `${Math.round(100 * (share ?? 0))}%`;
    const said = `rank ${rank}, ${row.word}${share === null ? "" : `, memory ${Math.round(100 * share)} %`}`;
    set_attribute(el, "aria-label", said); set_attribute(el, "title", `rank ${rank}: ${row.word}${row.at ? `, ${row.at}` : ""}`);
    if (b.tipped === rank) show_tip(b, rank);
  };
  return { el, update };
};

const make_row = (b, rank) => {
  const word = h("span", {}), at = h("td", { class: "cut mono" }), used = h("td", { class: "num" }), memory = h("td", { class: "num" }), rate = h("td", { class: "num" });
  const last = h("td", { class: "cut mono opt-col" }), host = h("td", { class: "opt-col" });
  const button = h("button", { type: "button", class: "b q", "data-rank": `${rank}`, "aria-pressed": "false", "aria-label": `rank ${rank}`, onclick: () => open_pane(b, rank) }, `${rank}`);
  const el = h("tr", {}, h("td", {}, button), host, h("td", { class: "nowrap" }, word), at, used, memory, rate, last);
  const update = (row) => {
    set_state(word, row.state, row.word);
    set_text(host, [row.host, row.device].filter(Boolean).join(" · "));
    for (const [cell, text] of [[at, row.at], [last, row.last]]) { set_text(cell, text); cell.title = text; }
    set_text(used, percent(row.gpu ?? row.cpu)); set_text(memory, memory_of(row)); set_text(rate, row.rate === null ? "–" : `${row.rate}`);
  };
  return { el, update, button };
};

// ---- the grid
const make_tiles = (b) => b.layout.map((host, i) => {
  const used = h("span", { class: "push soft small" });
  const el = h("div", { class: "board-host", role: "group", "aria-label": told_node(host.name) },
    h("div", { class: "t" }, h("b", {}, told_node(host.name)), host.where && host.where !== host.name ? h("span", { class: "mono soft" }, host.where) : null, used),
    h("div", { class: "board-tiles" }, host.ranks.map((rank) => add(b, rank, make_tile(b, rank)).el)));
  b.hosts.push((row) => set_text(used, row.fault || [row.cpu === null ? "" : `CPU ${row.cpu} %`, row.total ? `RAM ${Math.round(row.used / 1e9)} / ${Math.round(row.total / 1e9)} GB` : ""].filter(Boolean).join("   ")));
  return el;
});

const make_cells = (b) => {
  const widest = Math.min(8, Math.max(...b.layout.map((host) => host.ranks.length)));
  const top = h("div", { class: "board-cells h", "aria-hidden": "true" }, h("span", {}), h("div", { class: "r" }, [...Array(8).keys()].map((i) => h("span", {}, i < widest ? `${i}` : ""))),
    h("div", { class: "side" }, h("span", {}, "CPU"), h("span", {}, "steps/s")));
  const rows = b.layout.map((host) => {
    const cpu = h("span", {}), rate = h("span", {});
    b.hosts.push((row) => {
      set_text(cpu, row.fault ? "" : percent(row.cpu));
      const known = host.ranks.map((rank) => b.rows.get(rank)?.rate ?? null).filter((each) => each !== null);
      set_text(rate, known.length ? `${format_rate(Math.min(...known))} /s` : "–");
    });
    return h("div", { class: "board-cells", role: "group", "aria-label": told_node(host.name) }, h("b", { class: "cut", title: told_node(host.name) }, told_node(host.name)),
      h("div", { class: "r" }, host.ranks.map((rank) => add(b, rank, make_cell(b, rank)).el)), h("div", { class: "side" }, cpu, rate));
  });
  b.tipped = null; b.tip = h("div", { class: "tip" }, h("span", { class: "soft" }, "Point at a rank, or move to it with the arrow keys, to see what it is doing."));
  return [top, ...rows, b.tip];
};

const make_table = (b) => {
  const columns = [["Rank", ""], ["Host", "opt-col"], ["State", ""], ["At", ""], ["Use", "num"], ["Memory", "num"], ["Steps/s", "num"], ["Last line", "opt-col"]];
  const rows = b.layout.flatMap((host) => host.ranks.map((rank) => { const row = make_row(b, rank); add(b, rank, row, row.button); return row.el; }));
  return [h("div", { class: "board-table" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map(([name, cls]) => h("th", { class: cls, scope: "col" }, name)))), h("tbody", {}, rows)))];
};

const add = (b, rank, shown, button = shown.el) => { b.tiles.set(rank, { ...shown, button }); return shown; };
const MAKERS = { tiles: make_tiles, cells: make_cells, table: make_table };

const place = (b) => {
  const had_focus = b.grid.contains(document.activeElement) ? Number(document.activeElement.dataset.rank) : null;
  b.tiles.clear(); b.hosts = []; b.tip = null;
  b.grid.replaceChildren(...MAKERS[b.density](b), b.nobody);
  for (const host of b.layout) for (const rank of host.ranks) {
    if (!b.heard.has(rank)) { b.heard.add(rank); b.view.on(`rank${rank}`, (row) => update_rank(b, rank, row)); } else if (b.rows.has(rank)) update_rank(b, rank, b.rows.get(rank));
  }
  for (const [rank, tile] of b.tiles) if (!b.rows.has(rank) && b.view.state[`rank${rank}`]) update_rank(b, rank, b.view.state[`rank${rank}`]);
  (b.view.state.hosts ?? []).forEach((row, i) => b.hosts[i]?.(row));
  draw_sparks(b); filter_ranks(b);
  const first = b.tiles.get(had_focus ?? b.selected) ?? b.tiles.values().next().value;
  for (const tile of b.tiles.values()) tile.button.tabIndex = tile === first ? 0 : -1;
  if (had_focus !== null) b.tiles.get(had_focus)?.button.focus();
};

const update_rank = (b, rank, row) => {
  const before = b.rows.get(rank), tile = b.tiles.get(rank);
  b.rows.set(rank, row);
  if (!tile) return;
  tile.update(row);
  set_attribute(tile.button, "aria-pressed", `${b.selected === rank}`);
  tile.el.hidden = b.shown !== "all" && row.state !== b.shown;
  if (b.selected === rank) { show_title(b); if (before && before.state !== row.state) look(b); }
};

const draw_sparks = (b) => {
  if (b.density !== "tiles") return;
  b.layout.flatMap((host) => host.ranks).sort((x, y) => x - y).forEach((rank, i) => b.tiles.get(rank)?.draw_spark(b.rates.map((rates) => rates[i] ?? 0)));
};

const filter_ranks = (b) => {
  for (const [rank, tile] of b.tiles) tile.el.hidden = b.shown !== "all" && b.rows.get(rank)?.state !== b.shown;
  for (const host of b.grid.querySelectorAll(".board-host, .board-cells:not(.h)")) host.hidden = !host.querySelector("[data-rank]:not([hidden])");
  b.nobody.hidden = b.shown === "all" || [...b.tiles.values()].some((tile) => !tile.el.hidden);
  set_text(b.nobody, `No rank is ${b.shown === "waits" ? "waiting" : b.shown} now.`);
};

const show_tip = (b, rank) => {
  const row = b.rows.get(rank);
  if (!b.tip || !row) return;
  b.tipped = rank;
  const facts = [row.gpu === null ? (row.cpu === null ? "" : `CPU ${row.cpu} %`) : `GPU ${row.gpu} %`, row.used === null ? "" : memory_of(row), row.last ? "last:" : ""].filter(Boolean);
  b.tip_word ??= h("span", {});
  set_state(b.tip_word, row.state, row.word);
  b.tip_open ??= h("button", { type: "button", class: "b", onclick: () => open_pane(b, b.tipped) }, "Open");
  set_attribute(b.tip_open, "aria-label", `Open rank ${rank}`);
  replace_children(b.tip, [h("b", {}, `rank ${rank}`), h("span", { class: "cut", title: row.last }, h("span", { class: "soft" }, `${[row.host, row.device].filter(Boolean).join(" · ")} · `), b.tip_word,
    h("span", { class: "mono" }, ` ${row.at}`), h("span", { class: "soft" }, ` · ${facts.join(" · ")} `), h("span", { class: "mono" }, row.last)), b.tip_open]);
};

/** Move the focus to the neighbour on screen, whatever the number of columns. */
const move_focus = (b, event) => {
  const here = event.target.closest("[data-rank]");
  if (!here) return;
  const all = [...b.tiles.values()].map((tile) => tile.button).filter((button) => !button.closest("[hidden]")), at = all.indexOf(here);
  let to = { ArrowRight: all[at + 1], ArrowLeft: all[at - 1], Home: all[0], End: all.at(-1) }[event.key];
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const down = event.key === "ArrowDown" ? 1 : -1, from = here.getBoundingClientRect();
    const beyond = all.filter((each) => down * (each.getBoundingClientRect().top - from.top) > 4);
    const top = beyond.length ? beyond.at(down === 1 ? 0 : -1).getBoundingClientRect().top : 0;
    const row = beyond.filter((each) => Math.abs(each.getBoundingClientRect().top - top) < 4);
    to = row.reduce((best, each) => (best && Math.abs(best.getBoundingClientRect().left - from.left) <= Math.abs(each.getBoundingClientRect().left - from.left) ? best : each), undefined);
  } else if (!["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key)) return;
  event.preventDefault(); event.stopPropagation();
  if (to) { for (const each of all) each.tabIndex = each === to ? 0 : -1; to.focus(); }
};

// ---- the head, the counts, the notes
const show_head = (b, head) => {
  if (b.head?.cell !== head.cell && head.cell !== null) { b.seen.clear(); b.said.hidden = true; }
  b.head = head;
  const is_running = head.cell !== null;
  set_state(b.state, head.over ? "unknown" : is_running ? "running" : "idle",
    head.over ? "ended" : is_running ? `cell [${head.cell}], ${stopwatch(head.seconds)}` : head.ended ? `idle since ${clock(head.ended)}` : "idle");
  const ranks = `${count_of(head.ranks, "rank")}${head.hosts ? `, ${count_of(head.hosts, "host")}` : ""}`;
  set_text(b.name, head.name);
  set_text(b.facts, ` · ${[ranks, head.rate === null ? "" : `${format_rate(head.rate)} steps/s`, head.last].filter(Boolean).join(" · ")}${head.over ? ` · ${head.over}` : ""}`);
  for (const button of [b.stop, b.interrupt]) button.hidden = !is_running || head.over;
  b.restart.hidden = Boolean(head.over);
  show_counts(b, head.counts); fold(b);
};

const show_counts = (b, counts) => {
  set_text(b.filters.get("all"), `All ${b.head.ranks}`);
  for (const [state, count] of Object.entries(counts)) {
    if (count) b.seen.add(state);
    const button = b.filters.get(state);
    button.hidden = !b.seen.has(state) && b.shown !== state;
    set_state(button.firstChild, state, `${count} ${state === "waits" && count !== 1 ? "wait" : state}`);
  }
  if (b.shown !== "all") filter_ranks(b);
};

/** Fold to one line while nothing needs attention; what the user opened stays open. */
const fold = (b) => {
  const counts = b.head.counts, is_quiet = b.head.cell === null && counts.idle === b.head.ranks && !(b.view.state.notes ?? []).length;
  const is_shown = !is_quiet || b.is_unfolded || b.selected !== null;
  b.more.hidden = !is_quiet || b.selected !== null;
  set_text(b.more, b.is_unfolded ? "Hide ranks" : "Show ranks"); set_attribute(b.more, "aria-expanded", `${b.is_unfolded}`);
  b.body.hidden = !is_shown;
};

const KINDS = { waits: "wait", died: "bad", lost: "lost", stuck: "bad" };
const show_notes = (b, notes) => {
  const before = b.notes;
  b.notes = new Map(notes.map((each) => {
    const { text, ...rest } = each, key = JSON.stringify(rest);
    const kept = before.get(key) ?? (() => { const said = h("p", {}); return { said, el: note(KINDS[each.kind] ?? "warn", said, note_buttons(b, each)) }; })();
    set_text(kept.said, text);
    return [key, kept];
  }));
  replace_children(b.alerts, [...b.notes.values()].map((each) => each.el));
  const fresh = notes.filter(({ text, ...rest }) => !before.has(JSON.stringify(rest)));
  if (fresh.length) b.view.announce(fresh.map((each) => each.text).join(" "));
  if (b.head) fold(b);
};

const note_buttons = (b, { kind, ranks, whom, down, ready }) => {
  const ask = (words, action, chosen) => b.view.button(words, () => b.view.call(action, { ranks: chosen.join(",") }), { on_error: (text) => say(b, "failed", text) });
  if (kind === "stuck" || (kind === "waits" && !whom.length)) return [b.view.button("Stop cell", () => b.view.call("stop"), { cls: "danger" })];
  if (kind === "waits") return [h("button", { type: "button", class: "b", onclick: () => open_pane(b, whom[0], "stack") }, `Stack of rank ${whom[0]}`), ask(`Interrupt ${name_ranks(whom)}`, "interrupt", whom)];
  if (kind === "died" && down) return [ask(`Restart ${name_ranks(ranks)}`, "restart", ranks)];
  if (kind !== "died") return [];
  const replay = ask(ready ? `Replay on ${name_ranks(ranks)}` : "Replay when ready", "replay", ranks);
  disable(replay, ready ? "" : "the fresh rank is not ready, or other ranks are still running the cell");
  return [replay];
};

const say = (b, state, text) => {
  const kind = { done: "ok", failed: "bad", running: "run" }[state];
  if (!kind) return;
  b.said.hidden = false;
  replace_children(b.said, [state_word(kind, state === "running" ? "under way" : state), h("span", {}, text)]);
  if (state !== "running") b.view.announce(text);
};

// ---- choosing ranks to interrupt or restart
const ASKED = { interrupt: ["Interrupt ranks", "Interrupt", "Raises KeyboardInterrupt on these ranks; ranks that wait for them keep waiting."],
  restart: ["Restart ranks", "Restart", "Fresh processes: the variables of these ranks are lost, the others keep theirs."] };
const ask_which = (b, what, ranks) => {
  const [label, words, hint] = ASKED[what];
  const close = () => { b.asked.replaceChildren(); b[what].setAttribute("aria-expanded", "false"); b[what].focus(); };
  const act = async (chosen) => { await b.view.call(what, { ranks: chosen }); close(); };
  const { bar, input } = ask_bar(b.view, label, [[words, act, "danger"]], close, { value: ranks, hint });
  b.asked.replaceChildren(bar); b[what].setAttribute("aria-expanded", "true");
  input.focus(); input.select();
};

// ---- the pane
const look = (b) => { if (b.selected !== null) b.view.call("look", { what: b.tab, rank: b.selected }).catch((error) => set_text(b.text, error.message)); };

const open_pane = (b, rank, tab = b.tab) => {
  if (b.selected === rank && b.tab === tab) { close_pane(b); return; }
  const before = b.selected; b.selected = rank; b.tab = tab;
  for (const each of [before, rank]) b.tiles.get(each)?.button.setAttribute("aria-pressed", `${each === rank}`);
  for (const [name, button] of b.tabs) { set_attribute(button, "aria-selected", `${name === tab}`); button.tabIndex = name === tab ? 0 : -1; }
  const part = `${tab}${rank}`;
  b.text.replaceChildren(); b.pane.hidden = false; b.age.textContent = "";
  if (!b.heard.has(part)) { b.heard.add(part); b.view.on(part, (value) => { if (part === `${b.tab}${b.selected}`) show_text(b, value); }); } else if (b.view.state[part]) show_text(b, b.view.state[part]);
  show_title(b); fold(b); look(b);
};

const close_pane = (b) => {
  const tile = b.tiles.get(b.selected); b.selected = null; b.pane.hidden = true; tile?.button.setAttribute("aria-pressed", "false"); fold(b);
  if (!b.body.hidden) tile?.button.focus();
};

const show_title = (b) => {
  const row = b.rows.get(b.selected);
  set_text(b.title, `rank ${b.selected}`); set_attribute(b.pane, "aria-label", `rank ${b.selected}`);
  set_text(b.of, row ? [row.host, row.device, row.pid ? `pid ${row.pid}` : ""].filter(Boolean).join(" · ") : "");
  disable(b.pane_interrupt, row?.runs ? "" : "this rank is not running a cell");
};

const show_text = (b, value) => {
  if (value.error !== undefined) { set_text(b.text, value.error); return; }
  const is_at_end = b.text.scrollTop + b.text.clientHeight >= b.text.scrollHeight - 4;
  if (b.tab === "stack") {
    set_text(b.age, `taken at ${new Date(value.at * 1000).toLocaleTimeString([], { hour12: false })}`);
    const frames = value.lines.map((line) => h("span", {}, line.startsWith("<cell ") ? h("mark", {}, line) : line, "\n"));
    b.text.replaceChildren(value.cell === null ? `rank ${b.selected} is not running a cell: ${value.state}\n` : `cell [${value.cell}]: ${value.state}\n`, value.wait ? `${value.wait}\n` : "", ...frames);
    return;
  }
  set_text(b.age, value.more ? "the last lines" : "");
  const nothing = value.cell === null ? `rank ${b.selected} has run no cell` : `rank ${b.selected} has printed nothing in cell [${value.cell}]`;
  set_text(b.text, value.lines.length ? value.lines.join("\n") : nothing);
  if (is_at_end) b.text.scrollTop = b.text.scrollHeight;
};

const make_pane = (b) => {
  const choose = (name) => { if (b.tab !== name) open_pane(b, b.selected, name); };
  const tab = (name, words) => h("button", { type: "button", class: "b", role: "tab", id: `${b.view.id}-${name}`, "aria-controls": `${b.view.id}-text`, onclick: () => choose(name) }, words);
  b.tabs = new Map([["output", tab("output", "Output")], ["stack", tab("stack", "Stack")]]);
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Output or stack" }, [...b.tabs.values()]);
  roving(tabs, { on_move: (item) => item.click() });
  b.title = h("b", {}); b.of = h("span", { class: "soft small" }); b.age = h("span", { class: "soft small" });
  b.text = h("pre", { id: `${b.view.id}-text`, role: "tabpanel", tabIndex: 0, "aria-label": "Text" });
  b.pane_interrupt = b.view.button("Interrupt", () => b.view.call("interrupt", { ranks: `${b.selected}` }), { cls: "q", on_error: (text) => say(b, "failed", text) });
  const copy = h("button", { type: "button", class: "b q", onclick: async () => { b.view.announce((await copy_text(b.text.textContent)) ? "copied" : "not copied: select the text"); } }, icon("copy"), "Copy");
  const restart = h("button", { type: "button", class: "b q", onclick: () => ask_which(b, "restart", `${b.selected}`) }, "Restart…");
  b.pane = h("div", { class: "pane", role: "region", hidden: true }, h("div", { class: "tt" }, b.title, b.of, tabs, h("span", { class: "acts" }, b.age, copy, b.pane_interrupt, restart, close_button(() => close_pane(b)))), b.text);
};

// ---- the whole view
const make_tools = (b) => {
  const show = (state) => { b.shown = state; for (const [each, button] of b.filters) button.setAttribute("aria-pressed", `${each === state}`); show_counts(b, b.head.counts); filter_ranks(b); };
  const filter = (state, content) => h("button", { type: "button", class: "b q", "aria-pressed": `${state === b.shown}`, hidden: state !== "all" && state !== b.shown, onclick: () => show(state) }, content);
  b.filters = new Map([["all", filter("all", "All")], ...Object.keys(WORDS).map((state) => [state, filter(state, h("span", {}))])]);
  const density = (name, words) => h("button", { type: "button", class: "b", role: "radio", "data-density": name, "aria-checked": "false", onclick: () => set_density(b, name) }, words);
  b.densities = h("span", { class: "push seg", role: "radiogroup", "aria-label": "Density" }, density("tiles", "Tiles"), density("cells", "Cells"), density("table", "Table"));
  roving(b.densities, { on_move: (item) => item.click() });
  const filters = h("span", { class: "row wrap", role: "group", "aria-label": "Show ranks that are" }, [...b.filters.values()]);
  roving(filters);
  return h("div", { class: "tools" }, filters, b.densities);
};

const set_density = (b, name) => {
  b.density = name;
  for (const each of b.densities.children) { each.setAttribute("aria-checked", `${each.dataset.density === name}`); each.tabIndex = each.dataset.density === name ? 0 : -1; }
  place(b);
};

const make_head = (b) => {
  const first = () => `${b.selected ?? b.view.state.notes?.find((each) => each.whom.length)?.whom.join(",") ?? "all"}`;
  const asks = (what, words) => h("button", { type: "button", class: "b", "aria-expanded": "false", onclick: () => ask_which(b, what, first()) }, words);
  b.state = h("span", {}); b.name = h("b", {}); b.facts = h("span", {});
  b.stop = b.view.button([icon("stop"), "Stop cell"], () => b.view.call("stop"), { cls: "danger", on_error: (text) => say(b, "failed", text) });
  b.interrupt = asks("interrupt", "Interrupt…"); b.restart = asks("restart", "Restart…");
  b.more = h("button", { type: "button", class: "b q", hidden: true, onclick: () => { b.is_unfolded = !b.is_unfolded; fold(b); } });
  return h("div", { class: "head" }, h("h3", {}, "Board"), b.state, h("span", { class: "soft" }, b.name, b.facts), h("span", { class: "push row" }, b.more, b.stop, b.interrupt, b.restart));
};

/** The choices of a page, kept when the view is redrawn. */
const CHOSEN = ["shown", "density", "tab", "is_unfolded"], kept = {};

function mount(view) {
  const b = { view, rows: new Map(), tiles: new Map(), heard: new Set(), seen: new Set(), notes: new Map(), rates: [...view.state.rates], hosts: [], layout: [],
    shown: "all", density: null, selected: null, tab: "output", is_unfolded: false, head: null, tip: null, ...kept };
  view.el.classList.add("board"); view.el.setAttribute("aria-label", "Board");
  const head = make_head(b), tools = make_tools(b);
  b.asked = h("div", {}); b.alerts = h("div", { class: "board-notes" });
  b.nobody = h("p", { class: "body soft", hidden: true }); b.said = h("div", { class: "foot board-said", hidden: true });
  b.grid = h("div", { class: "board-grid", role: "group", "aria-label": "Ranks", onkeydown: (event) => move_focus(b, event) });
  make_pane(b);
  b.body = h("div", { hidden: true }, tools, b.alerts, b.grid, b.pane);
  view.el.append(head, b.asked, b.body, b.said);
  set_state(b.state, "starting", "querying the ranks");
  view.el.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && b.selected !== null) { event.preventDefault(); event.stopPropagation(); close_pane(b); }
  });
  view.on("layout", (layout) => { b.layout = layout; set_density(b, b.density ?? (layout.flatMap((host) => host.ranks).length > MOST_TILES ? "cells" : "tiles")); });
  view.on("head", (value) => show_head(b, value));
  view.on("notes", (notes) => show_notes(b, notes));
  view.on("hosts", (rows) => rows.forEach((row, i) => b.hosts[i]?.(row)));
  view.on_added("rates", (items) => { b.rates.push(...items); b.rates.splice(0, b.rates.length - SPARKS); draw_sparks(b); });
  view.on("said", (said) => say(b, said.is, said.text));
  const lease = setInterval(() => { if (b.rows.get(b.selected)?.runs) look(b); }, LEASE_MS);
  return () => { clearInterval(lease); for (const name of CHOSEN) kept[name] = b[name]; };
}
