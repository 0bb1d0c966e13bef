// Filters over the rows of all cells; without scripts all are shown. The address keeps them.
"use strict";
{
  const form = document.querySelector("form.filters");
  const rows = [...document.querySelector("table.cells").tBodies[0].rows];
  const fields = [...form.querySelectorAll("select")];
  form.hidden = false;

  function apply() {
    let shown = 0;
    for (const row of rows) {
      row.hidden = !fields.every((field) => !field.value || row.dataset[field.name] === field.value);
      shown += row.hidden ? 0 : 1;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length}`;
  }

  const asked = new URLSearchParams(location.hash.slice(1));
  for (const field of fields) field.value = asked.get(field.name) ?? "";
  form.addEventListener("input", () => {
    const chosen = fields.filter((field) => field.value).map((field) => [field.name, field.value]);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
    apply();
  });
  apply();
}
