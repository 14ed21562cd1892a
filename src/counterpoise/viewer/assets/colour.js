// Numbers to colour classes: diverging around 0, sequential, or one colour a category.

import { element, family, number, option, visible } from "./text.js";

export const LABELS = {
  credit: "credit", weight: "weight", advantage: "advantage of the rollout", turn_advantage: "advantage of the turn", coef: "coefficient", delta: "change (delta)",
  predicted: "predicted change", own_head: "predicted: own, head alone", own: "predicted: own part", others: "predicted: others", cancellation: "cancellation",
  entropy: "entropy", confidence: "confidence", category: "category", change: "boosted or suppressed", ratio: "importance ratio", sampler_gap: "gap: trainer minus sampler",
  sampler_logp: "log-prob, sampler", trainer_logp: "log-prob before", trainer_logp_after: "log-prob after", token_id: "token id",
  is_flip: "flip", is_clipped: "clipped", loss_mask: "in the loss", noise_floor: "noise floor", update: "update",
  node_positive: "rollouts here, positive", node_negative: "rollouts here, negative", node: "shared-node id", is_fully_shared: "shared by all rollouts",
  is_fork: "fork of good and bad", kl: "KL after || before",
  value: "value before the segment", teacher_gap: "gap: teacher minus sampler", importance: "influence on the answer",
};
const CHANGES = { boosted: "d-p5", suppressed: "d-n5", unchanged: "d-0" };
// what belongs together in the list of colours, the most asked for first
const FAMILIES = [
  ["Credit", ["credit", "weight", "turn_advantage", "advantage", "coef"]],
  ["What the rule read", ["value", "teacher_gap", "importance"]],
  ["Change", ["delta", "change", "predicted", "own", "others", "own_head", "cancellation", "kl"]],
  ["Policy", ["entropy", "confidence", "ratio", "sampler_gap"]],
  ["Token", ["category"]],
];

export function label(name) {
  if (name.startsWith("replay/")) return `credit under ${name.slice(7)}`;
  const part = /^part_([^_]+)_(.+)$/.exec(name);
  if (!part) return LABELS[name] ?? name.replaceAll("_", " ");
  if (part[2] === "rest") return `${part[1]}: optimizer's memory`;
  return `${part[1]}: ${part[2].replaceAll("_", " ")}`;
}

function wordCss(scale, at) {
  return (scale.name === "change" && CHANGES[scale.words[at]]) || `c-${at % 8}`;
}

// columns that can be coloured, the most asked for first
export function colourable(columns) {
  const names = FAMILIES.flatMap(([, members]) => members);
  const rank = ({ name }) => (names.includes(name) ? names.indexOf(name) : names.length + FAMILY_ORDER.indexOf(familyOf(name)));
  return columns.filter((c) => c.kind !== "none").sort((a, b) => rank(a) - rank(b));
}

const FAMILY_ORDER = ["Replay", "Parts of the predicted change", "Further columns"];

// the columns as groups of a list to choose from
export function colourFamilies(columns) {
  const names = [...new Set(columns.map((c) => familyOf(c.name)))];
  return names.map((name) => family(name, columns.filter((c) => familyOf(c.name) === name).map((c) => option(c.name, label(c.name)))));
}

export function familyOf(name) {
  const known = FAMILIES.find(([, members]) => members.includes(name));
  return known ? known[0] : name.startsWith("replay/") ? FAMILY_ORDER[0] : name.startsWith("part_") ? FAMILY_ORDER[1] : FAMILY_ORDER[2];
}

export function painter(scale, values) {
  if (!scale || !values) return () => "";
  if (scale.kind === "category") return (i) => (values[i] < 0 ? "" : wordCss(scale, values[i]));
  if (scale.kind === "diverging") {
    return (i) => {
      const value = values[i];
      if (Number.isNaN(value)) return "";
      const level = scale.limit > 0 ? Math.min(10, Math.ceil((Math.abs(value) / scale.limit) * 10 - 1e-9)) : 0;
      return level === 0 ? "d-0" : value > 0 ? `d-p${level}` : `d-n${level}`;
    };
  }
  const width = scale.high - scale.low;
  return (i) => {
    const value = values[i];
    if (Number.isNaN(value)) return "";
    return `s-${width > 0 ? Math.max(0, Math.min(10, Math.round(((value - scale.low) / width) * 10))) : 5}`;
  };
}

export function drawLegend(place, scale, description) {
  place.replaceChildren();
  if (!scale) return;
  place.append(element("span", "name", label(scale.name)));
  if (scale.kind === "category") {
    scale.words.forEach((word, at) => place.append(element("span", `chip ${wordCss(scale, at)}`, visible(word))));
  } else {
    const isDiverging = scale.kind === "diverging";
    const classes = isDiverging
      ? [...range(10, 1).map((k) => `d-n${k}`), "d-0", ...range(1, 10).map((k) => `d-p${k}`)]
      : range(0, 10).map((k) => `s-${k}`);
    const ramp = element("span", "ramp");
    ramp.append(...classes.map((css) => element("span", css)));
    ramp.title = "Colours end at the 98th percentile of the batch; numbers beyond it look alike.";
    place.append(element("span", "end", number(isDiverging ? -scale.limit : scale.low)), ramp, element("span", "end", number(isDiverging ? scale.limit : scale.high)));
  }
  const both = element("span", "mark", "shared by both signs");
  both.prepend(element("span", "t both", "ab"));
  const one = element("span", "mark", "by one sign");
  one.prepend(element("span", "t one", "ab"));
  const flip = element("span", "mark", "flip");
  flip.prepend(element("span", "t flip", "ab"));
  const marks = element("span", "marks");
  marks.append(both, one, flip);
  place.append(marks, element("span", "about", description ?? ""));
}

function range(from, to) {
  const step = from <= to ? 1 : -1;
  return Array.from({ length: Math.abs(to - from) + 1 }, (_, k) => from + k * step);
}
