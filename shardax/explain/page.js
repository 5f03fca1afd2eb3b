"use strict";
const { arrays } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const MOST = { rows: 32, columns: 128, facets: 16 };  // blocks that are drawn along each

// ---- tables: a click on a head sorts, the search hides rows

const bodiesOf = (table) => [...table.tBodies].filter((body) => !body.classList.contains("more"));
const rowsOf = (table) => bodiesOf(table).flatMap((body) => [...body.rows]);

function sort(head) {
  const table = head.closest("table"), rows = rowsOf(table), column = head.cellIndex;
  const numeric = rows[0]?.cells[column].dataset.value !== undefined;
  const before = head.getAttribute("aria-sort");
  const order = before === "descending" || (before === null && !numeric) ? "ascending" : "descending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => sign * compare(key(a), key(b)));
  const bodies = bodiesOf(table), counts = bodies.map((body) => body.rows.length);  // as many are folded as before
  bodies.forEach((body, i) => body.append(...rows.splice(0, counts[i])));
}

for (const button of document.querySelectorAll(".ledger thead button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}

const unfolded = new Set();  // by the search

function unfold(fold) {
  if (fold.open) return;
  fold.open = true;
  unfolded.add(fold);
}

const texts = new WeakMap();  // of a row: all of it, and what is seen while it is folded

function textsOf(row) {
  if (!texts.has(row)) {
    const seen = row.cloneNode(true);
    seen.querySelectorAll("details > :not(summary)").forEach((inside) => inside.remove());
    texts.set(row, [row, seen].map((each) => each.textContent.toLowerCase()));
  }
  return texts.get(row);
}

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const fold of unfolded) fold.open = false;
  unfolded.clear();
  for (const section of document.querySelectorAll("section:has(tbody)")) {
    const rows = [...section.querySelectorAll("table")].flatMap(rowsOf);
    const matching = rows.filter((row) => words.every((word) => textsOf(row)[0].includes(word)));
    for (const row of rows) row.hidden = true;
    for (const row of matching) row.hidden = false;
    section.hidden = matching.length === 0;
    found.push(...matching);
  }
  if (words.length) {
    for (const row of found) {
      if (!words.every((word) => textsOf(row)[1].includes(word))) row.querySelectorAll("details").forEach(unfold);
      const file = row.closest("details"), tail = row.closest(".tail");
      if (file) unfold(file);
      if (tail) unfold(tail.previousElementSibling.querySelector("details"));
    }
  }
  byId("matches").textContent = words.length ? `${found.length} rows` : "";
}

byId("search").addEventListener("input", (event) => search(event.target.value));
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]'), place = link && byId(link.getAttribute("href").slice(1));
  if (place?.hidden) {  // a line that the search hides
    byId("search").value = "";
    search("");
  }
  place?.closest("details")?.setAttribute("open", "");
});

// ---- the picture: blocks of an array and the mesh, of any rank

const colorOf = (block, count) => `hsl(${(block * 360) / Math.max(count, 1)} 65% ${count > 12 && block % 2 ? 70 : 78}%)`;

function layoutOf(array) {
  const { mesh } = array, sizeOf = Object.fromEntries(mesh);
  const counts = array.dims.map((axes) => product(axes.map((axis) => sizeOf[axis])));
  const sizes = array.padded.map((size, d) => size / counts[d]);
  const used = new Set(array.dims.flat());
  return { array, mesh, sizeOf, counts, sizes, copies: product(mesh.filter(([axis]) => !used.has(axis)).map(([, size]) => size)) };
}

function coordinates(mesh, place) {
  const found = {};
  for (const [axis, size] of [...mesh].reverse()) {
    found[axis] = place % size;
    place = Math.floor(place / size);
  }
  return found;
}

function blockOf(layout, place) {  // on the mesh, from the first on
  const at = coordinates(layout.mesh, place);
  return layout.array.dims.map((axes) => axes.reduce((index, axis) => index * layout.sizeOf[axis] + at[axis], 0));
}

const deviceAt = (layout, place) => (layout.array.devices ? layout.array.devices[place] : place);

