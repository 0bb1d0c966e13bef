// Filters over a table whose rows are in the page; the address keeps them.
"use strict";
{
  const [DECIDED, EVERY] = ["decided", "every"];
  const form = document.querySelector("form.filters");
  const rows = [...document.querySelector("table.sortable").tBodies[0].rows];
  const first = rows.some((row) => "decided" in row.dataset) ? DECIDED : EVERY; // what readers come for
  const fields = [...form.elements].filter((field) => field.name);

  function apply() {
    const { q, word } = form.elements;
    const words = q.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const meant = word.value === EVERY || (word.value === DECIDED ? "decided" in row.dataset : row.dataset.word === word.value);
      row.hidden = !(words.every((part) => text.includes(part)) && meant);
      shown += row.hidden ? 0 : 1;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length}`;
  }

  function restore() {
    const found = report.address.get();
    for (const field of fields) field.value = found.get(field.name) ?? (field.name === "word" ? first : "");
    apply();
  }

  form.addEventListener("input", () => {
    report.address.set(Object.fromEntries(fields.map((field) => [field.name, field.value])));
    apply();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", restore);
  restore();
}
