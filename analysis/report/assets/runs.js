// The table of runs: filters, order, pages, and two to compare; and the figures that the same words find. The
// address keeps all of it.
"use strict";
Promise.all([report.load("runs"), report.load("figures")]).then(([columns, figures]) => {
  const { address, element, number } = report;
  const PAGE = 100;
  const SHOWN = [
    ["", null], ["Run", "label"], ["Top-1 (%)", "top1"], ["Loss", "loss"], ["Step (ms)", "step_ms"], ["Bytes a step", "wire_bytes"],
    ["Task", "task"], ["Workers", "workers"], ["Mode", "mode"], ["From", "origin"], ["Started", "started"],
  ];
  const NUMBERS = ["workers", "top1", "loss", "step_ms", "wire_bytes"];
  const count = columns.id.length;
  const every = Array.from({ length: count }, (_, at) => at);
  const texts = every.map((at) =>
    [columns.label, columns.drawn_as, columns.run, columns.task, columns.state, columns.origin, columns.mode, columns.items].map((column) => column[at]).join(" ").toLowerCase());
  const titles = new Map(figures);
  const titled = (item) => (titles.has(item) ? `${titles.get(item)} (${item})` : item);
  const form = document.querySelector("form.filters");
  const fields = [...form.elements].filter((field) => field.name);
  const table = document.getElementById("runs");
  const compare = document.getElementById("compare");
  table.tHead.append(element("tr", {}, ...SHOWN.map(([name, column]) =>
    element("th", { scope: "col", class: NUMBERS.includes(column) ? "number" : null }, name || element("span", { class: "hidden" }, "Compare")))));
  const showOrder = report.sortButtons(table, SHOWN.map((pair) => pair[1]), (column, descending) =>
    go({ sort: SHOWN[column][1], down: descending ? "1" : "", page: "" }));

  for (const field of fields.filter((one) => one.tagName === "SELECT")) {
    const column = columns[field.name === "item" ? "items" : field.name];
    const values = [...new Set(column.flat())].filter((value) => value !== null && value !== undefined).sort();
    field.append(...values.map((value) => element("option", { value: String(value) }, field.name === "item" ? titled(value) : String(value))));
  }

  function go(changes) {
    address.set(changes);
    show();
  }

  function picked() {
    return (address.get().get("pick") ?? "").split(",").filter((id) => columns.id.includes(id)).slice(-2);
  }

  const wordsOf = (found) => (found.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);

  function chosen(found) {
    const words = wordsOf(found);
    const equal = fields.map((field) => [field.name, found.get(field.name)]).filter(([name, value]) => name !== "q" && value);
    return every.filter((at) =>
      words.every((word) => texts[at].includes(word)) &&
      equal.every(([name, value]) => name === "item" ? columns.items[at].includes(value) : String(columns[name][at]) === value));
  }

  function show() {
    const found = address.get();
    for (const field of fields) field.value = found.get(field.name) ?? "";
    const rows = chosen(found);
    const column = found.get("sort");
    if (column in columns) {
      const down = found.get("down") === "1";
      rows.sort((a, b) => report.compared(columns[column][a], columns[column][b], down));
      showOrder(SHOWN.findIndex((pair) => pair[1] === column), down);
    }
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    const page = Math.min(pages, Math.max(1, Number.parseInt(found.get("page") ?? "1", 10) || 1));
    const two = picked();
    table.tBodies[0].replaceChildren(...rows.slice((page - 1) * PAGE, page * PAGE).map((at) => row(at, two)));
    form.querySelector("output").textContent = `${rows.length.toLocaleString("en")} of ${count.toLocaleString("en")}`;
    showFigures(wordsOf(found));
    showPages(page, pages);
    showTwo(two);
  }

  function showFigures(words) {
    const box = document.getElementById("figures");
    const hits = words.length ? figures.filter((figure) => words.every((word) => figure.join(" ").toLowerCase().includes(word))) : [];
    box.hidden = !hits.length;
    box.replaceChildren(`${hits.length} ${hits.length === 1 ? "figure" : "figures"}: `, ...hits.flatMap(([stem, title], at) =>
      [at ? "; " : "", element("a", { href: `item-${encodeURIComponent(stem)}.html` }, title)]));
  }

  function row(at, two) {
    const id = columns.id[at];
    const tick = element("input", { type: "checkbox", value: id, "aria-label": `Compare ${columns.label[at]}` });
    tick.checked = two.includes(id);
    const link = element("a", { href: `run.html#${id}`, title: columns.run[at] }, columns.label[at]);
    const time = columns.step_ms[at];
    const state = columns.state[at] === "done" ? null : element("span", { class: "word bad" }, columns.state[at]);
    return element("tr", {},
      element("td", {}, tick), element("td", { class: "label" }, link, " ", state), numeric(columns.top1[at]), numeric(columns.loss[at]),
      numeric(time, time !== null && columns.simulated[at] ? " simulated" : ""), numeric(columns.wire_bytes[at]),
      element("td", {}, columns.task[at] ?? ""), numeric(columns.workers[at]), element("td", {}, columns.mode[at] ?? ""),
      element("td", {}, columns.origin[at]), element("td", { class: "date" }, (columns.started[at] ?? "").slice(0, 10)));
  }

  function numeric(value, after = "") {
    return element("td", { class: "number" }, number(value) + after);
  }

  function showPages(page, pages) {
    const box = document.getElementById("pages");
    box.hidden = pages < 2;
    const button = (name, to) => {
      const made = element("button", { type: "button", disabled: to < 1 || to > pages }, name);
      made.addEventListener("click", () => { go({ page: String(to) }); table.scrollIntoView(); });
      return made;
    };
    box.replaceChildren(button("Previous", page - 1), element("span", {}, ` Page ${page} of ${pages} `), button("Next", page + 1));
  }

  function showTwo(two) {
    const labels = two.map((id) => columns.label[columns.id.indexOf(id)]);
    compare.querySelector("output").textContent = two.length === 0 ? "Tick two runs to compare them." : `Ticked: ${labels.join("  and  ")}`;
    const link = compare.querySelector("a");
    link.hidden = two.length !== 2;
    link.href = `compare.html#a=${two[0]}&b=${two[1]}`;
  }

  table.addEventListener("change", (event) => {
    const id = event.target.value;
    const rest = picked().filter((other) => other !== id);
    address.set({ pick: (event.target.checked ? [...rest, id].slice(-2) : rest).join(",") });
    const two = picked();
    for (const tick of table.querySelectorAll("input[type=checkbox]")) tick.checked = two.includes(tick.value);
    showTwo(two);
  });
  form.addEventListener("input", () => go({ ...Object.fromEntries(fields.map((field) => [field.name, field.value])), page: "" }));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", show);
  show();
});
