// Files beside a message: chosen, dropped or pasted; read and counted by the server; sent along by their ids.
import { ask, el, live, Refused, setText, t } from "./core.js";
import { draftOf, keepDraft } from "./drafts.js";

const MAX_BYTES = 32 * 2 ** 20; // the server takes no more (app/history/file_text.py)

class Attachments {
  #tray; #chat; #visit; #chatId;
  // { name, id, numTokens, refusal, element, told, reading }: id is null until the server has read it
  #files = [];
  #filesOf = new Map(); // chat id -> its files that are not sent, those of the open one too
  #room = null; // tokens of context of the model in hand
  #modelId = null;

  constructor({ tools, tray, chat, dropOn }) {
    this.#chat = chat;
    this.#visit = chat.visit;
    this.#tray = el("ul", { class: "fs-attached", "aria-label": t("attach.list"), hidden: true });
    tray.append(this.#tray);
    const input = el("input", { type: "file", multiple: true, hidden: true, "aria-label": t("attach.add"), on: { change: () => {
      this.add([...input.files]);
      input.value = ""; // the same file may be chosen again
    } } });
    tools.prepend(el("button", { type: "button", class: "fs-quiet", text: t("attach.add"), title: t("attach.kinds"), on: { click: () => input.click() } }), input);
    this.#takeFrom(dropOn);
    live.watch("status", (event) => this.#watchModel(event));
    chat.onChange(() => this.#chatChanged());
    this.#open(idOf(chat));
  }

  /** Of all files, once the server has read and counted them. Throws Refused where one could not be read, as none is
   *  left behind, and where they have no room in the model's context. */
  async ids() {
    const files = this.#files; // another chat may be open by the time they are read
    await Promise.all(files.map((file) => file.reading));
    const bad = files.find((file) => !file.id);
    if (bad) throw new Refused(t("attach.remove_first", { name: bad.name }), 0);
    const tokens = files.reduce((sum, file) => sum + (file.numTokens ?? 0), 0);
    if (this.#room !== null && tokens >= this.#room) {
      throw new Refused(t("attach.no_room", { tokens: tokens.toLocaleString(), room: this.#room.toLocaleString() }), 0);
    }
    return files.map((file) => file.id);
  }

  /** These went along with a message. */
  sent(ids) {
    for (const [chatId, files] of this.#filesOf) this.#keep(chatId, files.filter((file) => !ids.includes(file.id)));
  }

  add(files) {
    this.#chat.composer.tell(""); // it may have been about those before
    const added = files.map((file) => this.#entry(file.name, (entry) => this.#read(file, entry)));
    this.#keep(this.#chatId, [...this.#files, ...added]);
  }

  /** read(entry) has the server tell of it. */
  #entry(name, read, id = null) {
    const entry = { name, id, numTokens: null, refusal: "" };
    entry.told = el("span", { class: "fs-note", text: t("attach.reading") });
    entry.element = this.#chip(entry);
    entry.reading = read(entry);
    return entry;
  }

  /** These are the files of this chat now. */
  #keep(chatId, files) {
    this.#filesOf.set(chatId, files);
    keepDraft("files", chatId, files.map(({ name, id, refusal }) => ({ name, id, refusal })));
    if (chatId !== this.#chatId) return;
    this.#files = files;
    this.#draw();
  }

  #keepAll() {
    for (const [chatId, files] of this.#filesOf) this.#keep(chatId, files);
  }

  async #read(file, entry) {
    if (file.size > MAX_BYTES) return this.#refuse(entry, t("attach.too_large", { most: MAX_BYTES / 2 ** 20 }));
    try {
      const query = `name=${encodeURIComponent(file.name)}&is_incognito=${this.#chat.isIncognito}`;
      entry.id = (await ask(`ui/attachments?${query}`, { body: file })).id;
      this.#keepAll();
      await this.#count(entry);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.#refuse(entry, error.message);
    }
  }

  /** One that was attached before the page was loaded again. */
  #restored({ name, id, refusal }) {
    return this.#entry(name, async (entry) => {
      await null; // until it is whole
      if (!id) return this.#refuse(entry, refusal || t("attach.interrupted"));
      await this.#count(entry).catch((error) => {
        if (error.status === 404) entry.id = null; // too long ago: the server has forgotten it
        this.#refuse(entry, error.message);
      });
    }, id);
  }

  #refuse(entry, words) {
    entry.refusal = words;
    entry.element.classList.add("fs-error");
    entry.element.setAttribute("role", "alert");
    setText(entry.told, words);
    this.#keepAll();
  }

