// Formulas: \( \), \[ \], $$ $$ and $ $ become placeholders while Markdown is parsed, and are set by KaTeX afterwards.
import { el } from "./core.js";

const PAIRS = [
  { open: "$$", close: "$$", isDisplay: true },
  { open: "\\[", close: "\\]", isDisplay: true },
  { open: "\\(", close: "\\)", isDisplay: false },
];

export function addMath(markdown) {
  markdown.inline.ruler.before("escape", "math", inlineMath);
  markdown.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
  markdown.renderer.rules.math = (tokens, index) => {
    const token = tokens[index];
    const tag = token.block ? "div" : "span";
    const kind = token.markup === "display" ? "fs-math fs-display" : "fs-math";
    return `<${tag} class="${kind}">${markdown.utils.escapeHtml(token.content)}</${tag}>`;
  };
}

function inlineMath(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const found = pairAt(src, pos) ?? dollarAt(src, pos);
  if (!found) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = found.content;
    token.markup = found.isDisplay ? "display" : "";
  }
  state.pos = found.end;
  return true;
}

function pairAt(src, pos) {
  for (const { open, close, isDisplay } of PAIRS) {
    if (!src.startsWith(open, pos)) continue;
    const end = src.indexOf(close, pos + open.length);
    if (end <= pos + open.length) continue;
    return { content: src.slice(pos + open.length, end), end: end + close.length, isDisplay };
  }
  return null;
}

/** $x$, but not prices: no space inside the dollars, no digit behind them, all on one line. */
function dollarAt(src, pos) {
  const found = /^\$(?![\s$])((?:\\.|[^\\$\n])*?[^\s\\$]|[^\s\\$])\$(?!\d)/.exec(src.slice(pos, pos + 500));
  return found && { content: found[1], end: pos + found[0].length, isDisplay: false };
}

/** A formula that has lines of its own. */
function blockMath(state, startLine, endLine, silent) {
  const first = lineOf(state, startLine);
  const pair = PAIRS.find((each) => each.isDisplay && first.startsWith(each.open));
  if (!pair || closesEarly(first, pair)) return false;
  const lines = [];
  for (let line = startLine; line < endLine; line++) {
    const text = line === startLine ? first.slice(pair.open.length) : lineOf(state, line);
    if (text.trimEnd().endsWith(pair.close)) {
      if (silent) return true;
      lines.push(text.trimEnd().slice(0, -pair.close.length));
      push(state, lines.join("\n"), startLine, line + 1);
      return true;
    }
    lines.push(text);
  }
  return false;
}

/** Text follows the formula on its line: then it is one inside a sentence. */
function closesEarly(line, { open, close }) {
  const end = line.indexOf(close, open.length);
  return end >= 0 && line.slice(end + close.length).trim() !== "";
}

function lineOf(state, line) {
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}

function push(state, content, startLine, endLine) {
  const token = state.push("math", "", 0);
  Object.assign(token, { block: true, content, markup: "display", map: [startLine, endLine] });
  state.line = endLine;
}

let katex = null; // loaded with the first formula
let loading = null;

function load() {
  document.head.append(el("link", { rel: "stylesheet", href: "ui/vendor/katex/katex.min.css" }));
  return import("../vendor/katex/katex.mjs").then((module) => { katex = module.default; });
}

/** The formulas in an element that is about to be drawn anew: they need not be set again. */
export function mathIn(root) {
  const known = new Map();
  for (const each of root?.querySelectorAll(".fs-math[data-tex]") ?? []) known.set(keyOf(each, each.dataset.tex), each);
  return known;
}

/** Set every placeholder in `root`; until KaTeX is there they show what was written. */
export function setFormulas(root, known = new Map()) {
  const formulas = [...root.querySelectorAll(".fs-math:not([data-tex])")];
  if (formulas.length === 0) return;
  if (katex) formulas.forEach((each) => setFormula(each, known));
  else (loading ??= load()).then(() => formulas.forEach((each) => setFormula(each, known)));
}

function setFormula(element, known) {
  if (element.dataset.tex !== undefined) return; // an earlier call waited for KaTeX too
  const tex = element.textContent, key = keyOf(element, tex);
  const same = known.get(key);
  known.delete(key); // it can stand in one place
  if (same) return element.replaceWith(same);
  element.dataset.tex = tex;
  katex.render(tex, element, {
    displayMode: isDisplay(element),
    throwOnError: false,
    trust: false,
    maxSize: 20,
    maxExpand: 300,
  });
}

function keyOf(element, tex) {
  return `${isDisplay(element)} ${tex}`;
}

function isDisplay(element) {
  return element.classList.contains("fs-display");
}
