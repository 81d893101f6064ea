// Packed rows: the strip of documents, who may attend to whom, and the text as it is trained.

const DRAWN = 1200; // stretches of a strip narrower than 1/DRAWN of it are drawn together

const rowsTab = {
  name: "Rows",
  parts: page.rows,
  matches: () => true,
  tools: () => [element("div", { class: "line" }, element("span", { id: "count", class: "quiet", role: "status" }))],
  item(row) {
    const filled = row.length / row.slots;
    return [element("div", { class: "name" }, element("span", {}, row.title)),
            element("div", { class: "line quiet" }, meter(trainedOf(row) / row.slots),
              element("span", {}, `${plural(row.documents.length, "document")}, ${percent(1 - filled)} padding`),
              row.tasks ? element("span", {}, tasksText(row.tasks)) : null)];
  },
  show: showRow,
};

const trainedOf = row => row.weights[0].reduce((sum, value, k, all) => sum + (k % 2 && value !== 0 ? all[k - 1] : 0), 0);

const partHue = k => k % HUES;

function showRow(number, mine) {
  const row = page.rows[number], arrays = arraysOfRow(row);
  const view = rowView(row, arrays);
  const frames = row.documents.map((part, k) => {
    const size = part.end - part.begin, learned = countLearned(arrays, part);
    const whole = { begin: part.begin, end: part.end, into: element("div", { class: "text" }) };
    const { frame: text, blocks } = part.stretches?.length ? partsOfDocument(part) : { frame: whole.into, blocks: [whole] };
    return { blocks, frame: element("section", { class: "block", "data-hue": partHue(k) },
      element("div", { class: "role" }, element("b", {}, letter(k)), ` ${part.source}`,
        part.task ? element("span", { class: "task" }, part.task) : null,
        element("span", { class: "quiet" }, ` ${part.origin} · document ${part.document}`
          + (part.first ? ` from its token ${counted(part.first)}` : "") + (part.epoch ? ` · epoch ${part.epoch}` : "")
          + ` · slots ${counted(part.begin)}–${counted(part.end - 1)} · ${percent(learned / size)} trained`)), text) };
  });
  const attention = attentionPicture(row, view);
  byId("main").replaceChildren(
    rowHead(row, arrays),
    strip(row, arrays, k => {
      frames[k].frame.scrollIntoView({ block: "start" });
      focusToken(frames[k].frame.querySelector(".t"));
    }),
    attention,
    element("div", { class: "flow", "data-flow": "" }, ...frames.map(each => each.frame),
      row.slots > row.length ? element("div", { class: "block padding" },
        `padding, slots ${counted(row.length)}–${counted(row.slots - 1)}: never read, never a target`) : null));
  const { watch } = view;
  view.watch = i => { watch(i); light(frames[view.owner[i]]?.frame, view.purposes[i]?.span); };
  view.leave = () => light(null);
  drawTokens(view, frames.flatMap(each => each.blocks), mine);
}

function countLearned(arrays, part) {
  let found = 0;
  for (let i = part.begin; i < part.end; i++) found += arrays.learned[i] !== 0;
  return found;
}

function rowView(row, { tokens, weights, targets, positions, learned }) {
  const owner = new Int32Array(row.slots).fill(-1);
  row.documents.forEach((part, k) => owner.fill(k, part.begin, part.end));
  const purposes = purposesOf(row);
  return {
    owner,
    purposes,
    mark: (made, i) => markPurpose(made, purposes[i], targets[0][i], learned[i]),
    number: i => tokens[i],
    weight: i => learned[i],
    images: imagesOf(row, row.length),
    tell: i => [
      ["slot", `${counted(i)}, position ${counted(positions[i])}`],
      ["id", `${vocabulary.ids[tokens[i]]}${controls.has(tokens[i]) ? ", control token" : ""}`],
      ["document", owner[i] < 0 ? "none" : `${letter(owner[i])} ${row.documents[owner[i]].source}`],
      ...(purposes[i] ? [["role", purposeText(purposes[i])]] : []),
      ["loss", learned[i] === 0 ? "only read" : `${purposes[i]?.own ? "predicts its target" : "trained"}, weight ${learned[i]}`],
      ...targets.map((each, d) => [targets.length > 1 ? `target +${d + 1}` : "target", targetText(each[i], weights[d][i])]),
    ],
  };
}

