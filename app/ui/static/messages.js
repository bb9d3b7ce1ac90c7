// One message of the conversation as it is drawn: the user's, or an answer with its thinking, text, figures and actions.
import { ask, el, localized, setText, t } from "./core.js";
import { drawFigures } from "./figures.js";
import { GrowingText } from "./growing.js";
import { copy } from "./markdown.js";
import { drawProbabilities } from "./probabilities.js";

/** Make the view of a node. `actions`: edit, again, goOn, branch, turn, keep: functions of the node. */
export function messageView(node, actions) {
  return node.role === "user" ? new UserMessage(node, actions) : new AnswerMessage(node, actions);
}

const SCROLLS_FROM_CHARS = 400; // on the narrowest screens
const PART_CHARS = 2000; // of a thought that are laid out again at each update

class UserMessage {
  #bubble; #files; #versions;

  constructor(node, actions) {
    this.node = node;
    this.#bubble = el("div", { class: "fs-bubble" });
    this.#files = el("ul", { class: "fs-files", "aria-label": t("chat.attach") });
    this.#versions = versions(actions);
    this.element = el("article", { class: "fs-message fs-user", "aria-label": t("chat.you"), data: { id: node.id } },
      this.#files, this.#bubble,
      el("div", { class: "fs-actions" }, this.#versions.element,
        button("chat.edit", () => actions.edit(this.node, this.element)),
        button("chat.copy", (event) => copy(this.node.text, event.currentTarget))));
    this.update(node);
  }

  update(node) {
    this.node = node;
    setText(this.#bubble, node.text);
    this.#bubble.tabIndex = node.text.length > SCROLLS_FROM_CHARS ? 0 : -1; // what scrolls must be reached by keys
    this.#bubble.hidden = !node.text;
    this.#files.hidden = node.attachments.length === 0;
    this.#files.replaceChildren(...node.attachments.map((file) => el("li", { text: file.name })));
    this.#versions.update(node);
  }

  get versions() {
    return this.#versions;
  }
}

class AnswerMessage {
  #text; #thinking; #note; #actions; #versions; #figures; #probabilities; #goOn; #waiting = "";

