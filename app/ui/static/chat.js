// The chat: which conversation is open, what the reader does with it, and what the server tells of it. Drawing is in
// conversation.js and messages.js, the message box in composer.js.
import { start as startAttachments } from "./attach.js";
import { start as startSettings } from "./chat_settings.js";
import { start as startList } from "./chats.js";
import { ask, el, focusIsLost, live, Refused, setText, t } from "./core.js";
import { Compare } from "./compare.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { edit } from "./editing.js";
import { drawMeter, figuresLine } from "./figures.js";
import { watchKeys } from "./keys.js";
import { button } from "./messages.js";
import { progressWords } from "./model_choice.js";
import { showChat } from "./title.js";

const NEW_INCOGNITO = "incognito"; // in the address, before its first message
const MAX_EARLIER = 100; // pages of a chat that are read to get to a message that was searched

class Chat {
  #sought = null; // { chatId, nodeId }: the message that the chat is being opened at
  #id = null; // of the open chat; null before its first message
  #visit = 0; // counts the chats that were opened, since a new one has no id
  #isIncognito = false;
  #unwatch = null;
  #listeners = new Set();
  #nodes = [];
  #status = null; // of the model in hand
  #isLost = false; // the connection
  #isBusy = false; // with what a button under a message does
  #inMemory = []; // all models that are loaded or loading

