"use strict";
// The conversation is stored only in this page. All texts become text nodes: nothing here writes HTML.
const $ = id => document.getElementById(id);
const WAIT = "The reply is still being generated. Enter sends this when it is done; Escape stops it.";
const WRITING = "A reply is being written: Enter waits for it, Escape stops it.";
const LOADING = "The server does not answer: it may still load its model. This page asks again every two seconds.";
const NOT_YET = "The model is not there yet. Enter sends this when it is.";
const AGAIN = 2000; // milliseconds
/** Two messages to begin with; a model without a chat template gets the beginning of a text. */
const STARTERS = {
  true: ["Explain in two sentences why rivers bend.", "Write four lines about the sea at night."],
  false: ["Once upon a time there was", "The most important thing about water is"],
};
let messages = [], model = null, running = null, attached = [], connecting = null;

const headers = () => ({
  "content-type": "application/json",
  ...($("key").value ? {authorization: `Bearer ${$("key").value}`} : {}),
});

async function problem(response) {
  try { return (await response.json()).error.message; }
  catch { return `the server answered ${response.status}`; }
}

function tell(text, isProblem = true) {
  $("status").textContent = text;
  $("status").classList.toggle("quiet", !isProblem);
}

/** 12345678 → "12.3 M". */
function inShort(count) {
  const [size, unit] = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"], [1, ""]].find(([size]) => count >= size) ?? [1, ""];
  return Number((count / size).toPrecision(3)) + unit;
}

async function findModel() {
  const response = await fetch("/v1/models", {headers: headers()});
  if (response.status === 401) openSettings(true, "key");
  if (!response.ok) throw new Error(await problem(response));
  model = (await response.json()).data[0];
  const size = [model.parameters ? `${inShort(model.parameters)} parameters` : "",
                `context of ${model.context_length.toLocaleString("en")} tokens`,
                model.has_chat ? "" : "no chat template: it continues your text"].filter(Boolean).join(" · ");
  $("model").textContent = `${model.id} · ${size}`;
  $("name").textContent = model.id;
  $("size").textContent = size;
  document.title = `${model.id} · penstock chat`;
  [...$("starters").children].forEach((button, i) => { button.textContent = STARTERS[model.has_chat][i]; });
  $("starters").hidden = false;
  for (const [name, own] of Object.entries(model.sampling ?? {}))
    if ($(name)?.type === "range" && !$(name).dataset.moved) { $(name).value = own; showValue($(name)); }
  $("attach").hidden = !(model.reads_images && model.has_chat);
  tell("");
}

/** Ask for the model until the server answers. */
async function connect() {
  for (;;) {
    try { return await findModel(); }
    catch (error) {
      // `fetch` throws a TypeError if there is no answer at all.
      if (!(error instanceof TypeError)) return tell(error.message);
      tell(LOADING, false);
      await new Promise(done => setTimeout(done, AGAIN));
    }
  }
}

// -- images of the next message -------------------------------------------------------------------------------------

function picture(url) {
  const image = document.createElement("img");
  image.src = url; image.alt = "Image of this message";
  return image;
}

function showAttached() {
  $("attached").replaceChildren(...attached.map((url, place) => {
    const item = document.createElement("li"), remove = document.createElement("button");
    remove.type = "button"; remove.textContent = "×"; remove.title = "Remove this image";
    remove.setAttribute("aria-label", "Remove this image");
    remove.addEventListener("click", () => { attached.splice(place, 1); showAttached(); $("input").focus(); });
    item.append(picture(url), remove);
    return item;
  }));
}

function asUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  const images = [...files].filter(file => file.type.startsWith("image/"));
  if (!images.length) return false;
  if ($("attach").hidden) { tell("This model reads no images."); return true; }
  try {
    attached.push(...await Promise.all(images.map(asUrl)));
    tell("");
  } catch (error) { tell(error.message); }
  showAttached();
  $("input").focus();
  return true;
}

// -- the visible conversation ---------------------------------------------------------------------------------------

function show(role) {
  const item = document.createElement("li"), who = document.createElement("div");
  const words = document.createElement("div"), note = document.createElement("div");
  item.className = `message ${role}`;
  who.className = "who"; who.textContent = role === "user" ? "You" : model.id;
  words.className = "words"; note.className = "note";
  item.append(who, words, note);
  $("messages").append(item);
  $("empty").hidden = true;
  return {item, words, note};
}

