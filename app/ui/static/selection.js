// What the reader has selected outlives that the text around it is drawn anew.

/** Do work() on what is in `root`; a selection in it then covers the same characters as before. */
export function keepingSelection(root, work) {
  const selection = getSelection();
  const { anchorNode, anchorOffset, focusNode, focusOffset } = selection;
  if (selection.isCollapsed || !(root.contains(anchorNode) || root.contains(focusNode))) return work();
  const places = [placeOf(root, anchorNode, anchorOffset), placeOf(root, focusNode, focusOffset)];
  work();
  if (selection.anchorNode === anchorNode && selection.focusNode === focusNode) return; // it was elsewhere in there
  const [anchor, focus] = places.map((place) => place.node ? [place.node, place.offset] : nodeAt(root, place.offset));
  selection.setBaseAndExtent(...anchor, ...focus);
}

/** Characters from the beginning of `root`; a place outside of it stays as it is. */
function placeOf(root, node, offset) {
  if (!root.contains(node)) return { node, offset };
  const range = document.createRange();
  range.setStart(root, 0);
  range.setEnd(node, offset);
  return { node: null, offset: range.toString().length };
}

function nodeAt(root, offset) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  let left = offset;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (left <= node.length) return [node, left];
    left -= node.length;
  }
  return [root, root.childNodes.length];
}
