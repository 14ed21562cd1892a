// The runs of a folder: each leads to its viewer.

import { element, number, visible } from "./text.js";

const place = document.getElementById("runs");
const HEAD = [["run", "name"], ["method", "method"], ["seed", "seed"], ["batches", "batches"], ["held-out accuracy", "accuracy"], ["training reward", "reward"], ["batches with a ledger", "tokens"]];

function cell(run, key) {
  const value = run[key];
  if (key === "batches" && run.asked !== null && run.asked !== value) return `${value} of ${run.asked}`;
  if (key === "accuracy") return value === null ? "–" : `${(100 * value).toFixed(1)}%`;
  return typeof value === "number" ? number(value) : visible(value ?? "–");
}

function line(run) {
  const out = element("tr");
  for (const [, key] of HEAD) {
    const box = element("td", typeof run[key] === "number" ? "num" : "");
    if (key === "name") {
      const link = element("a", "", visible(run.name));
      link.href = `runs/${encodeURIComponent(run.name)}/`;
      box.append(link);
    } else box.textContent = cell(run, key);
    out.append(box);
  }
  return out;
}

async function start() {
  const answer = await fetch("api/runs");
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  const runs = await answer.json();
  const head = element("tr");
  head.append(...HEAD.map(([title]) => element("th", "", title)));
  place.replaceChildren(head, ...runs.map(line));
}

const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = isDark ? "dark" : "light";
start().catch((error) => { place.textContent = error.message; });
