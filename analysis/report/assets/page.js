// What every page does: light and dark, tables that sort, the part of the address behind #.
"use strict";
const report = (() => {
  // An element with attributes and children; texts stay texts, whatever they hold.
  function element(name, attributes = {}, ...children) {
    const made = name.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) made.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  // The part of the address behind #, as names and values. Setting one leaves the page's history alone.
  const address = {
    get: () => new URLSearchParams(location.hash.slice(1)),
    set(changes) {
      const found = address.get();
      for (const [name, value] of Object.entries(changes)) {
        if (value) found.set(name, value);
        else found.delete(name);
      }
      history.replaceState(null, "", `#${found}`);
    },
  };

  // Three significant digits, of a whole number all, as in tables; a dash where there is nothing.
  function number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    return value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 3 });
  }

  const texts = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  // Smaller first; what is absent comes last, whichever way the order is.
  function compared(a, b, descending) {
    const absent = (value) => value === null || value === undefined || value === "";
    if (absent(a) || absent(b)) return absent(a) - absent(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : texts.compare(String(a), String(b));
    return descending ? -order : order;
  }

  // A button in each head of a table, which calls `sort(column, descending)`; returns how to show an order.
  function sortButtons(table, names, sort) {
    const heads = [...table.tHead.rows[0].cells];
    const order = { column: null, descending: false };
    heads.forEach((head, column) => {
      if (!names[column]) return;
      const button = element("button", { type: "button", class: "sort" }, ...head.childNodes);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        sort(column, order.column === column && !order.descending);
      });
    });
    return (column, descending) => {
      Object.assign(order, { column, descending });
      heads.forEach((head, at) => {
        if (at === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
    };
  }

  function cellValue(cell) {
    const plain = cell.dataset.value;
    return plain !== undefined ? Number(plain) : cell.textContent.trim();
  }

  // A table whose rows are in the page.
  function sortable(table, remember) {
    const names = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim().toLowerCase());
    const body = table.tBodies[0];
    const show = sortButtons(table, names, (column, descending) => {
      sort(column, descending);
      if (remember) address.set({ sort: names[column], down: descending ? "1" : "" });
    });
    function sort(column, descending) {
      const rows = [...body.rows].map((row) => [cellValue(row.cells[column]), row]);
      rows.sort((a, b) => compared(a[0], b[0], descending));
      body.append(...rows.map((pair) => pair[1]));
      show(column, descending);
    }
    return {
      restore() {
        const found = address.get();
        const column = names.indexOf(found.get("sort"));
        if (column >= 0) sort(column, found.get("down") === "1");
      },
    };
  }

  // Data are scripts, because a page that is read from the disk may fetch nothing else.
  const waiting = new Map();
  let loading = 0;
  function busy(change) {
    loading += change;
    document.getElementById("main").setAttribute("aria-busy", String(loading > 0));
  }
  function load(name) {
    busy(+1);
    const loaded = new Promise((resolve, reject) => {
      waiting.set(name.split("/").pop(), resolve);
      const script = element("script", { src: `../data/${name}.js` });
      script.addEventListener("error", () => reject(new Error(`There is no ${name} in this report.`)));
      document.head.append(script);
    });
    const done = () => setTimeout(() => busy(-1)); // once who waits for it has shown it
    loaded.then(done, done);
    return loaded;
  }
  function received(name, content) {
    waiting.get(name)?.(content);
  }
  const loadRun = (id) =>
    /^([0-9a-f]{16}|[0-9a-f]{12}(-[a-z0-9]+)*)$/.test(id) ? load(`run/${id}`) : Promise.reject(new Error("The address names no run."));

  // A table of texts, numbers and elements; null is a number that there is not.
  function tableOf(heads, rows, attributes = {}) {
    const isNumber = (content) => typeof content === "number" || content === null;
    const sides = heads.map((_, at) => (rows.length > 0 && rows.every((row) => isNumber(row[at])) ? "number" : null));
    const cell = (content, at) => element("td", { class: sides[at] }, isNumber(content) ? number(content) : content);
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": attributes.title ?? heads[0] },
      element("table", {},
        element("thead", {}, element("tr", {}, ...heads.map((head, at) => element("th", { scope: "col", class: sides[at] }, head)))),
        element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))))));
  }

  function themeButton() {
    const button = document.getElementById("theme");
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
    const show = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("theme", document.documentElement.dataset.theme);
      } catch {
        // then it holds for this page
      }
      show();
      dispatchEvent(new Event("theme"));
    });
    dark.addEventListener("change", show);
    show();
    button.hidden = false;
  }

  // Words that are typed on any page are looked for on the page of runs.
  const find = document.getElementById("find");
  find.addEventListener("submit", (event) => {
    event.preventDefault();
    location.href = `${find.dataset.up}pages/runs.html#${new URLSearchParams({ q: find.elements.words.value })}`;
  });
  find.hidden = false;

  // A report that was written again is read again, unless somebody is typing.
  const AGAIN_MS = 5000;
  let written = null;
  waiting.set("written", (at) => {
    if (written !== null && at !== written && document.activeElement?.tagName !== "INPUT") location.reload();
    written ??= at;
  });
  function look() {
    const script = element("script", { src: `${find.dataset.up}data/written.js?${Date.now()}` });
    for (const name of ["load", "error"]) script.addEventListener(name, () => script.remove()); // in mid-writing it is not there
    document.head.append(script);
  }
  look();
  setInterval(look, AGAIN_MS);

  themeButton();
  return { element, address, number, compared, sortButtons, sortable, load, loadRun, received, tableOf };
})();

for (const table of document.querySelectorAll("table.sortable")) {
  const remember = document.querySelector("form.filters") !== null;
  const sorted = report.sortable(table, remember);
  if (remember) {
    sorted.restore();
    addEventListener("hashchange", sorted.restore);
  }
}
