// A job: its progress, nodes, curves, logs and files. Data from nodes is inserted as text.
const MOST_ROWS = 4000, ROW_PX = 16, MOST_TABS = 16, LEVELS = ["debug", "info", "warn", "error"];

// ---- progress and nodes
const make_progress = (view) => {
  const share = h("span", { class: "big" }), step = h("b"), of = h("span"), left = h("b"), fill = h("i"), ticks = h("span"), note_of = h("span", { class: "push soft" });
  const bar = h("span", { class: "bar is-run", role: "progressbar", "aria-label": "Steps", "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const track = h("div", { class: "track" }, bar, ticks), pace = h("span"), kept = h("span"), times = h("span", { class: "push" });
  const el = h("div", { class: "pgr" }, h("div", { class: "l" }, share, h("span", {}, "step ", step, of), h("span", { class: "push" }, left), note_of), track, h("div", { class: "sub" }, pace, kept, times));
  const draw = () => {
    const now = view.state.progress, phase = view.state.head.phase;
    el.hidden = !now;
    if (!now) return;
    const part = now.total ? Math.min(1, now.step / now.total) : null;
    share.hidden = track.hidden = part === null;
    set_text(share, part === null ? "" : `${Math.floor(100 * part)} %`);
    set_text(step, grouped(now.step)); set_text(of, now.total ? ` of ${grouped(now.total)}` : "");
    set_text(left, phase === "running" ? now.left : ""); set_text(note_of, phase === "failed" || phase === "stopped" ? download_reason(view) : ""); note_of.hidden = !note_of.textContent;
    bar.className = `bar is-${{ running: "run", failed: "bad", succeeded: "ok", stopped: "idle" }[phase]}`;
    if (part !== null) { fill.style.width = `${100 * part}%`; bar.setAttribute("aria-valuenow", Math.round(1000 * part) / 10);
      ticks.replaceChildren(...now.checkpoints.filter((each) => each <= now.total).map((each) => h("span", { class: "ck", title: `checkpoint ${grouped(each)}`, style: `left:${(100 * each) / now.total}%` }))); }
    set_text(pace, now.pace && phase === "running" ? `${format_rate(now.pace)} steps/s` : "");
    const shown = now.checkpoints.slice(-3).map(grouped).join(", ");
    kept.replaceChildren(...(shown ? [h("i", { class: "tick" }), `checkpoint${now.checkpoints.length > 1 ? "s" : ""} ${now.checkpoints.length > 3 ? "… " : ""}${shown}${now.ago}`] : []));
    set_text(times, [now.started, phase === "running" ? now.ends : ""].filter(Boolean).join(", "));
  };
  view.on("progress", draw); view.on("head", draw); view.on("model", draw);
  return el;
};

const make_nodes = (view) => {
  const el = h("div", { class: "strip", role: "group", "aria-label": "Nodes" });
  const WORDS = { run: "running", bad: "failed", ok: "done", new: "starting", stopped: "stopped", lost: "unknown", warn: "unknown" };
  view.on("nodes", (nodes) => {
    el.hidden = !nodes.length;
    el.replaceChildren(...nodes.map((node) => h("div", { class: `nd ${colour_of(node.sign)}` }, h("b", { class: "cut", title: node.name }, node.name), state_word(node.sign, node.word),
      h("span", { class: "rk", role: "list", "aria-label": `Ranks of ${node.name}` }, node.ranks.map(([rank, sign]) => h("span", { class: colour_of(sign), role: "listitem", title: `rank ${rank}: ${WORDS[sign] ?? sign}`, "aria-label": `rank ${rank}: ${WORDS[sign] ?? sign}` },
        `${rank}`, sign === "run" || sign === "new" ? null : icon(STATES[sign] ?? "idle"))), node.hidden ? h("i", { role: "listitem" }, `and ${node.hidden} more`) : null),
      node.more ? h("span", { class: "more" }, node.more) : null)));
  });
  return el;
};

// ---- files: to the browser, or into a folder of the server
const save_blob = (blob, name) => { const url = URL.createObjectURL(blob), link = h("a", { href: url, download: name }); link.click(); setTimeout(() => URL.revokeObjectURL(url), 60000); };
const pull_file = async (view, file) => { // its bytes, in pieces
  const pieces = [];
  for (let offset = 0; offset < file.size || offset === 0; offset += file.chunk) {
    const text = atob(await view.call("piece", { id: file.id, offset })), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    pieces.push(bytes);
  }
  return new Blob(pieces, { type: "application/octet-stream" });
};
/** Returns a function that a page calls before it requests a file: only that page gets it once it is ready. */
const pull_when_ready = (view, what, fail) => {
  let has_asked = false;
  view.on("doing", async (doing) => {
    if (doing.what !== what || doing.is !== "ready" || !has_asked) return;
    has_asked = false;
    try { save_blob(await pull_file(view, doing.file), doing.file.name); await view.call("downloaded"); } catch (error) { fail(error.message); }
  });
  return () => { has_asked = true; };
};
/** A button, and the place where it asks for a folder. */
const make_saver = (view, word, what, act) => {
  const ask = h("div", { class: "asks" });
  const toggle = (is_open) => {
    const asked = is_open && ask_bar(view, `Folder on this server for the ${what}`, [["Save", async (folder) => { await act(folder); toggle(false); }]], () => toggle(false), { value: "." });
    replace_children(ask, [asked && asked.bar]); open.setAttribute("aria-expanded", is_open); (asked ? asked.input : open).focus();
  };
  const open = h("button", { type: "button", class: "b", "aria-expanded": "false", "data-asks": "1", onclick: () => { if (open.getAttribute("aria-disabled") !== "true") toggle(!ask.firstChild); } }, word);
  return { open, ask };
};
const DOING = { stop: "Stopping", restart: "Submitting the job again", save: "Saving the model", download: "Fetching the model", list: "Looking for the model", log: "Fetching the log" };
const busy_reason = (view) => (view.state.under_way ? `${DOING[view.state.under_way]} is under way` : "");

// ---- the logs: only visible rows are drawn
const make_log = (view, fail) => {
  let whose = "", least = 0, query = "", rows = [], hits = [], at = -1, is_following = true, has_seen = 0, is_planned = false, has_times = false, num_begun = 0;
  const logs = new Map(); // a source -> its parts, in order
  const arrived = []; // all parts, as they came
  const key_of = (item) => `${item.node}\n${item.source}`;
  const name_of = (key) => { const [node, source] = key.split("\n"); const rank = source === "setup" ? "setup" : `rank ${source}`; return node ? `${told_node(node)} ${rank}` : rank; };
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Source of the lines" }), refresh_tabs = roving(tabs);
  const select_of = (label, options, on_change) => h("select", { class: "in", "aria-label": label, onchange: (event) => on_change(event.target.value) }, options.map(([value, word]) => h("option", { value }, word)));
  const many = select_of("Source of the lines", [], (key) => choose(key));
  const level = select_of("Minimum level", [[0, "all levels"], [1, "info and up"], [2, "warnings and errors"], [3, "errors"]], (value) => { least = Number(value); draw_all(); });
  const search = h("input", { class: "in", type: "search", "aria-label": "Search the loaded lines", placeholder: "Search", oninput: () => { query = search.value.toLowerCase(); find(); },
    onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); event.stopPropagation(); walk(event.shiftKey ? -1 : 1); } } });
  const found = h("span", { class: "soft", role: "status" });
  const walkers = [["Previous match", "up", -1], ["Next match", "down", 1]].map(([word, sign, step]) => h("button", { type: "button", class: "b q ic", "aria-label": word, title: word, onclick: () => walk(step) }, icon(sign)));
  const space = h("div", { class: "space" }), port = h("div", { class: "lines", tabIndex: 0, role: "group", "aria-label": "Lines of the log" }, space);
  const count = h("span"), error = h("span", { class: "err", hidden: true });
  const back = view.button([icon("up"), "Earlier lines"], () => ask_back(), { cls: "q", on_error: (text) => { error.hidden = false; set_text(error, text); } });
  const follow = h("button", { type: "button", class: "b", "aria-pressed": "true", onclick: () => { is_following = !is_following; to_end(); } }, icon("get"), "Following");
  const whose_now = () => { const [node, source] = whose ? whose.split("\n") : ["", ""]; return { node, source }; };
  const pull = pull_when_ready(view, "log", fail), get = view.button([icon("get"), "Download the whole log"], async () => { pull(); await view.call("whole_log", { ...whose_now(), folder: null }); }, { cls: "q", on_error: fail });
  const saver = make_saver(view, "Save it on this server…", "log", (folder) => view.call("whole_log", { ...whose_now(), folder }));
  view.on("under_way", () => { disable(get, busy_reason(view)); disable(saver.open, busy_reason(view)); });
  const el = h("div", { class: "log" }, h("div", { class: "bar2" }, h("h4", {}, "Logs"), tabs, many, h("span", { class: "row push" }, level, h("span", { class: "search" }, icon("search"), search), found, walkers)),
    port, h("div", { class: "st2" }, count, h("span", { class: "row" }, get, saver.open), error, h("span", { class: "row push" }, back, follow)), saver.ask);

  const choose = (key) => { whose = key; is_following = true; for (const tab of tabs.children) tab.setAttribute("aria-selected", tab.dataset.key === key); many.value = key; draw_all(); };
  const draw_tabs = () => {
    const keys = [...logs.keys()].sort((a, b) => (a.endsWith("setup") ? -1 : b.endsWith("setup") ? 1 : Number(a.split("\n")[1]) - Number(b.split("\n")[1])));
    const shown = [["", "All"], ...keys.map((key) => [key, key.endsWith("setup") ? "setup" : key.split("\n")[1]])];
    tabs.hidden = shown.length > MOST_TABS + 1; many.hidden = !tabs.hidden;
    if (tabs.hidden) many.replaceChildren(...shown.map(([key, word]) => h("option", { value: key, selected: key === whose }, key ? name_of(key) : word)));
    else { replace_children(tabs, shown.map(([key, word]) => [...tabs.children].find((tab) => tab.dataset.key === key) ?? (() => { const tab = h("button", { type: "button", class: "b", role: "tab", "aria-selected": key === whose, "aria-label": key ? name_of(key) : "All", onclick: () => choose(key) }, word); tab.dataset.key = key; return tab; })())); refresh_tabs(); }
  };
  const trim = (parts) => { let number = parts.reduce((sum, part) => sum + part.lines.length, 0); while (number > MOST_ROWS && parts.length > 1) number -= parts.shift().lines.length; };
  const add = (items) => {
    let is_new = false;
    for (const item of items) {
      if (item.number <= has_seen) continue; // it was in the state that this page began with
      has_seen = item.number;
      const key = key_of(item);
      if (!logs.has(key)) { logs.set(key, []); is_new = true; }
      logs.get(key).push(item); trim(logs.get(key)); arrived.push(item);
    }
    trim(arrived);
    if (is_new) draw_tabs();
    draw_all();
  };
  const parts_now = () => (whose ? logs.get(whose) ?? [] : logs.size === 1 ? [...logs.values()][0] : arrived);
  const make_rows = () => {
    rows = []; has_times = false;
    const seen = new Set();
    for (const part of parts_now()) {
      const key = key_of(part);
      if ((part.skipped || part.is_cut) && (seen.has(key) || part.is_cut)) rows.push([key, 1, "… lines not shown here; the log has them", true, null]);
      seen.add(key);
      part.lines.forEach(([grade, text], i) => { if (grade >= least) { rows.push([key, grade, text, false, part.times[i]]); has_times ||= Boolean(part.times[i]); } });
    }
    const begun = (view.state.begun ?? []).filter((item) => (!whose || whose === key_of(item)) && item.lines[0][0] >= least);
    rows.push(...begun.map((item) => [key_of(item), ...item.lines[0], false, null])); num_begun = begun.length;
  };
  const take_begun = () => { for (const item of view.state.begun ?? []) if (!logs.has(key_of(item))) { logs.set(key_of(item), []); draw_tabs(); } draw_all(); };
  const draw_all = () => { if (is_planned) return; is_planned = true; requestAnimationFrame(() => { is_planned = false; make_rows(); find(true); space.style.height = `${rows.length * ROW_PX}px`; to_end(); draw_count(); }); };
  const draw_count = () => {
    const parts = parts_now(), first = parts[0], number = parts.reduce((sum, part) => sum + part.lines.length, num_begun);
    set_text(count, rows.length === number || !number ? count_of(number, "line") + (first?.begin > 0 ? ", earlier ones are in the log" : "") : `${grouped(rows.length)} of ${count_of(number, "line")}`);
    const is_one = Boolean(whose) || logs.size === 1;
    disable(back, !is_one ? "Choose a rank to read its earlier lines" : first?.begin > 0 ? "" : "This is the beginning of the log");
  };
  const marked = (text, is_current) => {
    if (!query) return [text];
    const parts = [], low = text.toLowerCase();
    if (low.length !== text.length) return [text];
    for (let from = 0; ;) { const hit = low.indexOf(query, from); if (hit < 0) return [...parts, text.slice(from)]; parts.push(text.slice(from, hit), h("mark", { class: is_current ? "at" : null }, text.slice(hit, hit + query.length))); from = hit + query.length; }
  };
  const draw = () => {
    if (!port.clientHeight) return;
    const from = Math.max(0, Math.floor(port.scrollTop / ROW_PX) - 5), to = Math.min(rows.length, from + Math.ceil(port.clientHeight / ROW_PX) + 10), is_all = !whose && logs.size > 1;
    if (!rows.length) { space.replaceChildren(h("p", { class: "soft none" }, parts_now().some((part) => part.lines.length) ? "No lines of this level" : view.state.no_lines)); return; }
    space.replaceChildren(...rows.slice(from, to).map(([key, grade, text, is_ours, time], i) => h("div", { class: `ln${grade === 3 ? " is-bad" : grade === 2 ? " is-warn" : ""}${is_ours ? " ours" : ""}`, style: `top:${(from + i) * ROW_PX}px` },
      has_times ? h("span", { class: "tm", title: time ? `printed ${time}` : "print time unknown" }, time?.slice(11) ?? "") : null, is_all ? h("span", { class: "who" }, name_of(key)) : null, h("span", { class: "lv" }, grade > 1 ? icon(grade === 3 ? "bad" : "warn") : null, is_ours ? "" : LEVELS[grade]), h("span", { class: "tx" }, marked(text, hits[at] === from + i)))));
  };
  const to_end = () => { follow.setAttribute("aria-pressed", is_following); if (is_following) port.scrollTop = port.scrollHeight; draw(); };
  const find = (keeps = false) => {
    hits = query ? rows.flatMap((row, i) => (row[2].toLowerCase().includes(query) ? [i] : [])) : [];
    at = keeps ? Math.min(at, hits.length - 1) : -1;
    if (!keeps && hits.length) { at = 0; show_hit(); } else draw();
    say_found(!keeps);
  };
  const say_found = (is_asked) => { found.setAttribute("aria-live", is_asked ? "polite" : "off"); set_text(found, query ? (hits.length ? `${at + 1} of ${hits.length}` : "no match") : ""); }; // a log that grows is silent
  const show_hit = () => { is_following = false; follow.setAttribute("aria-pressed", false); port.scrollTop = Math.max(0, hits[at] * ROW_PX - port.clientHeight / 2); draw(); };
  const walk = (step) => { if (!hits.length) return; at = (at + step + hits.length) % hits.length; show_hit(); say_found(true); };
  const ask_back = async () => { const first = parts_now()[0]; error.hidden = true; if (first) await view.call("earlier", { node: first.node, source: first.source, begin: first.begin }); };
  view.on("earlier", (said) => {
    const parts = logs.get(`${said.node}\n${said.source}`), first = parts?.[0];
    if (said.error) { error.hidden = false; set_text(error, said.error); return; }
    if (!first || first.begin !== said.before || !said.item) return; // the answer to another page
    const height = port.scrollHeight, top = port.scrollTop;
    parts.unshift(said.item); first.skipped = 0; is_following = false;
    make_rows(); find(true); space.style.height = `${rows.length * ROW_PX}px`; port.scrollTop = top + port.scrollHeight - height; follow.setAttribute("aria-pressed", false); draw(); draw_count();
  });
  let by_hand_until = 0; // a pointer that is down may hold the scroll bar for long
  for (const [kind, ms] of [["wheel", 1000], ["touchmove", 1000], ["keydown", 1000], ["pointerdown", 10_000]]) port.addEventListener(kind, () => { by_hand_until = performance.now() + ms; }, { passive: true });
  port.addEventListener("scroll", () => {
    if (!port.clientHeight) return; // it is hidden, for example while the theme changes
    const is_at_end = port.scrollTop + port.clientHeight >= port.scrollHeight - ROW_PX;
    if (!is_at_end && is_following && performance.now() > by_hand_until) { to_end(); return; } // the page has changed; the user did not scroll
    if (is_at_end !== is_following) { is_following = is_at_end; follow.setAttribute("aria-pressed", is_following); }
    draw();
  });
  port.addEventListener("keydown", (event) => {
    const to = { End: port.scrollHeight, Home: 0, PageDown: port.scrollTop + port.clientHeight, PageUp: port.scrollTop - port.clientHeight, ArrowDown: port.scrollTop + ROW_PX, ArrowUp: port.scrollTop - ROW_PX }[event.key];
    if (to === undefined) return;
    event.preventDefault(); event.stopPropagation(); port.scrollTop = to;
  });
  const seen = new ResizeObserver(to_end);
  seen.observe(port);
  draw_tabs(); add(view.state.log); view.on_added("log", add); view.on("begun", take_begun); view.on("no_lines", draw);
  return { el, show: () => { is_following = true; to_end(); }, end: () => seen.disconnect(), choose_source: (source) => { const key = [...logs.keys()].find((each) => each.split("\n")[1] === `${source}`); if (key) choose(key); } };
};