  async #count(entry) {
    setText(entry.told, t("attach.counting"));
    const { num_tokens: numTokens } = await ask(`ui/attachments/${entry.id}/tokens?name=${encodeURIComponent(entry.name)}`);
    entry.numTokens = numTokens;
    this.#say(entry);
  }

  #say(entry) {
    const [tokens, room] = [entry.numTokens?.toLocaleString(), this.#room?.toLocaleString()];
    const isTooLong = entry.numTokens !== null && this.#room !== null && entry.numTokens >= this.#room;
    entry.element.classList.toggle("fs-error", isTooLong);
    if (entry.numTokens === null) setText(entry.told, t("attach.no_model"));
    else setText(entry.told, isTooLong ? t("attach.too_long", { tokens, room }) : t("attach.tokens", { tokens }));
  }

  #chip(entry) {
    const remove = el("button", { type: "button", class: "fs-icon", text: "×", "aria-label": t("attach.remove", { name: entry.name }), on: { click: () => {
      this.#keep(this.#chatId, this.#files.filter((each) => each !== entry));
      this.#chat.composer.tell("");
      this.#chat.composer.focus();
    } } });
    return el("li", {}, el("span", { class: "fs-attached-name", text: entry.name, title: entry.name }), entry.told, remove);
  }

  #draw() {
    this.#tray.hidden = this.#files.length === 0;
    this.#tray.replaceChildren(...this.#files.map((file) => file.element));
  }

  /** Another model counts in other tokens. */
  #watchModel(event) {
    if (event.kind !== "state") return;
    const modelId = event.state === "ready" ? event.model_id : null;
    this.#room = event.state === "ready" ? event.max_model_len : null;
    if (modelId === this.#modelId) return;
    this.#modelId = modelId;
    for (const entry of this.#files.filter((each) => each.id)) this.#count(entry).catch(() => this.#say(entry));
  }

  /** What was attached belongs to the chat that it was attached in, also where that gets its id now. */
  #chatChanged() {
    const chatId = idOf(this.#chat);
    if (chatId === this.#chatId) return;
    const isBegun = this.#chat.visit === this.#visit;
    const [before, files] = [this.#chatId, this.#files];
    this.#visit = this.#chat.visit;
    this.#open(chatId);
    if (!isBegun) return;
    this.#keep(before, []);
    this.#keep(chatId, files);
  }

  #open(chatId) {
    this.#chatId = chatId;
    this.#files = this.#filesOf.get(chatId) ?? draftOf("files", chatId, []).map((kept) => this.#restored(kept));
    this.#filesOf.set(chatId, this.#files);
    this.#draw();
  }

  #takeFrom(element) {
    const filesOf = (event) => [...(event.dataTransfer ?? event.clipboardData)?.files ?? []];
    element.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); });
    element.addEventListener("drop", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      this.add(filesOf(event));
    });
    element.addEventListener("paste", (event) => {
      const files = filesOf(event);
      if (files.length === 0 || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.add(files);
    });
  }
}

/** What drafts of the open chat go by; new ones have no id yet. */
function idOf(chat) {
  return chat.current() ?? (chat.isIncognito ? "incognito-" : "");
}

/** tools: where the button goes. tray: where the files are shown. dropOn: what files can be dropped and pasted on.
 *  Gives { ids(), sent(ids) }. */
export function start(places) {
  return new Attachments(places);
}
