// The token viewer: what is chosen lives in the address, the rest follows from it.

import { colourable, drawLegend, label, painter } from "./colour.js";
import { drawEmpty, drawToken } from "./inspector.js";
import { Pane } from "./pane.js";
import { drawPrompts, isShown } from "./prompts.js";
import { makeSource } from "./source.js";
import { cells, element, number, visible, visibleLines } from "./text.js";

const byId = (id) => document.getElementById(id);
const source = makeSource();
const chosen = { batch: null, prompt: null, colour: "credit", layout: "text", flips: false, filter: "all" };
let run = null; // what the run is
let loaded = null; // the batch: prompts, columns, texts
let group = null; // the prompt: rows and columns of tokens
let paint = () => "";
let focus = -1; // token with the keyboard
let marked = -1; // token whose equals are marked
let asked = 0; // counts questions about tokens, so that a late answer is dropped
let loading = 0; // the same for prompts and batches

const pane = new Pane(byId("pane"), { onHover: (i) => guard(inspect(i)), onLeave: () => { if (group && focus >= 0) guard(inspect(marked >= 0 ? marked : focus)); }, onPick: (i) => pick(i), css: cssOf });

function cssOf(i) {
  let css = `t ${paint(i)}`;
  const up = group.up?.[i] ?? 0;
  const down = group.down?.[i] ?? 0;
  if (up > 0 && down > 0) css += " both";
  else if (up + down > 1) css += " one";
  if (group.flip?.[i] === 1) css += " flip";
  else if (chosen.flips) css += " dim";
  if (marked >= 0 && group.code[i] === group.code[marked]) css += i === marked ? " same marked" : " same";
  if (i === focus) css += " focus";
  return css;
}

// ---- what is shown