  constructor(root) {
    this.pane = root.querySelector("#fs-pane");
    this.conversation = new Conversation(this.pane, this.#actions(), (first) => this.#showEarlier(first));
    this.composer = new Composer(root.querySelector("#fs-composer"), {
      onSend: (text) => this.send(text), onStop: () => this.stop(), onEditLast: () => this.editLast(),
    });
    this.compare = new Compare();
    this.probabilities = toggle("chat.probabilities_option");
    this.composer.tools.append(this.compare.button, this.probabilities);
    this.composer.tray.append(this.compare.element);
    const { tools, tray } = this.composer;
    this.attachments = startAttachments({ tools, tray, chat: this, dropOn: root.querySelector("#fs-talk") });
    this.stats = root.querySelector("#fs-stats");
    this.meter = root.querySelector("#fs-meter");
    this.said = root.querySelector("#fs-said");
    this.incognitoNote = root.querySelector("#fs-incognito-note");
    live.watch("status", (event) => this.#watchStatus(event));
    live.watch("models", (event) => this.#watchModels(event));
    live.onState((isOpen) => this.#connected(isOpen));
  }

  // -- for other modules

  current() {
    return this.#id;
  }

  get isIncognito() {
    return this.#isIncognito;
  }

  /** Where a reload opens it again. */
  get address() {
    return this.#id || this.#isIncognito ? `#/chat/${this.#id ?? NEW_INCOGNITO}` : "#/chat";
  }

  /** Another number for each chat that is opened: the same while a new one gets its id. */
  get visit() {
    return this.#visit;
  }

  /** handler(chatId) when another chat is open, or this one has changed. */
  onChange(handler) {
    this.#listeners.add(handler);
  }

  /** Show a chat; null begins a new one. */
  async open(chatId, { isIncognito = false } = {}) {
    this.#visit += 1;
    this.#follow(chatId);
    this.compare.clear();
    this.#isIncognito = chatId ? chatId.startsWith("incognito-") : isIncognito;
    this.composer.belongsTo(chatId ?? (isIncognito ? "incognito-" : ""));
    this.#draw([]);
    this.#tell();
    if (chatId) await this.reload();
    this.conversation.toEnd();
    this.composer.focus();
    await this.#showSought();
  }

  /** Open the chat at this message. */
  async openAt(chatId, nodeId) {
    this.#sought = { chatId, nodeId };
    if (chatId !== this.#id) location.hash = `#/chat/${chatId}`;
    else {
      await this.reload();
      await this.#showSought();
    }
  }

  async #showSought() {
    const { chatId, nodeId } = this.#sought ?? {};
    this.#sought = null;
    for (let asked = 0; nodeId && asked < MAX_EARLIER; asked += 1) {
      if (chatId !== this.#id || this.conversation.lookAt(nodeId) || !this.#nodes[0]?.parent_id) return;
      await this.#showEarlier(this.#nodes[0]);
    }
  }

  /** The chat of a visit has changed from here. A new one has its id now: what is in the message box and beside it stays.
   *  Who has gone on to another chat meanwhile stays there. */
  async begun(chatId, visit = this.#visit) {
    if (visit !== this.#visit) return;
    if (chatId !== this.#id) {
      this.#follow(chatId);
      this.composer.renamed(chatId);
      history.replaceState(null, "", `#/chat/${chatId}`);
    }
    this.conversation.toEnd();
    await this.reload();
  }

  /** Read the open chat again: another tab, or the server, has changed it. */
  async reload() {
    const chatId = this.#id;
    if (!chatId) return;
    try {
      const { chat, nodes } = await ask(`ui/talk/chat/${encodeURIComponent(chatId)}`);
      if (chatId !== this.#id) return;
      this.chat = chat;
      // Who reads on at the end needs no more: the work of an update must not grow with all that was looked at before.
      this.#draw(this.conversation.follows ? nodes : this.#withEarlier(nodes));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (chatId !== this.#id) return;
      if (error.status === 404) this.#gone();
      else if (error.status) this.composer.tell(error.message);
    }
    this.#tell();
  }

  // -- what the reader does

  /** Words for people where the message was not taken. */
  async send(text) {
    // Where the reader is now: files may take a while to be read, and another chat may be open by then.
    const place = { chat_id: this.#id, is_incognito: this.#isIncognito, parent_id: this.#parentOfNext() };
    const [visit, ways] = [this.#visit, this.compare.ways()];
    let attachment_ids;
    try {
      attachment_ids = await this.attachments.ids();
    } catch (error) {
      if (error instanceof Refused) return error.message;
      throw error;
    }
    if (!text.trim() && attachment_ids.length === 0) return "";
    const refusal = await this.#begin("ui/talk/send", { ...place, text, attachment_ids, ways }, visit);
    if (!refusal) this.attachments.sent(attachment_ids);
    return refusal;
  }

  async stop() {
    const writing = this.#writing();
    await Promise.all(writing.map((node) => this.#command("ui/talk/stop", { node_id: node.id })));
  }

  editLast() {
    const last = this.#nodes.findLast((node) => node.role === "user");
    if (last && this.#writing().length === 0) this.#edit(last, this.conversation.view(last.id).element);
  }

  #actions() {
    return {
      edit: (node, element) => this.#edit(node, element),
      again: (node) => this.#once(() => this.#again(node)),
      goOn: (node) => this.#once(() => this.#command("ui/talk/go_on", { node_id: node.id })),
      turn: (node, step) => this.#command("ui/talk/turn", { node_id: node.id, step }),
      keep: (node) => this.#command("ui/talk/turn", { node_id: node.id }),
      branch: (node) => this.#once(() => this.#branch(node)),
      saying: (work) => this.#saying(work),
    };
  }

  /** A button that is pressed again while its work is done does nothing more. */
  async #once(work) {
    if (this.#isBusy) return;
    this.#isBusy = true;
    try {
      await work();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Of answers side by side each is made again in its own way, unless two ways are chosen now. */
  async #again(node) {
    const ways = this.compare.ways();
    const { model_id = "", preset = null, sampling = {} } = node.meta;
    const isOwn = node.meta.beside && ways.length === 1;
    this.composer.tell(await this.#begin("ui/talk/again", { node_id: node.parent_id, ways: isOwn ? [{ model_id, preset, sampling }] : ways }));
  }

  /** Send something that is answered; gives words where it was refused. */
  async #begin(path, body, visit = this.#visit) {
    try {
      const given = { ways: this.compare.ways(), shows_probabilities: this.probabilities.isOn(), ...body };
      const { chat_id } = await ask(path, { body: given });
      if (visit === this.#visit) this.compare.clear();
      await this.begun(chat_id ?? this.#id, visit);
      return "";
    } catch (error) {
      if (error instanceof Refused) return error.message;
      throw error;
    }
  }

  async #command(path, body) {
    await this.#saying(() => ask(path, { body }));
    await this.reload();
  }

  /** Do something; a refusal is told beside the message box. */
  async #saying(work) {
    try {
      await work();
      this.composer.tell("");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.composer.tell(error.message);
    }
  }

  #edit(node, element) {
    const place = { chat_id: this.#id, parent_id: node.parent_id, is_version: true, attachment_ids: node.attachments.map((file) => file.id) };
    edit(node, element, {
      send: (text) => this.#begin("ui/talk/send", { ...place, text }),
      focusElse: () => this.composer.focus(), // the message has another version now
    });
  }

  /** Go on from this message in a chat of its own. */
  async #branch(node) {
    await this.#saying(async () => {
      const { id } = await ask("ui/chats/branch", { body: { node_id: node.id } });
      location.hash = `#/chat/${id}`;
    });
  }

  async #showEarlier(first) {
    await this.#saying(async () => {
      const { nodes } = await ask(`ui/talk/earlier/${first.parent_id}`);
      this.#draw([...nodes, ...this.#nodes]);
    });
  }

  // -- what the server tells

  #follow(chatId) {
    if (chatId === this.#id) return;
    this.#unwatch?.();
    this.#id = chatId;
    this.chat = null;
    this.conversation.forget();
    this.#unwatch = chatId ? live.watch(`chat:${chatId}`, (event) => this.#take(event)) : null;
  }

  #take(event) {
    if (event.topic !== `chat:${this.#id}`) return; // it was on its way when another chat was opened
    if (event.kind === "again") this.conversation.forget();
    if (event.kind === "changed" || event.kind === "again") this.reload();
    else this.conversation.take(event);
  }

  #watchStatus(event) {
    if (event.kind !== "state") return;
    this.#status = event;
    this.conversation.setInHand(event.model_id);
    this.#drawWaiting();
  }

  #watchModels(event) {
    if (event.kind !== "state") return;
    this.#inMemory = event.models;
    this.#drawWaiting();
  }

  /** Without a connection nothing comes and nothing can be sent; once it is back all that came meanwhile is read. */
  #connected(isOpen) {
    if (isOpen && this.#isLost) this.composer.tell("");
    this.#isLost = !isOpen;
    if (!isOpen) this.composer.tell(t("chat.lost"), { stays: true });
  }

  #gone() {
    const text = this.composer.text; // nobody who goes on writing loses it
    this.composer.text = "";
    this.open(null, { isIncognito: this.#isIncognito });
    this.composer.text = [this.composer.text, text].filter(Boolean).join("\n");
    history.replaceState(null, "", this.address);
    this.composer.tell(t("chat.gone"));
  }

  #tell() {
    showChat(this.chat?.title ?? "");
    for (const listener of this.#listeners) listener(this.#id);
  }

  // -- drawing

  /** Messages that were read before those in `nodes`, as long as both belong to one line. */
  #withEarlier(nodes) {
    const place = this.#nodes.findIndex((node) => node.id === nodes[0]?.id);
    return place > 0 ? [...this.#nodes.slice(0, place), ...nodes] : nodes;
  }

  #draw(nodes) {
    const wasWriting = this.#writing().length > 0;
    const hadFocus = this.pane.contains(document.activeElement);
    const turned = this.#nodes.find((node) => this.conversation.view(node.id)?.versions.focusedStep);
    const step = turned && this.conversation.view(turned.id).versions.focusedStep;
    this.#nodes = nodes;
    this.conversation.show(nodes);
    if (hadFocus && focusIsLost()) this.#focusAgain(turned, step);
    const isWriting = this.#writing().length > 0;
    this.composer.writing(isWriting);
    if (wasWriting && !isWriting) setText(this.said, t("chat.done"));
    const last = nodes.findLast((node) => node.role === "assistant" && node.state !== "writing");
    setText(this.stats, isWriting || !last ? "" : figuresLine(last.meta));
    drawMeter(this.meter, last?.meta ?? {});
    this.incognitoNote.hidden = !this.#isIncognito;
    this.#drawWaiting();
  }

  /** What had the focus is gone: an arrow of the versions of a message, or something else of the conversation. */
  #focusAgain(turned, step) {
    const shown = turned && this.#nodes.find((each) => each.parent_id === turned.parent_id && each.role === turned.role);
    if (shown) this.conversation.view(shown.id).versions.focus(step);
    if (focusIsLost()) this.composer.focus();
  }

  #drawWaiting() {
    for (const node of this.#writing()) this.conversation.view(node.id)?.wait(this.#waitingFor(node));
  }

  #waitingFor(node) {
    const status = this.#statusFor(node.meta.model_id);
    if (!status || status.state === "ready") return t("chat.reading");
    if (status.state !== "loading") return t("chat.waiting");
    return t("chat.waiting_load", { model: status.model_id, stage: progressWords(status) });
  }

  /** Of the model that an answer asks for by name, or of the one in hand. */
  #statusFor(modelId) {
    if (!modelId || modelId === this.#status?.model_id) return this.#status;
    const found = this.#inMemory.find((each) => each.model === modelId);
    return found ? { ...found, model_id: modelId } : { state: "empty" };
  }

  #writing() {
    const all = this.#nodes.flatMap((node) => node.beside ?? [node]);
    return all.filter((node) => node.state === "writing");
  }

