// English words of the page. A key begins with the room that uses it; words/zh.js has the same keys.
// {name} is filled in by t("key", { name }).
export default {
  // The frame.
  "frame.tabs": "Rooms",
  "frame.chat": "Chat",
  "frame.models": "Models",
  "frame.monitor": "Monitor",
  "frame.settings": "Settings",
  "frame.loading": "Loading the model",
  "frame.status.empty": "no model loaded",
  "frame.status.loading": "loading",
  "frame.status.ready": "ready",
  "frame.status.failed": "failed to load",
  "frame.status.gone": "Fireside is not running",
  "frame.failed": "This part of the page could not be opened: {message}",
  "frame.refused": "The server answered {status}.",
  "frame.unreachable": "Fireside cannot be reached. Is it still running?",
};
