// One model of the list: what it is, how it is, what can be done with it; opened, its forecast and its defaults.
import { ask, el, localized, setText, t } from "./core.js";
import { drawForecast, fitBadge } from "./forecast.js";
import { bytes, duration, number } from "./format.js";
import { progressWords } from "./model_choice.js";
import { defaultsForm } from "./model_forms.js";
import { Alert, askedTwice, badge, button, forAdmins, progress } from "./parts.js";

const UNDER_WAY = ["queued", "downloading", "verifying"];

export class ModelRow {
  /** deeds: see models.js. */
  constructor(deeds) {
    this.deeds = deeds;
    this.model = null;
    this.status = undefined;
    this.download = undefined;
    this.isInHand = false;
    this.isAdmin = false;
    this.judged = {}; // by its headers
    this.alert = new Alert();
    this.name = el("h3");
    this.badges = el("span", { class: "fr-badges" });
    this.state = el("div", { class: "fr-state" });
    this.actions = el("div", { class: "fr-actions" });
    this.forecast = el("div");
    this.defaults = el("div");
    this.files = el("div");
    this.details = this.#details();
    this.element = el("li", { class: "fr-row" },
      el("div", { class: "fr-row-head" }, el("div", { class: "fr-row-name" }, this.name, this.badges), this.actions),
      this.state,
      this.alert.element,
      this.details,
    );
  }

  /** What a filter looks at. */
  get text() {
    const { id, origin, licence, format, aliases } = this.model;
    return [id, origin, licence, format ?? "", ...aliases].join(" ").toLowerCase();
  }

  /** The higher, the further up. */
  get rank() {
    return 4 * (this.status !== undefined) + 2 * (this.model.state !== "") + (this.model.fit === "fits" ? 0.5 : 0);
  }

  isOf(which) {
    if (which === "here") return this.model.state !== "";
    return which !== "fits" || this.model.fit === "fits" || this.model.fit === "tight";
  }

  open() {
    this.details.open = true;
    this.element.scrollIntoView({ block: "center" });
    this.element.querySelector("summary").focus();
  }

  /** The shelf's word on it. */
  take(model, isAdmin) {
    model = { ...model, ...this.judged, size_bytes: model.size_bytes || this.judged.size_bytes || 0 };
    const isNew = JSON.stringify([model, isAdmin]) !== JSON.stringify([this.model, this.isAdmin]);
    [this.model, this.isAdmin] = [model, isAdmin];
    if (!isNew) return;
    setText(this.name, model.id);
    this.badges.replaceChildren(...this.#badges());
    this.defaults.replaceChildren(...model.fit && !this.#isComing() ? [defaultsForm(model, this.deeds, isAdmin, this.alert)] : []);
    this.ofWhatIsHere.hidden = model.state === "" && !model.is_own;
    this.#drawActions();
  }

  get isJudged() {
    return this.judged.fit !== undefined || this.#isComing();
  }

  /** Read its headers for a word on whether it fits. */
  async judge() {
    const { fits } = await ask(`ui/models/fit?model=${encodeURIComponent(this.model.id)}`);
    this.judged = { fit: fits[0].verdict, size_bytes: this.model.size_bytes || fits[0].weights_bytes };
    this.model = { ...this.model, ...this.judged };
    this.badges.replaceChildren(...this.#badges());
  }

  /** How it is now: in memory, on its way here. */
  tell(status, download, isInHand) {
    const before = [this.#stage(), this.isInHand];
    [this.status, this.download, this.isInHand] = [status, download, isInHand];
    this.#drawState();
    if (JSON.stringify(before) !== JSON.stringify([this.#stage(), this.isInHand])) this.#drawActions();
  }

  #isComing() {
    return this.model.id.includes("/");
  }

  #badges() {
    const { state, size_bytes, format, context_length, licence, thinks, is_own, fit } = this.model;
    return [
      fitBadge(fit),
      size_bytes ? badge(state === "" ? t("models.about", { size: bytes(size_bytes) }) : bytes(size_bytes)) : null,
      format ? badge(format) : null,
      context_length ? badge(t("models.context", { tokens: number(context_length) })) : null,
      licence ? badge(licence) : null,
      thinks ? badge(t("models.thinks")) : null,
      is_own ? badge(t("models.yours"), "info") : null,
    ].filter(Boolean);
  }

  #bytesHere() {
    if (this.model.state === "") return 0;
    return this.download && this.download.state !== "ready" ? this.download.done_bytes : this.model.size_bytes;
  }

  /** One word for all that decides which buttons there are. */
  #stage() {
    if (this.status?.state === "ready" || this.status?.state === "loading") return this.status.state === "ready" ? "loaded" : "loading";
    if (this.download && this.download.state !== "ready") return this.download.state;
    return this.model.state;
  }

  // -- the state in words

  #drawState() {
    const stage = this.#stage();
    this.element.dataset.stage = stage;
    if (stage === "loaded") this.state.replaceChildren(this.#line(this.isInHand ? "models.in_hand" : "models.loaded"));
    else if (stage === "loading") this.state.replaceChildren(...this.#loading());
    else if (this.status?.state === "failed") this.state.replaceChildren(el("p", { class: "fr-said", data: { kind: "error" }, text: localized(this.status.error) }));
    else if (UNDER_WAY.includes(stage) || stage === "paused" || stage === "failed") this.state.replaceChildren(...this.#coming(stage));
    else this.state.replaceChildren(...stage ? [this.#line(`models.state.${stage}`)] : []);
    this.#drawFiles();
  }

  #line(key) {
    const values = { tokens: number(this.status?.max_model_len ?? 0) };
    return el("p", { class: "fr-quiet", text: t(key, values) });
  }

  #loading() {
    return [
      progress(this.status.fraction, t("models.loading", { model: this.model.id })),
      el("p", { class: "fr-quiet", text: progressWords(this.status) }),
    ];
  }

  #coming(stage) {
    const { size_bytes, done_bytes, bytes_per_s, seconds_left, error, is_to_load: isToLoad } = this.download ?? {};
    const told = [
      t(`models.state.${stage}`),
      size_bytes ? t("models.of", { done: bytes(done_bytes), all: bytes(size_bytes) }) : "",
      stage === "downloading" && bytes_per_s ? `${bytes(bytes_per_s)}/s` : "",
      stage === "downloading" && seconds_left ? t("models.left", { time: duration(seconds_left) }) : "",
      isToLoad ? t("models.then_load") : "",
    ];
    return [
      progress(size_bytes ? done_bytes / size_bytes : stage === "queued" ? null : 0, t("models.downloading", { model: this.model.id })),
      el("p", { class: "fr-quiet", text: told.filter(Boolean).join(" · ") }),
      error ? el("p", { class: "fr-said", data: { kind: "error" }, text: [error.message, error.hint].filter(Boolean).map(localized).join(" ") }) : null,
    ].filter(Boolean);
  }

  #drawFiles() {
    const files = this.details.open ? this.download?.files ?? [] : [];
    const isStill = !UNDER_WAY.includes(this.download?.state);
    this.files.replaceChildren(...files.length ? [el("table", { class: "fr-table" }, el("tbody", {}, ...files.map((file) => (
      el("tr", {},
        el("th", { scope: "row", text: file.name }),
        el("td", { text: t("models.of", { done: bytes(file.done_bytes), all: bytes(file.size_bytes) }) }),
        el("td", { text: t(`files.${isStill && file.state === "downloading" ? "waiting" : file.state}`) }))
    ))))] : []);
  }

  // -- what can be done

  #drawActions() {
    const made = this.#deedsNow().map(([key, work, kind]) => (
      button(t(key), work, { alert: this.alert, kind, label: `${t(key)}: ${this.model.id}`, disabled: !this.isAdmin, title: this.isAdmin ? null : t("models.takes_admin") })
    ));
    const hadFocus = this.actions.contains(document.activeElement);
    this.actions.replaceChildren(...made);
    if (hadFocus) made[0]?.focus();
  }

