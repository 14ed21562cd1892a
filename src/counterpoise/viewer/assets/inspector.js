// Every number of the token under the pointer; of a marked token also its equals in the prompt and what they did to each other.

import { label } from "./colour.js";
import { compact, element, number, signed, visible } from "./text.js";
import { signOf, turnAt } from "./turns.js";

const SVG = "http://www.w3.org/2000/svg";
const SECTIONS = [
  ["Credit", ["reward", "advantage", "turn", "turn_advantage", "sign", "weight", "credit", "coef", "scale", "is_clipped", "loss_mask", "update"]],
  ["What the rule read", ["value", "teacher_gap", "importance"]],
  ["Policy", ["confidence", "entropy", "sampler_logp", "sampler_gap", "trainer_logp", "trainer_logp_after", "ratio"]],
  ["Change", ["delta", "noise_floor", "change", "is_flip", "predicted", "own", "others", "own_head", "cancellation", "kl"]],
  ["Token", ["category", "node_positive", "node_negative", "is_fully_shared", "is_fork", "node", "token_id", "position"]],
];
const MOVERS = { delta: "actual", predicted: "predicted", own: "own part", others: "others", own_head: "own, head alone" };
const MAX_TWINS = 200;
const SHORT = { credit: "credit", delta: "change", own: "own", others: "others" };

export function drawEmpty(place) {
  place.replaceChildren(element("p", "hint", "Point at a token to see its numbers. Click it to mark its equals in all rollouts of the prompt. Press ? for keys."));
}

export function drawToken(place, numbers, row, descriptions, twins, onGo) {
  const title = element("div", "token");
  title.append(element("code", "", visible(numbers.text) || "∅"), element("span", "", `rollout ${row.rollout}, position ${numbers.position ?? "–"}`));
  const parts = [title];
  if (numbers.is_flip) parts.push(element("p", "flip-note", "Flip: it moved against the sign of its own advantage."));
  const moved = movers(numbers);
  if (moved.length) parts.push(element("h3", "", "What moved it"), bars(moved), element("p", "hint", sumOf(numbers)));
  if (twins) parts.push(...twinParts(twins, onGo));
  const known = new Set(SECTIONS.flatMap(([, names]) => names));
  const others = Object.keys(numbers).filter((name) => !known.has(name) && !["text", "group", "rollout"].includes(name));
  for (const [heading, names] of [...SECTIONS, ["Further columns", others]]) {
    const rows = names.filter((name) => name in numbers);
    if (rows.length) parts.push(element("h3", "", heading), table(rows, numbers, descriptions));
  }
  place.replaceChildren(...parts);
}

function table(names, numbers, descriptions) {
  const out = element("dl", "numbers");
  for (const name of names) {
    const term = element("dt", "", label(name));
    term.title = descriptions[name] ?? (name.startsWith("part_") ? "the part of the predicted change that tokens of this class brought" : name);
    const value = numbers[name];
    out.append(term, element("dd", "", typeof value === "string" ? visible(value) : number(value)));
  }
  return out;
}

function movers(numbers) {
  const names = ["delta", "predicted", "own", "others", "own_head", ...Object.keys(numbers).filter((name) => name.startsWith("part_"))];
  return names.filter((name) => Number.isFinite(numbers[name])).map((name) => [MOVERS[name] ?? label(name), numbers[name]]);
}

function sumOf(numbers) {
  const axes = new Set(Object.keys(numbers).flatMap((name) => /^part_([^_]+)_/.exec(name)?.slice(1) ?? []));
  const sums = [Number.isFinite(numbers.own) ? "own part + others" : "", ...[...axes].map((axis) => `the parts by ${axis} added up`)].filter(Boolean);
  return sums.length ? `predicted = ${sums.join(" = ")}` : "Change of the log-prob by the update.";
}

function bars(rows) {
  const widest = Math.max(...rows.map(([, value]) => Math.abs(value)), 1e-30);
  const out = element("div", "bars");
  for (const [name, value] of rows) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "-50 0 100 10");
    svg.setAttribute("preserveAspectRatio", "none");
    const bar = document.createElementNS(SVG, "rect");
    const size = (Math.abs(value) / widest) * 49;
    bar.setAttribute("x", value < 0 ? -size : 0);
    bar.setAttribute("width", size);
    bar.setAttribute("y", 1.5);
    bar.setAttribute("height", 7);
    bar.setAttribute("class", value < 0 ? "down" : "up");
    const axis = document.createElementNS(SVG, "rect");
    for (const [key, setting] of Object.entries({ x: -0.3, width: 0.6, y: 0, height: 10, class: "axis" })) axis.setAttribute(key, setting);
    svg.append(bar, axis);
    out.append(element("span", "", name), svg, element("b", "", signed(value)));
  }
  return out;
}

function meanOf(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

// tokens of the prompt with the same text as token i
export function twinsIn(group, i, names, columns, positionOf) {
  const rank = columns[names.indexOf("delta")] ?? columns[0];
  const rows = [];
  for (const row of group.rows) {
    for (let at = row.start; at < row.end; at += 1) {
      if (group.code[at] !== group.code[i]) continue;
      const sign = row.turns ? signOf(turnAt(row, at)) : row.sign;
      rows.push({ i: at, row, sign, position: positionOf(at, row), values: columns.map((column) => column[at]) });
    }
  }
  rows.sort((a, b) => Math.abs(rank?.[b.i] ?? 0) - Math.abs(rank?.[a.i] ?? 0));
  const bySign = [[1, "positive"], [-1, "negative"]].flatMap(([sign, name]) => {
    const of = rows.filter((twin) => twin.sign === sign);
    return of.length ? [[name, of.length, names.map((_, k) => meanOf(of.map((twin) => twin.values[k])))]] : [];
  });
  return { count: number(rows.length), names, rows, bySign };
}

// twins: {count, bySign: [[name, count, means]], names, rows: [{i, row, sign, position, values}]}
function twinParts(twins, onGo) {
  const out = [element("h3", "", `Its equals in this prompt: ${twins.count}`)];
  const sums = element("table", "twins");
  sums.append(headRow(["rollouts", "count", ...twins.names.map((name) => SHORT[name])]));
  for (const [name, count, means] of twins.bySign) sums.append(bodyRow([name, number(count), ...means.map(compact)]));
  const list = element("table", "twins list");
  list.append(headRow(["rollout", "at", ...twins.names.map((name) => SHORT[name])]));
  for (const twin of twins.rows.slice(0, MAX_TWINS)) {
    const line = bodyRow([`#${twin.row.rollout}`, number(twin.position), ...twin.values.map(compact)]);
    line.className = twin.sign > 0 ? "positive" : twin.sign < 0 ? "negative" : "";
    line.tabIndex = 0;
    line.addEventListener("click", () => onGo(twin.i));
    line.addEventListener("keydown", (event) => {
      if (event.key === "Enter") onGo(twin.i);
    });
    list.append(line);
  }
  out.push(element("p", "hint", "The same token text wherever it stands. Means by the sign of the advantage; below, each of them, the largest change first. A dash: its own part was not computed (ledger.own_tokens)."), sums, list);
  if (twins.rows.length > MAX_TWINS) out.push(element("p", "hint", `${twins.rows.length - MAX_TWINS} more are marked in the text.`));
  return out;
}

function headRow(names) {
  const out = element("tr");
  out.append(...names.map((name) => element("th", "", name)));
  return out;
}

function bodyRow(values) {
  const out = element("tr");
  out.append(...values.map((value) => element("td", "", value)));
  return out;
}
