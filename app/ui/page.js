// Runs once in each tab: keeps the end of the conversation in sight.
() => {
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

  copyExactly();
  stopOnEscape();
  followAnswer();
}
