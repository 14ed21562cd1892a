// Text of a model, made safe to look at: what cannot be seen shows as a symbol. It reaches the page through textContent alone.

const HIDDEN = /[\p{C}\p{Z}]/gu;
const WIDE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\p{Emoji_Presentation}\uff01-\uff60]/u;
const MARK = /\p{M}/u;

export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (char) => {
    if (char === " ") return char;
    if (char === "\n") return "⏎";
    if (char === "\t") return "⇥";
    return `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// like visible, with the lines of the text kept
export function visibleLines(text) {
  return String(text ?? "").split("\n").map(visible).join("\n");
}

// cells of a fixed-width font that a text takes
export function cells(text) {
  let count = 0;
  for (const char of text) count += char < "\u0300" ? 1 : MARK.test(char) ? 0 : WIDE.test(char) ? 2 : 1;
  return count;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : value.toPrecision(4);
}

// few digits, for narrow tables
export function compact(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-2 || size >= 1e4) ? value.toExponential(1) : value.toPrecision(3);
  return value > 0 ? `+${text}` : text;
}

export function signed(value) {
  return Number.isFinite(value) && value > 0 ? `+${number(value)}` : number(value);
}

export function element(tag, css = "", text = "") {
  const out = document.createElement(tag);
  if (css) out.className = css;
  if (text !== "") out.textContent = text;
  return out;
}

export function family(name, options) {
  const out = element("optgroup");
  out.label = name;
  out.append(...options);
  return out;
}

export function option(value, text) {
  const out = element("option", "", text);
  out.value = value;
  return out;
}
