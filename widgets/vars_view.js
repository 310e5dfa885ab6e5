// The variables of the ranks: a table that is filtered and sorted here, and previews, which the kernel fetches.

const COLUMNS = [["name", "Name"], ["type", "Type"], ["value", "Shape or value"], ["dtype", "Dtype"], ["device", "Device"], ["bytes", "Bytes"], ["words", "Ranks"]];
// state -> [colour, icon, word of the filter]
const AGREEMENTS = { same: ["ok", "same", "same"], differ: ["wait", "diff", "differ"], own: ["idle", "diff", "own"], shards: ["run", "shard", "sharded"], partly: ["idle", "one", "partly"], other: ["idle", "idle", "not compared"] };
const agreement = (state, word, title) => h("span", { class: `st is-${AGREEMENTS[state]?.[0] ?? "idle"}`, title }, icon(AGREEMENTS[state]?.[1] ?? "idle"), word);

function mount(view) {
  const wanted = { text: "", state: "", by: "name", is_down: false, name: null, rank: 0 };
  const facts = h("span", { class: "soft" }), running = h("span"), notes = h("div", { class: "notes" }), nothing = h("div", { class: "body soft" });
  const refresh = view.button([icon("new"), "Refresh"], () => view.call("refresh"));
  const filters = make_filters(wanted, () => draw()), heads = make_heads(wanted, () => draw());
  const look = make_look(view, wanted, () => open(null)), lines = make_lines((name) => open(wanted.name === name ? null : name));
  const table = h("table", { class: "vars", "aria-label": "Variables" }, h("thead", {}, heads.row), lines.body);
  view.el.append(h("div", { class: "head" }, h("h3", {}, "Variables"), running, facts, h("span", { class: "push row" }, refresh)), filters.bar, notes, h("div", { class: "vars-all" }, table), nothing);

  const open = (name) => {
    const before = wanted.name;
    wanted.name = name;
    if (name !== null) look.open(view.state.table.rows.find((row) => row.name === name));
    draw();
    if (name === null) lines.focus(before);
  };
  const draw = () => {
    const { rows: all } = view.state.table;
    if (wanted.state && !view.state.table.counts[wanted.state]) wanted.state = "";
    const kept = sorted_rows(kept_rows(all, wanted), wanted);
    if (!kept.some((row) => row.name === wanted.name)) wanted.name = null;
    lines.draw(kept, all, wanted.name, look.line);
    heads.draw();
    filters.draw(view.state.table, kept.length);
    table.hidden = !all.length;
    nothing.hidden = kept.length > 0 || (!all.length && view.state.table.notes.length > 0); // the notes explain an empty table
    set_text(nothing, all.length ? "No variable matches the filter." : "No variables yet. Variables that %%distributed cells define on the ranks appear here.");
  };
  view.on("table", (told) => {
    set_text(facts, told.as_of ? `as of ${told.as_of}: ${told.title}` : told.title);
    replace_children(notes, [...told.notes.map((words) => note("wait", h("p", {}, words))), told.error && note("bad", h("p", {}, told.error))]);
    if (wanted.name !== null) look.refresh(told.rows.find((row) => row.name === wanted.name));
    draw();
    if (told.notes.length || told.error) view.announce(told.error || told.notes.join(". "));
  });
  view.on("running", (words) => replace_children(running, words ? [state_word("wait", words)] : []));
  view.on("reading", (is_reading) => view.el.setAttribute("aria-busy", String(is_reading)));
  view.on("preview", (told) => { if (told) look.take(told); });
}

const kept_rows = (rows, { state, text }) => {
  const part = text.trim().toLowerCase();
  return rows.filter((row) => (!state || row.state === state) && (row.name.toLowerCase().includes(part) || row.type.toLowerCase().includes(part)));
};
const sorted_rows = (rows, { by, is_down }) => {
  const compare = by === "bytes" ? (a, b) => (a.bytes ?? -1) - (b.bytes ?? -1) : (a, b) => a[by].localeCompare(b[by], "en", { numeric: true });
  return rows.sort((a, b) => (is_down ? -1 : 1) * compare(a, b) || a.name.localeCompare(b.name, "en", { numeric: true }));
};

