// Why the network answers as it does: the pixels that decided, and the fewest found that turn it.

import { PIXELS, SIDE } from "./prepare.js";
import { colour } from "./show.js";

// The patch that covers a place has 5 x 5 pixels. 3 x 3 only make a stroke thinner: `lenet` keeps its
// answer for five of ten digits of MNIST, wherever they lie. 5 x 5 cut a stroke, and each of the ten
// answers turns somewhere. With 7 x 7 the map is no longer that of a stroke.
const REACH = 2;

// A touch sets 2 x 2 pixels. Each third round tries all touches, those between only the best of them.
// For 40 digits of MNIST and `lenet`, turned into the runner-up, this took 747 images for 11.8 pixels;
// all touches in each round 1,238 for 12.2, touches of 3 x 3 650 for 13.8, of one 3,878 for 10.2.
const TOUCH = 2, EACH = 3, BEST = 64;
export const ROUNDS = 16;

const LEAST = 1e-38; // Of a probability, for its logarithm.

/** log(p / (1 - p)) of a class; 1 - p as a sum, which does not round to 0 where p is nearly 1. */
function logOdds(probabilities, label) {
  let others = 0;
  for (let i = 0; i < probabilities.length; i++) if (i !== label) others += probabilities[i];
  return Math.log(Math.max(probabilities[label], LEAST)) - Math.log(Math.max(others, LEAST));
}

const largest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

/** The class that is the most probable but for `label`. */
export const runnerUp = (probabilities, label) => largest(Array.from(probabilities, (part, i) => (i === label ? -1 : part)));

/** All 784 images with one place covered by background, in the order of the places. */
export function covered(image) {
  return Array.from({ length: PIXELS }, (_, place) => {
    const variant = Uint8Array.from(image), row = Math.floor(place / SIDE), column = place % SIDE;
    for (let y = Math.max(0, row - REACH); y <= Math.min(SIDE - 1, row + REACH); y++) {
      variant.fill(0, y * SIDE + Math.max(0, column - REACH), y * SIDE + Math.min(SIDE, column + REACH + 1));
    }
    return variant;
  });
}

/** What an answer's `rows` for `covered(image)` say: how far the log-odds fall by place, and where most. */
export function weighed({ image, label, probabilities }, rows) {
  const whole = logOdds(probabilities, label);
  const falls = rows.map((row) => whole - logOdds(row, label)), at = largest(falls);
  return { falls, fall: falls[at], least: rows[at][label], read: largest(rows[at]), where: whereIs(image, at) };
}

/** A place in words, as a part of the ink; ink of a few pixels across has no sides. */
function whereIs(image, at) {
  const most = Math.max(...image), inked = Array.from(image.keys()).filter((i) => image[i] >= most / 2);
  const third = (of) => {
    const all = inked.map(of), low = Math.min(...all), high = Math.max(...all);
    return high - low < 6 ? 1 : Math.max(0, Math.min(2, Math.floor(3 * (of(at) - low) / (high - low + 1))));
  };
  const row = third((i) => Math.floor(i / SIDE)), column = third((i) => i % SIDE);
  return [
    ["upper left part", "top", "upper right part"], ["left side", "middle", "right side"],
    ["lower left part", "bottom", "lower right part"],
  ][row][column];
}

/**
 * The fewest pixels found that turn the answer for `image` into `target`: {image, sure}, or null
 * where `ROUNDS` touches do not. Greedy: of all touches, the one that raises the target's log-odds
 * most; then touches and pixels that were not needed are taken back. `predict` computes a batch.
 */
