// Markdown of a model, drawn: parsed by markdown-it, cleaned by DOMPurify, then code is coloured and formulas are set.
// A text of a model is nobody's friend: HTML in it shows as it was written, pictures become links, links leave no trace.
import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.mjs";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { el, t } from "./core.js";
import { addMath, setFormulas } from "./math.js";

const HIGHLIGHT_MOST_CHARS = 32_000; // of a code block

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: false });
addMath(markdown);
addLineBreaks(markdown);
markdown.core.ruler.push("tasks", drawTasks);
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index];
  const escape = markdown.utils.escapeHtml;
  return `<a href="${escape(token.attrGet("src") ?? "")}">${escape(token.content || token.attrGet("src") || "")}</a>`;
};
markdown.renderer.rules.fence = (tokens, index) => codeMarkup(tokens[index].content, tokens[index].info);
markdown.renderer.rules.code_block = (tokens, index) => codeMarkup(tokens[index].content, "");

function codeMarkup(code, info) {
  const escape = markdown.utils.escapeHtml;
  return `<pre data-language="${escape(languageOf(info))}"><code>${escape(code)}</code></pre>`;
}

/** The language that a fence names, or "". */
export function languageOf(info) {
  return info.trim().split(/\s+/)[0];
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

/** "- [ ] to do" and "- [x] done" as boxes, empty and ticked. */
function drawTasks({ tokens }) {
  tokens.forEach(({ type, children }, at) => {
    const first = type === "inline" && tokens[at - 2]?.type === "list_item_open" ? children[0] : null;
    const found = first?.type === "text" && /^\[([ xX])\] /.exec(first.content);
    if (found) first.content = (found[1] === " " ? "☐ " : "☑ ") + first.content.slice(found[0].length);
  });
}

/** The blocks of a text, as tokens. `env` carries link definitions from one piece to the next. */
export function parse(text, env) {
  return markdown.parse(text, env);
}

/** Words of a paragraph as markup, to be compared with others. */
export function inline(text) {
  return markdown.renderInline(text);
}

/** Tokens as nodes that are safe to put into the page. knownMath: formulas that are set already, of math.js. */
export function drawn(tokens, env, knownMath) {
  const fragment = sketched(tokens, env);
  setFormulas(fragment, knownMath);
  return fragment;
}

/** As `drawn`, its formulas not set yet. */
export function sketched(tokens, env) {
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

/** Show code, coloured where its language is known. */
export function paint(body, code, language) {
  body.textContent = code;
  if (!language || code.length > HIGHLIGHT_MOST_CHARS) return;
  if (highlighter) return colour(body, code, language);
  loading ??= import("../vendor/highlight/highlight.min.js").then((module) => { highlighter = module.default; });
  loading.then(() => { if (isPlain(body, code)) colour(body, code, language); });
}

function isPlain(body, code) {
  return body.childElementCount === 0 && body.textContent === code;
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