function rowHead(row, arrays) {
  const padding = row.slots - row.length;
  return element("header", { class: "head" },
    element("div", { class: "line" }, element("h2", {}, row.title), element("span", { class: "spring" }), steppers()),
    element("div", { class: "facts" },
      element("span", {}, `${counted(row.slots)} slots`), element("span", {}, plural(row.documents.length, "document")),
      element("span", {}, `padding ${counted(padding)} (${percent(padding / row.slots)})`),
      ...arrays.targets.map((targets, d) => element("span", {}, `${counted(targets.filter(id => id !== -100).length)} targets`
        + (arrays.targets.length > 1 ? ` at distance ${d + 1}` : ""))),
      row.tasks ? element("span", {}, `tasks: ${tasksText(row.tasks)}`) : null));
}

/** The whole row in one band: one region per document, trained parts filled at the bottom, padding hatched. */
function strip(row, arrays, chosen) {
  const at = slot => `${100 * slot / row.slots}%`;
  const regions = row.documents.map((part, k) => element("button", {
    type: "button", class: "region", "data-hue": partHue(k), style: { left: at(part.begin), width: at(part.end - part.begin) },
    title: `${letter(k)} ${part.source}, ${plural(part.end - part.begin, "slot")}`, onclick: () => chosen(k),
  }, element("span", {}, letter(k)), trainedDrawing(arrays.learned, part.begin, part.end, row.slots)));
  if (row.slots > row.length) {
    regions.push(element("div", { class: "region hatched", title: "padding",
      style: { left: at(row.length), width: at(row.slots - row.length) } }));
  }
  const ticks = [0, 0.25, 0.5, 0.75, 1].map(part => element("span", {}, counted(Math.round(part * row.slots))));
  return element("figure", { class: "band" },
    element("div", { class: "strip", role: "group", "aria-label": "The documents of the row" }, ...regions),
    element("div", { class: "ticks quiet" }, ...ticks));
}