export async function turned(image, probabilities, target, predict) {
  const judged = async (variants) => (await predict(variants)).map((row, i) => ({
    image: variants[i], odds: logOdds(row, target), sure: row[target], turned: largest(row) === target,
  }));
  let now = { image, odds: logOdds(probabilities, target), turned: false }, touches = [], good = [];
  for (let round = 0; !now.turned; round++) {
    if (round === ROUNDS) return null;
    const all = round % EACH === 0 || !good.length;
    const tried = (all ? TOUCHES : good).map((touch) => ({ touch, image: touched(now.image, touch) }))
      .filter((one) => one.image.some((value, i) => Math.abs(value - now.image[i]) > 63));
    if (!tried.length) return null;
    const found = (await judged(tried.map((one) => one.image))).map((one, i) => ({ ...one, touch: tried[i].touch }));
    found.sort((a, b) => b.turned - a.turned || (a.turned && changes(image, a.image) - changes(image, b.image)) || b.odds - a.odds);
    if (all) good = found.slice(0, BEST).map((one) => one.touch);
    if (!found[0].turned && found[0].odds < now.odds + 1e-6) {
      if (all) return null;
      good = []; // None of the best helps any more: try all.
      continue;
    }
    now = found[0];
    touches.push(now.touch);
  }
  while (touches.length > 1) {
    const without = touches.map((left) => touches.filter((one) => one !== left));
    const found = await judged(without.map((some) => some.reduce(touched, image)));
    const best = strongest(found);
    if (!best) break;
    [now, touches] = [best, without[found.indexOf(best)]];
  }
  for (;;) {
    const changed = Array.from(image.keys()).filter((i) => now.image[i] !== image[i]);
    if (changed.length < 2) return now;
    const back = (pixels) => Uint8Array.from(now.image, (value, i) => (pixels.includes(i) ? image[i] : value));
    // First each alone, then the easiest two, three, ... together: the most that the answer allows.
    const alone = await judged(changed.map((pixel) => back([pixel])));
    if (!strongest(alone)) return now;
    const order = changed.map((pixel, i) => ({ ...alone[i], pixel })).sort(easier).map((one) => one.pixel);
    const together = await judged(order.slice(1).map((_, i) => back(order.slice(0, i + 1))));
    now = together.findLast((one) => one.turned) ?? strongest(alone);
  }
}

const TOUCHES = Array.from({ length: 2 * (SIDE / TOUCH) ** 2 }, (_, i) => {
  const place = i >> 1, across = SIDE / TOUCH;
  return { at: TOUCH * (Math.floor(place / across) * SIDE + place % across), ink: i & 1 ? 255 : 0 };
});

function touched(image, { at, ink }) {
  const next = Uint8Array.from(image);
  for (let y = 0; y < TOUCH; y++) next.fill(ink, at + y * SIDE, at + y * SIDE + TOUCH);
  return next;
}

const easier = (a, b) => b.turned - a.turned || b.odds - a.odds;

const strongest = (found) => found.filter((one) => one.turned).sort(easier)[0];

const changes = (image, other) => image.reduce((sum, value, i) => sum + (value !== other[i]), 0);

/** The image, if there is one, in quiet ink, and on each pixel what `mark(context, pixel, cell)` draws there. */
export function paintWhy(canvas, image, mark) {
  const context = canvas.getContext("2d"), cell = canvas.width / SIDE, quiet = colour("quiet");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!image) return;
  for (let i = 0; i < PIXELS; i++) {
    context.setTransform(1, 0, 0, 1, cell * (i % SIDE), cell * Math.floor(i / SIDE));
    context.fillStyle = quiet;
    context.globalAlpha = 0.5 * image[i] / 255;
    context.fillRect(0, 0, cell, cell);
    context.globalAlpha = 1;
    mark?.(context, i, cell);
  }
  context.resetTransform();
}

/** Marks of `paintWhy`: the more the odds fall, or rise, the stronger. */
export function heatMarks({ falls }) {
  const most = Math.max(...falls.map(Math.abs), 1e-9), fall = colour("accent"), rise = colour("focus");
  return (context, i, cell) => {
    context.fillStyle = falls[i] > 0 ? fall : rise;
    context.globalAlpha = Math.min(1, Math.abs(falls[i]) / most);
    context.fillRect(0, 0, cell, cell);
  };
}

/** Marks of `paintWhy`: a plus on each pixel to add, a cross on each to rub out. */
export function changeMarks(image, other) {
  const [add, rub, line] = ["focus", "accent", "paper"].map(colour);
  return (context, i, cell) => {
    if (image[i] === other[i]) return;
    const added = other[i] > image[i], near = 0.22 * cell, far = cell - near, half = cell / 2;
    context.fillStyle = added ? add : rub;
    context.fillRect(0, 0, cell, cell);
    context.strokeStyle = line;
    context.lineWidth = cell / 7;
    context.beginPath();
    for (const [a, b, c, d] of added ? [[half, near, half, far], [near, half, far, half]] : [[near, near, far, far], [near, far, far, near]]) {
      context.moveTo(a, b);
      context.lineTo(c, d);
    }
    context.stroke();
  };
}
