// What every module of the page stands on: words, small DOM helpers, requests, and the one socket of this tab.
// Text always goes in as text, never as markup.
import en from "./words/en.js";
import enRooms from "./words/en_rooms.js";
import zh from "./words/zh.js";
import zhRooms from "./words/zh_rooms.js";
import { translator } from "./server_words.js";

// -- words

const LANGUAGES = { en: { ...en, ...enRooms }, zh: { ...zh, ...zhRooms } };

/** "en" or "zh": what was chosen in Settings, else the browser's own. */
export function language() {
  const chosen = recall("language", "");
  if (chosen in LANGUAGES) return chosen;
  return navigator.language.startsWith("zh") ? "zh" : "en";
}

/** The words of a key in the page's language, with {name} filled in. */
export function t(key, values = {}) {
  const words = LANGUAGES[language()][key] ?? key;
  return words.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

const TABLES = { zh: ["settings", "chat", "models", "engine"] }; // files of the server's own words; it speaks English

/** Words of the server in the page's language: a refusal, a stage, a note. Names in them stay. */
export const localized = await translatorOf(language());

async function translatorOf(chosen) {
  const files = (TABLES[chosen] ?? []).map((name) => import(`./words/server_${chosen}_${name}.js`));
  const tables = await Promise.all(files);
  return translator(Object.assign({}, ...tables.map((table) => table.default)));
}

/** Fill in the words of markup: data-t is an element's text, data-t-label its label for screen readers. */
export function translate(root) {
  for (const each of root.querySelectorAll("[data-t]")) each.textContent = t(each.dataset.t);
  for (const each of root.querySelectorAll("[data-t-label]")) each.setAttribute("aria-label", t(each.dataset.tLabel));
}

// -- what this browser remembers

/** A choice of this browser, kept as JSON. `fallback` where there is none, or where none can be kept. */
export function recall(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`fireside.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`fireside.${name}`, JSON.stringify(value));
  } catch { /* storage is full or forbidden: the choice lasts as long as this tab */ }
}

/** handler() is called when another tab of this browser has chosen anew. */
export function onRemembered(name, handler) {
  window.addEventListener("storage", (event) => { if (event.key === `fireside.${name}`) handler(); });
}

// -- DOM

/** An element. Attributes: `class`, `text`, `on: {event: handler}`, `data: {name: value}`, a property of the element,
 *  or any attribute; those that are null or undefined are left out. Children: elements or strings. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Keys reach nothing: what had the focus was taken away, hidden or disabled. */
export function focusIsLost() {
  const { activeElement } = document;
  return activeElement === null || activeElement === document.body || activeElement.disabled || !activeElement.checkVisibility();
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- requests

/** What the server refused, in words for people. `status` 0: it was not reached at all. */
export class Refused extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Ask the server: GET, or POST where there is a body (an object goes as JSON, a file as it is). Gives the reply's JSON;
 *  throws Refused. */
export async function ask(path, { method, body, signal } = {}) {
  const options = { method: method ?? (body === undefined ? "GET" : "POST"), cache: "no-store", signal };
  if (body instanceof Blob) options.body = body;
  else if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(t("frame.unreachable"), 0);
  }
  if (reply.status === 401) return toLogin();
  const told = await reply.json().catch(() => null);
  if (!reply.ok) throw refusal(reply.status, told);
  return told;
}

function refusal(status, told) {
  const error = told?.error ?? {};
  const words = [error.message, error.hint].filter(Boolean).map(localized).join(" ");
  return new Refused(words || t("frame.refused", { status }), status, error.code ?? null);
}

/** The login has ended, or a key is asked now: the form at this address tells so. What asked hears no more. */
function toLogin() {
  location.reload();
  return new Promise(() => {});
}

/** A login that has ended shows its form; any other trouble is told where it is met. */
export async function checkLogin() {
  if (!document.hidden) await ask("ui/status").catch(() => {});
}

document.addEventListener("visibilitychange", checkLogin); // the reader comes back, maybe weeks later

// -- the socket

const AGAIN_FIRST_MS = 250, AGAIN_MOST_MS = 4000;
const NO_KEY = 1008; // the socket was closed as its key holds no more, or keys are asked now

/** The tab's socket: opens itself with the first topic, and again and again when it is lost. */
class Live {
  #handlers = new Map(); // topic -> Set of handlers
  #states = new Map(); // topic -> its latest event of kind "state", for those who come later
  #socket = null;
  #pause = AGAIN_FIRST_MS;
  #wasOpen = false;
  #listeners = new Set();

  /** Hear of a topic from now on: handler({topic, kind, ...}). After the socket was lost and is back, kind "again"
   *  comes first: what was read over requests is to be read once more. Returns a function that ends it. */
  watch(topic, handler) {
    if (!this.#handlers.has(topic)) this.#handlers.set(topic, new Set());
    this.#handlers.get(topic).add(handler);
    if (this.#states.has(topic)) handler(this.#states.get(topic));
    this.#tell();
    return () => {
      this.#handlers.get(topic)?.delete(handler);
      if (this.#handlers.get(topic)?.size === 0) {
        this.#handlers.delete(topic);
        this.#states.delete(topic);
      }
      this.#tell();
    };
  }

  /** handler(isOpen), now and whenever it changes. */
  onState(handler) {
    this.#listeners.add(handler);
    if (this.#socket?.readyState === WebSocket.OPEN) handler(true);
  }

  #tell() {
    if (this.#socket === null) this.#open();
    else if (this.#socket.readyState === WebSocket.OPEN) {
      this.#socket.send(JSON.stringify({ watch: [...this.#handlers.keys()] }));
    }
  }

  #open() {
    const url = new URL("ui/live", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.hash = "";
    const socket = this.#socket = new WebSocket(url);
    socket.onopen = () => this.#opened();
    socket.onmessage = (message) => this.#take(JSON.parse(message.data));
    socket.onclose = ({ code }) => this.#lost(code);
  }

  #opened() {
    this.#pause = AGAIN_FIRST_MS;
    this.#tell();
    for (const listener of this.#listeners) listener(true);
    if (this.#wasOpen) for (const topic of this.#handlers.keys()) this.#take([{ topic, kind: "again" }]);
    this.#wasOpen = true;
  }

  async #lost(code) {
    if (code === NO_KEY) await checkLogin(); // does not return where the key no longer holds
    for (const listener of this.#listeners) listener(false);
    setTimeout(() => { checkLogin(); this.#open(); }, this.#pause);
    this.#pause = Math.min(this.#pause * 2, AGAIN_MOST_MS);
  }

  #take(events) {
    for (const event of events) {
      if (event.kind === "state") this.#states.set(event.topic, event);
      for (const handler of [...this.#handlers.get(event.topic) ?? []]) handler(event);
    }
  }
}

export const live = new Live();