async function start() {
  run = await source.run();
  byId("run-name").textContent = visible(run.name);
  byId("run-about").textContent = visible([run.method, run.task, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(" · "));
  document.title = `${visible(run.name)} · counterpoise view`;
  byId("batch").replaceChildren(...run.batches.map(({ batch, has_tokens }) => option(batch, has_tokens ? `${batch}` : `${batch} (no ledger)`)));
  readAddress();
  if (!run.batches.length) return tell(["This run has no rollouts and no tokens to show.", ...run.problems]);
  if (!run.batches.some(({ batch }) => batch === chosen.batch)) chosen.batch = (run.batches.findLast((s) => s.has_tokens) ?? run.batches.at(-1)).batch;
  await showBatch(chosen.batch, true);
}

async function showBatch(batch, keep = false) {
  const turn = (loading += 1);
  const found = await source.batch(batch);
  if (turn !== loading) return;
  chosen.batch = batch;
  loaded = found;
  loaded.display = loaded.texts.map(visible);
  loaded.width = Int32Array.from(loaded.display, cells);
  loaded.isBreak = loaded.texts.map((text) => text.includes("\n"));
  byId("batch").value = batch;
  const options = colourable(loaded.columns);
  byId("colour").replaceChildren(...options.map((c) => option(c.name, label(c.name))));
  if (!options.some((c) => c.name === chosen.colour)) chosen.colour = options[0]?.name ?? "";
  byId("colour").value = chosen.colour;
  tell(loaded.problems);
  const groups = shownGroups();
  const wanted = keep && loaded.groups.some((g) => g.group === chosen.prompt) ? chosen.prompt : (groups[0] ?? loaded.groups[0])?.group;
  await showPrompt(wanted, keep ? chosen.token : null);
}

async function showPrompt(prompt, token = null) {
  if (prompt === undefined) return;
  const turn = (loading += 1);
  const about = loaded.groups.find((g) => g.group === prompt);
  const wanted = (name) => (loaded.columns.some((c) => c.name === name) ? source.column(chosen.batch, prompt, name) : null);
  const [code, flip, up, down, values] = await Promise.all([
    source.column(chosen.batch, prompt, "text"), wanted("is_flip"),
    source.column(chosen.batch, prompt, "node_positive"), source.column(chosen.batch, prompt, "node_negative"), wanted(chosen.colour),
  ]);
  if (turn !== loading) return;
  chosen.prompt = prompt;
  let end = 0;
  const rows = about.rollouts.map((r) => ({ ...r, stop: visible(r.stop_reason), start: end, end: (end += r.length) }));
  group = { about, rows, code, flip, up, down, display: loaded.display, width: loaded.width, isBreak: loaded.isBreak, columns: new Map([[chosen.colour, values]]) };
  focus = marked = -1;
  setPaint(values);
  drawQuestion(about);
  drawList();
  drawEmpty(byId("inspector"));
  await pane.show(group, chosen.layout);
  const at = token ? tokenAt(token) : -1;
  if (at >= 0) moveTo(at);
  if (token?.marked && at >= 0) pick(at);
  writeAddress();
}

async function showColour(name) {
  const turn = loading;
  const values = await columnOf(name);
  if (turn !== loading) return;
  chosen.colour = name;
  byId("colour").value = name;
  setPaint(values);
  pane.repaint();
  writeAddress();
}

function setPaint(values) {
  const scale = loaded.columns.find((c) => c.name === chosen.colour);
  paint = painter(scale, values);
  drawLegend(byId("legend"), scale, run.descriptions[chosen.colour]);
}

async function showLayout(layout) {
  chosen.layout = layout;
  for (const name of ["text", "aligned"]) byId(`layout-${name}`).setAttribute("aria-pressed", String(name === layout));
  if (group) await pane.show(group, layout, focus);
  writeAddress();
}

function showFlips(isOn) {
  chosen.flips = isOn;
  byId("flips").checked = isOn;
  if (group) pane.repaint();
  writeAddress();
}

function drawQuestion(about) {
  byId("prompt-text").textContent = visibleLines(about.prompt ?? "");
  const parts = [`prompt ${about.group}`];
  if (about.prompt_id) parts.push(visible(about.prompt_id));
  if (about.answer) parts.push(`answer ${visible(about.answer)}`);
  byId("prompt-about").textContent = parts.join(" · ");
}

function shownGroups() {
  return loaded.groups.filter((g) => isShown(g, chosen.filter));
}

function drawList() {
  const groups = shownGroups();
  byId("prompt-count").textContent = `${groups.length} of ${loaded.groups.length}`;
  drawPrompts(byId("prompt-list"), groups, chosen.prompt, (prompt) => guard(showPrompt(prompt)));
}

function tell(problems) {
  byId("problems").hidden = !problems.length;
  byId("problems").replaceChildren(...problems.map((line) => element("p", "", visible(line))));
}

// ---- tokens

async function columnOf(name) {
  if (!group.columns.has(name)) group.columns.set(name, await source.column(chosen.batch, chosen.prompt, name));
  return group.columns.get(name);
}

function rowOf(i) {
  return group.rows.find((row) => i >= row.start && i < row.end);
}

function tokenAt({ rollout, position }) {
  const row = group.rows.find((r) => r.rollout === rollout);
  return row && position >= 0 && position < row.end - row.start ? row.start + position : -1;
}

async function inspect(i, twins = null) {
  const turn = (asked += 1);
  const from = group;
  const numbers = await source.token(chosen.batch, chosen.prompt, i);
  const equals = twins ?? (i === marked ? await twinsOf(i) : null);
  if (turn === asked && from === group) drawToken(byId("inspector"), numbers, rowOf(i), run.descriptions, equals, (at) => moveTo(at));
}

function moveTo(i) {
  focus = i;
  pane.reveal(i);
  pane.repaint();
  guard(inspect(i));
  writeAddress();
}

function pick(i) {
  marked = marked === i ? -1 : i;
  focus = i;
  pane.repaint();
  guard(inspect(i));
  writeAddress();
}

async function twinsOf(i) {
  const names = ["credit", "delta", "own", "coupling"].filter((name) => loaded.columns.some((c) => c.name === name));
  const columns = await Promise.all(names.map(columnOf));
  const rank = columns[names.includes("coupling") ? names.indexOf("coupling") : names.indexOf("delta")] ?? columns[0];
  const rows = [];
  for (const row of group.rows) {
    for (let at = row.start; at < row.end; at += 1) {
      if (group.code[at] === group.code[i]) rows.push({ i: at, row, position: at - row.start, values: columns.map((column) => column[at]) });
    }
  }
  rows.sort((a, b) => Math.abs(rank?.[b.i] ?? 0) - Math.abs(rank?.[a.i] ?? 0));
  const bySign = [[1, "positive"], [-1, "negative"]].flatMap(([sign, name]) => {
    const of = rows.filter((twin) => twin.row.sign === sign);
    return of.length ? [[name, of.length, names.map((_, k) => of.reduce((sum, twin) => sum + twin.values[k], 0) / of.length)]] : [];
  });
  return { count: number(rows.length), names, rows, bySign };
}

function nextFlip(direction) {
  if (!group.flip) return;
  const size = group.code.length;
  for (let k = 1; k <= size; k += 1) {
    const i = (((focus < 0 ? (direction > 0 ? -1 : 0) : focus) + direction * k) % size + size) % size;
    if (group.flip[i] === 1) return moveTo(i);
  }
}

// ---- moving about

function batchBy(direction) {
  const at = run.batches.findIndex(({ batch }) => batch === chosen.batch) + direction;
  if (run.batches[at]) guard(showBatch(run.batches[at].batch));
}

function promptBy(direction) {
  const groups = shownGroups();
  const at = groups.findIndex((g) => g.group === chosen.prompt);
  const next = groups[at < 0 ? 0 : at + direction];
  if (next) guard(showPrompt(next.group));
}

function colourBy(direction) {
  const names = colourable(loaded.columns).map((c) => c.name);
  if (names.length) guard(showColour(names[(names.indexOf(chosen.colour) + direction + names.length) % names.length]));
}

const KEYS = {
  ArrowRight: () => moveTo(Math.min(group.code.length - 1, focus + 1)),
  ArrowLeft: () => moveTo(Math.max(0, focus - 1)),
  ArrowDown: () => moveTo(focus < 0 ? 0 : pane.neighbour(focus, 1)),
  ArrowUp: () => moveTo(focus < 0 ? 0 : pane.neighbour(focus, -1)),
  Enter: () => focus >= 0 && pick(focus),
  Escape: () => { marked = focus = -1; pane.repaint(); drawEmpty(byId("inspector")); writeAddress(); },
  f: () => nextFlip(1), F: () => nextFlip(-1),
  j: () => promptBy(1), k: () => promptBy(-1),
  "]": () => batchBy(1), "[": () => batchBy(-1),
  c: () => colourBy(1), C: () => colourBy(-1),
  a: () => guard(showLayout(chosen.layout === "text" ? "aligned" : "text")),
  x: () => showFlips(!chosen.flips),
  "?": () => byId("help").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open || !group) return;
  const inField = event.target.closest?.("select, input, button, tr");
  if (inField && (event.key.startsWith("Arrow") || event.key === "Enter" || event.target.tagName === "SELECT")) return;
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

// ---- the address

function writeAddress() {
  const out = new URLSearchParams({ batch: chosen.batch, prompt: chosen.prompt, colour: chosen.colour, layout: chosen.layout });
  if (chosen.flips) out.set("flips", "1");
  if (chosen.filter !== "all") out.set("filter", chosen.filter);
  const at = marked >= 0 ? marked : focus;
  if (at >= 0) {
    const row = rowOf(at);
    out.set("rollout", row.rollout);
    out.set("position", at - row.start);
    if (marked >= 0) out.set("marked", "1");
  }
  history.replaceState(null, "", `#${out}`);
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  chosen.batch = whole("batch") ?? chosen.batch;
  chosen.prompt = whole("prompt") ?? chosen.prompt;
  chosen.colour = given.get("colour") ?? chosen.colour;
  chosen.layout = given.get("layout") === "aligned" ? "aligned" : "text";
  chosen.flips = given.get("flips") === "1";
  chosen.token = whole("rollout") === null ? null : { rollout: whole("rollout"), position: whole("position") ?? 0, marked: given.get("marked") === "1" };
  chosen.filter = ["mixed", "flips"].includes(given.get("filter")) ? given.get("filter") : "all";
  byId("flips").checked = chosen.flips;
  byId("prompt-filter").value = chosen.filter;
  for (const name of ["text", "aligned"]) byId(`layout-${name}`).setAttribute("aria-pressed", String(name === chosen.layout));
}

function option(value, text) {
  const out = element("option", "", text);
  out.value = value;
  return out;
}

// what fails is said on the page, not in the console alone
function guard(promise) {
  return promise.catch((error) => tell([error.message]));
}

const system = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (name) => { document.documentElement.dataset.theme = name; };
setTheme(system.matches ? "dark" : "light");
system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("batch").addEventListener("change", (event) => guard(showBatch(Number(event.target.value))));
byId("batch-back").addEventListener("click", () => batchBy(-1));
byId("batch-next").addEventListener("click", () => batchBy(1));
byId("colour").addEventListener("change", (event) => guard(showColour(event.target.value)));
byId("layout-text").addEventListener("click", () => guard(showLayout("text")));
byId("layout-aligned").addEventListener("click", () => guard(showLayout("aligned")));
byId("flips").addEventListener("change", (event) => showFlips(event.target.checked));
byId("prompt-filter").addEventListener("change", (event) => { chosen.filter = event.target.value; drawList(); writeAddress(); });
byId("help-open").addEventListener("click", () => byId("help").showModal());
addEventListener("hashchange", () => { readAddress(); guard(showBatch(chosen.batch, true)); });
drawEmpty(byId("inspector"));
guard(start());
