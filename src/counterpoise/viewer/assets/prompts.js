// The prompts of a batch: how many rollouts solved each, how many tokens flipped; searched and sorted.

import { element, number, visible } from "./text.js";

const solveRate = (group) => group.rollouts.filter((r) => r.solved).length / group.rollouts.length;
const flipsOf = (group) => group.rollouts.reduce((sum, r) => sum + (r.flips ?? 0), 0);
const ORDERS = {
  hard: (a, b) => solveRate(a) - solveRate(b),
  easy: (a, b) => solveRate(b) - solveRate(a),
  flips: (a, b) => flipsOf(b) - flipsOf(a),
};

// the prompts that pass the filter and hold the words, in the order that was asked for
export function chosenPrompts(groups, { filter, search, sort }) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (g) => `${g.group} ${g.prompt_id ?? ""} ${g.prompt ?? ""} ${g.answer ?? ""}`.toLowerCase();
  const shown = groups.filter((g) => isShown(g, filter) && words.every((word) => text(g).includes(word)));
  return ORDERS[sort] ? shown.sort(ORDERS[sort]) : shown;
}

export function isShown(group, filter) {
  if (filter === "mixed") return group.rollouts.some((r) => r.sign > 0 || r.mixed) && group.rollouts.some((r) => r.sign < 0 || r.mixed);
  if (filter === "flips") return group.rollouts.some((r) => r.flips > 0);
  return true;
}

export function drawPrompts(place, groups, chosen, onChoose) {
  place.replaceChildren(...groups.map((group) => item(group, group.group === chosen, onChoose)));
  place.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
}

function item(group, isChosen, onChoose) {
  const out = element("li");
  const button = element("button", "prompt");
  button.type = "button";
  if (isChosen) button.setAttribute("aria-current", "true");
  const flips = flipsOf(group);
  const up = group.rollouts.filter((r) => r.sign > 0).length;
  const down = group.rollouts.filter((r) => r.sign < 0).length;
  const mixed = group.rollouts.filter((r) => r.mixed).length;
  const top = element("span", "top");
  top.append(element("b", "", `${group.group}`), dots(up, down, mixed, group.rollouts.length - up - down - mixed), element("span", "flips", [`${group.rollouts.filter((r) => r.solved).length}/${group.rollouts.length}`, flips ? `${number(flips)} flips` : ""].filter(Boolean).join(" · ")));
  button.append(top, element("span", "excerpt", visible((group.prompt ?? group.prompt_id ?? "").slice(0, 160))));
  button.addEventListener("click", () => onChoose(group.group));
  out.append(button);
  return out;
}

// one dot a rollout while they can be counted by eye
function dots(up, down, mixed, zero) {
  const out = element("span", "dots");
  out.title = `${up} with positive, ${down} with negative${mixed ? `, ${mixed} with both` : ""}, ${zero} without advantage`;
  if (up + down + mixed + zero > 16) {
    out.textContent = `${up} / ${down}`;
    return out;
  }
  for (const [count, css] of [[up, "positive"], [mixed, "mixed"], [down, "negative"], [zero, "zero"]]) for (let k = 0; k < count; k += 1) out.append(element("i", css));
  return out;
}
