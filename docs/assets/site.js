"use strict";
// Pictures that can be enlarged, a sign where something scrolls sideways, and the menu by keyboard. Nothing here asks a server.

/** What scrolls within a page: code, tables, drawings. */
const WIDE = ".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset :is(.picture, .output), .viewer > section";

/** Fade an element at the sides where it goes on, and let the keyboard reach it. */
function mark(element) {
  const rest = element.scrollWidth - element.clientWidth, at = Math.abs(element.scrollLeft), wide = rest > 1;
  element.classList.toggle("scrolls", wide);
  element.classList.toggle("before", wide && at > 1);
  element.classList.toggle("after", wide && at < rest - 1);
  if (wide) element.tabIndex = 0;
  else element.removeAttribute("tabindex");
}

const sizes = new ResizeObserver(entries => entries.forEach(entry => mark(entry.target)));

function watch(element) {
  element.addEventListener("scroll", () => mark(element), { passive: true });
  sizes.observe(element);
}

/** The window in which a picture is shown alone. */
function makeViewer() {
  const viewer = document.createElement("dialog"), head = document.createElement("div");
  const words = document.createElement("p"), close = document.createElement("button");
  const place = document.createElement("section");
  viewer.className = "viewer";
  close.type = "button";
  close.textContent = "Close";
  words.id = "viewer-words";
  viewer.setAttribute("aria-labelledby", words.id);
  place.setAttribute("aria-label", "The picture");
  head.append(words, close);
  viewer.append(head, place);
  close.addEventListener("click", () => viewer.close());
  place.addEventListener("click", () => viewer.close());
  // Keys that the page has for itself (search, next page) have no meaning here.
  viewer.addEventListener("keydown", event => event.stopPropagation());
  viewer.addEventListener("close", () => place.replaceChildren());
  document.body.append(viewer);
  watch(place);
  return { viewer, words, place };
}

let made = null;

function enlarge(picture, button) {
  made ??= makeViewer();
  const { viewer, words, place } = made;
  const shown = picture.querySelector("svg") ?? picture;
  words.textContent = nameOf(picture);
  place.replaceChildren(shown.cloneNode(true));
  button.focus({ preventScroll: true }); // where the focus returns to
  viewer.showModal();
  place.scrollTo(0, 0);
}

function nameOf(picture) {
  return picture.alt ?? picture.querySelector("svg")?.getAttribute("aria-label") ?? picture.querySelector("title")?.textContent ?? "Picture";
}

function offer(picture) {
  const frame = document.createElement("span"), button = document.createElement("button");
  frame.className = "enlarged";
  button.className = "enlarge";
  button.type = "button";
  button.textContent = "Enlarge";
  button.setAttribute("aria-label", `Enlarge the picture: ${nameOf(picture)}`);
  picture.replaceWith(frame);
  frame.append(picture, button);
  for (const each of [picture, button]) each.addEventListener("click", () => enlarge(picture, button));
}

function isOnTop(link) {
  const { left, top, width } = link.getBoundingClientRect();
  return width > 0 && document.elementFromPoint(left + 4, top + 4)?.closest("a") === link;
}

/** The menu of narrow screens by keyboard: its button is a label, which takes no focus by itself. */
function openByKeyboard() {
  const button = document.querySelector(".md-header label[for=__drawer]"), open = document.querySelector("#__drawer");
  if (!button || !open) return;
  const say = () => button.setAttribute("aria-expanded", String(open.checked));
  button.tabIndex = 0;
  button.setAttribute("role", "button");
  button.setAttribute("aria-label", "Menu");
  say();
  open.addEventListener("change", say);
  button.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation(); // the theme clicks labels itself, but for Enter alone
    button.click();
    // Panels of the menu lie on top of each other, and slide in.
    if (open.checked) setTimeout(() => [...document.querySelectorAll(".md-sidebar--primary a.md-nav__link")].find(isOnTop)?.focus(), 350);
  });
  addEventListener("keydown", event => {
    if (event.key !== "Escape" || !open.checked) return;
    open.click();
    button.focus();
  });
}

addEventListener("load", () => {
  openByKeyboard();
  document.querySelectorAll(".md-content .picture, .md-content img:not(a img)").forEach(offer);
  document.querySelectorAll(WIDE).forEach(watch);
});
