// The rollouts of a prompt, drawn only where they are looked at. Two layouts: text (columns by sign) and aligned (rows, equal tokens in line).

import { aligned } from "./align.js";
import { GAP, HEAD, LINE, brokenLines, lastAtMost, stacked } from "./layout.js";
import { element, number, signed } from "./text.js";

const NEAR = 44; // pixels around what is in sight
const FAR = 240;
const MAX_LIVE = 600;
const BLOCK = 8; // columns of the aligned layout that are drawn together
const SIDES = [[1, "positive advantage"], [-1, "negative advantage"], [0, "no advantage"]];

export class Pane {
  // group: rows [{start, end, sign, ...}], code, display, width, isBreak; css(i): classes of a token
  constructor(place, { onHover, onPick, css }) {
    this.place = place;
    this.css = css;
    this.live = new Map();
    this.canvas = element("div", "canvas");
    this.place.append(this.canvas);
    this.layout = "text";
    this.version = 0;
    place.addEventListener("scroll", () => this.draw(), { passive: true });
    this.later = 0;
    place.addEventListener("mouseover", (event) => this.withToken(event, onHover));
    place.addEventListener("click", (event) => this.withToken(event, onPick));
    new ResizeObserver(() => this.arrange()).observe(place);
  }

  withToken(event, act) {
    const target = event.target.closest?.(".t");
    if (target && this.place.contains(target)) act(Number(target.dataset.i));
  }

  // at: the token to have in sight, -1 for the beginning
  show(group, layout, at = -1) {
    this.group = group;
    this.layout = layout;
    this.version += 1;
    this.place.scrollTo(0, 0);
    return this.arrange(at);
  }

  async arrange(at = -1) {
    if (!this.group || !this.place.clientWidth) return;
    this.clear();
    this.cell = this.measured();
    if (this.layout === "aligned") await this.arrangeAligned();
    else this.arrangeText();
    if (at >= 0) this.scrollNear(at);
    this.draw();
  }

  measured() {
    const probe = element("span", "t probe", "x".repeat(100));
    this.canvas.append(probe);
    const width = probe.getBoundingClientRect().width / 100;
    probe.remove();
    return width || 8;
  }

  arrangeText() {
    const { rows, code, width, isBreak } = this.group;
    const sides = SIDES.map(([sign, title]) => ({ title, rows: rows.filter((row) => row.sign === sign) })).filter((side) => side.rows.length);
    const space = (this.place.clientWidth - 16) / sides.length;
    const capacity = Math.max(8, Math.floor((space - 36) / this.cell) - 1);
    this.sides = sides.map((side, at) => {
      const lines = side.rows.map((row) => brokenLines(row.start, row.end, code, width, isBreak, capacity));
      return { ...side, lines, tops: stacked(lines), left: 16 + at * space, space: space - 20 };
    });
    this.canvas.style.width = "";
    this.canvas.style.height = `${30 + Math.max(...this.sides.map((side) => side.tops.at(-1)))}px`;
  }

  async arrangeAligned() {
    const { rows, code, width } = this.group;
    const version = this.version;
    const sorted = [...rows].sort((a, b) => b.sign - a.sign || a.start - b.start);
    this.canvas.replaceChildren(element("p", "busy", `Aligning ${rows.length} rollouts …`));
    const found = await aligned(sorted, 0, code, width, () => version !== this.version || this.layout !== "aligned");
    if (!found) return;
    this.clear();
    const lefts = new Float64Array(found.cellsOf.length + 1);
    for (let c = 0; c < found.cellsOf.length; c += 1) lefts[c + 1] = lefts[c] + found.cellsOf[c] * this.cell + 3;
    this.grid = { rows: sorted, columnOf: found.columnOf, lefts };
    this.canvas.style.width = `${150 + lefts.at(-1) + 20}px`;
    this.canvas.style.height = `${30 + sorted.length * 28 + 20}px`;
  }

