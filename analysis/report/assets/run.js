// The page of one run, which the address names behind #.
"use strict";
{
  const { element, number, tableOf } = report;
  const main = document.getElementById("main");
  const OUTCOMES = [
    ["val_top1", "Validation top-1", "%"], ["test_top1", "Test top-1", "%"], ["val_loss", "Validation loss", ""],
    ["val_perplexity", "Validation perplexity", ""], ["test_loss", "Test loss", ""], ["train_loss", "Training loss", ""],
    ["step_s", "Step, mean of the slowest rank", "ms", 1000], ["samples_per_s", "Speed", "samples/s"], ["wire_bytes", "Bytes a worker sends a step", "B"],
    ["round_bytes", "Bytes a worker sends a round", "B"], ["messages", "Messages a step", ""], ["round_messages", "Messages a round", ""],
    ["sent_density", "Density sent", ""], ["update_density", "Density of the update", ""], ["took_s", "Took", "s"],
  ];

  const section = (title, ...parts) => element("section", {}, element("h2", {}, title), ...parts);
  const facts = (content) => tableOf(["Name", "Value"], Object.entries(content).map(([name, value]) => [name, String(value ?? "none")]));

  function outcomes(run) {
    const rows = OUTCOMES.filter(([name]) => name in run.outcomes).map(([name, title, unit, factor = 1]) =>
      [title, factor * run.outcomes[name], unit + (run.simulated && (name === "step_s" || name === "samples_per_s") ? " (simulated)" : "")]);
    return rows.length ? section("Outcome", tableOf(["Quantity", "Value", "Unit"], rows)) : null;
  }

  function curves(run) {
    const found = run.curves ?? {};
    const of = (name, title) => ({ name: title, x: found.step ?? [], y: found[name] ?? [] });
    const steps = run.steps ?? {};
    const drawn = [
      charts.lines("Accuracy (%)", [of("val_top1", "validation top-1"), of("val_top5", "validation top-5")], "Optimiser steps"),
      charts.lines("Loss", [of("val_loss", "validation"), of("train_loss", "training")], "Optimiser steps"),
      found.step ? null : charts.lines("Loss on rank 0", [{ name: "training", x: steps.step ?? [], y: steps.loss ?? [] }], "Optimiser steps"),
      charts.lines("Time of a step (ms)", [{ name: "slowest rank", x: steps.step ?? [], y: steps.step_ms ?? [] }], "Optimiser steps"),
    ].filter(Boolean);
    if (!drawn.length) return null;
    const names = Object.keys(found);
    const numbers = names.length
      ? element("details", {}, element("summary", {}, "The numbers of every epoch"), tableOf(names.map((name) => name.replaceAll("_", " ")), found[names[0]].map((_, at) => names.map((name) => found[name][at]))))
      : null;
    return section("Curves", element("div", { class: "plots" }, ...drawn), numbers);
  }

  function phases(run, looks) {
    const parts = Object.entries(run.phases ?? {}).map(([phase, ms]) => [...(looks[phase] ?? [phase, "#888888"]).slice(0, 2), ms]);
    if (!parts.length) return null;
    const total = parts.reduce((sum, part) => sum + part[2], 0);
    const rows = parts.map(([name, colour, ms]) => {
      const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      return [element("span", {}, swatch, name), ms, (100 * ms) / total];
    });
    return section("Phases", charts.stack("Mean of ranks and warm steps", parts.map(([name, colour, ms]) => [name, ms, colour]), "ms"),
      tableOf(["Phase", `Mean (ms${run.simulated ? ", simulated" : ""})`, "Share (%)"], rows));
  }

  function logs(run) {
    return (run.logs ?? []).length
      ? section("The end of its logs", ...run.logs.flatMap((log) => [element("h3", {}, log.name), element("pre", { tabindex: "0" }, log.lines.join("\n"))]))
      : null;
  }

  function show([run, looks, figures]) {
    const titles = new Map(figures);
    document.title = `${run.label}: a run`;
    const state = element("span", { class: `word ${run.state === "done" ? "plain" : "bad"}` }, run.state);
    const items = run.items.flatMap((item, at) => [at ? ", " : "Drawn in ", element("a", { href: `item-${encodeURIComponent(item)}.html` }, titles.get(item) ?? item)]);
    const name = run.variant ? `${run.run}, variant ${run.variant}` : run.run;
    main.replaceChildren(...[
      element("h1", {}, run.label),
      element("p", { class: "lead" }, element("code", {}, name), run.origin === "shipped" ? ", shipped with the repository " : ", of this machine ", state),
      run.why ? element("p", { class: "damage" }, run.why) : null,
      items.length ? element("p", {}, ...items) : null,
      outcomes(run), logs(run), curves(run), phases(run, looks),
      run.timeline?.length ? section(`Timeline${run.simulated ? " (simulated communication)" : ""}`, timeline(run.timeline, looks)) : null,
      element("div", { class: "sides" },
        Object.keys(run.config).length ? section("What was asked for", facts(run.config)) : null,
        Object.keys(run.provenance).length ? section("Where it was measured", facts(run.provenance)) : null),
      run.commands.length ? section("On the command line", element("pre", { tabindex: "0" }, element("code", {}, run.commands.join("\n")))) : null,
    ].filter(Boolean));
  }

  function open() {
    Promise.all([report.loadRun(location.hash.slice(1)), report.load("looks"), report.load("figures")]).then(show, (error) => {
      main.replaceChildren(element("h1", {}, "No such run"), element("p", {}, error.message), element("p", {}, element("a", { href: "runs.html" }, "All runs")));
    });
  }
  addEventListener("hashchange", open);
  open();
}
