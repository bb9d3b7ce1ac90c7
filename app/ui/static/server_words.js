// What the server says is English, as its API and its log are; here it is put into the page's language.
//
// A table has templates of the server's sentences, {} for each value, and for each the words with {0}, {1}, ... for
// these. A value may be a sentence again. tests/app/ui/test_server_words.py finds sentences that no table has.

const MOST_KEPT = 500; // texts that were met lately; a page meets few
const LEAST_LETTERS = 4; // a template of fewer, as "{} and {}", fits nearly all texts: it comes last

/** text -> the same in the table's language; what no template fits stays as it is. */
export function translator(table) {
  const templates = Object.entries(table).map(([english, words]) => ({ pieces: english.trim().split("{}"), words }));
  templates.sort((a, b) => letters(b) - letters(a)); // those that say most are tried first
  const from = templates.findIndex((template) => letters(template) < LEAST_LETTERS);
  const [telling, bare] = from < 0 ? [templates, []] : [templates.slice(0, from), templates.slice(from)];
  const known = new Map();

  function whole(text, among = telling) {
    for (const { pieces, words } of among) {
      const values = valuesIn(text, pieces);
      if (values) return words.replace(/\{(\d+)\}/g, (_, at) => translate(values[at]));
    }
    return null;
  }

  /** Some sentences together: a message and its hint. */
  function sentences(text) {
    for (const { index } of text.matchAll(/(?<=[.!?…]) +/g)) {
      const first = whole(text.slice(0, index));
      if (first !== null) return first + translate(text.slice(index));
    }
    return null;
  }

  function listed(text) {
    const parts = text.split("; ");
    return parts.length > 1 ? parts.map(translate).join("；") : null;
  }

  function translate(text) {
    const trimmed = text.trim();
    if (!trimmed) return "";
    if (!known.has(trimmed)) {
      if (known.size >= MOST_KEPT) known.clear();
      known.set(trimmed, whole(trimmed) ?? sentences(trimmed) ?? listed(trimmed) ?? whole(trimmed, bare) ?? trimmed);
    }
    return known.get(trimmed);
  }
  return translate;
}

function letters({ pieces }) {
  return pieces.join("").match(/\p{L}/gu)?.length ?? 0;
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
