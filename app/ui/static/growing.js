// A text of a model while it comes. What is drawn stays: an update parses and draws the end of the last block alone, and
// touches a small part of the document, so that it costs the same however long the text, a table, a list or code gets.
import { el } from "./core.js";
import { drawn, inline, languageOf, paint, parse, sketched } from "./markdown.js";
import { mathIn, setFormulas } from "./math.js";
import { patch } from "./patch.js";
import { keepingSelection } from "./selection.js";

const GROUP = 16; // blocks of a group, groups of a larger one
const LEVELS = 2;
const LINES_CHARS = 2000; // of code that are drawn anew at each update
const PARAGRAPH_CHARS = 3000; // a longer paragraph is drawn in parts
const CERTAIN_CHARS = 12; // of a line, from which it is known what it begins: "10" may become the next row of a list

/** Blocks one below the other, in groups of groups. A browser whose page has formulas looks at all that is in an element
 *  when something is put into it, as its own style sheet has rules of siblings for them. */
class Blocks {
  #open = []; // the group of each level that is being filled

  constructor() {
    this.element = el("div");
  }

  add(block) {
    this.#put(block, 0);
  }

  #put(element, level) {
    if (level === LEVELS) return this.element.append(element);
    if ((this.#open[level]?.childElementCount ?? GROUP) >= GROUP) {
      this.#open[level] = el("div", { class: "fs-group" });
      this.#put(this.#open[level], level + 1);
    }
    this.#open[level].append(element);
  }
}

/** Draws a text into `root` while it comes. */
export class GrowingText {
  #root;
  #source = "";
  #settled = 0; // characters that are drawn for good
  #blocks;
  #tail;
  #growing = null; // what stays of the last block: GrowingRows or GrowingCode
  #start = 0; // of the last block, in the source
  #splitsAt = PARAGRAPH_CHARS;
  #env = {};
  #numDraws = 0;
  #ends = []; // of what is drawn for good
  #hasParts = false; // a paragraph is drawn in parts

  constructor(root) {
    this.#root = root;
    this.#clear();
  }

  get source() {
    return this.#source;
  }

