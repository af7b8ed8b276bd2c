// The page: what is drawn, what is asked, what is shown. Loaded as a module; there is no build step.

import { broken, digitsOf, draw, imageOf, pictureOf, PIXELS, SIDE } from "./prepare.js";
import { $, bars, colour, count, duration, make, fit, fresh, fromBase64, note, on, percent, say, showGrey } from "./show.js";
import { BYTES, Refused, ask, attempt, hasKey, newest, noteSuccess, onReturn } from "./talk.js";
import { showHand } from "./hand.js";
import { snippets } from "./snippets.js";
import { showInside } from "./inside.js";
import { ROUNDS, changeMarks, covered, heatMarks, paintWhy, runnerUp, turned, weighed } from "./why.js";
import { watch } from "./service.js";

const STAGES = ["outside", "decode", "queue", "compute", "encode"];
const REST_MS = 100, LATEST_MS = 1000;
const ANSWERS = 120; // Kept of those before, for "How the answer changed".

let info; // The answer of /info.
let model = "";
let strokes = []; // Lists of points [x, y] in 0..1 of the surface.
let stroke; // The stroke that was begun last; Undo or Clear may have removed it from `strokes`.
let drawn = digitsOf(strokes);
let pixels = []; // Images that were not drawn here: an example, or those of a photograph.
let warnings = []; // Of a photograph, or of the drawing as a picture.
let chosen = 0; // Of several digits, the one that is explained.
let cursor; // [column, row] on the grid, while the keyboard draws.
let pen = false; // Whether it is down.
const whole = { right: 0, down: 0, turn: 0, width: 1, noise: 0, weights: 0 };
const damage = { ...whole };
const answers = []; // Lists of probabilities.
const trips = []; // Milliseconds.
const idle = {}; // Texts while there is no answer.
for (const id of ["digit", "brief", "sure", "means", "warnings", "batch", "agree", "inside-note", "snippet", "needs", "why-text", "flip-text"]) idle[id] = $(id).textContent;
const rest = (...ids) => { for (const id of ids) say(id, idle[id]); };

const paper = $("paper");
const view = paper.getContext("2d");

// Drawing

function place(event) {
  const box = paper.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
}

on("paper", "pointerdown", (event) => {
  if (event.button || !event.isPrimary) return;
  paper.setPointerCapture(event.pointerId);
  begin(place(event));
});
on("paper", "pointermove", (event) => {
  if (!event.isPrimary || !paper.hasPointerCapture(event.pointerId)) return;
  if (strokes.at(-1) !== stroke) return; // Undo or Clear has removed it during the drag.
  const moves = event.getCoalescedEvents?.() ?? [];
  for (const move of moves.length ? moves : [event]) stroke.push(place(move));
  changed();
});

function begin(point) {
  forgetPixels();
  cursor = undefined;
  stroke = [point];
  strokes.push(stroke);
  changed();
}

function forgetPixels() {
  pixels = [];
  warnings = [];
  showCandidates();
  say("photo-note", "");
}

function undo() {
  if (!pixels.length) strokes.pop();
  forgetPixels();
  pen = false;
  changed();
}

function clear() {
  strokes = [];
  forgetPixels();
  answers.length = 0;
  pen = false;
  changed();
}

on("undo", "click", undo);
on("clear", "click", clear);
addEventListener("keydown", (event) => {
  if (event.key !== "z" || !(event.ctrlKey || event.metaKey) || event.target.type === "password") return;
  event.preventDefault();
  undo();
});

on("paper", "keydown", (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const middle = ([x, y]) => [(x + 0.5) / SIDE, (y + 0.5) / SIDE];
  if (step) {
    cursor = (cursor ?? [14, 14]).map((at, i) => Math.max(0, Math.min(SIDE - 1, at + step[i])));
    if (pen) strokes.at(-1).push(middle(cursor));
  } else if (event.key === " ") {
    const at = cursor ?? [14, 14];
    if (!pen) begin(middle(at));
    cursor = at;
    pen = !pen;
  } else if (event.key === "Backspace") undo();
  else if (event.key === "Delete") clear();
  else return;
  event.preventDefault();
  changed();
});
on("paper", "focus", () => { if (paper.matches(":focus-visible")) cursor = [14, 14]; show(); });
on("paper", "blur", () => { cursor = undefined; pen = false; show(); });

