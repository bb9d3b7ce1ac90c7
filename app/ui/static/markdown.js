// Markdown of a model, drawn: parsed by markdown-it, cleaned by DOMPurify, then code is coloured and formulas are set.
// A text of a model is nobody's friend: HTML in it shows as it was written, pictures become links, links leave no trace.
import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.mjs";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { el, t } from "./core.js";
import { addMath, setFormulas } from "./math.js";

const HIGHLIGHT_MOST_CHARS = 8000; // of a code block that still grows: it is coloured anew at each update

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: false });
addMath(markdown);
addLineBreaks(markdown);
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index];
  const escape = markdown.utils.escapeHtml;
  return `<a href="${escape(token.attrGet("src") ?? "")}">${escape(token.content || token.attrGet("src") || "")}</a>`;
};
markdown.renderer.rules.fence = (tokens, index) => codeMarkup(tokens[index].content, tokens[index].info);
markdown.renderer.rules.code_block = (tokens, index) => codeMarkup(tokens[index].content, "");

function codeMarkup(code, info) {
  const escape = markdown.utils.escapeHtml;
  return `<pre data-language="${escape(info.trim().split(/\s+/)[0])}"><code>${escape(code)}</code></pre>`;
}

/** `<br>`, which models write into cells of tables, is the one tag that is obeyed. */
function addLineBreaks(md) {
  md.inline.ruler.push("br", (state, silent) => {
    const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
    if (!found) return false;
    if (!silent) state.push("hardbreak", "br", 0);
    state.pos += found[0].length;
    return true;
  });
}

/** Text as nodes that are safe to put into the page. `env` carries link definitions from one piece to the next. */
function drawn(tokens, env) {
  const html = markdown.renderer.render(tokens, markdown.options, env);
  const fragment = DOMPurify.sanitize(html, { RETURN_DOM_FRAGMENT: true, FORBID_TAGS: ["style", "form", "input", "img"] });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = el("div", { class: "fs-table", tabIndex: 0 });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  setFormulas(fragment);
  return fragment;
}

// -- code

let highlighter = null; // loaded with the first code block
let loading = null;

function codeBlock(pre) {
  const code = pre.textContent, language = pre.dataset.language;
  const body = el("code");
  const block = el("div", { class: "fs-code", data: { language } },
    el("div", { class: "fs-code-bar" },
      el("span", { text: language || t("chat.code") }),
      el("button", { type: "button", class: "fs-quiet", text: t("chat.copy_code"),
        on: { click: (event) => copy(body.textContent, event.currentTarget) } })),
    el("pre", { tabIndex: 0 }, body));
  paint(body, code, language);
  return block;
}

function paint(body, code, language) {
  body.textContent = code;
  if (!language || code.length > HIGHLIGHT_MOST_CHARS * 4) return;
  if (highlighter) return colour(body, code, language);
  loading ??= import("../vendor/highlight/highlight.min.js").then((module) => { highlighter = module.default; });
  loading.then(() => { if (body.textContent === code) colour(body, code, language); });
}

function colour(body, code, language) {
  if (highlighter.getLanguage(language)) body.innerHTML = highlighter.highlight(code, { language }).value;
}

/** Put text on the clipboard and say so on the button. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = t("chat.copied");
  } catch {
    button.textContent = t("chat.not_copied");
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

// -- a text that grows

/** Draws a text into `root` while it comes. What is above its last block stays as it was drawn, so that an update costs
 *  the same however long the text is. */
export class GrowingText {
  #root;
  #source = "";
  #settled = 0; // characters that are drawn for good
  #tail;
  #growingCode = null; // {body, language} of a code block that is the tail
  #env = {};

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
    if (text.startsWith(this.#source)) this.#source = text;
    else {
      this.#source = text;
      this.#clear();
    }
    this.#draw();
  }

  /** Nothing more will come. A link defined after its use is known only now. */
  finish() {
    if (/^ {0,3}\[[^\]]+\]:/m.test(this.#source)) {
      this.#clear();
      this.#env = {};
      markdown.parse(this.#source, this.#env);
    } else if (this.#growingCode === null) return;
    this.#growingCode = null;
    this.#draw();
  }

  #clear() {
    this.#settled = 0;
    this.#growingCode = null;
    this.#tail = el("div", { class: "fs-block" });
    this.#root.replaceChildren(this.#tail);
  }

  #draw() {
    const text = this.#source.slice(this.#settled);
    const tokens = markdown.parse(text, this.#env);
    const last = lastBlock(tokens);
    if (last > 0) this.#settle(tokens.slice(0, last), text, tokens[last].map[0]);
    this.#drawTail(tokens.slice(last));
  }

  /** Draw these blocks for good; the rest of the text begins at `line`. */
  #settle(tokens, text, line) {
    this.#tail.before(el("div", { class: "fs-block" }, drawn(tokens, this.#env)));
    this.#settled += startOfLine(text, line);
    this.#growingCode = null;
  }

  #drawTail(tokens) {
    const fence = tokens.length === 1 && tokens[0].type === "fence" ? tokens[0] : null;
    if (fence && this.#growingCode?.language === fence.info) return this.#growCode(fence.content);
    this.#tail.replaceChildren(drawn(tokens, this.#env));
    const body = fence && this.#tail.querySelector("pre code");
    this.#growingCode = body ? { body, language: fence.info } : null;
  }

  #growCode(code) {
    const { body, language } = this.#growingCode;
    if (code.length < HIGHLIGHT_MOST_CHARS) paint(body, code, language.trim().split(/\s+/)[0]);
    else if (code.startsWith(body.textContent)) body.append(code.slice(body.textContent.length));
    else body.textContent = code;
  }
}

/** Index of the token that opens the last block. */
function lastBlock(tokens) {
  for (let i = tokens.length - 1; i > 0; i--) {
    if (tokens[i].level === 0 && tokens[i].nesting >= 0 && tokens[i].map) return i;
  }
  return 0;
}

function startOfLine(text, line) {
  let start = 0;
  for (let i = 0; i < line; i++) start = text.indexOf("\n", start) + 1;
  return start;
}
