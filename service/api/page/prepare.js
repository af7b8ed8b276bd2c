// Strokes -> the images that the network takes: 784 bytes each, 28 x 28, ink 255.
// The steps are those of service/pictures/picture.py, so that a drawing sent as a picture gives the
// same image; a test compares the two.

import { showGrey } from "./show.js";

export const SIDE = 28;
export const PIXELS = SIDE * SIDE;
export const SURFACE = 280; // Pixels of the surface on which strokes become ink.

const BOX = 20; // The longer side of a digit in the image.
const CENTRE = 14; // MNIST's centre of mass, as a pixel index.
export const PEN = 0.085; // Of the surface's side: about 2 of 28 pixels for a digit that fills it.
const FINEST = 0.02, FINE = 0.1; // The pen of several digits: at least, and of the tallest stroke's height.

const surface = document.createElement("canvas");
surface.width = surface.height = SURFACE;
const ink = surface.getContext("2d", { willReadFrequently: true });

/** Draw strokes, lists of points [x, y] in 0..1, each as a smooth line `pen` times as wide as usual. */
export function draw(context, strokes, side, colour, pen = 1) {
  context.strokeStyle = colour;
  context.lineWidth = pen * PEN * side;
  context.lineCap = context.lineJoin = "round";
  for (const points of strokes) {
    context.beginPath();
    context.moveTo(points[0][0] * side, points[0][1] * side);
    for (let i = 1; i < points.length - 1; i++) {
      const [a, b] = points[i], [c, d] = points[i + 1];
      context.quadraticCurveTo(a * side, b * side, (a + c) / 2 * side, (b + d) / 2 * side);
    }
    const [c, d] = points[points.length - 1];
    context.lineTo(c * side + 0.01, d * side); // A line of no length leaves no dot.
    context.stroke();
  }
}

/** The strokes of each of the `digits`, in reading order, and the `pen` that draws them: several small ones need a finer one. */
export function digitsOf(strokes) {
  let groups = [];
  const tallest = Math.max(0, ...strokes.map(boxOf).map(({ top, bottom }) => bottom - top));
  const pen = Math.max(FINEST, Math.min(PEN, FINE * tallest));
  for (const points of strokes) {
    let group = { strokes: [points], ...boxOf(points) };
    const apart = [];
    for (const other of groups) {
      if (belong(other, group, pen)) group = union(other, group); else apart.push(other);
    }
    groups = [...apart, group];
  }
  // A line of digits: those whose middles lie within the height of its first.
  groups.sort((a, b) => a.top - b.top);
  const lines = [];
  for (const group of groups) {
    const middle = (group.top + group.bottom) / 2;
    const line = lines.find((one) => one.some((other) => middle > other.top && middle < other.bottom));
    if (line) line.push(group); else lines.push([group]);
  }
  const digits = lines.flatMap((line) => line.sort((a, b) => a.left - b.left)).map((group) => group.strokes);
  return { digits, pen: digits.length > 1 ? pen / PEN : 1 };
}

/** The box around points. */
export function boxOf(points) {
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
}

function union(a, b) {
  return {
    strokes: [...a.strokes, ...b.strokes],
    left: Math.min(a.left, b.left), right: Math.max(a.right, b.right),
    top: Math.min(a.top, b.top), bottom: Math.max(a.bottom, b.bottom),
  };
}

/** Whether two groups of strokes are one digit: one lies over the other, or they touch with a `pen` of that width. */
function belong(a, b, pen) {
  const width = Math.min(a.right - a.left, b.right - b.left) + pen;
  const overlap = Math.min(a.right, b.right) - Math.max(a.left, b.left) + pen;
  const gap = Math.max(a.top, b.top) - Math.min(a.bottom, b.bottom) - pen;
  const height = Math.max(a.bottom - a.top, b.bottom - b.top, 2 * pen);
  if (overlap > width / 2 && gap < height / 4) return true;
  return a.strokes.some((first) => b.strokes.some((second) => touch(first, second, pen)));
}

function touch(first, second, pen) {
  return first.some(([x, y]) => second.some(([a, b]) => Math.hypot(x - a, y - b) < 0.7 * pen));
}

/** The image of one digit, Uint8Array(784); null if the strokes leave no ink. */
export function imageOf(strokes, pen = 1) {
  paint(strokes, pen);
  return normalised(redOf(SURFACE), SURFACE, SURFACE);
}

/** Strokes as a PNG, light ink on dark paper. */
export function pictureOf(strokes, pen = 1) {
  paint(strokes, pen);
  return new Promise((done) => surface.toBlob(done));
}

function paint(strokes, pen) {
  ink.fillStyle = "#000";
  ink.fillRect(0, 0, SURFACE, SURFACE);
  draw(ink, strokes, SURFACE, "#fff", pen);
}