/** Show the drawing. */
function show() {
  const side = paper.width, cell = side / SIDE;
  view.clearRect(0, 0, side, side);
  view.fillStyle = colour("line");
  for (let i = 0; i <= SIDE; i += 7) {
    view.fillRect(i * cell - 0.5, 0, 1, side);
    view.fillRect(0, i * cell - 0.5, side, 1);
  }
  if (pixels.length) {
    const size = side / Math.ceil(Math.sqrt(pixels.length)), across = Math.round(side / size);
    const small = make("canvas");
    view.imageSmoothingEnabled = false;
    pixels.forEach((image, i) => {
      showGrey(small, image);
      view.drawImage(small, (i % across) * size, Math.floor(i / across) * size, size, size);
    });
  }
  draw(view, strokes, side, colour("text"), damage.width * drawn.pen);
  if (cursor) {
    view.strokeStyle = colour(pen ? "accent" : "focus");
    view.lineWidth = 3;
    view.strokeRect(cursor[0] * cell, cursor[1] * cell, cell, cell);
  }
}

function changed() {
  restarts = 0;
  drawn = digitsOf(strokes);
  show();
  showHand(labelsOf(model), drawn.digits[Math.min(chosen, drawn.digits.length - 1)], drawn.pen); // An answer may be late.
  predict();
}

// Asking: one request at a time, always for the newest strokes

let images = []; // Of the request that was answered last.
let later, waiting; // The timer of what may wait, and since when something does.

/** The strokes of the digits that are read: the service takes at most 64 in a picture. */
const readDigits = () => drawn.digits.slice(0, 64);

function current() {
  const found = pixels.length ? pixels : readDigits().map((digit) => imageOf(digit, damage.width * drawn.pen)).filter(Boolean);
  return found.map((image) => broken(image, damage));
}

const predict = newest(async () => {
  const wanted = current();
  if (!wanted.length) {
    answers.length = 0;
    showNothing();
    noteSuccess();
    announce("live", "The surface is empty.");
    return;
  }
  const answer = await post(model, wanted);
  noteSuccess();
  images = wanted;
  chosen = Math.min(chosen, images.length - 1);
  showAnswer(answer);
  // The rest comes when the pen rests, at the latest after a second: the bars must not wait for it.
  const now = performance.now();
  clearTimeout(later);
  waiting ??= now;
  later = setTimeout(() => {
    waiting = undefined;
    resting = true;
    explainWhy();
    showSnippet();
    compare();
    explain();
    doubt();
  }, Math.max(0, Math.min(REST_MS, waiting + LATEST_MS - now)));
}, () => { showNothing(); noReason(); say("sure", "No answer."); });

function bodyOf(wanted) {
  const body = new Uint8Array(wanted.length * PIXELS);
  wanted.forEach((image, i) => body.set(image, i * PIXELS));
  return body;
}

const pathOf = (name) => `predict?model=${encodeURIComponent(name)}`;

