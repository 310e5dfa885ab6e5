// A plan: four numbers, bars of layers, a table of stages, the timeline of a step. The kernel computes all of it.

const BAR_PX = 4, ROOMY_PX = 26, NAME_PX = 24, STAGE_PX = 64, NODE_PX = 96, CUT_PX = 8, NUMBER_PX = 14, TIME_PX = 76, MEMORY_PX = 50, LANE_PX = 22, MANY_ROWS = 8, FEW_LANES = 16;
const hue = (stage) => `c${stage % 6}`;
const percent_of = (share) => `${+(100 * share).toFixed(3)}%`;
const UNITS = { time: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]], memory: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]] };
/** The size and the name of the unit for the largest value. */
const unit_for = (kind, most) => UNITS[kind].find(([size]) => most >= 0.9995 * size) ?? UNITS[kind].at(-1);
const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
const clamp = (number, most) => Math.max(0, Math.min(most, number));

/** A table, which scrolls if it is long; `rows` are `tr` elements. */
const table_of = (label, heads, rows, cls = "") => {
  const is_long = rows.length > MANY_ROWS;
  return h("div", { class: `rows ${is_long ? "long " : ""}${cls}`, role: is_long ? "region" : null, "aria-label": is_long ? label : null, tabIndex: is_long ? 0 : null },
    h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows)));
};
const bar_of = (share, cls = "") => h("span", { class: `bar ${cls}`, "aria-hidden": "true" }, h("i", { style: `width:${percent_of(clamp(share, 1))}` }));
const stage_name = (stage) => [h("span", { class: "sw", "aria-hidden": "true" }), h("b", {}, `stage ${stage}`)];

/** Call `draw(width)` now and whenever the width of `node` changes; returns a function that stops this. */
const on_width = (node, draw) => {
  let drawn = 0;
  const watcher = new ResizeObserver(() => { const width = Math.floor(node.clientWidth); if (width && width !== drawn) { drawn = width; draw(width); } });
  watcher.observe(node);
  return () => watcher.disconnect();
};

/** Make `node` a slider over items described in words: one Tab stop, arrows, Home and End. */
const make_slider = (node, { label, count, tell, more_keys = () => false }) => {
  let at = 0;
  const go = (to) => {
    at = clamp(to, count() - 1);
    for (const [name, value] of [["valuemin", 0], ["valuemax", count() - 1], ["valuenow", at], ["valuetext", tell(at)]]) node.setAttribute(`aria-${name}`, value);
  };
  for (const [name, value] of [["role", "slider"], ["aria-label", label]]) node.setAttribute(name, value);
  node.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, PageUp: at + 10, PageDown: at - 10, Home: 0, End: count() - 1 }[event.key];
    if (to === undefined ? !more_keys(event.key) : (go(to), false)) return;
    event.preventDefault(); event.stopPropagation();
  });
  return { go, at: () => at };
};

// ---- layers

/** Group neighbouring layers of a stage if bars would be too narrow: a bar is their mean. */
const group_layers = (layers, most) => {
  const size = Math.max(1, Math.ceil(layers.length / most)), groups = [];
  for (const layer of layers) {
    const last = groups.at(-1);
    if (last && last[0].stage === layer.stage && last.length < size) last.push(layer); else groups.push([layer]);
  }
  return groups;
};
const tell_group = (group) => (group.length === 1
  ? `${group[0].name}, stage ${group[0].stage}: ${group[0].time}; ${group[0].memory}: ${group[0].parts}`
  : `${group[0].name} to ${group.at(-1).name}, ${group.length} layers of stage ${group[0].stage}: together ${time_of(group.reduce((sum, each) => sum + each.time_s, 0))}, ${format_bytes(group.reduce((sum, each) => sum + each.memory_bytes, 0))}`);
const time_of = (seconds) => { const [size, unit] = unit_for("time", seconds); return `${short_number(seconds / size, 3)} ${unit}`; };

