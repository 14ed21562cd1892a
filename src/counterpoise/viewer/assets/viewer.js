// The token viewer: what is chosen lives in the address, the rest follows from it.

import { addressOf, chosenBy } from "./address.js";
import { colourFamilies, colourable, drawLegend, label, painter } from "./colour.js";
import { drawHistory } from "./history.js";
import { drawEmpty, drawToken, twinsIn } from "./inspector.js";
import { Pane } from "./pane.js";
import { chosenPrompts, drawPrompts, isShown } from "./prompts.js";
import { makeSource } from "./source.js";
import { cells, element, family, number, option, visible, visibleLines } from "./text.js";
import { followTheme } from "./theme.js";
import { drawState, lostIn, withTurns } from "./turns.js";

const byId = (id) => document.getElementById(id);
const source = makeSource();
const chosen = { kind: "batch", batch: null, prompt: null, colour: "", beside: "", layout: "text", flips: false, filter: "all", search: "", sort: "order" };
let run = null; // what the run is
let loaded = null; // the batch: prompts, columns, texts
let group = null; // the prompt: rows and columns of tokens
let paints = [() => ""]; // of the colour, and of the one beside it
let focus = -1; // token with the keyboard
let marked = -1; // token whose equals are marked
let state = null; // turn whose state is shown
let asked = 0; // counts questions about tokens, so that a late answer is dropped
let loading = 0; // the same for prompts and batches
let notice = ""; // said once, with the batch that is shown instead

const pane = new Pane(byId("pane"), { onHover: (i) => guard(inspect(i)), onLeave: () => { if (group && (state || focus >= 0)) rest(); }, onPick: (i) => pick(i), onGo: (i) => moveTo(i), onState: showState, css: cssOf });

const placeOf = (kind, batch) => `${kind === "eval" ? "evals" : "batches"}/${batch}`;
const place = () => placeOf(chosen.kind, chosen.batch);

function cssOf(i, side = 0) {
  let css = `t ${(paints[side] ?? paints[0])(i)}`;
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
  if (run.evals?.length) byId("batch").append(family("Evaluation after", run.evals.map((batch) => option(`e${batch}`, `${batch} batches`))));
  byId("all-runs").hidden = !location.pathname.startsWith("/runs/");
  byId("all-runs").href = "../../";
  readAddress();
  if (!run.batches.length) return tell(["This run has no rollouts and no tokens to show.", ...run.problems]);
  await showAddress();
}

async function showAddress() {
  if (!isThere(chosen.kind, chosen.batch)) {
    if (chosen.batch !== null) notice = `There is no ${chosen.kind === "eval" ? "evaluation after" : "batch"} ${chosen.batch}; the last one with tokens is shown.`;
    chosen.kind = "batch";
    chosen.batch = (run.batches.findLast((s) => s.has_tokens) ?? run.batches.at(-1)).batch;
  }
  await showBatch(chosen.batch, true, chosen.kind);
}

function isThere(kind, batch) {
  return kind === "eval" ? run.evals.includes(batch) : run.batches.some((one) => one.batch === batch);
}

async function showBatch(batch, keep = false, kind = "batch", wantedPrompt = null) {
  const turn = (loading += 1);
  const fresh = await source.batch(placeOf(kind, batch));
  if (turn !== loading) return;
  const follows = group?.about.prompt_id ?? null; // the prompt in sight is followed where the batch has it
  chosen.batch = batch;
  chosen.kind = kind;
  loaded = fresh;
  loaded.display = loaded.texts.map(visible);
  loaded.width = Int32Array.from(loaded.display, cells);
  loaded.isBreak = loaded.texts.map((text) => text.includes("\n"));
  byId("batch").value = kind === "eval" ? `e${batch}` : batch;
  const options = colourable(loaded.columns);
  byId("colour").replaceChildren(...colourFamilies(options));
  if (!options.some((c) => c.name === chosen.colour)) chosen.colour = loaded.opens_on || (options[0]?.name ?? "");
  byId("colour").value = chosen.colour;
  drawBeside(options);
  tell(notice ? [notice, ...loaded.problems] : loaded.problems);
  notice = "";
  const groups = shownGroups();
  const has = (test) => loaded.groups.find(test)?.group;
  const same = (prompt) => (prompt === null ? undefined : has((g) => g.group === prompt));
  const followed = follows === null ? undefined : has((g) => g.prompt_id === follows);
  const wanted = same(wantedPrompt) ?? (keep ? same(chosen.prompt) : followed) ?? (groups.find((g) => isShown(g, "mixed")) ?? groups[0] ?? loaded.groups[0])?.group;
  await showPrompt(wanted, keep ? chosen.token : null);
}

// a second colour beside the first: two methods' credit of a replay, or any two columns
function drawBeside(options) {
  const isThere = options.some((c) => c.name === chosen.beside);
  if (!isThere) chosen.beside = "";
  byId("beside-control").hidden = !options.length;
  byId("beside").replaceChildren(option("", "nothing"), ...colourFamilies(options));
  byId("beside").value = chosen.beside;
}

