// Rollouts of a prompt under each other, equal tokens in equal columns: every rollout is aligned to one of them, the anchor.

const MAX_EDITS = 400;

// Pairs [i, j] of equal entries of a and b in order, as many as a shortest edit script keeps (Myers' algorithm, O((n + m) d));
// beyond MAX_EDITS edits only the common beginning and end are kept.
export function matches(a, b) {
  let from = 0;
  while (from < a.length && from < b.length && a[from] === b[from]) from += 1;
  let tail = 0;
  while (tail < a.length - from && tail < b.length - from && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const head = Array.from({ length: from }, (_, k) => [k, k]);
  const middle = shortest(a.slice(from, a.length - tail), b.slice(from, b.length - tail)).map(([i, j]) => [i + from, j + from]);
  const end = Array.from({ length: tail }, (_, k) => [a.length - tail + k, b.length - tail + k]);
  return [...head, ...middle, ...end];
}

function shortest(a, b) {
  const bound = Math.min(a.length + b.length, MAX_EDITS);
  const reach = new Int32Array(2 * bound + 3);
  const history = [];
  for (let d = 0; d <= bound; d += 1) {
    history.push(reach.slice(bound - d, bound + d + 3));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && reach[bound + k] < reach[bound + k + 2]);
      let x = down ? reach[bound + k + 2] : reach[bound + k] + 1;
      while (x < a.length && x - k < b.length && x - k >= 0 && a[x] === b[x - k]) x += 1;
      reach[bound + k + 1] = x;
      if (x >= a.length && x - k >= b.length) return walkedBack(history, a, b, d);
    }
  }
  return [];
}

function walkedBack(history, a, b, edits) {
  const pairs = [];
  let x = a.length;
  let y = b.length;
  for (let d = edits; d >= 0; d -= 1) {
    const reach = history[d];
    const at = (k) => reach[k + d + 1];
    const k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const beforeX = d === 0 ? 0 : at(down ? k + 1 : k - 1);
    const beforeY = d === 0 ? 0 : beforeX - (down ? k + 1 : k - 1);
    const startX = d === 0 ? 0 : down ? beforeX : beforeX + 1;
    while (x > startX && y > 0) {
      x -= 1;
      y -= 1;
      pairs.push([x, y]);
    }
    x = beforeX;
    y = beforeY;
  }
  return pairs.reverse();
}

// For each token of b: the place of the anchor it stands under, and its rank among tokens put in after that place (0: under it).
export function placed(anchor, b) {
  const place = new Int32Array(b.length);
  const rank = new Int32Array(b.length);
  let i = 0;
  let j = 0;
  for (const [nextI, nextJ] of [...matches(anchor, b), [anchor.length, b.length]]) {
    const room = nextI - i;
    for (let k = 0; j + k < nextJ; k += 1) {
      place[j + k] = room > 0 ? i + Math.min(k, room - 1) : i - 1;
      rank[j + k] = room > 0 ? Math.max(0, k - room + 1) : k + 1;
    }
    if (nextJ < b.length) {
      place[nextJ] = nextI;
      rank[nextJ] = 0;
    }
    i = nextI + 1;
    j = nextJ + 1;
  }
  return { place, rank };
}

// Calls act for every row, giving way to the page every few milliseconds; false if the work was no longer wanted.
async function patiently(rows, isStale, act) {
  let since = performance.now();
  for (let r = 0; r < rows.length; r += 1) {
    act(rows[r], r);
    if (performance.now() - since > 12) {
      await new Promise((go) => setTimeout(go));
      if (isStale()) return false;
      since = performance.now();
    }
  }
  return true;
}

// Columns of all rollouts: column[i] of every token, cells of every column.
export async function aligned(rows, anchor, code, width, isStale) {
  const own = code.subarray(rows[anchor].start, rows[anchor].end);
  const places = [];
  const extra = new Int32Array(own.length + 1);
  const isDone = await patiently(rows, isStale, (row) => {
    const { place, rank } = placed(own, code.subarray(row.start, row.end));
    for (let t = 0; t < place.length; t += 1) if (rank[t] > extra[place[t] + 1]) extra[place[t] + 1] = rank[t];
    places.push({ place, rank });
  });
  if (!isDone) return null;
  const first = new Int32Array(own.length + 2);
  for (let p = 0; p <= own.length; p += 1) first[p + 1] = first[p] + extra[p] + (p === 0 ? 0 : 1);
  const columnOf = new Int32Array(code.length);
  const cellsOf = new Int32Array(first[own.length + 1]).fill(1);
  const isPlaced = await patiently(rows, isStale, (row, r) => {
    const { place, rank } = places[r];
    for (let t = 0; t < place.length; t += 1) {
      const column = place[t] < 0 ? rank[t] - 1 : first[place[t] + 1] + rank[t];
      columnOf[row.start + t] = column;
      cellsOf[column] = Math.max(cellsOf[column], Math.min(24, width[code[row.start + t]]));
    }
  });
  return isPlaced ? { columnOf, cellsOf } : null;
}

// The same turn by turn: turn u of all rollouts in columns of its own, then a column for what the environment said to it.
export async function alignedByTurns(rows, code, width, isStale) {
  const columnOf = new Int32Array(code.length);
  const cellsOf = [];
  const saidAt = [];
  const most = Math.max(...rows.map((row) => row.turns.length));
  for (let u = 0; u < most; u += 1) {
    const parts = rows.flatMap((row) => row.turns[u] ?? []);
    const own = await aligned(parts, 0, code, width, isStale);
    if (!own) return null;
    for (const part of parts) for (let i = part.start; i < part.end; i += 1) columnOf[i] = own.columnOf[i] + cellsOf.length;
    cellsOf.push(...own.cellsOf);
    saidAt.push(cellsOf.length);
    cellsOf.push(Math.max(1, ...parts.map((part) => Math.min(24, part.said.length))) + 1);
  }
  return { columnOf, cellsOf: Int32Array.from(cellsOf), saidAt };
}
