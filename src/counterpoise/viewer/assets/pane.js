// The rollouts of a prompt, drawn only where they are looked at. Two layouts: text (columns by sign) and aligned (rows, equal tokens in line).

import { aligned, alignedByTurns } from "./align.js";
import { LINE, MARGIN, NARROW, ROW, TITLE, banded, lastAtMost, plainBlock, stacked, turnBlock } from "./layout.js";
import { element, number, signed } from "./text.js";
import { replyBox, signOf, strip, turnAt, turnHead } from "./turns.js";

const NEAR = 44; // pixels around what is in sight
const FAR = 240;
const MAX_LIVE = 600;
const BLOCK = 8; // columns of the aligned layout that are drawn together
const TOP = 12; // above the aligned layout
const SIDES = [[1, "positive advantage"], [-1, "negative advantage"], ["mixed", "turns of both signs"], [0, "no advantage"]];
const sideOf = (row) => (row.mixed ? "mixed" : row.sign);

export class Pane {
  // group: rows [{start, end, sign, ...}], code, display, width, isBreak; css(i): classes of a token
  constructor(place, { onHover, onLeave, onPick, onGo, onState, css }) {
    this.place = place;
    this.onGo = onGo;
    this.onState = onState;
    this.css = css;
    this.live = new Map();
    this.canvas = element("div", "canvas");
    this.place.append(this.canvas);
    this.layout = "text";
    this.version = 0;
    place.addEventListener("scroll", () => this.draw(), { passive: true });
    this.later = 0;
    this.pointer = "";
    place.addEventListener("mouseover", (event) => {
      if (this.isMoved(event)) this.withToken(event, onHover);
    });
    place.addEventListener("mousemove", (event) => this.isMoved(event), { passive: true });
    place.addEventListener("mouseleave", onLeave);
    place.addEventListener("click", (event) => this.withToken(event, onPick));
    new ResizeObserver(() => this.arrange()).observe(place);
  }

  // a page that moves under a resting pointer is no pointing
  isMoved(event) {
    const before = this.pointer;
    this.pointer = `${event.clientX} ${event.clientY}`;
    return before !== this.pointer;
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
    const { rows, hasTurns } = this.group;
    const { beside } = this.group; // two colours of the same rollouts, or the two signs
    const sides = beside
      ? beside.map((title) => ({ title, rows }))
      : SIDES.map(([sign, title]) => ({ title, rows: rows.filter((row) => sideOf(row) === sign) })).filter((side) => side.rows.length);
    const isNarrow = this.place.clientWidth < NARROW;
    const space = (this.place.clientWidth - 16) / (isNarrow ? 1 : sides.length);
    const capacity = Math.max(8, Math.floor((space - 36) / this.cell) - 1);
    let below = 0;
    this.sides = sides.map((side, at) => {
      const blocks = side.rows.map((row) => (hasTurns ? turnBlock : plainBlock)(row, this.group, capacity));
      const tops = stacked(blocks);
      const base = TITLE + (isNarrow ? below : 0);
      below += TITLE + tops.at(-1);
      return { ...side, paint: beside ? at : 0, blocks, tops, base, left: 16 + (isNarrow ? 0 : at * space), space: space - 20 };
    });
    this.canvas.style.width = "";
    this.canvas.style.height = `${Math.max(...this.sides.map((side) => side.base + side.tops.at(-1)))}px`;
  }

