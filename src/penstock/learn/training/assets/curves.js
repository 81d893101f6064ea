"use strict";
// Draws the panels of a page of curves by uPlot: smoothing, logarithmic axes, runs to switch, one crosshair over all panels.

const page = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
const figures = [...document.querySelectorAll("figure")], items = [...byId("legend").children];
const names = new Map(page.runs), hidden = new Set();
const view = { smoothing: page.smoothing, logX: page.logX, logY: page.logY };
const SHARES = [...new Set([0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, page.smoothing])].sort((a, b) => a - b);
const DASHES = [[], [6, 3], [1.5, 3.5]], HEIGHT = 250, COLOURS = 8;
let charts = [];

const least = values => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = values => values.reduce((a, b) => Math.max(a, b), -Infinity);

function short(value) {
  for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return String(Number((value / size).toPrecision(4))) + suffix;
  return String(Number(value.toPrecision(4)));
}

/** The exponential average without the bias of a first value; weights follow the distance on the axis. */
function smoothed(curve, half, isLog) {
  if (!(half > 0)) return curve.mean;
  let total = 0, weight = 0, before = null;
  return curve.x.map((x, i) => {
    if (isLog && x <= 0) return curve.mean[i];
    const place = isLog ? Math.log10(x) : x, kept = before === null ? 1 : 0.5 ** ((place - before) / half);
    const count = curve.count ? curve.count[i] : 1;
    total = total * kept + count * curve.mean[i];
    weight = weight * kept + count;
    before = place;
    return total / weight;
  });
}

/** All that the horizontal axis of the chosen runs covers: the same in all panels. */
function places(without, isLog) {
  const all = page.panels.flatMap(panel => panel.curves.filter(curve => !without.has(curve.run)).flatMap(curve => curve.x));
  return isLog ? all.filter(x => x > 0) : all;
}

function halfLife(isLog) {
  const xs = places(new Set(), isLog).map(x => (isLog ? Math.log10(x) : x));
  return view.smoothing * (most(xs) - least(xs));
}

/** Columns of one curve for uPlot: x, least, most, mean and smoothed; a null interrupts the lines. */
function columns(curve, half, logX, logY) {
  const line = smoothed(curve, half, logX), rows = [];
  const shown = value => (logY && value <= 0 ? null : value);
  curve.x.forEach((x, i) => {
    if (logX && x <= 0) return;
    if (curve.breaks?.includes(i)) rows.push([(curve.x[i - 1] + x) / 2, null, null, null, null]);
    const low = (curve.low ?? curve.mean)[i], high = (curve.high ?? curve.mean)[i];
    rows.push([x, logY && low <= 0 ? shown(curve.mean[i]) : low, shown(high), shown(curve.mean[i]), shown(line[i])]);
  });
  return [0, 1, 2, 3, 4].map(column => rows.map(row => row[column]));
}

function draw(figure, panel) {
  const curves = panel.curves.filter(curve => !hidden.has(curve.run)), place = figure.querySelector(".plot");
  place.replaceChildren();
  figure.querySelector(".note").textContent = curves.length ? panel.note : "all runs with this figure are hidden";
  if (!curves.length) return null;
  const logX = view.logX && places(hidden, true).length > 0;
  const logY = view.logY && curves.some(curve => curve.mean.some(y => y > 0));
  const half = panel.isSmoothed ? halfLife(logX) : 0, xs = places(hidden, logX), style = getComputedStyle(document.body);
  const ends = [least(xs), most(xs)];
  if (ends[0] === ends[1]) { ends[0] -= logX ? ends[0] / 2 : 1; ends[1] += 1; }
  const series = [{ label: page.over, value: (_, x) => (x == null ? "" : x.toLocaleString("en")) }], bands = [];
  for (const curve of curves) {
    const hue = getComputedStyle(items.find(item => Number(item.dataset.run) === curve.run).querySelector("b")).borderTopColor;
    const faint = alpha => hue.replace("rgb(", "rgba(").replace(")", `, ${alpha})`), dash = DASHES[Math.floor(curve.run / COLOURS) % 3];
    const aside = { class: "aside", width: 0, points: { show: false } };
    bands.push({ series: [series.length + 1, series.length], fill: faint(0.16) });
    series.push(aside, aside, { ...aside, width: half > 0 ? 1 : 0, stroke: faint(0.4) });
    series.push({ label: names.get(curve.run), stroke: hue, width: 1.8, dash, points: { fill: hue }, value: (_, y) => (y == null ? "–" : short(y)) });
  }
  const axis = { stroke: style.getPropertyValue("color"), grid: { stroke: style.borderTopColor, width: 1 }, ticks: { show: false },
                 values: (_, ticks) => ticks.map(tick => (tick === null ? null : short(tick))) };
  const chart = new uPlot({
    width: Math.max(260, place.clientWidth), height: HEIGHT, series, bands,
    scales: { x: { time: false, distr: logX ? 3 : 1, range: () => ends }, y: { distr: logY ? 3 : 1 } },
    axes: [{ ...axis }, { ...axis, size: 62 }],
    cursor: { sync: { key: "runs" }, drag: { x: false, y: false }, hover: { prox: 30 } },
    hooks: { draw: [chart => curves.forEach(curve => crosses(chart, curve, logX))] },
  }, uPlot.join(curves.map(curve => columns(curve, half, logX, logY))), place);
  chart.root.tabIndex = 0;
  chart.root.addEventListener("keydown", event => step(chart, event));
  return chart;
}

