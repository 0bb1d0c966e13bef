// Drawings in SVG: lines over steps, a stacked bar, points. Colours and texts follow the page's style.
"use strict";
const charts = (() => {
  const { element, number } = report;
  const COLOURS = ["var(--series-0)", "var(--series-1)", "var(--series-2)", "var(--series-3)"];
  const MARGIN = { left: 56, right: 14, top: 10, bottom: 40 };

  // Round numbers between two ends, about so many.
  function ticks(low, high, about = 5) {
    const rough = (high - low || Math.abs(high) || 1) / about;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
    return found;
  }

  function powers(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
    }
    const inside = found.filter((tick) => tick >= low && tick <= high);
    return inside.length > 9 ? inside.filter((tick) => Number.isInteger(Math.log10(tick))) : inside;
  }

  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

  // Axes around an area, and how to place values in it.
  function frame(size, x, y) {
    const width = size.width - MARGIN.left - MARGIN.right;
    const height = size.height - MARGIN.top - MARGIN.bottom;
    const scale = (axis) => (axis.log ? Math.log10 : (value) => value);
    const share = (axis, value) => {
      const of = scale(axis);
      return (of(value) - of(axis.low)) / (of(axis.high) - of(axis.low) || 1);
    };
    const placeX = (value) => MARGIN.left + width * share(x, value);
    const placeY = (value) => MARGIN.top + height * (1 - share(y, value));
    const drawn = element("svg:svg", {
      viewBox: `0 0 ${size.width} ${size.height}`, class: "chart", role: "img", "aria-label": size.title,
    });
    for (const tick of ticks(y.low, y.high)) {
      drawn.append(
        element("svg:line", { class: "grid", x1: MARGIN.left, x2: size.width - MARGIN.right, y1: placeY(tick), y2: placeY(tick) }),
        element("svg:text", { x: MARGIN.left - 8, y: placeY(tick) + 4, "text-anchor": "end" }, short.format(tick)),
      );
    }
    for (const tick of x.log ? powers(x.low, x.high) : ticks(x.low, x.high)) {
      drawn.append(
        element("svg:line", { class: "axis", x1: placeX(tick), x2: placeX(tick), y1: size.height - MARGIN.bottom, y2: size.height - MARGIN.bottom + 4 }),
        element("svg:text", { x: placeX(tick), y: size.height - MARGIN.bottom + 17, "text-anchor": "middle" }, short.format(tick)),
      );
    }
    drawn.append(
      element("svg:line", { class: "axis", x1: MARGIN.left, x2: size.width - MARGIN.right, y1: size.height - MARGIN.bottom, y2: size.height - MARGIN.bottom }),
      element("svg:text", { class: "name", x: MARGIN.left + width / 2, y: size.height - 4, "text-anchor": "middle" }, x.name),
    );
    return { drawn, placeX, placeY };
  }

  function span(values, margin = 0.05) {
    const finite = values.filter((value) => Number.isFinite(value));
    const low = Math.min(...finite);
    const high = Math.max(...finite);
    const room = (high - low || Math.abs(high) || 1) * margin;
    return { low: low - room, high: high + room };
  }

  // series: [{name, x: [...], y: [...]}]; where a value is missing, the line has a gap.
  function lines(title, series, xName) {
    const known = series.filter((one) => one.y.some((value) => Number.isFinite(value)));
    if (!known.length) return null;
    const x = { ...span(known.flatMap((one) => one.x), 0), name: xName };
    const y = span(known.flatMap((one) => one.y));
    const { drawn, placeX, placeY } = frame({ width: 560, height: 260, title: `${title}; the numbers are below` }, x, y);
    known.forEach((one, place) => {
      let path = "";
      let pen = "M";
      one.y.forEach((value, at) => {
        if (Number.isFinite(value)) path += `${pen}${placeX(one.x[at]).toFixed(1)} ${placeY(value).toFixed(1)}`;
        pen = Number.isFinite(value) ? "L" : "M";
      });
      const line = element("svg:path", { class: `line dash-${place % 4}`, d: path });
      line.style.stroke = COLOURS[place % COLOURS.length];
      drawn.append(line);
    });
    return element("figure", { class: "plot" }, element("figcaption", {}, title), keys(known.map((one, place) => [one.name, COLOURS[place % COLOURS.length]])), drawn);
  }

  function keys(named) {
    return element("ul", { class: "keys" }, ...named.map(([name, colour]) => {
      const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      return element("li", {}, swatch, name);
    }));
  }

  // parts: [[name, value, colour]] of one bar.
  function stack(title, parts, unit) {
    const total = parts.reduce((sum, part) => sum + part[1], 0);
    const drawn = element("svg:svg", { viewBox: "0 0 1000 44", class: "chart stack", role: "img", preserveAspectRatio: "none", "aria-label": `${title}; the numbers are below` });
    let at = 0;
    for (const [name, value, colour] of parts) {
      const width = (1000 * value) / total;
      drawn.append(element("svg:rect", { x: at, y: 2, width, height: 40, fill: colour }, element("svg:title", {}, `${name}: ${number(value)} ${unit}`)));
      at += width;
    }
    return element("figure", { class: "plot" }, element("figcaption", {}, title), drawn);
  }

  const box = (left, top, width, height) => ({ left, top, right: left + width, bottom: top + height });

  // Where a name fits beside its point: right of it or left, else ever further up or down.
  function roomFor(x, y, width, taken, size) {
    const isFree = (left, top) => {
      const own = box(left, top, width, 13);
      return own.left > MARGIN.left && own.right < size.width && own.top > 0 && own.bottom < size.height - MARGIN.bottom &&
        !taken.some((other) => own.left < other.right && own.right > other.left && own.top < other.bottom && own.bottom > other.top);
    };
    for (let away = 0; away < 200; away += 5) {
      for (const top of [y - 7 + away, y - 7 - away]) {
        for (const left of [x + 7 + away / 3, x - 7 - away / 3 - width]) if (isFree(left, top)) return [left, top];
      }
    }
    return [x + 7, y - 7];
  }

  // points: [{x, y, name, text}], on a logarithmic axis.
  function points(title, all, xName, yName) {
    const xs = all.map((one) => one.x);
    const x = { low: Math.min(...xs) / 1.5, high: Math.max(...xs) * 1.5, log: true, name: xName };
    const y = span(all.map((one) => one.y), 0.08);
    const size = { width: 860, height: 520, title: `${title}; the numbers are below` };
    const { drawn, placeX, placeY } = frame(size, x, y);
    const taken = all.map((one) => box(placeX(one.x) - 4, placeY(one.y) - 4, 8, 8));
    for (const one of [...all].sort((a, b) => b.y - a.y)) {
      const [x, y] = [placeX(one.x), placeY(one.y)];
      const width = 6.7 * one.name.length;
      const [left, top] = roomFor(x, y, width, taken, size);
      taken.push(box(left, top, width, 13));
      const isFar = Math.abs(top + 7 - y) > 14;
      drawn.append(
        isFar ? element("svg:line", { class: "leader", x1: x, y1: y, x2: left > x ? left - 1 : left + width, y2: top + 7 }) : "",
        element("svg:circle", { class: "point", cx: x, cy: y, r: 3.5 }, element("svg:title", {}, one.text)),
        element("svg:text", left > x ? { class: "small", x: left, y: top + 11 } : { class: "small", x: left + width, y: top + 11, "text-anchor": "end" }, one.name),
      );
    }
    return element("figure", { class: "plot wide" }, element("figcaption", {}, `${yName} against ${xName.toLowerCase()}`),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Accuracy against bytes" }, drawn));
  }

  return { lines, stack, points, keys };
})();
