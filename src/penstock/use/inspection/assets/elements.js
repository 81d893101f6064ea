// Small helpers that make elements. Text goes into text nodes only: no data is ever read as markup.

const byId = id => document.getElementById(id);

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  set(made, attributes || {});
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(made, attributes || {});
  made.append(...children);
  return made;
}

function set(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") for (const [name, part] of Object.entries(value)) made.style.setProperty(name, part);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
}

const button = (label, attributes) => element("button", { type: "button", ...attributes }, label);

const counted = number => number.toLocaleString("en");
const plural = (number, word) => `${counted(number)} ${word}${number === 1 ? "" : "s"}`;

/** 0.256 → "26 %"; only 0 is shown as 0, and only 1 as 100. */
function percent(share) {
  if (share > 0 && share < 0.005) return "<1 %";
  if (share < 1 && share >= 0.995) return ">99 %";
  return `${Math.round(100 * share)} %`;
}

/** A letter for a document of a row, or a branch of a tree. */
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const letter = k => LETTERS[k % 26] + (k < 26 ? "" : String(Math.floor(k / 26)));

/** Eight hues, one for each role or document; well-known roles have fixed ones. */
const HUES = 8;
const KNOWN = { assistant: 0, model: 0, user: 1, human: 1, system: 2, tool: 3, ipython: 3, developer: 4 };
function roleHue(role) {
  if (role < 0) return "none";
  const known = KNOWN[page.roles[role]];
  return known === undefined ? 5 + role % 3 : known;
}

const roleName = role => (role < 0 ? "template" : page.roles[role]);