  clear() {
    this.live.clear();
    this.canvas.replaceChildren();
    this.sides = null;
    this.grid = null;
  }

  // what is in sight at once; a wider margin around it when scrolling rests
  draw() {
    this.drawWithin(NEAR);
    clearTimeout(this.later);
    this.later = setTimeout(() => this.drawWithin(FAR), 70);
  }

  drawWithin(margin) {
    const wanted = new Map();
    const { scrollLeft } = this.place; // read before anything is written: reading it later would lay the page out again
    const top = this.place.scrollTop - margin;
    const bottom = this.place.scrollTop + this.place.clientHeight + margin;
    if (this.sides) for (const side of this.sides) this.wantText(side, top, bottom, wanted);
    if (this.grid) this.wantGrid(wanted);
    if (margin === FAR || this.live.size > MAX_LIVE) {
      for (const [key, old] of this.live) {
        if (!wanted.has(key)) {
          old.remove();
          this.live.delete(key);
        }
      }
    }
    const fresh = document.createDocumentFragment();
    for (const [key, make] of wanted) {
      if (!this.live.has(key)) {
        const made = make();
        this.live.set(key, made);
        fresh.append(made);
      }
    }
    this.canvas.append(fresh);
    if (this.grid) for (const [key, made] of this.live) if (key[0] === "g") made.style.left = `${scrollLeft}px`;
  }

  wantText(side, top, bottom, wanted) {
    wanted.set(`${side.title}`, () => this.at(element("h3", `side ${cssOfSign(side.rows[0].sign)}`, `${side.title} · ${side.rows.length}`), side.left, 4, side.space));
    const base = 30;
    for (let r = lastAtMost(side.tops, top - base); r < side.rows.length && side.tops[r] + base < bottom; r += 1) {
      const row = side.rows[r];
      wanted.set(`h${row.start}`, () => this.at(head(row), side.left, base + side.tops[r], side.space));
      const from = Math.max(0, Math.floor((top - base - side.tops[r] - HEAD) / LINE));
      for (let k = from; k < side.lines[r].length - 1; k += 1) {
        const y = base + side.tops[r] + HEAD + k * LINE;
        if (y > bottom) break;
        wanted.set(`l${side.lines[r][k]}`, () => this.at(this.line(side.lines[r][k], side.lines[r][k + 1]), side.left, y, side.space));
      }
    }
  }

  wantGrid(wanted) {
    const { rows, columnOf, lefts } = this.grid;
    const { scrollTop, scrollLeft, clientWidth, clientHeight } = this.place;
    const [top, bottom, left, right] = [scrollTop - NEAR, scrollTop + clientHeight + NEAR, scrollLeft - NEAR, scrollLeft + clientWidth + NEAR];
    const firstBlock = Math.floor(lastAtMost(lefts, left - 150) / BLOCK);
    const lastBlock = Math.floor(lastAtMost(lefts, right - 150) / BLOCK);
    for (let r = Math.max(0, Math.floor((top - 30) / 28)); r < rows.length && 30 + r * 28 < bottom; r += 1) {
      const y = 30 + r * 28;
      wanted.set(`g${rows[r].start}`, () => this.at(shortHead(rows[r]), 0, y, 140));
      for (let block = firstBlock; block <= lastBlock; block += 1) {
        wanted.set(`b${rows[r].start}/${block}`, () => this.at(this.cells(rows[r], block, columnOf, lefts), 150, y, 0));
      }
    }
  }

  line(from, to) {
    const line = element("div", "line");
    for (let i = from; i < to; i += 1) line.append(this.token(i));
    return line;
  }

  cells(row, block, columnOf, lefts) {
    const out = element("div", "cells");
    const from = row.start + firstAtLeast(columnOf, row, block * BLOCK);
    for (let i = from; i < row.end && columnOf[i] < (block + 1) * BLOCK; i += 1) {
      const made = this.token(i);
      made.style.left = `${lefts[columnOf[i]]}px`;
      made.style.width = `${lefts[columnOf[i] + 1] - lefts[columnOf[i]] - 3}px`;
      out.append(made);
    }
    return out;
  }

