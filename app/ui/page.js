// Runs once in each tab: draws the model's state and keeps the end of the conversation in sight.
// Everything is drawn through textContent, so no word of the server can become markup.
() => {
  const LOADING_MS = 700, CALM_MS = 3000;

  function drawStatus(status) {
    const root = document.querySelector("#fs-status .fs-status");
    if (!root) return;
    const loading = status.state === "loading";
    const percent = status.fraction === null ? "" : ` ${Math.round(status.fraction * 100)} %`;
    const stage = {
      empty: "no model loaded",
      loading: `${status.stage || "loading"}${percent}`,
      ready: "ready",
      failed: status.error || "failed to load",
      gone: "Fireside is not running",
    }[status.state];
    root.dataset.state = status.state;
    setText(root.querySelector(".fs-model"), status.model_id || "Fireside");
    setText(root.querySelector(".fs-stage"), stage);
    root.title = stage;
    const bar = root.querySelector(".fs-progress");
    bar.hidden = !loading;
    if (status.fraction === null) bar.removeAttribute("value");
    else bar.value = status.fraction;
  }

  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  async function pollStatus() {
    let status = { state: "gone", model_id: "", stage: "", fraction: null, error: "" };
    if (!document.hidden) {
      try {
        const reply = await fetch("ui/status", { cache: "no-store" });
        if (reply.ok) status = await reply.json();
        else if (reply.status === 401) location.reload(); // the login has ended: the form is there now
      } catch { /* the server is away: the state already says so */ }
      drawStatus(status);
    }
    setTimeout(pollStatus, status.state === "ready" ? CALM_MS : LOADING_MS);
  }

  // Follow the answer while the reader is at the end; leave the view alone once they scroll up.
  function followAnswer() {
    const pane = document.querySelector("#fs-pane");
    if (!pane) return setTimeout(followAnswer, 100);
    let follows = true;
    const isAtEnd = () => pane.scrollHeight - pane.scrollTop - pane.clientHeight < 60;
    pane.addEventListener("scroll", () => { follows = isAtEnd(); }, { passive: true });
    new MutationObserver(() => {
      if (follows) pane.scrollTop = pane.scrollHeight;
    }).observe(pane, { childList: true, subtree: true, characterData: true });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target.closest?.("#fs-box")) follows = true;
    }, true);
  }

  window.fireside = {
    // Called with the inputs of a message that is about to be sent: empties the box at once, so that what is typed
    // from now on belongs to the next message.
    takeMessage(text, ...others) {
      const box = document.querySelector("#fs-box textarea");
      box.value = "";
      box.dispatchEvent(new Event("input", { bubbles: true }));
      return [text, ...others];
    },
    // The conversation outlives a reload of its tab, and is gone with the tab: sessionStorage is each tab's own.
    keep(transcript) {
      try {
        sessionStorage.setItem("fireside.transcript", transcript);
      } catch {
        sessionStorage.removeItem("fireside.transcript"); // too long to keep; an old one would mislead
      }
      return [];
    },
  };

  function stopOnEscape() {
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") document.querySelector("#fs-box .stop-button")?.click();
    });
  }

  // The chat's own copy button gives the text as prepared for drawing. Put the answer's exact words in its place.
  function copyExactly() {
    document.addEventListener("click", (event) => {
      const bar = event.target.closest?.("#fs-history .message-buttons-left");
      if (!bar || !navigator.clipboard) return;
      const index = [...document.querySelectorAll("#fs-history .message-buttons-left")].indexOf(bar);
      const turns = JSON.parse(document.querySelector("#fs-transcript textarea").value);
      setTimeout(() => navigator.clipboard.writeText(turns[index].answer));
    }, true);
  }

  pollStatus();
  copyExactly();
  stopOnEscape();
  followAnswer();
}
