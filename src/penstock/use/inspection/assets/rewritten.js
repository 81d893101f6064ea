// Documents that an objective rewrote: their parts, sentinels and spans, and the original document.

const STANDING = new Set(["masked", "replaced"]); // in place of a word, which is their target
const PREDICTING = new Set([...STANDING, "kept", "predicts"]);

/** Purpose of each slot of a row: { part, role, span, level, own }; slots of other documents have none. */
function purposesOf(row) {
  const found = new Array(row.slots);
  for (const { begin, stretches, own } of row.documents) {
    let at = begin;
    for (const [size, part, role, span, level] of stretches || []) found.fill({ part, role, span, level, own }, at, at += size);
  }
  return found;
}

/** Blocks for the tokens of one document, one for each of its parts; and the element that holds them all. */
function partsOfDocument(part) {
  const frame = element("div", { class: "parts" }), blocks = [];
  let begin = part.begin;
  for (const [size, name, role, , level] of part.stretches) {
    let last = blocks[blocks.length - 1];
    if (last && last.name === name) last.end += size;
    else blocks.push(last = { name, begin, end: begin + size, predicted: 0, into: element("div", { class: "text" }) });
    if (PREDICTING.has(role)) last.predicted += size;
    last.level ??= level;
    begin += size;
  }
  for (const each of blocks) {
    const { name, begin, end, into } = each, size = end - begin;
    const seen = Math.min(end, part.begin + part.prefix) - begin, all = seen === size && (size > 1 || !part.own);
    frame.append(element("div", { class: all ? "pane seen" : "pane" },
      element("div", { class: "label" }, element("b", {}, name), element("span", { class: "quiet" },
        ` ${plural(size, "slot")}${all ? ", see each other" : part.own && seen > 1 ? `, ${counted(seen)} see each other` : ""}`
        + (part.own ? noiseText(each) : ""))), into));
  }
  if (part.restored.length) frame.append(asItWas(part));
  return { frame, blocks };
}

/** How much of a part with targets of its own predicts something, and the level of its noise. */
function noiseText({ predicted, level }) {
  if (level !== undefined) return `; noise ${level.toFixed(2)}, ${counted(predicted)} masked, each ×${Number((1 / level).toPrecision(3))}`;
  return predicted ? `; ${counted(predicted)} predicted` : ", only read";
}

function asItWas(part) {
  const text = element("div", { class: "text" }, ...part.restored.map(([said, span]) => (span < 0 ? said
    : element("span", { class: "span", "data-span": span, "data-hue": part.own ? null : span % HUES }, said))));
  const pane = element("div", { class: "pane was" }, element("div", { class: "label" }, element("b", {}, "as it was")), text);
  text.addEventListener("pointerover", event => light(pane.parentElement, event.target.dataset.span));
  text.addEventListener("pointerout", () => light(null));
  return pane;
}

/** Style of a token: the number of a sentinel, the colour of a span, the word that a mask stands for. */
function markPurpose(made, purpose, target, weight) {
  if (!purpose) return;
  const { role, span, level, own } = purpose;
  if (role === "sentinel") made.classList.add("sentinel");
  if (span >= 0) set(made, own ? { "data-span": span } : { "data-span": span, "data-hue": span % HUES });
  if (role === "clean") made.classList.add("clean");
  if (!own || !PREDICTING.has(role)) return;
  made.classList.add(role);
  if (role !== "kept") made.dataset.word = shown(spelled(target)).replace(/␣/g, "\u00a0");
  // What the level of noise makes of a weight is said once for its part.
  if (level !== undefined && Math.abs(weight * level - 1) < 1e-4) { made.classList.remove("weighted"); delete made.dataset.weight; }
}

/** Highlight everything that belongs to one span: its sentinels, its words, and where they were. */
function light(frame, span) {
  for (const lit of byId("main").querySelectorAll(".lit")) lit.classList.remove("lit");
  if (!frame || span === undefined) return;
  for (const each of frame.querySelectorAll(`[data-span="${span}"]`)) each.classList.add("lit");
}

const purposeText = ({ part, role, span, level }) => (role === "sentinel" || role === "target" ? `${role} of span ${counted(span)}`
  : (part.startsWith("block ") ? `${role}, ${part}` : role) + (level === undefined ? "" : `, noise ${level.toFixed(2)}`));
const tasksText = tasks => tasks.map(([name, count]) => `${name} ${counted(count)}`).join(", ");
