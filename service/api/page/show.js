// Small things that both views use: elements, numbers, charts.

export const $ = (id) => document.getElementById(id);

export const on = (id, event, call) => $(id).addEventListener(event, call);

/** An element with attributes and children; text is never read as HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element) element[name] = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The `count` children of `place`; `create(index)` makes those that are missing. */
export function fit(place, count, create) {
  while (place.children.length > count) place.lastChild.remove();
  while (place.children.length < count) place.append(create(place.children.length));
  return [...place.children];
}

export const say = (id, text) => { $(id).textContent = text; };

/** Say something at the top of the page, or with "" nothing. */
export function note(text, bad = false) {
  const status = $("status");
  if (status.textContent !== text) status.textContent = text;
  status.hidden = !text;
  status.classList.toggle("bad", bad);
}

/** The bytes of a text in base64. */
export const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

export const percent = (part) => `${(100 * part).toFixed(1)} %`;

/** A time in milliseconds with its unit. */
export function duration(ms) {
  if (ms < 1) return `${Math.round(1000 * ms)} µs`;
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 2 : 1)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

export function count(value) {
  const units = [[1e9, " G"], [1e6, " M"], [1e4, " k"]];
  const [size, unit] = units.find(([size]) => value >= size) ?? [1, ""];
  if (size === 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return size === 1 ? `${Math.round(value * 10) / 10}` : `${(value / size).toFixed(2)}${unit}`;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Show `pixels`, a list of greys of `width` x `height`, on a canvas of that size. */
export function showGrey(canvas, pixels, width = 28, height = 28) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  pixels.forEach((value, i) => image.data.set([value, value, value, 255], 4 * i));
  context.putImageData(image, 0, 0);
}

/** Vertical bars of `values`, with some of their `labels` below. */
export function bars(canvas, values, labels) {
  const context = fresh(canvas), { width, height } = canvas, floor = height - 18;
  const most = Math.max(...values, 1e-9), step = width / values.length;
  context.fillStyle = colour("accent");
  values.forEach((value, i) => context.fillRect(i * step + 1, floor - value / most * (floor - 6), step - 2, value / most * (floor - 6)));
  axis(context, width, height, floor, labels, step);
}

/** Lines over time of `series`, {colour, values}; the newest value is at the right. */
export function lines(canvas, series, slots) {
  const context = fresh(canvas), { width, height } = canvas, floor = height - 18;
  const most = Math.max(1, ...series.flatMap((one) => one.values));
  for (const { values, colour: name } of series) {
    context.strokeStyle = colour(name);
    context.lineWidth = 2;
    context.beginPath();
    values.forEach((value, i) => {
      const x = width * (slots - values.length + i + 0.5) / slots, y = floor - value / most * (floor - 8);
      if (i) context.lineTo(x, y); else context.moveTo(x, y);
    });
    context.stroke();
  }
  axis(context, width, height, floor, [], 1);
  context.fillText(count(most), 4, 12);
  context.textAlign = "right";
  context.fillText("now", width - 4, height - 4);
}

/** A heat map: `columns` of values from bottom to top, and the names of some rows. */
export function heat(canvas, columns, slots, rows) {
  const context = fresh(canvas), { width, height } = canvas;
  const most = Math.max(...columns.flat(), 1e-9), step = width / slots;
  const high = height / Math.max(1, columns[0]?.length ?? 1);
  context.fillStyle = colour("accent");
  columns.forEach((values, i) => values.forEach((value, j) => {
    if (!value) return;
    context.globalAlpha = 0.15 + 0.85 * Math.sqrt(value / most);
    context.fillRect((slots - columns.length + i) * step, height - (j + 1) * high, Math.ceil(step), Math.ceil(high));
  }));
  context.globalAlpha = 1;
  context.fillStyle = colour("quiet");
  for (const [row, name] of rows) context.fillText(name, 4, height - (row + 0.5) * high + 4);
}

/** The context of an empty canvas with as many pixels as it has on the page. */
export function fresh(canvas) {
  canvas.width = canvas.clientWidth || canvas.width;
  const context = canvas.getContext("2d");
  context.font = "12px system-ui, sans-serif";
  context.textAlign = "left";
  return context;
}

function axis(context, width, height, floor, labels, step) {
  context.fillStyle = colour("line");
  context.fillRect(0, floor, width, 1);
  context.fillStyle = colour("quiet");
  for (const [i, name] of labels) context.fillText(name, Math.min(i * step + 2, width - 40), height - 4);
}
