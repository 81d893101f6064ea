// The frame: tabs, the list, keys, theme, help, and the place in the address.

const tabs = { documents: documentsTab, rows: rowsTab, figures: overview };
const open = Object.keys(tabs).filter(name => name === "figures" || tabs[name].parts.length);
const places = Object.fromEntries(open.map(name => [name, 0]));
// A comparison opens at the first document that differs.
if (comparing) places.documents = Math.max(0, page.changed.findIndex(count => count !== 0));
let current = open[0], listed = [];

function steppers() {
  return element("span", { class: "steppers" },
    button("‹", { "aria-label": "The one before (k)", title: "The one before (k)", onclick: () => move(-1) }),
    element("span", { class: "quiet" }, `${counted(listed.indexOf(places[current]) + 1)} / ${counted(listed.length)}`),
    button("›", { "aria-label": "Next (j)", title: "Next (j)", onclick: () => move(1) }));
}

/** In a narrow window the list covers the text while it is open; a wide one shows both. */
function openList(now) {
  document.body.classList.toggle("listing", now);
  byId("open-list").setAttribute("aria-expanded", String(now));
  if (now) byId(`item-${places[current]}`)?.scrollIntoView({ block: "center" });
}

function openTab(name) {
  if (!open.includes(name)) return;
  openList(false);
  current = name;
  for (const each of byId("tabs").children) each.setAttribute("aria-current", each.dataset.tab === name ? "page" : "false");
  document.body.dataset.tab = name;
  const tools = tabs[name].tools;
  byId("tools").replaceChildren(...(tools ? tools(() => { fillList(); redraw(); }) : []).filter(Boolean));
  fillList();
  show(places[name]);
}

function fillList() {
  const tab = tabs[current];
  listed = tab.parts.map((_, i) => i).filter(i => tab.matches(tab.parts[i], i));
  if (tab.order) listed.sort((a, b) => tab.order(tab.parts[a], tab.parts[b]));
  byId("list").replaceChildren(...listed.map(i => element("li", { role: "option", id: `item-${i}`, "data-i": i, tabindex: "-1",
    "aria-selected": "false" }, ...tab.item(tab.parts[i], i))));
  const count = byId("count");
  if (count) count.textContent = listed.length === tab.parts.length ? plural(listed.length, current.slice(0, -1))
    : `${counted(listed.length)} of ${counted(tab.parts.length)}`;
  if (listed.length && !listed.includes(places[current])) places[current] = listed[0];
  markItem();
}

function markItem() {
  for (const item of byId("list").children) {
    const here = Number(item.dataset.i) === places[current];
    item.setAttribute("aria-selected", String(here));
    item.tabIndex = here ? 0 : -1;
    if (here) item.scrollIntoView({ block: "nearest" });
  }
}

function redraw() {
  hideCard();
  drawingNow++;
  if (current !== "figures" && !listed.length) {
    byId("main").replaceChildren(element("p", { class: "empty" }, "Nothing matches. Take a filter back, or search for something else."));
    return;
  }
  tabs[current].show(places[current], drawingNow);
}

function show(i) {
  places[current] = i;
  markItem();
  redraw();
  byId("main").scrollTop = 0;
  scrollTo(0, 0); // a narrow window scrolls as a whole
  const place = current === "figures" ? "#figures" : `#${current}-${i + 1}`;
  history.replaceState(null, "", place);
}

/** Go to the next or previous listed item. */
function move(way) {
  const here = listed.indexOf(places[current]), next = listed[here + way];
  if (next === undefined) return;
  const inList = byId("list").contains(document.activeElement);
  show(next);
  if (inList) byId(`item-${next}`).focus();
}

// -- the place in the address: #documents-12 ----------------------------------------------------------------------

function fromAddress() {
  const [, name, number] = /^#([a-z]+)(?:-(\d+))?$/.exec(location.hash) || [];
  const tab = open.includes(name) ? name : current;
  if (number && tab === name) places[tab] = Math.max(0, Math.min(tabs[tab].parts.length - 1, Number(number) - 1));
  openTab(tab);
}

// -- theme --------------------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function useTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" }[name];
  byId("theme").dataset.theme = name;
  try { localStorage.setItem("penstock-theme", name); } catch { /* some browsers keep nothing for files */ }
}

function keptTheme() {
  try { return THEMES.find(name => name === localStorage.getItem("penstock-theme")) || "system"; } catch { return "system"; }
}

const nextTheme = () => useTheme(THEMES[(THEMES.indexOf(byId("theme").dataset.theme) + 1) % 3]);

// -- keys ---------------------------------------------------------------------------------------------------------

const KEYS = [
  ["j  k", "next, the one before"], ["← →", "the same; among tokens: token by token"], ["↑ ↓", "in the list; among tokens: line by line"],
  ["Enter", "from the list into the text"], ["n  N", "next, last: hit, difference, or trained stretch"], ["/", "search"],
  ["Esc", "close, or leave the text for the list"], ["1 2 3", "documents, rows, figures"], ["c", "first settings, second, side by side"],
  ["b", "token edges"], ["d", "light, dark, as the system"], ["?", "this"],
];