const flat = (index, counts) => index.reduce((sum, i, d) => sum * counts[d] + i, 0);

function holdersOf(layout) {
  const holders = new Map();
  for (let place = 0; place < product(layout.mesh.map(([, size]) => size)); place++) {
    const block = flat(blockOf(layout, place), layout.counts);
    if (!holders.has(block)) holders.set(block, []);
    holders.get(block).push(deviceAt(layout, place));
  }
  for (const devices of holders.values()) devices.sort((a, b) => a - b);
  return holders;
}

function devicesText(devices) {
  const ranges = [];
  for (const d of devices) {
    const last = ranges.at(-1);
    if (last && d === last[1] + 1) last[1] = d;
    else ranges.push([d, d]);
  }
  const step = devices[1] - devices[0];
  const even = devices.length > 3 && devices.every((d, i) => d === devices[0] + i * step);
  if (even && step > 1) return `${devices[0]}, ${devices[1]}, …, ${devices.at(-1)}`;
  return ranges.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

const filled = (layout, index) =>
  index.map((i, d) => Math.max(0, Math.min(layout.sizes[d], layout.array.shape[d] - i * layout.sizes[d])));

function element(parent, tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// A grid of `counts`: the last dim runs to the right, the one before it down, the others give a facet each.
// Dims that are whole take no room.
function drawGrid(parent, counts, names, draw) {
  const split = counts.map((n, d) => d).filter((d) => counts[d] > 1);
  const column = split.at(-1), row = split.at(-2), rest = split.slice(0, -2);
  const columns = column === undefined ? 1 : counts[column], rows = row === undefined ? 1 : counts[row];
  const facets = product(rest.map((d) => counts[d]));
  const shown = [Math.min(columns, MOST.columns), Math.min(rows, MOST.rows), Math.min(facets, MOST.facets)];
  for (let f = 0; f < shown[2]; f++) {
    const index = counts.map(() => 0);
    rest.reduceRight((left, d) => ((index[d] = left % counts[d]), Math.floor(left / counts[d])), f);
    const facet = element(parent, "div", "facet");
    if (rest.length) element(facet, "span", "", rest.map((d) => `${names[d]} ${index[d]}`).join(", "));
    const grid = element(facet, "div", "grid"), size = cellSize(shown[0], shown[2]);
    grid.style.gridTemplateColumns = `repeat(${shown[0]}, ${size}px)`;
    grid.style.gap = size > 5 ? "1px" : "0";
    for (let r = 0; r < shown[1]; r++) {
      for (let c = 0; c < shown[0]; c++) {
        if (row !== undefined) index[row] = r;
        if (column !== undefined) index[column] = c;
        draw(grid, [...index], size, { row, column });
      }
    }
  }
  const left = columns * rows * facets - product(shown);
  if (left > 0) element(parent, "p", "cut", `and ${left.toLocaleString("en")} more, not drawn`);
  if (column !== undefined) {
    const across = `${names[column]} to the right` + (row === undefined ? "" : `, ${names[row]} down`);
    element(parent, "p", "cut", across);
  }
}

function cellSize(columns, facets) {
  const room = Math.floor((facets > 1 ? 180 : 390) / columns);
  return Math.max(2, Math.min(64, room > 6 ? room - 1 : room));
}

function drawBlocks(layout, holders, choose) {
  const parent = byId("blocks");
  parent.replaceChildren();
  const total = product(layout.counts), names = layout.counts.map((_, d) => `dim ${d}`);
  drawGrid(parent, layout.counts, names, (grid, index, size, { row, column }) => {
    const block = flat(index, layout.counts), devices = holders.get(block);
    const cell = element(grid, "button", "block");
    Object.assign(cell.dataset, { block });
    cell.style.setProperty("--color", colorOf(block, total));
    cell.style.height = `${Math.max(6, Math.min(34, size))}px`;
    cell.title = `devices ${devicesText(devices)}`;
    pad(cell, layout, index, row, column);
    if (size >= 22) element(cell, "b", "", devices.length > 4 ? `${devices[0]}…` : devices.join(" "));
    cell.addEventListener("click", () => choose(block, index));
  });
}

// What of a block is padding, hatched: at its right along the drawn column dim, at its bottom along the row dim,
// all of it where another dim has nothing left.
function pad(cell, layout, index, row, column) {
  const part = filled(layout, index).map((n, d) => (layout.sizes[d] ? n / layout.sizes[d] : 1));
  const empty = part.some((p) => p === 0);
  const sides = empty ? [["0", "0"]] : [];
  if (!empty && column !== undefined && part[column] < 1) sides.push([`${100 * part[column]}%`, "0"]);
  if (!empty && row !== undefined && part[row] < 1) sides.push(["0", `${100 * part[row]}%`]);
  for (const [left, top] of sides) {
    const hatch = element(cell, "i");
    Object.assign(hatch.style, { left, top, right: "0", bottom: "0" });
  }
}

function drawMesh(layout, choose) {
  const parent = byId("mesh");
  parent.replaceChildren();
  const total = product(layout.counts), counts = layout.mesh.map(([, size]) => size);
  drawGrid(parent, counts, layout.mesh.map(([axis]) => axis), (grid, index, size) => {
    const place = flat(index, counts), device = deviceAt(layout, place);
    const at = blockOf(layout, place), block = flat(at, layout.counts);
    const cell = element(grid, "button", "block");
    Object.assign(cell.dataset, { block, device });
    cell.style.setProperty("--color", colorOf(block, total));
    cell.style.height = `${Math.max(6, Math.min(26, size))}px`;
    cell.title = `device ${device}`;
    if (size >= 18) element(cell, "b", "", device);
    cell.addEventListener("click", () => choose(block, at));
  });
}

function describe(layout, holders, block, index) {
  const have = filled(layout, index), empty = have.some((n) => n === 0);
  const from = index.map((i, d) => i * layout.sizes[d]);
  const range = `[${from.map((a, d) => (layout.counts[d] > 1 ? `${a}:${a + have[d]}` : ":")).join(", ")}]`;
  const padding = product(layout.sizes) - product(have), devices = holders.get(block);
  const holds = empty ? "only padding" : range + (padding ? `, and ${padding.toLocaleString("en")} elements of padding` : "");
  const copies = devices.length > 1 ? ` (${devices.length} copies)` : "";
  byId("block-facts").textContent = `Block ${index.join(", ") || "0"} holds ${holds}. Devices ${devicesText(devices)}${copies}.`;
  for (const cell of document.querySelectorAll(".block")) cell.classList.toggle("chosen", +cell.dataset.block === block);
}

function show(array) {
  const layout = layoutOf(array), holders = holdersOf(layout);
  const local = product(layout.sizes), bytes = (local * array.itemsize).toLocaleString("en");
  const uneven = array.shape.some((size, d) => layout.sizes[d] * layout.counts[d] !== size);
  byId("panel").hidden = false;
  byId("array-name").textContent = array.name;
  byId("array-facts").textContent =
    `${array.type}, ${array.sharding}: ${product(layout.counts)} blocks of [${layout.sizes.join(", ")}], ${bytes} bytes each` +
    (layout.copies > 1 ? `, each on ${layout.copies} devices` : "") + (uneven ? "; uneven: hatched is padding" : "") + ".";
  byId("why").textContent = array.why || "It rests so.";
  const choose = (block, index) => describe(layout, holders, block, index);
  drawBlocks(layout, holders, choose);
  drawMesh(layout, choose);
  choose(0, layout.counts.map(() => 0));
}

let chosen = null;  // the button of the array that is shown

function close() {
  byId("panel").hidden = true;
  chosen?.classList.remove("chosen");
  chosen?.focus();
  chosen = null;
}

for (const button of document.querySelectorAll("button.array")) {
  button.addEventListener("click", () => {
    chosen?.classList.remove("chosen");
    chosen = button;
    button.classList.add("chosen");
    show(arrays[+button.dataset.array]);
    if (innerWidth <= 1000) byId("panel").scrollIntoView();
    byId("array-name").focus({ preventScroll: true });
  });
}

byId("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => event.key === "Escape" && chosen && close());
