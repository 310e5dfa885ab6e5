// The variables of the ranks: a table that is filtered and sorted here, and a look into one, which the kernel fetches.

const COLUMNS = [["name", "Name"], ["type", "Type"], ["value", "Shape or value"], ["dtype", "Dtype"], ["device", "Device"], ["bytes", "Bytes"], ["words", "Ranks"]];
// state -> [colour, icon, word of the filter]
const AGREEMENTS = { same: ["ok", "same", "same"], differ: ["wait", "diff", "differ"], own: ["idle", "diff", "own"], shards: ["run", "shard", "sharded"], partly: ["idle", "one", "partly"], other: ["idle", "idle", "not compared"] };
const agreement = (state, word, title) => h("span", { class: `st is-${AGREEMENTS[state]?.[0] ?? "idle"}`, title }, icon(AGREEMENTS[state]?.[1] ?? "idle"), word);

function mount(view) {
  const wanted = { text: "", state: "", by: "name", is_down: false, name: null, rank: 0 };
  const facts = h("span", { class: "soft" }), running = h("span"), acts = h("span", { class: "push row" });
  const refresh = view.button([icon("new"), "Refresh"], () => view.call("refresh"));
  const search = h("input", { class: "in", "aria-label": "Filter names and types", placeholder: "Filter names, types", oninput: () => { wanted.text = search.value; draw(); } });
  const choices = h("span", { class: "row wrap", role: "group", "aria-label": "Only" });
  const refresh_choices = roving(choices);
  const notes = h("div", { class: "notes" }), heads = h("tr"), rows = h("tbody"), nothing = h("div", { class: "body soft" });
  const table = h("table", { class: "vars", "aria-label": "Variables" }, h("thead", {}, heads), rows);
  const look = make_look(view, wanted, () => open(null));
  const shown = new Map(); // name -> its row, as it stands in the page
  acts.append(refresh);
  view.el.append(h("div", { class: "head" }, h("h3", {}, "Variables"), running, facts, acts),
    h("div", { class: "tools", role: "toolbar", "aria-label": "Filters" }, h("span", { class: "search" }, icon("search"), search), choices), notes, table, nothing);

  const refresh_rows = roving(rows, { selector: ".twist" });
  const open = (name) => {
    const before = wanted.name;
    wanted.name = name;
    if (name !== null) look.open(view.state.table.rows.find((row) => row.name === name));
    draw();
    if (name === null) shown.get(before)?.twist.focus();
  };
  const row_of = (row) => {
    const old = shown.get(row.name), told = JSON.stringify(row);
    if (old?.told === told) return old;
    const twist = h("button", { type: "button", class: "twist", "aria-expanded": "false", "aria-label": `${row.name}: preview`, onclick: (event) => { event.stopPropagation(); open(wanted.name === row.name ? null : row.name); } }, icon("right"));
    const cells = [[h("span", { class: "name" }, twist, h("b", { class: "mono" }, row.name))], [row.type], [row.value], [row.dtype], [row.device], [format_bytes(row.bytes)], [agreement(row.state, row.words, row.why || null)]];
    const classes = ["", "cut kind", "mono val", "mono dtype", "mono device", "num", "words"];
    const line = h("tr", { onclick: () => twist.click() }, cells.map((cell, i) => h("td", { class: classes[i], title: i === 1 || i === 2 ? cell[0] : null }, cell)));
    const made = { told, twist, line };
    shown.set(row.name, made);
    return made;
  };
  const draw_choices = ({ rows: all, counts }) => {
    if (wanted.state && !counts[wanted.state]) wanted.state = "";
    const choose = (state) => () => { wanted.state = state; draw(); };
    const have = new Map([...choices.children].map((button) => [button.dataset.state, button]));
    const button = (state, content) => {
      const made = have.get(state) ?? h("button", { type: "button", class: "b q", "data-state": state, onclick: choose(state) });
      made.replaceChildren(content);
      made.setAttribute("aria-pressed", String(wanted.state === state));
      return made;
    };
    replace_children(choices, [button("", `All ${grouped(all.length)}`),
      ...Object.entries(counts).map(([state, count]) => button(state, agreement(state, `${grouped(count)} ${AGREEMENTS[state][2]}`)))]);
    refresh_choices();
  };
  const sort_by = (by) => () => { wanted.is_down = wanted.by === by && !wanted.is_down; wanted.by = by; draw(); };
  const head_buttons = COLUMNS.map(([by, label]) => h("button", { type: "button", class: "sort", onclick: sort_by(by) }, label));
  heads.append(...COLUMNS.map(([by], i) => h("th", { class: { type: "kind", bytes: "num", dtype: "dtype", device: "device" }[by] }, head_buttons[i])));

  function draw() {
    const { rows: all } = view.state.table, text = wanted.text.trim().toLowerCase();
    const kept = all.filter((row) => (!wanted.state || row.state === wanted.state) && (!text || row.name.toLowerCase().includes(text) || row.type.toLowerCase().includes(text)));
    const key = wanted.by, sign = wanted.is_down ? -1 : 1;
    kept.sort((a, b) => sign * (key === "bytes" ? (a.bytes ?? -1) - (b.bytes ?? -1) : a[key].localeCompare(b[key], "en")) || a.name.localeCompare(b.name, "en"));
    if (wanted.name !== null && !kept.some((row) => row.name === wanted.name)) wanted.name = null;
    for (const name of [...shown.keys()]) if (!all.some((row) => row.name === name)) shown.delete(name);
    const lines = [];
    for (const row of kept) {
      const { twist, line } = row_of(row), is_open = row.name === wanted.name;
      line.classList.toggle("on", is_open);
      if (twist.getAttribute("aria-expanded") !== String(is_open)) { twist.setAttribute("aria-expanded", String(is_open)); twist.replaceChildren(icon(is_open ? "down" : "right")); }
      lines.push(line, is_open && look.line);
    }
    replace_children(rows, lines);
    refresh_rows();
    heads.childNodes.forEach((head, i) => {
      const is_by = COLUMNS[i][0] === key;
      if (is_by) head.setAttribute("aria-sort", wanted.is_down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
      set_text(head_buttons[i], COLUMNS[i][1] + (is_by ? (wanted.is_down ? " ▾" : " ▴") : ""));
    });
    draw_choices(view.state.table);
    table.hidden = !all.length;
    nothing.hidden = kept.length > 0;
    set_text(nothing, all.length ? "No variable fits the filter." : "No variables yet. What a %%distributed cell defines on the ranks stands here.");
  }
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

/** The row below an open one: a tab for each rank, what it has there, and what is known of its numbers. */
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
  const open = (row) => { panel.replaceChildren(h("p", { class: "soft" }, "Looking…")); draw_tabs(row); ask(); };
  const refresh = (row) => { if (row) { draw_tabs(row); ask(); } };
  const take = (told) => {
    if (told.name !== wanted.name || told.rank !== wanted.rank) return;
    if (told.error) { fail(told.error); return; }
    panel.removeAttribute("aria-busy");
    panel.replaceChildren(h("div", {}, told.rows.length ? numbers_table(told) : told.text ? h("pre", { tabIndex: 0 }, told.text) : null,
      h("div", { class: "hint" }, words_below(told))), side(told));
  };
  return { line, open, refresh, take };
}

function words_below({ note, layout, rank, read_at }) {
  const words = [note, layout, `from rank ${rank} at ${read_at}`].filter(Boolean).join(", ");
  return `${words[0].toUpperCase()}${words.slice(1)}.${note.startsWith("first") ? " The rest stays there." : ""}`;
}

function numbers_table({ columns, rows }) {
  const is_bad = (text) => text === "nan" || text === "inf" || text === "-inf";
  return h("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "The first of it" }, h("table", { class: "n" }, h("thead", {}, h("tr", {}, columns.map((name) => (name ? h("th", { scope: "col" }, name) : h("td"))))),
    h("tbody", {}, rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((text) => h("td", { class: is_bad(text) ? "bad" : null }, text)))))));
}