  #deedsNow() {
    const { id, origin, is_embedded } = this.model;
    const target = origin && this.#isComing() ? origin : id;
    const load = ["models.load", () => this.deeds.load(id), "primary"];
    const cancel = ["models.cancel", () => this.deeds.cancel(target), ""];
    switch (this.#stage()) {
      case "loaded": return [["models.unload", () => this.deeds.unload(id), ""]];
      case "loading": return [["models.cancel", () => this.deeds.unload(id), ""]];
      case "queued": case "downloading": case "verifying":
        return [["models.pause", () => this.deeds.pause(target), ""], cancel];
      case "paused": case "failed": return [["models.resume", () => this.deeds.resume(target), "primary"], cancel];
      case "damaged": return is_embedded ? [load] : [["models.again", () => this.deeds.download(target), "primary"]];
      case "ready": return [load];
      default: return is_embedded || !origin.includes("/") || origin.startsWith("/")
        ? [load] : [["models.download", () => this.deeds.download(target), ""]];
    }
  }

  // -- opened

  #details() {
    const details = el("details", {}, el("summary", { text: t("models.more") }), this.files, this.forecast, this.defaults, this.#upkeep());
    details.addEventListener("toggle", () => {
      this.#drawFiles();
      if (details.open && !this.forecast.hasChildNodes()) this.#drawForecast();
    });
    return details;
  }

  #drawForecast() {
    if (this.isAdmin) drawForecast(this.forecast, this.model.id);
    else this.forecast.replaceChildren(el("p", { class: "fr-quiet", text: t("models.admin_forecast") }));
  }

  #upkeep() {
    const told = el("div");
    const verify = button(t("models.verify"), async () => {
      told.replaceChildren(el("p", { class: "fr-quiet", text: t("models.verifying") }));
      const { files } = await this.deeds.verify(this.model.id);
      told.replaceChildren(el("ul", { class: "fr-notes" }, ...Object.entries(files).map(([name, verdict]) => (
        el("li", { data: { verdict }, text: `${name}: ${t(`files.${verdict}`)}` })
      ))));
    }, { alert: this.alert });
    const again = button(t("models.forecast_again"), async () => this.#drawForecast(), { alert: this.alert });
    this.ofWhatIsHere = el("div", { class: "fr-actions" }, ...forAdmins(verify, ...this.#deletion()));
    return el("div", { class: "fr-upkeep" }, el("div", { class: "fr-actions" }, ...forAdmins(again), this.ofWhatIsHere), told);
  }

  #deletion() {
    const sure = () => {
      const size = this.#bytesHere();
      return size ? t("models.delete_frees", { size: bytes(size) }) : t("models.delete_sure");
    };
    return askedTwice({ first: t("models.delete"), sure, keep: t("models.keep") }, () => this.deeds.remove(this.model.id), this.alert);
  }
}
