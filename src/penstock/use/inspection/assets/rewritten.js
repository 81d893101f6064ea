// Documents that an objective rewrote: their parts, sentinels and spans, and the original document.

/** Purpose of each slot of a row: { role, span }; slots of other documents have none. */
function purposesOf(row) {
  const found = new Array(row.slots);
  for (const part of row.documents) {
    let at = part.begin;
    for (const [size, , role, span] of part.stretches || []) found.fill({ role, span }, at, at += size);
  }
  return found;
}

/** Blocks for the tokens of one document, one for each of its parts; and the element that holds them all. */
function partsOfDocument(part) {
  const frame = element("div", { class: "parts" }), blocks = [];
  let begin = part.begin;
  for (const [size, name] of part.stretches) {
    const last = blocks[blocks.length - 1];
    if (last && last.name === name) last.end += size;
    else blocks.push({ name, begin, end: begin + size, into: element("div", { class: "text" }) });
    begin += size;
  }
  for (const { name, begin, end, into } of blocks) {
    const seen = end - part.begin <= part.prefix;
    frame.append(element("div", { class: seen ? "pane seen" : "pane" },
      element("div", { class: "label" }, element("b", {}, name), element("span", { class: "quiet" },
        ` ${plural(end - begin, "slot")}${seen ? ", see each other" : ""}`)), into));
  }
  if (part.restored.length) frame.append(asItWas(part));
  return { frame, blocks };
}

function asItWas(part) {
  const text = element("div", { class: "text" }, ...part.restored.map(([said, span]) => (span < 0 ? said
    : element("span", { class: "span", "data-span": span, "data-hue": span % HUES }, said))));
  const pane = element("div", { class: "pane was" }, element("div", { class: "label" }, element("b", {}, "as it was")), text);
  text.addEventListener("pointerover", event => light(pane.parentElement, event.target.dataset.span));
  text.addEventListener("pointerout", () => light(null));
  return pane;
}

/** Style of a token: the number of a sentinel, the colour of a span. */
function markPurpose(made, purpose) {
  if (!purpose) return;
  if (purpose.role === "sentinel") made.classList.add("sentinel");
  if (purpose.span >= 0) set(made, { "data-span": purpose.span, "data-hue": purpose.span % HUES });
}

/** Highlight everything that belongs to one span: its sentinels, its words, and where they were. */
function light(frame, span) {
  for (const lit of byId("main").querySelectorAll(".lit")) lit.classList.remove("lit");
  if (!frame || span === undefined) return;
  for (const each of frame.querySelectorAll(`[data-span="${span}"]`)) each.classList.add("lit");
}

const purposeText = ({ role, span }) => (role === "sentinel" || role === "target" ? `${role} of span ${counted(span)}` : role);
const tasksText = tasks => tasks.map(([name, count]) => `${name} ${counted(count)}`).join(", ");
