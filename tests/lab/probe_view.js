function mount(view) {
  const count = h("b", { "aria-label": "Count" }), lines = h("ul", { "aria-label": "Lines" }), said = h("p", { "aria-label": "Said" });
  const add = (items) => lines.append(...items.map((item) => h("li", {}, item)));
  const tell = (text) => set_text(said, text);
  view.el.append(
    h("div", { class: "head" }, h("h3", {}, "Probe"), state_word("run", "running"), h("span", { class: "soft" }, "count "), count),
    h("div", { class: "tools" },
      view.button("Press", async () => tell(await view.call("press", { said: "hello" }))),
      view.button("Wrong", () => view.call("press", { said: 3 }), { on_error: tell }),
      view.button("More", () => view.call("press", { said: "a", more: 1 }), { on_error: tell }),
      view.button("Refused", () => view.call("fail", { number: 3 }), { on_error: tell }),
      view.button("Fault", () => view.call("fail", { number: 0 }), { on_error: tell }),
      view.button("None", () => view.call("nothing"), { on_error: tell }),
      view.button("Long", () => view.call("take_long"))),
    h("div", { class: "body" }, note("bad", h("p", {}, "a note <b>as text</b>")), lines, said));
  view.on("count", (value) => set_text(count, value));
  view.on("work", (work) => tell(`${work.what} ${work.is}`));
  view.on_added("lines", add);
  add(view.state.lines);
}