/** A field to filter by name or type, and a button for each state present. */
function make_filters(wanted, draw_all) {
  const search = h("input", { class: "in", "aria-label": "Filter names and types", placeholder: "Filter names, types", oninput: () => { wanted.text = search.value; draw_all(); } });
  const choices = h("span", { class: "row wrap", role: "group", "aria-label": "Only" }), shown = h("span", { class: "soft" }), refresh = roving(choices), buttons = new Map();
  const button = (state, content) => {
    const made = buttons.get(state) ?? h("button", { type: "button", class: "b q", onclick: () => { wanted.state = state; draw_all(); } });
    buttons.set(state, made);
    made.replaceChildren(content);
    made.setAttribute("aria-pressed", String(wanted.state === state));
    return made;
  };
  const draw = ({ rows, counts }, num_kept) => {
    set_text(shown, num_kept < rows.length ? `${grouped(num_kept)} of ${grouped(rows.length)} shown` : "");
    const found = Object.entries(counts).map(([state, count]) => button(state, agreement(state, `${grouped(count)} ${AGREEMENTS[state][2]}`)));
    replace_children(choices, [button("", `All ${grouped(rows.length)}`), ...found]);
    refresh();
  };
  const bar = h("div", { class: "tools", role: "toolbar", "aria-label": "Filters" }, h("span", { class: "search" }, icon("search"), search), choices, shown);
  return { bar, draw };
}

/** The column headings: a press sorts by the column, another one reverses the order. */
function make_heads(wanted, draw_all) {
  const sort_by = (by) => () => { wanted.is_down = wanted.by === by && !wanted.is_down; wanted.by = by; draw_all(); };
  const buttons = COLUMNS.map(([by, label]) => h("button", { type: "button", class: "sort", onclick: sort_by(by) }, label));
  const row = h("tr", {}, COLUMNS.map(([by], i) => h("th", { class: { type: "kind", bytes: "num", dtype: "dtype", device: "device" }[by] }, buttons[i])));
  const draw = () => row.childNodes.forEach((head, i) => {
    const [by, label] = COLUMNS[i], way = wanted.by !== by ? "" : wanted.is_down ? "descending" : "ascending";
    if (way) head.setAttribute("aria-sort", way); else head.removeAttribute("aria-sort");
    set_text(buttons[i], label + { "": "", ascending: " ▴", descending: " ▾" }[way]);
  });
  return { row, draw };
}

/** The rows; unchanged ones stay in the page. */
function make_lines(toggle) {
  const body = h("tbody"), refresh = roving(body, { selector: ".twist" }), shown = new Map();
  const classes = ["", "cut kind", "mono val", "mono dtype", "mono device", "num", "words"];
  const make = (row, told) => {
    const twist = h("button", { type: "button", class: "twist", "aria-expanded": "false", "aria-label": `${row.name}: preview`, onclick: (event) => { event.stopPropagation(); toggle(row.name); } }, icon("right"));
    const cells = [h("span", { class: "name" }, twist, h("b", { class: "mono", title: row.name }, row.name)), row.type, row.value, row.dtype, row.device, format_bytes(row.bytes), agreement(row.state, row.words, row.why || null)];
    const line = h("tr", { onclick: () => toggle(row.name) }, cells.map((cell, i) => h("td", { class: classes[i], title: i === 1 || i === 2 ? cell : null }, cell)));
    return { told, twist, line };
  };
  const line_of = (row, is_open) => {
    const told = JSON.stringify(row);
    if (shown.get(row.name)?.told !== told) shown.set(row.name, make(row, told));
    const { twist, line } = shown.get(row.name);
    line.classList.toggle("on", is_open);
    if (twist.getAttribute("aria-expanded") !== String(is_open)) { twist.setAttribute("aria-expanded", String(is_open)); twist.replaceChildren(icon(is_open ? "down" : "right")); }
    return line;
  };
  const draw = (kept, all, open_name, look_line) => {
    const names = new Set(all.map((row) => row.name)), focused = [...shown.keys()].find((name) => shown.get(name).twist === document.activeElement);
    for (const name of [...shown.keys()]) if (!names.has(name)) shown.delete(name);
    replace_children(body, kept.flatMap((row) => { const is_open = row.name === open_name; return [line_of(row, is_open), is_open && look_line]; }));
    if (focused && shown.get(focused)?.twist !== document.activeElement) shown.get(focused)?.twist.focus(); // its row was recreated
    refresh();
  };
  return { body, draw, focus: (name) => shown.get(name)?.twist.focus() };
}