/** What a model says to images: its answer, and milliseconds by stage. */
async function post(name, wanted) {
  const began = performance.now();
  const response = await ask(pathOf(name), bodyOf(wanted));
  const answer = await response.json(), timing = response.headers.get("Server-Timing") ?? "";
  const trip = performance.now() - began, times = {};
  for (const [, stage, ms] of timing.matchAll(/(\w+);dur=([\d.]+)/g)) times[stage] = Number(ms);
  times.outside = Math.max(0, trip - (times.total ?? 0));
  return { ...answer, trip, times, rows: /batch;desc="?(\d+)/.exec(timing)?.[1] };
}

// Showing an answer

function showBars(probabilities, names) {
  const most = Math.max(...probabilities);
  const bar = () => make("li", {}, make("span"), make("span", { className: "track" }, make("i")), make("span"));
  fit($("bars"), probabilities.length, bar).forEach((row, i) => {
    const part = probabilities[i];
    row.firstChild.textContent = names[i] ?? i;
    row.children[1].firstChild.style.transform = `scaleX(${part})`;
    row.lastChild.textContent = most ? percent(part) : "–";
    row.classList.toggle("first", most && part === most);
  });
}

/** Nothing on the page is of an earlier drawing. */
function showNothing() {
  images = [];
  trips.length = 0;
  clearTimeout(later);
  waiting = undefined;
  rest("digit", "brief", "sure", "means", "warnings", "batch", "snippet", "needs");
  for (const id of ["seen", "stack", "stages"]) $(id).replaceChildren();
  $("stack").ariaLabel = "No request yet";
  fresh($("times"));
  const names = labelsOf(model);
  showBars(new Array(names.length || 10).fill(0), names);
  showHand(names);
  showHistory();
  compareNothing();
  explainNothing();
  whyNothing();
}

const readOf = ({ predictions }) => predictions.map(({ label, name }) => name ?? label).join(predictions[0].name ? " " : "");
const leastOf = ({ predictions }) => Math.min(...predictions.map(({ confidence }) => confidence));
const labelsOf = (name) => info?.models.find((one) => one.name === name)?.labels ?? [];

function showVerdict(answer) {
  const { predictions } = answer, read = readOf(answer), sure = `${percent(leastOf(answer))} sure`;
  say("digit", read);
  $("digit").classList.toggle("long", read.length > 2);
  say("sure", predictions.length > 1 ? `${predictions.length} ${onlyDigits(model) ? "digits" : "drawings"}, each at least ${sure}` : sure);
  say("brief", `${read}, ${sure}`);
  say("means", `That is among ${onlyDigits(model) ? "the ten digits" : `${labelsOf(model).length} classes`}: the network reads one in any drawing.`);
  showWarnings();
  announce("live", `${read}, ${sure}.`);
}

/** The service compares with digits, whatever the model's classes are; behind a semicolon it advises programs. */
function showWarnings() {
  say("warnings", onlyDigits(model) ? [...new Set(warnings.map(({ message }) => `${message.split(";")[0]}.`))].join(" ") : "");
  showCaution();
}

/** On a phone the answer stands above the drawing, and with it the weightiest of its notes. */
function showCaution() {
  const doubt = $("warnings").textContent || $("agree").textContent;
  $("draw").classList.toggle("doubted", Boolean(doubt));
  say("caution", doubt || $("instead").textContent || $("means").textContent);
}

function showAnswer(answer) {
  const { predictions } = answer;
  showVerdict(answer);
  showSeen();
  const { probabilities } = predictions[chosen];
  showBars(probabilities, labelsOf(answer.model));
  showHand(labelsOf(answer.model), drawn.digits[chosen], drawn.pen);
  about(answer);
  answers.push(probabilities);
  if (answers.length > ANSWERS) answers.shift();
  trips.push(answer.trip);
  if (trips.length > 300) trips.shift();
  requestAnimationFrame(() => { // They read the layout, which the bars have just changed.
    showHistory();
    showTimes(answer);
  });
}

function showSeen() {
  $("seen").classList.toggle("many", images.length > 1);
  const button = (i) => make("button", { type: "button", onclick: () => { chosen = i; predict(); } }, make("canvas"));
  fit($("seen"), images.length, button).forEach((one, i) => {
    one.ariaLabel = `Image ${i + 1} of ${images.length}`;
    one.ariaPressed = i === chosen;
    showGrey(one.firstChild, images[i]);
  });
}

function showHistory() {
  const canvas = $("history"), names = labelsOf(model);
  canvas.height = canvas.clientHeight;
  const context = fresh(canvas), high = canvas.height / (names.length || 10);
  const wide = Math.min(canvas.width / 3, Math.max(0, ...names.map((name) => context.measureText(name).width)));
  const left = wide + 12, step = (canvas.width - left) / ANSWERS, every = Math.ceil(12 / high);
  context.fillStyle = colour("quiet");
  names.forEach((name, label) => { if (label % every === 0) context.fillText(name, 4, (label + 0.5) * high + 4, wide); });
  context.fillStyle = colour("accent");
  answers.forEach((probabilities, i) => probabilities.forEach((part, label) => {
    context.globalAlpha = part;
    context.fillRect(left + i * step, label * high, step + 0.5, high - 1);
  }));
}

const announcing = {};
function announce(id, text) {
  clearTimeout(announcing[id]); // Only once the drawing rests: a screen reader would read each stroke.
  announcing[id] = setTimeout(() => { say(id, text); }, 600);
}

function showTimes({ times, trip, rows }) {
  const words = STAGES.map((stage) => `${stage} ${duration(times[stage] ?? 0)}`);
  fit($("stack"), STAGES.length, () => make("i")).forEach((part, i) => { part.style.flexGrow = times[STAGES[i]] ?? 0; });
  fit($("stages"), STAGES.length, () => make("li", {}, make("i"), make("span"))).forEach((one, i) => { one.lastChild.textContent = words[i]; });
  $("stack").ariaLabel = `${duration(trip)} in all: ${words.join(", ")}`;
  // Buckets grow by the square root of 2 from 0.25 ms on.
  const counts = new Array(20).fill(0);
  for (const one of trips) counts[Math.max(0, Math.min(19, Math.round(2 * Math.log2(one / 0.25))))]++;
  bars($("times"), counts, [[0, "0.25 ms"], [4, "1 ms"], [8, "4 ms"], [12, "16 ms"], [16, "64 ms"]]);
  const sorted = [...trips].sort((a, b) => a - b);
  const middle = duration(sorted[Math.floor(sorted.length / 2)]);
  $("times").ariaLabel = `Histogram of ${trips.length} round trips; the median is ${middle}`;
  const full = rows === undefined ? "" : ` Its batch had ${rows} ${rows === "1" ? "image" : "images"} of at most ${info?.limits.max_batch_rows}.`;
  say("batch", `Round trip ${duration(trip)}, median ${middle} of ${trips.length}.${full} Server times are from Server-Timing; outside of the service are the browser and the network.`);
}

// The other models

const compare = newest(async () => {
  if (!images.length) return;
  const rows = [...$("models").children], wanted = images;
  const all = await Promise.all(rows.map((row) => post(row.id.slice("model-".length), wanted)));
  if (!images.length) return; // Cleared meanwhile.
  all.forEach((answer, i) => {
    const cells = [readOf(answer), percent(leastOf(answer)), duration(answer.times.compute ?? 0)];
    cells.forEach((text, j) => { rows[i].children[j + 1].textContent = text; });
  });
  say("agree", new Set(all.map(readOf)).size > 1 ? "The models disagree: it is unclear, or no digit." : "");
  showCaution();
}, compareNothing);

function compareNothing() {
  for (const cell of document.querySelectorAll("#models td + td")) cell.textContent = "";
  rest("agree");
  showCaution();
}

/** Send the drawing as a picture: some warnings are for pictures alone. */
const doubt = newest(async () => {
  if (pixels.length || !images.length) return;
  warnings = []; // Those of an earlier drawing, also if this request fails.
  if (!onlyDigits(model)) return;
  const wanted = images, of = drawn, picture = await pictureOf(readDigits().flat(), damage.width * drawn.pen);
  const answer = await (await ask(`predict?${new URLSearchParams({ model, digits: "several" })}`, picture, "image/png")).json();
  if (images !== wanted || drawn !== of) return;
  warnings = answer.warnings ?? [];
  showWarnings();
}, (error) => {
  showWarnings();
  return error instanceof Refused; // The answer is good without warnings.
});

function showModels() {
  const seen = new Set();
  const rows = info.models.filter(({ name }) => !seen.has(name) && seen.add(name)).map(({ name }) => {
    const button = make("button", { type: "button", textContent: name, onclick: () => { choose(name); predict(); } });
    return make("tr", { id: `model-${name}` }, make("td", {}, button), make("td"), make("td"), make("td"));
  });
  $("models").replaceChildren(...rows);
  choose(info.models.some(({ name }) => name === model) ? model : info.default_model);
}

/** Whether a model's classes are the digits. */
const onlyDigits = (name) => labelsOf(name).join("") === "0123456789";

function choose(name) {
  restarts = 0;
  model = name;
  const digits = onlyDigits(name), task = `Draw ${digits ? "a digit" : `one of ${labelsOf(name).length} classes`}.`;
  say("title", `${task} A network reads along.`);
  idle.sure = task;
  for (const id of ["several", "samples-title", "samples"]) $(id).hidden = !digits;
  $("noisy").length = 1; // Another model has other layers.
  for (const row of $("models").children) {
    row.firstChild.firstChild.ariaPressed = row.id === `model-${name}`;
  }
}

// Why: which pixels decided, and what would turn the answer. One batch at a time for both

let subject; // What is explained: {image, model, version, label, probabilities, key}; undefined without an answer.
let resting = false; // Whether the pen rests: only then pixels that turn the answer are looked for.
let heated, searched; // What is shown: the subject with what was found, and its key.
let free = 0; // When the next heat map may be asked for: two thirds of the time are left to others.
let restarts = 0; // How often a drawing was asked again because the version of the model changed.
const RESTARTS = 3;

class Changed extends Error {} // A batch is of another version of the model than the answer that is shown.
class Outdated extends Error {} // The drawing, the model or the wish has changed: the search has no use.

/** Explain the answer for the chosen image. */
function about({ model: name, version, predictions }) {
  const key = `${name}/${version}:${images[chosen].join()}`;
  resting = false;
  if (key === subject?.key) return;
  subject = { ...predictions[chosen], model: name, version, image: images[chosen], key };
  showTargets();
  searching();
  explainWhy();
}

const nameOf = (label) => labelsOf(subject.model)[label] ?? label;

/** The probabilities of a batch of images; in several requests where the service's limits are low. */
async function batch(of, variants) {
  const { max_images, max_body_bytes } = info.limits, found = [];
  const most = Math.min(max_images, Math.floor(max_body_bytes / PIXELS));
  for (let i = 0; i < variants.length; i += most) {
    const part = variants.slice(i, i + most);
    const response = await ask(pathOf(of.model), bodyOf(part), BYTES, BYTES);
    if (response.headers.get("X-Model-Version") !== of.version) throw new Changed();
    const all = new Float32Array(await response.arrayBuffer()), classes = all.length / part.length;
    found.push(...part.map((_, j) => all.subarray(j * classes, (j + 1) * classes)));
  }
  return found;
}

const explainWhy = newest(async () => {
  if (subject && subject.key !== heated?.key) {
    await new Promise((done) => { setTimeout(done, Math.max(0, free - performance.now())); });
    const of = subject, began = performance.now();
    if (!of) return;
    const rows = await batch(of, covered(of.image)), now = performance.now();
    free = now + 2 * (now - began);
    // A heat map of the stroke a moment ago is shown while drawing: it shows that image, too.
    if (subject?.model !== of.model || subject.version !== of.version) return;
    heated = { ...of, ...weighed(of, rows) };
    showHeat();
  }
  if (!resting || !subject || subject.key !== heated?.key || !$("turn-it").open) return;
  const of = subject, target = targetOf(of), key = `${target}/${of.key}`;
  if (key === searched?.key) return;
  searching();
  const found = await turned(of.image, of.probabilities, target, (variants) => {
    if (subject !== of || targetOf(of) !== target) throw new Outdated();
    return batch(of, variants);
  });
  if (subject !== of || targetOf(of) !== target) return;
  searched = { key, of, target, found };
  showTurn();
}, (error) => {
  if (error instanceof Outdated) return true;
  whyNothing();
  noReason();
  if (!(error instanceof Changed)) return false;
  if (restarts++ < RESTARTS) predict();
  else say("why-text", "No answer: the version of the model changes all the time.");
  return true;
});

function whyNothing() {
  subject = heated = searched = undefined;
  resting = false;
  rest("why-text", "flip-text");
  for (const id of ["why", "flip"]) {
    clearTimeout(announcing[`${id}-live`]);
    say(`${id}-live`, "");
    paintWhy($(id));
    $(id).ariaLabel = `${$(`${id}-title`).textContent} No answer yet`;
  }
  $("target").disabled = true;
  $("target").value = "";
}

function noReason() {
  for (const id of ["why-text", "flip-text"]) say(id, "No answer.");
}

function showHeat() {
  const { label, probabilities, fall, least, read, where } = heated;
  paintWhy($("why"), heated.image, heatMarks(heated));
  const name = nameOf(label), [before, after] = [probabilities[label], least].map(percent);
  const times = Math.exp(fall), factor = times < 10 ? times.toFixed(1) : count(times);
  const covering = before === after ? `${name} stays at ${after}, its odds ${factor} times lower` : `${name} falls from ${before} to ${after}`;
  const text = fall < 0.05 ? `No place decided alone: whichever is covered, ${name} stays at ${before}.`
    : `The ${where} decided most: with it covered, ${covering}${read === label ? "" : ` and ${nameOf(read)} is read`}.`;
  say("why-text", text);
  $("why").ariaLabel = text;
  announce("why-live", text);
}

/** The class to turn the answer into: the one that was picked, or else the runner-up. */
function targetOf({ label, probabilities }) {
  const picked = $("target").value;
  return picked === "" || Number(picked) === label ? runnerUp(probabilities, label) : Number(picked);
}

function showTargets() {
  const { label, probabilities } = subject, select = $("target");
  fit(select, probabilities.length + 1, () => make("option")).forEach((option, i) => {
    option.value = i ? i - 1 : "";
    option.textContent = i ? nameOf(i - 1) : `the runner-up, ${nameOf(runnerUp(probabilities, label))}`;
    option.disabled = i - 1 === label;
  });
  if (select.value === String(label)) select.value = "";
  select.disabled = false;
}

/** The image alone, until the search for it has ended. */
function searching() {
  searched = undefined;
  paintWhy($("flip"), subject.image);
  say("flip-text", "Looking for the fewest pixels…");
}

function showTurn() {
  const { of: { image, label }, target, found } = searched, turn = `${nameOf(label)} into ${nameOf(target)}`;
  paintWhy($("flip"), image, found && changeMarks(image, found.image));
  let text = `Not found: ${ROUNDS} steps of 2 × 2 pixels turned no ${turn}.`;
  if (found) {
    const added = image.filter((value, i) => found.image[i] > value).length;
    const rubbed = image.filter((value, i) => found.image[i] < value).length, all = added + rubbed;
    text = `${all} ${all === 1 ? "pixel turns" : "pixels turn"} ${turn}, ${percent(found.sure)} sure: ${[added && `${added} to add`, rubbed && `${rubbed} to rub out`].filter(Boolean).join(", ")}.`;
  }
  say("flip-text", text);
  $("flip").ariaLabel = text;
  announce("flip-live", text);
}

on("target", "change", explainWhy);
on("turn-it", "toggle", explainWhy);

// Inside, and the damaged network

const explain = newest(async () => {
  const parameters = new URLSearchParams({ model });
  if ($("biases").checked) parameters.set("biases", "off");
  if ($("noisy").value && damage.weights) {
    parameters.set("noisy", $("noisy").value);
    parameters.set("noise", damage.weights);
  }
  const damaged = [...parameters].length > 1, open = $("inside").open;
  if (!damaged) showDamaged("");
  if (!info?.explain || !images.length || !(open || damaged || $("noisy").length === 1)) return; // It names the layers, too.
  const explanation = await (await ask(`explain?${parameters}`, images[chosen])).json();
  if (!images.length) return; // Cleared meanwhile.
  const { label, name, confidence } = explanation.prediction;
  if (damaged) showDamaged(`The damaged network reads ${name ?? label}, ${percent(confidence)} sure.`);
  say("inside-note", `${explanation.model}, version ${explanation.version}${damaged ? ", damaged" : ""}: computed again in NumPy, layer by layer, on the image beside the answer. Darkest is 0 or the smallest value, brightest the largest.`);
  if (open) showInside($("layers"), explanation.layers, labelsOf(explanation.model));
  const layers = [...new Set(explanation.layers.map((layer) => layer.name))];
  if ($("noisy").length === 1) $("noisy").append(...layers.map((layer) => make("option", { textContent: layer })));
}, explainNothing);

function explainNothing() {
  rest("inside-note");
  showDamaged("");
  $("layers").replaceChildren();
}

/** Beside the sliders, and beside the answer. */
function showDamaged(text) {
  for (const id of ["damaged", "instead"]) say(id, text);
  showCaution();
}

on("inside", "toggle", explain);
on("biases", "change", explain);
on("noisy", "change", () => { damage.weights ||= 0.5; showSliders(); explain(); });

const SLIDERS = [
  ["right", "shift right", -10, 10, 0.5, "px"], ["down", "shift down", -10, 10, 0.5, "px"], ["turn", "turn", -180, 180, 3, "°"],
  ["width", "line width", 0.2, 3, 0.1, "×"], ["noise", "noise", 0, 1, 0.02, ""], ["weights", "weight noise", 0, 3, 0.1, "σ"],
];
for (const [name, text, min, max, step] of SLIDERS) {
  const oninput = ({ target }) => {
    damage[name] = Number(target.value);
    showSliders();
    if (name === "weights") explain(); else changed();
  };
  const input = make("input", { type: "range", id: name, min, max, step, oninput });
  const row = make("div", { className: "slider" }, make("label", { htmlFor: name, textContent: text }), input, make("output"));
  if (name === "weights") $("noisy").parentElement.after(row); else $("sliders").append(row);
}

function showSliders() {
  for (const [name, , , , , unit] of SLIDERS) {
    $(name).value = damage[name];
    $(name).nextSibling.textContent = `${damage[name]} ${unit}`;
  }
}
showSliders();

on("mend", "click", () => {
  Object.assign(damage, whole);
  $("biases").checked = false;
  $("noisy").value = "";
  showSliders();
  changed();
});

// Examples and photographs

async function addSamples() {
  const picture = new Image();
  picture.src = "page/digits.png";
  await picture.decode();
  const canvas = make("canvas", { width: 10 * SIDE, height: SIDE });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  for (let digit = 0; digit < 10; digit++) {
    const { data } = context.getImageData(digit * SIDE, 0, SIDE, SIDE);
    const image = Uint8Array.from({ length: PIXELS }, (_, i) => data[4 * i]);
    const small = make("canvas");
    showGrey(small, image);
    const onclick = () => { strokes = []; forgetPixels(); pixels = [image]; changed(); };
    $("samples").append(make("button", { type: "button", ariaLabel: `A handwritten ${digit} of MNIST`, onclick }, small));
  }
}

const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/avif", "image/tiff"];
const FORMATS = "expected PNG, JPEG, WebP, GIF, BMP, AVIF or TIFF";
const SCALED_PIXELS = 4e6; // The service looks at 1 megapixel of a picture at most.

async function take(file) {
  if (!file) return;
  clear();
  if (file.type && !file.type.startsWith("image/")) {
    say("photo-note", `${file.name} is no picture; ${FORMATS}.`);
    return;
  }
  const empty = strokes;
  say("photo-note", "Reading the picture…");
  const explanation = await attempt(async () => {
    const path = `${info?.explain ? "explain" : "predict"}?${new URLSearchParams({ model, digits: "several" })}`;
    return (await askOf(path, file)).json();
  }, ({ status, message }) => {
    const wrong = refusalOf(file.name, status, message);
    if (wrong) note("");
    if (strokes === empty) say("photo-note", wrong ?? "");
    return Boolean(wrong);
  });
  if (!explanation || strokes !== empty || strokes.length) return; // Another picture, or a drawing, is newer.
  forgetPixels();
  warnings = explanation.warnings ?? [];
  if (!explanation.images) { // Nobody says what the prepared picture looks like: this is the answer.
    showVerdict(explanation);
    return;
  }
  showCandidates(explanation.candidates);
  pixels = explanation.images.map(fromBase64);
  chosen = 0;
  changed();
}

/** The marks that a photograph was searched for, and the judge's word on each. */
function showCandidates(candidates = []) {
  $("considered").hidden = !candidates.length;
  const square = () => make("li", {}, make("canvas", { role: "img" }), make("span"), make("b"));
  fit($("candidates"), candidates.length, square).forEach((one, i) => {
    const { image, digit, mark, chosen: isRead } = candidates[i];
    const words = [["a digit", digit], ["another mark", mark], ["neither", Math.max(0, 1 - digit - mark)]];
    const [word, part] = words.reduce((best, other) => (other[1] > best[1] ? other : best));
    one.classList.toggle("chosen", isRead);
    showGrey(one.firstChild, fromBase64(image));
    one.firstChild.ariaLabel = `Mark ${i + 1} of ${candidates.length}, ${isRead ? "read" : "left out"}:`;
    one.children[1].textContent = `${word} `;
    one.lastChild.textContent = percent(part);
  });
}

/** What is wrong with a picture; undefined where the picture is not the cause. */
function refusalOf(name, status, message) {
  if (status === 415) return `${name} has a format that is not read here; ${FORMATS}.`;
  if (status === 413) return `${name} is too large: ${message.replace(/^\w+: /, "")}.`;
  if (status !== 400) return undefined;
  if (message.includes("no digit found")) return `No digit was found in ${name}: it is blank, or no ink in it stands out.`;
  return `${name} is damaged, or no picture of the format that its name says; ${FORMATS}.`;
}

/** Asks about a picture as it is. What the service does not take, or finds too large, is made a smaller PNG here. */
async function askOf(path, file) {
  const asItIs = () => ask(path, file, file.type || BYTES);
  if (PICTURES.includes(file.type) && !(file.size > info?.limits.max_body_bytes)) {
    try {
      return await asItIs();
    } catch (error) {
      if (error.status !== 413) throw error;
    }
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return asItIs(); // The service says what is wrong with it.
  }
  const scale = Math.min(1, Math.sqrt(SCALED_PIXELS / (bitmap.width * bitmap.height)));
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return ask(path, await new Promise((done) => canvas.toBlob(done, "image/png")), "image/png");
}

on("photo", "change", ({ target }) => { take(target.files[0]); target.value = ""; });
addEventListener("paste", (event) => take(event.clipboardData.files[0]));
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("drop"); });
addEventListener("dragleave", () => document.body.classList.remove("drop"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("drop");
  take(event.dataTransfer.files[0]);
});

