// The message box: grows with its text, sends with Enter, turns its button into Stop while an answer is written.
import { el, setText, t } from "./core.js";
import { draftOf, keepDraft } from "./drafts.js";

export class Composer {
  #form; #box; #button; #told; #chatId = "";
  #onSend; #onStop; #onEditLast;
  #toldLater = new Map(); // why a message was refused, by the chat that was left meanwhile
  #stays = false; // what is told
  isWriting = false; // an answer of this chat is being written

  /** onSend(text) sends; onStop() stops; onEditLast() edits the latest message. */
  constructor(root, { onSend, onStop, onEditLast }) {
    this.#onSend = onSend;
    this.#onStop = onStop;
    this.#onEditLast = onEditLast;
    this.#box = el("textarea", { id: "fs-message", rows: 1, placeholder: t("chat.placeholder"), "aria-label": t("chat.message"),
      enterkeyhint: "send", on: { input: () => this.#edited(), keydown: (event) => this.#key(event) } });
    this.#button = el("button", { type: "submit", class: "fs-send", text: t("chat.send") });
    this.#told = el("p", { class: "fs-error", role: "alert", hidden: true });
    this.tray = el("div", { class: "fs-tray" }); // what goes along with the message
    this.tools = el("div", { class: "fs-tools" });
    this.#form = el("form", { id: "fs-box", on: { submit: (event) => this.#submit(event) } },
      this.tray, this.#box, el("div", { class: "fs-box-row" }, this.tools, this.#button));
    root.append(this.#told, this.#form);
    this.#show(draftOf("text", this.#chatId, ""));
  }

  get text() {
    return this.#box.value;
  }

  set text(text) {
    this.#box.value = text;
    this.#typed();
  }

  focus() {
    this.#box.focus();
  }

  /** Say what went wrong, until something is done about it; what `stays` is no matter of what is written here. */
  tell(words, { stays = false } = {}) {
    this.#stays = stays;
    setText(this.#told, words);
    this.#told.hidden = !words;
  }

  /** Another chat is open: its own draft belongs to it. */
  belongsTo(chatId) {
    if (chatId === this.#chatId) return;
    this.#chatId = chatId;
    this.#show(draftOf("text", chatId, ""));
    this.tell(this.#toldLater.get(chatId) ?? "");
    this.#toldLater.delete(chatId);
  }

  /** The draft of a chat that has just been begun stays with it. */
  renamed(chatId) {
    keepDraft("text", this.#chatId, "");
    this.#chatId = chatId;
    this.#typed();
  }

  writing(isWriting) {
    this.isWriting = isWriting;
    setText(this.#button, t(isWriting ? "chat.stop" : "chat.send"));
    this.#button.classList.toggle("fs-stop", isWriting);
  }

  #edited() {
    if (!this.#stays) this.tell("");
    this.#typed();
  }

  #typed() {
    this.#fit();
    keepDraft("text", this.#chatId, this.#box.value);
  }

  /** A refused message is the draft of its own chat again, which is not open any more. */
  #giveBack(chatId, text, refusal) {
    const draft = draftOf("text", chatId, "");
    keepDraft("text", chatId, draft ? `${text}\n${draft}` : text);
    this.#toldLater.set(chatId, refusal);
  }

  #show(text) {
    this.#box.value = text;
    this.#fit();
  }

  #fit() {
    this.#box.style.height = "auto";
    this.#box.style.height = `${this.#box.scrollHeight}px`;
  }

  #key(event) {
    if (event.isComposing) return; // Enter chooses a word in an input method
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.isWriting) this.#form.requestSubmit();
    } else if (event.key === "ArrowUp" && !this.#box.value) {
      event.preventDefault();
      this.#onEditLast();
    }
  }

  async #submit(event) {
    event.preventDefault();
    if (this.isWriting) return this.#onStop();
    const [text, chatId] = [this.#box.value, this.#chatId];
    this.tell("");
    this.text = ""; // what is typed from now on belongs to the next message
    const refusal = await this.#onSend(text);
    if (!refusal) return;
    if (chatId !== this.#chatId) return this.#giveBack(chatId, text, refusal);
    this.text = this.text ? `${text}\n${this.text}` : text;
    this.tell(refusal);
  }
}
