// What the server says is English, as its API and its log are; here it is put into the page's language.
//
// A table has templates of the server's sentences, {} for each value, and for each the words with {0}, {1}, ... for
// these. A value may be a sentence again. tests/app/ui/test_server_words.py finds sentences that no table has.

const MOST_KEPT = 500; // texts that were met lately; a page meets few

/** text -> the same in the table's language. Of all readings it takes the one by which most characters are known: a
 *  value could take in the next sentence, too. What no template fits stays as it is. */
export function translator(table) {
  const templates = Object.entries(table).map(([english, words]) => {
    const pieces = english.trim().split("{}");
    return { pieces, words, known: pieces.join("").length };
  });
  const met = new Map(); // text -> its best reading: words, and how many of its characters are known

  function read(text) {
    const trimmed = text.trim();
    if (!met.has(trimmed)) {
      let best = { words: trimmed, known: 0 };
      for (const reading of readings(trimmed)) if (reading.known > best.known) best = reading;
      if (met.size >= MOST_KEPT) met.clear();
      met.set(trimmed, best);
      return best;
    }
    return met.get(trimmed);
  }

  function* readings(text) {
    for (const { pieces, words, known } of templates) {
      const values = valuesIn(text, pieces)?.map(read);
      if (values) yield { words: words.replace(/\{(\d+)\}/g, (_, at) => values[at].words), known: known + knownOf(values) };
    }
    for (const { index } of text.matchAll(/(?<=[.!?…]) +/g)) { // a message and its hint
      yield joined([read(text.slice(0, index)), read(text.slice(index))], "");
    }
    if (text.includes("; ")) yield joined(text.split("; ").map(read), "；");
  }
  return (text) => read(text).words;
}

function joined(parts, between) {
  return { words: parts.map((part) => part.words).join(between), known: knownOf(parts) };
}

function knownOf(parts) {
  return parts.reduce((sum, part) => sum + part.known, 0);
}

/** The values between a template's pieces; null where the text does not follow it. */
function valuesIn(text, pieces) {
  const last = pieces.length - 1;
  if (last === 0) return text === pieces[0] ? [] : null;
  if (!text.startsWith(pieces[0]) || !text.endsWith(pieces[last])) return null;
  const values = [];
  let from = pieces[0].length;
  for (let at = 1; at <= last; at += 1) {
    const to = at === last ? text.length - pieces[last].length : text.indexOf(pieces[at], from);
    if (to < from) return null;
    values.push(text.slice(from, to));
    from = to + pieces[at].length;
  }
  return values;
}
