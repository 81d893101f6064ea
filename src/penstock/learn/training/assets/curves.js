"use strict";
// Draws what curve_page.py draws, for this window, and answers: smoothing, axes, runs, and a crosshair over all panels.

const page = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const HEIGHT = 260, LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 28, DOTS = 40, DECADES = 3, COLOURS = 8;
const names = new Map(page.runs);
const SHARES = [...new Set([0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, page.smoothing])].sort((a, b) => a - b);
const view = { smoothing: page.smoothing, logX: page.logX, logY: page.logY, hidden: new Set(), at: null };

for (const curve of page.panels.flatMap(panel => panel.curves)) {
  curve.low ??= curve.mean;
  curve.high ??= curve.mean;
  curve.count ??= curve.x.map(() => 1);
  curve.breaks ??= [];
  curve.lost ??= [];
}

// -- numbers ----------------------------------------------------------------------------------------------------------

/** The exponential average without the bias of a first value; weights follow the distance on the axis. */
function smoothed(curve, half, isLog) {
  if (!(half > 0)) return curve.mean;
  let total = 0, weight = 0, before = null;
  return curve.x.map((x, i) => {
    if (isLog && x <= 0) return curve.mean[i];
    const place = isLog ? Math.log10(x) : x, kept = before === null ? 1 : 0.5 ** ((place - before) / half);
    total = total * kept + curve.count[i] * curve.mean[i];
    weight = weight * kept + curve.count[i];
    before = place;
    return total / weight;
  });
}

/** What the horizontal axis covers: the same in all panels, for the visible runs. */
const placesOfAll = hidden => page.panels.flatMap(panel =>
  panel.curves.filter(curve => !hidden.has(curve.run)).flatMap(curve => curve.x));

function halfLife(panel, asked) {
  let xs = placesOfAll(new Set());
  if (asked.logX && xs.some(x => x > 0)) xs = xs.filter(x => x > 0).map(Math.log10);
  return panel.isSmoothed ? asked.smoothing * (most(xs) - least(xs)) : 0;
}

function niceTicks(low, high, about) {
  const raw = (high - low) / about;
  if (!(raw > 2.2250738585072014e-308)) return [low];
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 2.5, 5, 10].find(factor => size * factor >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9), found = [];
  for (let number = first; number <= last; number++) found.push(number * step);
  return found.length ? found : [low];
}

function logTicks(low, high, about) {
  const factors = high / low < 10 ** DECADES ? [1, 2, 5] : [1], inside = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const factor of factors) {
      const tick = factor * Number(`1e${power}`);
      if (low <= tick && tick <= high) inside.push(tick);
    }
  if (inside.length < 2) {
    const found = niceTicks(low, high, about).filter(tick => tick > 0);
    return found.length ? found : [low];
  }
  const every = Math.ceil(inside.length / (about + 2));
  return inside.filter((_, i) => i % every === 0);
}

function short(value) {
  for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return String(Number((value / size).toPrecision(4))) + suffix;
  return value === 0 ? "0" : String(Number(value.toPrecision(4))).replace(/e([+-])(\d)$/, "e$10$2");
}

const exact = value => value.toLocaleString("en", { maximumFractionDigits: 6 });

function scale(low, high, begin, end, isLog) {
  const of = isLog ? Math.log10 : value => value, from = of(low), span = of(high) - from || 1;
  const to = value => Math.round((begin + (of(value) - from) / span * (end - begin)) * 10) / 10;
  to.inverse = place => { const found = from + (place - begin) / (end - begin) * span; return isLog ? 10 ** found : found; };
  return to;
}

// Spreading an array of all points into Math.min would overflow the stack.
const least = values => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = values => values.reduce((a, b) => Math.max(a, b), -Infinity);

