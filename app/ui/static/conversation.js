// The messages of the open chat, in order: keeps what is drawn and what the server says of them the same, puts answers
// that belong side by side into columns, and follows the end while the reader is there.
import { el, setText, t } from "./core.js";
import { mount as offerModel } from "./first_visit.js";
import { button, messageView } from "./messages.js";

const AT_END_PX = 60;

export class Conversation {
  #pane; #list; #welcome; #earlier; #actions;
  #views = new Map(); // node id -> view
  #coming = new Map(); // id of an answer in the making -> all that the socket has told of it
  #follows = true;
  #inHand = ""; // id of the model that answers where no other is asked for
  #lastTop = 0; // of the pane, at its last scroll
  #onEarlier;

  /** pane: the element that scrolls. onEarlier(firstNode): messages before it are wanted. */
  constructor(pane, actions, onEarlier) {
    this.#pane = pane;
    this.#actions = actions;
    this.#onEarlier = onEarlier;
    this.#list = el("div", { class: "fs-list", role: "log", "aria-label": t("chat.messages"), "aria-live": "off" });
    this.#welcome = el("div", { class: "fs-welcome" },
      el("h2", { text: t("chat.welcome") }), el("p", { text: t("chat.welcome_more") }));
    offerModel(this.#welcome).catch(console.error); // the chat goes on without
    this.#earlier = button("chat.earlier", () => this.#askEarlier(), { hidden: true });
    pane.append(this.#welcome, this.#earlier, this.#list);
    pane.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.#follow()).observe(this.#list);
  }

  get nodes() {
    return [...this.#views.values()].map((view) => view.node);
  }

  /** The reader is at the end, and is kept there. */
  get follows() {
    return this.#follows;
  }

  view(nodeId) {
    return this.#views.get(nodeId);
  }

  /** Draw these nodes and no others; those that are drawn already are brought up to date. */
  show(nodes) {
    const views = new Map();
    const elements = nodes.map((node) => this.#elementOf(node, views));
    this.#views = views;
    this.#place(elements);
    this.#welcome.hidden = nodes.length > 0;
    this.#earlier.hidden = !nodes[0]?.parent_id;
    this.#follow();
  }

  /** What the socket tells of an answer in the making, maybe before the message itself has been read. */
  take(event) {
    const known = this.#coming.get(event.node_id);
    const isPiece = event.kind === "piece" && known;
    this.#coming.set(event.node_id, {
      ...known, ...event,
      text: (isPiece ? known.text : "") + (event.text ?? known?.text ?? ""),
      reasoning: (isPiece ? known.reasoning : "") + (event.reasoning ?? known?.reasoning ?? ""),
    });
    this.#views.get(event.node_id)?.take(this.#coming.get(event.node_id));
  }

  /** The model in hand is another one now. */
  setInHand(modelId) {
    if (modelId === this.#inHand) return;
    this.#inHand = modelId;
    for (const { node, element } of this.#views.values()) {
      if (node.meta.beside && element.previousElementSibling) setText(element.previousElementSibling, this.#heading(node));
    }
  }

  /** Nothing that was told holds any more: another chat is open, or the socket was lost. */
  forget() {
    this.#coming.clear();
  }

  /** Bring a message into sight; false where it is not among those that are drawn. */
  lookAt(nodeId) {
    const view = this.#views.get(nodeId);
    if (!view) return false;
    this.#follows = false;
    view.element.scrollIntoView({ block: "start" });
    this.#lastTop = this.#pane.scrollTop;
    return true;
  }

  /** Follow the end again: the reader has sent something. */
  toEnd() {
    this.#follows = true;
    this.#follow();
  }

  #elementOf(node, views) {
    if (!node.beside) return this.#viewOf(node, views).element;
    const columns = node.beside.map((each) => this.#column(each, each.id === node.id, views));
    return this.#reuse(`beside-${node.meta.beside}`, () => el("div", { class: "fs-columns" }), columns);
  }

  #viewOf(node, views) {
    const view = this.#views.get(node.id) ?? messageView(node, this.#actions);
    if (this.#views.has(node.id)) view.update(node);
    views.set(node.id, view);
    if (node.state !== "writing") this.#coming.delete(node.id);
    else if (this.#coming.has(node.id)) view.take(this.#coming.get(node.id));
    return view;
  }

  #column(node, isKept, views) {
    const view = this.#viewOf(node, views);
    const keep = button("chat.compare_keep", () => this.#actions.keep(node), { disabled: isKept });
    setText(keep, t(isKept ? "chat.compare_kept" : "chat.compare_keep"));
    const title = el("h3", { text: this.#heading(node) });
    return this.#reuse(`column-${node.id}`, () => el("div", { class: "fs-column" }), [title, view.element, keep], isKept);
  }

  /** Who makes, or made, one of the answers side by side, and with which settings. */
  #heading({ state, meta }) {
    const model = meta.model_id || (state === "writing" && this.#inHand) || t("chat.compare_own");
    return [model, meta.preset?.name, wayWords(meta.sampling)].filter(Boolean).join(" · ");
  }

  /** The element of this name, with these children. */
  #reuse(name, make, children, isKept) {
    const element = this.#list.querySelector(`[data-name="${CSS.escape(name)}"]`) ?? make();
    element.dataset.name = name;
    if (isKept !== undefined) element.dataset.kept = isKept;
    placeChildren(element, children);
    return element;
  }

  #place(elements) {
    placeChildren(this.#list, elements);
  }

  #askEarlier() {
    const before = this.#pane.scrollHeight;
    this.#follows = false;
    this.#onEarlier(this.nodes[0]).then(() => { this.#pane.scrollTop += this.#pane.scrollHeight - before; });
  }

  /** Only the reader goes up. Words that came since the last frame leave the pane where it is, and its end below. */
  #scrolled() {
    const { scrollTop } = this.#pane;
    if (this.#isAtEnd()) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false;
    this.#lastTop = scrollTop;
  }

  #isAtEnd() {
    return this.#pane.scrollHeight - this.#pane.scrollTop - this.#pane.clientHeight < AT_END_PX;
  }

  #follow() {
    if (this.#follows) this.#pane.scrollTop = this.#pane.scrollHeight;
  }
}

/** Make these the children of `parent`, touching only what differs: a focus or a selection in the others stays. */
function placeChildren(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
}

function wayWords(sampling = {}) {
  return Object.entries(sampling).map(([name, value]) => `${t(`settings_of.${name}`)} ${value}`).join(", ");
}