// ---- the model
const download_reason = (view) => { const model = view.state.model; return model?.files.length ? "" : model?.why ?? ""; };
const make_model = (view, fail) => {
  const name = h("b", { class: "cut" }), size = h("span", { class: "soft" }), where = h("div", { class: "mono soft cut" }), others = h("div", { class: "soft small others" }), why = h("span", { class: "why", id: `${view.id}-why` });
  const { open, ask } = make_saver(view, "Save on this server…", "model", (folder) => view.call("save", { folder })), pull = pull_when_ready(view, "download", fail);
  const get = view.button([icon("get"), "Download model"], async () => { pull(); await view.call("download", { index: 0 }); }, { cls: "go", on_error: fail });
  get.setAttribute("aria-describedby", why.id);
  const row = h("div", { class: "model" }, icon("file"), h("div", { class: "names" }, h("div", { class: "row" }, name, size), where, others), h("span", { class: "row" }, open), ask);
  const draw = () => {
    const model = view.state.model, file = model?.files[0], is_large = file && file.size > view.state.most_download;
    row.hidden = !file;
    const reason = !file ? model?.why ?? "" : is_large ? `${format_bytes(file.size)} is more than the ${format_bytes(view.state.most_download)} that can be downloaded through the notebook: save it on this server` : busy_reason(view);
    disable(open, file ? busy_reason(view) : "");
    set_text(why, reason); disable(get, reason);
    get.classList.toggle("go", Boolean(file) && !is_large && view.state.head.phase === "succeeded");
    open.classList.toggle("go", Boolean(is_large) && view.state.head.phase === "succeeded");
    if (!file) return;
    set_text(name, file.name); name.title = file.name; set_text(size, format_bytes(file.size));
    const parts = file.count > 1 ? `${count_of(file.count, "file")}${is_large ? "" : ", downloaded as one .zip"}` : "";
    set_text(where, [file.node, parts, model.count > file.count ? `and ${count_of(model.count - file.count, "more file")}, ${format_bytes(model.size)} in all` : ""].filter(Boolean).join(" · "));
    set_text(others, model.others ? `Other files: ${model.others}` : ""); others.hidden = !model.others;
  };
  view.on("model", draw); view.on("head", draw); view.on("under_way", draw);
  return { row, get, why };
};