// The request to copy

let client = "curl";

function showSnippet() {
  const all = snippets(images, model, info, hasKey());
  if (!$("tabs").children.length) {
    for (const name of Object.keys(all)) {
      const tab = make("button", { type: "button", role: "tab", id: `tab-${name}`, textContent: name });
      tab.addEventListener("click", () => { client = name; showSnippet(); });
      $("tabs").append(tab);
    }
  }
  for (const tab of $("tabs").children) {
    const selected = tab.textContent === client;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    if (selected) $("snippet").setAttribute("aria-labelledby", tab.id);
  }
  say("snippet", all[client].text);
  say("needs", all[client].needs);
}

on("tabs", "keydown", (event) => {
  const tabs = [...$("tabs").children], step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.findIndex((tab) => tab.textContent === client) + step + tabs.length) % tabs.length];
  next.click();
  next.focus();
});
on("copy", "click", async () => {
  try {
    await navigator.clipboard.writeText($("snippet").textContent);
    say("needs", "Copied.");
  } catch { // Only pages of HTTPS and of this machine may write there.
    getSelection().selectAllChildren($("snippet"));
    say("needs", "Selected: copy it with the keyboard.");
  }
});

// Hints of a first visit: each is gone for good when its part of the page is used, or it is closed

const HINTS = "lenet-serve hints gone";
const parts = [...document.querySelectorAll("[data-hint]")];
const hintOf = (part) => part.querySelector(":scope > .hint");
let gone = "";
try {
  gone = localStorage.getItem(HINTS) ?? "";
} catch { /* Nothing is kept: they are shown on each visit. */ }

