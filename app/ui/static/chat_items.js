// How chats are grouped in the list, and how one of them is drawn there.
import { el, t } from "./core.js";

const DAY_MS = 86_400_000;

/** [[name, isFolder, chats], ...]: pinned ones, folders by name, the others by the day of their last message. A pinned
 *  chat is in its folder, too. The name of a group that is no folder is a key of the page's words. */
export function groupsOf(chats, now = Date.now()) {
  const pinned = chats.filter((chat) => chat.is_pinned);
  const folders = Map.groupBy(chats.filter((chat) => chat.folder), (chat) => chat.folder);
  const days = Map.groupBy(chats.filter((chat) => !chat.folder && !chat.is_pinned), (chat) => dayOf(chat.updated_at * 1000, now));
  return [
    ...(pinned.length ? [["chats.pinned", false, pinned]] : []),
    ...[...folders].sort(([a], [b]) => a.localeCompare(b)).map(([name, inside]) => [name, true, inside]),
    ...[...days].map(([name, inside]) => [name, false, inside]),
  ];
}

function dayOf(time, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (time >= midnight) return "chats.today";
  if (time >= midnight - DAY_MS) return "chats.yesterday";
  return time >= midnight - 7 * DAY_MS ? "chats.week" : "chats.older";
}

/** Of a pinned chat in a folder each of both places names the other. onMenu(button) opens what can be done with it. */
export function item(chat, isInFolder, onMenu) {
  const title = chat.title || t("chats.untitled");
  const place = isInFolder ? "folder" : "list";
  const other = isInFolder ? chat.is_pinned && t("chats.pinned") : chat.folder;
  const menu = el("button", { type: "button", class: "fs-icon fs-chat-menu", text: "⋯", "aria-label": t("chats.menu_of", { title }),
    "aria-haspopup": "menu", data: { key: `menu-${place}-${chat.id}` }, on: { click: () => onMenu(menu) } });
  const shown = link(chat, "");
  shown.dataset.key = `${place}-${chat.id}`;
  shown.append(el("span", { class: "fs-chat-title", text: title }), other ? el("span", { class: "fs-chat-mark", text: other }) : "");
  return el("li", {}, shown, menu);
}

/** words: what was searched, in lower case; they are marked. onOpen(event) is a click. */
export function foundItem(found, words, onOpen) {
  const shown = link(found.chat, "", onOpen);
  shown.append(el("span", { class: "fs-found-title" }, ...marked(found.chat.title || t("chats.untitled"), words)));
  if (found.excerpt) shown.append(el("span", { class: "fs-found-text" }, ...marked(found.excerpt, words)));
  return el("li", {}, shown);
}

function link(chat, text, onOpen) {
  return el("a", { href: `#/chat/${chat.id}`, text, title: chat.title, data: { id: chat.id, key: chat.id }, on: onOpen ? { click: onOpen } : {} });
}

/** The text in pieces, the words in it as <mark>. */
function marked(text, words) {
  const pattern = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
  return text.split(new RegExp(`(${pattern})`, "gi")).map((piece, i) => (i % 2 ? el("mark", { text: piece }) : piece));
}
