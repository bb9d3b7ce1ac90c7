// A box in place of a message of the user: what is sent from it is a version of that message.
import { el, focusIsLost, setText, t } from "./core.js";
import { button } from "./messages.js";

/** element: of the message. send(text) gives words where it was refused. focusElse(): where the focus goes when the
 *  message that had it is not there any more. */
export function edit(node, element, { send, focusElse }) {
  const box = el("textarea", { "aria-label": t("chat.edit_label"), rows: Math.min(12, node.text.split("\n").length + 1) });
  box.value = node.text;
  const told = el("p", { class: "fs-error", role: "alert", hidden: true });
  const form = el("form", { class: "fs-edit" }, box, told, el("div", {},
    button("chat.edit_cancel", () => close()), el("button", { type: "submit", class: "fs-send", text: t("chat.edit_send") })));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const refusal = await send(box.value);
    setText(told, refusal);
    told.hidden = !refusal;
    if (!refusal) close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && event.target === box && !event.shiftKey && !event.isComposing) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const cameFrom = document.activeElement;
  const close = () => {
    form.remove();
    element.classList.remove("fs-editing");
    cameFrom.focus();
    if (focusIsLost()) focusElse();
  };
  element.querySelector(".fs-edit")?.remove();
  element.classList.add("fs-editing");
  element.append(form);
  box.focus();
}