function showHints() {
  for (const part of parts) hintOf(part).hidden = gone.includes(part.dataset.hint);
  $("help").ariaExpanded = gone.length < parts.length;
}

function keepHints(now) {
  gone = now;
  showHints();
  try {
    localStorage.setItem(HINTS, gone);
  } catch { /* See above. */ }
}

for (const part of parts) {
  const { hint } = part.dataset;
  const use = (event) => {
    if (event.key === "Tab" || event.target.closest("[data-hint]") !== part || gone.includes(hint)) return;
    keepHints(gone + hint);
  };
  part.addEventListener("pointerdown", use);
  part.addEventListener("keydown", use);
  part.addEventListener("change", use);
  const close = make("button", { type: "button", ariaLabel: `Close hint ${hint}`, textContent: "×", onclick: () => keepHints(gone + hint) });
  hintOf(part).append(" ", close);
}
on("help", "click", () => {
  const all = !gone && !$("draw").hidden;
  keepHints(all ? parts.map((part) => part.dataset.hint).join("") : "");
  if (!$("draw").hidden) return;
  location.hash = "#draw"; // Which takes the focus.
  $("help").focus();
});
showHints();

// Views, start, and return

function route() {
  const service = location.hash === "#service";
  $("draw").hidden = service;
  $("service").hidden = !service;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (service ? "#service" : "#draw")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  watch(service);
}

async function start() {
  info = await attempt(async () => (await ask("info")).json());
  if (!info) return;
  say("version", `${info.name} ${info.version}`);
  $("damage").hidden = $("inside").hidden = !info.explain;
  showModels();
  predict();
}

// On a phone, what is below the answer opens by a touch.
const narrow = matchMedia("(max-width: 760px)").matches;
for (const part of document.querySelectorAll("#draw details")) part.open = !narrow;
on("past", "toggle", showHistory);
addEventListener("hashchange", route);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  show();
  showHistory();
  if (heated) showHeat();
  if (searched) showTurn(); else if (subject) searching();
});
onReturn(start);
onReturn(route);
show();
route();
start();
addSamples();
