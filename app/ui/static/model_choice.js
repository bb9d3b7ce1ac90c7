// The model in hand, in the header: how it is, and a choice of those that lie here. Choosing one has it loaded.
import { ask, el, live, localized, Refused, setText, t } from "./core.js";
import { duration, percent } from "./format.js";

const GONE = { state: "gone", model_id: "", stage: "", fraction: null, seconds_left: null, error: "" };

/** What a load does now, how much of it is done, how long it may still take. */
export function progressWords({ stage, fraction, seconds_left: left }) {
  const share = fraction === null ? "" : percent(fraction);
  const time = left === null ? "" : t("models.left", { time: duration(left) });
  return [localized(stage) || t("frame.status.loading"), share, time].filter(Boolean).join(" · ");
}

class ModelChoice {
  #root; #select; #told; #status = null; #known = [];

  constructor(root) {
    this.#root = root;
    this.#select = root.querySelector("select");
    this.#told = root.querySelector(".fs-error");
    this.#select.addEventListener("change", () => this.#choose());
    live.watch("status", (event) => { if (event.kind === "state") this.#draw(event); });
    live.watch("models", () => this.#list());
    live.onState((isOpen) => { if (!isOpen) this.#draw({ ...GONE, model_id: this.#status?.model_id ?? "" }); });
    this.#list();
  }

  async #list() {
    const told = await ask("ui/models/shelf").catch(() => null);
    if (!told) return;
    this.#known = told.models.filter((model) => model.state === "ready" || model.is_embedded).map((model) => model.id);
    this.#drawOptions();
  }

  async #choose() {
    setText(this.#told, "");
    try {
      await ask("ui/models/load", { body: { model: this.#select.value } });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setText(this.#told, error.message);
      this.#drawOptions();
    }
  }

  #draw(status) {
    this.#status = status;
    const stage = {
      loading: progressWords(status),
      failed: localized(status.error) || t("frame.status.failed"),
    }[status.state] ?? t(`frame.status.${status.state}`);
    this.#root.dataset.state = status.state;
    this.#root.title = stage;
    setText(this.#root.querySelector(".fs-stage"), stage);
    const bar = this.#root.querySelector(".fs-progress");
    bar.hidden = status.state !== "loading";
    if (status.fraction === null) bar.removeAttribute("value");
    else bar.value = status.fraction;
    this.#drawOptions();
  }

  #drawOptions() {
    const inHand = this.#status?.model_id ?? "";
    const ids = inHand && !this.#known.includes(inHand) ? [inHand, ...this.#known] : this.#known;
    const options = inHand ? ids : ["", ...ids];
    if (options.join() !== [...this.#select.options].map((option) => option.value).join()) {
      this.#select.replaceChildren(...options.map((id) => el("option", { value: id, text: id || t("frame.status.empty") })));
    }
    this.#select.value = inHand;
  }
}

export function start(root) {
  return new ModelChoice(root);
}
