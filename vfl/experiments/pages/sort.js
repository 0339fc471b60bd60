"use strict";
// Sorts a table by the column whose heading is pressed, filters its rows by words, and shows one of
// several tables; without it all are shown.
const number = text => {
  const found = text.replace(/[,\u00a0]/g, "").match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/i);
  return found ? parseFloat(found[0]) : null;
};
const compare = (one, other) => {
  const [x, y] = [number(one), number(other)];
  if (x !== null && y !== null) return x - y;
  if (x !== null || y !== null) return x === null ? 1 : -1;
  return one.localeCompare(other);
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.title = "sort by this column";
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach(one => one.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = row => row.cells[place].textContent.trim();
      const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(text(a), text(b)));
      body.replaceChildren(...rows);
    });
  });
  if (body.rows.length < 6) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "only rows with these words";
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
  table.before(field);
}
for (const group of document.querySelectorAll(".choices")) {
  const tables = [...group.children], label = document.createElement("label");
  const list = document.createElement("select");
  for (const one of tables) list.add(new Option(one.dataset.choice));
  const show = () => tables.forEach((one, place) => { one.hidden = place !== list.selectedIndex; });
  list.addEventListener("change", show);
  label.append(`${group.dataset.what} `, list);
  group.before(label);
  show();
}
