// Documents: the list with its filters, and one document as text, alone or next to its version under other settings.

const LITTLE = 0.05; // trained share below which a document is suspicious
const NOTES = 4; // notes of a document that are shown; the others are folded
const SHORT = 3; // tokens of the template between two turns that need no block of their own

const ours = page.sides[0].documents;
const comparing = page.sides.length > 1;
const noteKinds = [...new Set(ours.flatMap(each => each.notes.map(note => note[0])))];
const filters = [
  ["any note", each => each.notes.length > 0],
  ["not proven", each => each.ok === false],
  ["nothing trained", each => each.trained === 0],
  [`under ${100 * LITTLE} % trained`, each => each.trained > 0 && each.trained < LITTLE * each.length],
  ["everything trained", each => each.length > 1 && each.trained >= each.length - 1],
  ["differs", (each, i) => comparing && page.changed[i] !== 0],
  ...noteKinds.map(kind => [kind, each => each.notes.some(note => note[0] === kind)]),
].map(([name, test]) => ({ name, count: ours.filter(test).length, test })).filter(({ count }) => count > 0);

const choice = { filters: new Set(), role: null, query: "", order: 0, sides: comparing ? "both" : "0" };

const shareOf = each => (each.length ? each.trained / each.length : 0);
const orders = [
  ["in order", null],
  ["least trained first", (a, b) => shareOf(a) - shareOf(b)],
  ["most trained first", (a, b) => shareOf(b) - shareOf(a)],
  ["longest first", (a, b) => b.length - a.length],
  ["most notes first", (a, b) => b.notes.length - a.notes.length],
];

const documentsTab = {
  name: "Documents",
  parts: ours,
  matches(each, i) {
    if (choice.filters.size && ![...choice.filters].some(filter => filter.test(each, i))) return false;
    if (choice.role !== null && !each.roles.some((role, k) => k % 2 && role === choice.role)) return false;
    if (!choice.query) return true;
    const head = `${each.title}\n${each.origin}`.toLowerCase();
    return head.includes(choice.query) || page.sides.some(side => searchText(side.documents[i]).includes(choice.query));
  },
  get order() { return orders[choice.order][1]; },
  tools: documentTools,
  item: documentItem,
  show: showDocument,
};

function documentTools(changed) {
  let waiting;
  const search = element("input", {
    type: "search", id: "search", placeholder: "Search the text  ( / )", "aria-label": "Search the text",
    autocomplete: "off", spellcheck: "false",
    oninput: event => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { choice.query = event.target.value.toLowerCase(); changed(); }, 120);
    },
  });
  const chips = filters.map(filter => toggle(filter.name, filter.count, pressed => {
    choice.filters[pressed ? "add" : "delete"](filter);
    changed();
  }));
  const roles = page.roles.map((name, role) => [name, role]).filter(([, role]) =>
    ours.some(each => each.roles.some((found, k) => k % 2 && found === role)));
  const select = element("select", {
    "aria-label": "Only with this role",
    onchange: event => { choice.role = event.target.value === "" ? null : Number(event.target.value); changed(); },
  }, element("option", { value: "" }, "any role"),
  ...roles.map(([name, role]) => element("option", { value: String(role) }, `with ${name}`)));
  const order = element("select", { "aria-label": "Order", onchange: event => { choice.order = Number(event.target.value); changed(); } },
    ...orders.map(([name], k) => element("option", { value: String(k) }, name)));
  return [search, chips.length ? element("div", { class: "chips", role: "group", "aria-label": "Filters" }, ...chips) : null,
          element("div", { class: "line choices" }, roles.length > 1 ? select : null, order),
          element("div", { id: "count", class: "quiet", role: "status" })];
}

function toggle(name, count, pressed) {
  const made = button(name, {
    class: "chip", "aria-pressed": "false",
    onclick: () => {
      const now = made.getAttribute("aria-pressed") !== "true";
      made.setAttribute("aria-pressed", String(now));
      pressed(now);
    },
  });
  made.append(element("b", {}, counted(count)));
  return made;
}

function documentItem(each, i) {
  const share = shareOf(each);
  const marks = [...new Set(each.notes.map(note => note[0]))];
  const differs = comparing && page.changed[i] !== 0;
  return [
    element("div", { class: "name" }, verdictMark(each), element("span", { dir: "auto" }, each.words || each.title || each.origin)),
    element("div", { class: "line quiet" }, meter(share), element("span", {}, `${percent(share)} of ${counted(each.length)}`),
      each.words ? element("span", { class: "which" }, each.title || each.origin) : null,
      differs ? element("span", { class: "note other" }, page.changed[i] < 0 ? "≠ text" : `≠ ${counted(page.changed[i])}`) : null,
      ...marks.slice(0, 2).map(kind => element("span", { class: "note" }, kind)),
      marks.length > 2 ? element("span", { class: "note" }, `+${marks.length - 2}`) : null),
  ];
}

