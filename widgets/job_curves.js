// The curves of a job, over one axis of steps.
const SMOOTH = 0.9, KEPT_RAW = 20, LABEL_GAP_PX = 6;

const smooth = (points) => { // an exponential moving average with bias correction
  let mean = 0, weight = 0;
  return points.map(([step, value]) => {
    if (value === null) return [step, null];
    mean = SMOOTH * mean + (1 - SMOOTH) * value; weight = SMOOTH * weight + (1 - SMOOTH);
    return [step, mean / weight];
  });
};
const nice_range = (values) => {
  let low = Math.min(...values), high = Math.max(...values);
  if (!Number.isFinite(low)) return [0, 1];
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  const size = 10 ** Math.floor(Math.log10(high - low)), unit = [0.1, 0.2, 0.25, 0.5, 1, 2, 5].map((each) => each * size).find((each) => (high - low) / each <= 8) ?? size;
  return [Math.floor(low / unit + 1e-9) * unit, Math.ceil(high / unit - 1e-9) * unit];
};
const value_text = (value) => (typeof value === "number" ? short_number(value) : "no number");
const nearest = (points, step) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] < step) low = middle; else high = middle; }
  return points.length === 0 ? null : Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
};
const line_through = (points, place) => { // nan and inf are left out
  const places = points.filter(([, value]) => value !== null).map(place);
  return (places.length === 1 ? [places[0], places[0]] : places).map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" ");
};

/** Curves over one axis of steps. `lines()` gives [{word, points, kind}], `kind` being smooth, plain or dashed. */
const make_chart = (title, unit, height, shared, num_ticks, is_from_zero = false) => {
  const big = h("span", { class: "big" }), bad = h("span"), keys = h("span", { class: "row" }), ys = h("div", { class: "y", "aria-hidden": "true" }), xs = h("div", { class: "x", "aria-hidden": "true" });
  const svg = s("svg", { class: "plot", viewBox: "0 0 100 100", preserveAspectRatio: "none", style: `height:${height}px`, "aria-hidden": "true" });
  const words = h("span", {}), cross = h("div", { class: "cross", hidden: true }, words);
  const plot = h("div", { class: "p", role: "slider", tabIndex: 0, "aria-label": `${title} by step`, "aria-valuemin": 0 }, svg, cross);
  const unit_word = h("span", { class: "soft small" }, unit);
  const el = h("div", { class: "ch" }, h("div", { class: "t" }, h("h4", {}, title), unit_word, keys, bad, big), h("div", { class: "plotbox" }, ys, plot, xs));
  let lines = [], is_own = false;
  const show_cross = () => {
    const at = shared.step, found = at === null ? [] : lines.map((line) => [line.word, nearest(line.points, at)]).filter(([, point]) => point);
    cross.hidden = !found.length;
    if (!found.length) return;
    const share = Math.min(1, found[0][1][0] / (shared.end() || 1));
    cross.style.left = `${100 * share}%`;
    words.hidden = !is_own;
    const values = found.map(([word, [, value]]) => `${word} ${value_text(value)}`), said = values.join(", ");
    words.replaceChildren(h("b", {}, `step ${grouped(found[0][1][0])}`), h("br"), values.join("  "));
    const left = share * plot.clientWidth, is_right = left + LABEL_GAP_PX + words.offsetWidth <= plot.clientWidth;
    words.style.left = `${Math.max(-left, is_right ? LABEL_GAP_PX : -LABEL_GAP_PX - words.offsetWidth)}px`; // inside the plot
    plot.setAttribute("aria-valuenow", found[0][1][0]); plot.setAttribute("aria-valuetext", `step ${grouped(found[0][1][0])}, ${said}`);
  };
  const move_to = (step) => { shared.move(step === null ? null : Math.max(0, Math.min(shared.end(), step))); };
  shared.listeners.push(show_cross);
  plot.addEventListener("pointermove", (event) => { const box = plot.getBoundingClientRect(); is_own = true; move_to(((event.clientX - box.left) / box.width) * shared.end()); });
  plot.addEventListener("pointerleave", () => { is_own = false; move_to(null); });
  plot.addEventListener("blur", () => { is_own = false; move_to(null); });
  plot.addEventListener("keydown", (event) => {
    const points = lines[0]?.points ?? [], at = shared.step === null ? points.length - 1 : points.indexOf(nearest(points, shared.step)), jump = Math.max(1, Math.round(points.length / 10));
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - jump, PageUp: at + jump, Home: 0, End: points.length - 1 }[event.key];
    if (event.key === "Escape") { is_own = false; move_to(null); }
    if (to === undefined || !points.length) return;
    event.preventDefault(); event.stopPropagation();
    is_own = true; move_to(points[Math.max(0, Math.min(points.length - 1, to))][0]);
  });
  const draw = (wanted, last, unit_now) => {
    lines = wanted;
    const warnings = lines.filter((line) => line.warning).map((line) => (lines.length > 1 ? `${line.word}: ${line.warning}` : line.warning));
    set_text(big, last ?? ""); replace_children(bad, warnings.length ? [state_word("warn", warnings.join("; "))] : []); set_text(unit_word, unit_now ?? unit);
    const drawn = lines.flatMap((line) => line.kind === "smooth" && line.points.length > KEPT_RAW ? [{ ...line, kind: "raw" }, { ...line, points: smooth(line.points), kind: "plain" }] : [{ ...line, kind: line.kind === "smooth" ? "plain" : line.kind }]);
    const values = drawn.flatMap((line) => line.points.map(([, value]) => value)).filter((value) => value !== null);
    if (is_from_zero) values.push(0);
    const [low, high] = nice_range(values), end = shared.end() || 1;
    const place = ([step, value]) => [(100 * step) / end, 100 - (100 * (value - low)) / (high - low)];
    svg.replaceChildren(s("path", { class: "g", d: "M0 0H100M0 50H100" }), s("path", { class: "a", d: "M0 100H100" }),
      ...drawn.map((line) => s("polyline", { class: { raw: "raw", plain: "c", dashed: "v" }[line.kind], points: line_through(line.points, place) })));
    replace_children(keys, lines.length > 1 ? lines.map((line) => h("span", { class: line.kind === "dashed" ? "k d is-wait" : "k is-run" }, h("i"), line.word)) : []);
    ys.replaceChildren(...(num_ticks > 3 ? [high, (high + low) / 2, low] : [high, low]).map((value) => h("span", {}, short_number(value, 3))));
    xs.replaceChildren(...Array.from({ length: num_ticks }, (_, i) => h("span", {}, axis_step((end * i) / (num_ticks - 1)), i === num_ticks - 1 && num_ticks > 3 ? " steps" : null)));
    plot.setAttribute("aria-valuemax", Math.round(end));
    const first = lines[0]?.points.at(-1);
    if (!is_own) { plot.setAttribute("aria-valuenow", first ? first[0] : 0); plot.setAttribute("aria-valuetext", first ? `${value_text(first[1])} at step ${grouped(first[0])}, the last one` : "nothing was logged yet"); }
    show_cross();
  };
  return { el, draw };
};
const axis_step = (step) => (step >= 1e6 ? short_number(step) : grouped(step));

