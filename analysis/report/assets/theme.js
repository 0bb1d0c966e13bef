// Before anything is painted: the reader's choice of light or dark, where there is one.
"use strict";
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // some browsers keep nothing for files
}