async function showPrompt(prompt, token = null) {
  if (prompt === undefined) return;
  const turn = (loading += 1);
  const about = loaded.groups.find((g) => g.group === prompt);
  const wanted = (name) => (loaded.columns.some((c) => c.name === name) ? source.column(place(), prompt, name) : null);
  const [code, flip, up, down, turnOf, positions, talks, values, beside] = await Promise.all([
    source.column(place(), prompt, "text"), wanted("is_flip"),
    source.column(place(), prompt, "node_positive"), source.column(place(), prompt, "node_negative"),
    ...(loaded.has_turns ? [wanted("turn"), wanted("position"), source.turns(place(), prompt)] : [null, null, []]), wanted(chosen.colour), wanted(chosen.beside),
  ]);
  if (turn !== loading) return;
  chosen.prompt = prompt;
  let end = 0;
  const plain = about.rollouts.map((r) => ({ ...r, stop: visible(r.stop_reason), start: end, end: (end += r.length) }));
  const rows = turnOf ? withTurns(plain, turnOf, talks) : plain;
  const widest = Math.max(1e-9, ...rows.flatMap((row) => row.rewards ?? []).map(Math.abs));
  group = { about, rows, positions, widest, hasTurns: Boolean(turnOf), lost: lostIn(talks, rows), code, flip, up, down, display: loaded.display, width: loaded.width, isBreak: loaded.isBreak, columns: new Map([[chosen.beside, beside], [chosen.colour, values]]) };
  focus = marked = -1;
  state = null;
  setPaint(values, beside);
  drawQuestion(about);
  drawList();
  drawEmpty(byId("inspector"));
  await pane.show(group, chosen.layout);
  const given = token ? tokenAt(token) : -1;
  if (given >= 0) moveTo(given);
  if (token?.marked && given >= 0) pick(given);
  if (given < 0) choose(strongest(values));
}

// of the tokens in sight the one that stands out most in the colour: the page opens with its numbers
function strongest(values) {
  const size = (i) => (values && !Number.isNaN(values[i]) ? Math.abs(values[i]) : -1);
  return pane.inSight().reduce((best, i) => (best < 0 || size(i) > size(best) ? i : best), -1);
}

async function showColour(name) {
  const turn = loading;
  const values = await columnOf(name);
  if (turn !== loading) return;
  chosen.colour = name;
  byId("colour").value = name;
  setPaint(values, group.columns.get(chosen.beside));
  if (chosen.beside) await pane.arrange(focus);
  else pane.repaint();
  writeAddress();
}

async function showBeside(name) {
  const turn = loading;
  const values = name ? await columnOf(name) : null;
  if (turn !== loading) return;
  chosen.beside = name;
  byId("beside").value = name;
  setPaint(group.columns.get(chosen.colour), values);
  if (name && chosen.layout === "aligned") await showLayout("text");
  else await pane.show(group, chosen.layout, focus);
  writeAddress();
}

function setPaint(values, beside) {
  const scaleOf = (name) => loaded.columns.find((c) => c.name === name);
  const scale = scaleOf(chosen.colour);
  paints = [painter(scale, values)];
  if (chosen.beside) paints.push(painter(scaleOf(chosen.beside), beside));
  group.beside = chosen.beside ? [label(chosen.colour), label(chosen.beside)] : null;
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
  if (group.lost.length) parts.push(`${number(group.lost.length)} rollouts left out, their environment failed: ${visible(group.lost[0].failure)}`);
  byId("prompt-about").textContent = parts.join(" · ");
  guard(showHistory(about));
}

async function showHistory(about) {
  const rows = about.prompt_id ? await source.history(about.prompt_id) : [];
  if (group?.about !== about) return;
  drawHistory(byId("history"), rows, chosen, (row) => guard(showBatch(row.batch, false, row.kind, row.group)));
}

function shownGroups() {
  return chosenPrompts(loaded.groups, chosen);
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
  if (!group.columns.has(name)) group.columns.set(name, await source.column(place(), chosen.prompt, name));
  return group.columns.get(name);
}

function rowOf(i) {
  return group.rows.find((row) => i >= row.start && i < row.end);
}

// in the response: replies stand between the tokens of turns
function positionOf(i, row) {
  return group.positions ? group.positions[i] : i - row.start;
}

function tokenAt({ rollout, position }) {
  const row = group.rows.find((r) => r.rollout === rollout);
  if (row && group.positions) return group.positions.subarray(0, row.end).indexOf(position, row.start);
  return row && position >= 0 && position < row.end - row.start ? row.start + position : -1;
}