function trainedDrawing(learned, begin, end, slots) {
  const made = drawing("svg", { viewBox: `0 0 ${end - begin} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const least = slots / DRAWN;
  for (let i = begin; i < end;) {
    if (learned[i] === 0) { i++; continue; }
    let stop = i, last = i;
    while (stop < end && stop - last <= least) { if (learned[stop] !== 0) last = stop; stop++; }
    made.append(drawing("rect", { x: i - begin, y: 0, width: last + 1 - i, height: 1 }));
    i = Math.max(stop, last + 1);
  }
  return made;
}

/** Who sees whom: [{ begin, end, see, reach }]. A slot sees its own node up to itself, all of `see` slots at the beginning
    of the node if it is one of them, and the nodes before it that reach it. Without nodes of trees and blocks these are stretches of
    consecutive positions: documents, unless the run says otherwise. */
function attendedNodes(row) {
  if (row.nodes) return row.nodes.map(([begin, end, see, reach]) => ({ begin, end, see, reach }));
  const nodes = [];
  let begin = 0;
  for (let k = 0; k < row.positions.length; k += 2) {
    const end = begin + row.positions[k];
    nodes.push({ begin, end, see: row.documents.find(part => part.begin === begin)?.prefix ?? 0, reach: end });
    begin = end;
  }
  return nodes;
}

/** The slots that slot i sees, as ranges in order: nodes above its own, and its own up to itself or to the end of its prefix. */
function seenBy(nodes, i) {
  const own = nodes.find(({ begin, end }) => begin <= i && i < end);
  if (!own) return null;
  const ranges = [];
  const add = (begin, end) => {
    const last = ranges[ranges.length - 1];
    if (last && last[1] === begin) last[1] = end; else ranges.push([begin, end]);
  };
  for (const { begin, end, reach } of nodes) if (end <= own.begin && own.begin < reach) add(begin, end);
  const within = i < own.begin + own.see;
  add(own.begin, within ? own.begin + own.see : i + 1);
  return { ranges, from: within ? own.begin : i, to: own.reach };
}

const rangeText = (begin, end) => (end - begin === 1 ? counted(begin) : `${counted(begin)}–${counted(end - 1)}`);

/** Attention between slots: each node a triangle, a square for a prefix that sees itself, and below it the nodes that it reaches;
    keys to the right. */
function attentionPicture(row, view) {
  const { slots } = row, nodes = attendedNodes(row), sees = row.documents.filter(part => part.prefix > 1);
  const pairs = nodes.reduce((sum, { begin, end, see, reach }) => sum + (end - begin) * (end - begin + 1) / 2
    + see * Math.max(0, see - 1) / 2 + (end - begin) * (reach - end), 0);
  const causal = slots * (slots + 1) / 2;
  const rays = drawing("path", { class: "ray", d: "" });
  const clean = begin => view.purposes[begin]?.role === "clean";
  const picture = drawing("svg", { viewBox: `0 0 ${slots} ${slots}`, role: "img",
    "aria-label": `Attention: ${plural(nodes.length, "block")}, each slot sees its own block up to itself` },
    drawing("path", { class: "unused", d: `M0 0V${slots}H${slots}Z` }),
    ...nodes.map(({ begin, end, see, reach }) => drawing("path", {
      class: clean(begin) ? "triangle light" : "triangle", "data-hue": partHue(Math.max(0, view.owner[begin])),
      d: `M${begin} ${begin}V${reach}H${end}${reach > end ? `V${end}` : ""}${see > 1 ? `L${begin + see} ${begin + see}V${begin}` : ""}Z` })),
    rays);
  const about = element("p", { class: "quiet" });
  const watch = i => {
    const seen = seenBy(nodes, i);
    rays.setAttribute("d", !seen ? "" : seen.ranges.map(([begin, end]) => `M${begin} ${i + 0.5}H${end === i + 1 ? i + 0.5 : end}`).join("")
      + `M${i + 0.5} ${seen.from === i ? i + 0.5 : seen.from}V${seen.to}`);
    about.textContent = seen ? `slot ${counted(i)} sees slots ${seen.ranges.map(range => rangeText(...range)).join(", ")} and is seen from `
      + `${counted(seen.from)}–${counted(seen.to - 1)}` : `slot ${counted(i)}: padding`;
  };
  const slotAt = event => {
    const box = picture.getBoundingClientRect();
    return Math.max(0, Math.min(slots - 1, Math.floor((event.clientY - box.top) / box.height * slots)));
  };
  picture.addEventListener("pointermove", event => watch(slotAt(event)));
  picture.addEventListener("click", event => focusToken(byId("main").querySelector(`.t[data-i="${slotAt(event)}"]`), "center"));
  view.watch = watch;
  about.textContent = "Point at the picture, or move among the tokens, to see what one slot sees.";
  return element("figure", { class: "attention" }, picture, element("figcaption", {},
    element("h3", {}, "Who sees whom"),
    element("p", {}, attentionText(row, nodes)),
    ...prefixTexts(row, sees),
    element("p", {}, `${counted(pairs)} pairs, ${percent(pairs / causal)} of a causal row without borders.`),
    about));
}

function attentionText(row, nodes) {
  if (nodes.length < row.documents.length) return "Each slot (downwards) attends to all slots before it (to the right), those of other documents too.";
  if (row.nodes) return "Each slot (downwards) attends to the slots (to the right) of its own part of a document, and to the parts above that in the tree.";
  return "Each slot (downwards) attends to the slots (to the right) of its own document, up to itself.";
}

/** A line each for documents whose inputs, whose slots, and whose blocks see each other. */
function prefixTexts(row, sees) {
  const blocks = sees.filter(part => part.stretches?.some(([, name]) => name.startsWith("block ")));
  const copies = blocks.filter(part => part.stretches.some(([, , role]) => role === "clean"));
  const whole = sees.filter(part => part.own && !blocks.includes(part)), inputs = sees.filter(part => !part.own);
  const line = (parts, text) => (parts.length ? [element("p", {}, `In ${plural(parts.length, "document")} ${text}`)] : []);
  return [
    ...line(inputs, "the inputs see each other (the squares)."),
    ...line(whole, "all slots see each other (the squares)."),
    ...line(blocks, copies.length ? "the slots of a block see each other; a noised block (a square) also sees the clean copies (lighter) of the blocks before it."
      : "the slots of a block see each other, and the blocks before theirs."),
  ];
}