  /** The text is this now. */
  set(text) {
    if (text === this.#source) return;
    const goesOn = text.startsWith(this.#source);
    this.#source = text;
    if (!goesOn) this.#clear();
    this.#numDraws += 1;
    keepingSelection(this.#root, () => this.#draw());
  }

  /** Nothing more will come: what is drawn becomes what the whole text is. A link defined after its use is known only
   *  now, and what looked like two blocks may have been one. */
  finish() {
    const hasDefinitions = /^ {0,3}\[[^\]]+\]:/m.test(this.#source);
    if (this.#numDraws < 2 && !this.#hasParts && !hasDefinitions) return;
    const env = {}, tokens = parse(this.#source, env);
    const starts = startsOfBlocks(tokens, this.#source);
    const isWhole = !this.#hasParts && !hasDefinitions && this.#ends.every((end) => starts.has(end));
    if (isWhole && (this.#growing?.isWhole ?? true)) return;
    keepingSelection(this.#root, () => (isWhole ? this.#drawLastAnew() : this.#drawWhole(tokens, env)));
  }

  #drawWhole(tokens, env) {
    const knownMath = mathIn(this.#root);
    this.#clear();
    this.#tail.replaceChildren(drawn(tokens, env, knownMath));
  }

  #clear() {
    this.#settled = this.#start = this.#numDraws = 0;
    this.#ends = [];
    this.#hasParts = false;
    this.#growing = null;
    this.#blocks = new Blocks();
    this.#tail = el("div", { class: "fs-block" });
    this.#root.replaceChildren(this.#blocks.element, this.#tail);
  }

  #draw() {
    const head = this.#growing?.head ?? "";
    const text = head + this.#source.slice(this.#settled);
    const begin = this.#settled - head.length; // of `text`, in the source
    const tokens = parse(text, this.#env);
    const last = lastBlock(tokens);
    if (head && (last > 0 || !this.#growing.grow(tokens))) return this.#drawLastAnew(); // it has come to its end
    if (last > 0 && !isCertain(text, tokens[last])) return this.#drawTail(tokens);
    if (last > 0) this.#settle(tokens.slice(0, last), startOfLine(text, tokens[last].map[0]));
    if (!head && !this.#drawTail(tokens.slice(last))) return this.#draw();
    const end = this.#growing?.settle(tokens.slice(last), text);
    if (end) this.#settled = begin + end;
  }

  #drawLastAnew() {
    this.#settled = this.#start;
    this.#growing = null;
    this.#draw();
  }

  /** Draw these blocks for good: so many characters. */
  #settle(tokens, length, more = {}) {
    this.#blocks.add(el("div", { class: "fs-block", ...more }, drawn(tokens, this.#env, mathIn(this.#tail))));
    this.#settled += length;
    this.#start = this.#settled;
    this.#ends.push(this.#settled);
    this.#splitsAt = PARAGRAPH_CHARS;
  }

  /** False where a part of it is drawn for good, and the rest is to be looked at. */
  #drawTail(tokens) {
    if (tokens[0]?.type === "paragraph_open" && this.#split()) return false;
    patch(this.#tail, sketched(tokens, this.#env));
    setFormulas(this.#tail);
    this.#growing = growing(tokens, this.#tail);
    return true;
  }

  /** Draw the beginning of a long paragraph for good, as far as no mark in it is open. */
  #split() {
    const text = this.#source.slice(this.#settled);
    if (text.length < this.#splitsAt) return false;
    const cut = placeToCut(text);
    this.#hasParts ||= cut > 0;
    if (cut) this.#settle(parse(text.slice(0, cut), this.#env), cut, { data: { goesOn: "" } });
    else this.#splitsAt = text.length * 1.5;
    return cut > 0;
  }
}

/** What of this block, just drawn in `tail`, can stay while it grows; null where nothing can. Each has
 *    head                  lines that make the same block of what is drawn anew; empty while all of it is
 *    isWhole               it was drawn in one go
 *    grow(tokens)          draws what has come, in place of what is not settled; false where this is another block now
 *    settle(tokens, text)  what was drawn last stays from now on, up to this character of the text; 0: none of it */
function growing(tokens, tail) {
  const kind = tokens[0]?.type;
  if (lastBlock(tokens) > 0) return null;
  if (kind === "fence" && tokens.length === 1) return new GrowingCode(tokens[0], tail.querySelector("pre code"));
  return kind in ROWS && tail.querySelector(ROWS[kind].place) ? new GrowingRows(tokens, tail) : null;
}

const ROWS = {
  table_open: { place: "tbody", row: "tr_open", level: 2, numHeadLines: 2 },
  bullet_list_open: { place: "ul", row: "list_item_open", level: 1, numHeadLines: 0 },
  ordered_list_open: { place: "ol", row: "list_item_open", level: 1, numHeadLines: 0 },
};

/** A table or a list: its last row alone is drawn again. */
class GrowingRows {
  head = "";
  isWhole = true;
  #kind; #rows; #isLoose; #numSettled = 0;

  constructor(tokens, tail) {
    this.#kind = tokens[0].type;
    this.#rows = tail.querySelector(ROWS[this.#kind].place);
    this.#isLoose = isLoose(tokens);
  }

  grow(tokens) {
    if (tokens[0]?.type !== this.#kind || (isLoose(tokens) && !this.#isLoose)) return false;
    if (this.#isLoose) for (const each of tokens) if (isOfRow(each)) each.hidden = false;
    const fresh = sketched(tokens, {}).querySelector(ROWS[this.#kind].place);
    if (!fresh) return false;
    const wanted = [...fresh.children], kept = [...this.#rows.children].slice(this.#numSettled);
    kept.forEach((row, at) => (wanted[at] ? patch(row, wanted[at]) : row.remove()));
    this.#rows.append(...wanted.slice(kept.length));
    for (const row of [...this.#rows.children].slice(this.#numSettled)) setFormulas(row);
    this.isWhole = false;
    return true;
  }

  settle(tokens, text) {
    const { row, level, numHeadLines } = ROWS[this.#kind];
    const first = tokens[0].map[0] + numHeadLines;
    const rows = tokens.filter((each) => each.type === row && each.level === level && each.map[0] >= first);
    if (rows.length < 2) return 0;
    this.head ||= numHeadLines ? text.slice(startOfLine(text, tokens[0].map[0]), startOfLine(text, first)) : "\n";
    this.#numSettled += rows.length - 1;
    return startOfLine(text, rows.at(-1).map[0]);
  }
}

/** A paragraph right in a row of a list: shown as one where an empty line stands anywhere between the rows. */
function isOfRow({ type, level }) {
  return level === 2 && ["paragraph_open", "paragraph_close"].includes(type);
}

function isLoose(tokens) {
  return tokens.some((each) => isOfRow(each) && !each.hidden);
}

/** Code: its last lines alone are coloured again. */
class GrowingCode {
  head = "";
  isWhole = true;
  #info; #body; #live;

  constructor({ info }, body) {
    this.#info = info;
    this.#body = body;
    this.#live = el("span", { class: "fs-lines" }, ...body.childNodes);
    body.append(this.#live);
  }

  grow([token, ...others]) {
    if (token?.type !== "fence" || token.info !== this.#info || others.length > 0) return false;
    this.#paint(token.content);
    return true;
  }

  settle([{ content, map }], text) {
    const first = startOfLine(text, map[0]), second = startOfLine(text, map[0] + 1);
    if (text[second - 1] !== "\n") return 0; // the line that names the language is still coming
    this.head ||= text.slice(first, second);
    const end = content.length < LINES_CHARS ? 0 : content.lastIndexOf("\n", content.length - 2) + 1;
    if (end > 0) {
      this.#paint(content.slice(0, end));
      this.#live = el("span", { class: "fs-lines" });
      this.#body.append(this.#live);
      this.#paint(content.slice(end));
      this.isWhole = false;
    }
    return startOfLine(text, map[0] + 1 + content.slice(0, end).split("\n").length - 1);
  }

  #paint(code) {
    paint(this.#live, code, languageOf(this.#info));
  }
}

/** Where a long paragraph can be cut: before a word, no mark being open; 0 where that is nowhere. */
function placeToCut(text) {
  for (const share of [0.8, 0.6, 0.4]) {
    const from = Math.floor(text.length * share);
    const space = /[\p{L}\p{N}.,;:!?]\s(?=\p{L})/u.exec(text.slice(from, from + 300));
    const cut = space ? from + space.index + 2 : from;
    const [before, after] = [text.slice(0, cut), text.slice(cut)];
    if (!/^\p{L}/u.test(after) || !/[\p{L}\p{N}\s]$/u.test(before)) continue;
    const words = inline(before).replace(/<(code|span)\b[^>]*>[^<]*<\/\1>/g, "").replace(/<[^>]*>/g, "");
    const isOpen = /[*_`$[\]\\~<]/.test(words); // marks in code and formulas are at home there
    if (!isOpen && inline(before) + inline(after) === inline(text)) return cut;
  }
  return 0;
}

/** Index of the token that opens the last block. */
function lastBlock(tokens) {
  for (let i = tokens.length - 1; i > 0; i--) {
    if (tokens[i].level === 0 && tokens[i].nesting >= 0 && tokens[i].map) return i;
  }
  return 0;
}

/** Nothing that can follow makes this block a part of the one before it. */
function isCertain(text, token) {
  const line = text.slice(startOfLine(text, token.map[0]));
  return line.includes("\n") || line.trim().length > CERTAIN_CHARS;
}

/** Places in the text. */
function startsOfBlocks(tokens, text) {
  const lines = [0];
  for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", end + 1)) lines.push(end + 1);
  return new Set(tokens.filter((each) => each.level === 0 && each.nesting >= 0 && each.map).map((each) => lines[each.map[0]]));
}

function startOfLine(text, line) {
  let start = 0;
  for (let i = 0; i < line; i++) start = text.indexOf("\n", start) + 1 || text.length;
  return start;
}
