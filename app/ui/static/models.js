// The room "models" of the page.
import { el, t } from "./core.js";

export function start(root) {
  root.append(el("h2", { text: t("frame.models") }));
}
