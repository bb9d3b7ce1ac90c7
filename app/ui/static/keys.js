// Keys that work everywhere in the chat, and the list of all of them.
import { el, t } from "./core.js";

const KEYS = [
  ["Enter", "chat.key_send"],
  ["Shift+Enter", "chat.key_line"],
  ["Esc", "chat.key_stop"],
  ["Ctrl+Shift+O", "chat.key_new"],
  ["↑", "chat.key_edit"],
  ["Ctrl+K", "chat.key_search"],
  ["Alt+↑ Alt+↓", "chat.key_switch"],
  ["Ctrl+/", "chat.key_help"],
];

/** newChat(), stop(): what the keys do; searching and switching chats belong to the list of chats. */
export function watchKeys({ newChat, stop }) {
  const help = dialog();
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return; // it has all keys for itself
    const isCommand = event.ctrlKey || event.metaKey;
    if (event.key === "Escape") stop();
    else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") newChat();
    else if (isCommand && event.key === "/") help.showModal();
    else return;
    event.preventDefault();
  });
}

function dialog() {
  const element = el("dialog", { id: "fs-keys", "aria-label": t("chat.shortcuts") },
    el("h2", { text: t("chat.shortcuts") }),
    el("dl", {}, ...KEYS.flatMap(([keys, what]) => [
      el("dt", {}, el("kbd", { text: keys })), el("dd", { text: t(what) }),
    ])),
    el("form", { method: "dialog" }, el("button", { class: "fs-quiet", text: t("chat.close") })));
  document.getElementById("fs-frame").append(element);
  return element;
}