/** Narrow columns are whole pixels wide: rounded gaps would look like groups. */
const columns_for = (count, width) => (width / count >= ROOMY_PX ? `repeat(${count}, minmax(0, 1fr))` : `repeat(${count}, ${Math.max(1, Math.floor(width / count))}px)`);
const draw_bars = (plot, layers, groups, width) => {
  const [time_unit] = unit_for("time", Math.max(...layers.map((each) => each.time_s))), [memory_unit] = unit_for("memory", Math.max(...layers.map((each) => each.memory_bytes)));
  const most_s = Math.max(...layers.map((each) => each.time_s)) || 1, most_bytes = Math.max(...layers.map((each) => each.memory_bytes)) || 1;
  const is_roomy = width / groups.length >= ROOMY_PX, column_px = Math.floor(width / groups.length), every = is_roomy ? 1 : Math.ceil(NAME_PX / column_px);
  const has_room_for_cuts = width / new Set(layers.map((each) => each.stage)).size >= CUT_PX; // closer ones would cover the bars
  plot.style.gridTemplateColumns = columns_for(groups.length, width);
  plot.style.setProperty("--gap", is_roomy ? "3px" : column_px >= 8 ? "2px" : column_px >= 3 ? "1px" : "0px");
  plot.replaceChildren(...groups.map((group, i) => {
    const [time_s, state, all] = ["time_s", "state_bytes", "memory_bytes"].map((key) => mean(group.map((each) => each[key])));
    const is_cut = i > 0 && has_room_for_cuts && group[0].stage !== groups[i - 1][0].stage;
    const name = is_roomy || (i % every === 0 && group[0].short.length <= 4) ? group[0].short : "";
    return h("div", { class: `col ${hue(group[0].stage)}${is_cut ? " first" : ""}` },
      h("div", { class: "t" }, is_roomy ? short_number(time_s / time_unit, 3) : null, h("i", { style: `height:${Math.max(1, (TIME_PX * time_s) / most_s)}px` })),
      h("div", { class: "m" }, is_roomy ? short_number(all / memory_unit, 3) : null,
        h("i", { class: "act", style: `height:${(MEMORY_PX * (all - state)) / most_bytes}px` }), h("i", { class: "own", style: `height:${(MEMORY_PX * state) / most_bytes}px` })),
      h("div", { class: `n${is_roomy ? " cut" : ""}` }, name));
  }));
};
const draw_strip = (strip, stages, groups, width) => {
  strip.style.gridTemplateColumns = columns_for(groups.length, width);
  strip.replaceChildren(...stages.map((row) => {
    const span = groups.filter((group) => group[0].stage === row.stage).length, px = (width * span) / groups.length;
    const full = [h("b", {}, `stage ${row.stage}`), px >= NODE_PX ? ` ${row.node}` : null, h("br"), `${row.time} ${row.word}`];
    return h("div", { class: `${hue(row.stage)}${px < NUMBER_PX + 12 ? " thin" : ""}`, style: `grid-column: span ${span}`, title: `stage ${row.stage}, ${row.time}` },
      px >= STAGE_PX ? full : px >= NUMBER_PX ? h("b", {}, row.stage) : null);
  }));
};

