// `POST /predict` by fetch, as a browser has it: a picture's file is the body.
import { readFile } from "node:fs/promises";

const service = process.argv[2] ?? "http://127.0.0.1:8000";
const picture = await readFile(new URL("../docs/images/seven.png", import.meta.url));

const answer = await fetch(`${service}/predict`, {
  method: "POST",
  headers: { "Content-Type": "image/png" },
  body: picture,
  signal: AbortSignal.timeout(5000),
});
const document = await answer.json();
if (!answer.ok) throw new Error(`${answer.status}: ${document.error.message}`);
const [{ label, confidence }] = document.predictions;
console.log(label, confidence);
