// Tokens as text: one element each, with a card of its numbers under the pointer or at the focus.

const CHUNK = 3000; // tokens drawn at once; the rest of a long document follows in idle moments
const PART = 400; // tokens of a part: long blocks are laid out part by part, when they become visible

let drawingNow = 0; // number of the current drawing; older ones stop

/**
 * Draw tokens in blocks.
 *   view: { number(i), weight(i), images, changed(i), hit(i), mark(token, i), tell(i), watch(i), leave() }
 *   blocks: [{ begin, end, into: element }]
 */
function drawTokens(view, blocks, mine) {
  const parts = blocks.flatMap(block => partsOf(view, block));
  let next = 0;
  const step = () => {
    if (mine !== drawingNow) return;
    for (let left = CHUNK; left > 0 && next < parts.length; next++) {
      const { begin, end, into, first } = parts[next];
      const made = document.createDocumentFragment();
      for (let i = begin; i < end; i++) if (!view.images.inside[i]) made.append(tokenElement(view, i, i === first));
      into.append(made);
      left -= end - begin;
    }
    if (next < parts.length) setTimeout(step);
  };
  step();
  const first = parts.length && parts[0].into.querySelector(".t");
  if (first) first.tabIndex = 0; // the tab key goes here
}

/** A block in parts that end where a line ends; a short block is one part. */
function partsOf(view, { begin, end, into }) {
  if (end - begin <= 2 * PART) return [{ begin, end, into, first: begin }];
  const parts = [];
  for (let at = begin, stop = begin; at < end; at = stop) {
    while (stop < end && (stop - at < PART || !textOf(view.number(stop - 1)).endsWith("\n")) && stop - at < 5 * PART) stop++;
    const part = element("div", { class: "part" });
    into.append(part);
    parts.push({ begin: at, end: stop, into: part, first: begin });
  }
  return parts;
}

function tokenElement(view, i, first) {
  const number = view.number(i), weight = view.weight(i);
  const made = element("span", { class: "t", tabindex: "-1", "data-i": i });
  const names = made.classList;
  if (controls.has(number)) names.add("control");
  if (weight !== 0) {
    names.add("trained");
    if (weight !== 1) {
      names.add("weighted");
      if (first || view.weight(i - 1) !== weight) made.dataset.weight = `×${weight}`;
    }
  }
  if (view.changed && view.changed(i)) names.add("changed");
  if (view.hit && view.hit(i)) names.add("hit");
  if (view.mark) view.mark(made, i);
  made.view = view;
  const image = view.images.begins.get(i);
  if (image) {
    names.add("image");
    if (image.picture) made.append(element("img", { src: image.picture, alt: "" }));
  }
  fill(made, textOf(number));
  return made;
}

/** Line ends and tabs get marks that copying leaves out. */
function fill(made, text) {
  if (text === "") { made.append(element("i", { class: "mark nothing" })); return; }
  if (!/[\n\t⏎]/.test(text)) { made.append(text); return; }
  for (const part of text.split(/([\n\t⏎])/)) {
    if (part === "\n") made.append(element("i", { class: "mark end" }), "\n");
    else if (part === "\t") made.append(element("i", { class: "mark tab" }), "\t");
    else if (part === "⏎") made.append("⏎", element("br"));
    else if (part) made.append(part);
  }
}

// -- the card -----------------------------------------------------------------------------------------------------

const card = byId("card");
let carded = null;

function showCard(token, speak) {
  carded = token;
  const view = token.view, i = Number(token.dataset.i), number = view.number(i);
  const list = element("dl");
  for (const [name, ...values] of view.tell(i)) {
    list.append(element("dt", {}, name), element("dd", {}, ...values));
  }
  card.replaceChildren(element("div", { class: "said" }, shown(textOf(number))), list);
  card.hidden = false;
  place(token);
  if (view.watch) view.watch(i);
  if (speak) byId("spoken").textContent = `${shown(textOf(number))}: ` + view.tell(i).map(pair =>
    pair.map(part => (typeof part === "string" ? part : part.textContent)).join(" ")).join(", ");
}

/** Below the token's last line, or above where there is no room. */
function place(token) {
  const boxes = token.getClientRects();
  if (!boxes.length) return;
  const box = boxes[boxes.length - 1];
  const width = card.offsetWidth, height = card.offsetHeight;
  const below = box.bottom + 8 + height < innerHeight;
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  card.style.top = `${below ? box.bottom + 8 : Math.max(8, boxes[0].top - height - 8)}px`;
}

function hideCard() {
  if (carded?.view.leave) carded.view.leave();
  card.hidden = true;
  carded = null;
}

const shown = text => (text === "" ? "(part of a character)" : text.replace(/\n/g, "⏎").replace(/\t/g, "→").replace(/ /g, "␣"));

/** Text of a target on the card. */
function targetText(id, weight) {
  if (id === -100) return element("span", { class: "quiet" }, "none");
  const text = spelled(id);
  return element("span", {}, element("b", {}, shown(text)), ` id ${id}, weight ${weight}`);
}

// -- moving by keyboard -------------------------------------------------------------------------------------------

function tokenOf(node) { return node instanceof Element ? node.closest(".t") : null; }

function focusToken(token, block = "nearest") {
  if (!token) return;
  token.scrollIntoView({ block, inline: "nearest" });
  for (const old of document.querySelectorAll('.t[tabindex="0"]')) old.tabIndex = -1;
  token.tabIndex = 0;
  token.focus({ preventScroll: true });
}

/** The tokens drawn with this one, in their order. */
const tokensBeside = token => [...token.closest("[data-flow]").querySelectorAll(".t")]
  .filter(each => each.view === token.view);

function moveToken(token, key) {
  const all = tokensBeside(token), here = all.indexOf(token);
  if (key === "ArrowRight") focusToken(all[here + 1]);
  else if (key === "ArrowLeft") focusToken(all[here - 1]);
  else if (key === "Home") focusToken(all[0]);
  else if (key === "End") focusToken(all[all.length - 1]);
  else focusToken(onNextLine(all, here, key === "ArrowDown" ? 1 : -1));
}

/** The token of the next line with the nearest middle. */
function onNextLine(all, here, way) {
  const from = all[here].getBoundingClientRect(), middle = (from.left + from.right) / 2;
  let best = null, least = Infinity, line = null;
  for (let i = here + way; i >= 0 && i < all.length; i += way) {
    const box = all[i].getClientRects()[0];
    if (!box || Math.abs(box.top - from.top) < from.height / 2) continue;
    if (line === null) line = box.top;
    if (Math.abs(box.top - line) > box.height) break;
    const far = Math.abs((box.left + box.right) / 2 - middle);
    if (far < least) { least = far; best = all[i]; }
  }
  return best;
}

/** Go to the next (way 1) or previous (−1) matching token, from the focus. */
function jump(selector, way) {
  const all = [...byId("main").querySelectorAll(".t")];
  const active = tokenOf(document.activeElement);
  const starts = i => all[i].matches(selector) && !(i > 0 && all[i - 1].matches(selector));
  let i = active ? all.indexOf(active) + way : way > 0 ? 0 : all.length - 1;
  while (i >= 0 && i < all.length && !starts(i)) i += way;
  focusToken(all[i], "center");
}
