// What the server says is English, as its API and its log are; here it is put into the page's language.
//
// A table has templates of the server's sentences, {} for each value, and for each the words with {0}, {1}, ... for
// these. A value may be a sentence again. tests/app/ui/test_server_words.py finds sentences that no table has.

const MOST_KEPT = 500; // texts that were met lately; a page meets few
const MOST_SPLITS = 20; // of a text into the values of one template

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
      for (const found of first(valuesIn(text, pieces), MOST_SPLITS)) {
        const values = found.map(read);
        yield { words: words.replace(/\{(\d+)\}/g, (_, at) => values[at].words), known: known + knownOf(values) };
      }
    }
    for (const { index } of text.matchAll(/(?<=[.!?…]) +/g)) { // a message and its hint
      yield joined([read(text.slice(0, index)), read(text.slice(index))], "", " ");
    }
    if (text.includes("; ")) yield joined(text.split("; ").map(read), "；", "; ");
  }
  return (text) => read(text).words;
}

function* first(found, most) {
  for (const each of found) {
    if (most-- === 0) return;
    yield each;
  }
}

const CHINESE = /[\u3000-\u9fff\uff00-\uffef]/;

/** `mark` between two parts of which one is Chinese where they meet, `plain` between those that stayed as they were. */
function joined(parts, mark, plain) {
  const words = parts.map((part) => part.words).reduce((told, next) => (
    told + (CHINESE.test(told.slice(-1) + next.slice(0, 1)) ? mark : plain) + next));
  return { words, known: knownOf(parts) };
}

function knownOf(parts) {
  return parts.reduce((sum, part) => sum + part.known, 0);
}

/** All ways in which values can stand between a template's pieces; none where the text does not follow it. */
function* valuesIn(text, pieces) {
  const last = pieces.at(-1);
  if (pieces.length === 1) {
    if (text === last) yield [];
  } else if (text.startsWith(pieces[0]) && text.endsWith(last) && text.length >= pieces[0].length + last.length) {
    yield* between(text.slice(pieces[0].length, text.length - last.length), pieces.slice(1, -1));
  }
}

/** The values before, between and behind the pieces. */
function* between(text, [piece, ...others]) {
  if (piece === undefined) return yield [text];
  for (let at = text.indexOf(piece); at >= 0 && piece; at = text.indexOf(piece, at + 1)) {
    for (const values of between(text.slice(at + piece.length), others)) yield [text.slice(0, at), ...values];
  }
  if (!piece) for (const values of between(text, others)) yield ["", ...values]; // which of two takes it, nobody can tell
}