const actions = {
  j: () => move(1), k: () => move(-1), ArrowRight: () => move(1), ArrowLeft: () => move(-1),
  "/": () => byId("search")?.focus(), "?": () => byId("manual").showModal(),
  n: () => jump(marked(), 1), N: () => jump(marked(), -1), b: () => byId("edges").click(), d: nextTheme,
  1: () => openTab("documents"), 2: () => openTab("rows"), 3: () => openTab("figures"),
  c: () => {
    if (!comparing || current !== "documents") return;
    choice.sides = { 0: "1", 1: "both", both: "0" }[choice.sides];
    redraw();
  },
};

const marked = () => [".hit", ".changed", ".trained"].find(name => byId("main").querySelector(`.t${name}`)) || ".trained";

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("manual").open) return;
  const { target, key } = event, token = tokenOf(target);
  if (key === "Escape") return leave(target, token);
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) return;
  const item = target.closest?.("#list li");
  let act = actions[key];
  if (token && /^(Arrow|Home$|End$)/.test(key)) act = () => moveToken(token, key);
  else if (item && key === "ArrowDown") act = actions.j;
  else if (item && key === "ArrowUp") act = actions.k;
  else if (item && (key === "Enter" || key === " ")) act = () => { openList(false); focusToken(byId("main").querySelector(".t")); };
  if (!act) return;
  event.preventDefault();
  act();
}

function leave(target, token) {
  if (token) { hideCard(); byId(`item-${places[current]}`)?.focus(); }
  else if (target.id === "search") { target.value = ""; target.dispatchEvent(new Event("input")); target.blur(); byId("main").focus(); }
  else { openList(false); hideCard(); }
}

// -- start --------------------------------------------------------------------------------------------------------

/** Whether some slot of some row has one of these roles. */
const hasRole = roles => page.rows.some(row => row.documents.some(each => each.stretches?.some(([, , role]) => roles.has(role))));

function manual() {
  const sample = (kind, text, weight) => element("span", { class: `t ${kind}`, "data-weight": weight }, text);
  return [element("h2", { id: "manual-title" }, "Keys and marks"),
    element("dl", { class: "marks" },
      element("dt", { "data-hue": 0 }, sample("trained", "trained")), element("dd", {}, "a target: underlined, tinted"),
      element("dt", { "data-hue": 0 }, sample("", "only read")), element("dd", {}, "context, never a target"),
      element("dt", { "data-hue": 0 }, sample("trained weighted", "weighted", "×0.5")), element("dd", {}, "trained with that weight: dashes"),
      element("dt", { "data-hue": 0 }, sample("control", "<|end|>")), element("dd", {}, "a control token, one id; text that only looks like one is no chip"),
      element("dt", { "data-hue": 0 }, sample("changed", "changed")), element("dd", {}, "differs between the two settings: a line above"),
      element("dt", { "data-hue": 0 }, sample("hit", "found")), element("dd", {}, "what was searched for"),
      ...(hasRole(STANDING) ? [
        element("dt", { "data-hue": 0 }, element("span", { class: "t control trained masked", "data-word": "word" })),
        element("dd", {}, "a mask, and the word that it stands for, which is its target"),
      ] : []),
      ...(hasRole(new Set(["sentinel"])) ? [
        element("dt", {}, element("span", { class: "t control sentinel", "data-span": 3, "data-hue": 3 })),
        element("dd", {}, "a sentinel, by the number of its span: in its place, and before its words"),
      ] : [])),
    element("dl", { class: "keys" }, ...KEYS.flatMap(([keys, what]) =>
      [element("dt", {}, ...keys.split(" ").filter(Boolean).map(key => element("kbd", {}, key))), element("dd", {}, what)])),
    element("form", { method: "dialog" }, element("button", {}, "Close"))];
}

function start() {
  byId("title").textContent = page.title;
  byId("tabs").append(...open.map(name => button(tabs[name].name, { "data-tab": name, onclick: () => openTab(name) })));
  byId("manual").append(...manual());
  byId("help").onclick = actions["?"];
  byId("theme").onclick = nextTheme;
  byId("open-list").onclick = () => openList(!document.body.classList.contains("listing"));
  byId("edges").onclick = event => {
    const now = document.body.classList.toggle("edged");
    event.currentTarget.setAttribute("aria-pressed", String(now));
  };
  byId("list").onclick = event => {
    const item = event.target.closest("li");
    if (item) { openList(false); show(Number(item.dataset.i)); byId(`item-${item.dataset.i}`).focus(); }
  };
  const main = byId("main");
  main.addEventListener("pointerover", event => { const token = tokenOf(event.target); if (token) showCard(token, false); });
  main.addEventListener("pointerout", event => { if (tokenOf(event.target) && !tokenOf(event.relatedTarget)) hideCard(); });
  main.addEventListener("pointerdown", event => { const token = tokenOf(event.target); if (token) focusToken(token); });
  main.addEventListener("focusin", event => { const token = tokenOf(event.target); if (token) showCard(token, true); else hideCard(); });
  main.addEventListener("focusout", hideCard);
  main.addEventListener("scroll", () => { if (carded) place(carded); }, { passive: true });
  addEventListener("resize", () => { if (carded) place(carded); });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", fromAddress);
  useTheme(keptTheme());
  fromAddress();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start();