/** Read a reply out by sentences, not by tokens: a screen reader says each element that is added. */
function speaker(who) {
  let waiting = `${who}: `;
  $("spoken").replaceChildren();
  const say = words => {
    if (!words.trim()) return;
    const line = document.createElement("p");
    line.textContent = words;
    $("spoken").append(line);
  };
  return {
    add(text) {
      waiting += text;
      const [whole] = waiting.match(/^[^]*(?:[.!?…。！？]["'”’)\]]*\s|\n|[。！？])/) ?? [""];
      waiting = waiting.slice(whole.length);
      say(whole);
    },
    end(note) { say(waiting); say(note); },
  };
}

function follow(change) {
  const box = $("conversation"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// -- requests -------------------------------------------------------------------------------------------------------

function settings() {
  const asked = {model: model.id, stream: true, stream_options: {include_usage: true}};
  for (const name of ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"]) {
    // A slider that nobody moved leaves the model's own default.
    const own = name in (model.sampling ?? {}) && $(name).type === "range" && !$(name).dataset.moved;
    if ($(name).value !== "" && !own) asked[name] = Number($(name).value);
  }
  return asked;
}

function conversation() {
  const system = $("system").value.trim();
  return [...(system ? [{role: "system", content: system}] : []), ...messages];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the server cut the reply");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function ask(reply, signal) {
  const path = model.has_chat ? "/v1/chat/completions" : "/v1/completions";
  const what = model.has_chat ? {messages: conversation()} : {prompt: messages.at(-1).content, max_tokens: 200};
  const body = JSON.stringify({...what, ...settings()});
  const begun = performance.now(), written = {text: "", notes: []};
  reply.written = written;
  reply.phase = "waiting for a place in the batch";
  const response = await fetch(path, {method: "POST", headers: headers(), body, signal});
  if (!response.ok) throw new Error(await problem(response));
  reply.phase = "reading the prompt";
  for await (const event of events(response)) {
    if (event.tokens_dropped) written.notes.push(`${event.tokens_dropped} tokens of earlier turns did not fit`);
    const choice = event.choices[0];
    const text = choice ? choice.delta ? choice.delta.content ?? "" : choice.text : "";
    written.text += text;
    if (text) follow(() => { reply.phase = ""; reply.note.textContent = ""; reply.words.append(text); });
    reply.speaker.add(text);
    if (choice?.finish_reason === "length") written.notes.push("cut at the maximum of tokens");
    if (event.usage) {
      const seconds = (performance.now() - begun) / 1000, count = event.usage.completion_tokens;
      written.notes.unshift(`${count} tokens, ${rate(count, seconds)} a second`);
    }
  }
}

// At least two digits, so that a slow model is not shown as 0.
function rate(count, seconds) {
  const found = count / seconds;
  return String(found < 10 ? Number(found.toPrecision(2)) : Math.round(found));
}

async function send() {
  const text = $("input").value.trim(), images = attached;
  if ((text || images.length) && running) tell(WAIT, false);
  if (!(text || images.length) || running) return;
  if (connecting) return tell(NOT_YET, false);
  running = new AbortController();
  tell(WRITING, false);
  // The button that was pressed goes; the focus must not go with it.
  if (document.activeElement.matches("#send, #starters button")) $("input").focus();
  $("send").hidden = true; $("stop").hidden = false;
  let reply = null, ticking = 0;
  const turns = messages, begun = performance.now();
  try {
    if (!model) await findModel();
    const parts = images.map(url => ({type: "image_url", image_url: {url}}));
    if (text) parts.push({type: "text", text});
    turns.push({role: "user", content: images.length ? parts : text});
    $("input").value = ""; fit();
    attached = []; showAttached();
    follow(() => { show("user").words.append(...images.map(picture), text); reply = show("assistant"); });
    reply.speaker = speaker(model.id);
    $("conversation").scrollTop = $("conversation").scrollHeight;
    reply.item.classList.add("writing");
    ticking = setInterval(() => tick(reply, begun), 250);
    await ask(reply, running.signal);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const said = error instanceof TypeError ? "the server does not answer" : error.message;
    if (reply) (reply.written ??= {text: "", notes: []}).notes.push(stopped ? "stopped" : said);
    else tell(said);
    if (reply && !stopped) reply.item.classList.add("failed");
  } finally {
    running = null;
    clearInterval(ticking);
    if ([WAIT, WRITING].includes($("status").textContent)) tell("");
    // Who reads the reply or changes settings meanwhile stays there.
    if (document.activeElement.matches("body, #stop")) $("input").focus();
    $("send").hidden = false; $("stop").hidden = true;
    if (reply) finish(reply, text, images, turns);
  }
}

/** What happens before the first word, and for how long. */
function tick(reply, begun) {
  const seconds = Math.floor((performance.now() - begun) / 1000);
  if (reply.phase && seconds) reply.note.textContent = `${reply.phase}, ${seconds} s`;
}

function finish(reply, text, images, turns) {
  reply.item.classList.remove("writing");
  follow(() => { reply.note.textContent = reply.written.notes.join(" · "); });
  reply.speaker.end(reply.note.textContent);
  if (reply.written.text.trim()) turns.push({role: "assistant", content: reply.written.text});
  else {
    // A turn without a reply is removed, so that the message can be sent again.
    turns.pop();
    if (turns === messages && !$("input").value && !attached.length) {
      $("input").value = text; fit();
      attached = images; showAttached();
    }
  }
}

// -- controls -------------------------------------------------------------------------------------------------------

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function showValue(range) {
  document.querySelector(`output[for="${range.id}"]`).value = range.value;
}

function openSettings(open, field = "system") {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
  if (open) $(field).focus();
  else $("open-settings").focus();
}

$("compose").addEventListener("submit", event => { event.preventDefault(); send(); });
$("settings").addEventListener("submit", event => event.preventDefault());
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { attach($("files").files); $("files").value = ""; });
document.addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.some(file => file.type.startsWith("image/"))) { event.preventDefault(); attach(files); }
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => { event.preventDefault(); attach(event.dataTransfer.files); });
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) running.abort();
  else if (!$("settings").hidden) openSettings(false);
});
$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  attached = []; showAttached();
  $("messages").replaceChildren();
  $("spoken").replaceChildren();
  $("empty").hidden = false;
  $("input").focus();
});
$("key").addEventListener("change", () => findModel().catch(error => tell(error.message)));
for (const button of $("starters").children)
  button.addEventListener("click", () => { $("input").value = button.textContent; fit(); send(); });
for (const output of document.querySelectorAll("output")) {
  const range = $(output.htmlFor.value);
  range.addEventListener("input", () => { range.dataset.moved = "yes"; showValue(range); });
  showValue(range);
}
connecting = connect().finally(() => { connecting = null; });
Promise.race([connecting, new Promise(done => setTimeout(done, AGAIN))])
  .finally(() => { document.documentElement.dataset.ready = String(Math.round(performance.now())); });
