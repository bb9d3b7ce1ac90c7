// The title of the browser's tab: the chat that is open, or the room. Gradio sets its own once its scripts run, so what
// it should be is put back.
import { t } from "./core.js";

let [room, chat] = ["chat", ""];

export function showRoom(name) {
  room = name;
  apply();
}

/** title: "" for a chat that has none yet. */
export function showChat(title) {
  chat = title;
  apply();
}

function apply() {
  const words = room === "chat" ? chat : t(`frame.${room}`);
  const wanted = words ? `${words} · Fireside` : "Fireside";
  if (document.title !== wanted) document.title = wanted;
}

new MutationObserver(apply).observe(document.head, { childList: true, subtree: true, characterData: true });