const layer_bars = (layers, stages) => {
  const [, time_unit] = unit_for("time", Math.max(...layers.map((each) => each.time_s))), [, memory_unit] = unit_for("memory", Math.max(...layers.map((each) => each.memory_bytes)));
  const plot = h("div", { class: "plot", tabIndex: 0, "aria-orientation": "horizontal" }), strip = h("div", { class: "strip", "aria-hidden": "true" });
  const said = h("p", { class: "said" }), grouped_note = h("span", { class: "grouped" });
  let groups = group_layers(layers, layers.length);
  const show = (i) => { [...plot.children].forEach((column, at) => column.classList.toggle("at", at === i)); const told = tell_group(groups[i]); set_text(said, told); return told; };
  const slider = make_slider(plot, { label: "Layers", count: () => groups.length, tell: show });
  const column_at = (event) => [...plot.children].indexOf(event.target.closest(".col"));
  for (const kind of ["pointerover", "click"]) plot.addEventListener(kind, (event) => { const i = column_at(event); if (i >= 0) slider.go(i); });
  const end = on_width(plot, (width) => {
    groups = group_layers(layers, Math.floor(width / BAR_PX));
    draw_bars(plot, layers, groups, width); draw_strip(strip, stages, groups, width);
    const size = Math.max(...groups.map((group) => group.length));
    set_text(grouped_note, size > 1 ? `a bar is the mean of up to ${size} layers` : "");
    slider.go(slider.at());
  });
  slider.go(0);
  const labels = h("div", { class: "labels", "aria-hidden": "true" }, h("span", {}, "time", h("br"), time_unit), h("span", {}, "memory", h("br"), memory_unit), h("span", {}, "layer"));
  const key = h("div", { class: "key" }, h("span", {}, h("i", { class: "own c0" }), "parameters, gradients, optimizer"), h("span", {}, h("i", { class: "act c0" }), "activations"), grouped_note);
  return [h("div", {}, h("div", { class: "lay" }, labels, plot, h("span"), strip), said, key), end];
};

const layer_table = (layers) => table_of("Layers", ["Layer", "Stage", "Time", "Memory"], layers.map((each) => h("tr", { class: hue(each.stage) },
  h("td", {}, h("span", { class: "mono" }, each.name)), h("td", { class: "nowrap" }, stage_name(each.stage)), h("td", { class: "nowrap" }, each.time), h("td", {}, each.memory, " ", h("span", { class: "soft small" }, each.parts)))), "in");

const layer_part = (view) => {
  const { layers, stages } = view.state;
  const [bars, end] = layer_bars(layers, stages), table = layer_table(layers);
  table.hidden = true;
  const choices = [["Bars", bars], ["Table", table]].map(([word, shown], i, all) => h("button", { type: "button", class: "b", role: "radio", "aria-checked": i === 0 ? "true" : "false", onclick: (event) => {
    for (const [, other] of [["Bars", bars], ["Table", table]]) other.hidden = other !== shown;
    for (const each of event.currentTarget.parentNode.children) each.setAttribute("aria-checked", each === event.currentTarget ? "true" : "false");
  } }, word));
  const seg = h("span", { class: "push seg", role: "radiogroup", "aria-label": "Show layers as" }, choices);
  roving(seg, { on_move: (choice) => choice.click() });
  return [h("div", { class: "part" }, h("div", { class: "t" }, h("h4", {}, "Layers"), h("span", { class: "soft" }, "forward and backward of one microbatch; a dashed line is a cut"), seg), bars, table), end];
};

// ---- tables

const stage_table = (stages) => table_of("Stages", ["Stage", "Layers", "Time", "Memory", "Sends"], stages.map((row) => h("tr", { class: hue(row.stage) },
  h("td", { class: "nowrap" }, stage_name(row.stage), row.node ? h("span", { class: "soft" }, ` ${row.node}`) : null), h("td", {}, h("span", { class: "mono" }, row.layers)),
  h("td", {}, bar_of(row.time_share), h("span", { class: "nowrap" }, row.time), row.word ? h("b", {}, ` ${row.word}`) : null, row.link ? h("span", { class: "soft small" }, ` ${row.link}`) : null),
  h("td", {}, bar_of(row.memory_share), h("span", { class: "nowrap" }, row.memory), row.is_too_full ? [" ", state_word("bad", "does not fit")] : null), h("td", { class: "nowrap" }, row.sends))), "wide");
const rank_part = (ranks) => h("div", { class: "held" }, h("div", { class: "part" }, h("div", { class: "t" }, h("h4", {}, "Memory of ranks"), h("span", { class: "soft" }, "at the peak of a step, from a dry run"))), table_of("Memory of ranks, from a dry run", ["Ranks", "Stages", "Peak", "Made up of", "Peak in"], ranks.map((row) => h("tr", { class: hue(row.first_stage) },
  h("td", { class: "nowrap" }, h("span", { class: "sw", "aria-hidden": "true" }), h("b", {}, row.ranks)), h("td", { class: row.is_one_stage ? "nowrap" : null }, row.stages), h("td", { class: "nowrap" }, bar_of(row.share), row.total), h("td", { class: "small" }, row.parts), h("td", {}, row.phase))), "wide"));

