// Two runs side by side: what came out, then what differed.
"use strict";
{
  const { element, tableOf } = report;
  const main = document.getElementById("main");
  const OUTCOMES = [
    ["val_top1", "Validation top-1 (%)"], ["test_top1", "Test top-1 (%)"], ["val_loss", "Validation loss"],
    ["val_perplexity", "Validation perplexity"], ["test_loss", "Test loss"],
    ["step_s", "Step (ms)", 1000], ["samples_per_s", "Speed (samples/s)"], ["wire_bytes", "Bytes a worker sends a step"],
    ["round_bytes", "Bytes a worker sends a round"], ["messages", "Messages a step"], ["round_messages", "Messages a round"],
  ];
  // Where two runs differ in one of these, a difference of outcomes is not that of their methods alone.
  const PROTOCOL = ["task.name", "task.batch_size", "workers", "precision", "timing.mode", "train.epochs", "cluster.where", "cluster.link.name"];

  const section = (title, ...parts) => element("section", {}, element("h2", {}, title), ...parts);

  function outcomes(a, b) {
    const rows = OUTCOMES.filter(([name]) => name in a.outcomes || name in b.outcomes).map(([name, title, factor = 1]) => {
      const [x, y] = [a, b].map((run) => (name in run.outcomes ? factor * run.outcomes[name] : null));
      const both = x !== null && y !== null;
      const isTime = name === "step_s" || name === "samples_per_s";
      const simulated = [a, b].flatMap((run, at) => (isTime && run.simulated && name in run.outcomes ? ["AB"[at]] : []));
      return [title + (simulated.length ? `, simulated in ${simulated.join(" and ")}` : ""), x, y, both ? y - x : null, both && x ? y / x : null];
    });
    return rows.length ? tableOf(["Outcome", "A", "B", "B − A", "B / A"], rows) : element("p", {}, "Neither has an outcome.");
  }

  function differences(a, b, absent) {
    const names = [...new Set([...Object.keys(a), ...Object.keys(b)])].sort();
    const rows = names.filter((name) => a[name] !== b[name]).map((name) => [name, ...[a, b].map((run) => (name in run ? String(run[name] ?? "none") : absent))]);
    return rows.length
      ? tableOf(["Name", "A", "B"], rows)
      : element("p", {}, names.length ? `All ${names.length} are alike.` : "Nothing is recorded.");
  }

  function curves(a, b) {
    const both = (name) => [a, b].map((run, at) => ({ name: `${"AB"[at]}: ${run.label}`, x: run.curves?.step ?? [], y: run.curves?.[name] ?? [] }));
    const drawn = [charts.lines("Validation top-1 (%)", both("val_top1"), "Optimiser steps"), charts.lines("Validation loss", both("val_loss"), "Optimiser steps")].filter(Boolean);
    return drawn.length ? element("div", { class: "plots" }, ...drawn) : null;
  }

  function show([a, b], ids) {
    const differing = PROTOCOL.filter((name) => a.config[name] !== b.config[name]);
    const link = (run, id, letter) => element("p", {}, element("b", {}, `${letter}: `), element("a", { href: `run.html#${id}` }, run.label), " ", element("code", {}, run.run));
    main.replaceChildren(...[
      element("h1", {}, "Two runs side by side"),
      link(a, ids[0], "A"), link(b, ids[1], "B"),
      differing.length ? element("p", { class: "damage" }, `These two differ in ${differing.join(", ")}: what follows is not the difference of two methods alone.`) : null,
      section("What came out", outcomes(a, b), curves(a, b)),
      section("What was asked for", differences(a.config, b.config, "not set")),
      section("Where it was measured", differences(a.provenance, b.provenance, "not recorded")),
    ].filter(Boolean));
  }

  function open() {
    const found = report.address.get();
    const ids = ["a", "b"].map((name) => found.get(name) ?? "");
    Promise.all(ids.map(report.loadRun)).then((runs) => show(runs, ids), (error) => {
      main.replaceChildren(element("h1", {}, "Nothing to compare"), element("p", {}, error.message), element("p", {}, element("a", { href: "runs.html" }, "Tick two runs")));
    });
  }
  addEventListener("hashchange", open);
  open();
}
