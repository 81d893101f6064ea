// Figures: settings, counts, histograms and shares.

const overview = {
  name: "Figures",
  parts: [],
  show() {
    const [here, other] = page.sides;
    byId("main").replaceChildren(
      element("header", { class: "head" }, element("h2", {}, "Figures")),
      element("div", { class: "figures" },
        page.summary.length ? panel("Summary", table([], page.summary)) : null,
        here.settings.length ? panel("Settings", settingsTable(here, other)) : null,
        ...page.shares.map(({ name, parts }) => panel(name, shareBars(name, parts))),
        ...page.histograms.map(each => panel(each.name, histogram(each), "wide"))));
  },
};

const panel = (title, content, kind = "") => element("section", { class: `panel ${kind}` }, element("h3", {}, title), content);

function table(head, lines) {
  const cells = (name, line) => element("tr", {}, ...line.map((cell, k) =>
    element(name === "th" || k === 0 ? "th" : "td", { scope: name === "th" ? "col" : k === 0 ? "row" : null }, cell)));
  return element("table", {}, head.length ? element("thead", {}, cells("th", head)) : null,
    element("tbody", {}, ...lines.map(line => cells("td", line))));
}

function settingsTable(here, other) {
  if (!other) return table([], here.settings);
  const theirs = new Map(other.settings), names = [...new Set([...here.settings, ...other.settings].map(pair => pair[0]))];
  const mine = new Map(here.settings);
  const made = table(["", here.title, other.title], names.map(name => [name, mine.get(name) ?? "–", theirs.get(name) ?? "–"]));
  [...made.tBodies[0].rows].forEach((row, k) => row.classList.toggle("unlike", mine.get(names[k]) !== theirs.get(names[k])));
  return made;
}

function shareBars(name, parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const most = Math.max(...parts.map(part => part[1]), 1e-9);
  return element("div", { class: "bars" }, ...parts.flatMap(([part, value], k) => {
    const role = page.roles.indexOf(part);
    return [element("span", {}, part),
      element("span", { class: "bar", "aria-hidden": "true" }, element("span", {
        "data-hue": role >= 0 ? roleHue(role) : part === "template" ? "none" : partHue(k), style: { width: `${100 * value / most}%` } })),
      element("span", { class: "quiet" }, percent(value / total) + (total > 1.01 ? ` (${counted(value)})` : ""))];
  }));
}

function histogram({ name, edges, counts }) {
  const width = 400, height = 110, most = Math.max(...counts, 1), step = width / counts.length;
  const made = drawing("svg", { viewBox: `-2 -16 ${width + 4} ${height + 36}`, role: "img",
    "aria-label": `${name}: ` + counts.map((count, k) => `${edges[k]} to ${edges[k + 1]}: ${count}`).join("; ") });
  counts.forEach((count, k) => {
    const tall = count ? Math.max(2, height * count / most) : 0;
    const bar = drawing("g", { class: "column" },
      drawing("rect", { class: "ground", x: k * step, y: 0, width: step, height }),
      drawing("rect", { class: "full", x: k * step + 1, y: height - tall, width: Math.max(step - 2, 0.5), height: tall, rx: Math.min(2, step / 4) }),
      drawing("title", {}));
    bar.lastChild.textContent = `${counted(edges[k])}–${counted(edges[k + 1])}: ${counted(count)}`;
    if (k === counts.indexOf(most)) bar.append(label(k * step + step / 2, height - tall - 5, counted(count), "middle"));
    made.append(bar);
  });
  made.append(drawing("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  const every = Math.ceil(edges.length / 7);
  edges.forEach((edge, k) => {
    const last = k === edges.length - 1;
    if (!last && (k % every || edges.length - 1 - k < 0.75 * every)) return;
    made.append(label(k * step, height + 16, counted(edge), k === 0 ? "start" : last ? "end" : "middle"));
  });
  return made;
}

function label(x, y, text, anchor) {
  const made = drawing("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