/** The preview below a row: a tab for each rank, the value there, and facts about its numbers. */
function make_look(view, wanted, close) {
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Rank" }), panel = h("div", { class: "pv", role: "tabpanel", tabIndex: -1 });
  const cell = h("td", { colspan: COLUMNS.length }, h("div", { class: "pv-all" }, h("div", { class: "row wrap" }, h("span", { class: "soft" }, "rank"), tabs), panel));
  const line = h("tr", { class: "prev", onkeydown: (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); } } }, cell);
  const refresh_tabs = roving(tabs);
  const ask = () => { panel.setAttribute("aria-busy", "true"); view.call("preview", { name: wanted.name, rank: wanted.rank }).catch((error) => fail(error.message)); };
  const fail = (text) => { panel.removeAttribute("aria-busy"); panel.replaceChildren(note("wait", h("p", {}, text))); view.announce(text); };
  const choose = (rank) => { wanted.rank = rank; mark(); ask(); };
  const mark = () => { for (const tab of tabs.children) { const is_it = +tab.textContent === wanted.rank; tab.setAttribute("aria-selected", String(is_it)); tab.tabIndex = is_it ? 0 : -1; } panel.setAttribute("aria-label", `${wanted.name} on rank ${wanted.rank}`); };
  const draw_tabs = (row) => {
    if (!row.ranks.includes(wanted.rank)) wanted.rank = row.ranks[0];
    replace_children(tabs, row.ranks.map((rank) => [...tabs.children].find((tab) => +tab.textContent === rank) ?? h("button", { type: "button", class: "b", role: "tab", onclick: () => choose(rank) }, `${rank}`)));
    refresh_tabs(); mark();
  };
  let is_new = false; // the opened row has not been in view yet
  const open = (row) => { is_new = true; panel.replaceChildren(h("p", { class: "soft" }, "Loading…")); draw_tabs(row); ask(); };
  const refresh = (row) => { if (row) { draw_tabs(row); ask(); } };
  const take = (told) => {
    if (told.name !== wanted.name || told.rank !== wanted.rank) return;
    if (told.error) { fail(told.error); return; }
    panel.removeAttribute("aria-busy");
    panel.replaceChildren(h("div", {}, told.rows.length ? numbers_table(told) : told.text ? h("pre", { tabIndex: 0 }, told.text) : null,
      h("div", { class: "hint" }, words_below(told))), side(told));
    if (is_new) line.scrollIntoView({ block: "nearest" });
    is_new = false;
  };
  return { line, open, refresh, take };
}

function words_below({ note, layout, rank, read_at }) {
  const words = [note, layout, `from rank ${rank} at ${read_at}`].filter(Boolean).join(", ");
  return `${words[0].toUpperCase()}${words.slice(1)}.${note.startsWith("first") ? " The rest stays on the rank." : ""}`;
}

/** The first numbers of a tensor, or the items of a container. */
function numbers_table({ columns, rows }) {
  const is_bad = (text) => text === "nan" || text === "inf" || text === "-inf";
  return h("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "First values" }, h("table", { class: /^\d/.test(columns[1]) ? "n" : "n texts" }, h("thead", {}, h("tr", {}, columns.map((name) => (name ? h("th", { scope: "col" }, name) : h("td"))))),
    h("tbody", {}, rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((text) => h("td", { class: is_bad(text) ? "bad" : null }, text)))))));
}

function side(told) {
  const bad = [[told.nans, "nan"], [told.infinite, "infinite"]].filter(([count]) => count).map(([count, what]) => `${grouped(count)} ${what}`);
  const copied = h("span", { class: "soft", role: "status" });
  const command = `%pull ${told.name} -r ${told.rank}`;
  const copy = h("button", { type: "button", class: "b", title: command, onclick: async () => set_text(copied, (await copy_text(command)) ? "copied" : command) }, icon("copy"), "Copy %pull");
  return h("div", { class: "side" },
    h("dl", { class: "kv" }, Object.entries(told.facts).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    told.sampled ? h("div", { class: "hint" }, `from a sample of ${grouped(told.sampled)} numbers`) : null,
    bad.length ? h("span", { class: "st is-bad" }, icon("warn"), `${bad.join(", ")} on rank ${told.rank}`) : null,
    told.bins.length ? histogram(told) : null,
    told.sums.length ? h("div", {}, h("div", { class: "group" }, "Checksum per rank"), h("div", { class: "sums" }, told.sums.map(([rank, digest, is_other]) =>
      h("span", { class: is_other ? "x is-wait" : null, title: is_other ? `rank ${rank} differs` : null }, `${rank}:${digest}`)))) : null,
    told.why ? h("div", { class: "hint" }, `Not compared: ${told.why}.`) : null,
    told.travels ? h("div", { class: "row" }, copy, copied) : null);
}

function histogram({ bins, facts }) {
  const most = Math.max(...bins);
  return h("div", { class: "hist", role: "img", "aria-label": `Histogram from ${facts.min} to ${facts.max}` }, bins.map((count) => {
    const bar = h("i"); bar.style.height = `${count ? Math.max(3, Math.round((100 * count) / most)) : 0}%`; return bar;
  }));
}