function verdictMark(each) {
  if (each.ok === null) return null;
  return element("span", { class: each.ok ? "good" : "bad", title: each.ok ? "the mask is proven" : "the mask is not proven" },
    each.ok ? "✓" : "✗");
}

const meter = share => element("span", { class: "meter", "aria-hidden": "true" },
  element("span", { style: { width: `${share > 0 ? Math.max(3, 100 * share) : 0}%` } }));

// -- one document -------------------------------------------------------------------------------------------------

const branchText = ([begin, end, at, parent, label]) =>
  `${plural(end - begin, "token")}${parent < 0 ? "" : ` from position ${counted(at)} of branch ${parent}`}: ${label || "no path ends here"}`;

/** The branches of a prefix tree: a bar for each, where it stands in its paths, joined to the branch that it forks from.
 *  Of trajectories, in the colours of the kinds of its tokens. */
function treeOf(branches, trajectory) {
  const WIDTH = 1000, LINE = 22, longest = Math.max(...branches.map(([begin, end, at]) => at + end - begin));
  const x = position => (WIDTH * position) / longest;
  const parts = branches.map(([begin, end, at, parent, label], number) => {
    const title = branchText([begin, end, at, parent, label]);
    const bar = (from, to, hue) => drawing("rect", { x: x(at + from - begin), y: LINE * number + 3, width: Math.max(3, x(to - from)),
      height: 12, ...(hue === undefined ? { rx: 2 } : { "data-hue": hue }) }, drawing("title", {}, title));
    const bars = trajectory ? kindRuns(trajectory, begin, end).map(([from, to, kind]) => bar(from, to, KIND_HUES[kind])) : [bar(begin, end)];
    const fork = parent < 0 ? [] : [drawing("path", { d: `M ${x(at) + 1} ${LINE * parent + 15} V ${LINE * number + 9}` })];
    return drawing("g", { "data-hue": trajectory ? "none" : number % HUES }, ...fork, ...bars);
  });
  return element("figure", { class: "tree" }, drawing("svg", {
    viewBox: `0 0 ${WIDTH} ${LINE * branches.length}`, role: "img", "aria-label": `a prefix tree of ${branches.length} branches`,
  }, ...parts));
}

function showDocument(i, mine) {
  const sides = page.sides.map(side => side.documents[i]);
  const difference = comparing ? differenceOf(...sides) : null;
  const wanted = choice.sides === "both" ? sides.map((_, k) => k) : [Number(choice.sides)];
  const flow = element("div", { class: wanted.length > 1 ? "flow pair" : "flow", "data-flow": "" });
  const drawn = wanted.map(side => blocksOf(sides[side], viewOf(sides[side], side, difference, sides),
    wanted.length > 1 ? page.sides[side].title : null));
  const most = Math.max(...drawn.map(({ blocks }) => blocks.length));
  for (let k = 0; k < most; k++) {
    for (const { blocks } of drawn) flow.append(blocks[k] ? blocks[k].frame ?? "" : element("div", { class: "block gap" }));
  }
  byId("main").replaceChildren(
    documentHead(sides, i, wanted),
    ...(sides[wanted[0]].branches ? [treeOf(sides[wanted[0]].branches, sides[wanted[0]].trajectory)] : []),
    ...(wanted.length > 1 ? [element("div", { class: "pair titles" }, ...wanted.map(sideTitle))] : []),
    sides[wanted[0]].length ? flow : element("p", { class: "empty" }, "This document has no tokens."));
  for (const { view, blocks } of drawn) drawTokens(view, blocks, mine);
}

function viewOf(each, side, difference, sides) {
  const { tokens, weights, roles, reasons } = arraysOf(each);
  const marks = difference && [difference.marks.a, difference.marks.b][side];
  const pairs = difference && [difference.pairs.a, difference.pairs.b][side];
  const hits = choice.query ? hitsOf(each) : null;
  const view = {
    number: i => tokens[i],
    weight: i => weights[i],
    images: imagesOf(each, each.length),
    changed: marks && (i => marks[i] !== 0),
    hit: hits && (i => hits[i] === 1),
    tell(i) {
      const next = i + 1 < each.length && weights[i + 1] !== 0;
      const lines = [
        ["position", `${counted(i)} of ${counted(each.length)}`],
        ["id", `${vocabulary.ids[tokens[i]]}${controls.has(tokens[i]) ? ", control token" : ""}`],
        ["role", roleName(roles[i])],
        ["loss", weights[i] !== 0 ? `trained, weight ${weights[i]}` : reasons[i] ? `only read: ${page.reasons[reasons[i]]}` : "only read"],
        ["target", targetText(next ? vocabulary.ids[tokens[i + 1]] : -100, weights[i + 1])],
      ];
      if (!page.roles.length) lines.splice(2, 1);
      if (marks && marks[i]) lines.push([page.sides[1 - side].title, otherwise(marks[i], pairs[i], sides[1 - side])]);
      return lines;
    },
  };
  return each.trajectory ? trajectoryView(each, view) : view;
}