function side(told) {
  const bad = [[told.nans, "nan"], [told.infinite, "infinite"]].filter(([count]) => count).map(([count, what]) => `${grouped(count)} ${what}`);
  const copied = h("span", { class: "soft", role: "status" });
  const command = `%pull ${told.name} -r ${told.rank}`;
  const copy = h("button", { type: "button", class: "b", title: command, onclick: async () => set_text(copied, (await copy_text(command)) ? "copied" : command) }, icon("copy"), "Copy %pull");
  return h("div", { class: "side" },
    h("dl", { class: "kv" }, Object.entries(told.facts).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    told.sampled ? h("div", { class: "hint" }, `of ${grouped(told.sampled)} numbers, a sample`) : null,
    bad.length ? h("span", { class: "st is-bad" }, icon("warn"), `${bad.join(", ")} on rank ${told.rank}`) : null,
    told.bins.length ? histogram(told) : null,
    told.sums.length ? h("div", {}, h("div", { class: "group" }, "Checksum per rank"), h("div", { class: "sums" }, told.sums.map(([rank, digest, is_other]) =>
      h("span", { class: is_other ? "x is-wait" : null, title: is_other ? `rank ${rank} differs` : null }, `${rank}:${digest}`)))) : null,
    told.why ? h("div", { class: "hint" }, `Not compared: ${told.why}.`) : null,
    h("div", { class: "row" }, copy, copied));
}

function histogram({ bins, facts }) {
  const most = Math.max(...bins);
  return h("div", { class: "hist", role: "img", "aria-label": `Histogram from ${facts.min} to ${facts.max}` }, bins.map((count) => {
    const bar = h("i"); bar.style.height = `${count ? Math.max(3, Math.round((100 * count) / most)) : 0}%`; return bar;
  }));
}
