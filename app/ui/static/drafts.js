// What is written and attached but not sent yet, by chat. Kept for this tab, over a reload too, in sessionStorage; what
// belongs to an incognito chat, or is too long for that, in memory alone: browsers write their storage to the disk.

const inMemory = new Map();

/** The draft of this kind ("text", "files") of a chat; `fallback` where there is none. */
export function draftOf(kind, chatId, fallback) {
  const name = nameOf(kind, chatId);
  return JSON.parse(inMemory.get(name) ?? sessionStorage.getItem(name)) ?? fallback;
}

/** An empty one is as none. */
export function keepDraft(kind, chatId, draft) {
  const name = nameOf(kind, chatId);
  inMemory.delete(name);
  sessionStorage.removeItem(name);
  if (draft.length === 0) return;
  try {
    if (chatId.startsWith("incognito-")) inMemory.set(name, JSON.stringify(draft));
    else sessionStorage.setItem(name, JSON.stringify(draft));
  } catch { // storage is full
    inMemory.set(name, JSON.stringify(draft));
  }
}

function nameOf(kind, chatId) {
  return `fireside.draft.${kind}.${chatId}`;
}
