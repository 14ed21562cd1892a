// What is chosen, as the address holds it: a link leads to the same token.

export function addressOf(chosen, token) {
  const out = new URLSearchParams({ [chosen.kind]: chosen.batch, prompt: chosen.prompt, colour: chosen.colour, layout: chosen.layout });
  for (const name of ["beside", "search"]) if (chosen[name]) out.set(name, chosen[name]);
  if (chosen.sort !== "order") out.set("sort", chosen.sort);
  if (chosen.flips) out.set("flips", "1");
  if (chosen.filter !== "all") out.set("filter", chosen.filter);
  if (token) {
    out.set("rollout", token.rollout);
    out.set("position", token.position);
    if (token.marked) out.set("marked", "1");
  }
  return `#${out}`;
}

export function chosenBy(hash, before) {
  const given = new URLSearchParams(hash.slice(1));
  const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const oneOf = (name, known, otherwise) => (known.includes(given.get(name)) ? given.get(name) : otherwise);
  const batch = whole("batch") ?? whole("eval");
  return {
    kind: batch === null ? before.kind : whole("batch") === null ? "eval" : "batch",
    batch: batch ?? before.batch,
    prompt: whole("prompt") ?? before.prompt,
    colour: given.get("colour") ?? before.colour,
    beside: given.get("beside") ?? "",
    search: given.get("search") ?? "",
    sort: oneOf("sort", ["hard", "easy", "flips"], "order"),
    layout: oneOf("layout", ["aligned"], "text"),
    flips: given.get("flips") === "1",
    filter: oneOf("filter", ["mixed", "flips"], "all"),
    token: whole("rollout") === null ? null : { rollout: whole("rollout"), position: whole("position") ?? 0, marked: given.get("marked") === "1" },
  };
}
