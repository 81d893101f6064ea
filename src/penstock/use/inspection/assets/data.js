// The page's data, decoded on demand. Tokens are numbers in one table of (id, text, control).

const page = JSON.parse(document.getElementById("data").textContent);
const vocabulary = page.vocabulary;
const controls = new Set(vocabulary.control);
const numberOfId = new Map();
vocabulary.ids.forEach((id, number) => { if (!numberOfId.has(id)) numberOfId.set(id, number); });

/** LEB128 in base64 → count numbers. */
function integers(base64, count) {
  const bytes = atob(base64);
  const found = new Uint32Array(count);
  for (let i = 0, at = 0; i < count; i++) {
    let shift = 0, byte;
    do {
      byte = bytes.charCodeAt(at++);
      found[i] += (byte & 127) * 2 ** shift;
      shift += 7;
    } while (byte & 128);
  }
  return found;
}

/** [count, value, …] → the values one after another. */
function expanded(runs, found) {
  for (let i = 0, at = 0; i < runs.length; i += 2) found.fill(runs[i + 1], at, at += runs[i]);
  return found;
}

const decoded = new WeakMap();

/** The arrays of a document, decoded once: tokens, weights, roles, reasons. */
function arraysOf(document) {
  if (!decoded.has(document)) {
    decoded.set(document, {
      tokens: integers(document.tokens, document.length),
      weights: expanded(document.weights, new Float64Array(document.length)),
      roles: expanded(document.roles, new Int16Array(document.length)),
      reasons: expanded(document.reasons || [], new Uint16Array(document.length)),
    });
  }
  return decoded.get(document);
}

/** The arrays of a row; targets are ids, −100 = none, at each distance. */
function arraysOfRow(row) {
  if (!decoded.has(row)) {
    const tokens = integers(row.tokens, row.length);
    const weights = row.weights.map(runs => expanded(runs, new Float64Array(row.slots)));
    const targets = weights.map((each, d) => {
      const found = new Float64Array(row.slots).fill(-100);
      for (let i = 0; i + d + 1 < row.length; i++) if (each[i] !== 0) found[i] = vocabulary.ids[tokens[i + d + 1]];
      const odd = row.targets[d];
      for (let i = 0; i < odd.length; i += 2) found[odd[i]] = odd[i + 1];
      return found;
    });
    const positions = expanded(row.positions, new Float64Array(row.length)).map((start, slot) => start + slot);
    decoded.set(row, { tokens, weights, targets, positions,
                       learned: expanded(row.learned, new Float64Array(row.length)) });
  }
  return decoded.get(row);
}

/** The images of a document or row: first token → { end, picture }, and for each token whether another one shows it. */
function imagesOf(part, length) {
  const begins = new Map(), inside = new Uint8Array(length);
  for (const [begin, end, number] of part.images ?? []) {
    begins.set(begin, { end, picture: number < 0 ? null : page.pictures[number] });
    inside.fill(1, begin + 1, end);
  }
  return { begins, inside };
}

const textOf = number => vocabulary.texts[number];

/** Text of a target id; ids unknown to the page appear as numbers. */
function spelled(id) {
  const number = numberOfId.get(id);
  return number === undefined ? "" : textOf(number);
}

/** A document's text in lower case, joined from its tokens so that their positions stay known. */
const lowered = [], searched = new WeakMap();
const lowerOf = number => (lowered[number] ??= textOf(number).toLowerCase());
function searchText(document) {
  if (!searched.has(document)) {
    let text = "";
    for (const number of arraysOf(document).tokens) text += lowerOf(number);
    searched.set(document, text);
  }
  return searched.get(document);
}