/** Marks at the bottom, where values were no numbers. */
function crosses(chart, curve, logX) {
  chart.ctx.fillStyle = chart.axes[0].stroke();
  chart.ctx.textAlign = "center";
  for (const x of curve.lost ?? [])
    if (!logX || x > 0) chart.ctx.fillText("×", chart.valToPos(x, "x", true), chart.bbox.top + chart.bbox.height - 4);
}

/** The arrow keys move the crosshair of all panels, and a screen reader hears the values. */
function step(chart, event) {
  const xs = chart.data[0], last = xs.length - 1, here = chart.cursor.left < 0 ? null : chart.cursor.idx;
  const next = { ArrowRight: here === null ? 0 : Math.min(last, here + 1), ArrowLeft: here === null ? last : Math.max(0, here - 1),
                 Home: 0, End: last, Escape: -1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  chart.setCursor({ left: next < 0 ? -10 : chart.valToPos(xs[next], "x"), top: 10 }, true, true);
  byId("spoken").textContent = next < 0 ? "" : chart.root.querySelector(".u-legend").innerText.replace(/\s+/g, " ");
}

function redraw() {
  charts.forEach(chart => chart?.destroy());
  charts = figures.map((figure, i) => draw(figure, page.panels[i]));
  const logX = view.logX && places(new Set(), true).length > 0, unit = page.over === "step" ? "steps" : "tokens";
  byId("half").textContent = !view.smoothing ? "off" : logX ? `half-life ${Number((100 * view.smoothing).toPrecision(2))} % of the axis`
    : `half-life ${short(Number(halfLife(false).toPrecision(2)))} ${unit}`;
  for (const [id, name] of [["log-x", "logX"], ["log-y", "logY"]]) byId(id).setAttribute("aria-pressed", String(view[name]));
  for (const button of byId("legend").querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(!hidden.has(Number(button.parentElement.dataset.run))));
}

/** A run is switched by its name; a double click shows it alone, and once more all of them. */
function switches() {
  if (items.length < 2) return;
  for (const item of items) {
    const run = Number(item.dataset.run), button = document.createElement("button"), others = [...names.keys()].filter(each => each !== run);
    button.type = "button";
    button.title = "Show or hide; a double click shows it alone";
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => { hidden.has(run) ? hidden.delete(run) : hidden.add(run); redraw(); });
    button.addEventListener("dblclick", () => {
      const alone = !hidden.has(run) && others.every(each => hidden.has(each));
      hidden.clear();
      if (!alone) others.forEach(each => hidden.add(each));
      redraw();
    });
  }
}

const slider = byId("smoothing");
slider.max = String(SHARES.length - 1);
slider.value = String(SHARES.indexOf(page.smoothing));
slider.addEventListener("input", () => { view.smoothing = SHARES[Number(slider.value)]; redraw(); });
byId("log-x").addEventListener("click", () => { view.logX = !view.logX; redraw(); });
byId("log-y").addEventListener("click", () => { view.logY = !view.logY; redraw(); });
byId("controls").addEventListener("submit", event => event.preventDefault());
byId("controls").hidden = false;
addEventListener("resize", () => charts.forEach((chart, i) =>
  chart?.setSize({ width: Math.max(260, figures[i].querySelector(".plot").clientWidth), height: HEIGHT })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
switches();
redraw();
document.documentElement.dataset.ready = "1";