  token(i) {
    const made = document.createElement("span");
    made.className = this.css(i);
    made.textContent = this.group.display[this.group.code[i]];
    made.dataset.i = i;
    return made;
  }

  at(made, left, top, width) {
    made.style.left = `${left}px`;
    made.style.top = `${top}px`;
    if (width) made.style.width = `${width}px`;
    return made;
  }

  // new classes for every token in sight
  repaint() {
    for (const made of this.live.values()) {
      if (made.className === "line" || made.className === "cells") for (const token of made.children) token.className = this.css(Number(token.dataset.i));
    }
  }

  reveal(i) {
    this.scrollNear(i);
    this.draw();
  }

  scrollNear(i) {
    const spot = this.spot(i);
    if (!spot) return;
    const { scrollTop, clientHeight, scrollLeft, clientWidth } = this.place;
    if (spot.top < scrollTop + 40 || spot.top > scrollTop + clientHeight - 60) this.place.scrollTop = spot.top - clientHeight / 2;
    if (spot.left !== null && (spot.left < scrollLeft + 160 || spot.left > scrollLeft + clientWidth - 80)) this.place.scrollLeft = spot.left - clientWidth / 2;
  }

  spot(i) {
    if (this.grid) {
      const r = this.grid.rows.findIndex((row) => i >= row.start && i < row.end);
      return { top: 30 + r * 28, left: 150 + this.grid.lefts[this.grid.columnOf[i]] };
    }
    for (const side of this.sides ?? []) {
      const r = side.rows.findIndex((row) => i >= row.start && i < row.end);
      if (r >= 0) return { top: 30 + side.tops[r] + HEAD + lastAtMost(side.lines[r], i) * LINE, left: null };
    }
    return null;
  }

  // the token above or below: the neighbouring rollout at the same column or position
  neighbour(i, direction) {
    const rows = this.grid ? this.grid.rows : (this.sides ?? []).flatMap((side) => side.rows);
    const r = rows.findIndex((row) => i >= row.start && i < row.end);
    const next = rows[r + direction];
    if (!next) return i;
    if (!this.grid) return Math.min(next.end - 1, next.start + (i - rows[r].start));
    const offset = firstAtLeast(this.grid.columnOf, next, this.grid.columnOf[i]);
    return Math.min(next.end - 1, next.start + offset);
  }
}

// offset of the first token of a row at or behind a column
function firstAtLeast(columnOf, row, column) {
  const columns = columnOf.subarray(row.start, row.end);
  if (!columns.length || columns[0] >= column) return 0;
  const at = lastAtMost(columns, column);
  return columns[at] >= column ? at : at + 1;
}

function cssOfSign(sign) {
  return sign > 0 ? "positive" : sign < 0 ? "negative" : "zero";
}

function head(row) {
  const out = element("div", `head ${cssOfSign(row.sign)}`);
  const parts = [["", `#${row.rollout}`], ["reward", number(row.reward)], ["advantage", signed(row.advantage)], ["tokens", number(row.end - row.start)]];
  if (row.flips !== null) parts.push(["flips", number(row.flips)]);
  if (row.stop_reason && row.stop_reason !== "stop") parts.push(["ended by", row.stop]);
  for (const [name, value] of parts) {
    const part = element("span", name ? "" : "name");
    if (name) part.append(element("i", "", name), " ");
    part.append(element("b", "", value));
    out.append(part);
  }
  return out;
}

function shortHead(row) {
  const out = element("div", `short ${cssOfSign(row.sign)}`);
  out.append(element("b", "", `#${row.rollout}`), element("span", "", `reward ${number(row.reward)}`));
  return out;
}
