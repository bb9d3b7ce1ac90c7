// Draw something again, touching only what differs: what stays in the document keeps its selection, and a browser need
// not look at it again, which with formulas costs more than all else.

/** Make the children of `element` those of `fresh`; a formula that is set already stands for its placeholder. */
export function patch(element, fresh) {
  const kept = [...element.childNodes], wanted = [...fresh.childNodes];
  let num = 0;
  while (num < kept.length && num < wanted.length && isSame(kept[num], wanted[num])) num += 1;
  const isGrown = num < kept.length && num < wanted.length && grow(kept[num], wanted[num]);
  const from = num + (isGrown ? 1 : 0);
  for (const each of kept.slice(from)) each.remove();
  element.append(...wanted.slice(from));
}

/** False where these two are of another kind. */
function grow(kept, wanted) {
  if (kept.nodeType === Node.TEXT_NODE && wanted.nodeType === Node.TEXT_NODE) {
    let same = 0;
    while (same < kept.length && kept.data[same] === wanted.data[same]) same += 1;
    kept.replaceData(same, kept.length - same, wanted.data.slice(same)); // a selection before that stays
    return true;
  }
  if (!isSameKind(kept, wanted) || isFormula(kept)) return false;
  patch(kept, wanted);
  return true;
}

function isSame(kept, wanted) {
  if (isFormula(kept)) return isSameFormula(kept, wanted);
  if (!isSameKind(kept, wanted) || kept.childNodes.length !== wanted.childNodes.length) return false;
  if (kept.nodeType === Node.TEXT_NODE) return kept.data === wanted.data;
  return [...kept.childNodes].every((child, at) => isSame(child, wanted.childNodes[at]));
}

function isSameKind(kept, wanted) {
  if (kept.nodeType !== wanted.nodeType || kept.nodeName !== wanted.nodeName) return false;
  return kept.nodeType === Node.TEXT_NODE || kept.cloneNode(false).isEqualNode(wanted.cloneNode(false));
}

function isFormula(node) {
  return node.nodeType === Node.ELEMENT_NODE && node.dataset.tex !== undefined;
}

function isSameFormula(kept, wanted) {
  return wanted.nodeType === Node.ELEMENT_NODE && wanted.className === kept.className && wanted.textContent === kept.dataset.tex;
}
