// The list of conversations, left of the chat: find, open, rename, pin, put into folders, delete and bring back, export
// and import. What is listed comes from the server, again whenever the topic "chats" says that it has changed.
import { ask, el, live, recall, Refused, remember, setText, t } from "./core.js";
import { groupsOf, item, foundItem } from "./chat_items.js";
import { Menu } from "./menu.js";
import { Told } from "./told.js";

const AT_ONCE = 100; // chats that are read at a time
const TYPED_MS = 150; // after the last letter a search begins
const MAX_IMPORT_BYTES = 256 * 2 ** 20; // the server takes no more (app/ui/chats.py)

class ChatList {
  #chat; #root;
  #chats = []; #folders = []; #hasMore = false;
  #query = ""; #found = null; #words = []; #typing = null;
  #isRenaming = false;
  #asked = 0; // the latest request for the list; replies to earlier ones are late
  #lastOpen = null;

  constructor(root, chat) {
    this.#root = root;
    this.#chat = chat;
    this.search = el("input", { type: "search", id: "fs-search", placeholder: t("chats.search"), "aria-label": t("chats.search_label"),
      autocomplete: "off", on: { input: () => this.#typed(), keydown: (event) => this.#searchKey(event) } });
    this.more = el("button", { type: "button", class: "fs-quiet", text: t("chats.more"), hidden: true, on: { click: () => this.#readMore() } });
    this.told = new Told(() => this.search.focus());
    this.list = el("nav", { class: "fs-chats-list", "aria-label": t("chats.list"), on: { click: (event) => this.#picked(event) } });
    this.file = el("input", { type: "file", multiple: true, accept: ".json,.md,.markdown,.zip", hidden: true,
      "aria-label": t("chats.import"), on: { change: () => this.#import() } });
    this.menu = new Menu(root);
    const all = el("button", { type: "button", class: "fs-icon", text: "⋯", "aria-label": t("chats.all_menu"),
      on: { click: () => this.menu.open(all, this.#allActions()) } });
    root.append(el("div", { class: "fs-chats-top" }, this.search, all), this.list, this.more, this.file, this.told.element);
    chat.onChange(() => this.#chatChanged());
    live.watch("chats", () => this.read());
    document.addEventListener("keydown", (event) => this.#key(event));
    this.read();
  }

  // -- reading

  async read() {
    const asked = ++this.#asked;
    try {
      const limit = Math.max(AT_ONCE, this.#numPaged());
      const told = await ask(`ui/chats?limit=${limit}`);
      if (asked !== this.#asked) return;
      [this.#chats, this.#folders, this.#hasMore] = [told.chats, told.folders, told.has_more];
      this.#clearTrouble();
      if (this.#query) await this.#find();
      else this.#draw();
    } catch (error) {
      this.#trouble(error);
    }
  }

  async #readMore() {
    const told = await this.#try(() => ask(`ui/chats?limit=${AT_ONCE}&offset=${this.#numPaged()}`));
    if (!told) return;
    const known = new Set(this.#chats.map((chat) => chat.id));
    this.#chats.push(...told.chats.filter((chat) => !known.has(chat.id)));
    this.#hasMore = told.has_more;
    this.#draw();
  }

  /** Of the chats that are told in pages: pinned ones and those in folders come with the first. */
  #numPaged() {
    return this.#chats.filter((chat) => !chat.is_pinned && !chat.folder).length;
  }

  // -- searching

  #typed() {
    clearTimeout(this.#typing);
    this.#typing = setTimeout(() => this.#find(), TYPED_MS);
  }

  async #find() {
    const query = this.#query = this.search.value.trim();
    if (!query) this.#found = null;
    else {
      const told = await this.#try(() => ask(`ui/chats/search?q=${encodeURIComponent(query)}`));
      if (query !== this.#query || !told) return; // more was typed meanwhile
      [this.#found, this.#words] = [told.found, told.words];
    }
    this.#draw();
  }

  #searchKey(event) {
    if (event.key === "Escape" && this.search.value) {
      event.stopPropagation(); // it does not stop an answer as well
      this.search.value = "";
      this.#find();
    } else if (event.key === "Enter") this.#links()[0]?.click();
    else if (event.key === "ArrowDown") this.#links()[0]?.focus();
  }

  // -- drawing

  #draw() {
    if (this.#isRenaming) return; // drawn once that is over
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.list.replaceChildren(...(this.#found ? this.#drawFound() : this.#drawGroups()));
    this.more.hidden = this.#found !== null || !this.#hasMore;
    this.#mark();
    if (focused) this.list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  #drawGroups() {
    if (this.#chats.length === 0) return [el("p", { class: "fs-note", text: t("chats.none") })];
    return groupsOf(this.#chats).map(([name, isFolder, chats]) => {
      const items = el("ul", {}, ...chats.map((chat) => item(chat, isFolder, (button) => this.#openMenu(button, chat))));
      if (!isFolder) return el("section", {}, el("h2", { text: t(name) }), items);
      const closed = recall("closedFolders", []);
      const toggled = (event) => remember("closedFolders", event.target.open
        ? recall("closedFolders", []).filter((each) => each !== name) : [...new Set([...recall("closedFolders", []), name])]);
      return el("details", { class: "fs-folder", open: !closed.includes(name), on: { toggle: toggled } },
        el("summary", { text: name }), items);
    });
  }

  #drawFound() {
    if (this.#found.length === 0) return [el("p", { class: "fs-note", text: t("chats.found_none", { query: this.#query }) })];
    return [el("ul", {}, ...this.#found.map((found) => foundItem(found, this.#words, (event) => this.#openFound(event, found))))];
  }

  async #openFound(event, { chat, node_id: nodeId }) {
    if (event.ctrlKey || event.metaKey || event.shiftKey || !nodeId) return; // the browser follows the link itself
    event.preventDefault();
    await this.#try(() => ask("ui/talk/turn", { body: { node_id: nodeId } })); // it may be on a branch that is not shown
    await this.#chat.openAt(chat.id, nodeId);
  }

  #mark() {
    for (const link of this.list.querySelectorAll("a[data-id]")) { // those in a closed drawer as well
      if (link.dataset.id === this.#chat.current()) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  /** One a chat: a pinned one is in its folder, too. */
  #links() {
    const links = [...this.list.querySelectorAll("a[data-id]")].filter((link) => link.checkVisibility());
    return links.filter((link, at) => links.findIndex((each) => each.dataset.id === link.dataset.id) === at);
  }

  // -- what can be done with a chat

  #openMenu(button, chat) {
    this.menu.open(button, [
      [t("chats.rename"), () => this.#rename(chat, button)],
      [t(chat.is_pinned ? "chats.unpin" : "chats.pin"), () => this.#change(chat, { is_pinned: !chat.is_pinned })],
      [t("chats.move"), () => this.#move(chat, button)],
      [t("chats.export_json"), () => save(`ui/chats/export?form=json&ids=${chat.id}`)],
      [t("chats.export_markdown"), () => save(`ui/chats/export?form=markdown&ids=${chat.id}`)],
      [t("chats.delete"), () => this.#delete(chat)],
    ]);
  }

  #allActions() {
    return [
      [t("chats.import"), () => this.file.click()],
      [t("chats.export_all_json"), () => save("ui/chats/export?form=json")],
      [t("chats.export_all_markdown"), () => save("ui/chats/export?form=markdown")],
    ];
  }

  #change(chat, changes) {
    return this.#try(() => ask(`ui/chats/${chat.id}`, { body: changes }).then(() => this.read()));
  }

  #rename(chat, button) {
    this.#writeInPlace(chat, button, chat.title, "chats.rename_label", [], (title) => title && this.#change(chat, { title }));
  }

  #move(chat, button) {
    this.#writeInPlace(chat, button, chat.folder, "chats.move_label", this.#folders, (folder) => this.#change(chat, { folder }));
  }

  /** A box in place of the chat's link: Enter takes what is written, Escape leaves all as it was. */
  #writeInPlace(chat, button, value, key, known, take) {
    const link = this.list.querySelector(`[data-key="${button.dataset.key}"]`)?.previousElementSibling; // drawn anew since
    if (!link) return;
    const names = el("datalist", { id: "fs-folders" }, ...known.map((name) => el("option", { value: name })));
    const box = el("input", { type: "text", class: "fs-chats-box", maxlength: "80", "aria-label": t(key), placeholder: t(key), list: "fs-folders" });
    box.value = value;
    const end = async (isTaken) => {
      if (!this.#isRenaming) return; // taking the box away leaves it as well
      this.#isRenaming = false;
      if (isTaken && box.value.trim() !== value) await take(box.value.trim());
      this.#draw();
      this.#links().find((each) => each.dataset.id === chat.id)?.focus();
    };
    box.addEventListener("blur", () => end(true));
    box.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    });
    this.#isRenaming = true;
    link.replaceWith(box, names);
    box.select();
    box.focus();
  }

  async #delete(chat) {
    const wasOpen = this.#chat.current() === chat.id;
    if (wasOpen) location.hash = "#/chat";
    const told = await this.#try(() => ask(`ui/chats/${chat.id}/delete`, { body: {} }));
    if (!told) return;
    const undo = el("button", { type: "button", class: "fs-quiet", text: t("chats.undo"), on: { click: () => this.#restore(chat, wasOpen, line) } });
    const line = this.told.tell(t("chats.deleted", { title: chat.title || t("chats.untitled") }), undo);
    await this.read();
    undo.focus(); // the chat's own button is gone
  }

  /** line: that told of the deletion. Those of other chats stay. */
  async #restore(chat, wasOpen, line) {
    if (!(await this.#try(() => ask(`ui/chats/${chat.id}/restore`, { body: {} })))) return;
    line.remove();
    await this.read();
    this.#links().find((link) => link.dataset.id === chat.id)?.focus();
    if (wasOpen) location.hash = `#/chat/${chat.id}`;
  }

  async #import() {
    const files = [...this.file.files];
    this.file.value = "";
    let count = 0, refusals = [];
    for (const file of files) {
      if (file.size > MAX_IMPORT_BYTES) {
        refusals.push(t("chats.too_large", { name: file.name, most: MAX_IMPORT_BYTES / 2 ** 20 }));
        continue;
      }
      try {
        count += (await ask("ui/chats/import", { body: file })).chats.length;
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        refusals.push(`${file.name}: ${error.message}`);
      }
    }
    const taken = count ? [t("chats.imported", { count })] : [];
    if (refusals.length) this.told.alert([...taken, ...refusals].join("\n"));
    else if (count) this.told.tell(...taken);
    await this.read();
  }

  // -- what went wrong

  async #try(work) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.told.alert(error.message);
      return null;
    }
  }

  /** The list itself cannot be read: where that lies at the file, it can be set aside. */
  #trouble(error) {
    if (!(error instanceof Refused)) throw error;
    if (!error.status) return; // the server is not there: the header says so
    const isFile = ["history_damaged", "history_newer"].includes(error.code);
    const begin = el("button", { type: "button", class: "fs-quiet", text: t("chats.set_aside"), on: { click: () => this.#setAside() } });
    this.list.replaceChildren(el("div", { class: "fs-error fs-chats-trouble", role: "alert" },
      el("p", { text: error.message }), isFile ? begin : null));
    this.more.hidden = true;
  }

  #clearTrouble() {
    this.list.querySelector(".fs-chats-trouble")?.remove();
  }

  async #setAside() {
    const told = await this.#try(() => ask("ui/history/set_aside", { body: {} }));
    if (told) this.told.tell(t("chats.moved_to", { path: told.moved_to }));
    await this.read();
  }

  // -- where the reader is

  #chatChanged() {
    const left = this.#lastOpen, now = this.#chat.current();
    this.#lastOpen = now;
    this.#mark();
    if (left === now) return;
    this.#root.classList.remove("fs-open"); // the drawer of narrow screens has done its work
    // An incognito chat ends when it is left; the next one that is created forgets those whose tab was closed.
    if (left?.startsWith("incognito-")) ask(`ui/chats/${left}/delete`, { body: {} }).catch(() => {});
  }

  /** The drawer closes even where the open chat is picked, and nothing changes. */
  #picked(event) {
    if (event.target.closest("a[aria-current]")) this.#root.classList.remove("fs-open");
  }

  #key(event) {
    if (document.querySelector("dialog[open]")) return; // it has all keys for itself
    const isCommand = event.ctrlKey || event.metaKey;
    if (event.key === "Escape" && this.#root.contains(event.target)) this.#closeDrawer(event);
    else if (isCommand && !event.shiftKey && event.key.toLowerCase() === "k") this.#showSearch();
    else if (event.altKey && !isCommand && event.key === "ArrowDown") this.#step(1);
    else if (event.altKey && !isCommand && event.key === "ArrowUp") this.#step(-1);
    else return;
    event.preventDefault();
  }

  #closeDrawer(event) {
    this.#root.classList.remove("fs-open");
    if (this.#root.checkVisibility()) return; // it is no drawer on a wide screen
    event.stopImmediatePropagation(); // it does not stop an answer as well
    document.getElementById("fs-show-list").focus();
  }

  #showSearch() {
    const focus = () => {
      this.show();
      this.search.focus();
      this.search.select();
    };
    if (location.hash.startsWith("#/chat") || !location.hash) return focus();
    addEventListener("hashchange", () => setTimeout(focus), { once: true }); // once the room is shown
    location.hash = "#/chat";
  }

  #step(by) {
    const links = this.#links();
    const at = links.findIndex((link) => link.hash === location.hash); // where a key before this one leads already
    const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : at + by];
    if (next) location.hash = next.hash;
  }

  // -- shown or not

  show() {
    this.#root.classList.add("fs-open");
    this.#root.classList.remove("fs-closed");
    remember("listIsClosed", false);
  }

  toggle() {
    const isNarrow = matchMedia("(max-width: 760px)").matches;
    if (isNarrow) this.#root.classList.toggle("fs-open");
    else remember("listIsClosed", this.#root.classList.toggle("fs-closed"));
    return this.#root.checkVisibility();
  }
}

/** Have the browser save what the server sends. */
function save(path) {
  const link = el("a", { href: path, download: "" });
  document.body.append(link);
  link.click();
  link.remove();
}

/** The button that shows and hides the list. */
function toggleFor(list, root) {
  const button = el("button", { type: "button", class: "fs-icon", id: "fs-show-list", "aria-label": t("chats.toggle"), "aria-controls": root.id });
  button.append(el("span", { text: "☰", "aria-hidden": "true" }));
  const mark = (isShown) => button.setAttribute("aria-expanded", isShown);
  button.addEventListener("click", () => {
    mark(list.toggle());
    if (root.checkVisibility()) list.search.focus();
  });
  new MutationObserver(() => mark(root.checkVisibility())).observe(root, { attributes: true, attributeFilter: ["class"] });
  mark(root.checkVisibility());
  return button;
}

/** root: where the list is drawn. chat: the chat's own module (chat.js). */
export function start(root, chat) {
  root.classList.toggle("fs-closed", recall("listIsClosed", false));
  const list = new ChatList(root, chat);
  document.getElementById("fs-talk-top")?.prepend(toggleFor(list, root));
  document.addEventListener("pointerdown", (event) => { // beside the drawer
    if (!root.contains(event.target) && !event.target.closest("#fs-show-list")) root.classList.remove("fs-open");
  });
  return list;
}
