// Small helpers: elements, tables that keep their rows (and so the focus), numbers.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const plain = new Intl.NumberFormat("en");
export const count = (value) => (value === null || value === undefined ? "–" : plain.format(value));
export const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;

export function ago(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 60) return `${Math.floor(past)} s ago`;
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  return `${Math.floor(past / 3600)} h ago`;
}

export function save(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/**
 * A table whose rows are known by an id. Columns: {title, number, show(item) -> text or node, look(item) -> class}.
 * Only cells whose text changed are touched, so that focus and selection stay.
 */
export class Table {
  constructor(table, columns, id) {
    this.columns = columns;
    this.id = id;
    this.rows = new Map();
    const heads = columns.map((c) => element("th", { scope: "col", class: c.number ? "number" : "" }, c.title));
    this.body = element("tbody");
    table.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), this.body);
  }

  update(items) {
    const seen = new Set();
    items.forEach((item, place) => {
      const name = String(this.id(item));
      seen.add(name);
      const row = this.rows.get(name) ?? this.add(name);
      this.columns.forEach((column, i) => this.fill(row.cells[i], column, item));
      if (this.body.rows[place] !== row) this.body.insertBefore(row, this.body.rows[place] ?? null);
    });
    for (const [name, row] of this.rows) {
      if (seen.has(name)) continue;
      row.remove();
      this.rows.delete(name);
    }
  }

  add(name) {
    const cells = this.columns.map((c) => element("td", c.number ? { class: "number" } : {}));
    const row = element("tr", {}, ...cells);
    this.rows.set(name, row);
    return row;
  }

  fill(cell, column, item) {
    const shown = column.show(item);
    const text = typeof shown === "string" ? shown : shown.textContent;
    if (cell.dataset.shown !== text) {
      cell.replaceChildren(shown);
      cell.dataset.shown = text;
    }
    if (column.look) cell.className = column.look(item);
  }
}
