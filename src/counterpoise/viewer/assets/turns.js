// Turns of rollouts: where their tokens lie, what each did, earned and heard, and the group's turns in one state.

import { cells, element, number, signed, visible, visibleLines } from "./text.js";

const MAX_SHOWN = 2000; // turns that are listed

// Rows with their turns: tokens [start, end) and what is known of each; talks tell it by rollout.
export function withTurns(rows, turnOf, talks) {
  const known = new Map(talks.map((talk) => [talk.rollout, talk]));
  return rows.map((row) => {
    const talk = known.get(row.rollout);
    const turns = [];
    for (let i = row.start; i < row.end; i += 1) {
      if (i > row.start && turnOf[i] === turnOf[i - 1]) turns.at(-1).end = i + 1;
      else turns.push({ ...talk?.turns[turnOf[i]], number: turnOf[i], rollout: row.rollout, start: i, end: i + 1, isOpen: false });
    }
    for (const turn of turns) turn.said = saidBy(turn);
    return { ...row, turns, rewards: talk?.turns.map((turn) => turn.reward) ?? [], endReason: visible(talk?.end_reason), failure: visible(talk?.failure) };
  });
}

function saidBy(turn) {
  if (turn.reply === null || turn.reply === undefined) return "";
  const left = turn.reply_length - turn.reply.length;
  return visibleLines(turn.reply) + (left > 0 ? ` … ${number(left)} more characters` : "");
}

// rollouts whose environment failed and that have no tokens here
export function lostIn(talks, rows) {
  const shown = new Set(rows.map((row) => row.rollout));
  return talks.filter((talk) => talk.failure && !shown.has(talk.rollout));
}

export function signOf(turn) {
  return Math.sign(turn.advantage ?? 0);
}

// lines of a reply at so many cells, up to a limit
export function replyLines(said, capacity, limit) {
  let count = 0;
  for (const line of said.split("\n")) {
    count += Math.max(1, Math.ceil(cells(line) / capacity));
    if (count >= limit) return limit;
  }
  return count;
}

export function turnAt(row, i) {
  return row.turns?.find((turn) => i >= turn.start && i < turn.end);
}

// one bar per turn: up for a reward, down for a cost
export function strip(row, widest, onGo) {
  const out = element("span", "strip");
  out.title = `reward by turn: ${row.rewards.map(number).join(", ")}`;
  row.rewards.forEach((reward, at) => {
    const place = element("span", at < row.turns.length ? "go" : "");
    const bar = element("i", reward > 0 ? "up" : reward < 0 ? "down" : "none");
    bar.style.height = `${reward ? Math.max(2, (Math.abs(reward) / widest) * 8) : 1}px`;
    place.append(bar);
    if (at < row.turns.length) place.addEventListener("click", () => onGo(row.turns[at].start));
    out.append(place);
  });
  return out;
}

export function turnHead(turn, css, onState) {
  const out = element("div", `turn ${css}`);
  out.append(element("span", "name", `turn ${turn.number}`));
  if (turn.key !== null && turn.key !== undefined) out.append(stateButton(turn, onState));
  out.append(...facts(turn));
  return out;
}

function facts(turn) {
  return [["reward", number(turn.reward)], ["return", number(turn.return)], ["advantage", signed(turn.advantage)]].map(([name, value]) => {
    const part = element("span");
    part.append(element("i", "", name), " ", element("b", "", value));
    return part;
  });
}

function stateButton(turn, onState) {
  const out = element("button", "state", visible(turn.state).slice(0, 80) || "state");
  out.type = "button";
  out.title = "the turns of all rollouts in this state";
  out.addEventListener("click", () => onState(turn));
  return out;
}

export function replyBox(turn, isLong, onFold) {
  const out = element("div", `reply${turn.isOpen ? " open" : ""}`);
  out.append(element("pre", "", turn.said));
  if (isLong) {
    const fold = element("button", "fold", turn.isOpen ? "less" : `${number(turn.reply_length)} characters`);
    fold.type = "button";
    fold.addEventListener("click", () => onFold(turn));
    out.append(fold);
  }
  return out;
}

// The group's turns in one state: by action, then each of them; a click leads there.
export function drawState(place, turn, rows, onGo) {
  const here = rows.flatMap((row) => row.turns).filter((other) => other.key === turn.key);
  const title = element("div", "token");
  title.append(element("code", "", visible(turn.state) || "same history"), element("span", "", `${number(here.length)} turns of this prompt begin in this state`));
  const actions = [...new Set(here.map((one) => one.action))].map((action) => {
    const of = here.filter((one) => one.action === action);
    return [action, of.length, of.reduce((sum, one) => sum + (one.return ?? 0), 0) / of.length];
  });
  actions.sort((a, b) => b[2] - a[2] || b[1] - a[1]);
  const sums = tableOf(["action", "turns", "mean return"], actions.map(([action, count, mean]) => [named(action), number(count), number(mean)]));
  const list = tableOf(
    ["rollout", "turn", "action", "return", "advantage"],
    here.slice(0, MAX_SHOWN).map((one) => [`#${one.rollout}`, number(one.number), named(one.action), number(one.return), signed(one.advantage)]),
    (line, at) => {
      line.className = signOf(here[at]) > 0 ? "positive" : signOf(here[at]) < 0 ? "negative" : "";
      line.tabIndex = 0;
      line.addEventListener("click", () => onGo(here[at].start));
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") onGo(here[at].start); });
    },
  );
  list.classList.add("list");
  place.replaceChildren(title, element("h3", "", "By action, the best first"), sums, element("h3", "", "Each turn"), list);
}

function named(action) {
  return visible(action ?? "").slice(0, 60) || "∅";
}

function tableOf(head, rows, dress = () => {}) {
  const out = element("table", "twins turns");
  out.append(lineOf("th", head));
  rows.forEach((values, at) => {
    const line = lineOf("td", values);
    dress(line, at);
    out.append(line);
  });
  return out;
}

function lineOf(tag, values) {
  const out = element("tr");
  out.append(...values.map((value) => element(tag, "", value)));
  return out;
}
