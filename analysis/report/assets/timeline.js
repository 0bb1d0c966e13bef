// One step of a run, every rank a lane: Ctrl with the wheel, drag and keys zoom and move.
"use strict";
function timeline(steps, looks) {
  const { element, number } = report;
  const LANE = 36;
  const LEFT = 68;
  const LEAST_MS = 0.001; // no span is recorded more exactly
  let drawnStep = steps[0];
  let whole = { from: 0, to: 1 };
  let view = whole;
  let ranks = [];

  const svg = element("svg:svg", { class: "timeline", tabindex: "0", role: "application", "aria-label": "Timeline of one step", "aria-describedby": "timeline-help" });
  const told = element("output", { class: "told", "aria-live": "polite" });
  const select = element("select", {}, ...steps.map((step, at) =>
    element("option", { value: at }, `${step.step}${at === 0 ? " (nearest to the median)" : ""}`)));
  const button = (name, title, act) => {
    const made = element("button", { type: "button", title, "aria-label": title }, name);
    made.addEventListener("click", act);
    return made;
  };
  const middle = () => (view.from + view.to) / 2;
  const bar = element("p", { class: "bar" }, element("label", {}, "Step ", select),
    button("+", "Zoom in", () => zoom(0.5, middle())), button("−", "Zoom out", () => zoom(2, middle())),
    button("Whole step", "Show the whole step", () => look(whole)), told);
  const help = element("p", { class: "note", id: "timeline-help" }, "Ctrl with the wheel, or + and −, zoom, dragging or the arrow keys move, 0 shows the whole step.");

  const width = () => Math.max(240, svg.clientWidth || 800) - LEFT - 8;
  const place = (ms) => LEFT + (width() * (ms - view.from)) / (view.to - view.from);
  const timeAt = (x) => view.from + ((x - LEFT) / width()) * (view.to - view.from);

  function choose(at) {
    drawnStep = steps[at];
    ranks = [...new Set(drawnStep.spans.map((span) => span[0]))].sort((a, b) => a - b);
    whole = { from: 0, to: Math.max(...drawnStep.spans.map((span) => span[2] + span[3])) * 1.005 };
    svg.style.height = `${LANE * ranks.length + 36}px`;
    look(whole);
  }

  // Show from one time to another, within the step.
  function look(next) {
    const length = Math.min(Math.max(next.to - next.from, LEAST_MS), whole.to);
    const from = Math.min(Math.max(next.from, 0), whole.to - length);
    view = { from, to: from + length };
    svg.dataset.from = view.from.toFixed(4);
    svg.dataset.to = view.to.toFixed(4);
    draw();
  }

  function zoom(factor, around) {
    look({ from: around - (around - view.from) * factor, to: around + (view.to - around) * factor });
  }

  const move = (share) => look({ from: view.from + share * (view.to - view.from), to: view.to + share * (view.to - view.from) });

  function draw() {
    const right = LEFT + width();
    const parts = [];
    const step = 10 ** Math.floor(Math.log10((view.to - view.from) / 3));
    const every = [1, 2, 5].find((factor) => (view.to - view.from) / (factor * step) <= (width() > 500 ? 9 : 5)) * step || step * 10;
    const bottom = LANE * ranks.length + 8;
    for (let at = Math.ceil(view.from / every) * every; at <= view.to; at += every) {
      const x = place(at);
      parts.push(element("svg:line", { class: "grid", x1: x, x2: x, y1: 0, y2: bottom }),
        element("svg:text", { x, y: bottom + 16, "text-anchor": "middle" }, `${Number(at.toPrecision(6))} ms`));
    }
    for (const [rank, phase, start, took] of drawnStep.spans) {
      if (start + took < view.from || start > view.to) continue;
      const [from, to] = [Math.max(place(start), LEFT), Math.min(place(start + took), right)];
      const y = ranks.indexOf(rank) * LANE + 8;
      const [name, colour, ink] = looks[phase] ?? [phase, "#888888", "#ffffff"];
      const words = `rank ${rank}: ${name}, ${number(took)} ms, from ${number(start)} ms`;
      const rect = element("svg:rect", { class: "span", x: from, y, width: Math.max(to - from, 0.75), height: LANE - 8, fill: colour, "data-phase": phase, "data-words": words },
        element("svg:title", {}, words));
      parts.push(rect);
      const text = `${name} ${number(took)}`;
      if (to - from > 6.5 * text.length) {
        const inside = element("svg:text", { class: "in", x: (from + to) / 2, y: y + 18, "text-anchor": "middle" }, text);
        inside.style.fill = ink;
        parts.push(inside);
      }
    }
    ranks.forEach((rank, at) => parts.push(element("svg:text", { class: "name", x: 10, y: at * LANE + 26 }, `rank ${rank}`)));
    svg.replaceChildren(...parts);
  }

  const inside = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(inside(event)));
  }, { passive: false });
  let grabbed = null;
  svg.addEventListener("pointerdown", (event) => {
    told.textContent = event.target.dataset.words ?? "";
    grabbed = { x: event.clientX, view };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (grabbed) {
      const moved = ((event.clientX - grabbed.x) / width()) * (grabbed.view.to - grabbed.view.from);
      look({ from: grabbed.view.from - moved, to: grabbed.view.to - moved });
    } else if (event.target.dataset.words) told.textContent = event.target.dataset.words;
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { grabbed = null; });
  const keys = {
    "+": () => zoom(0.5, middle()), "=": () => zoom(0.5, middle()), "-": () => zoom(2, middle()),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => look(whole), Home: () => look(whole),
  };
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  select.addEventListener("change", () => choose(Number(select.value)));
  new ResizeObserver(draw).observe(svg);
  choose(0);
  return element("div", {}, bar, svg, help);
}