const make_charts = (view) => {
  const shared = { step: null, listeners: [], end: () => Math.max(view.state.progress?.total ?? 0, view.state.progress?.step ?? 0), move(step) { if (step !== this.step || step === null) { this.step = step; for (const f of this.listeners) f(); } } };
  const loss = make_chart("Loss", "", 148, shared, 5), rate = make_chart("Learning rate", "", 44, shared, 3, true), speed = make_chart("Throughput", "", 44, shared, 3, true);
  const empty = h("p", { class: "soft none" }, "Nothing was logged yet. A Trainer logs automatically; a script calls ", h("code", {}, "detrain_nb.log_metrics(step, loss=loss, lr=lr)"), ".");
  const side = h("div", { class: "side" }, rate.el, speed.el);
  const el = h("div", { class: "charts" });
  const draw = () => {
    const { loss: train, validation, learning_rate, rate: pace } = view.state.curves ?? {};
    const series = [train && { word: validation ? "train" : train.name, points: train.points, kind: "smooth", warning: train.warning }, validation && { word: "validation", points: validation.points, kind: "dashed", warning: validation.warning }].filter(Boolean);
    replace_children(el, train || validation || learning_rate || pace ? [loss.el, side] : [empty]);
    loss.draw(series, (train ?? validation)?.last);
    rate.el.hidden = !learning_rate; if (learning_rate) rate.draw([{ word: learning_rate.name, points: learning_rate.points, kind: "plain", warning: learning_rate.warning }], learning_rate.last);
    speed.el.hidden = !pace; if (pace) speed.draw([{ word: pace.name, points: pace.points, kind: "plain" }], pace.last, pace.name);
  };
  view.on("curves", draw); view.on("progress", draw);
  return el;
};
