// "Teach it your hand": drawings with the class that a person gave them. They are kept in this
// browser and downloaded as pictures; nothing of them is sent.

import { PEN, boxOf, pictureOf } from "./prepare.js";
import { $, fit, make, on, say } from "./show.js";

const KEY = "lenet-serve hand", MOST = 1000; // Drawings that are kept.
const UNIT = 1000; // Steps of a picture's side in which points are kept.
const INK = 0.7; // Of a picture's side: the longer side of its drawing. The rest is margin.
const STEP = 4; // The least distance of two points, in those steps: about a pixel of the picture.

let kept = read(); // [class, drawing] each, a drawing as JSON of [pen, strokes].
let labels = []; // The classes of the model that is shown.
let drawing = ""; // The one on the surface; "" if it has no strokes.
let said = ""; // What was done with that drawing.
let here = []; // What was kept since the surface was empty: the same lines drawn again are another drawing.

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return []; // The browser keeps nothing.
  }
}

/** A drawing in the middle of a picture with a margin, wherever and however large it was drawn. */
function framed(strokes, pen) {
  const { left, right, top, bottom } = boxOf(strokes.flat());
  const scale = INK / (Math.max(right - left, bottom - top) + pen * PEN);
  const place = (at, middle) => Math.round(UNIT * (0.5 + (at - middle) * scale));
  const lines = strokes.map((points) => {
    const line = [];
    points.forEach(([x, y], i) => {
      const point = [place(x, (left + right) / 2), place(y, (top + bottom) / 2)], last = line.at(-1);
      if (!last || i === points.length - 1 || Math.hypot(point[0] - last[0], point[1] - last[1]) >= STEP) line.push(point);
    });
    return line;
  });
  return JSON.stringify([Math.round(UNIT * pen * scale), lines]);
}

function pictureOfKept(one) {
  const [pen, lines] = JSON.parse(one);
  return pictureOf(lines.map((line) => line.map(([x, y]) => [x / UNIT, y / UNIT])), pen / UNIT);
}

/** Show the classes `names`, for the `strokes` of the drawing; none if it was not drawn here. */
export function showHand(names, strokes, pen) {
  labels = names;
  const before = drawing;
  drawing = strokes ? framed(strokes, pen) : "";
  if (drawing !== before) said = ""; // Else its answer is late.
  if (!strokes) here = [];
  show();
}

const ofLabels = () => kept.filter(([name]) => labels.includes(name));
const current = () => here.find(([, one]) => one === drawing);

function show(done = said) {
  said = done;
  const mine = ofLabels(), own = current()?.[0];
  $("hand").hidden = !labels.length;
  const button = (i) => make("button", { type: "button", onclick: () => teach(labels[i]) }, make("span"), make("small"));
  fit($("classes"), labels.length, button).forEach((one, i) => {
    const count = mine.filter(([name]) => name === labels[i]).length;
    one.firstChild.textContent = labels[i];
    one.lastChild.textContent = count || "";
    one.ariaLabel = `${labels[i]}, ${count} kept`;
    one.ariaPressed = own === labels[i];
    one.disabled = !drawing;
  });
  $("hand-zip").disabled = $("forget").disabled = !mine.length;
  const classes = new Set(mine.map(([name]) => name)).size;
  const total = mine.length ? `Kept: ${counted(mine.length, "drawing", "drawings")} of ${counted(classes, "class", "classes")}.` : "No drawing is kept.";
  const text = `${done} ${total}`.trim();
  if ($("hand-note").textContent !== text) say("hand-note", text); // It is read aloud.
}

const counted = (number, one, several) => `${number} ${number === 1 ? one : several}`;

/** Keep the drawing as one of a class, or no more if it was that already. */
function teach(name) {
  const before = current(), others = kept.filter((one) => one !== before), again = before?.[0] === name;
  if (!again && others.length >= MOST) return show(`Not kept: the limit is ${MOST} drawings. Download and forget them.`);
  here = here.filter((one) => one !== before);
  if (again) return keep(others, "Taken back.");
  here.push([name, drawing]);
  keep([...others, here.at(-1)], `It is ${name}.`);
}

function keep(next, done) {
  kept = next;
  try {
    if (kept.length) localStorage.setItem(KEY, JSON.stringify(kept)); else localStorage.removeItem(KEY);
  } catch {
    done += " This browser stores no more: download them before you leave this page.";
  }
  show(done);
}

on("forget", "click", () => {
  here = [];
  keep(kept.filter(([name]) => !labels.includes(name)), "Forgotten.");
});
on("hand-zip", "click", async () => {
  const files = [], numbers = {};
  $("hand-zip").disabled = true;
  for (const [name, one] of ofLabels()) {
    const number = numbers[name] = (numbers[name] ?? 0) + 1;
    const content = new Uint8Array(await (await pictureOfKept(one)).arrayBuffer());
    files.push([`hand/${folderOf(name)}/${String(number).padStart(4, "0")}.png`, content]);
  }
  const url = URL.createObjectURL(new Blob(zipped(files), { type: "application/zip" }));
  make("a", { href: url, download: "hand.zip" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60e3); // Once the browser has surely read it.
  show("Downloaded.");
});
addEventListener("storage", (event) => { // Another tab of this page kept one.
  if (event.key !== KEY && event.key !== null) return;
  kept = read();
  here = kept.filter(([, one]) => here.some(([, other]) => other === one));
  show("");
});

/** A class as the name of a folder: what a file system may refuse is percent-encoded. */
function folderOf(name) {
  const code = (one) => `%${one.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}`;
  return name.replace(/[%/\\:*?"<>|]|^\.|[. ]$/g, code);
}

/** The parts of a zip archive of [name, content], stored without compression. */
function zipped(files) {
  const parts = [], directory = [];
  let offset = 0, size = 0;
  for (const [name, content] of files) {
    const path = new TextEncoder().encode(name);
    // Version 2.0, names in UTF-8, stored, 1 January 1980; CRC, sizes, and lengths of the name and of no extra field.
    const common = [[2, 20], [2, 0x800], [2, 0], [2, 0], [2, 0x21], [4, crc(content)], [4, content.length], [4, content.length], [2, path.length], [2, 0]];
    const local = packed([4, 0x04034b50], ...common);
    const central = packed([4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]);
    parts.push(local, path, content);
    directory.push(central, path);
    offset += local.length + path.length + content.length;
    size += central.length + path.length;
  }
  return [...parts, ...directory, packed([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0])];
}

/** Numbers of [bytes, value], little-endian. */
function packed(...fields) {
  return Uint8Array.from(fields.flatMap(([bytes, value]) => Array.from({ length: bytes }, (_, i) => value >>> 8 * i)));
}

function crc(content) {
  let sum = ~0;
  for (const byte of content) {
    sum ^= byte;
    for (let i = 0; i < 8; i++) sum = sum >>> 1 ^ (sum & 1 && 0xedb88320);
  }
  return ~sum >>> 0;
}