function otherwise(mark, pair, other) {
  if (mark === 2) return "not there";
  const weight = arraysOf(other).weights[pair];
  return weight === 0 ? "only read" : `trained, weight ${weight}`;
}

/** One block for each stretch of one role, or for each branch of a prefix tree. */
function blocksOf(each, view, side) {
  const blocks = [];
  if (each.trajectory) return { view, blocks: trajectoryBlocks(each) };
  if (each.branches) {
    for (const [number, branch] of each.branches.entries()) {
      const into = element("div", { class: "text" });
      const head = element("div", { class: "role" }, branchText(branch));
      blocks.push({ begin: branch[0], end: branch[1], into, frame: element("div", { class: "block", "data-hue": number % HUES }, head, into) });
    }
    return { view, blocks };
  }
  const spoken = each.roles.some((role, k) => k % 2 && role >= 0);
  let begin = 0;
  for (let k = 0; k < each.roles.length; k += 2) {
    const end = begin + each.roles[k], role = each.roles[k + 1];
    const into = element("div", { class: "text" });
    const head = spoken || side ? element("div", { class: "role" }, spoken ? roleName(role) : "",
      side ? element("span", { class: "side quiet" }, spoken ? ` · ${side}` : side) : null) : null;
    const kind = role < 0 && spoken && end - begin <= SHORT ? "block between" : "block";
    blocks.push({ begin, end, into, frame: element("div", { class: kind, "data-hue": spoken ? roleHue(role) : 0 }, head, into) });
    begin = end;
  }
  return { view, blocks };
}

/** 1 for each token that a hit of the search touches. */
function hitsOf(each) {
  const { tokens } = arraysOf(each), text = searchText(each), found = new Uint8Array(each.length);
  let i = 0, end = each.length ? lowerOf(tokens[0]).length : 0;
  for (let at = text.indexOf(choice.query); at >= 0; at = text.indexOf(choice.query, at + choice.query.length)) {
    while (end <= at) end += lowerOf(tokens[++i]).length;
    found[i] = 1;
    while (end < at + choice.query.length) { end += lowerOf(tokens[++i]).length; found[i] = 1; }
  }
  return found;
}

function documentHead(sides, i, wanted) {
  const each = sides[wanted[0]], share = shareOf(each);
  const facts = element("div", { class: "facts" },
    each.ok === null ? null : element("span", { class: `verdict ${each.ok ? "good" : "bad"}` }, each.ok ? "✓ proven" : "✗ not proven"),
    each.checks.length ? element("span", { class: "quiet" }, each.checks.join(", ")) : null,
    element("span", {}, plural(each.length, "token")),
    wanted.length > 1 ? null : element("span", { class: "line" }, meter(share), `${percent(share)} trained (${counted(each.trained)})`),
    comparing ? element("span", { class: "note other" }, changedText(page.changed[i])) : null);
  const switches = !comparing ? null : element("div", { class: "switch", role: "group", "aria-label": "Settings shown" },
    ...[["0", page.sides[0].title], ["1", page.sides[1].title], ["both", "side by side"]].map(([value, label]) =>
      button(label, { "aria-pressed": String(choice.sides === value), onclick: () => { choice.sides = value; redraw(); } })));
  return element("header", { class: "head" },
    element("div", { class: "line" }, element("h2", {}, each.title || each.origin), element("span", { class: "spring" }), steppers()),
    element("div", { class: "quiet origin" }, each.origin), facts, each.trajectory ? kindLegend(each.trajectory) : null, comparing ? null : settingsLine(page.sides[0]), switches,
    ...notesOf(wanted.flatMap(side => sides[side].notes.map(([kind, message]) =>
      [wanted.length > 1 ? `${page.sides[side].title}: ${kind}` : kind, message]))));
}

/** The first notes; the others folded. */
function notesOf(notes) {
  const lines = notes.map(([kind, message]) => element("p", { class: "problem" },
    element("span", { class: "note" }, kind), " ", message));
  if (lines.length <= NOTES) return lines;
  return [...lines.slice(0, NOTES), element("details", {}, element("summary", {}, plural(lines.length - NOTES, "more note")),
    ...lines.slice(NOTES))];
}

function settingsLine({ settings }) {
  if (!settings.length) return null;
  return element("details", { class: "quiet" }, element("summary", {}, "Settings"),
    element("p", {}, ...settings.map(([name, value]) => element("span", { class: "setting" }, `${name} = ${value}`))));
}

function changedText(changed) {
  if (changed < 0) return "≠ the texts differ";
  return changed ? `≠ ${plural(changed, "weight")} differ${changed === 1 ? "s" : ""}` : "= the same under both";
}

function sideTitle(side) {
  const other = page.sides[1 - side].settings, here = page.sides[side];
  const unlike = here.settings.filter(([name, value]) =>
    here.title !== `${name}=${value}` && !other.some(([n, v]) => n === name && v === value));
  return element("div", {}, element("b", {}, here.title), " ",
    ...unlike.map(([name, value]) => element("span", { class: "setting" }, `${name} = ${value}`)));
}
