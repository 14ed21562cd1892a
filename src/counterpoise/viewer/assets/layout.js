// Where tokens stand. Widths are cells of a fixed-width font, so that no text has to be drawn to be measured.

import { cells } from "./text.js";
import { replyLines } from "./turns.js";

export const LINE = 22;
export const HEAD = 34;
export const GAP = 18;
export const TITLE = 30; // above a column of rollouts
export const TURN = 22; // above the tokens of a turn
const SLIM = 40; // cells: a head needs two lines
const INDENT = 10; // its tokens, in pixels
const FOLDED = 3; // lines of a reply that is folded
const OPEN = 14; // and of one that is not: the rest scrolls
export const ROW = 28; // of the aligned layout
export const MARGIN = 150; // left of aligned tokens, for the rollout's name
export const NARROW = 620; // a pane below this has its columns under each other

// First token of every line of a rollout, and the end. A token with a line break ends its line; a long one stands alone.
export function brokenLines(start, end, code, width, isBreak, capacity) {
  const lines = [start];
  let used = 0;
  for (let i = start; i < end; i += 1) {
    const cellsOf = width[code[i]];
    if (used > 0 && used + cellsOf > capacity) {
      lines.push(i);
      used = 0;
    }
    used += cellsOf;
    if (isBreak[code[i]] && i + 1 < end) {
      lines.push(i + 1);
      used = 0;
    }
  }
  lines.push(end);
  return Int32Array.from(lines);
}

// A rollout as it stands: its lines (first tokens, and the end), the height of each above the rollout's top, what else stands there.
export function plainBlock(row, { code, width, isBreak }, capacity) {
  const lines = brokenLines(row.start, row.end, code, width, isBreak, capacity);
  const offsets = Float64Array.from({ length: lines.length - 1 }, (_, k) => HEAD + k * LINE);
  return { lines, offsets, extras: [], indent: 0, height: HEAD + offsets.length * LINE + GAP };
}

// The same with turns: each has a head, its tokens, and the reply behind them, or below where it is long.
export function turnBlock(row, { code, width, isBreak }, all) {
  const capacity = Math.max(8, all - 2); // tokens of a turn are indented
  const lines = [];
  const offsets = [];
  const extras = [];
  let top = HEAD;
  for (const turn of row.turns) {
    const block = { kind: "turn", turn, top, height: 0 };
    extras.push(block);
    top += capacity < SLIM ? 2 * TURN : TURN;
    const own = brokenLines(turn.start, turn.end, code, width, isBreak, capacity);
    for (let k = 0; k + 1 < own.length; k += 1) {
      lines.push(own[k]);
      offsets.push(top);
      top += LINE;
    }
    if (turn.said) {
      let used = 0;
      for (let i = own.at(-2); i < turn.end; i += 1) used += width[code[i]];
      const extra = placedReply(turn, used, capacity);
      extras.push({ ...extra, kind: "reply", turn, top: extra.isInline ? top - LINE : top });
      top += extra.isInline ? 0 : extra.height;
    }
    block.height = top - block.top;
    top += 6;
  }
  return { lines: Int32Array.from([...lines, row.end]), offsets: Float64Array.from(offsets), extras, indent: INDENT, height: top + GAP };
}

// a short reply follows the turn on its line; a long one is folded
function placedReply(turn, used, capacity) {
  const room = capacity - used - 3;
  if (!turn.said.includes("\n") && turn.said.length <= room && cells(turn.said) <= room) return { isInline: true, isLong: false, used, height: LINE };
  const count = replyLines(turn.said, capacity, OPEN);
  const isLong = count > FOLDED;
  return { isInline: false, isLong, used: 0, height: (isLong && !turn.isOpen ? FOLDED : count) * LINE };
}

// Tops of rollouts in one column of the page, and its height.
export function stacked(blocks) {
  const tops = new Float64Array(blocks.length + 1);
  for (let r = 0; r < blocks.length; r += 1) tops[r + 1] = tops[r] + blocks[r].height;
  return tops;
}

// Bands of the aligned layout, like the lines of a text: the first column of each and the end, and every column's left edge in its band.
// With room for nothing less than all of it there is one band.
export function banded(widths, gap, room) {
  const starts = [0];
  const bandOf = new Int32Array(widths.length);
  const lefts = new Float64Array(widths.length + 1);
  let left = 0;
  for (let c = 0; c < widths.length; c += 1) {
    if (left > 0 && left + widths[c] > room) {
      starts.push(c);
      left = 0;
    }
    lefts[c] = left;
    bandOf[c] = starts.length - 1;
    left += widths[c] + gap;
  }
  lefts[widths.length] = left;
  return { starts: [...starts, widths.length], bandOf, lefts };
}

// Index of the last entry of a rising array that is at most x.
export function lastAtMost(values, x) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return low;
}