  constructor(node, actions) {
    this.node = node;
    this.#thinking = thinkingFold();
    const text = el("div", { class: "fs-text", data: { testid: "bot" } });
    this.#text = new GrowingText(text);
    this.textElement = text;
    this.#note = el("p", { class: "fs-note", hidden: true });
    this.#versions = versions(actions);
    this.#figures = el("details", { class: "fs-why" });
    this.#probabilities = button("chat.probabilities", () => actions.saying(() => this.#toggleProbabilities()));
    this.#goOn = button("chat.continue", () => actions.goOn(this.node));
    this.#actions = el("div", { class: "fs-actions" }, this.#versions.element,
      button("chat.copy", (event) => copy(this.node.text, event.currentTarget)),
      button("chat.again", () => actions.again(this.node)),
      this.#goOn,
      button("chat.branch", () => actions.branch(this.node)),
      this.#probabilities);
    this.element = el("article", { class: "fs-message fs-answer", data: { id: node.id } },
      this.#thinking.element, text, this.#note, this.#actions, this.#figures);
    this.update(node);
  }

  get isWriting() {
    return this.node.state === "writing";
  }

  /** What the server says of the node now. */
  update(node) {
    const wasWriting = this.isWriting;
    this.node = node;
    this.element.dataset.state = node.state;
    this.element.setAttribute("aria-label",
      node.meta.model_id ? t("chat.answer_of", { model: node.meta.model_id }) : t("chat.answer"));
    if (!this.isWriting) {
      this.#text.set(node.text);
      this.#text.finish();
      this.#thinking.set(node.reasoning, node.meta.thinking_s ?? null, false);
    } else if (!wasWriting || node.text.length > this.#text.source.length) {
      this.#text.set(node.text); // the socket tells the rest
      this.#thinking.set(node.reasoning, null, !node.text);
    }
    this.#drawEnd();
    this.#versions.update(node);
  }

  get versions() {
    return this.#versions;
  }

  /** All that has come of it by now, as the socket tells it. */
  take({ text, reasoning, thinking_s, num_computed, num_prompt }) {
    if (!this.isWriting) return;
    this.#text.set(text);
    this.#thinking.set(reasoning, thinking_s, !text);
    if (text || reasoning) this.#waiting = "";
    else if (num_prompt) this.#waiting = t("chat.reading_share", { computed: num_computed, total: num_prompt });
    this.#drawNote();
  }

  /** What an answer that has not begun is waiting for. */
  wait(words) {
    if (this.isWriting && !this.#text.source && !this.#thinking.source) {
      this.#waiting = words;
      this.#drawNote();
    }
  }

  #drawEnd() {
    const { node } = this;
    const isOver = !this.isWriting;
    if (isOver) this.#waiting = "";
    this.#actions.hidden = !isOver;
    this.#goOn.hidden = !canGoOn(node);
    this.#probabilities.hidden = !node.has_tokens;
    this.#figures.hidden = !isOver || !node.meta.timings;
    if (!this.#figures.hidden) drawFigures(this.#figures, node.meta);
    this.#drawNote();
  }

  #drawNote() {
    const words = this.#waiting || ending(this.node);
    this.#note.hidden = !words;
    this.#note.className = `fs-note ${this.#waiting ? "fs-wait" : this.node.meta.error ? "fs-error" : ""}`;
    setText(this.#note, words);
  }

  async #toggleProbabilities() {
    const shown = this.element.querySelector(".fs-tokens");
    const { tokens } = shown ? {} : await ask(`ui/talk/tokens/${this.node.id}`);
    this.textElement.hidden = !shown;
    setText(this.#probabilities, t(shown ? "chat.probabilities" : "chat.probabilities_hide"));
    if (shown) return shown.remove();
    this.textElement.after(drawProbabilities(tokens));
  }
}

/** There is a beginning, and it did not end by itself. */
function canGoOn(node) {
  return Boolean(node.text || node.reasoning) && (node.state !== "done" || node.meta.finish_reason === "length");
}

/** A word on why an answer ended where it did, if it did not end by itself. */
function ending(node) {
  if (node.state === "writing") return "";
  const words = localized(node.meta.error ?? "") || {
    stopped: t("chat.stopped"),
    cut: t("chat.cut"),
  }[node.state] || (node.meta.finish_reason === "length" ? t("chat.length") : "");
  return node.text || node.reasoning ? words : [words, t("chat.nothing")].filter(Boolean).join(" ");
}

function thinkingFold() {
  const summary = el("summary", { text: t("chat.thinking") });
  const body = el("div", { class: "fs-thought" });
  const element = el("details", { class: "fs-thinking", hidden: true }, summary, body);
  let source = "", since = null, ticking = null;

  function drawTitle(thinking_s, isThinking) {
    if (thinking_s !== null) setText(summary, t("chat.thought", { seconds: thinking_s.toFixed(1) }));
    else if (isThinking) setText(summary, t("chat.thinking_now", { seconds: Math.round((Date.now() - since) / 1000) }));
    else setText(summary, t("chat.thinking"));
  }

  return {
    element,
    get source() { return source; },
    /** thinking_s: null while it is not known. */
    set(text, thinking_s, isThinking) {
      if (!text.startsWith(source)) {
        body.replaceChildren();
        source = "";
      }
      appendLines(body, text.slice(source.length));
      source = text;
      clearInterval(ticking);
      element.hidden = !text;
      if (!text) return;
      since ??= Date.now();
      if (isThinking && thinking_s === null) ticking = setInterval(() => drawTitle(null, true), 1000);
      drawTitle(thinking_s, isThinking);
    },
  };
}

/** Put text behind that of `body`, in parts that begin with a line: a browser lays out only the last of them again. */
function appendLines(body, text) {
  const last = body.lastElementChild ?? body.appendChild(el("span", { class: "fs-lines" }));
  const end = last.textContent.length < PART_CHARS ? text.length : text.indexOf("\n") + 1 || text.length;
  last.append(text.slice(0, end));
  if (end === text.length) return;
  body.append(el("span", { class: "fs-lines" }));
  appendLines(body, text.slice(end));
}

/** "< 2/3 >", where a message has versions. */
function versions(actions) {
  let node;
  const before = el("button", { type: "button", class: "fs-quiet", "aria-label": t("chat.version_before"), text: "‹",
    on: { click: () => actions.turn(node, -1) } });
  const after = el("button", { type: "button", class: "fs-quiet", "aria-label": t("chat.version_after"), text: "›",
    on: { click: () => actions.turn(node, 1) } });
  const place = el("span");
  const element = el("span", { class: "fs-versions", role: "group", "aria-label": t("chat.versions") }, before, place, after);
  return {
    element,
    update(now) {
      node = now;
      element.hidden = node.num_versions < 2;
      setText(place, t("chat.version", { version: node.version, total: node.num_versions }));
      before.disabled = node.version === 1;
      after.disabled = node.version === node.num_versions;
    },
    /** Which way the arrow goes that has the focus, -1 or 1; 0 where none has it. */
    get focusedStep() {
      if (document.activeElement === before) return -1;
      return document.activeElement === after ? 1 : 0;
    },
    /** On the arrow that goes on this way, or, at the end, on the one back. */
    focus(step) {
      const [onward, back] = step > 0 ? [after, before] : [before, after];
      (onward.disabled ? back : onward).focus();
    },
  };
}

export function button(key, onClick, more = {}) {
  return el("button", { type: "button", class: "fs-quiet", text: t(key), on: { click: onClick }, ...more });
}
