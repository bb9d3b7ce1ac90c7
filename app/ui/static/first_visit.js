// For a first visit: the model that this machine is good for, fetched and loaded with one button, while the small one
// that is here already answers.
import { ask, el, live, localized, recall, remember, t } from "./core.js";
import { bytes, duration, percent } from "./format.js";
import { Alert, badge, button, progress } from "./parts.js";

const UNDER_WAY = ["queued", "downloading", "verifying"];
const LOOK_EVERY_MS = 1000;

/** Fills `root`, where there is something to offer: nothing once it was closed, or where a larger model is here. */
export async function mount(root) {
  if (recall("first_visit_closed", false)) return;
  const { models, best, is_admin: isAdmin } = await ask("ui/models/shelf");
  const model = models.find((each) => each.id === best);
  const hasOther = models.some((each) => !each.is_embedded && each.state === "ready");
  if (isAdmin && model && !hasOther) root.append(offer(model));
}

function offer(model) {
  const alert = new Alert();
  const state = el("div");
  const card = el("section", { class: "fr-card fr-offer", "aria-label": t("first.title") });
  const actions = el("div", { class: "fr-actions" },
    button(model.size_bytes ? t("first.get_size", { size: bytes(model.size_bytes) }) : t("first.get"), async () => {
      await ask("ui/models/get", { body: { model: model.id } });
      actions.hidden = true;
      follow(model, state, card);
    }, { alert, kind: "primary" }),
    el("a", { href: "#/models", text: t("first.others") }),
    button(t("first.close"), () => close(card)));
  card.append(
    el("h3", { text: t("first.title") }),
    el("p", {}, el("strong", { text: `${model.id} ` }), ...facts(model)),
    el("p", { class: "fr-quiet", text: t("first.words", { repo: model.origin }) }),
    actions, state, alert.element);
  if (UNDER_WAY.includes(model.state)) {
    actions.hidden = true;
    follow(model, state, card);
  }
  return card;
}

function facts({ size_bytes: size, licence, fit }) {
  return [badge(size ? t("models.about", { size: bytes(size) }) : t("fit.unknown")), badge(licence), fit === "fits" ? badge(t("fit.fits"), "good") : null].filter(Boolean);
}

function close(card) {
  remember("first_visit_closed", true);
  card.remove();
}

/** Draws how far it is, until it answers. */
function follow(model, state, card) {
  const watchDownload = () => look(model, state).catch((error) => draw(state, null, error.message));
  const unwatch = live.watch("models", (event) => {
    if (event.kind === "again") watchDownload();
    const status = event.models?.find((each) => each.model === model.id);
    if (status?.state === "loading") draw(state, status.fraction, `${t("models.loading", { model: model.id })} · ${localized(status.stage)}`);
    if (status?.state === "failed") draw(state, 0, localized(status.error));
    if (status?.state !== "ready") return;
    unwatch();
    close(card);
  });
  watchDownload();
}

async function look(model, state) {
  const { data } = await ask("ui/models/downloads");
  const download = data.find((each) => each.model === model.origin);
  if (!download || download.state === "ready") return;
  const { size_bytes: size, done_bytes: done, seconds_left: left, error } = download;
  const told = [
    t(`models.state.${download.state}`),
    size ? percent(done / size) : "",
    left ? t("models.left", { time: duration(left) }) : "",
    error ? [error.message, error.hint].filter(Boolean).map(localized).join(" ") : "",
  ];
  draw(state, size ? done / size : null, told.filter(Boolean).join(" · "));
  if (download.state !== "failed") setTimeout(() => look(model, state).catch((e) => draw(state, null, e.message)), LOOK_EVERY_MS);
}

function draw(state, share, words) {
  state.replaceChildren(progress(share, words), el("p", { class: "fr-quiet", role: "status", text: words }));
}
