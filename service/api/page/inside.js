// What each layer makes of an image, with what it has to do with cuDNN.

import { fit, fromBase64, make } from "./show.js";

/** Show the layers of an answer of /explain in `place`; `names` are those of the classes. */
export function showInside(place, layers, names) {
  const create = () => make("div", { className: "layer" }, make("h3"), make("p", { className: "note" }), make("canvas", { role: "img" }));
  fit(place, layers.length, create).forEach((row, i) => {
    const layer = layers[i], [title, text, canvas] = row.children;
    title.textContent = `${layer.name}: ${layer.kind}, ${layer.shape.join(" x ")}`;
    text.textContent = sentence(layer, layers, names);
    canvas.hidden = !layer.data && !layer.values;
    canvas.ariaLabel = title.textContent;
    if (!canvas.hidden) paint(canvas, layer);
  });
}

/** The bytes of a layer, 0 for its lowest value and 255 for its highest. */
function bytesOf({ data, values, low, high }) {
  return values ? values.map((value) => Math.round(255 * (value - low) / (high - low || 1)))
    : fromBase64(data);
}

const valuesOf = (layer) => layer.values ?? Array.from(bytesOf(layer), (byte) => layer.low + byte * (layer.high - layer.low) / 255);

/** Filters and maps as a row of small pictures, units as cells: a pixel each, which CSS enlarges. */
function paint(canvas, layer) {
  const { shape, kind } = layer, flat = shape.length === 1;
  const low = layer.low ?? Math.min(...layer.values), high = layer.high ?? Math.max(...layer.values);
  const bytes = bytesOf({ ...layer, low, high });
  const [tall, wide] = flat ? [1, 1] : shape.slice(-2), gap = flat ? 0 : 1;
  const maps = bytes.length / (tall * wide);
  const zoom = flat ? 14 : Math.max(2, Math.min(10, Math.round(56 / wide)));
  const across = Math.min(maps, Math.max(1, Math.floor(1060 / zoom / (wide + gap))));
  const width = across * (wide + gap), height = Math.ceil(maps / across) * (tall + gap);
  canvas.width = width;
  canvas.height = height;
  canvas.style.width = `${width * zoom}px`;
  const signed = kind === "filters" || kind === "logits";
  const most = Math.max(-low, high, 1e-9), bottom = Math.min(low, 0);
  const palette = Uint32Array.from({ length: 256 }, (_, byte) => {
    const value = low + byte * (high - low) / 255;
    const [red, green, blue] = signed ? diverging(value / most) : rising((value - bottom) / (high - bottom || 1));
    return (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
  });
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let map = 0, i = 0; map < maps; map++) {
    const left = (map % across) * (wide + gap), top = Math.floor(map / across) * (tall + gap);
    for (let y = 0; y < tall; y++) {
      for (let x = 0; x < wide; x++, i++) pixels[(top + y) * width + left + x] = palette[bytes[i]];
    }
  }
  context.putImageData(image, 0, 0);
}

const mix = (a, b, part) => a.map((value, i) => value + part * (b[i] - value));

function rising(part) { // Black, purple, orange, white.
  const stops = [[12, 10, 20], [98, 32, 104], [232, 96, 52], [255, 246, 220]];
  const at = Math.min(2, Math.floor(part * 3));
  return mix(stops[at], stops[at + 1], part * 3 - at);
}

const diverging = (part) => mix([238, 234, 226], part < 0 ? [24, 82, 168] : [178, 40, 16], Math.min(1, Math.abs(part)));

function sentence(layer, layers, names) {
  const { name, kind, shape } = layer;
  if (!layer.data && !layer.values) return "Too large to be sent.";
  const first = layers.find((one) => one.kind === "convolution")?.name === name;
  switch (kind) {
    case "filters":
      return `The ${shape[0]} filters that see the pixels, each ${shape[2]} × ${shape[3]}; blue is negative, red positive. In serving on a GPU, a kernel of this project reads them.`;
    case "convolution":
      return first
        ? `Each filter slid over the image, its bias added, negative sums cut to 0. On a GPU the service does this in a kernel of its own, together with the next convolution if there is one like it.`
        : `Each map is now a sum over all maps before it. On a GPU that is recent enough both convolutions are one kernel of this project, and the maps between them are never written to memory. In training this is cuDNN's work: one operation graph, run by the engine that was measured to be the fastest.`;
    case "pooling":
      return `Each map shrinks to ${shape[1]} × ${shape[2]}. On a GPU pooling is part of the kernel before, so that the larger maps are never written to memory.`;
    case "dense": {
      const values = valuesOf(layer);
      const strongest = values.map((value, i) => [value, i]).sort((a, b) => b[0] - a[0]).slice(0, 8);
      return `${shape[0]} units, each a weighted sum of everything before: one matrix product. For few images on a GPU it is a kernel of this project, for many cuBLAS's. The strongest: ${strongest.map(([value, i]) => `unit ${i} (${value.toFixed(2)})`).join(", ")}.`;
    }
    case "logits":
      return `One sum a class, before softmax: ${valuesOf(layer).map((value, i) => `${names[i] ?? i}: ${value.toFixed(1)}`).join(", ")}. On a GPU the last product and softmax are one kernel.`;
    default:
      return "";
  }
}
