// Begins the page: waits for the frame's roots, draws the model's state, and opens the room that the address names.
//
// A room is a module with start(root), called once before it is first shown. It may export opened(rest), called each
// time it is shown with what follows its name in the address ("#/chat/7" -> "7"), and closed().
import { el, live, setText, t, translate } from "./core.js";
import { applyTheme } from "./theme.js";

const ROOMS = {
  chat: null, // drawn by Gradio
  models: () => import("./models.js"),
  monitor: () => import("./monitor.js"),
  settings: () => import("./settings.js"),
};

const started = new Map(); // name -> promise of the room's module
let shown = null;

/** Run `begin` as soon as the frame is there, before anything in it can be clicked. */
function whenFramed(begin) {
  if (document.getElementById("fs-rooms")) return begin();
  const observer = new MutationObserver(() => {
    if (!document.getElementById("fs-rooms")) return;
    observer.disconnect();
    begin();
  });
  observer.observe(document, { childList: true, subtree: true });
}

function rootOf(name) {
  return document.getElementById(name === "chat" ? "fs-chat" : `fs-room-${name}`);
}

function addressed() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return name in ROOMS ? [name, rest.join("/")] : ["chat", ""];
}

async function show() {
  const [name, rest] = addressed();
  for (const each of Object.keys(ROOMS)) if (rootOf(each)) rootOf(each).hidden = each !== name;
  for (const link of document.querySelectorAll("#fs-tabs a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown && shown !== name) (await started.get(shown))?.closed?.();
  shown = name;
  (await start(name))?.opened?.(rest);
}

function start(name) {
  if (!started.has(name)) started.set(name, open(name));
  return started.get(name);
}

async function open(name) {
  try {
    const room = await ROOMS[name]?.();
    room?.start(rootOf(name));
    return room;
  } catch (error) {
    console.error(error);
    rootOf(name).append(el("p", { class: "fs-error", role: "alert", text: t("frame.failed", { message: error.message }) }));
    return null;
  }
}

function drawStatus(status) {
  const root = document.querySelector("#fs-status .fs-status");
  const percent = status.fraction === null ? "" : ` ${Math.round(status.fraction * 100)} %`;
  const stage = {
    loading: `${status.stage || t("frame.status.loading")}${percent}`,
    failed: status.error || t("frame.status.failed"),
  }[status.state] ?? t(`frame.status.${status.state}`);
  root.dataset.state = status.state;
  root.title = stage;
  setText(root.querySelector(".fs-model"), status.model_id || "Fireside");
  setText(root.querySelector(".fs-stage"), stage);
  const bar = root.querySelector(".fs-progress");
  bar.hidden = status.state !== "loading";
  if (status.fraction === null) bar.removeAttribute("value");
  else bar.value = status.fraction;
}

const GONE = { state: "gone", model_id: "", stage: "", fraction: null, error: "" };

whenFramed(() => {
  applyTheme();
  translate(document.getElementById("fs-frame"));
  live.watch("status", (event) => { if (event.kind === "state") drawStatus(event); });
  live.onState((isOpen) => { if (!isOpen) drawStatus(GONE); });
  window.addEventListener("hashchange", show);
  show();
});