const doing_line = (view) => {
  const said = h("div");
  const say = (shown) => { replace_children(said, [shown]); draw(); if (view.has_mounted && shown) view.announce(shown.textContent); }; // it changes with every MB
  const fail = (text) => say(note("bad", h("p", {}, text)));
  const cancel = view.button("Cancel", () => view.call("cancel"), { on_error: fail }), el = h("div", { class: "doing" }, said);
  const draw = () => { replace_children(el, [said, view.state.under_way && cancel]); el.hidden = !view.state.under_way && !said.firstChild; };
  view.on("doing", (doing) => {
    const name = DOING[doing.what] ?? doing.what, of = doing.total ? `, ${format_bytes(doing.done)} of ${format_bytes(doing.total)}` : doing.done ? `, ${format_bytes(doing.done)}` : "";
    const shown = { running: () => h("p", { class: "soft" }, `${name}${of}${doing.line ? `: ${doing.line}` : ""}`), ready: () => h("p", { class: "soft" }, "The browser is downloading the file"), failed: () => note("bad", h("p", {}, `${name}: ${doing.error}`)), cancelled: () => note("stopped", h("p", {}, `${name}: cancelled`)), done: () => doing.line && note("ok", h("p", {}, doing.line)) }[doing.is]?.();
    say(shown);
  });
  view.on("under_way", draw);
  return { el, fail };
};

