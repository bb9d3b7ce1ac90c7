// Begins the page: draws the frame and its header, and opens the room that the address names.
//
// A room is a module with start(root), called once before it is first shown. It may export opened(rest), called each
// time it is shown with what follows its name in the address ("#/chat/7" -> "7"), and closed().
import { checkLogin, el, onRemembered, t, translate } from "./core.js";
import { start as startModelChoice } from "./model_choice.js";
import { applyTheme } from "./theme.js";
import { showRoom } from "./title.js";

const ROOMS = {
  chat: () => import("./chat.js"),
  models: () => import("./models.js"),
  monitor: () => import("./monitor.js"),
  settings: () => import("./settings.js"),
};

const started = new Map(); // name -> promise of the room's module
let shown = null;

/** Put the frame into Gradio's page, which has nothing else to show. */
function drawFrame() {
  const frame = el("div", { id: "fs-frame" }, document.getElementById("fs-template").content.cloneNode(true));
  translate(frame);
  document.body.append(frame);
}

function rootOf(name) {
  return document.getElementById(`fs-room-${name}`);
}

function addressed(url) {
  const [name, ...rest] = new URL(url).hash.replace(/^#\/?/, "").split("/");
  return name in ROOMS ? [name, rest.join("/")] : ["chat", ""];
}

/** url: of the page, with the room behind its "#". Each address is shown in its turn, also where the next was chosen
 *  before this one could be. */
async function show(url) {
  const [name, rest] = addressed(url);
  showRoom(name);
  for (const each of Object.keys(ROOMS)) rootOf(each).hidden = each !== name;
  for (const link of document.querySelectorAll("#fs-tabs a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown && shown !== name) started.get(shown).then((room) => room?.closed?.()); // it may still be loading
  shown = name;
  const room = await start(name);
  if (shown === name) room?.opened?.(rest);
}

function start(name) {
  if (!started.has(name)) started.set(name, open(name));
  return started.get(name);
}

async function open(name) {
  try {
    const room = await ROOMS[name]();
    room.start(rootOf(name));
    return room;
  } catch (error) {
    console.error(error);
    await checkLogin(); // its module is not given to who may not read the page: then the login is shown
    rootOf(name).append(el("p", { class: "fs-error", role: "alert", text: t("frame.failed", { message: error.message }) }));
    return null;
  }
}

applyTheme();
onRemembered("language", () => location.reload());
drawFrame();
startModelChoice(document.getElementById("fs-status"));
window.addEventListener("hashchange", (event) => show(event.newURL));
show(location.href).then(() => start("chat")); // its keys work in every room