async function inspect(i, twins = null) {
  const turn = (asked += 1);
  const from = group;
  const numbers = await source.token(place(), chosen.prompt, i);
  const equals = twins ?? (i === marked ? await twinsOf(i) : null);
  if (turn === asked && from === group) drawToken(byId("inspector"), numbers, rowOf(i), run.descriptions, equals, (at) => moveTo(at));
}

function moveTo(i) {
  pane.reveal(i);
  choose(i);
}

// what is shown while the pointer is elsewhere
function rest() {
  if (state) showState(state);
  else guard(inspect(marked >= 0 ? marked : focus));
}

function showState(turn) {
  state = turn;
  asked += 1; // a token that was asked for comes too late
  drawState(byId("inspector"), turn, group.rows, (i) => moveTo(i));
}

// the turn after or before that of the token, over all rollouts
function turnBy(direction) {
  const all = group.rows.flatMap((row) => row.turns ?? []);
  const at = all.findIndex((turn) => focus >= turn.start && focus < turn.end);
  const next = all[at < 0 ? 0 : at + direction];
  if (next) moveTo(next.start);
}

function choose(i) {
  focus = i;
  state = null;
  pane.repaint();
  if (i >= 0) guard(inspect(i));
  writeAddress();
}

function pick(i) {
  marked = marked === i ? -1 : i;
  state = null;
  focus = i;
  pane.repaint();
  guard(inspect(i));
  writeAddress();
}

async function twinsOf(i) {
  const names = ["credit", "delta", "own", "others"].filter((name) => loaded.columns.some((c) => c.name === name));
  return twinsIn(group, i, names, await Promise.all(names.map(columnOf)), positionOf);
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
  const all = chosen.kind === "eval" ? run.evals : run.batches.map(({ batch }) => batch);
  const next = all[all.indexOf(chosen.batch) + direction];
  if (next !== undefined) guard(showBatch(next, false, chosen.kind));
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
  Escape: () => { marked = focus = -1; state = null; pane.repaint(); drawEmpty(byId("inspector")); writeAddress(); },
  f: () => nextFlip(1), F: () => nextFlip(-1),
  t: () => turnBy(1), T: () => turnBy(-1),
  j: () => promptBy(1), k: () => promptBy(-1),
  "]": () => batchBy(1), "[": () => batchBy(-1),
  c: () => colourBy(1), C: () => colourBy(-1),
  a: () => guard(showLayout(chosen.layout === "text" ? "aligned" : "text")),
  x: () => showFlips(!chosen.flips),
  "/": () => byId("prompt-search").focus(),
  "?": () => byId("help").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open || !group) return;
  const inField = event.target.closest?.("select, input, button, tr");
  if (event.target.type === "search" || (inField && (event.key.startsWith("Arrow") || event.key === "Enter" || event.target.tagName === "SELECT"))) return;
  const act = KEYS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

// ---- the address

function writeAddress() {
  const at = marked >= 0 ? marked : focus;
  const row = at >= 0 ? rowOf(at) : null;
  history.replaceState(null, "", addressOf(chosen, row && { rollout: row.rollout, position: positionOf(at, row), marked: marked >= 0 }));
}

function readAddress() {
  Object.assign(chosen, chosenBy(location.hash, chosen));
  byId("prompt-search").value = chosen.search;
  byId("prompt-sort").value = chosen.sort;
  byId("flips").checked = chosen.flips;
  byId("prompt-filter").value = chosen.filter;
  for (const name of ["text", "aligned"]) byId(`layout-${name}`).setAttribute("aria-pressed", String(name === chosen.layout));
}

// what fails is said on the page, not in the console alone
function guard(promise) {
  return promise.catch((error) => tell([error.message]));
}

followTheme(byId("theme"));
byId("batch").addEventListener("change", ({ target: { value } }) => guard(showBatch(Number(value.replace("e", "")), false, value[0] === "e" ? "eval" : "batch")));
byId("batch-back").addEventListener("click", () => batchBy(-1));
byId("batch-next").addEventListener("click", () => batchBy(1));
byId("colour").addEventListener("change", (event) => guard(showColour(event.target.value)));
byId("beside").addEventListener("change", (event) => guard(showBeside(event.target.value)));
byId("prompt-search").addEventListener("input", (event) => { chosen.search = event.target.value; drawList(); writeAddress(); });
byId("prompt-sort").addEventListener("change", (event) => { chosen.sort = event.target.value; drawList(); writeAddress(); });
byId("layout-text").addEventListener("click", () => guard(showLayout("text")));
byId("layout-aligned").addEventListener("click", () => guard(showLayout("aligned")));
byId("flips").addEventListener("change", (event) => showFlips(event.target.checked));
byId("prompt-filter").addEventListener("change", (event) => { chosen.filter = event.target.value; drawList(); writeAddress(); });
byId("help-open").addEventListener("click", () => byId("help").showModal());
addEventListener("hashchange", () => { readAddress(); guard(showAddress()); });
drawEmpty(byId("inspector"));
guard(start());