// ---- all of it
function mount(view) {
  view.el.classList.add("dt-job"); // its styles are for it alone
  const id = view.state.head.id;
  const word = h("span", { class: "row" }), facts = h("span", { class: "soft" }), ask = h("div", { class: "sure" }), fail = h("div", { class: "fail" }), numbers = h("div", { class: "facts" }), hints = h("span", { class: "soft" });
  const { el: doing, fail: say_fault } = doing_line(view);
  const model = make_model(view, say_fault), log = make_log(view, say_fault), charts = make_charts(view), progress = make_progress(view), nodes = make_nodes(view);
  let received = 0, is_log_open = null, are_curves_open = null, had_curves = false;
  const has_curves = () => Object.values(view.state.curves ?? {}).some(Boolean);
  const stop = view.button([icon("stop"), "Stop"], async () => { if (seconds() >= view.state.long_s) sure(true); else await view.call("stop"); }, { cls: "danger", on_error: say_fault });
  const again_word = h("span"), again = view.button([icon("new"), again_word], () => view.call("restart"), { on_error: say_fault });
  const sure = (is_asked) => {
    replace_children(ask, is_asked ? [note("warn", h("p", {}, `The job has run for ${format_seconds(seconds())}. A stop ends its ranks; checkpoints and logs are kept.`), [
      view.button("Stop it", async () => { sure(false); await view.call("stop"); }, { cls: "danger", on_error: say_fault }), h("button", { type: "button", class: "b", onclick: () => { sure(false); stop.focus(); } }, "Keep it running")])] : []);
    ask.hidden = !is_asked; if (is_asked) ask.querySelector("button").focus();
  };
  ask.hidden = true;
  const seconds = () => (view.state.head.seconds === null ? 0 : view.state.head.seconds + (performance.now() - received) / 1000);
  const fold = (label, is_open, set) => h("button", { type: "button", class: "b", "aria-expanded": String(is_open), onclick: () => { set(!is_open); arrange(); foot.querySelectorAll("button")[label === "curves" ? 0 : foot.querySelectorAll("button").length - 1]?.focus(); } }, `${is_open ? "Hide" : "Show"} ${label}`);
  const head = h("div", { class: "head" }, h("h3", { class: "cut" }), h("span", { class: "mono soft cut id" }, id), word, facts, h("span", { class: "push row acts" }, model.why, model.get, again, stop));
  const foot = h("div", { class: "foot" });
  const tick = () => { const { seconds: since, facts: said } = view.state.head; set_text(facts, since === null ? said : format_seconds(seconds())); };
  const arrange = () => {
    const { phase } = view.state.head, curves_shown = are_curves_open ?? phase !== "failed", log_shown = is_log_open ?? (phase === "running" || phase === "stopped");
    again.hidden = phase === "running"; stop.hidden = phase !== "running";
    model.why.hidden = !["running", "succeeded"].includes(phase) && !(view.state.model?.files.length); model.get.hidden = (phase === "failed" || phase === "stopped") && !(view.state.model?.files.length);
    const can_fold = phase !== "running";
    had_curves = has_curves();
    replace_children(foot, can_fold ? [hints, h("span", { class: "push row" }, had_curves && fold("curves", curves_shown, (is_open) => { are_curves_open = is_open; }), fold("logs", log_shown, (is_open) => { is_log_open = is_open; }))] : []);
    foot.hidden = !can_fold; fail.hidden = phase !== "failed"; numbers.hidden = phase !== "succeeded" || !(view.state.facts?.length); charts.hidden = !curves_shown || (can_fold && !had_curves); log.el.hidden = !log_shown;
    const alerts = view.el.querySelectorAll(":scope > .note"); // of the view itself, at the top
    replace_children(view.el, [...alerts, ...{ running: [head, ask, doing, progress, nodes, charts, log.el], failed: [head, doing, fail, model.row, progress, nodes, charts, log.el, foot], stopped: [head, doing, model.row, progress, nodes, charts, log.el, foot], succeeded: [head, doing, model.row, numbers, charts, log.el, nodes, foot] }[phase]]);
    if (log_shown) log.show();
  };
  let phase_before = null;
  view.on("head", (now) => {
    if (now.id !== id) { view.begin_anew(); return; } // the job was submitted again: redraw everything
    received = performance.now();
    set_text(head.firstChild, now.name); head.firstChild.title = now.name;
    replace_children(word, [state_word(now.sign, now.word)]); tick();
    if (now.phase !== phase_before) { if (phase_before !== null) view.announce(`job ${now.name}: ${now.word}`); phase_before = now.phase; sure(false); arrange(); }
  });
  view.on("progress", (now) => {
    const last = now?.checkpoints.at(-1);
    set_text(again_word, view.state.saves_checkpoints && last !== undefined && view.state.head.phase !== "succeeded" ? `Restart from checkpoint ${grouped(last)}` : "Run again");
    set_text(hints, now ? `Curves and logs up to step ${grouped(now.step)} are kept` : "Its logs are kept");
  });
  view.on("failure", (now) => {
    again.classList.toggle("go", Boolean(now));
    if (!now) return;
    const whole = h("button", { type: "button", class: "b q", onclick: () => { is_log_open = true; arrange(); log.el.querySelector(".lines").focus(); } }, "Whole log");
    const copy = h("button", { type: "button", class: "b q", onclick: async () => { set_text(copied, (await copy_text(now.lines.map(([, text]) => text).join("\n"))) ? "Copied" : "Not copied: select the lines"); } }, icon("copy"), "Copy");
    const copied = h("span", { class: "soft small", role: "status" });
    replace_children(fail, [note("bad", [h("p", {}, h("b", {}, now.cause), `${now.at}.`), now.todo ? h("p", {}, h("b", {}, "To do: "), now.todo) : null].filter(Boolean)),
      now.lines.length ? h("div", { class: "row" }, h("h4", {}, now.whose), h("span", { class: "push row" }, copied, copy, whole)) : null,
      now.lines.length ? h("pre", { tabIndex: 0, role: "group", "aria-label": now.whose }, now.lines.flatMap(([grade, text], i) => [i ? "\n" : "", grade === 3 ? h("b", {}, text) : text])) : null]);
    requestAnimationFrame(() => { const last = fail.querySelector("pre"); if (last) last.scrollTop = last.scrollHeight; });
  });
  view.on("facts", (found) => { replace_children(numbers, (found ?? []).map((fact) => h("div", {}, h("span", {}, fact.title), fact.sign ? state_word(fact.sign, fact.value) : h("b", { class: "big" }, fact.bytes !== undefined ? format_bytes(fact.bytes) : fact.value)))); arrange(); });
  view.on("model", arrange); view.on("curves", () => { if (has_curves() !== had_curves) arrange(); });
  view.on("under_way", () => disable(again, busy_reason(view)));
  view.on("doing", ({ what, is }) => disable(stop, what === "stop" && is === "running" ? "Stopping is under way" : ""));
  arrange();
  const clock = setInterval(tick, 1000);
  return () => { clearInterval(clock); log.end(); };
}