/** Crop, scale and centre light ink on dark paper as MNIST was. */
export function normalised(grey, width, height) {
  let largest = 0;
  for (const value of grey) if (value > largest) largest = value;
  if (!largest) return null;
  let left = width, right = -1, top = height, bottom = -1;
  for (let y = 0, i = 0; y < height; y++) {
    for (let x = 0; x < width; x++, i++) {
      if (grey[i] > largest * 0.1) {
        if (x < left) left = x;
        if (x > right) right = x;
        if (y < top) top = y;
        bottom = y;
      }
    }
  }
  const wide = right - left + 1, tall = bottom - top + 1;
  const longer = Math.max(wide, tall);
  const scale = Math.abs(longer - BOX) <= 1 ? 1 : BOX / longer;
  const columns = Math.max(1, Math.round(wide * scale)), rows = Math.max(1, Math.round(tall * scale));
  // A margin of one pixel holds the faint edge of the ink.
  const filter = scale > 1 ? cubic : box;
  const patch = resized(grey, width, height, left, top, wide / columns, tall / rows, columns + 2, rows + 2, filter);
  const peak = patch.reduce((a, b) => Math.max(a, b), 0);
  const dark = patch.filter((value) => value > peak / 2).sort();
  const at = 0.9 * (dark.length - 1), below = Math.floor(at);
  const stroke = dark[below] + (at - below) * ((dark[below + 1] ?? dark[below]) - dark[below]);
  if (stroke < 230) for (let i = 0; i < patch.length; i++) patch[i] *= 255 / stroke;
  for (let i = 0; i < patch.length; i++) patch[i] = Math.max(0, Math.min(patch[i], 255));
  return centred(patch, columns + 2, rows + 2);
}

/** The grey image from one pixel of the result before its ink to one behind it, scaled. */
function resized(grey, width, height, left, top, stepX, stepY, columns, rows, filter) {
  const across = new Float32Array(height * columns), patch = new Float32Array(rows * columns);
  const margin = Math.ceil(Math.max(stepX, stepY));
  const xs = spans(left, stepX, columns, margin, filter), ys = spans(top, stepY, rows, margin, filter);
  for (let y = Math.max(ys[0].first, 0); y < Math.min(ys.at(-1).first + ys.at(-1).weights.length, height); y++) {
    xs.forEach(({ first, weights, total }, i) => {
      let sum = 0;
      for (let k = 0, x = first; k < weights.length; k++, x++) if (x >= 0 && x < width) sum += weights[k] * grey[y * width + x];
      across[y * columns + i] = sum / total;
    });
  }
  ys.forEach(({ first, weights, total }, j) => {
    for (let i = 0; i < columns; i++) {
      let sum = 0;
      for (let k = 0; k < weights.length; k++) sum += weights[k] * (across[(first + k) * columns + i] ?? 0); // None outside of the image.
      patch[j * columns + i] = sum / total;
    }
  });
  return patch;
}

// Pillow's filters BOX and BICUBIC, of the distance in pixels.
const box = (x) => (x > -0.5 && x <= 0.5 ? 1 : 0);
function cubic(x) {
  const far = Math.abs(x);
  if (far < 1) return (1.5 * far - 2.5) * far * far + 1;
  return far < 2 ? -0.5 * (((far - 5) * far + 8) * far - 4) : 0;
}

/** The weights of the pixels for each of the result, as Pillow has them: the part to scale has single precision. */
function spans(start, step, count, margin, filter) {
  const from = Math.fround(start + margin - step), to = Math.fround(start + margin + (count - 1) * step);
  const scale = Math.fround(to - from) / count, wide = Math.max(scale, 1);
  const end = start + Math.round((count - 2) * step) + 2 * margin; // Nothing beyond the margin has a weight.
  return Array.from({ length: count }, (_, i) => {
    const centre = from + (i + 0.5) * scale, weights = [];
    let first, total = 0;
    for (let at = Math.max(start, Math.floor(centre - 2 * wide)); at < Math.min(end, centre + 2 * wide); at++) {
      const weight = filter((at - centre + 0.5) / wide);
      if (!weight) continue; // Only before the first and after the last.
      first ??= at - margin;
      weights.push(weight);
      total += weight;
    }
    return { first, weights, total };
  });
}

function centred(patch, columns, rows) {
  let total = 0, down = 0, across = 0;
  patch.forEach((value, i) => {
    total += value;
    down += value * Math.floor(i / columns);
    across += value * (i % columns);
  });
  const within = (size, sum) => Math.min(Math.max(Math.floor(CENTRE - sum / total + 0.5), -1), SIDE + 1 - size);
  const top = within(rows, down), left = within(columns, across);
  const image = new Uint8Array(PIXELS);
  patch.forEach((value, i) => {
    const y = top + Math.floor(i / columns), x = left + i % columns;
    if (y >= 0 && y < SIDE && x >= 0 && x < SIDE) image[y * SIDE + x] = Math.round(value);
  });
  return image;
}

/** An image shifted, turned, and made noisy; amounts of 0 leave it as it is. */
export function broken(image, { right, down, turn, noise }) {
  let pixels = image;
  if (right || down || turn) {
    const small = document.createElement("canvas");
    showGrey(small, image);
    ink.setTransform(1, 0, 0, 1, 0, 0);
    ink.fillStyle = "#000";
    ink.fillRect(0, 0, SIDE, SIDE);
    ink.translate(SIDE / 2 + right, SIDE / 2 + down);
    ink.rotate(turn * Math.PI / 180);
    ink.drawImage(small, -SIDE / 2, -SIDE / 2);
    ink.setTransform(1, 0, 0, 1, 0, 0);
    pixels = redOf(SIDE);
  }
  if (!noise) return Uint8Array.from(pixels);
  let seed = 1; // The same noise each time: only the drawing changes the answer.
  const uniform = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
  return Uint8ClampedArray.from(pixels, (value) => value + 255 * noise * normal());
}

/** The red of the surface's first `side` rows and columns. */
function redOf(side) {
  const { data } = ink.getImageData(0, 0, side, side);
  const red = new Uint8Array(side * side);
  for (let i = 0; i < red.length; i++) red[i] = data[4 * i];
  return red;
}