  #parentOfNext() {
    return this.#nodes.at(-1)?.id ?? null;
  }
}

/** A button that is on or off. */
function toggle(key) {
  const element = button(key, () => element.setAttribute("aria-pressed", !element.isOn()));
  element.setAttribute("aria-pressed", false);
  element.isOn = () => element.getAttribute("aria-pressed") === "true";
  return element;
}

let chat = null;

export function start(root) {
  chat = new Chat(root);
  startSettings(root.querySelector("#fs-talk-tools"), chat);
  startList(root.querySelector("#fs-sidebar"), chat);
  const begin = (isIncognito) => {
    const isHere = !root.hidden;
    chat.open(null, { isIncognito });
    if (isHere) history.pushState(null, "", chat.address);
    else location.hash = chat.address; // from another room: this one is to be shown as well
  };
  root.querySelector("#fs-new").addEventListener("click", () => begin(false));
  root.querySelector("#fs-incognito").addEventListener("click", () => begin(true));
  watchKeys({ newChat: () => begin(false), stop: () => root.hidden || chat.stop() });
}

let wasLeft = false; // for another room of the page

export function closed() {
  wasLeft = true;
}

/** rest: the chat's id, or nothing: a new chat, or, on the way back from another room, the one that was open. */
export function opened(rest) {
  const isBack = wasLeft && !rest;
  wasLeft = false;
  if (isBack) {
    history.replaceState(null, "", chat.address);
    return chat.composer.focus();
  }
  if (rest === NEW_INCOGNITO) return chat.open(null, { isIncognito: true });
  if (!rest || rest !== chat.current()) return chat.open(rest || null);
}