// ---- timeline

const tell_pass = (lane, [kind, stage, microbatch, begin, end], kinds) => `${lane.name}: ${kinds[kind]} of microbatch ${microbatch}${lane.name === `stage ${stage}` ? "" : ` through stage ${stage}`}, ${time_of(begin)} to ${time_of(end)}`;
const KIND_CLASS = { F: "fwd", B: "bwd", I: "bwd", W: "wgt" };

/** A path for each stage and kind: thousands of passes are a few elements. */
const draw_passes = (lane, step_s) => {
  const shapes = new Map();
  for (const [kind, stage, , begin, end] of lane.passes) {
    const key = `${KIND_CLASS[kind]} ${hue(stage)}`, x = (1000 * begin) / step_s, wide = (1000 * (end - begin)) / step_s;
    shapes.set(key, `${shapes.get(key) ?? ""}M${x.toFixed(3)} 0h${wide.toFixed(3)}v${LANE_PX}h${(-wide).toFixed(3)}z`);
  }
  return s("svg", { viewBox: `0 0 1000 ${LANE_PX}`, preserveAspectRatio: "none", "aria-hidden": "true" }, [...shapes].map(([cls, d]) => s("path", { class: cls, d })));
};
const pass_labels = (lane, step_s, width) => lane.passes.filter(([, , , begin, end]) => (width * (end - begin)) / step_s >= NUMBER_PX).map(([kind, stage, microbatch, begin, end]) =>
  h("span", { class: `${KIND_CLASS[kind]} ${hue(stage)}`, "aria-hidden": "true", style: `left:${percent_of(begin / step_s)};width:${percent_of((end - begin) / step_s)}` }, microbatch));

const make_lane = (lane, line, kinds, said, walk) => {
  const marker = h("div", { class: "marker", hidden: true }), labels = h("div", { class: "texts" });
  const node = h("div", { class: "lane", tabIndex: -1 }, marker, labels);
  const show = (i) => {
    const [, , , begin, end] = lane.passes[i], told = tell_pass(lane, lane.passes[i], kinds);
    marker.hidden = false; marker.style.left = percent_of(begin / line.step_s); marker.style.width = percent_of((end - begin) / line.step_s);
    if (node.contains(document.activeElement) || node.matches(":hover")) set_text(said, told); else marker.hidden = true;
    return told;
  };
  const slider = make_slider(node, { label: `${lane.name}: ${lane.idle} idle`, count: () => lane.passes.length, tell: show, more_keys: (key) => walk(node, key) });
  const pass_at = (event) => { const box = node.getBoundingClientRect(), at_s = (line.step_s * (event.clientX - box.left)) / box.width; return lane.passes.findIndex(([, , , begin, end]) => begin <= at_s && at_s < end); };
  node.addEventListener("pointermove", (event) => { const i = pass_at(event); if (i >= 0 && i !== slider.at()) slider.go(i); else if (i >= 0) show(i); });
  node.addEventListener("focus", () => show(slider.at()));
  for (const kind of ["blur", "pointerleave"]) node.addEventListener(kind, () => { marker.hidden = node !== document.activeElement; });
  slider.go(0);
  const fill = (width) => { if (!node.querySelector("svg")) node.prepend(draw_passes(lane, line.step_s)); labels.replaceChildren(...pass_labels(lane, line.step_s, width)); };
  return { node, fill };
};

