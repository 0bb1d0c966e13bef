// Accuracy against bytes, of the runs of one setting at a time.
"use strict";
report.load("methods").then((settings) => {
  const { element, number, address } = report;
  const select = document.querySelector("form.filters select");
  const place = document.getElementById("points");
  select.append(...settings.map((setting, at) => element("option", { value: at }, setting.name)));

  function show() {
    const at = Math.max(0, settings.findIndex((setting) => setting.name === address.get().get("setting")));
    select.value = at;
    const points = settings[at].points.map((one) => ({
      x: one.bytes, y: one.top1, name: one.name, text: `${one.name}: ${number(one.top1)} %, ${number(one.bytes)} bytes`,
    }));
    const rows = settings[at].points.map((one) =>
      [one.name, one.top1, one.n > 1 ? `${number(one.low)} to ${number(one.high)}` : "one seed", one.bytes, one.lr, one.rates]);
    place.replaceChildren(charts.points(settings[at].name, points, "Bytes a worker sends a step", "Top-1 (%)"),
      report.tableOf(["Method", "Top-1 (%)", "Range of seeds", "Bytes a step", "Learning rate", "of so many"], rows));
  }

  select.addEventListener("input", () => {
    address.set({ setting: settings[Number(select.value)].name });
    show();
  });
  addEventListener("hashchange", show);
  if (settings.length) show();
  else place.replaceChildren(element("p", {}, "No stored run has an accuracy and bytes yet."));
});