/** The axes of a panel for its visible curves. */
function axesOf(curves, width, asked) {
  const xs = placesOfAll(asked.hidden), above = xs.filter(x => x > 0), logX = asked.logX && above.length > 0;
  const left = least(logX ? above : xs), right = most(xs), about = Math.max(2, Math.min(6, Math.floor(width / 75)));
  const means = curves.flatMap(curve => [...curve.low, ...curve.mean]).filter(y => y > 0);
  const logY = asked.logY && means.length > 0;
  const low = logY ? least(means) : least(curves.flatMap(curve => curve.low)), high = most(curves.flatMap(curve => curve.high));
  const ys = logY ? logTicks(low, high, 5) : niceTicks(low, high, 5);
  return {
    logX, logY, ys, xs: logX ? logTicks(left, right, about) : niceTicks(left, right, about),
    across: scale(left, right, LEFT, width - RIGHT, logX),
    down: scale(Math.min(low, ys[0]), Math.max(high, ys.at(-1)), HEIGHT - BOTTOM, TOP, logY),
  };
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function drawing(name, values, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function element(name, values, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

const styleOf = run => `c${run % COLOURS} d${Math.floor(run / COLOURS) % 3}`;

/** Bins of each line without an interruption, in parts that the axes can show. */
function partsOf(curve, axes) {
  const parts = [[]], breaks = new Set(curve.breaks);
  for (let i = 0; i < curve.x.length; i++) {
    if (breaks.has(i)) parts.push([]);
    if ((axes.logX && curve.x[i] <= 0) || (axes.logY && curve.mean[i] <= 0)) parts.push([]);
    else parts.at(-1).push(i);
  }
  return parts.filter(part => part.length);
}

function drawCurve(curve, half, { across, down, logX, logY }) {
  const line = smoothed(curve, half, logX), group = drawing("g", { class: styleOf(curve.run) });
  for (const part of partsOf(curve, { logX, logY })) {
    const points = ys => part.map(i => `${across(curve.x[i])},${down(ys(i))}`);
    const lowest = logY ? least(part.map(i => curve.low[i]).filter(y => y > 0)) : null;
    const lower = i => (!logY || curve.low[i] > 0 ? curve.low[i] : Math.min(lowest, curve.mean[i]));
    group.append(drawing("polygon", { class: "range", points: [...points(i => curve.high[i]), ...points(lower).reverse()].join(" ") }));
    if (half > 0) group.append(drawing("polyline", { class: "raw", points: points(i => curve.mean[i]).join(" ") }));
    group.append(drawing("polyline", { class: "line", points: points(i => line[i]).join(" ") }));
    if (curve.x.length <= DOTS || part.length === 1)
      for (const i of part) group.append(drawing("circle", { cx: across(curve.x[i]), cy: down(curve.mean[i]), r: 2.2 }));
  }
  for (const x of curve.lost.filter(x => x > 0 || !logX))
    group.append(drawing("path", { class: "lost", d: `M${across(x) - 3} ${HEIGHT - BOTTOM - 8}l6 6m0 -6l-6 6` }));
  return group;
}

/** A panel as a drawing of some width. */
function drawPanel(panel, asked, width) {
  const curves = panel.curves.filter(curve => !asked.hidden.has(curve.run));
  const picture = drawing("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${panel.title}; arrow keys move the crosshair`, tabindex: "0" });
  if (!curves.length) return { picture, curves, axes: null, half: 0 };
  const axes = axesOf(curves, width, asked), half = halfLife(panel, asked);
  for (const y of axes.ys) picture.append(
    drawing("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: axes.down(y), y2: axes.down(y) }),
    drawing("text", { x: LEFT - 6, y: axes.down(y) + 4, "text-anchor": "end" }, short(y)));
  for (const x of axes.xs) picture.append(drawing("text", { class: "x", x: axes.across(x), y: HEIGHT - 9, "text-anchor": "middle" }, short(x)));
  picture.append(drawing("text", { x: 2, y: HEIGHT - 9 }, page.over));
  for (const curve of curves) picture.append(drawCurve(curve, half, axes));
  return { picture, curves, axes, half };
}

function notesOf(curves, asked, axes) {
  const lost = curves.reduce((sum, curve) => sum + (curve.lostCount ?? 0), 0), found = [];
  if (lost) found.push(`${exact(lost)} ${lost === 1 ? "value was no number" : "values were no numbers"} (×)`);
  for (const [wanted, isLog, values, axis] of [[asked.logX, axes.logX, curves.flatMap(curve => curve.x), "horizontal"],
                                               [asked.logY, axes.logY, curves.flatMap(curve => curve.mean), "vertical"]]) {
    const hidden = values.filter(value => value <= 0).length;
    if (wanted && !isLog) found.push(`no number is above 0, so the ${axis} axis stays linear`);
    else if (wanted && hidden) found.push(`${exact(hidden)} of ${exact(values.length)} points are not above 0, and not on the ${axis} axis`);
  }
  return found.join("; ");
}

// -- the page ---------------------------------------------------------------------------------------------------------

const figures = [...document.querySelectorAll("figure")];
const shown = [];

function redraw() {
  figures.forEach((figure, i) => {
    const old = figure.querySelector("svg"), width = Math.max(260, Math.round(old.getBoundingClientRect().width));
    const hadFocus = document.activeElement === old;
    shown[i] = { ...drawPanel(page.panels[i], view, width), width };
    shown[i].over = drawing("g", {});
    shown[i].lines = new Map(shown[i].curves.map(curve => [curve, smoothed(curve, shown[i].half, shown[i].axes.logX)]));
    shown[i].picture.append(shown[i].over);
    old.replaceWith(shown[i].picture);
    listen(shown[i]);
    if (hadFocus) shown[i].picture.focus();
    figure.querySelector(".told").textContent = shown[i].curves.length ? notesOf(shown[i].curves, view, shown[i].axes) : "all runs with this figure are hidden";
  });
  showAt();
}

/** The bin of a curve nearest to a place on the axis; −1 beyond its ends. */
function nearest(curve, at) {
  let low = 0, high = curve.x.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (curve.x[middle] < at) low = middle + 1; else high = middle; }
  if (low > 0 && at - curve.x[low - 1] <= curve.x[low] - at) low--;
  const apart = Math.abs(curve.x[low] - at), beside = low > 0 ? curve.x[low] - curve.x[low - 1] : curve.x.length > 1 ? curve.x[1] - curve.x[0] : 0;
  return apart > beside && (at < curve.x[0] || at > curve.x.at(-1)) ? -1 : low;
}

/** Lines, dots and values at the chosen place, in all panels; the last values where none is chosen. */
function showAt() {
  figures.forEach((figure, k) => {
    const { picture, curves, axes, over, lines, width, half } = shown[k];
    const values = [];
    over.replaceChildren();
    for (const tick of picture.querySelectorAll(".x")) tick.removeAttribute("visibility");
    for (const curve of curves) {
      const i = view.at === null ? curve.x.length - 1 : nearest(curve, view.at), line = lines.get(curve);
      const made = element("span", { class: styleOf(curve.run), title: names.get(curve.run) }, element("b", {}));
      made.append(i < 0 ? "–" : short(line[i]));
      if (i >= 0 && view.at !== null && half > 0) made.append(element("i", {}, ` (${short(curve.mean[i])})`));
      values.push(made);
      const hides = i < 0 || view.at === null || (axes.logX && curve.x[i] <= 0) || (axes.logY && line[i] <= 0);
      if (!hides) over.append(drawing("g", { class: styleOf(curve.run) },
        drawing("circle", { class: "at", cx: axes.across(curve.x[i]), cy: axes.down(line[i]), r: 4 })));
    }
    figure.querySelector(".now").replaceChildren(...values);
    if (view.at === null || !axes || (axes.logX && view.at <= 0)) return;
    const x = axes.across(view.at);
    if (x < LEFT - 0.5 || x > width - RIGHT + 0.5) return;
    const label = `${page.over} ${exact(view.at)}`, size = 7 * label.length + 10;
    const begin = Math.max(2, Math.min(width - size - 2, x - size / 2));
    for (const tick of picture.querySelectorAll(".x"))
      if (Math.abs(Number(tick.getAttribute("x")) - begin - size / 2) < size / 2 + 16) tick.setAttribute("visibility", "hidden");
    over.prepend(drawing("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    over.append(drawing("g", { class: "tip" }, drawing("rect", { x: begin, y: HEIGHT - BOTTOM + 6, width: size, height: 18, rx: 4 }),
      drawing("text", { x: begin + size / 2, y: HEIGHT - 9, "text-anchor": "middle" }, label)));
  });
}

/** All places of a panel's visible curves, rising. */
const placesOf = ({ curves }) => [...new Set(curves.flatMap(curve => curve.x))].sort((a, b) => a - b);

function listen(one) {
  const { picture, axes, width } = one;
  if (!axes) return;
  const follow = event => {
    const box = picture.getBoundingClientRect();
    const wanted = axes.across.inverse(Math.max(LEFT, Math.min(width - RIGHT, (event.clientX - box.left) * width / box.width)));
    const near = one.curves.map(curve => [curve, nearest(curve, wanted)]).filter(([, i]) => i >= 0).map(([curve, i]) => curve.x[i]);
    view.at = near.length ? near.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a)) : null;
    showAt();
  };
  picture.addEventListener("pointermove", follow);
  picture.addEventListener("pointerdown", follow);
  picture.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") { view.at = null; showAt(); } });
  picture.addEventListener("keydown", event => {
    const places = placesOf(one), here = places.indexOf(view.at), last = places.length - 1;
    const next = { ArrowRight: here < 0 ? 0 : Math.min(last, here + 1), ArrowLeft: here < 0 ? last : Math.max(0, here - 1),
                   Home: 0, End: last, Escape: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    view.at = next < 0 ? null : places[next];
    showAt();
    byId("spoken").textContent = view.at === null ? "" : `${page.over} ${exact(view.at)}: ` + one.curves.map(curve => {
      const i = nearest(curve, view.at);
      return `${names.get(curve.run)} ${i < 0 ? "none" : short(one.lines.get(curve)[i])}`;
    }).join(", ");
  });
}

function tellSmoothing() {
  const panel = { ...page.panels[0], isSmoothed: true }, unit = page.over === "step" ? "steps" : "tokens";
  byId("half").textContent = !view.smoothing ? "off" : view.logX ? `half-life ${Number((100 * view.smoothing).toPrecision(2))} % of the axis`
    : `half-life ${short(Number(halfLife(panel, view).toPrecision(2)))} ${unit}`;
  byId("smoothing").setAttribute("aria-valuetext", byId("half").textContent);
}

function toggle(button, name) {
  button.setAttribute("aria-pressed", String(view[name]));
  button.addEventListener("click", () => {
    view[name] = !view[name];
    button.setAttribute("aria-pressed", String(view[name]));
    tellSmoothing();
    redraw();
  });
}

/** A run is switched by its name; a double click shows it alone, and once more all of them. */
function legend() {
  const items = [...byId("legend").children], buttons = new Map();
  const mark = () => { for (const [run, button] of buttons) button.setAttribute("aria-pressed", String(!view.hidden.has(run))); redraw(); };
  if (items.length < 2) return;
  for (const item of items) {
    const run = Number(item.dataset.run), button = element("button", { type: "button", "aria-pressed": "true", title: "Show or hide; a double click shows it alone" });
    button.append(...item.childNodes);
    item.append(button);
    buttons.set(run, button);
    button.addEventListener("click", () => { view.hidden.has(run) ? view.hidden.delete(run) : view.hidden.add(run); mark(); });
    button.addEventListener("dblclick", () => {
      const others = [...buttons.keys()].filter(each => each !== run), alone = !view.hidden.has(run) && others.every(each => view.hidden.has(each));
      view.hidden = new Set(alone ? [] : others);
      mark();
    });
  }
}

function start() {
  const slider = byId("smoothing");
  byId("controls").hidden = false;
  byId("controls").addEventListener("submit", event => event.preventDefault());
  slider.max = String(SHARES.length - 1);
  slider.value = String(SHARES.indexOf(page.smoothing));
  slider.addEventListener("input", () => { view.smoothing = SHARES[Number(slider.value)]; tellSmoothing(); redraw(); });
  toggle(byId("log-x"), "logX");
  toggle(byId("log-y"), "logY");
  legend();
  tellSmoothing();
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 60); });
  document.documentElement.dataset.ready = "1";
  redraw();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start();