const lanes_of = (line, kinds, said) => {
  const names = [...new Set(line.lanes.flatMap((lane) => lane.passes.map(([kind]) => kind)))];
  const walk = (node, key) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[key], to = made[made.findIndex((each) => each.node === node) + (step ?? 0)]?.node;
    if (step === undefined) return false;
    if (to) { node.tabIndex = -1; to.tabIndex = 0; to.focus(); }
    return true;
  };
  const made = line.lanes.map((lane) => make_lane(lane, line, kinds, said, walk));
  made[0].node.tabIndex = 0;
  let width = 0;
  const fills = new Map(made.map(({ node, fill }) => [node, fill]));
  const sight = new IntersectionObserver((seen) => { for (const { target, isIntersecting } of seen) if (isIntersecting && width) fills.get(target)(width); });
  const box = h("div", { class: "lanes", role: "group", "aria-label": `Timeline: ${line.title}` }, line.lanes.flatMap((lane, i) =>
    [h("span", { class: "nm" }, lane.name), made[i].node, h("span", { class: "pc" }, `${lane.idle} idle`)]));
  const end_width = on_width(made[0].node, (now) => { width = now; for (const { node, fill } of made) if (made.length <= FEW_LANES) fill(now); else { sight.unobserve(node); sight.observe(node); } });
  const c = hue(0), key = h("div", { class: "key" }, h("span", {}, h("i", { class: `fwd ${c}` }), "forward (pale)"), h("span", {}, h("i", { class: `bwd ${c}` }), names.includes("I") ? "backward, for inputs (full)" : "backward (full)"),
    names.includes("W") ? h("span", {}, h("i", { class: `wgt ${c}` }), "backward, for weights (middle)") : null, h("span", {}, h("i", { class: "gap" }), "idle"), h("span", {}, "number: microbatch"));
  return [[box, key], () => { end_width(); sight.disconnect(); }];
};

const timeline_part = (view) => {
  const { timelines, kinds } = view.state;
  const said = h("p", { class: "said" }), place = h("div"), bubble = h("span", { class: "push" }), hint = "use the arrow keys or the pointer to read a pass";
  let end = () => {};
  const show = (i) => {
    const line = timelines[i];
    end();
    const [nodes, end_lanes] = lanes_of(line, kinds, said);
    end = end_lanes;
    place.replaceChildren(nodes[0], said, nodes[1]);
    set_text(said, hint);
    bubble.replaceChildren(h("b", {}, `bubble ${line.bubble}`), h("span", { class: "soft" }, ` of ${line.step}`));
  };
  const choice = timelines.length === 1 ? h("span", { class: "soft" }, timelines[0].title)
    : h("select", { class: "in", "aria-label": "Schedule", onchange: (event) => show(event.target.selectedIndex) },
      timelines.map((line, i) => h("option", {}, `${line.title}: bubble ${line.bubble}${i === 0 ? " (planned)" : ""}`)));
  show(0);
  return [h("div", { class: "part" }, h("div", { class: "t" }, h("h4", {}, "Timeline of one step"), choice, bubble), place), () => end()];
};

// ---- all of it

function mount(view) {
  const { facts, numbers, layers, stages, ranks, timelines, notes } = view.state, ends = [];
  const add = (made) => { const [node, end] = made; ends.push(end); return node; };
  view.el.classList.add("dt-plan");
  view.el.append(
    h("div", { class: "head" }, h("h3", {}, "Plan"), h("span", { class: "soft" }, facts.join(", "))),
    h("div", { class: "facts" }, numbers.map((each) => h("div", {}, h("span", { class: "what" }, each.label), h("b", { class: "big" }, each.value), " ",
      each.unit ? [h("span", { class: "soft" }, each.unit), " "] : null, each.state ? [state_word(each.state, each.word), " "] : null, h("span", { class: "soft" }, each.beside)))),
    ...[layers.length ? add(layer_part(view)) : null, stages.length ? stage_table(stages) : null, ranks.length ? rank_part(ranks) : null,
      timelines.length ? add(timeline_part(view)) : null].filter(Boolean),
    ...(notes.length ? [h("div", { class: "foot" }, h("ul", { "aria-label": "Notes" }, notes.map((each) => h("li", {}, each))))] : []));
  return () => ends.forEach((end) => end());
}
