// Makes the calls of a JSON file with @grpc/grpc-js, one after another, and prints their outcomes as
// JSON. The messages are bytes that the caller has encoded, so that no generated code is needed.
"use strict";
const { readFileSync } = require("node:fs");
const grpc = require("@grpc/grpc-js");

const [address, path] = process.argv.slice(2);
const same = (bytes) => bytes;

function make(client, { path, request, timeout_ms }) {
  return new Promise((resolve) => {
    const options = { deadline: Date.now() + timeout_ms };
    const message = Buffer.from(request, "base64");
    client.makeUnaryRequest(path, same, same, message, new grpc.Metadata(), options, (error, reply) =>
      resolve({
        code: error ? error.code : 0,
        message: error ? error.details : "",
        reply: reply ? reply.toString("base64") : "",
      }),
    );
  });
}

async function main() {
  const client = new grpc.Client(address, grpc.credentials.createInsecure());
  const outcomes = [];
  for (const call of JSON.parse(readFileSync(path))) outcomes.push(await make(client, call));
  client.close();
  console.log(JSON.stringify(outcomes));
}

main();