  async arrangeAligned() {
    const { rows, code, width, hasTurns } = this.group;
    const version = this.version;
    const isStale = () => version !== this.version || this.layout !== "aligned";
    const sorted = [...rows].sort((a, b) => b.sign - a.sign || a.start - b.start);
    this.canvas.replaceChildren(element("p", "busy", `Aligning ${rows.length} rollouts …`));
    const alignment = await (hasTurns ? alignedByTurns(sorted, code, width, isStale) : aligned(sorted, 0, code, width, isStale));
    if (!alignment) return;
    this.clear();
    // few rollouts: as many bands as there are lines of text; many: one band, wider than the page
    const isBanded = sorted.length * ROW < Math.max(480, 0.7 * this.place.clientHeight);
    const widths = Float64Array.from(alignment.cellsOf, (count) => count * this.cell);
    const bands = banded(widths, 3, isBanded ? this.place.clientWidth - MARGIN - 20 : Infinity);
    this.grid = { ...bands, rows: sorted, columnOf: alignment.columnOf, saidAt: alignment.saidAt ?? [], widths, height: sorted.length * ROW + 18 };
    this.canvas.style.width = isBanded ? "" : `${MARGIN + bands.lefts.at(-1) + 20}px`;
    this.canvas.style.height = `${TOP + (bands.starts.length - 1) * this.grid.height}px`;
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
        const node = make();
        this.live.set(key, node);
        fresh.append(node);
      }
    }
    this.canvas.append(fresh);
    if (this.grid) for (const [key, node] of this.live) if (key[0] === "g") node.style.left = `${scrollLeft}px`;
  }

  wantText(side, top, bottom, wanted) {
    const { base, paint } = side;
    const css = this.group.beside ? "zero" : cssOfRow(side.rows[0]);
    wanted.set(`${paint}${side.title}`, () => this.at(element("h3", `side ${css}`, `${side.title} · ${side.rows.length}`), side.left, base - TITLE + 4, side.space));
    for (let r = lastAtMost(side.tops, top - base); r < side.rows.length && side.tops[r] + base < bottom; r += 1) {
      const [row, { lines, offsets, extras, indent }] = [side.rows[r], side.blocks[r]];
      const above = base + side.tops[r];
      wanted.set(`h${paint}/${row.start}`, () => this.at(this.head(row), side.left, above, side.space));
      for (let k = lastAtMost(offsets, top - above - LINE); k < offsets.length && above + offsets[k] <= bottom; k += 1) {
        wanted.set(`l${paint}/${lines[k]}`, () => this.at(this.line(lines[k], lines[k + 1], paint), side.left + indent, above + offsets[k], side.space - indent));
      }
      extras.forEach((extra, k) => {
        const y = above + extra.top;
        if (y + extra.height >= top && y <= bottom) wanted.set(`x${paint}/${row.start}/${k}`, () => this.extra(extra, side, indent, y));
      });
    }
  }

  // the head of a turn, or a reply: on the line of its turn, or in a box below
  extra({ kind, turn, isInline, isLong, used, height }, side, indent, y) {
    if (isInline) return this.at(element("span", "said", turn.said), side.left + indent + (used + 1.5) * this.cell, y, 0);
    const isHead = kind === "turn";
    const box = isHead ? turnHead(turn, cssOfSign(signOf(turn)), this.onState) : replyBox(turn, isLong, () => this.fold(turn));
    box.style.height = `${height}px`;
    return this.at(box, side.left + (isHead ? 0 : indent), y, side.space - (isHead ? 0 : indent));
  }

  fold(turn) {
    turn.isOpen = !turn.isOpen;
    this.arrange();
  }

  head(row) {
    const out = head(row);
    if (row.turns) out.children[0].after(strip(row, this.group.widest, this.onGo));
    return out;
  }

  wantGrid(wanted) {
    const { rows, starts, height } = this.grid;
    const { scrollTop, clientHeight } = this.place;
    const [top, bottom] = [scrollTop - NEAR, scrollTop + clientHeight + NEAR];
    for (let band = Math.max(0, Math.floor((top - TOP) / height)); band < starts.length - 1 && TOP + band * height < bottom; band += 1) {
      const base = TOP + band * height;
      const [from, to] = this.columnsInSight(band);
      for (let r = Math.max(0, Math.floor((top - base) / ROW)); r < rows.length && base + r * ROW < bottom; r += 1) {
        const row = rows[r];
        wanted.set(`g${row.start}/${band}`, () => this.at(shortHead(row), 0, base + r * ROW, MARGIN - 10));
        for (let column = from; column < to; column += BLOCK) {
          const end = Math.min(column + BLOCK, starts[band + 1]);
          wanted.set(`b${row.start}/${column}`, () => this.at(this.cells(row, column, end), MARGIN, base + r * ROW, 0));
        }
      }
    }
  }

  // columns of a band: all of them, or of a single wide one those around what is in sight
  columnsInSight(band) {
    const { starts, lefts } = this.grid;
    if (starts.length > 2) return [starts[band], starts[band + 1]];
    const { scrollLeft, clientWidth } = this.place;
    const first = Math.floor(lastAtMost(lefts, scrollLeft - NEAR - MARGIN) / BLOCK) * BLOCK;
    return [first, Math.min(starts[1], lastAtMost(lefts, scrollLeft + clientWidth + NEAR - MARGIN) + 1)];
  }

  line(from, to, paint) {
    const line = element("div", "line");
    line.dataset.paint = paint;
    for (let i = from; i < to; i += 1) line.append(this.token(i, paint));
    return line;
  }

  cells(row, fromColumn, toColumn) {
    const { columnOf, lefts, widths } = this.grid;
    const out = element("div", "cells");
    const from = row.start + firstAtLeast(columnOf, row, fromColumn);
    for (let i = from; i < row.end && columnOf[i] < toColumn; i += 1) {
      const node = this.token(i);
      node.style.left = `${lefts[columnOf[i]]}px`;
      node.style.width = `${widths[columnOf[i]]}px`;
      out.append(node);
    }
    for (const [u, turn] of (row.turns ?? []).entries()) {
      const column = this.grid.saidAt[u];
      if (turn.said && column >= fromColumn && column < toColumn) out.append(this.at(element("span", "said", turn.said.slice(0, 24).replaceAll("\n", "⏎")), lefts[column] + 4, 0, widths[column]));
    }
    return out;
  }

  token(i, paint = 0) {
    const made = document.createElement("span");
    made.className = this.css(i, paint);
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
      if (made.className === "line" || made.className === "cells") for (const token of made.querySelectorAll(".t")) token.className = this.css(Number(token.dataset.i), Number(made.dataset.paint ?? 0));
    }
  }

  // tokens of the drawn lines that are wholly in sight
  inSight() {
    const { top, bottom } = this.place.getBoundingClientRect();
    const lines = [...this.canvas.querySelectorAll(".line, .cells")].filter((line) => {
      const box = line.getBoundingClientRect();
      return box.top >= top && box.bottom <= bottom;
    });
    return lines.flatMap((line) => [...line.querySelectorAll(".t")].map((token) => Number(token.dataset.i)));
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
      const column = this.grid.columnOf[i];
      return { top: TOP + this.grid.bandOf[column] * this.grid.height + r * ROW, left: MARGIN + this.grid.lefts[column] };
    }
    for (const side of this.sides ?? []) {
      const r = side.rows.findIndex((row) => i >= row.start && i < row.end);
      if (r >= 0) return { top: side.base + side.tops[r] + side.blocks[r].offsets[lastAtMost(side.blocks[r].lines, i)], left: null };
    }
    return null;
  }

  // the token above or below: the neighbouring rollout at the same column or position
  neighbour(i, direction) {
    const sides = this.group.beside ? (this.sides ?? []).slice(0, 1) : (this.sides ?? []);
    const rows = this.grid ? this.grid.rows : sides.flatMap((side) => side.rows);
    const r = rows.findIndex((row) => i >= row.start && i < row.end);
    const next = rows[r + direction];
    if (!next) return i;
    if (next.turns) return samePlace(rows[r], next, i);
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

// the token of another rollout at the same place of the same turn, or of its last one
function samePlace(row, next, i) {
  const turn = turnAt(row, i);
  const other = next.turns[row.turns.indexOf(turn)] ?? next.turns.at(-1);
  return Math.min(other.end - 1, other.start + (i - turn.start));
}

function cssOfRow(row) {
  return row.mixed ? "mixed" : cssOfSign(row.sign);
}

function cssOfSign(sign) {
  return sign > 0 ? "positive" : sign < 0 ? "negative" : "zero";
}

function head(row) {
  const out = element("div", `head ${cssOfRow(row)}`);
  const parts = [["", `#${row.rollout}`], ["reward", number(row.reward)], ["advantage", signed(row.advantage)], ["tokens", number(row.end - row.start)]];
  if (row.flips !== null) parts.push(["flips", number(row.flips)]);
  if (!row.turns && row.stop_reason && row.stop_reason !== "stop") parts.push(["ended by", row.stop]);
  if (row.turns && row.endReason !== "done") parts.push(["ended by", row.failure ? `${row.endReason}: ${row.failure}` : row.endReason]);
  for (const [name, value] of parts) {
    const part = element("span", name ? "" : "name");
    if (name) part.append(element("i", "", name), " ");
    part.append(element("b", "", value));
    out.append(part);
  }
  return out;
}

function shortHead(row) {
  const out = element("div", `short ${cssOfRow(row)}`);
  out.append(element("b", "", `#${row.rollout}`), element("span", "", `reward ${number(row.reward)}`));
  return out;
}
