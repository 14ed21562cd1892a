// One prompt over time: a chip for every batch and evaluation that sampled it, taller the more of its rollouts were solved.

import { element } from "./text.js";

export function drawHistory(place, rows, here, onGo) {
  place.hidden = rows.length < 2;
  place.replaceChildren();
  if (rows.length < 2) return;
  place.append(element("span", "name", "this prompt over time"));
  for (const row of rows) {
    const chip = element("button", `when ${row.kind}`, row.kind === "eval" ? `e${row.batch}` : `${row.batch}`);
    chip.type = "button";
    chip.title = `${row.kind === "eval" ? "evaluation after" : "batch"} ${row.batch}: solved ${row.solved} of ${row.num}`;
    const bar = element("i");
    bar.style.height = `${Math.round((16 * row.solved) / row.num)}px`;
    chip.prepend(bar);
    if (row.kind === here.kind && row.batch === here.batch) chip.setAttribute("aria-current", "true");
    chip.addEventListener("click", () => onGo(row));
    place.append(chip);
  }
}
