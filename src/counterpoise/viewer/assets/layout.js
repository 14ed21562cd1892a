// Where tokens stand. Widths are cells of a fixed-width font, so that no text has to be drawn to be measured.

export const LINE = 22;
export const HEAD = 34;
export const GAP = 18;
export const TITLE = 30; // above a column of rollouts
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

// Tops of rollouts in one column of the page, and its height.
export function stacked(lines) {
  const tops = new Float64Array(lines.length + 1);
  for (let r = 0; r < lines.length; r += 1) tops[r + 1] = tops[r] + HEAD + (lines[r].length - 1) * LINE + GAP;
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
